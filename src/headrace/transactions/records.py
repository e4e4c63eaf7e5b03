"""Records of `__transaction_state`: the formats of their keys and values.

They are Kafka's own, so that its tools read the topic (types as in `coordinators.record_fields`). The first int16 of a
key or value is its version:

    key 0       transactional id
    value 0     producer id int64, epoch int16, timeout int32, state int8, count int32 (-1 for none) of topics, each:
                name, count int32 of partitions, each int32; time of the last change int64, of the beginning int64
    value 1     as 0, with compact strings and counts (one more, as a varint), tagged fields behind each topic and at
                the end: tag 0 producer id before int64, tag 1 next producer id int64, tag 2 version of transactions
                int16; ours: tag 10000 number of the transaction int64, tag 10001 epoch before int16, tag 10002 next
                epoch int16, tag 10003 client id and host of the owner, two compact strings; tag 10004
                room, which says nothing

A record without a value removes its key. We write key 0 with value 1. The last value of a key is the state of its
transactional id; whatever was answered is in it. Ids without an open transaction have values that begin with
`IDLE_HEAD`, so that a coordinator of many can leave them as they are.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Final, NamedTuple

from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.coordinators.record_fields import Reader, compact_string, string, uvarint
from headrace.errors import CorruptBatch
from headrace.transactions.messages import NO_EPOCH, NO_PRODUCER_ID, Owner, Place
from headrace.transactions.transaction import IDLE, NO_NUMBER, State, Transaction

_KEY_VERSION: Final = 0
_VERSION: Final = 1

_PREVIOUS_ID_TAG: Final = 0
_NEXT_ID_TAG: Final = 1
_VERSION_TAG: Final = 2
_NUMBER_TAG: Final = 10_000
"""Readers pass over tags that they do not know, and Kafka numbers its own from 0."""
_LAST_EPOCH_TAG: Final = 10_001
_NEXT_EPOCH_TAG: Final = 10_002
_OWNER_TAG: Final = 10_003
_ROOM_TAG: Final = 10_004


def _head(tag: int, size_bytes: int) -> bytes:
    """Of a field with a tag."""
    return uvarint(tag) + uvarint(size_bytes)


ROOM_FROM_BYTES: Final = 1000
"""Of partitions. An open transaction that has more is written with room, so that the value which ends it is never the
longer one: a record that the log takes must not be followed by one that is too large for it, ever again."""
_ROOM: Final = bytes(40)
"""More than the fields that a decision adds, with their tags: ids and epochs before and next, version."""

_SIZES: Final = {
    _PREVIOUS_ID_TAG: 8,
    _NEXT_ID_TAG: 8,
    _VERSION_TAG: 2,
    _NUMBER_TAG: 8,
    _LAST_EPOCH_TAG: 2,
    _NEXT_EPOCH_TAG: 2,
}

STATES: Final = (
    State.EMPTY,
    State.ONGOING,
    State.PREPARE_COMMIT,
    State.PREPARE_ABORT,
    State.COMPLETE_COMMIT,
    State.COMPLETE_ABORT,
)
"""By Kafka's numbers. Those that follow there, Dead and PrepareEpochFence, are never written."""
_IDLE_NUMBERS: Final = frozenset(number for number, state in enumerate(STATES) if state in IDLE)
_NUMBERS: Final = {state: number for number, state in enumerate(STATES)}

_HEAD: Final = struct.Struct(">hqhib")
_TIMES: Final = struct.Struct(">qq")
_INT64: Final = struct.Struct(">q")
_INT16: Final = struct.Struct(">h")
IDLE_HEAD: Final = struct.Struct(">hqhibBqq")
"""Version, producer id, epoch, timeout, state, no partitions, time of the last change, of the beginning."""


_STATE_AT: Final = 16
_PREVIOUS_ID_HEAD: Final = _head(_PREVIOUS_ID_TAG, _INT64.size)
_NEXT_ID_HEAD: Final = _head(_NEXT_ID_TAG, _INT64.size)
_VERSION_HEAD: Final = _head(_VERSION_TAG, _INT16.size)
_NUMBER_HEAD: Final = _head(_NUMBER_TAG, _INT64.size)
_LAST_EPOCH_HEAD: Final = _head(_LAST_EPOCH_TAG, _INT16.size)
_NEXT_EPOCH_HEAD: Final = _head(_NEXT_EPOCH_TAG, _INT16.size)
_TWO_BYTES: Final = (1 << 14) - 1
"""The most that a varint of two bytes holds."""
_VERSION_BYTES: Final = _INT16.pack(_VERSION)


class IdleHead(NamedTuple):
    version: int
    producer_id: int
    epoch: int
    timeout_ms: int
    state: int
    partitions: int
    update_ms: int
    start_ms: int


def encode_key(transactional_id: str) -> bytes:
    return _INT16.pack(_KEY_VERSION) + string(transactional_id)


def decode_key(key: bytes) -> str | None:
    """The transactional id; None for a kind that is not ours to know."""
    reader = Reader(key)
    return reader.string() if reader.int16() == _KEY_VERSION else None


def idle_head(value: bytes) -> IdleHead | None:
    """The fixed fields of a value that says that no transaction is open; None for any other value."""
    if len(value) <= IDLE_HEAD.size:
        return None
    head = IdleHead._make(IDLE_HEAD.unpack_from(value))
    is_idle = head.version == _VERSION and head.partitions <= 1 and 0 <= head.state < len(STATES)
    return head if is_idle and STATES[head.state] in IDLE else None


def state_number(value: bytes) -> int:
    """Of a value that `encode` has made."""
    return value[_STATE_AT]


def is_whole(value: bytes) -> bool:
    """Whether no transaction is open by this value, and `decode` will take it: a look at every field, without making
    anything of them. Tags and lengths of more than two bytes are none of ours."""
    at = IDLE_HEAD.size
    if (
        len(value) <= at
        or value[:2] != _VERSION_BYTES
        or value[_STATE_AT] not in _IDLE_NUMBERS
        or value[_STATE_AT + 1] > 1
    ):
        return False
    left = value[at]
    at += 1
    try:
        for _ in range(left):
            tag, size = value[at], value[at + 1]
            at += 2
            if tag >= 0x80:
                tag, size = tag & 0x7F | size << 7, value[at]
                at += 1
            if size >= 0x80:
                size = size & 0x7F | value[at] << 7
                at += 1
            if size < _SIZES.get(tag, 0) or tag > _TWO_BYTES or size > _TWO_BYTES:
                return False
            at += size
    except IndexError:
        return False
    return at <= len(value) and left < 0x80


def encode(kept: Transaction) -> bytes:
    head = _HEAD.pack(_VERSION, kept.producer_id, kept.epoch, kept.timeout_ms, _NUMBERS[kept.state])
    times = _TIMES.pack(kept.update_ms, kept.start_ms)
    partitions = _encode_partitions(kept)
    with_room = kept.state is State.ONGOING and len(partitions) >= ROOM_FROM_BYTES
    return head + partitions + times + _encode_tagged(kept, with_room=with_room)


def _encode_partitions(kept: Transaction) -> bytes:
    if not kept.partitions:
        return b"\x00" if kept.state is State.EMPTY else b"\x01"
    topics: defaultdict[str, list[int]] = defaultdict(list)
    for topic, partition in sorted(kept.partitions):
        topics[topic].append(partition)
    parts = [uvarint(len(topics) + 1)]
    for topic, partitions in topics.items():
        numbers = struct.pack(f">{len(partitions)}i", *partitions)
        parts += [compact_string(topic), uvarint(len(partitions) + 1), numbers, b"\x00"]
    return b"".join(parts)


def _encode_tagged(kept: Transaction, *, with_room: bool) -> bytes:
    fields: list[bytes] = []
    if kept.previous_producer_id != NO_PRODUCER_ID:
        fields.append(_PREVIOUS_ID_HEAD + _INT64.pack(kept.previous_producer_id))
    if kept.next_producer_id != NO_PRODUCER_ID:
        fields.append(_NEXT_ID_HEAD + _INT64.pack(kept.next_producer_id))
    if kept.transaction_version:
        fields.append(_VERSION_HEAD + _INT16.pack(kept.transaction_version))
    if kept.number != NO_NUMBER:
        fields.append(_NUMBER_HEAD + _INT64.pack(kept.number))
    if kept.last_epoch != NO_EPOCH:
        fields.append(_LAST_EPOCH_HEAD + _INT16.pack(kept.last_epoch))
    if kept.next_epoch != NO_EPOCH:
        fields.append(_NEXT_EPOCH_HEAD + _INT16.pack(kept.next_epoch))
    if kept.owner.client_id or kept.owner.host:
        owner = compact_string(kept.owner.client_id) + compact_string(kept.owner.host)
        fields.append(_head(_OWNER_TAG, len(owner)) + owner)
    if with_room:
        fields.append(_head(_ROOM_TAG, len(_ROOM)) + _ROOM)
    return uvarint(len(fields)) + b"".join(fields)


def decode(value: bytes) -> Transaction:
    """CorruptBatch for a value that is none."""
    reader = Reader(value)
    version = reader.int16()
    if not 0 <= version <= _VERSION:
        raise CorruptBatch(f"{TRANSACTIONS_TOPIC}: value of version {version}; versions 0 and 1 are known")
    producer_id, epoch, timeout_ms, number = reader.int64(), reader.int16(), reader.int32(), reader.take(1)[0]
    if number >= len(STATES):
        raise CorruptBatch(f"{TRANSACTIONS_TOPIC}: state {number} is not known")
    partitions = _compact_partitions(reader) if version >= 1 else _partitions(reader)
    update_ms, start_ms = reader.int64(), reader.int64()
    tagged = reader.tagged() if version >= 1 else {}
    next_id = _int64(tagged, _NEXT_ID_TAG, NO_PRODUCER_ID)
    return Transaction(
        producer_id,
        epoch,
        STATES[number],
        timeout_ms,
        update_ms,
        start_ms,
        partitions,
        _int64(tagged, _NUMBER_TAG, NO_NUMBER),
        _int16(tagged, _VERSION_TAG, 0),
        _int64(tagged, _PREVIOUS_ID_TAG, NO_PRODUCER_ID),
        _int16(tagged, _LAST_EPOCH_TAG, NO_EPOCH),
        next_id,
        _int16(tagged, _NEXT_EPOCH_TAG, NO_EPOCH if next_id == NO_PRODUCER_ID else 0),
        _owner(tagged.get(_OWNER_TAG)),
    )


def _partitions(reader: Reader) -> frozenset[Place]:
    found: set[Place] = set()
    for _ in range(reader.int32()):
        topic = reader.string()
        found.update((topic, reader.int32()) for _ in range(reader.int32()))
    return frozenset(found)


def _compact_partitions(reader: Reader) -> frozenset[Place]:
    found: set[Place] = set()
    for _ in range(reader.uvarint() - 1):
        topic = reader.compact_string()
        count = reader.uvarint() - 1
        found.update((topic, number) for number in struct.unpack(f">{count}i", reader.take(4 * count)))
        reader.tagged()
    return frozenset(found)


def _int64(tagged: dict[int, bytes], tag: int, default: int) -> int:
    content = tagged.get(tag)
    return default if content is None else Reader(content).int64()


def _int16(tagged: dict[int, bytes], tag: int, default: int) -> int:
    content = tagged.get(tag)
    return default if content is None else Reader(content).int16()


def _owner(content: bytes | None) -> Owner:
    if content is None:
        return Owner()
    reader = Reader(content)
    try:
        return Owner(reader.compact_string(), reader.compact_string())
    except CorruptBatch:  # it is for people to read: nothing depends on it
        return Owner()
