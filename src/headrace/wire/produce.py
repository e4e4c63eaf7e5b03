"""Produce requests and responses, versions 3 to 13, by hand: the hottest messages of all.

Versions: 5 adds the log start offset to the response, 8 record errors and an error message, 9 is flexible,
10 adds tagged fields to the response (only `encode_elsewhere` has them), 13 names topics by UUID.

Records are slices of the view, never copied. What these functions refuse, the compiled codec refuses too: it is
asked for the error, so that one place words it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from headrace.errors import ProtocolError, Unsupported
from headrace.wire import codec
from headrace.wire.api import KAFKA_APIS, PRODUCE
from headrace.wire.codec import write_response
from headrace.wire.decoder import MAX_ELEMENTS
from headrace.wire.message import Message
from headrace.wire.varint import Refused, read_uvarint, skip_tags, too_long, too_many, write_uvarint

MIN_VERSION: Final = KAFKA_APIS[PRODUCE].min_version
MAX_VERSION: Final = KAFKA_APIS[PRODUCE].max_version
_WITH_LOG_START: Final = 5
_WITH_MESSAGE: Final = 8
_FLEXIBLE: Final = KAFKA_APIS[PRODUCE].flexible_from
WITH_LEADERS: Final = 10
_BY_TOPIC_ID: Final = 13

RequestTopic = tuple[str | None, bytes | None, list[tuple[int, memoryview | None]]]
"""Name, or UUID from version 13 on; then (partition, records) of each partition."""
RecordErrors = Sequence[tuple[int, str | None]]
"""Place in the batch of each record that is wrong, rising, and what is wrong with it (KIP-467)."""
ResponsePartition = tuple[int, int, int, int, int, str | None, RecordErrors]
"""Partition, error code, base offset, log append time in ms or -1, log start offset, error message, record errors."""
ResponseTopic = tuple[str | None, bytes | None, list[ResponsePartition]]


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[RequestTopic]


# Least bytes of a topic and of a partition in a request, by which their counts are bounded.
_TOPIC_BYTES: Final = 6
_PARTITION_BYTES: Final = 8
_FLEXIBLE_TOPIC_BYTES: Final = 3
_FLEXIBLE_PARTITION_BYTES: Final = 6

_short = struct.Struct(">h").unpack_from
_int = struct.Struct(">i").unpack_from
_index_length = struct.Struct(">ii").unpack_from
_acks_timeout_count = struct.Struct(">hii").unpack_from
_compact_head = struct.Struct(">BhiB").unpack_from
_compact_acks_timeout_count = struct.Struct(">hiB").unpack_from
_compact_id_count = struct.Struct(">16sB").unpack_from
_compact_index_length = struct.Struct(">iB").unpack_from

_lone_legacy_head = struct.Struct(">hhiih").unpack_from
_LONE_LEGACY_HEAD_BYTES: Final = struct.calcsize(">hhiih")
_lone_legacy_partition = struct.Struct(">iii").unpack_from
_LONE_LEGACY_PARTITION_BYTES: Final = struct.calcsize(">iii")
_lone_by_id = struct.Struct(">BhiB16sBiB").unpack_from
_LONE_BY_ID_BYTES: Final = struct.calcsize(">BhiB16sBiB")
_lone_head = struct.Struct(">BhiBB").unpack_from
_LONE_HEAD_BYTES: Final = struct.calcsize(">BhiBB")
_lone_partition = struct.Struct(">BiB").unpack_from
_LONE_PARTITION_BYTES: Final = struct.calcsize(">BiB")
# Half the cost of calling the named tuple itself.
_new = tuple.__new__


def decode(version: int, view: memoryview, pos: int, end: int) -> ProduceRequest:
    """The request body in `view[pos:end]`."""
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise Unsupported(f"produce version {version}: versions {MIN_VERSION} to {MAX_VERSION} are served")
    try:
        if version >= _FLEXIBLE:
            by_id = version >= _BY_TOPIC_ID
            return _decode_lone(by_id, view, pos, end) or _decode_flexible(by_id, view, pos, end)
        return _decode_lone_legacy(view, pos, end) or _decode_legacy(view, pos, end)
    except (Refused, struct.error, IndexError, UnicodeDecodeError) as error:
        codec.decode_request(PRODUCE, version, view[:end], pos)
        raise ProtocolError(f"produce v{version} request of {end - pos} bytes: {error}") from None


def _decode_lone(by_id: bool, view: memoryview, pos: int, end: int) -> ProduceRequest | None:
    """One topic with one partition, with neither transactional id nor tags; None when it is anything else."""
    if by_id:
        if end - pos < _LONE_BY_ID_BYTES:
            return None
        id_length, acks, timeout_ms, topics, topic_id, partitions, index, length = _lone_by_id(view, pos)
        start = pos + _LONE_BY_ID_BYTES
        name = None
    else:
        if end - pos < _LONE_HEAD_BYTES:
            return None
        id_length, acks, timeout_ms, topics, name_length = _lone_head(view, pos)
        pos += _LONE_HEAD_BYTES
        stop = pos + name_length - 1
        start = stop + _LONE_PARTITION_BYTES
        if id_length or topics != 2 or not 0 < name_length < 128 or start > end:
            return None
        name = str(view[pos:stop], "utf-8")
        topic_id = None
        partitions, index, length = _lone_partition(view, stop)
    if id_length or topics != 2 or partitions != 2:
        return None
    if length > 127:
        length, start = read_uvarint(view, start - 1)
    if length == 0:
        return None
    stop = start + length - 1
    # The tags of partition, topic and request, all empty, are the next three bytes.
    if stop + 3 > end or view[stop] or view[stop + 1] or view[stop + 2]:
        return None
    return _new(ProduceRequest, (None, acks, timeout_ms, [(name, topic_id, [(index, view[start:stop])])]))


def _decode_flexible(by_id: bool, view: memoryview, pos: int, end: int) -> ProduceRequest:
    # Reads beyond `end` that stay inside the view are harmless: positions only grow, and the last check is exact.
    id_length, acks, timeout_ms, count = _compact_head(view, pos)
    transactional_id = None
    pos += 8
    if id_length:
        id_length, pos = read_uvarint(view, pos - 8)
        # A null may be written in more bytes than it needs.
        stop = pos + max(0, id_length - 1)
        if stop > end:
            raise too_long(id_length - 1, end - pos)
        if id_length:
            transactional_id = str(view[pos:stop], "utf-8")
        acks, timeout_ms, count = _compact_acks_timeout_count(view, stop)
        pos = stop + 7
    if count > 127:
        count, pos = read_uvarint(view, pos - 1)
    if not 0 < count <= (end - pos) // _FLEXIBLE_TOPIC_BYTES + 1:
        raise too_many(count - 1, end - pos)
    left = MAX_ELEMENTS - count
    topics: list[RequestTopic] = []
    for _ in range(count - 1):
        name = topic_id = None
        if by_id:
            topic_id, count = _compact_id_count(view, pos)
            pos += 17
        else:
            length = view[pos]
            pos += 1
            if length > 127:
                length, pos = read_uvarint(view, pos - 1)
            stop = pos + length - 1
            if length == 0 or stop > end:
                raise too_long(length - 1, end - pos)
            name = str(view[pos:stop], "utf-8")
            count = view[stop]
            pos = stop + 1
        if count > 127:
            count, pos = read_uvarint(view, pos - 1)
        left -= count
        if not 0 < count <= (end - pos) // _FLEXIBLE_PARTITION_BYTES + 1 or left < 0:
            raise too_many(count - 1, end - pos)
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(count - 1):
            index, length = _compact_index_length(view, pos)
            pos += 5
            if length > 127:
                more = view[pos]
                if more < 128:
                    length += (more << 7) - 128
                    pos += 1
                else:
                    length, pos = read_uvarint(view, pos - 1)
            if length:
                stop = pos + length - 1
                if stop > end:
                    raise too_long(length - 1, end - pos)
                partitions.append((index, view[pos:stop]))
                pos = stop
            else:
                partitions.append((index, None))
            pos = skip_tags(view, pos) if view[pos] else pos + 1
        topics.append((name, topic_id, partitions))
        pos = skip_tags(view, pos) if view[pos] else pos + 1
    pos = skip_tags(view, pos) if view[pos] else pos + 1
    if pos > end:
        raise Refused("the last field is cut short")
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _decode_lone_legacy(view: memoryview, pos: int, end: int) -> ProduceRequest | None:
    """As `_decode_lone`, for versions before 9."""
    if end - pos < _LONE_LEGACY_HEAD_BYTES:
        return None
    id_length, acks, timeout_ms, topics, name_length = _lone_legacy_head(view, pos)
    pos += _LONE_LEGACY_HEAD_BYTES
    stop = pos + name_length
    start = stop + _LONE_LEGACY_PARTITION_BYTES
    if id_length != -1 or topics != 1 or name_length < 0 or start > end:
        return None
    partitions, index, length = _lone_legacy_partition(view, stop)
    if partitions != 1 or not 0 <= length <= end - start:
        return None
    name = str(view[pos:stop], "utf-8")
    records = view[start : start + length]
    return _new(ProduceRequest, (None, acks, timeout_ms, [(name, None, [(index, records)])]))


def _decode_legacy(view: memoryview, pos: int, end: int) -> ProduceRequest:
    (length,) = _short(view, pos)
    pos += 2
    transactional_id = None
    if length >= 0:
        if length > end - pos:
            raise too_long(length, end - pos)
        transactional_id = str(view[pos : pos + length], "utf-8")
        pos += length
    elif length != -1:
        raise too_long(length, end - pos)
    acks, timeout_ms, count = _acks_timeout_count(view, pos)
    pos += 10
    if not 0 <= count <= (end - pos) // _TOPIC_BYTES:
        raise too_many(count, end - pos)
    left = MAX_ELEMENTS - count
    topics: list[RequestTopic] = []
    for _ in range(count):
        (length,) = _short(view, pos)
        pos += 2
        if not 0 <= length <= end - pos:
            raise too_long(length, end - pos)
        name = str(view[pos : pos + length], "utf-8")
        pos += length
        (count,) = _int(view, pos)
        pos += 4
        left -= count
        if not 0 <= count <= (end - pos) // _PARTITION_BYTES or left < 0:
            raise too_many(count, end - pos)
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(count):
            index, length = _index_length(view, pos)
            pos += 8
            if 0 <= length <= end - pos:
                partitions.append((index, view[pos : pos + length]))
                pos += length
            elif length == -1:
                partitions.append((index, None))
            else:
                raise too_long(length, end - pos)
        topics.append((name, None, partitions))
    if pos > end:
        raise Refused("the last field is cut short")
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


# One topic with one partition and no error message, whole: from the frame's length or from after the name.
_one_by_id = struct.Struct(">iixB16sBihqqqBxxxix").pack
_one_by_id_bytes: Final = struct.calcsize(">ixB16sBihqqqBxxxix")
_one_compact_head = struct.Struct(">iixBB").pack
_one_compact_tail = struct.Struct(">BihqqqBxxxix").pack
_one_compact_bytes: Final = struct.calcsize(">ixBB") + struct.calcsize(">BihqqqBxxxix")
_one_head = struct.Struct(">iiih").pack
_one_tail = struct.Struct(">iihqqqihi").pack
_one_bytes: Final = struct.calcsize(">iih") + struct.calcsize(">iihqqqihi")
_one_tail_v5 = struct.Struct(">iihqqqi").pack
_one_v5_bytes: Final = struct.calcsize(">iih") + struct.calcsize(">iihqqqi")


def encode_response(version: int, correlation_id: int, topics: list[ResponseTopic], throttle_ms: int = 0) -> bytes:
    """A complete response frame: length, header and body."""
    if len(topics) == 1 and len(topics[0][2]) == 1 and version >= _WITH_LOG_START:
        name, topic_id, ((index, error, base_offset, append_time_ms, log_start, message, record_errors),) = topics[0]
        if (message is None and not record_errors) or version < _WITH_MESSAGE:
            if version >= _BY_TOPIC_ID:
                return _one_by_id(
                    _one_by_id_bytes, correlation_id, 2, topic_id,
                    2, index, error, base_offset, append_time_ms, log_start, 1, throttle_ms,
                )  # fmt: skip
            encoded = (name or "").encode()
            length = len(encoded)
            if version < _WITH_MESSAGE:
                return b"".join((
                    _one_head(_one_v5_bytes + length, correlation_id, 1, length), encoded,
                    _one_tail_v5(1, index, error, base_offset, append_time_ms, log_start, throttle_ms),
                ))  # fmt: skip
            if version < _FLEXIBLE:
                return b"".join((
                    _one_head(_one_bytes + length, correlation_id, 1, length), encoded,
                    _one_tail(1, index, error, base_offset, append_time_ms, log_start, 0, -1, throttle_ms),
                ))  # fmt: skip
            if length < 127:
                return b"".join((
                    _one_compact_head(_one_compact_bytes + length, correlation_id, 2, length + 1), encoded,
                    _one_compact_tail(2, index, error, base_offset, append_time_ms, log_start, 1, throttle_ms),
                ))  # fmt: skip
    parts = [b"", struct.pack(">i", correlation_id)]
    if version >= _FLEXIBLE:
        _write_flexible(parts, version >= _BY_TOPIC_ID, topics, throttle_ms)
    else:
        _write_legacy(parts, version, topics, throttle_ms)
    parts[0] = sum(map(len, parts)).to_bytes(4, "big")
    return b"".join(parts)


def encode_elsewhere(
    version: int,
    correlation_id: int,
    topics: list[ResponseTopic],
    leaders: Mapping[tuple[int, int], tuple[int, int]],
    node_endpoints: Sequence[tuple[int, str, int, str | None]],
) -> bytes:
    """As `encode_response`, for version 10 or later, with leaders that are elsewhere (KIP-951).

    `leaders` has (broker, epoch) by (place of the topic in the answer, partition); `node_endpoints` has (broker, host,
    port, rack) of each of them.
    """
    responses = []
    for place, (name, topic_id, rows) in enumerate(topics):
        partitions = [
            Message(
                index=row[0],
                error_code=row[1],
                base_offset=row[2],
                log_append_time_ms=row[3],
                log_start_offset=row[4],
                record_errors=[Message(batch_index=at, batch_index_error_message=text) for at, text in row[6]],
                error_message=row[5],
            )
            for row in rows
        ]
        for partition in partitions:
            leader = leaders.get((place, partition.index))
            if leader is not None:
                partition.current_leader = Message(leader_id=leader[0], leader_epoch=leader[1])
        responses.append(Message(name=name, topic_id=topic_id, partition_responses=partitions))
    endpoints = [Message(node_id=node, host=host, port=port, rack=rack) for node, host, port, rack in node_endpoints]
    body = Message(responses=responses, throttle_time_ms=0, node_endpoints=endpoints)
    return write_response(PRODUCE, version, correlation_id, codec.encode_response(PRODUCE, version, body))


_partition = struct.Struct(">ihqqq").pack
_place = struct.Struct(">i").pack


def _compact_text(text: str | None) -> tuple[bytes, ...]:
    """A string or null, and the empty tags behind it."""
    if text is None:
        return (b"\0\0",)
    encoded = text.encode()
    return write_uvarint(len(encoded) + 1), encoded, b"\0"


def _text(text: str | None) -> tuple[bytes, ...]:
    encoded = b"" if text is None else text.encode()
    return struct.pack(">h", -1 if text is None else len(encoded)), encoded


def _write_flexible(parts: list[bytes], by_id: bool, topics: list[ResponseTopic], throttle_ms: int) -> None:
    parts.append(b"\0" + write_uvarint(len(topics) + 1))
    for name, topic_id, partitions in topics:
        if by_id:
            assert topic_id is not None, "version 13 and later name topics by UUID"
            parts.append(topic_id)
        else:
            encoded = (name or "").encode()
            parts += (write_uvarint(len(encoded) + 1), encoded)
        parts.append(write_uvarint(len(partitions) + 1))
        for index, error, base_offset, append_time_ms, log_start, message, record_errors in partitions:
            parts.append(_partition(index, error, base_offset, append_time_ms, log_start))
            parts.append(write_uvarint(len(record_errors) + 1))
            for at, text in record_errors:
                parts += (_place(at), *_compact_text(text))
            parts += _compact_text(message)
        parts.append(b"\0")
    parts.append(struct.pack(">ix", throttle_ms))


def _write_legacy(parts: list[bytes], version: int, topics: list[ResponseTopic], throttle_ms: int) -> None:
    parts.append(struct.pack(">i", len(topics)))
    for name, _, partitions in topics:
        encoded = (name or "").encode()
        parts += (struct.pack(">h", len(encoded)), encoded, struct.pack(">i", len(partitions)))
        for index, error, base_offset, append_time_ms, log_start, message, record_errors in partitions:
            parts.append(struct.pack(">ihqq", index, error, base_offset, append_time_ms))
            if version >= _WITH_LOG_START:
                parts.append(struct.pack(">q", log_start))
            if version >= _WITH_MESSAGE:
                parts.append(struct.pack(">i", len(record_errors)))
                for at, text in record_errors:
                    parts += (_place(at), *_text(text))
                parts += _text(message)
    parts.append(struct.pack(">i", throttle_ms))
