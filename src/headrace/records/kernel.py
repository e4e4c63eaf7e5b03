"""The one place that looks inside a batch: unpack, build and thin out records (format v2).

The same file runs as Python and, where the install could do it, compiled by Cython: `kernel.pxd` gives the C types and
`compiled` tells which one runs. After a change, `pip install -e .` compiles it again.

A record is, with every number a zigzag varint (`varints`) and -1 the length of a null:

    length of what follows, attributes (one byte, unused), timestamp delta, offset delta, length of key, key,
    length of value, value, count of headers, then for each header: length of name, name, length of value, value

Positions are checked before a byte is read, also where compiled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from crc32c import crc32c

from headrace.errors import BatchTooLarge, InvalidRecord
from headrace.records import batch, codecs
from headrace.records.batch import CRC, HEADER, BatchHeader, View
from headrace.records.record import Columns, Header, NewRecord, Payload, Record

try:
    import cython
except ImportError:
    from headrace.records import cython_stub as cython

if not cython.compiled:  # else they are constants and inlined functions, as the .pxd says
    from headrace.records.batch import (
        ATTRIBUTES_AT,
        CODEC_MASK,
        CRC_AT,
        HEADER_BYTES,
        LEAST_RECORD_BYTES,
        LENGTH_END,
        MOST,
        MOST_BATCH_BYTES,
    )
    from headrace.records.varints import skip, skip_headers, varint

compiled: Final = not __file__.endswith((".py", ".pyc"))


def decode(payload: View, header: BatchHeader) -> Columns:
    """The records of an uncompressed payload as columns; InvalidRecord if any is malformed.

    A view is copied, since the columns outlive it; bytes are taken as they are.
    """
    if isinstance(payload, memoryview):
        payload = bytes(payload)
    end = len(payload)
    refuse_impossible(header, end)
    count = header.record_count
    last_delta = header.last_offset_delta
    base_offset = header.base_offset
    base_ms = header.base_timestamp_ms
    append_time = header.append_time
    append_ms = header.max_timestamp_ms
    found = _empty_columns(payload, count)
    data = payload
    offsets = found.offsets
    timestamps_ms = found.timestamps_ms
    key_starts = found.key_starts
    key_lengths = found.key_lengths
    value_starts = found.value_starts
    value_lengths = found.value_lengths
    header_starts = found.header_starts
    header_counts = found.header_counts
    record_starts = found.record_starts

    pos = 0
    previous_delta = -1
    for nth in range(count):
        record_starts[nth] = pos
        length, pos = varint(data, pos, end)
        record_end = skip(pos, length, end)
        delta_ms, pos = varint(data, pos + 1, record_end)
        delta, pos = varint(data, pos, record_end)
        length, pos = varint(data, pos, record_end)
        key_starts[nth] = pos
        key_lengths[nth] = length
        pos = skip(pos, length, record_end)
        length, pos = varint(data, pos, record_end)
        value_starts[nth] = pos
        value_lengths[nth] = length
        pos = skip(pos, length, record_end)
        header_count, pos = varint(data, pos, record_end)
        header_starts[nth] = pos
        header_counts[nth] = header_count
        if header_count != 0:
            pos = skip_headers(data, pos, header_count, record_end)
        if pos < 0 or pos != record_end:
            raise InvalidRecord(f"record {nth} of the batch at offset {base_offset} is malformed")
        if delta <= previous_delta or delta > last_delta:
            raise InvalidRecord(f"record {nth} of the batch at offset {base_offset} has offset delta {delta}")
        if delta_ms <= -MOST or delta_ms >= MOST:
            raise InvalidRecord(f"record {nth} of the batch at offset {base_offset} has timestamp delta {delta_ms}")
        previous_delta = delta
        offsets[nth] = base_offset + delta
        timestamps_ms[nth] = append_ms if append_time else base_ms + delta_ms
    record_starts[count] = pos
    if pos != end:
        raise InvalidRecord(f"{end - pos} bytes follow the last record of the batch at offset {base_offset}")
    return found


def refuse_impossible(header: BatchHeader, payload_bytes: int) -> None:
    """What a header may claim: bounds the columns' memory, and keeps sums inside 64 bits."""
    if not 0 <= header.record_count <= payload_bytes // LEAST_RECORD_BYTES:
        raise InvalidRecord(f"batch counts {header.record_count} records, which {payload_bytes} bytes cannot hold")
    if not 0 <= header.base_offset < MOST:
        raise InvalidRecord(f"batch has base offset {header.base_offset}, out of range")
    if not (-MOST < header.base_timestamp_ms < MOST and -MOST < header.max_timestamp_ms < MOST):
        raise InvalidRecord(
            f"batch at offset {header.base_offset} has timestamps from {header.base_timestamp_ms} to "
            f"{header.max_timestamp_ms} ms, out of range"
        )


def _empty_columns(payload: Payload, count: int) -> Columns:
    return Columns(
        payload,
        offsets=_zeros(count),
        timestamps_ms=_zeros(count),
        key_starts=_zeros(count),
        key_lengths=_zeros(count),
        value_starts=_zeros(count),
        value_lengths=_zeros(count),
        header_starts=_zeros(count),
        header_counts=_zeros(count),
        record_starts=_zeros(count + 1),
    )


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def columns(view: View, max_bytes: int = batch.MAX_UNPACKED_BYTES) -> Columns:
    """Check the batch at the start of `view`, decompress it within `max_bytes`, and decode it."""
    header = batch.check(view)
    return decode(_payload(view, header, max_bytes), header)


def _payload(view: View, header: BatchHeader, max_bytes: int) -> View:
    packed = memoryview(view)[HEADER_BYTES : header.size_bytes]
    return codecs.decompress(header.codec, packed, max_bytes)


def records(view: View, max_bytes: int = batch.MAX_UNPACKED_BYTES) -> list[Record]:
    """Every record of the batch as an object of its own."""
    found = columns(view, max_bytes)
    payload = bytes(found.payload)
    return [
        Record(
            offset,
            timestamp_ms,
            None if key_length < 0 else payload[key_start : key_start + key_length],
            None if value_length < 0 else payload[value_start : value_start + value_length],
            _headers(payload, header_start, header_count) if header_count else [],
        )
        for (
            offset,
            timestamp_ms,
            key_start,
            key_length,
            value_start,
            value_length,
            header_start,
            header_count,
        ) in zip(*found[1:9], strict=True)
    ]


def _headers(payload: bytes, pos: int, count: int) -> list[Header]:
    headers: list[Header] = []
    for _ in range(count):
        length, pos = varint(payload, pos, len(payload))
        name = payload[pos : pos + length].decode(errors="replace")
        length, pos = varint(payload, pos + length, len(payload))
        if length < 0:
            headers.append((name, None))
        else:
            headers.append((name, payload[pos : pos + length]))
            pos += length
    return headers


def keys(view: View, max_bytes: int = batch.MAX_UNPACKED_BYTES) -> list[tuple[int, bytes | None, bool]]:
    """Offset, key and whether the value is null, for each record of the batch."""
    found = columns(view, max_bytes)
    payload = bytes(found.payload)
    return [
        (offset, None if length < 0 else payload[start : start + length], value_length < 0)
        for offset, start, length, value_length in zip(
            found.offsets, found.key_starts, found.key_lengths, found.value_lengths, strict=True
        )
    ]


def filter_batch(
    view: View, keep: bytes | Sequence[bool], max_bytes: int = batch.MAX_UNPACKED_BYTES
) -> bytearray | None:
    """The batch with only the records whose place in `keep` is true, or None if that is no record.

    Kept records keep their offsets and timestamps byte for byte, the batch its offset range, producer and codec.
    """
    header = batch.check(view)
    found = decode(_payload(view, header, max_bytes), header)
    if len(keep) != header.record_count:
        raise ValueError(f"{len(keep)} choices for {header.record_count} records")
    kept = [nth for nth in range(header.record_count) if keep[nth]]
    return thin(header, found, kept) if kept else None


def thin(header: BatchHeader, found: Columns, kept: Sequence[int]) -> bytearray:
    """A batch that was decoded, with only the records at these places, which rise; see `filter_batch`."""
    starts, payload = found.record_starts, memoryview(found.payload)
    max_ms = header.max_timestamp_ms if header.append_time else max(found.timestamps_ms[nth] for nth in kept)
    section = b"".join([payload[starts[nth] : starts[nth + 1]] for nth in kept])
    return assemble(header._replace(max_timestamp_ms=max_ms, record_count=len(kept)), section)[0]


def put_varint(out: bytearray, value: int) -> None:
    raw = (value << 1) ^ (value >> 63)
    while raw >= 0x80:
        out.append((raw & 0x7F) | 0x80)
        raw >>= 7
    out.append(raw)


def put_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)
    else:
        put_varint(out, len(value))
        out += value


def encode(new: Sequence[NewRecord], base_ms: int) -> bytearray:
    """The records section of a batch, uncompressed, with offset deltas from 0."""
    out = bytearray()
    for nth, (timestamp_ms, key, value, headers) in enumerate(new):
        if not -MOST < timestamp_ms < MOST:
            raise InvalidRecord(f"record {nth} has timestamp {timestamp_ms} ms, out of range")
        head = bytearray(1)
        put_varint(head, timestamp_ms - base_ms)
        put_varint(head, nth)
        put_bytes(head, key)
        put_varint(head, -1 if value is None else len(value))
        tail = bytearray()
        put_varint(tail, len(headers))
        for name, content in headers:
            put_bytes(tail, _utf8(name))
            put_bytes(tail, content)
        # The value, most of a record's bytes, is copied once only.
        put_varint(out, len(head) + len(tail) + (0 if value is None else len(value)))
        out += head
        if value is not None:
            out += value
        out += tail
    return out


def _utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"header name {name!r} is not valid text: {error.reason}") from None


def build(
    new: Sequence[NewRecord],
    codec: int = codecs.Codec.NONE,
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    producer_id: int = batch.NO_PRODUCER,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
) -> bytearray:
    """One signed batch of at least one record; `attributes` may add bits such as `batch.TRANSACTIONAL` to the codec."""
    producer = producer_id, producer_epoch, base_sequence
    return build_with_header(new, attributes | codec, base_offset, leader_epoch, producer)[0]


def build_with_header(
    new: Sequence[NewRecord],
    attributes: int = 0,
    base_offset: int = 0,
    leader_epoch: int = -1,
    producer: tuple[int, int, int] = (batch.NO_PRODUCER, -1, -1),
) -> tuple[bytearray, BatchHeader]:
    """The same, and the header that it has."""
    if not new:
        raise InvalidRecord("a batch needs at least one record")
    base_ms, max_ms = new[0][0], max([record[0] for record in new])
    last_delta = len(new) - 1
    header = BatchHeader(
        base_offset, 0, leader_epoch, batch.MAGIC, 0, attributes, last_delta, base_ms, max_ms, *producer, len(new)
    )
    return assemble(header, encode(new, base_ms))


def assemble(header: BatchHeader, section: View) -> tuple[bytearray, BatchHeader]:
    """Header and compressed section joined, with the length and the CRC that they have; and the header that has them
    too."""
    codec = header.attributes & CODEC_MASK
    packed = codecs.compress(codec, section) if codec else section
    size_bytes = HEADER_BYTES + len(packed)
    if size_bytes > MOST_BATCH_BYTES:
        raise BatchTooLarge(f"a batch of {size_bytes} bytes: the format ends at {MOST_BATCH_BYTES}")
    out = bytearray(HEADER_BYTES)
    HEADER.pack_into(out, 0, header.base_offset, size_bytes - LENGTH_END, *header[2:])
    out += packed
    crc = crc32c(memoryview(out)[ATTRIBUTES_AT:])
    CRC.pack_into(out, CRC_AT, crc)
    return out, BatchHeader(header.base_offset, size_bytes, *header[2:4], crc, *header[5:])
