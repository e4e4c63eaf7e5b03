"""Records of `__share_group_state`: what is kept of share partitions, so that compaction by key loses nothing of it.

The formats are Kafka's own, with fields of ours behind tags and one behind a key (types as in
`coordinators.record_fields`). The first int16 of a key is its kind, of a value its version, always 0:

    key 0       group, topic id 16 bytes, partition int32: a snapshot
    key 1       the same, and a slot int16, which is ours: an update
    snapshot    number int32 (Kafka's snapshot epoch), state epoch int32, leader epoch int32, start offset int64, time
                of creation int64, of writing int64, batches; tags
    update      number int32 of the snapshot that it follows, leader epoch int32, start offset int64, batches; tags
    batches     count and one more as a varint, each: first offset int64, last offset int64, state int8, delivery count
                int16, tags: 10000 until int64 and member, a compact string, of what is acquired, or without a member
                waits until then; 10001 reason int8, producer id int64, sequence int32, of what waits for its dead
                letter
    tags        0 how many offsets from the start on are done with, int32, which we do not read back; ours: 10000 load
                id int64, 10001 leader epoch of the last write int32

A snapshot is the whole state; slots 1 to `SLOTS_MAX` hold the updates since it, used one after the other. Kafka has one
key for all updates, of which compaction would leave the last. Here the next snapshot, whose number is the next one,
begins again with slot 1: what it supersedes is an update of the snapshot before, which nobody needs any more. So a
compacted log has at most `SLOTS_MAX` + 1 records of a share partition. An update counts only behind the snapshot of its
number. To delete a share partition is to write all of its keys without a value.

An update says what holds from now on for the offsets of its batches, not by how much they have changed: taken twice it
changes nothing.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace.cluster.names import SHARE_STATE_TOPIC
from headrace.coordinators.record_fields import Reader, compact_string, string, uvarint
from headrace.errors import CorruptBatch
from headrace.queues.messages import (
    NO_OFFSET,
    DeliveryState,
    Letter,
    Reason,
    SharePartitionKey,
    ShareState,
    StateBatch,
)

SLOTS_MAX: Final = 100
SNAPSHOT_SLOT: Final = 0
NUMBER_MAX: Final = (1 << 31) - 1
NO_LOAD: Final = -1
NO_EPOCH: Final = -1
"""Nobody says in which."""
TOPIC_ID_BYTES: Final = 16
DONE: Final = frozenset({DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVING, DeliveryState.ARCHIVED})
"""States of records that are delivered to nobody any more."""

_SNAPSHOT_KEY: Final = 0
_UPDATE_KEY: Final = 1
_VERSION: Final = 0
_COMPLETE_TAG: Final = 0
_OWN_TAG: Final = 10_000
"""Readers pass over tags that they do not know, and Kafka numbers its own from 0."""

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_PLACE: Final = struct.Struct(f">{TOPIC_ID_BYTES}si")
_SNAPSHOT: Final = struct.Struct(">hiiiqqq")
_UPDATE: Final = struct.Struct(">hiiq")
_BATCH: Final = struct.Struct(">qqbh")
_LETTER: Final = struct.Struct(">bqi")
_LETTER_TAG: Final = 10_001
_STATES: Final = {int(state): state for state in DeliveryState}
_REASONS: Final = {int(reason): reason for reason in Reason}
_VERSION_BYTES: Final = _INT16.pack(_VERSION)
_NO_TAGS: Final = b"\0"
_ONE_OWN_TAG: Final = b"\1" + uvarint(_OWN_TAG)
_ONE_LETTER_TAG: Final = b"\1" + uvarint(_LETTER_TAG) + uvarint(_LETTER.size)
_COMPLETE_HEAD: Final = uvarint(_COMPLETE_TAG) + uvarint(_INT32.size)
_LOAD_HEAD: Final = uvarint(_OWN_TAG) + uvarint(_INT64.size)
_WRITTEN_TAG: Final = 10_001
_WRITTEN_HEAD: Final = uvarint(_WRITTEN_TAG) + uvarint(_INT32.size)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a share partition."""

    state: ShareState
    load_id: int = NO_LOAD
    """The load at its leader that may write: each read has its own, so that a write which was held up on its way does
    not come in behind a later read."""
    written_epoch: int = NO_EPOCH
    """The leader epoch of the last write, while that of the state is the one that fences: a log may have lost what an
    earlier leader had, so who reads wants to know whose offsets these are."""


@dataclass(frozen=True, slots=True)
class Update:
    """What has changed. -1 for what has not."""

    leader_epoch: int = NO_EPOCH
    start_offset: int = NO_OFFSET
    batches: tuple[StateBatch, ...] = ()
    load_id: int = NO_LOAD
    written_epoch: int = NO_EPOCH


def coordinator_key(key: SharePartitionKey) -> str:
    """What says which partition of the topic has it, and FindCoordinator is asked for: Kafka prints the id of a topic
    in base64."""
    topic_id = base64.urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


def is_coordinator_key(text: str) -> bool:
    """Whether it is one that `coordinator_key` could have made."""
    group, _, rest = text.rpartition(":")[0].rpartition(":")
    partition = text.rpartition(":")[2]
    try:
        topic_id = base64.b64decode(rest + "==", altchars=b"-_", validate=True)
    except ValueError:
        return False
    return bool(group) and len(topic_id) == TOPIC_ID_BYTES and partition.isascii() and partition.isdigit()


def next_number(number: int) -> int:
    return 0 if number >= NUMBER_MAX else number + 1


def complete_count(state: ShareState) -> int:
    """Offsets from the start on that are delivered to nobody any more."""
    return sum(batch.last_offset - batch.first_offset + 1 for batch in state.batches if batch.state in DONE)


# Keys


def encode_key(key: SharePartitionKey, slot: int) -> bytes:
    kind = _SNAPSHOT_KEY if slot == SNAPSHOT_SLOT else _UPDATE_KEY
    name = _INT16.pack(kind) + string(key.group) + key.topic_id + _INT32.pack(key.partition)
    return name if slot == SNAPSHOT_SLOT else name + _INT16.pack(slot)


def decode_key(encoded: bytes) -> tuple[SharePartitionKey, int] | None:
    """The share partition and the slot; None for a kind that is not ours to know."""
    reader = Reader(encoded)
    kind = reader.int16()
    if kind not in (_SNAPSHOT_KEY, _UPDATE_KEY):
        return None
    key = SharePartitionKey(reader.string(), *_PLACE.unpack(reader.take(_PLACE.size)))
    slot = reader.int16() if kind == _UPDATE_KEY else SNAPSHOT_SLOT
    if not 0 <= slot <= SLOTS_MAX or (slot == SNAPSHOT_SLOT) != (kind == _SNAPSHOT_KEY):
        raise CorruptBatch(f"{SHARE_STATE_TOPIC}: a key of slot {slot}; slots 1 to {SLOTS_MAX} are known")
    return key, slot


# Values


def encode_snapshot(number: int, kept: Kept, now_ms: int) -> bytes:
    state = kept.state
    head = _SNAPSHOT.pack(_VERSION, number, state.state_epoch, state.leader_epoch, state.start_offset, now_ms, now_ms)
    complete = _COMPLETE_HEAD + _INT32.pack(min(complete_count(state), NUMBER_MAX))
    return head + _encode_batches(state.batches) + _encode_tags(kept.load_id, kept.written_epoch, complete)


def encode_update(number: int, update: Update) -> bytes:
    head = _UPDATE.pack(_VERSION, number, update.leader_epoch, update.start_offset)
    return head + _encode_batches(update.batches) + _encode_tags(update.load_id, update.written_epoch)


def _encode_tags(load_id: int, written_epoch: int, *fields: bytes) -> bytes:
    """Behind the fields of Kafka's, which have lower tags."""
    if load_id != NO_LOAD:
        fields += (_LOAD_HEAD + _INT64.pack(load_id),)
    if written_epoch != NO_EPOCH:
        fields += (_WRITTEN_HEAD + _INT32.pack(written_epoch),)
    return uvarint(len(fields)) + b"".join(fields)


def _encode_batches(batches: Iterable[StateBatch]) -> bytes:
    parts = [b""]
    for batch in batches:
        parts.append(_BATCH.pack(batch.first_offset, batch.last_offset, batch.state, batch.delivery_count))
        if batch.member or batch.until_ms:
            owner = _INT64.pack(batch.until_ms) + compact_string(batch.member)
            parts.append(_ONE_OWN_TAG + uvarint(len(owner)) + owner)
        elif batch.letter is not None:
            parts.append(_ONE_LETTER_TAG + _LETTER.pack(*batch.letter))
        else:
            parts.append(_NO_TAGS)
    parts[0] = uvarint(len(parts) // 2 + 1)
    return b"".join(parts)


def decode_snapshot(value: bytes) -> tuple[int, Kept]:
    """The number and the state. CorruptBatch for a value that is none."""
    reader = _reader(value)
    _, number, state_epoch, leader_epoch, start_offset, _, _ = _SNAPSHOT.unpack(reader.take(_SNAPSHOT.size))
    state = ShareState(state_epoch, leader_epoch, start_offset, _decode_batches(reader))
    return number, Kept(state, *_read_tags(reader))


def decode_update(value: bytes) -> tuple[int, Update]:
    """The number of the snapshot that it follows, and what has changed. CorruptBatch for a value that is none."""
    reader = _reader(value)
    _, number, leader_epoch, start_offset = _UPDATE.unpack(reader.take(_UPDATE.size))
    batches = _decode_batches(reader)
    return number, Update(leader_epoch, start_offset, batches, *_read_tags(reader))


def _reader(value: bytes) -> Reader:
    if value[: _INT16.size] != _VERSION_BYTES:
        version = Reader(value).int16()
        raise CorruptBatch(f"{SHARE_STATE_TOPIC}: value of version {version}; version 0 is known")
    return Reader(value)


def _decode_batches(reader: Reader) -> tuple[StateBatch, ...]:
    return tuple([_decode_batch(reader) for _ in range(reader.uvarint() - 1)])


def _decode_batch(reader: Reader) -> StateBatch:
    first_offset, last_offset, number, delivery_count = _BATCH.unpack(reader.take(_BATCH.size))
    state = _STATES.get(number)
    if state is None:
        raise CorruptBatch(f"{SHARE_STATE_TOPIC}: state {number} is not known")
    tagged = reader.tagged()
    owner = tagged.get(_OWN_TAG)
    if owner is None:
        letter = _decode_letter(tagged.get(_LETTER_TAG))
        return StateBatch(first_offset, last_offset, state, delivery_count, letter=letter)
    fields = Reader(owner)
    until_ms = fields.int64()
    return StateBatch(first_offset, last_offset, state, delivery_count, fields.compact_string(), until_ms)


def _decode_letter(field: bytes | None) -> Letter | None:
    if field is None:
        return None
    number, producer_id, sequence = _LETTER.unpack(Reader(field).take(_LETTER.size))
    reason = _REASONS.get(number)
    if reason is None:
        raise CorruptBatch(f"{SHARE_STATE_TOPIC}: reason {number} of a dead letter is not known")
    return Letter(reason, producer_id, sequence)


def _read_tags(reader: Reader) -> tuple[int, int]:
    """Load id and leader epoch of the last write."""
    tagged = reader.tagged()
    load_id, epoch = tagged.get(_OWN_TAG), tagged.get(_WRITTEN_TAG)
    return (
        NO_LOAD if load_id is None else Reader(load_id).int64(),
        NO_EPOCH if epoch is None else Reader(epoch).int32(),
    )
