"""Fetch requests and responses, versions 4 to 18, by hand.

Versions: 5 adds the log start offset, 7 fetch sessions and forgotten topics, 9 the leader epoch, 11 the rack and
the preferred replica, 12 is flexible and adds the last fetched epoch, 13 names topics by UUID, 15 moves the replica
into a tagged field, 16 adds node endpoints to the response, 17 and 18 tagged fields that only followers send.

A response is a list of parts: encoded bytes, and between them the payloads of the partitions, whatever they are,
untouched. Whoever sends the parts decides how; here only the payloads' lengths matter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from headrace.errors import Unsupported
from headrace.wire import codec
from headrace.wire.api import FETCH, KAFKA_APIS
from headrace.wire.decoder import MAX_ELEMENTS
from headrace.wire.message import Message
from headrace.wire.varint import Refused, read_uvarint, too_long, too_many, write_uvarint

MIN_VERSION: Final = KAFKA_APIS[FETCH].min_version
MAX_VERSION: Final = KAFKA_APIS[FETCH].max_version
_WITH_LOG_START: Final = 5
_WITH_SESSION: Final = 7
_WITH_EPOCH: Final = 9
_WITH_RACK: Final = 11
_FLEXIBLE: Final = KAFKA_APIS[FETCH].flexible_from
_BY_TOPIC_ID: Final = 13
_REPLICA_IN_TAG: Final = 15

NO_TAGS: Final = b"\0"
CONSUMER: Final = -1
"""The replica id of a consumer."""

RequestPartition = tuple[int, int, int, int, int, int]
"""Partition, current leader epoch, fetch offset, last fetched epoch, log start offset, partition max bytes."""
RequestTopic = tuple[str | None, bytes | None, list[RequestPartition]]
ForgottenTopic = tuple[str | None, bytes | None, list[int]]


class FetchRequest(NamedTuple):
    """Fields that the version does not carry have the protocol's defaults: -1, "" and empty."""

    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[RequestTopic]
    forgotten: list[ForgottenTopic]
    rack_id: str


class FetchedPartition(NamedTuple):
    """One partition of a response. `payload` becomes a part of its own, unless `payload_bytes` is 0."""

    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted_transactions: Sequence[tuple[int, int]] | None
    """(producer id, first offset) of each."""
    preferred_read_replica: int
    payload: Any
    payload_bytes: int
    tags: bytes = NO_TAGS
    """The tagged fields, from `partition_tags`; versions before 12 leave them out."""


ResponseTopic = tuple[str | None, bytes | None, list[FetchedPartition]]

# Half the cost of calling the named tuple itself.
_new = tuple.__new__

_short = struct.Struct(">h").unpack_from
_int = struct.Struct(">i").unpack_from

_head_v4 = struct.Struct(">iiiib")
_head_v7 = struct.Struct(">iiiibii")
_head_v12 = struct.Struct(">iiibii")
_partition_v4 = struct.Struct(">iqi")
_partition_v5 = struct.Struct(">iqqi")
_partition_v9 = struct.Struct(">iiqqi")
_partition_v12 = struct.Struct(">iiqiqiB")


def decode(version: int, view: memoryview, pos: int, end: int) -> FetchRequest:
    """The request body in `view[pos:end]`.

    What is not read here, tagged fields and malformed requests, is left to the compiled codec.
    """
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise Unsupported(f"fetch version {version}: versions {MIN_VERSION} to {MAX_VERSION} are served")
    try:
        # Reads beyond `end` that stay inside the view are harmless: positions only grow, and this check is exact.
        request, after = (_decode_flexible if version >= _FLEXIBLE else _decode_legacy)(version, view, pos, end)
        if after == end:
            return request
    except (Refused, struct.error, IndexError, UnicodeDecodeError):
        pass
    return _from_message(version, codec.decode_request(FETCH, version, view[:end], pos))


def _from_message(version: int, message: Message) -> FetchRequest:
    def key(topic: Message) -> tuple[str | None, bytes | None]:
        return (None, topic.topic_id) if version >= _BY_TOPIC_ID else (topic.topic, None)

    def row(p: Message) -> RequestPartition:
        epochs = p.current_leader_epoch, p.fetch_offset, p.last_fetched_epoch
        return (p.partition, *epochs, p.log_start_offset, p.partition_max_bytes)

    return FetchRequest(
        message.replica_state.replica_id if version >= _REPLICA_IN_TAG else message.replica_id,
        message.max_wait_ms,
        message.min_bytes,
        message.max_bytes,
        message.isolation_level,
        message.session_id,
        message.session_epoch,
        [(*key(topic), [row(p) for p in topic.partitions]) for topic in message.topics],
        [(*key(topic), topic.partitions) for topic in message.forgotten_topics_data],
        message.rack_id,
    )


def _decode_flexible(version: int, view: memoryview, pos: int, end: int) -> tuple[FetchRequest, int]:
    replica_id = CONSUMER
    if version < _REPLICA_IN_TAG:
        (replica_id,) = _int(view, pos)
        pos += 4
    head = _head_v12.unpack_from(view, pos)
    pos += _head_v12.size
    by_id = version >= _BY_TOPIC_ID
    count, pos = _compact_count(view, pos, end, 3)
    left = MAX_ELEMENTS - count
    topics: list[RequestTopic] = []
    for _ in range(count):
        name, topic_id, pos = _compact_topic(by_id, view, pos, end)
        count, pos = _compact_count(view, pos, end, _partition_v12.size)
        left -= count
        stop = pos + count * _partition_v12.size
        if count == 1:
            row = _partition_v12.unpack_from(view, pos)
            untagged = [] if row[6] else [row[:6]]
        else:
            untagged = [row[:6] for row in _partition_v12.iter_unpack(view[pos:stop]) if not row[6]]
        if left < 0 or view[stop] or len(untagged) != count:
            raise Refused("too many partitions or a tagged field")
        topics.append((name, topic_id, untagged))
        pos = stop + 1
    # Neither forgotten topics, nor a rack, nor tagged fields: what most consumers send.
    if pos + 3 == end and view[pos] == view[pos + 1] == 1 and not view[pos + 2]:
        return _new(FetchRequest, (replica_id, *head, topics, [], "")), end
    count, pos = _compact_count(view, pos, end, 3)
    forgotten: list[ForgottenTopic] = []
    for _ in range(count):
        name, topic_id, pos = _compact_topic(by_id, view, pos, end)
        count, pos = _compact_count(view, pos, end, 4)
        forgotten.append((name, topic_id, list(struct.unpack_from(f">{count}i", view, pos))))
        pos += 4 * count
        if view[pos]:
            raise Refused("a tagged field")
        pos += 1
    rack_id, pos = _compact_string(view, pos, end)
    if view[pos]:
        raise Refused("a tagged field")
    return _new(FetchRequest, (replica_id, *head, topics, forgotten, rack_id)), pos + 1


def _compact_count(view: memoryview, pos: int, end: int, least_bytes: int) -> tuple[int, int]:
    count = view[pos]
    pos += 1
    if count > 127:
        count, pos = read_uvarint(view, pos - 1)
    count -= 1
    if count < 0 or count * least_bytes > end - pos or count > MAX_ELEMENTS:
        raise too_many(count, end - pos)
    return count, pos


def _compact_string(view: memoryview, pos: int, end: int) -> tuple[str, int]:
    length = view[pos]
    pos += 1
    if length > 127:
        length, pos = read_uvarint(view, pos - 1)
    stop = pos + length - 1
    if length == 0 or stop > end:
        raise too_long(length - 1, end - pos)
    return str(view[pos:stop], "utf-8"), stop


def _compact_topic(by_id: bool, view: memoryview, pos: int, end: int) -> tuple[str | None, bytes | None, int]:
    if not by_id:
        name, pos = _compact_string(view, pos, end)
        return name, None, pos
    if end - pos < 16:
        raise too_long(16, end - pos)
    return None, bytes(view[pos : pos + 16]), pos + 16


def _decode_legacy(version: int, view: memoryview, pos: int, end: int) -> tuple[FetchRequest, int]:
    with_session = version >= _WITH_SESSION
    layout = _head_v7 if with_session else _head_v4
    head = layout.unpack_from(view, pos)
    pos += layout.size
    if not with_session:
        head += (0, -1)
    layout = _partition_layout(version)
    count, pos = _count(view, pos, end, 6)
    left = MAX_ELEMENTS - count
    topics: list[RequestTopic] = []
    for _ in range(count):
        name, pos = _string(view, pos, end)
        count, pos = _count(view, pos, end, layout.size)
        left -= count
        if left < 0:
            raise too_many(count, end - pos)
        stop = pos + count * layout.size
        rows = (layout.unpack_from(view, pos),) if count == 1 else layout.iter_unpack(view[pos:stop])
        pos = stop
        partitions: list[RequestPartition]
        if version >= _WITH_EPOCH:
            partitions = [(index, epoch, offset, -1, start, limit) for index, epoch, offset, start, limit in rows]
        elif version >= _WITH_LOG_START:
            partitions = [(index, -1, offset, -1, start, limit) for index, offset, start, limit in rows]
        else:
            partitions = [(index, -1, offset, -1, -1, limit) for index, offset, limit in rows]
        topics.append((name, None, partitions))
    forgotten: list[ForgottenTopic] = []
    if with_session:
        count, pos = _count(view, pos, end, 6)
        for _ in range(count):
            name, pos = _string(view, pos, end)
            count, pos = _count(view, pos, end, 4)
            forgotten.append((name, None, list(struct.unpack_from(f">{count}i", view, pos))))
            pos += 4 * count
    rack_id = ""
    if version >= _WITH_RACK:
        rack_id, pos = _string(view, pos, end)
    return _new(FetchRequest, (*head, topics, forgotten, rack_id)), pos


def _partition_layout(version: int) -> struct.Struct:
    if version >= _WITH_EPOCH:
        return _partition_v9
    return _partition_v5 if version >= _WITH_LOG_START else _partition_v4


def _count(view: memoryview, pos: int, end: int, least_bytes: int) -> tuple[int, int]:
    (count,) = _int(view, pos)
    pos += 4
    if count < 0 or count * least_bytes > end - pos or count > MAX_ELEMENTS:
        raise too_many(count, end - pos)
    return count, pos


def _string(view: memoryview, pos: int, end: int) -> tuple[str, int]:
    (length,) = _short(view, pos)
    pos += 2
    if not 0 <= length <= end - pos:
        raise too_long(length, end - pos)
    return str(view[pos : pos + length], "utf-8"), pos + length


def encode_response(
    version: int,
    correlation_id: int,
    throttle_ms: int,
    error_code: int,
    session_id: int,
    topics: Sequence[ResponseTopic],
    tags: bytes = NO_TAGS,
) -> list[Any]:
    """A complete response frame in parts; the first begins with the length of all of them together.

    `tags` are the tagged fields of the response, from `response_tags`; versions before 12 leave them out.
    """
    parts: list[Any] = []
    if version >= _FLEXIBLE:
        head = _response_head_flexible(correlation_id, throttle_ms, error_code, session_id)
        total = _write_flexible(parts, head, version >= _BY_TOPIC_ID, topics, tags)
    else:
        if version >= _WITH_SESSION:
            head = _response_head(correlation_id, throttle_ms, error_code, session_id, len(topics))
        else:
            head = _response_head_v4(correlation_id, throttle_ms, len(topics))
        total = _write_legacy(parts, head, version, topics)
    parts[0] = total.to_bytes(4, "big") + parts[0]
    return parts


_response_head_flexible = struct.Struct(">ixihi").pack
_response_head = struct.Struct(">iihii").pack
_response_head_v4 = struct.Struct(">iii").pack
_fetched_v4 = struct.Struct(">ihqqi").pack
_fetched_v5 = struct.Struct(">ihqqqi").pack
_fetched_v12 = struct.Struct(">ihqqq").pack
_fetched_whole_v12 = struct.Struct(">ihqqqBi").pack
_aborted = struct.Struct(">qq").pack
_aborted_v12 = struct.Struct(">qqx").pack
_pack_int = struct.Struct(">i").pack


def _write_flexible(parts: list[Any], head: bytes, by_id: bool, topics: Sequence[ResponseTopic], tags: bytes) -> int:
    """Fill `parts`; answers the bytes of all of them."""
    pending = [head, write_uvarint(len(topics) + 1)]
    total = 0
    for name, topic_id, partitions in topics:
        if by_id:
            assert topic_id is not None, "version 13 and later name topics by UUID"
            pending += (topic_id, write_uvarint(len(partitions) + 1))
        else:
            encoded = (name or "").encode()
            pending += (write_uvarint(len(encoded) + 1), encoded, write_uvarint(len(partitions) + 1))
        for (
            index,
            error,
            watermark,
            stable,
            start,
            aborted,
            preferred,
            payload,
            payload_bytes,
            inner_tags,
        ) in partitions:
            if not aborted:
                none = 0 if aborted is None else 1
                pending.append(_fetched_whole_v12(index, error, watermark, stable, start, none, preferred))
            else:
                pending += (_fetched_v12(index, error, watermark, stable, start), write_uvarint(len(aborted) + 1))
                pending += (_aborted_v12(producer_id, first_offset) for producer_id, first_offset in aborted)
                pending.append(_pack_int(preferred))
            pending.append(write_uvarint(payload_bytes + 1))
            if payload_bytes:
                encoded = b"".join(pending)
                total += len(encoded) + payload_bytes
                parts += (encoded, payload)
                pending = [inner_tags]
            else:
                pending.append(inner_tags)
        pending.append(NO_TAGS)
    pending.append(tags)
    encoded = b"".join(pending)
    parts.append(encoded)
    return total + len(encoded)


def _write_legacy(parts: list[Any], head: bytes, version: int, topics: Sequence[ResponseTopic]) -> int:
    """Fill `parts`; answers the bytes of all of them."""
    pending = [head]
    total = 0
    for name, _, partitions in topics:
        encoded = (name or "").encode()
        pending += (len(encoded).to_bytes(2, "big"), encoded, _pack_int(len(partitions)))
        for index, error, watermark, stable, start, aborted, preferred, payload, payload_bytes, _ in partitions:
            count = -1 if aborted is None else len(aborted)
            if version >= _WITH_LOG_START:
                pending.append(_fetched_v5(index, error, watermark, stable, start, count))
            else:
                pending.append(_fetched_v4(index, error, watermark, stable, count))
            if aborted:
                pending += (_aborted(producer_id, first_offset) for producer_id, first_offset in aborted)
            if version >= _WITH_RACK:
                pending.append(_pack_int(preferred))
            pending.append(_pack_int(payload_bytes))
            if payload_bytes:
                encoded = b"".join(pending)
                total += len(encoded) + payload_bytes
                parts += (encoded, payload)
                pending = []
    encoded = b"".join(pending)
    if encoded or not parts:
        parts.append(encoded)
    return total + len(encoded)


def partition_tags(
    diverging_epoch: tuple[int, int] | None = None,
    current_leader: tuple[int, int] | None = None,
    snapshot_id: tuple[int, int] | None = None,
) -> bytes:
    """Tagged fields of a partition: (epoch, end offset), (leader id, epoch), (end offset, epoch)."""
    fields = []
    if diverging_epoch is not None:
        fields.append(b"\x00\x0d" + struct.pack(">iqx", *diverging_epoch))
    if current_leader is not None:
        fields.append(b"\x01\x09" + struct.pack(">iix", *current_leader))
    if snapshot_id is not None:
        fields.append(b"\x02\x0d" + struct.pack(">qix", *snapshot_id))
    return bytes((len(fields),)) + b"".join(fields)


def response_tags(node_endpoints: Sequence[tuple[int, str, int, str | None]]) -> bytes:
    """Tagged fields of a response of version 16 or later: (node id, host, port, rack) of each current leader."""
    if not node_endpoints:
        return NO_TAGS
    body = write_uvarint(len(node_endpoints) + 1)
    for node_id, host, port, rack in node_endpoints:
        name = host.encode()
        body += struct.pack(">i", node_id) + write_uvarint(len(name) + 1) + name + struct.pack(">i", port)
        place = b"" if rack is None else rack.encode()
        body += (b"\0" if rack is None else write_uvarint(len(place) + 1) + place) + NO_TAGS
    return b"\x01\x00" + write_uvarint(len(body)) + body
