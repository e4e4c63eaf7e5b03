from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch
from headrace.groups import consumer_protocol
from headrace.groups import consumer_records as records
from headrace.groups.consumer_records import (
    ClassicSession,
    ConsumerGroupKey,
    CurrentAssignment,
    GroupEpoch,
    MemberState,
    MemberSubscription,
    RecordKind,
)
from proving import proves

ID = bytes(range(16))


@proves("N1")
@pytest.mark.parametrize(
    ("key", "content"),
    [
        (ConsumerGroupKey(RecordKind.GROUP, "g"), b"\0\x03\0\x01g"),
        (ConsumerGroupKey(RecordKind.PARTITIONS, "g"), b"\0\x04\0\x01g"),
        (ConsumerGroupKey(RecordKind.MEMBER, "g", "m"), b"\0\x05\0\x01g\0\x01m"),
        (ConsumerGroupKey(RecordKind.TARGET_EPOCH, "g"), b"\0\x06\0\x01g"),
        (ConsumerGroupKey(RecordKind.TARGET, "g", "m"), b"\0\x07\0\x01g\0\x01m"),
        (ConsumerGroupKey(RecordKind.CURRENT, "g", "m"), b"\0\x08\0\x01g\0\x01m"),
        (ConsumerGroupKey(RecordKind.PATTERN, "g", "a.*"), b"\0\x10\0\x01g\0\x03a.*"),
    ],
)
def test_keys_are_kafkas(key: ConsumerGroupKey, content: bytes) -> None:
    assert records.encode_key(key) == content
    assert records.decode_key(content) == key
    with pytest.raises(CorruptBatch):
        records.decode_key(content[:-1])


def test_keys_of_other_kinds_are_not_known() -> None:
    assert records.decode_key(b"\0\x01\0\x01g") is None
    assert records.decode_key(b"\0\x11\0\x01g") is None


@proves("N1")
def test_values_are_kafkas() -> None:
    partitions = b"\x02" + ID + b"\x03" + struct.pack(">ii", 1, 2) + b"\0"
    assert records.encode_group_epoch(GroupEpoch(7)) == b"\0\0\0\0\0\x07\0"
    assert records.encode_group_epoch(GroupEpoch(7, 5)) == b"\0\0\0\0\0\x07\x01\0\x08" + bytes(7) + b"\x05"
    assert records.encode_target_epoch(7) == b"\0\0\0\0\0\x07\0"
    assert records.encode_target({ID: frozenset((2, 1))}) == b"\0\0" + partitions + b"\0"
    current = CurrentAssignment(4, 3, MemberState.UNREVOKED_PARTITIONS, {ID: frozenset((1, 2))})
    assert records.encode_current(current) == b"\0\0" + struct.pack(">iib", 4, 3, 2) + partitions + b"\x01\0"
    plain = MemberSubscription(None, "r", "c", "/h", ("t",), None, 9, "range")
    head = b"\0\0\0\x02r\x02c\x03/h\x02\x02t\0\0\0\0\x09\x06range"
    assert records.encode_subscription(plain) == head + b"\0"
    assert records.encode_pattern(("t",), 1, 2) == b"\0\0\x02\x02t" + struct.pack(">qq", 1, 2) + b"\0"


TEXTS = st.text(max_size=5)
ASSIGNMENTS = st.dictionaries(
    st.binary(min_size=16, max_size=16), st.frozensets(st.integers(0, 1 << 31 - 1), min_size=1, max_size=3), max_size=3
)
SESSIONS = st.builds(
    ClassicSession, st.integers(0, 10), st.lists(st.tuples(TEXTS, st.binary(max_size=5)), max_size=2).map(tuple)
)
SUBSCRIPTIONS = st.builds(
    MemberSubscription,
    st.none() | TEXTS,
    st.none() | TEXTS,
    TEXTS,
    TEXTS,
    st.lists(TEXTS, max_size=3).map(tuple),
    st.none() | TEXTS,
    st.integers(-1, 1 << 31 - 1),
    st.none() | TEXTS,
    st.none() | SESSIONS,
)
CURRENT = st.builds(
    CurrentAssignment, st.integers(-2, 9), st.integers(-2, 9), st.sampled_from(MemberState), ASSIGNMENTS, ASSIGNMENTS
)
EPOCHS = st.builds(GroupEpoch, st.integers(0, 9), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-1, 1 << 60))


@given(SUBSCRIPTIONS, CURRENT, EPOCHS, ASSIGNMENTS)
def test_what_is_written_is_read(
    member: MemberSubscription, current: CurrentAssignment, epoch: GroupEpoch, target: dict[bytes, frozenset[int]]
) -> None:
    assert records.decode_subscription(records.encode_subscription(member)) == member
    assert records.decode_current(records.encode_current(current)) == current
    assert records.decode_group_epoch(records.encode_group_epoch(epoch)) == epoch
    assert records.decode_target(records.encode_target(target)) == target
    assert records.decode_pattern(records.encode_pattern(member.topics, 1, 2)) == member.topics


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_or_read(content: bytes) -> None:
    for decode in (
        records.decode_subscription,
        records.decode_current,
        records.decode_group_epoch,
        records.decode_target,
        records.decode_pattern,
        consumer_protocol.decode_subscription,
        consumer_protocol.decode_assignment,
    ):
        for value in (content, b"\0\0" + content):
            with contextlib.suppress(CorruptBatch):
                decode(value)


def test_later_versions_and_states_are_refused() -> None:
    with pytest.raises(CorruptBatch, match="version 1"):
        records.decode_target_epoch(b"\0\x01\0\0\0\x01\0")
    with pytest.raises(CorruptBatch, match="state 9"):
        records.decode_current(b"\0\0" + struct.pack(">iib", 4, 3, 9) + b"\x01\x01\0")


def test_a_consumers_bytes_are_read_in_every_version() -> None:
    def subscription(version: int) -> bytes:
        parts = (
            struct.pack(">hih1sii", version, 1, 1, b"t", -1, 1) + b"\0\x01t" + struct.pack(">iii", 2, 0, 3),
            struct.pack(">i", 5),
            b"\0\x01r",
        )
        owned, generation, rack = parts
        whole = owned + generation * (version >= 2) + rack * (version >= 3)
        return whole if version else struct.pack(">hih1si", 0, 1, 1, b"t", -1)

    for version in range(6):
        found = consumer_protocol.decode_subscription(subscription(version))
        assert found.topics == ("t",)
        assert found.owned == ({"t": {0, 3}} if version else {})
        assert found.rack == ("r" if version >= 3 else None)
    encoded = consumer_protocol.encode_assignment({"t": frozenset((3, 0))}, 9)
    assert encoded == struct.pack(">hih1siiii", 3, 1, 1, b"t", 2, 0, 3, -1)
    assert consumer_protocol.decode_assignment(encoded) == {"t": {0, 3}}
    assert consumer_protocol.decode_assignment(b"") == {}
