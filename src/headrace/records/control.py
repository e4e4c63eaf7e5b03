"""Markers: control batches that end a transaction in a partition, as Kafka writes them.

A marker is a batch of one record, with the attributes TRANSACTIONAL and CONTROL, the producer's id and epoch, and no
sequence. Big-endian:

    key    version int16 (0), type int16 (0 abort, 1 commit)
    value  version int16 (0), coordinator epoch int32
    header `headrace.transaction`, int64: which transaction of its transactional id it ends, counted from 0

The header is ours. A marker can come late, and again: a coordinator sends it until it is answered, and the next
coordinator does too. With clients whose epoch stays the same from one transaction to the next, nothing else tells such
a marker from that of a later transaction, which it must never end. A marker without it bears no number.

Other control batches, which Kafka has for its metadata log and we for delayed records (`delayed`), are no markers. A
marker takes an offset like any record.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace.records import kernel
from headrace.records.batch import CODEC_MASK, CONTROL, HEADER_BYTES, TRANSACTIONAL, BatchHeader, View

ABORT: Final = 0
COMMIT: Final = 1
NO_NUMBER: Final = -1
NUMBER_HEADER: Final = "headrace.transaction"
VERSION: Final = 0
"""Of key and value. Later ones only add fields behind these, as Kafka has it."""

_MARKER: Final = TRANSACTIONAL | CONTROL
_KEY = struct.Struct(">hh")
_VALUE = struct.Struct(">hi")
_NUMBER = struct.Struct(">q")
_NUMBERED = struct.Struct(">5shhchi23sq")
"""The one record of a marker as `marker_batch` lays it out, with a number."""
_RECORD_HEAD: Final = b"\x5c\x00\x00\x00\x08"
"""46 bytes follow; attributes, no more milliseconds and offsets than the batch's own, a key of 4 bytes."""
_VALUE_HEAD: Final = b"\x0c"
_NUMBER_HEAD: Final = b"\x02\x28" + NUMBER_HEADER.encode() + b"\x10"
_NUMBERED_BYTES: Final = HEADER_BYTES + _NUMBERED.size


class Marker(NamedTuple):
    """What a marker says beside its producer's id and epoch, which are in the header of its batch."""

    committed: bool
    coordinator_epoch: int
    number: int
    """NO_NUMBER if it bears none."""


def marker_batch(
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    *,
    committed: bool,
    number: int = NO_NUMBER,
    now_ms: int,
) -> tuple[bytearray, BatchHeader]:
    """A marker as it is appended, and its header."""
    key = _KEY.pack(VERSION, COMMIT if committed else ABORT)
    value = _VALUE.pack(VERSION, coordinator_epoch)
    headers = () if number < 0 else ((NUMBER_HEADER, _NUMBER.pack(number)),)
    producer = producer_id, producer_epoch, -1
    return kernel.build_with_header([(now_ms, key, value, headers)], TRANSACTIONAL | CONTROL, producer=producer)


def read_marker(batch: View, header: BatchHeader) -> Marker | None:
    """What a whole batch says, if it is a marker. CorruptBatch if its bytes are no record."""
    if header.attributes & _MARKER != _MARKER or header.record_count != 1:
        return None
    if len(batch) == _NUMBERED_BYTES and not header.attributes & CODEC_MASK:
        fields = _NUMBERED.unpack_from(batch, HEADER_BYTES)
        record_head, key_version, kind, value_head, value_version, coordinator_epoch, number_head, number = fields
        if (record_head, value_head, number_head) == (_RECORD_HEAD, _VALUE_HEAD, _NUMBER_HEAD):
            return _marker(key_version, kind, value_version, coordinator_epoch, number)
    return _read_record(batch)


def _read_record(batch: View) -> Marker | None:
    """Of a marker however it is laid out, by Kafka or by whoever packed it."""
    (record,) = kernel.records(batch)
    key, value = record.key, record.value
    if key is None or value is None or len(key) < _KEY.size or len(value) < _VALUE.size:
        return None
    key_version, kind = _KEY.unpack_from(key)
    value_version, coordinator_epoch = _VALUE.unpack_from(value)
    number = NO_NUMBER
    for name, content in record.headers:
        if name == NUMBER_HEADER and content is not None and len(content) == _NUMBER.size:
            number = _NUMBER.unpack(content)[0]
    return _marker(key_version, kind, value_version, coordinator_epoch, number)


def _marker(key_version: int, kind: int, value_version: int, coordinator_epoch: int, number: int) -> Marker | None:
    if key_version < 0 or value_version < 0 or kind not in (ABORT, COMMIT):
        return None
    return Marker(kind == COMMIT, coordinator_epoch, max(NO_NUMBER, number))
