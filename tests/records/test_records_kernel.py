"""The kernel against an independent codec of the same format, both ways, compiled and not."""

import random
import struct
from types import ModuleType
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records import batch
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from hypotheses import examples
from proving import proves

MOST = 2**62
NOW_MS = 1_700_000_000_000
CODECS = st.sampled_from(list(Codec))
CONTENT = st.none() | st.binary(max_size=200)
TIMES_MS = st.integers(NOW_MS - 10_000, NOW_MS + 10_000) | st.integers(-1, MOST // 2)
HEADERS = st.lists(st.tuples(st.text(max_size=20), CONTENT), max_size=4)
RECORDS = st.lists(st.tuples(TIMES_MS, CONTENT, CONTENT, HEADERS), min_size=1, max_size=30)
# Their writer takes a first timestamp of -1 for none yet, and bases the batch on the next one.
FOR_THEIR_WRITER = RECORDS.filter(lambda new: new[0][0] >= 0)

both_forms = examples(60)


def theirs(new: list[NewRecord], codec: int = 0) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 1 << 24)
    for nth, (timestamp_ms, key, value, headers) in enumerate(new):
        assert builder.append(nth, timestamp_ms, key, value, headers) is not None
    return bytes(builder.build())


def read_by_them(data: bytes | bytearray) -> list[tuple[Any, ...]]:
    found = DefaultRecordBatch(bytes(data))
    assert found.validate_crc()
    return [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in found]


def varint(value: int) -> bytes:
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def record(*parts: bytes) -> bytes:
    body = b"\0" + b"".join(parts)
    return varint(len(body)) + body


def header_of(count: int, **fields: int) -> batch.BatchHeader:
    plain = batch.BatchHeader(0, 0, -1, 2, 0, 0, count - 1, NOW_MS, NOW_MS, -1, -1, -1, count)
    return plain._replace(**fields)


@proves("J1")
@given(new=RECORDS, codec=CODECS)
@both_forms
def test_what_we_build_an_independent_reader_reads(kernel: ModuleType, new: list[NewRecord], codec: Codec) -> None:
    data = kernel.build(new, codec)
    assert read_by_them(data) == [(nth, *fields) for nth, fields in enumerate(new)]
    header = batch.check_produced(memoryview(data))
    assert header.codec == codec
    assert header.max_timestamp_ms == max(fields[0] for fields in new)


@proves("J1")
@given(new=FOR_THEIR_WRITER, codec=CODECS, base_offset=st.integers(0, MOST - 100))
@both_forms
def test_what_an_independent_writer_builds_we_read(
    kernel: ModuleType, new: list[NewRecord], codec: Codec, base_offset: int
) -> None:
    data = bytearray(theirs(new, codec))
    batch.stamp(data, base_offset, 3)
    assert kernel.records(data) == [(base_offset + nth, *fields) for nth, fields in enumerate(new)]
    assert kernel.keys(data) == [(base_offset + nth, key, value is None) for nth, (_, key, value, _) in enumerate(new)]


@given(new=FOR_THEIR_WRITER)
@both_forms
def test_uncompressed_batches_agree_to_the_byte(kernel: ModuleType, new: list[NewRecord]) -> None:
    ours, other = kernel.build(new), theirs(new)
    assert ours[batch.ATTRIBUTES_AT :] == other[batch.ATTRIBUTES_AT :]


@given(new=RECORDS, codec=CODECS)
@both_forms
def test_columns_point_at_keys_values_and_headers(kernel: ModuleType, new: list[NewRecord], codec: Codec) -> None:
    found = kernel.columns(kernel.build(new, codec, base_offset=70))
    view = memoryview(found.payload)
    assert list(found.offsets) == list(range(70, 70 + len(new)))
    assert list(found.timestamps_ms) == [fields[0] for fields in new]
    assert list(found.header_counts) == [len(fields[3]) for fields in new]
    for at, starts, lengths in ((1, found.key_starts, found.key_lengths), (2, found.value_starts, found.value_lengths)):
        sizes = zip(starts, lengths, strict=True)
        pointed = [None if size < 0 else bytes(view[start : start + size]) for start, size in sizes]
        assert pointed == [fields[at] for fields in new]
    assert found.record_starts[0] == 0
    assert found.record_starts[-1] == len(view)
    assert all(column.typecode == "q" for column in found[1:])


@given(new=RECORDS, codec=CODECS, data=st.data())
@both_forms
def test_a_thinned_batch_keeps_offsets_times_and_producer(
    kernel: ModuleType, new: list[NewRecord], codec: Codec, data: st.DataObject
) -> None:
    keep = data.draw(st.lists(st.booleans(), min_size=len(new), max_size=len(new)))
    whole = kernel.build(
        new,
        codec,
        base_offset=500,
        leader_epoch=4,
        producer_id=77,
        producer_epoch=2,
        base_sequence=9,
        attributes=batch.TRANSACTIONAL,
    )
    thin = kernel.filter_batch(whole, keep)
    kept = [found for found, wanted in zip(kernel.records(whole), keep, strict=True) if wanted]
    assert thin == kernel.filter_batch(whole, bytes(keep))
    if not kept:
        assert thin is None
        return
    assert kernel.records(thin) == kept
    assert [found[0] for found in read_by_them(thin)] == [found.offset for found in kept]
    before, after = batch.check(whole), batch.check(thin)
    assert after == before._replace(
        size_bytes=len(thin),
        crc=after.crc,
        record_count=len(kept),
        max_timestamp_ms=max(found.timestamp_ms for found in kept),
    )


def test_a_batch_can_be_thinned_again(kernel: ModuleType) -> None:
    whole = kernel.build([(NOW_MS + nth, b"%d" % nth, b"v", []) for nth in range(5)], Codec.ZSTD)
    thin = kernel.filter_batch(kernel.filter_batch(whole, [0, 1, 1, 0, 1]), [1, 0, 1])
    assert kernel.keys(thin) == [(1, b"1", False), (4, b"4", False)]
    assert batch.check(thin).next_offset == 5
    with pytest.raises(ValueError, match="3 choices for 2"):
        kernel.filter_batch(thin, [1, 1, 1])


@proves("J1")
def test_a_damaged_batch_is_never_thinned_into_a_good_one(kernel: ModuleType) -> None:
    whole = kernel.build([(NOW_MS, b"k", b"value", []), (NOW_MS, b"k", b"value", [])])
    whole[-3] ^= 1
    for work in (kernel.records, kernel.keys, kernel.columns, lambda view: kernel.filter_batch(view, [1, 0])):
        with pytest.raises(CorruptBatch, match="CRC"):
            work(whole)


def test_append_time_stands_for_every_record(kernel: ModuleType) -> None:
    data = kernel.build([(NOW_MS, None, b"a", []), (NOW_MS + 5, None, b"b", [])])
    batch.stamp_append_time(data, NOW_MS + 99)
    assert [found.timestamp_ms for found in kernel.records(data)] == [NOW_MS + 99] * 2
    assert batch.check(kernel.filter_batch(data, [1, 0])).max_timestamp_ms == NOW_MS + 99


def test_a_built_batch_comes_with_the_header_that_it_has(kernel: ModuleType) -> None:
    new: list[NewRecord] = [(7, b"k", b"v", ()), (5, None, b"w" * 300, (("h", b"x"),))]
    for attributes in (0, Codec.LZ4 | batch.TRANSACTIONAL):
        built, header = kernel.build_with_header(new, attributes, 40, 3, (9, 1, 12))
        assert header == batch.check(built)
    assert kernel.build_with_header(new)[0] == kernel.build(new)


def test_a_batch_inside_a_larger_view_is_read(kernel: ModuleType) -> None:
    data = kernel.build([(NOW_MS, b"k", b"v", [])])
    assert len(kernel.records(memoryview(bytes(data) + b"more"))) == 1


def test_an_emptied_batch_has_no_records(kernel: ModuleType) -> None:
    data = kernel.build([(NOW_MS, b"k", b"v", [])])[: batch.HEADER_BYTES]
    struct.pack_into(">i", data, 8, len(data) - 12)
    struct.pack_into(">i", data, 57, 0)
    batch.sign(data)
    assert kernel.records(data) == []


@pytest.mark.parametrize("delta_ms", [0, -1, 63, -64, 64, 2**31, -(2**31) - 1, MOST - 1 - NOW_MS, 1 - MOST])
def test_varints_of_every_size(kernel: ModuleType, delta_ms: int) -> None:
    payload = record(varint(delta_ms), varint(0), b"\1", b"\1", b"\0")
    found = kernel.decode(payload, header_of(1))
    assert list(found.timestamps_ms) == [NOW_MS + delta_ms]


LONGEST = b"\x80" * 9
MALFORMED = {
    "eleven-byte varint": record(LONGEST + b"\x80\0", b"\0\1\1\0"),
    "varint beyond 64 bits": record(LONGEST + b"\2", b"\0\1\1\0"),
    "timestamp delta out of range": record(varint(MOST), b"\0\1\1\0"),
    "negative record length": b"\1" + b"\0" * 7,
    "empty record": b"\0" + b"\0" * 7,
    "key longer than its record": record(b"\0\0", varint(5), b"key", b"\1\0"),
    "key of the largest length": record(b"\0\0", varint(2**63 - 1), b"key\1\0"),
    "length of key below null": record(b"\0\0", varint(-2), b"\1\0"),
    "value into the next record": record(b"\0\0\1", varint(3), b"v") + bytes(7),
    "negative count of headers": record(b"\0\0\1\1", varint(-1)),
    "more headers than bytes": record(b"\0\0\1\1", varint(2**40), b"\2n\1"),
    "null header name": record(b"\0\0\1\1", varint(1), b"\1\1"),
    "header value beyond its record": record(b"\0\0\1\1", varint(1), b"\2n", varint(9), b"x"),
    "spare bytes in a record": record(b"\0\0\1\1\0", b"spare"),
    "spare bytes after the records": record(b"\0\0\1\1\0") + b"\0",
    "offset delta beyond the last": record(b"\0", varint(1), b"\1\1\0"),
    "negative offset delta": record(b"\0", varint(-1), b"\1\1\0"),
    "nothing": b"",
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_malformed_records_are_refused(kernel: ModuleType, payload: bytes, kind: type) -> None:
    with pytest.raises(InvalidRecord):
        kernel.decode(kind(payload), header_of(1))


def test_offset_deltas_must_rise(kernel: ModuleType) -> None:
    same = record(b"\0", varint(1), b"\1\1\0")
    with pytest.raises(InvalidRecord, match="offset delta 1"):
        kernel.decode(same + same, header_of(2))


@pytest.mark.parametrize(
    "fields",
    [
        {"record_count": 2**31 - 1},
        {"record_count": -1},
        {"base_offset": -1},
        {"base_offset": 2**63 - 1},
        {"base_timestamp_ms": 2**63 - 1},
        {"base_timestamp_ms": -(2**63)},
        {"max_timestamp_ms": 2**63 - 1},
    ],
)
def test_header_fields_that_cannot_be_are_refused(kernel: ModuleType, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidRecord):
        kernel.decode(record(b"\0\0\1\1\0"), header_of(1, **fields))


def test_every_cut_of_a_payload_is_refused(kernel: ModuleType) -> None:
    new: list[NewRecord] = [(NOW_MS + nth, b"key", b"v" * 70, [("h", b"x"), ("n", None)]) for nth in range(3)]
    payload = bytes(kernel.build(new)[batch.HEADER_BYTES :])
    for cut in range(len(payload)):
        with pytest.raises(InvalidRecord):
            kernel.decode(payload[:cut], header_of(3))


def mutants(payload: bytes, count: int, seed: int) -> list[bytes]:
    source = random.Random(seed)
    found: list[bytes] = []
    for _ in range(count):
        data = bytearray(payload)
        for _ in range(source.randint(1, 4)):
            at = source.randrange(len(data))
            data[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << source.randrange(8))))
        if source.random() < 0.2:
            del data[source.randrange(len(data)) :]
        found.append(bytes(data))
    return found


def test_compiled_and_uncompiled_agree_on_mutants(compiled_kernel: ModuleType, uncompiled_kernel: ModuleType) -> None:
    new: list[NewRecord] = [(NOW_MS - nth, b"key", b"v" * 70, [("h", b"x"), ("n", None)]) for nth in range(4)]
    payload = bytes(compiled_kernel.build(new)[batch.HEADER_BYTES :])
    refused = 0
    for data in mutants(payload, 20_000, seed=1):
        outcomes: list[object] = []
        for kernel in (compiled_kernel, uncompiled_kernel):
            try:
                found = kernel.decode(data, header_of(4))
            except InvalidRecord as error:
                outcomes.append(str(error))
            else:
                outcomes.append(found)
                assert_inside(found)
        assert outcomes[0] == outcomes[1]
        refused += isinstance(outcomes[0], str)
    assert 2_000 < refused < 20_000


def assert_inside(found: Any) -> None:
    end = len(found.payload)
    for starts, lengths in ((found.key_starts, found.key_lengths), (found.value_starts, found.value_lengths)):
        assert all(0 <= start <= end and start + size <= end for start, size in zip(starts, lengths, strict=True))


@pytest.mark.parametrize("codec", list(Codec))
def test_mutated_batches_with_a_right_crc_give_only_named_errors(kernel: ModuleType, codec: Codec) -> None:
    new: list[NewRecord] = [(NOW_MS, b"key", b"value" * 9, [("h", None)]) for _ in range(6)]
    whole = bytes(kernel.build(new, codec))
    refused = 0
    for data in mutants(whole[batch.ATTRIBUTES_AT :], 1_500, seed=codec):
        mutant = bytearray(whole[: batch.ATTRIBUTES_AT] + data)
        struct.pack_into(">i", mutant, 8, len(mutant) - 12)
        if len(mutant) > batch.HEADER_BYTES:
            batch.sign(mutant)
        for work in (kernel.records, kernel.keys):
            try:
                work(mutant, 1 << 20)
            except (CorruptBatch, InvalidRecord):
                refused += 1
    assert refused > 300


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_bomb_is_refused_at_the_callers_bound(kernel: ModuleType, codec: Codec) -> None:
    data = kernel.build([(NOW_MS, None, bytes(4 << 20), [])], codec)
    for work in (kernel.records, kernel.keys, kernel.columns):
        with pytest.raises(InvalidRecord, match="more than 1048576"):
            work(data, 1 << 20)
    assert len(kernel.records(data)[0].value) == 4 << 20


def test_what_cannot_be_built_is_named(kernel: ModuleType) -> None:
    with pytest.raises(InvalidRecord, match="at least one"):
        kernel.build([])
    with pytest.raises(InvalidRecord, match="timestamp"):
        kernel.build([(MOST, None, None, [])])
    with pytest.raises(InvalidRecord, match="timestamp"):
        kernel.build([(0, None, None, []), (-MOST, None, None, [])])
    with pytest.raises(InvalidRecord, match="header name"):
        kernel.build([(0, None, None, [("\ud800", None)])])
    with pytest.raises(InvalidRecord, match="codec 6"):
        kernel.build([(0, None, None, [])], 6)


def test_header_names_that_are_not_text_are_shown_with_marks(kernel: ModuleType) -> None:
    data = kernel.build([(NOW_MS, None, None, [("ab", b"x")])])
    at = data.rindex(b"ab")
    data[at] = 0xFF
    batch.sign(data)
    assert kernel.records(data)[0].headers == [("\ufffdb", b"x")]


def test_views_are_taken_as_keys_and_values(kernel: ModuleType) -> None:
    data = kernel.build([(NOW_MS, memoryview(b"key"), bytearray(b"value"), [("h", memoryview(b"x"))])])
    assert kernel.records(data) == [(0, NOW_MS, b"key", b"value", [("h", b"x")])]
