"""Record batches as Arrow and Arrow as record batches, against an independent codec, compiled and not."""

import contextlib
import datetime
import random
import struct
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records import batch, kernel
from headrace.records.codecs import Codec
from headrace.records.partitioner import partition_for_key
from headrace.records.record import NewRecord
from hypotheses import examples
from proving import proves

NOW_MS = 1_700_000_000_000
LEAST_MS, MOST_MS = -62_135_596_800_000, 253_402_300_799_999
CODECS = st.sampled_from(list(Codec))
CONTENT = st.none() | st.binary(max_size=200)
TIMES_MS = st.integers(NOW_MS - 10_000, NOW_MS + 10_000) | st.integers(0, 2**61)
HEADERS = st.lists(st.tuples(st.text(max_size=20), CONTENT), max_size=4)
RECORDS = st.lists(st.tuples(TIMES_MS, CONTENT, CONTENT, HEADERS), min_size=1, max_size=30)
ALL = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers", "digest",
       "producerId", "producerEpoch", "sequence", "leaderEpoch")  # fmt: skip

both_forms = examples(40)


def theirs(new: list[NewRecord], codec: int = 0, base_offset: int = 0, sequence: int = -1) -> bytearray:
    producer_id, epoch = (-1, -1) if sequence < 0 else (77, 3)
    builder = DefaultRecordBatchBuilder(2, codec, 0, producer_id, epoch, sequence, 1 << 24)
    for nth, (timestamp_ms, key, value, headers) in enumerate(new):
        assert builder.append(nth, timestamp_ms, key, value, headers) is not None
    built = bytearray(builder.build())
    batch.stamp(built, base_offset, 5)
    return built


def read_by_them(data: bytes | bytearray) -> list[tuple[Any, ...]]:
    found = DefaultRecordBatch(bytes(data))
    assert found.validate_crc()
    return [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in found]


def decoded(
    arrow: ModuleType, data: Any, columns: Any = ALL, first: int = 0, end: int = 1 << 62, **how: int
) -> pa.Table:
    found = list(arrow.Decoder("orders", 3, columns, **how).decode(data, first, end))
    for each in found:
        each.validate(full=True)
        assert 0 < len(each) <= how.get("batch_rows", 10_000)
    return pa.Table.from_batches(found, schema=arrow.schema(columns))


def timestamps_of(table: pa.Table) -> list[int]:
    return [us // 1000 for us in table["timestamp"].cast(pa.int64()).to_pylist()]


def pairs(headers: list[dict[str, Any]] | None) -> list[tuple[str, bytes | None]]:
    return [(each["key"], each["value"]) for each in headers or []]


@proves("S1")
@given(
    batches=st.lists(st.tuples(RECORDS, CODECS, st.integers(0, 3), st.integers(-1, 2**31 - 1)), max_size=5),
    batch_rows=st.sampled_from([1, 3, 10_000]),
)
@both_forms
def test_what_an_independent_writer_builds_becomes_rows(arrow: ModuleType, batches: Any, batch_rows: int) -> None:
    data, offset = bytearray(), 40
    expected: list[dict[str, Any]] = []
    for new, codec, gap, sequence in batches:
        offset += gap
        data += theirs(new, codec, offset, sequence)
        for nth, (timestamp_ms, key, value, headers) in enumerate(new):
            expected.append({
                "key": key, "value": value, "topic": "orders", "partition": 3, "offset": offset + nth,
                "timestamp": min(timestamp_ms, MOST_MS), "timestampType": 0,
                "headers": [{"key": name, "value": content} for name, content in headers] or None,
                "digest": arrow.digest(key, value, headers),
                "producerId": -1 if sequence < 0 else 77, "producerEpoch": -1 if sequence < 0 else 3,
                "sequence": -1 if sequence < 0 else (sequence + nth) % 2**31, "leaderEpoch": 5,
            })  # fmt: skip
        offset += len(new)
    table = decoded(arrow, bytes(data), batch_rows=batch_rows)
    found = table.drop(["timestamp"]).to_pylist()
    assert timestamps_of(table) == [row.pop("timestamp") for row in expected]
    assert found == expected


@proves("S1")
@given(new=RECORDS, codec=CODECS, text=st.booleans())
@both_forms
def test_rows_become_a_batch_that_an_independent_reader_reads(
    arrow: ModuleType, new: list[NewRecord], codec: Codec, text: bool
) -> None:
    new = [(min(at, MOST_MS), key, value, headers) for at, key, value, headers in new]
    rows = table_of(new)
    if text:
        new = [(at, None if key is None else key.hex().encode(), value, headers) for at, key, value, headers in new]
        keys = pa.array([None if key is None else key.decode() for _, key, _, _ in new], pa.string())
        rows = rows.set_column(0, "key", keys)
    built = arrow.build(rows, codec, now_ms=NOW_MS, producer_id=9, producer_epoch=1, base_sequence=4)
    assert read_by_them(built) == [(nth, *fields) for nth, fields in enumerate(new)]
    header = batch.check_produced(memoryview(built))
    assert (header.codec, header.producer_id, header.producer_epoch, header.base_sequence) == (codec, 9, 1, 4)
    assert header.max_timestamp_ms == max(fields[0] for fields in new)
    digests = arrow.digests(rows).to_pylist()
    assert digests == [arrow.digest(key, value, headers) for _, key, value, headers in new]
    assert decoded(arrow, built, ["digest"])["digest"].to_pylist() == digests


def table_of(new: list[NewRecord]) -> pa.RecordBatch:
    headers = [[{"key": name, "value": value} for name, value in each[3]] or None for each in new]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.RecordBatch.from_pydict({
        "key": pa.array([each[1] for each in new], pa.binary()),
        "value": pa.array([each[2] for each in new], pa.binary()),
        "headers": pa.array(headers, kind),
        "timestamp": pa.array([each[0] * 1000 for each in new], pa.timestamp("us", "UTC")),
    })  # fmt: skip


@given(new=RECORDS, data=st.data())
@both_forms
def test_slices_and_other_widths_of_rows_are_taken(
    arrow: ModuleType, new: list[NewRecord], data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(new) - 1))
    rows = table_of([(min(at, MOST_MS), *rest) for at, *rest in new]).slice(first)  # type: ignore[misc]
    wide = rows.set_column(0, "key", rows["key"].cast(pa.large_binary()))
    assert arrow.digests(wide).to_pylist() == arrow.digests(rows).to_pylist()
    expected = [(key, value, list(headers)) for _, key, value, headers in new[first:]]
    assert [found[2:] for found in read_by_them(arrow.build(wide, now_ms=NOW_MS))] == expected
    only = arrow.build(rows.select(["value"]), now_ms=NOW_MS)
    assert read_by_them(only) == [(nth, NOW_MS, None, each[1], []) for nth, each in enumerate(expected)]


@given(keys=st.lists(CONTENT | st.binary(min_size=3, max_size=40), max_size=40), count=st.integers(1, 1000))
@both_forms
def test_keys_go_where_every_client_sends_them(arrow: ModuleType, keys: list[bytes | None], count: int) -> None:
    expected = [None if key is None else partition_for_key(key, count) for key in keys]
    assert arrow.partitions_of(pa.array(keys, pa.binary()), count).to_pylist() == expected
    assert arrow.partitions_of(pa.array(keys, pa.binary()).slice(1), count).to_pylist() == expected[1:]


@proves("S1")
@given(new=RECORDS, codec=CODECS, bounds=st.tuples(st.integers(90, 140), st.integers(90, 140)))
@both_forms
def test_offset_bounds_cut_the_first_and_last_batch(
    arrow: ModuleType, new: list[NewRecord], codec: Codec, bounds: tuple[int, int]
) -> None:
    data = theirs(new, codec, 100) + theirs(new, codec, 100 + len(new))
    offsets = decoded(arrow, data, ["offset"], *bounds)["offset"].to_pylist()
    assert offsets == [n for n in range(100, 100 + 2 * len(new)) if bounds[0] <= n < bounds[1]]


def test_only_columns_asked_for_come_in_their_order(arrow: ModuleType) -> None:
    data = theirs([(NOW_MS, b"k", b"v", [("h", b"x")])])
    assert decoded(arrow, data, ["timestampType", "key"]).to_pylist() == [{"timestampType": 0, "key": b"k"}]
    with pytest.raises(KeyError):
        arrow.Decoder("t", 0, ["colour"])


def test_control_batches_are_no_rows(arrow: ModuleType) -> None:
    record: list[NewRecord] = [(NOW_MS, b"\0\0\0\1", b"end", [])]
    control = kernel.build(record, base_offset=1, attributes=batch.CONTROL | batch.TRANSACTIONAL)
    data = theirs([(NOW_MS, None, b"a", [])]) + control + theirs([(NOW_MS, None, b"b", [])], base_offset=2)
    assert decoded(arrow, data, ["value", "offset"]).to_pylist() == [
        {"value": b"a", "offset": 0},
        {"value": b"b", "offset": 2},
    ]
    control[batch.HEADER_BYTES + 3] ^= 1
    with pytest.raises(CorruptBatch, match=r"orders-3 at offset 1: .*CRC"):
        decoded(arrow, control)


def test_append_time_stands_for_every_record(arrow: ModuleType) -> None:
    stamped = theirs([(NOW_MS, None, b"a", []), (NOW_MS + 5, None, b"b", [])])
    batch.stamp_append_time(stamped, NOW_MS + 99)
    table = decoded(arrow, stamped + theirs([(NOW_MS, None, b"c", [])], base_offset=2), batch_rows=3)
    assert timestamps_of(table) == [NOW_MS + 99, NOW_MS + 99, NOW_MS]
    assert table["timestampType"].to_pylist() == [1, 1, 0]


def test_a_batch_thinned_by_compaction_keeps_its_offsets_and_sequences(arrow: ModuleType) -> None:
    whole = kernel.build([(NOW_MS, b"%d" % n, b"", []) for n in range(6)], producer_id=7, base_sequence=2**31 - 2)
    thin = kernel.filter_batch(whole, bytes([0, 1, 0, 1, 0, 0]))
    assert thin is not None
    assert decoded(arrow, thin, ["offset", "sequence", "key"]).to_pylist() == [
        {"offset": 1, "sequence": 2**31 - 1, "key": b"1"},
        {"offset": 3, "sequence": 1, "key": b"3"},
    ]


def test_a_cut_last_batch_is_left_out(arrow: ModuleType) -> None:
    one, other = theirs([(NOW_MS, None, b"a", [])]), theirs([(NOW_MS, None, b"b", [])], base_offset=1)
    for cut in (0, 1, batch.HEADER_BYTES, len(other) - 1):
        assert decoded(arrow, one + other[:cut], ["offset"])["offset"].to_pylist() == [0]


@pytest.mark.parametrize("at_ms", [LEAST_MS, LEAST_MS - 1, -(2**61), MOST_MS, MOST_MS + 1, 2**61, -1])
def test_timestamps_stay_in_the_years_that_dates_have(arrow: ModuleType, at_ms: int) -> None:
    table = decoded(arrow, kernel.build([(at_ms, None, b"", [])]))
    assert timestamps_of(table) == [max(LEAST_MS, min(MOST_MS, at_ms))]
    assert isinstance(table["timestamp"].to_pylist()[0], datetime.datetime)


def test_header_names_that_are_not_text_are_shown_with_marks(arrow: ModuleType) -> None:
    data = kernel.build([(NOW_MS, None, None, [("ab", b"x"), ("é", None)])])
    data[data.rindex(b"ab")] = 0xFF
    batch.sign(data)
    found = decoded(arrow, data, ["headers", "digest"]).to_pylist()[0]
    assert pairs(found["headers"]) == [("\ufffdb", b"x"), ("é", None)]
    assert found["digest"] == arrow.digest(None, None, pairs(found["headers"]))


def test_arrow_batches_end_at_their_bytes(arrow: ModuleType) -> None:
    data = theirs([(NOW_MS, None, bytes(size), []) for size in (300, 300, 300, 5000, 10, 10)])
    found = list(arrow.Decoder("t", 0, batch_bytes=1000).decode(data))
    assert [len(each) for each in found] == [3, 1, 2]
    for wrong in ({"batch_rows": 0}, {"batch_rows": 1 << 21}, {"batch_bytes": 0}, {"batch_bytes": 1 << 31}):
        with pytest.raises(ValueError, match=r"has to be from 1 to"):
            arrow.Decoder("t", 0, **wrong)


def test_batches_own_their_memory(arrow: ModuleType) -> None:
    data = bytearray(theirs([(NOW_MS + n, b"%d" % n, b"v%d" % n, [("h", b"%d" % n)]) for n in range(50)]))
    decoder = arrow.Decoder("t", 0, ALL, batch_rows=7)
    found = list(decoder.decode(data))
    before = [each.to_pylist() for each in found]
    data[:] = bytes(len(data))
    list(decoder.decode(theirs([(0, b"other", b"other", [("o", b"other")])] * 50)))
    assert [each.to_pylist() for each in found] == before


def test_a_decoder_goes_on_after_an_error_and_after_a_reader_that_left(arrow: ModuleType) -> None:
    good = theirs([(NOW_MS, None, b"a", [])] * 4)
    bad = bytearray(good)
    bad[-2] ^= 1
    decoder = arrow.Decoder("t", 0, ["offset"], batch_rows=2)
    with pytest.raises(CorruptBatch):
        list(decoder.decode(theirs([(NOW_MS, None, b"z", [])]) + bad))
    next(decoder.decode(good))
    assert [len(each) for each in decoder.decode(good)] == [2, 2]


def test_a_reader_that_left_and_ends_late_takes_nothing_from_the_next(arrow: ModuleType) -> None:
    data = theirs([(NOW_MS, None, b"%d" % nth, []) for nth in range(10)])
    decoder = arrow.Decoder("t", 0, ["offset"], batch_rows=3)
    late = decoder.decode(data)
    next(late)
    reader = decoder.decode(data)
    found = next(reader)["offset"].to_pylist()
    late.close()
    for rows in reader:
        found += rows["offset"].to_pylist()
    assert found == list(range(10))


def test_damage_names_topic_partition_and_offset(arrow: ModuleType) -> None:
    first, second = theirs([(NOW_MS, None, b"a", [])] * 3), theirs([(NOW_MS, None, b"b", [])] * 3, base_offset=3)
    flipped = bytearray(second)
    flipped[-2] ^= 4
    with pytest.raises(CorruptBatch, match=r"^orders-3 at offset 3: .*CRC"):
        decoded(arrow, first + flipped)
    malformed = bytearray(second)
    malformed[batch.HEADER_BYTES] = 0x7F
    batch.sign(malformed)
    with pytest.raises(InvalidRecord, match=r"^orders-3 at offset 3: record 0"):
        decoded(arrow, first + malformed)
    magic = bytearray(second)
    magic[batch.MAGIC_AT] = 9
    with pytest.raises(CorruptBatch, match=r"^orders-3 at offset 3: .*magic 9"):
        decoded(arrow, first + magic)
    packed = theirs([(NOW_MS, None, b"b" * 99, [])], Codec.ZSTD, base_offset=3)
    packed[-20] ^= 0x55
    batch.sign(packed)
    with pytest.raises(CorruptBatch, match=r"^orders-3 at offset 3: zstd"):
        decoded(arrow, first + packed)


def test_what_was_checked_before_is_not_checked_again(arrow: ModuleType) -> None:
    flipped = theirs([(NOW_MS, None, b"abc", [])])
    flipped[-2] ^= 1
    (rows,) = arrow.Decoder("orders", 3).decode(flipped, checked=True)
    assert rows["value"].to_pylist() == [b"abb"]
    with pytest.raises(CorruptBatch, match="CRC"):
        next(arrow.Decoder("orders", 3).decode(flipped))
    # Claims that no CRC covers are looked at all the same.
    flipped[60] = 9
    with pytest.raises(CorruptBatch):
        next(arrow.Decoder("orders", 3).decode(flipped, checked=True))


def test_a_batch_whose_span_is_damaged_is_not_taken_for_one_before_the_bounds(arrow: ModuleType) -> None:
    parts = [theirs([(NOW_MS, None, b"a", [])] * 5, base_offset=5 * n) for n in range(3)]
    assert decoded(arrow, b"".join(parts), ["offset"], 7)["offset"].to_pylist() == list(range(7, 15))
    for at, value in ((23, 0x80), (26, 1)):
        damaged = bytearray(parts[1])
        damaged[at] = value
        with pytest.raises(CorruptBatch, match=r"^orders-3 at offset 5: .*CRC"):
            decoded(arrow, parts[0] + damaged + parts[2], first=8)


def test_a_digest_tells_fields_apart(arrow: ModuleType) -> None:
    records: list[tuple[Any, Any, Any]] = [
        (None, None, []), (b"", None, []), (None, b"", []), (b"", b"", []), (b"\0", None, []), (None, b"\0", []),
        (b"ab", b"c", []), (b"a", b"bc", []), (b"abc", b"", []), (b"", b"abc", []), (b"c", b"ab", []),
        (None, None, [("", None)]), (None, None, [("", b"")]), (None, None, [("", b""), ("", b"")]),
        (None, None, [("a", b"b")]), (None, None, [("b", b"a")]), (b"12345678", None, []), (b"12345678\0", None, []),
    ]  # fmt: skip
    assert len({arrow.digest(*each) for each in records}) == len(records)


def test_every_bit_of_a_value_moves_half_of_its_digest(arrow: ModuleType) -> None:
    value = bytes(range(40))
    whole = arrow.digest(b"key", value, [])
    moved = []
    for bit in range(8 * len(value)):
        other = bytearray(value)
        other[bit // 8] ^= 1 << bit % 8
        moved.append(((whole ^ arrow.digest(b"key", bytes(other), [])) & (1 << 64) - 1).bit_count())
    assert 30 < sum(moved) / len(moved) < 34
    assert min(moved) > 10


def test_a_digest_is_what_it_was(arrow: ModuleType) -> None:
    # Ledgers keep digests: they have to mean the same tomorrow.
    assert arrow.digest(b"key", b"value", [("name", b"content"), ("null", None)]) == 7714721916285801697
    assert arrow.digest(None, None, []) == -1264022104028322738


def test_what_cannot_be_built_is_named(arrow: ModuleType) -> None:
    with pytest.raises(InvalidRecord, match="at least one"):
        arrow.build(pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())}), now_ms=NOW_MS)
    with pytest.raises(InvalidRecord, match="timestamp"):
        arrow.build(table_of([(NOW_MS, None, b"v", [])]).select(["value"]), now_ms=2**62)
    with pytest.raises(InvalidRecord, match="binary or text, not int64"):
        arrow.build(pa.RecordBatch.from_pydict({"value": [1, 2]}), now_ms=NOW_MS)
    nameless = pa.array([[{"key": None, "value": b"x"}]], arrow.HEADERS_TYPE)
    with pytest.raises(InvalidRecord, match="without a name"):
        arrow.build(pa.RecordBatch.from_pydict({"value": pa.array([b"v"]), "headers": nameless}), now_ms=NOW_MS)


def test_a_builder_takes_what_fits_in_the_order_given(arrow: ModuleType) -> None:
    rows = table_of([(NOW_MS + n, None, b"%02d" % n * 50, []) for n in range(10)])
    builder = arrow.Builder(rows, pa.array([9, 8, 7, 6, 5], pa.int32()), now_ms=NOW_MS)
    found, place = [], 1
    while place < 5:
        found.append([value[:2] for _, _, _, value, _ in read_by_them(builder.build(place, 5, 250))])
        place += builder.taken
    assert found == [[b"08", b"07"], [b"06", b"05"]]
    builder.build(0, 5, 1)
    assert builder.taken == 1


def mutants(whole: bytes, count: int, seed: int) -> list[bytearray]:
    """Batches with a right CRC and length whose other bytes are spoilt."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(batch.ATTRIBUTES_AT, len(data))
            data[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << source.randrange(8))))
        if source.random() < 0.2:
            del data[source.randrange(batch.HEADER_BYTES, len(data)) :]
            struct.pack_into(">i", data, 8, len(data) - 12)
        batch.sign(data)
        found.append(data)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("codec", list(Codec))
def test_both_forms_agree_on_mutants(compiled_arrow: ModuleType, uncompiled_arrow: ModuleType, codec: Codec) -> None:
    headers = [("h", b"x"), ("né", None)]
    whole = bytes(kernel.build([(NOW_MS - n, b"key", b"v" * 70, headers) for n in range(4)], codec))
    refused = 0
    for data in mutants(whole, 1_500 if codec == Codec.NONE else 100, seed=codec):
        outcomes: list[Any] = []
        for arrow in (compiled_arrow, uncompiled_arrow):
            try:
                outcomes.append(decoded(arrow, data, batch_rows=8))
            except (CorruptBatch, InvalidRecord) as error:
                outcomes.append(str(error))
        assert type(outcomes[0]) is type(outcomes[1])
        assert outcomes[0] == outcomes[1] if isinstance(outcomes[0], str) else outcomes[0].equals(outcomes[1])
        refused += isinstance(outcomes[0], str)
    assert refused > 20


def test_bytes_without_any_order_give_only_named_errors(arrow: ModuleType, seed: int) -> None:
    source = random.Random(seed)
    whole = theirs([(NOW_MS, b"k", b"v" * 30, [("h", b"x")])] * 5)
    for _ in range(2_000):
        data = bytearray(whole * 2)
        for _ in range(source.randint(1, 6)):
            data[source.randrange(len(data))] = source.randrange(256)
        with contextlib.suppress(CorruptBatch, InvalidRecord):
            decoded(arrow, data, first=source.randrange(8), batch_rows=8)
