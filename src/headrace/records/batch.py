"""Headers of record batches (format v2, magic 2); the records behind a header stay opaque here.

On the wire and on disk, big-endian:

    at  0  base offset           int64      at 27  base timestamp, ms    int64
    at  8  batch length          int32      at 35  max timestamp, ms     int64
    at 12  leader epoch          int32      at 43  producer id           int64
    at 16  magic                 int8       at 51  producer epoch        int16
    at 17  CRC-32C from byte 21  uint32     at 53  base sequence         int32
    at 21  attributes            int16      at 57  count of records      int32
    at 23  last offset delta     int32      at 61  records, compressed as the attributes say

Batch length counts what follows it, so a batch takes `batch length + 12` bytes. The CRC leaves out base offset and
leader epoch: a broker stamps both without touching the rest. After a crash a log ends in a whole batch or in a cut
one; `batches` stops before a cut one, and `check` tells a damaged one.

The kernels know these numbers from `batch.pxd`, where they are compiled; a test compares the two.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.errors import CorruptBatch, InvalidRecord

HEADER_BYTES: Final = 61
LENGTH_END: Final = 12
MAGIC_AT: Final = 16
CRC_AT: Final = 17
ATTRIBUTES_AT: Final = 21
MAX_TIMESTAMP_AT: Final = 35
MAGIC: Final = 2

CODEC_MASK: Final = 0x07
APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
_NOT_PLAIN = TRANSACTIONAL | CONTROL

LEAST_RECORD_BYTES: Final = 7
MOST_BATCH_BYTES: Final = 2**31 - 1
MAX_UNPACKED_BYTES: Final = 64 << 20
"""Of the records of one batch, whatever their codec; a few bytes can claim to hold gigabytes."""
MOST: Final = 2**62
"""Offsets and timestamps stay below it, either sign, so that the sum of two fits 64 bits."""

NO_PRODUCER: Final = -1

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH = struct.Struct(">i")
CRC: Final = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_TIMESTAMP = struct.Struct(">q")
_OFFSET = struct.Struct(">q")
_EPOCH = struct.Struct(">i")

_unpack = HEADER.unpack_from
_make = tuple.__new__

View = bytes | bytearray | memoryview


class BatchHeader(NamedTuple):
    """The fixed part of a batch; `size_bytes` is the whole batch, header and length field included."""

    base_offset: int
    size_bytes: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def append_time(self) -> bool:
        """Whether every record bears the broker's time, `max_timestamp_ms`, instead of its own."""
        return self.attributes & APPEND_TIME != 0

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL != 0


def read_header(view: View, pos: int = 0) -> BatchHeader:
    """The header at `pos`; the batch itself may be cut short, the header may not."""
    try:
        offset, length, epoch, magic, crc, bits, delta, base_ms, max_ms, pid, pid_epoch, seq, count = _unpack(view, pos)
    except struct.error:
        raise _short(view, pos) from None
    if magic != MAGIC:
        raise _wrong_magic(magic, pos)
    size_bytes = length + LENGTH_END
    if size_bytes < HEADER_BYTES:
        raise CorruptBatch(f"batch at byte {pos} gives its size as {size_bytes}, less than a header of {HEADER_BYTES}")
    # The class's own constructor takes twice as long, and this runs for every batch that comes in.
    return _make(
        BatchHeader,
        (offset, size_bytes, epoch, magic, crc, bits, delta, base_ms, max_ms, pid, pid_epoch, seq, count),
    )


def check(view: View, pos: int = 0) -> BatchHeader:
    """The header of a whole batch at `pos` whose CRC is right and whose counts can be true.

    Compaction leaves gaps, so fewer records than offsets, even none, are fine here.
    """
    header = read_header(view, pos)
    end = pos + header.size_bytes
    if end > len(view):
        raise CorruptBatch(f"batch at byte {pos} has {header.size_bytes} bytes, but only {len(view) - pos} are here")
    crc = crc32c(memoryview(view)[pos + ATTRIBUTES_AT : end])
    if crc != header.crc:
        raise _wrong_crc(header, crc, pos)
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        raise _wrong_count(header, pos)
    return header


def check_produced(view: memoryview) -> BatchHeader:
    """The header of a batch from a producer: the only one in `view`, no gaps, not a control batch."""
    header = read_header(view)
    _, size_bytes, _, _, claimed, attributes, last_delta, _, _, producer_id, _, sequence, count = header
    if size_bytes != len(view):
        raise CorruptBatch(f"batch gives its size as {size_bytes} bytes, but {len(view)} were sent")
    crc = crc32c(view[ATTRIBUTES_AT:])
    if crc != claimed:
        raise _wrong_crc(header, crc, 0)
    if count <= 0 or last_delta != count - 1:
        raise _wrong_count(header, 0)
    if attributes & _NOT_PLAIN:
        if attributes & CONTROL:
            raise InvalidRecord("a control batch may not come from a producer")
        if producer_id < 0:
            raise InvalidRecord("a transactional batch without a producer id")
    if producer_id >= 0 and sequence < 0:
        raise InvalidRecord(f"producer {producer_id} sent a batch without a sequence number")
    return header


def split(view: memoryview) -> Iterator[memoryview]:
    """The batches of one produce request, unchecked but for their sizes; together they must fill `view`."""
    pos, end = 0, len(view)
    while pos < end:
        size_bytes = read_header(view, pos).size_bytes
        if size_bytes > end - pos:
            raise CorruptBatch(f"batch at byte {pos} has {size_bytes} bytes, but only {end - pos} were sent")
        yield view[pos : pos + size_bytes]
        pos += size_bytes


def batches(view: memoryview) -> Iterator[tuple[BatchHeader, memoryview]]:
    """Each whole batch of a piece of log; a cut last one ends the walk without an error."""
    pos, end = 0, len(view)
    while end - pos >= HEADER_BYTES:
        header = read_header(view, pos)
        if header.size_bytes > end - pos:
            return
        yield header, view[pos : pos + header.size_bytes]
        pos += header.size_bytes


def stamp(view: bytearray | memoryview, base_offset: int, leader_epoch: int) -> None:
    """Give a batch its place in the log; the CRC covers neither field and stays right."""
    _OFFSET.pack_into(view, 0, base_offset)
    _EPOCH.pack_into(view, LENGTH_END, leader_epoch)


def stamp_append_time(view: bytearray | memoryview, now_ms: int) -> None:
    """Let every record of the batch bear the broker's time, and sign the batch anew."""
    (attributes,) = _ATTRIBUTES.unpack_from(view, ATTRIBUTES_AT)
    _ATTRIBUTES.pack_into(view, ATTRIBUTES_AT, attributes | APPEND_TIME)
    _TIMESTAMP.pack_into(view, MAX_TIMESTAMP_AT, now_ms)
    sign(view)


def joined(header: BatchHeader, packed: View) -> bytearray:
    """A signed batch of this section of records, which is in the codec that the header says."""
    out = bytearray(HEADER_BYTES)
    HEADER.pack_into(out, 0, header.base_offset, HEADER_BYTES + len(packed) - LENGTH_END, *header[2:])
    out += packed
    sign(out)
    return out


def sign(view: bytearray | memoryview) -> None:
    """Write the CRC of a view that holds exactly one batch."""
    CRC.pack_into(view, CRC_AT, crc32c(memoryview(view)[ATTRIBUTES_AT:]))


def _short(view: View, pos: int) -> CorruptBatch | InvalidRecord:
    # A single message of an old format can be shorter than our header, and its sender should hear why.
    if len(view) - pos > MAGIC_AT and view[pos + MAGIC_AT] in (0, 1):
        return _wrong_magic(view[pos + MAGIC_AT], pos)
    return CorruptBatch(
        f"batch at byte {pos} needs a header of {HEADER_BYTES} bytes, but only {len(view) - pos} are here"
    )


def _wrong_magic(magic: int, pos: int) -> CorruptBatch | InvalidRecord:
    if magic in (0, 1):
        return InvalidRecord(
            f"message format v{magic} is not supported: let the client send record batches (v2, Kafka 0.11 or later)"
        )
    return CorruptBatch(f"batch at byte {pos} has magic {magic}, not {MAGIC}")


def _wrong_crc(header: BatchHeader, found: int, pos: int) -> CorruptBatch:
    return CorruptBatch(
        f"batch at byte {pos} (base offset {header.base_offset}) bears CRC {header.crc:08x}, its bytes give {found:08x}"
    )


def _wrong_count(header: BatchHeader, pos: int) -> InvalidRecord:
    return InvalidRecord(
        f"batch at byte {pos} counts {header.record_count} records, "
        f"but its last offset delta is {header.last_offset_delta}"
    )
