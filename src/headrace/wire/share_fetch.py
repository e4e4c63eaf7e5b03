"""ShareFetch responses, versions 1 and 2, by hand: as in `fetch`, a list of parts, in which the records of a partition
are a payload of their own, untouched. Both versions have the same fields, and both are flexible.

    throttle_time_ms int32, error_code int16, error_message, acquisition_lock_timeout_ms int32, topics, node_endpoints
    topic:     topic_id uuid, partitions
    partition: index int32, error_code int16, error_message, acknowledge_error_code int16, acknowledge_error_message,
               leader_id int32, leader_epoch int32, records, acquired
    acquired:  first_offset int64, last_offset int64, delivery_count int16

The records are whole batches; of these the member was given what `acquired` names, and no more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from headrace.wire.fetch import NO_TAGS
from headrace.wire.varint import write_uvarint

NOBODY: Final = (-1, -1)
"""As leader and epoch: not told."""

Acquired = tuple[int, int, int]
"""First offset, last offset, delivery count."""
NodeEndpoint = tuple[int, str, int, str | None]
"""Id, host, port, rack."""


class SharedPartition(NamedTuple):
    """One partition of a response. `payload` becomes a part of its own, unless `payload_bytes` is 0."""

    partition: int
    error_code: int = 0
    error_message: str | None = None
    acknowledge_error_code: int = 0
    acknowledge_error_message: str | None = None
    current_leader: tuple[int, int] = NOBODY
    payload: Any = ()
    payload_bytes: int = 0
    acquired: Sequence[Acquired] = ()


ResponseTopic = tuple[bytes, Sequence[SharedPartition]]

_head = struct.Struct(">ixih").pack
_code = struct.Struct(">h").pack
_number = struct.Struct(">i").pack
_partition = struct.Struct(">ih").pack
_leader = struct.Struct(">iix").pack
_acquired = struct.Struct(">qqhx").pack


def encode_response(
    correlation_id: int,
    error_code: int,
    error_message: str | None,
    lock_timeout_ms: int,
    topics: Sequence[ResponseTopic],
    endpoints: Sequence[NodeEndpoint] = (),
) -> list[Any]:
    """A complete response frame in parts; the first begins with the length of all of them together."""
    parts: list[Any] = []
    total = 0
    pending = [_head(correlation_id, 0, error_code), _text(error_message), _number(lock_timeout_ms)]
    pending.append(write_uvarint(len(topics) + 1))
    for topic_id, partitions in topics:
        pending += (topic_id, write_uvarint(len(partitions) + 1))
        for row in partitions:
            pending += (_partition(row.partition, row.error_code), _text(row.error_message))
            pending += (_code(row.acknowledge_error_code), _text(row.acknowledge_error_message))
            pending += (_leader(*row.current_leader), write_uvarint(row.payload_bytes + 1))
            if row.payload_bytes:
                encoded = b"".join(pending)
                total += len(encoded) + row.payload_bytes
                parts += (encoded, row.payload)
                pending = []
            pending.append(write_uvarint(len(row.acquired) + 1))
            pending += (_acquired(*each) for each in row.acquired)
            pending.append(NO_TAGS)
        pending.append(NO_TAGS)
    pending.append(write_uvarint(len(endpoints) + 1))
    for node_id, host, port, rack in endpoints:
        pending += (_number(node_id), _text(host), _number(port), _text(rack), NO_TAGS)
    pending.append(NO_TAGS)
    encoded = b"".join(pending)
    parts.append(encoded)
    parts[0] = (total + len(encoded)).to_bytes(4, "big") + parts[0]
    return parts


def _text(text: str | None) -> bytes:
    if text is None:
        return b"\0"
    encoded = text.encode()
    return write_uvarint(len(encoded) + 1) + encoded
