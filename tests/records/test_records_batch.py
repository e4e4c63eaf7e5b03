"""Headers of record batches: read, checked, stamped and walked without a look at the records."""

import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records import batch
from proving import proves


def produced(count: int = 3, *, producer_id: int = -1, sequence: int = -1) -> bytearray:
    """A batch as an independent client writes it."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, producer_id, 0, sequence, 1 << 20)
    for nth in range(count):
        builder.append(nth, 1_700_000_000_000 + nth, b"key", b"value", [])
    return bytearray(builder.build())


def resigned(data: bytearray, at: int, layout: str, value: int) -> bytearray:
    """The batch with one field changed and a CRC that agrees."""
    struct.pack_into(layout, data, at, value)
    batch.sign(data)
    return data


@proves("J1")
def test_a_clients_batch_is_read_field_by_field() -> None:
    data = produced(3, producer_id=7, sequence=40)
    header = batch.check_produced(memoryview(data))
    assert header == batch.check(data)
    assert header == batch.BatchHeader(
        base_offset=0,
        size_bytes=len(data),
        leader_epoch=header.leader_epoch,
        magic=2,
        crc=header.crc,
        attributes=0,
        last_offset_delta=2,
        base_timestamp_ms=1_700_000_000_000,
        max_timestamp_ms=1_700_000_000_002,
        producer_id=7,
        producer_epoch=0,
        base_sequence=40,
        record_count=3,
    )
    assert (header.next_offset, header.last_offset, header.codec) == (3, 2, 0)
    assert [header.is_control, header.is_transactional, header.append_time] == [False, False, False]


def test_attribute_bits_have_names() -> None:
    data = resigned(produced(), batch.ATTRIBUTES_AT, ">h", 4 | 0x08 | 0x10 | 0x20)
    header = batch.check(data)
    assert header.codec == 4
    assert header.append_time
    assert header.is_transactional
    assert header.is_control


@proves("J1")
def test_a_flip_of_any_byte_under_the_crc_is_found() -> None:
    data = produced()
    for at in range(batch.MAGIC_AT, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(CorruptBatch):
            batch.check_produced(memoryview(damaged))
        with pytest.raises(CorruptBatch):
            batch.check(damaged)


@proves("J2")
def test_stamping_keeps_the_crc_right_and_the_records_untouched() -> None:
    data = produced()
    records = bytes(data[batch.HEADER_BYTES :])
    batch.stamp(memoryview(data), 1 << 40, 12)
    header = batch.check(data)
    assert (header.base_offset, header.leader_epoch, header.next_offset) == (1 << 40, 12, (1 << 40) + 3)
    assert data[batch.HEADER_BYTES :] == records


def test_append_time_is_stamped_with_a_new_crc() -> None:
    data = produced()
    batch.stamp_append_time(memoryview(data), 1_800_000_000_000)
    header = batch.check_produced(memoryview(data))
    assert header.append_time
    assert header.max_timestamp_ms == 1_800_000_000_000


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("size", [20, 200])
def test_old_message_formats_are_named_as_unsupported(magic: int, size: int) -> None:
    data = bytearray(size)
    data[batch.MAGIC_AT] = magic
    with pytest.raises(InvalidRecord, match=f"v{magic} is not supported"):
        batch.read_header(data)


@pytest.mark.parametrize("size", [0, 1, 12, 16, 60])
def test_less_than_a_header_is_corrupt(size: int) -> None:
    with pytest.raises(CorruptBatch, match="only"):
        batch.read_header(produced()[:size])


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48, 2**31 - 1])
def test_an_impossible_length_is_corrupt(length: int) -> None:
    data = produced()
    struct.pack_into(">i", data, 8, length)
    with pytest.raises(CorruptBatch):
        batch.check(data)
    with pytest.raises(CorruptBatch):
        batch.check_produced(memoryview(data))
    with pytest.raises(CorruptBatch):
        list(batch.split(memoryview(data)))


def test_a_batch_with_bytes_after_it_is_not_a_produced_one() -> None:
    with pytest.raises(CorruptBatch, match="were sent"):
        batch.check_produced(memoryview(produced() + b"\0"))


@pytest.mark.parametrize("count", [-1, 0, 2, 4, 2**31 - 1])
def test_a_producers_counts_must_agree(count: int) -> None:
    data = resigned(produced(3), 57, ">i", count)
    with pytest.raises(InvalidRecord, match="counts"):
        batch.check_produced(memoryview(data))


@pytest.mark.parametrize(("count", "fine"), [(-1, False), (0, True), (2, True), (3, True), (4, False)])
def test_a_stored_batch_may_have_gaps_but_no_surplus(count: int, fine: bool) -> None:
    data = resigned(produced(3), 57, ">i", count)
    if fine:
        assert batch.check(data).record_count == count
    else:
        with pytest.raises(InvalidRecord):
            batch.check(data)


def test_a_producer_may_not_send_control_batches_or_leave_out_its_sequence() -> None:
    with pytest.raises(InvalidRecord, match="control"):
        batch.check_produced(memoryview(resigned(produced(), batch.ATTRIBUTES_AT, ">h", batch.CONTROL)))
    with pytest.raises(InvalidRecord, match="sequence"):
        batch.check_produced(memoryview(produced(producer_id=7, sequence=-1)))


def test_several_batches_in_one_produce_are_split() -> None:
    parts = [produced(1), produced(2), produced(3)]
    found = list(batch.split(memoryview(b"".join(parts))))
    assert found == parts
    assert [batch.check_produced(part).record_count for part in found] == [1, 2, 3]
    with pytest.raises(CorruptBatch):
        list(batch.split(memoryview(b"".join(parts)[:-1])))


@proves("J2")
def test_a_walk_over_a_log_ends_before_a_cut_batch() -> None:
    parts = [produced(1), produced(2), produced(3)]
    log = b"".join(parts)
    whole = len(parts[0]) + len(parts[1])
    for cut in range(whole, len(log)):
        found = list(batch.batches(memoryview(log)[:cut]))
        assert [header.record_count for header, _ in found] == [1, 2]
        assert [bytes(part) for _, part in found] == parts[:2]
    assert len(list(batch.batches(memoryview(log)))) == 3


def test_check_looks_at_a_batch_inside_a_larger_view() -> None:
    first, second = produced(1), produced(2)
    log = bytes(first + second)
    assert batch.check(log, len(first)).record_count == 2
    with pytest.raises(CorruptBatch, match="only"):
        batch.check(log[:-1], len(first))
