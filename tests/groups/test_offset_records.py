from __future__ import annotations

import struct

import pytest

from headrace.coordinators.record_fields import Reader, uvarint
from headrace.coordinators.state_log import partition_of
from headrace.errors import CorruptBatch
from headrace.groups.offsets import subscribed, topics_of
from headrace.groups.records import (
    GroupKey,
    GroupSnapshot,
    MemberSnapshot,
    OffsetAndMetadata,
    OffsetKey,
    decode_group,
    decode_key,
    decode_offset,
    encode_group,
    encode_group_key,
    encode_offset,
    encode_offset_key,
)

SNAPSHOT = GroupSnapshot(
    "g",
    "consumer",
    7,
    "range",
    "m1",
    1_700_000_000_000,
    (
        MemberSnapshot("m1", None, "c", "/1.2.3.4", 300_000, 45_000, b"meta", b"assigned"),
        MemberSnapshot("m2", "i2", "c", "/1.2.3.4", 300_000, 45_000, b"", b""),
    ),
)


def test_keys_are_laid_out_as_kafka_has_them() -> None:
    key = encode_offset_key(OffsetKey("grp", "topic", 3))
    assert key == b"\0\1" + b"\0\3grp" + b"\0\5topic" + b"\0\0\0\3"
    assert decode_key(key) == OffsetKey("grp", "topic", 3)
    assert decode_key(b"\0\0" + key[2:]) == OffsetKey("grp", "topic", 3)
    assert encode_group_key("grp") == b"\0\2\0\3grp"
    assert decode_key(b"\0\2\0\3grp") == GroupKey("grp")
    assert decode_key(b"\0\3\0\3grp") is None


def test_offsets_are_laid_out_as_kafka_has_them() -> None:
    committed = OffsetAndMetadata(5, 2, "m", 9)
    assert encode_offset(committed) == b"\0\3" + struct.pack(">qi", 5, 2) + b"\0\1m" + struct.pack(">q", 9)
    assert decode_offset(encode_offset(committed)) == committed
    kept = OffsetAndMetadata(5, -1, "m", 9, 20)
    assert encode_offset(kept) == b"\0\1" + struct.pack(">q", 5) + b"\0\1m" + struct.pack(">qq", 9, 20)
    assert decode_offset(encode_offset(kept)) == kept


@pytest.mark.parametrize("version", [0, 2])
def test_offsets_of_older_versions_are_read(version: int) -> None:
    value = struct.pack(">hq", version, 5) + b"\0\1m" + struct.pack(">q", 9)
    assert decode_offset(value) == OffsetAndMetadata(5, -1, "m", 9)


def test_an_offset_with_its_topics_id_is_laid_out_as_kafka_has_it() -> None:
    topic_id = bytes(range(16))
    committed = OffsetAndMetadata(5, 2, "m", 9, topic_id=topic_id)
    head = b"\0\4" + struct.pack(">qi", 5, 2) + b"\2m" + struct.pack(">q", 9)
    assert encode_offset(committed) == head + b"\1\0\x10" + topic_id
    assert decode_offset(encode_offset(committed)) == committed
    assert decode_offset(head + b"\0") == OffsetAndMetadata(5, 2, "m", 9)
    assert decode_offset(head + b"\2\0\x10" + topic_id + b"\5\3new") == committed, "unknown tags are passed over"
    kept = OffsetAndMetadata(5, 2, "m" * 200, 9, 77, topic_id)
    assert decode_offset(encode_offset(kept)) == kept


def test_groups_are_laid_out_as_kafka_has_them() -> None:
    value = encode_group(SNAPSHOT)
    assert value.startswith(
        b"\0\3\0\x08consumer\0\0\0\7\0\5range\0\2m1" + struct.pack(">qi", 1_700_000_000_000, 2) + b"\0\2m1\xff\xff\0\1c"
    )
    assert value.endswith(b"\0\2m2\0\2i2\0\1c\0\x08/1.2.3.4" + struct.pack(">iiii", 300_000, 45_000, 0, 0))
    assert decode_group("g", value) == SNAPSHOT
    empty = GroupSnapshot("g", "consumer", 8, None, None, 5)
    assert decode_group("g", encode_group(empty)) == empty


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("nothing", [b"\0\0", b"\xff\xff"])
def test_groups_of_older_versions_are_read(version: int, nothing: bytes) -> None:
    timeouts = struct.pack(">ii", 60_000, 45_000) if version >= 1 else struct.pack(">i", 45_000)
    since = struct.pack(">q", 77) if version >= 2 else b""
    member = b"\0\1m\0\1c\0\1h" + timeouts + b"\0\0\0\1s\0\0\0\1a"
    head = struct.pack(">h", version) + nothing + struct.pack(">i", 3) + b"\xff\xff\xff\xff" + since
    rebalance_ms, since_ms = 60_000 if version >= 1 else 45_000, 77 if version >= 2 else -1
    assert decode_group("g", head + struct.pack(">i", 1) + member) == GroupSnapshot(
        "g", "", 3, None, None, since_ms, (MemberSnapshot("m", None, "c", "h", rebalance_ms, 45_000, b"s", b"a"),)
    )


def test_records_cut_anywhere_or_of_unknown_versions_are_refused() -> None:
    for value in (encode_group(SNAPSHOT), struct.pack(">hi", 3, -5)):
        for end in range(len(value)):
            with pytest.raises(CorruptBatch):
                decode_group("g", value[:end])
    for topic_id in (None, bytes(16)):
        whole = encode_offset(OffsetAndMetadata(5, 2, "metadata", 9, topic_id=topic_id))
        for end in range(len(whole)):
            with pytest.raises(CorruptBatch):
                decode_offset(whole[:end])
    with pytest.raises(CorruptBatch, match="five bytes"):
        decode_offset(struct.pack(">hqi", 4, 5, 2) + b"\xff" * 9)
    for decode in (decode_offset, lambda value: decode_group("g", value)):
        with pytest.raises(CorruptBatch, match="version 9"):
            decode(b"\0\x09" + bytes(100))
    with pytest.raises(CorruptBatch, match="UTF-8"):
        decode_key(b"\0\2\0\1\xff")
    with pytest.raises(CorruptBatch, match="no -2 bytes"):
        decode_key(b"\0\2\xff\xfe")
    with pytest.raises(CorruptBatch, match="no -1 bytes"):
        decode_offset(struct.pack(">hqi", 4, 5, 2) + bytes(9))


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, b"\0"), (127, b"\x7f"), (128, b"\x80\1"), (16_383, b"\xff\x7f"), (16_384, b"\x80\x80\1")],
)
def test_numbers_take_no_more_bytes_than_they_need(value: int, written: bytes) -> None:
    assert uvarint(value) == written
    assert Reader(written).uvarint() == value
    with pytest.raises(CorruptBatch, match="five bytes"):
        Reader(b"\x80" * 5 + written).uvarint()


@pytest.mark.parametrize(
    ("group", "java_hash"),
    [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", -(2**31)), ("Aa", 2112), ("BB", 2112), ("é", 233)],
)
def test_groups_live_in_the_partition_that_java_computes(group: str, java_hash: int) -> None:
    positive = 0 if java_hash == -(2**31) else abs(java_hash)
    assert partition_of(group, 50) == positive % 50
    assert partition_of(group, 7) == positive % 7


def test_characters_beyond_the_basic_plane_count_as_two_units() -> None:
    assert partition_of("\U0001f600", 1 << 30) == (31 * 0xD83D + 0xDE00) % (1 << 30)


def test_topics_are_read_from_a_consumers_metadata() -> None:
    metadata = struct.pack(">hi", 1, 2) + b"\0\1a\0\1b" + b"user data"
    assert topics_of(metadata) == frozenset("ab")
    assert subscribed([metadata, struct.pack(">hi", 0, 1) + b"\0\1c"]) == frozenset("abc")
    assert topics_of(b"\0") is None
    assert topics_of(struct.pack(">hi", 0, 2**31 - 1)) is None
    assert subscribed([metadata, b"no"]) is None
