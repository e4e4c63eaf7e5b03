"""Markers: the bytes that Kafka writes, and a number that tells a late one from that of a later transaction."""

import struct

import pytest
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords

from headrace.records import batch, kernel
from headrace.records.control import NO_NUMBER, NUMBER_HEADER, Marker, marker_batch, read_marker
from proving import proves

NOW_MS = 1_700_000_000_000


def control_batch(key: bytes | None, value: bytes | None) -> tuple[bytearray, batch.BatchHeader]:
    attributes = batch.TRANSACTIONAL | batch.CONTROL
    return kernel.build_with_header([(NOW_MS, key, value, ())], attributes, producer=(7, 3, -1))


@proves("T1")
@pytest.mark.parametrize("committed", [True, False])
def test_a_client_reads_a_marker_as_kafkas(committed: bool) -> None:
    data, header = marker_batch(7, 3, 12, committed=committed, number=5, now_ms=NOW_MS)
    assert batch.check(data) == header
    assert header.is_control
    assert header.is_transactional
    found = MemoryRecords(bytes(data)).next_batch()
    assert found is not None
    assert found.is_control_batch
    assert (found.producer_id, found.producer_epoch, found.base_sequence) == (7, 3, -1)
    (record,) = list(found)
    assert ControlRecord.parse(record.key) == (COMMIT_MARKER if committed else ABORT_MARKER)
    assert struct.unpack(">hi", record.value or b"") == (0, 12)
    assert [name for name, _ in record.headers] == [NUMBER_HEADER]


@proves("T1")
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("number", [NO_NUMBER, 0, 5, 2**62])
def test_a_marker_is_read_as_it_was_written(committed: bool, number: int) -> None:
    data, header = marker_batch(2**40, 32766, 2**31 - 1, committed=committed, number=number, now_ms=NOW_MS)
    assert read_marker(data, header) == Marker(committed, 2**31 - 1, number)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (2**40, 32766, -1)
    assert (header.record_count, header.last_offset_delta, header.max_timestamp_ms) == (1, 0, NOW_MS)


def test_a_marker_of_another_broker_bears_no_number() -> None:
    data, header = control_batch(struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 4))
    assert read_marker(data, header) == Marker(committed=True, coordinator_epoch=4, number=NO_NUMBER)


@pytest.mark.parametrize("headers", [[("b", b"12345678"), ("a", b"1" * 16)], [(NUMBER_HEADER[1:], b"123456789")]])
def test_a_record_that_is_as_long_as_a_numbered_marker_is_read_as_it_is(headers: list[tuple[str, bytes]]) -> None:
    record = NOW_MS, struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 4), headers
    attributes = batch.TRANSACTIONAL | batch.CONTROL
    data, header = kernel.build_with_header([record], attributes, producer=(7, 3, -1))
    assert len(data) == len(marker_batch(7, 3, 4, committed=True, number=1, now_ms=NOW_MS)[0])
    assert read_marker(data, header) == Marker(committed=True, coordinator_epoch=4, number=NO_NUMBER)


def test_a_number_below_none_is_none() -> None:
    header = NUMBER_HEADER, struct.pack(">q", -7)
    record = NOW_MS, struct.pack(">hh", 0, 0), struct.pack(">hi", 0, 4), (header,)
    data, found = kernel.build_with_header([record], batch.TRANSACTIONAL | batch.CONTROL, producer=(7, 3, -1))
    assert read_marker(data, found) == Marker(committed=False, coordinator_epoch=4, number=NO_NUMBER)


def test_what_a_later_version_adds_behind_is_left_out() -> None:
    data, header = control_batch(struct.pack(">hhi", 1, 0, 99), struct.pack(">hiq", 1, 4, 99))
    assert read_marker(data, header) == Marker(committed=False, coordinator_epoch=4, number=NO_NUMBER)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (struct.pack(">hh", 0, 2), struct.pack(">hi", 0, 4)),  # a change of leader in Kafka's metadata log
        (struct.pack(">h", 0), struct.pack(">hi", 0, 4)),
        (struct.pack(">hh", 0, 1), b""),
        (struct.pack(">hh", -1, 1), struct.pack(">hi", 0, 4)),
        (None, struct.pack(">hi", 0, 4)),
        (struct.pack(">hh", 0, 1), None),
    ],
)
def test_other_control_batches_are_no_markers(key: bytes | None, value: bytes | None) -> None:
    data, header = control_batch(key, value)
    assert read_marker(data, header) is None


def test_a_batch_of_records_is_no_marker() -> None:
    data = kernel.build([(NOW_MS, struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 4), ())])
    assert read_marker(data, batch.check(data)) is None
