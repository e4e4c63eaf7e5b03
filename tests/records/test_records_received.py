"""Records as a consumer gets them: as the kernel and an independent codec have them, in any steps, compiled and not."""

import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records import batch, kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from hypotheses import examples
from proving import proves

MOST = 2**62
NOW_MS = 1_700_000_000_000
CODECS = st.sampled_from(list(Codec))
CONTENT = st.none() | st.binary(max_size=200)
TIMES_MS = st.integers(NOW_MS - 10_000, NOW_MS + 10_000)
HEADERS = st.lists(st.tuples(st.text(max_size=20), CONTENT), max_size=4)
RECORDS = st.lists(st.tuples(TIMES_MS, CONTENT, CONTENT, HEADERS), min_size=1, max_size=12)
SETS = st.lists(st.tuples(RECORDS, CODECS), min_size=1, max_size=4)

both_forms = examples(60)


def record_set(sets: list[tuple[list[NewRecord], Codec]], base_offset: int = 0) -> tuple[bytearray, list[Any]]:
    """Batches one after the other, and their records as the kernel reads them."""
    data, expected = bytearray(), []
    for new, codec in sets:
        built = kernel.build(new, codec, base_offset=base_offset, leader_epoch=6)
        expected += kernel.records(built)
        data += built
        base_offset += len(new)
    return data, expected


def plain(found: list[Any]) -> list[tuple[Any, ...]]:
    return [(r.offset, r.timestamp_ms, r.key, r.value, r.headers) for r in found]


def some(count: int = 3, base_offset: int = 0, **fields: Any) -> bytearray:
    return kernel.build(
        [(NOW_MS + nth, None, b"%d" % nth, []) for nth in range(count)], base_offset=base_offset, **fields
    )


def damaged(at: int, content: bytes, data: bytearray | None = None) -> bytearray:
    """A batch with other bytes in one place, signed."""
    data = some(base_offset=2) if data is None else data
    data[at : at + len(content)] = content
    batch.sign(data)
    return data


@proves("R8", "J1")
@given(sets=SETS, base_offset=st.integers(0, MOST // 2))
@both_forms
def test_all_records_of_a_set_are_those_that_the_kernel_reads(
    received: ModuleType, sets: list[tuple[list[NewRecord], Codec]], base_offset: int
) -> None:
    data, expected = record_set(sets, base_offset)
    into: list[Any] = ["kept"]
    after = received.receive(memoryview(data), "orders", 3, base_offset, MOST, into)
    assert after == base_offset + len(expected)
    assert into[0] == "kept"
    assert plain(into[1:]) == [tuple(record) for record in expected]
    assert {(r.topic, r.partition, r.leader_epoch) for r in into[1:]} == {("orders", 3, 6)}


@proves("R8", "J1")
@given(new=RECORDS, codec=CODECS)
@both_forms
def test_what_an_independent_writer_built_is_received(received: ModuleType, new: list[NewRecord], codec: Codec) -> None:
    builder = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 24)
    for nth, (timestamp_ms, key, value, headers) in enumerate(new):
        builder.append(nth, timestamp_ms, key, value, headers)
    into: list[Any] = []
    assert received.receive(bytes(builder.build()), "t", 0, 0, MOST, into) == len(new)
    assert plain(into) == [(nth, *fields) for nth, fields in enumerate(new)]


@given(sets=SETS, data=st.data())
@both_forms
def test_steps_of_any_size_give_each_record_of_the_span_once(
    received: ModuleType, sets: list[tuple[list[NewRecord], Codec]], data: st.DataObject
) -> None:
    raw, expected = record_set(sets, 100)
    end = 100 + len(expected)
    first = data.draw(st.integers(90, end + 3))
    last = data.draw(st.integers(90, end + 3))
    found: list[Any] = []
    records = received.RecordSet(raw, "orders", 3, first, last)
    while not records.finished:
        most = data.draw(st.integers(1, 7))
        before = len(found)
        taken = records.take(found, most)
        assert taken == len(found) - before <= most
        if found:
            assert records.next_offset >= found[-1].offset + 1
    assert plain(found) == [tuple(record) for record in expected if first <= record.offset < last]
    if last > first:
        assert records.next_offset == max(first, min(end, last))
    assert records.take(found, 5) == 0


@given(sets=SETS, data=st.data())
@both_forms
def test_no_record_is_given_after_those_that_reach_the_bytes_asked_for(
    received: ModuleType, sets: list[tuple[list[NewRecord], Codec]], data: st.DataObject
) -> None:
    raw, expected = record_set(sets)
    found: list[Any] = []
    records = received.RecordSet(raw, "orders", 3, 0)
    while not records.finished:
        most_bytes = data.draw(st.integers(1, 100))
        taken: list[Any] = []
        records.take(taken, MOST, most_bytes)
        assert sum(record.size_bytes for record in taken[:-1]) < most_bytes
        assert records.finished or sum(record.size_bytes for record in taken) >= most_bytes
        found += taken
        assert records.taken_bytes == sum(record.size_bytes for record in found)
    assert plain(found) == [tuple(record) for record in expected]


@given(sets=SETS, data=st.data())
@both_forms
def test_a_cut_batch_at_the_end_is_left(
    received: ModuleType, sets: list[tuple[list[NewRecord], Codec]], data: st.DataObject
) -> None:
    raw, _ = record_set(sets)
    cut = data.draw(st.integers(0, len(raw) - 1))
    sizes = [header.size_bytes for header, _ in batch.batches(memoryview(raw))]
    whole = sum(1 for nth in range(len(sizes)) if sum(sizes[: nth + 1]) <= cut)
    into: list[Any] = []
    after = received.receive(raw[:cut], "orders", 3, 0, MOST, into)
    assert after == len(into) == sum(len(new) for new, _ in sets[:whole])


def test_control_batches_and_gaps_of_compaction_are_passed_over(received: ModuleType) -> None:
    control = some(1, 3, attributes=batch.CONTROL)
    thinned = kernel.filter_batch(some(5, 4), [False, True, False, True, False])
    assert thinned is not None
    empty = damaged(57, bytes(4), some(2, 9)[:61])
    empty[8:12] = (49).to_bytes(4, "big")
    batch.sign(empty)
    into: list[Any] = []
    assert received.receive(some() + control + thinned + empty, "orders", 3, 1, MOST, into) == 11
    assert [record.offset for record in into] == [1, 2, 5, 7]
    beyond: list[Any] = []
    assert received.receive(control, "orders", 3, 3, MOST, beyond) == 4
    assert beyond == []


def test_the_brokers_time_counts_where_the_batch_says_so(received: ModuleType) -> None:
    data = some()
    batch.stamp_append_time(data, NOW_MS + 777)
    into: list[Any] = []
    received.receive(data, "orders", 3, 0, MOST, into)
    assert {record.timestamp_ms for record in into} == {NOW_MS + 777}


def test_nothing_is_nothing(received: ModuleType) -> None:
    into: list[Any] = []
    assert received.receive(b"", "orders", 3, 42, MOST, into) == 42
    assert received.receive(b"short", "orders", 3, 42, MOST, into) == 42
    assert into == []


@pytest.mark.parametrize(
    ("data", "kind", "says"),
    [
        (damaged(61, b"\x02"), InvalidRecord, "record 0 of the batch at offset 2 is malformed"),
        (damaged(61, b"\xff" * 8), InvalidRecord, "record 0"),
        (damaged(64, b"\x04"), InvalidRecord, "record 1"),
        (damaged(65, b"\x7f"), InvalidRecord, "record 0"),
        (damaged(66, b"\x7f"), InvalidRecord, "record 0"),
        (damaged(68, b"\x7f"), InvalidRecord, "record 0"),
        (damaged(68, b"\x01"), InvalidRecord, "record 0"),
        (damaged(57, b"\x00\x00\x00\x02"), InvalidRecord, "8 bytes follow the last record"),
        (damaged(57, b"\x00\x00\x00\x04"), InvalidRecord, "counts 4 records"),
        (damaged(57, b"\xff\xff\xff\xff"), InvalidRecord, "counts -1 records"),
        (damaged(27, b"\x7f" + b"\xff" * 7), InvalidRecord, "out of range"),
        (damaged(0, b"\xff"), InvalidRecord, "out of range"),
        (damaged(16, b"\x05"), CorruptBatch, "magic 5"),
        (damaged(16, b"\x01"), InvalidRecord, "message format v1"),
        (damaged(21, b"\x00\x07"), InvalidRecord, "codec 7"),
        (damaged(21, b"\x00\x03"), CorruptBatch, "lz4"),
        (damaged(8, bytes(4)), CorruptBatch, "less than a header"),
        (damaged(8, b"\xff\xff\xff\xff"), CorruptBatch, "less than a header"),
        (some(base_offset=2)[:-1] + b"\xff", CorruptBatch, "CRC"),
    ],
)
def test_what_is_malformed_is_told_with_its_place(
    received: ModuleType, data: bytearray, kind: type[Exception], says: str
) -> None:
    into: list[Any] = []
    records = received.RecordSet(some(2) + data, "orders", 3, 0)
    for _ in range(2):
        with pytest.raises(kind, match=says) as raised:
            records.take(into, 100)
        assert f"orders-3 at offset {records.next_offset}: " in str(raised.value)
        assert not records.finished
    assert [record.offset for record in into[:2]] == [0, 1]
    assert records.next_offset == into[-1].offset + 1


def test_a_wrong_sum_goes_through_only_where_that_was_asked_for(received: ModuleType) -> None:
    data = some()
    data[-2] ^= 1
    with pytest.raises(CorruptBatch):
        received.receive(data, "orders", 3, 0, MOST, [])
    into: list[Any] = []
    assert received.receive(data, "orders", 3, 0, MOST, into, False) == 3
    assert len(into) == 3


@proves("R8")
@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 3000), pytest.param(2, 200_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_no_damage_makes_it_read_beyond_the_buffer(seed: int, rounds: int, received: ModuleType) -> None:
    if not received.compiled:
        pytest.skip("Python checks every index itself")
    program = Path(__file__).with_name("beyond_the_buffer.py")
    ran = subprocess.run(
        [sys.executable, str(program), str(seed), str(rounds)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_record_is_a_value(received: ModuleType) -> None:
    headers = [("trace", b"1"), ("trace", None)]
    into: list[Any] = []
    received.receive(kernel.build([(NOW_MS, b"k", b"v", headers)], base_offset=9), "orders", 3, 0, MOST, into)
    (record,) = into
    assert into[0].size_bytes >= len(b"k" + b"v" + b"trace" + b"1" + b"trace")
    same = received.ReceivedRecord("orders", 3, 9, NOW_MS, b"k", b"v", headers)
    assert record.headers is record.headers
    assert record.headers == headers
    assert record == same
    assert hash(record) == hash(same)
    assert record != received.ReceivedRecord("orders", 3, 9, NOW_MS, b"k", b"w", headers)
    assert record != "orders"
    assert repr(record) == (
        f"Record(topic='orders', partition=3, offset=9, timestamp_ms={NOW_MS}, key=b'k', value=b'v', "
        "headers=[('trace', b'1'), ('trace', None)])"
    )
    if received.compiled:
        assert pickle.loads(pickle.dumps(record)) == record
        with pytest.raises(AttributeError):
            record.offset = 5


def test_a_header_name_that_is_no_text_is_shown_with_marks(received: ModuleType) -> None:
    data = kernel.build([(NOW_MS, None, b"v", [("ab", b"x")])])
    data[data.index(b"ab") : data.index(b"ab") + 2] = b"\xff\xfe"
    batch.sign(data)
    into: list[Any] = []
    received.receive(data, "orders", 3, 0, MOST, into)
    assert into[0].headers == [("\ufffd\ufffd", b"x")]
