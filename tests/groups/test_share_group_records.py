"""Records of share groups in `__consumer_offsets` have Kafka's formats, and are read as they were written."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptBatch
from headrace.groups import share_records as records
from headrace.groups.consumer_records import (
    ConsumerGroupKey,
    CurrentAssignment,
    GroupEpoch,
    MemberSubscription,
    RecordKind,
    decode_key,
    encode_key,
    encode_target,
    encode_target_epoch,
)
from headrace.groups.share_records import KeptStates, SharePieces

TOPIC = b"0123456789abcdef"
MEMBER = MemberSubscription(None, "r", "c", "/h", ("t", "u"))
STATES = KeptStates({TOPIC: frozenset({2})}, {TOPIC: frozenset({0, 1})})


@pytest.mark.parametrize(
    ("key", "content"),
    [
        (ConsumerGroupKey(RecordKind.SHARE_MEMBER, "g", "m"), b"\0\x0a\0\x01g\0\x01m"),
        (ConsumerGroupKey(RecordKind.SHARE_GROUP, "g"), b"\0\x0b\0\x01g"),
        (ConsumerGroupKey(RecordKind.SHARE_TARGET_EPOCH, "g"), b"\0\x0c\0\x01g"),
        (ConsumerGroupKey(RecordKind.SHARE_TARGET, "g", "m"), b"\0\x0d\0\x01g\0\x01m"),
        (ConsumerGroupKey(RecordKind.SHARE_CURRENT, "g", "m"), b"\0\x0e\0\x01g\0\x01m"),
        (ConsumerGroupKey(RecordKind.SHARE_STATES, "g"), b"\0\x0f\0\x01g"),
    ],
)
def test_keys_of_share_groups_are_kafkas(key: ConsumerGroupKey, content: bytes) -> None:
    assert encode_key(key) == content
    assert decode_key(content) == key
    assert key.kind.is_of_share_group
    assert not RecordKind.PATTERN.is_of_share_group
    assert not RecordKind.CURRENT.is_of_share_group


def test_values_of_share_groups_are_kafkas() -> None:
    assert records.encode_member(MEMBER) == b"\0\0" + b"\x02r" + b"\x02c" + b"\x03/h" + b"\x03\x02t\x02u" + b"\0"
    assert records.encode_group_epoch(GroupEpoch(3, 5)) == b"\0\0" + b"\0\0\0\x03" + b"\0\0\0\0\0\0\0\x05" + b"\0"
    current = CurrentAssignment(4, 3, assigned={TOPIC: frozenset({1})})
    partitions = b"\x02" + TOPIC + b"\x02\0\0\0\x01" + b"\0"
    assert records.encode_current(current) == b"\0\0" + b"\0\0\0\x04" + b"\0\0\0\x03" + b"\x01" + partitions + b"\0"
    initializing = b"\x02" + TOPIC + b"\x02t" + b"\x02\0\0\0\x02" + b"\0"
    initialized = b"\x02" + TOPIC + b"\x02t" + b"\x03\0\0\0\0\0\0\0\x01" + b"\0"
    assert records.encode_states(STATES, {TOPIC: "t"}) == b"\0\0" + initializing + initialized + b"\x01" + b"\0"


def test_a_group_is_read_back_from_its_records_and_gone_when_they_are() -> None:
    assigned = {TOPIC: frozenset({1})}
    current = CurrentAssignment(4, 3, assigned=assigned)
    written = {
        ConsumerGroupKey(RecordKind.SHARE_GROUP, "g"): records.encode_group_epoch(GroupEpoch(3, -5)),
        ConsumerGroupKey(RecordKind.SHARE_TARGET_EPOCH, "g"): encode_target_epoch(3),
        ConsumerGroupKey(RecordKind.SHARE_STATES, "g"): records.encode_states(STATES, {}),
        ConsumerGroupKey(RecordKind.SHARE_MEMBER, "g", "m"): records.encode_member(MEMBER),
        ConsumerGroupKey(RecordKind.SHARE_TARGET, "g", "m"): encode_target(assigned),
        ConsumerGroupKey(RecordKind.SHARE_CURRENT, "g", "m"): records.encode_current(current),
    }
    pieces = SharePieces()
    for key, value in written.items():
        pieces.take(key, value)
    assert (pieces.epoch, pieces.target_epoch, pieces.states) == (GroupEpoch(3, -5), 3, STATES)
    assert (pieces.members, pieces.targets, pieces.current) == ({"m": MEMBER}, {"m": assigned}, {"m": current})
    assert not pieces.is_over
    for key in written:
        pieces.take(key, None)
    assert pieces == SharePieces()
    assert pieces.is_over


def test_what_is_cut_short_or_newer_is_refused() -> None:
    key = ConsumerGroupKey(RecordKind.SHARE_STATES, "g")
    whole = records.encode_states(STATES, {})
    for value in (whole[:-30], b"\0\x01" + whole[2:], b""):
        with pytest.raises(CorruptBatch):
            SharePieces().take(key, value)
