"""Records of share partitions: what is written is read back, and what is no record is refused."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest

from headrace.errors import CorruptBatch
from headrace.queues.messages import DeliveryState, Letter, Reason, SharePartitionKey, ShareState, StateBatch
from headrace.queues.state_records import (
    NUMBER_MAX,
    SLOTS_MAX,
    Kept,
    Update,
    coordinator_key,
    decode_key,
    decode_snapshot,
    decode_update,
    encode_key,
    encode_snapshot,
    encode_update,
    is_coordinator_key,
    next_number,
)
from queues.state_scene import ACQUIRED, ARCHIVING, AVAILABLE, KEY, acknowledged, acquired

BATCHES = (
    StateBatch(10, 19, AVAILABLE, 3),
    acquired(20, 20, 2, "a member", 1_700_000_000_000),
    acknowledged(21, 1 << 40),
    StateBatch((1 << 40) + 1, (1 << 40) + 2, ARCHIVING, 5, letter=Letter(Reason.DELIVERIES, 1 << 62, 7)),
    StateBatch((1 << 40) + 3, (1 << 40) + 3, ARCHIVING, 1, letter=Letter(Reason.REJECTED)),
)


def test_keys_are_read_back() -> None:
    assert [decode_key(encode_key(KEY, slot)) for slot in range(SLOTS_MAX + 1)] == [
        (KEY, slot) for slot in range(SLOTS_MAX + 1)
    ]


def test_the_key_of_a_snapshot_is_kafkas() -> None:
    assert encode_key(KEY, 0) == struct.pack(">hh", 0, 7) + b"workers" + KEY.topic_id + struct.pack(">i", 0)


def test_keys_of_other_kinds_say_nothing_to_us() -> None:
    assert decode_key(struct.pack(">h", 2) + b"whatever") is None


@pytest.mark.parametrize("key", [b"", b"\0", encode_key(KEY, 0)[:-1], encode_key(KEY, 1)[:-2]])
def test_a_key_that_is_cut_is_refused(key: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decode_key(key)


@pytest.mark.parametrize("slot", [-1, 0, SLOTS_MAX + 1])
def test_a_slot_that_there_is_not_is_refused(slot: int) -> None:
    with pytest.raises(CorruptBatch, match="slot"):
        decode_key(encode_key(KEY, 1)[:-2] + struct.pack(">h", slot))


def test_values_are_read_back() -> None:
    for kept in (Kept(ShareState(7, 3, 10, BATCHES), 1 << 62, 2), Kept(ShareState(0, 0, -1))):
        assert decode_snapshot(encode_snapshot(12, kept, 1)) == (12, kept)
    for update in (Update(4, 21, BATCHES, written_epoch=4), Update(-1, load_id=5), Update(3)):
        assert decode_update(encode_update(9, update)) == (9, update)


def test_a_snapshot_is_what_kafka_reads() -> None:
    """KIP-932's ShareSnapshotValue, field by field: its tools pass over tags that they do not know."""
    value = encode_snapshot(2, Kept(ShareState(7, 3, 10, (acknowledged(10, 14, 2),)), 6), 99)
    fixed = struct.Struct(">hiiiqqq")
    assert fixed.unpack_from(value) == (0, 2, 7, 3, 10, 99, 99)
    rest = value[fixed.size :]
    assert rest[:1] == b"\2"
    assert struct.unpack_from(">qqbhB", rest, 1) == (10, 14, 2, 2, 0)
    tags = rest[1 + 20 :]
    assert tags[0] == 2
    assert (tags[1], tags[2], struct.unpack_from(">i", tags, 3)) == (0, 4, (5,))


def test_values_that_are_cut_or_unknown_are_refused() -> None:
    snapshot = encode_snapshot(2, Kept(ShareState(7, 3, 10, BATCHES), 6), 99)
    update = encode_update(2, Update(3, 10, BATCHES, 6))
    for value, decode in ((snapshot, decode_snapshot), (update, decode_update)):
        for size in range(len(value)):
            with pytest.raises(CorruptBatch):
                decode(value[:size])
        with pytest.raises(CorruptBatch, match="version 1"):
            decode(b"\0\1" + value[2:])
    strange = update.replace(struct.pack(">qqb", 10, 19, AVAILABLE), struct.pack(">qqb", 10, 19, 5))
    with pytest.raises(CorruptBatch, match="state 5"):
        decode_update(strange)
    strange = update.replace(struct.pack(">bqi", Reason.DELIVERIES, 1 << 62, 7), struct.pack(">bqi", 9, 1 << 62, 7))
    with pytest.raises(CorruptBatch, match="reason 9"):
        decode_update(strange)


def test_damaged_values_are_refused_or_read_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    value = bytearray(encode_snapshot(2, Kept(ShareState(7, 3, 10, BATCHES), 6), 99))
    for _ in range(3000):
        at = rng.randrange(len(value))
        damaged = value[:at] + bytes([rng.randrange(256)]) + value[at + 1 :]
        with contextlib.suppress(CorruptBatch):
            decode_snapshot(bytes(damaged))


def test_a_share_partition_has_the_coordinator_that_kafka_gives_it() -> None:
    """Kafka prints the id of a topic in base64 without padding."""
    key = SharePartitionKey("a:b", bytes(range(16)), 12)
    assert coordinator_key(key) == "a:b:AAECAwQFBgcICQoLDA0ODw:12"
    assert is_coordinator_key(coordinator_key(key))


@pytest.mark.parametrize("name", ["", "g", ":{}:1", "g:AAEC:1", "g:{}", "g:{}:", "g:{}:-1", "g:{}=:1", "g:{}:\u00b2"])
def test_other_texts_are_no_share_partition(name: str) -> None:
    assert not is_coordinator_key(name.format("AAECAwQFBgcICQoLDA0ODw"))


def test_numbers_of_snapshots_begin_again_before_they_do_not_fit() -> None:
    assert next_number(NUMBER_MAX) == 0
    kept = Kept(ShareState(7, 3, 10), 6)
    assert decode_snapshot(encode_snapshot(NUMBER_MAX, kept, 1))[0] == NUMBER_MAX


def test_states_are_numbered_as_in_kafka() -> None:
    assert [int(state) for state in DeliveryState] == [0, 1, 2, 3, 4]
    assert ACQUIRED is DeliveryState.ACQUIRED
