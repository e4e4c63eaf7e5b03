"""Records of groups of the consumer protocol (KIP-848) in `__consumer_offsets`: formats of their keys and values.

They are Kafka's own, beside those of `groups/records.py`; those of share groups, whose keys are formed alike, are in
`groups/share_records.py`. The first int16 of a key tells what it is, then come strings
with int16 lengths. Values begin with their version, 0, and are flexible: compact strings (null: 0) and arrays, and
tagged fields at the end of each struct:

    key 3    group              epoch of the group int32; tag 0 hash of its topics int64; tag 10000, ours, since when
                                it has no members, ms int64
    key 4    group              topics of its subscriptions: written by brokers before Kafka 4.1, read over, removed
    key 5    group, member      instance id, rack (nullable both), client id, client host, topics, regular expression
                                (nullable), rebalance timeout int32, assignor (nullable); tag 0, of a member that
                                speaks the classic protocol: a byte 1, session timeout int32, protocols (name, metadata)
    key 6    group              epoch of the target assignment int32
    key 7    group, member      its target assignment: topic ids, each with partitions int32
    key 8    group, member      member epoch int32, the one before it int32, state int8, partitions assigned, partitions
                                to be revoked
    key 16   group, pattern     topics that a regular expression stood for, version of the metadata int64, time int64

A record without a value removes its key. What a member holds now (8) and shall hold (7) survives a change of the
coordinator; sessions begin anew then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, TypeVar

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.record_fields import Reader, compact_string, string, uvarint
from headrace.errors import CorruptBatch
from headrace.groups.assignors import Assignment
from headrace.groups.messages import Protocols

T = TypeVar("T")

_FIRST_TAG: Final = 0
_EMPTY_SINCE_TAG: Final = 10_000


class RecordKind(IntEnum):
    """The first number of a key."""

    GROUP = 3
    PARTITIONS = 4
    MEMBER = 5
    TARGET_EPOCH = 6
    TARGET = 7
    CURRENT = 8
    PATTERN = 16
    SHARE_MEMBER = 10
    SHARE_GROUP = 11
    SHARE_TARGET_EPOCH = 12
    SHARE_TARGET = 13
    SHARE_CURRENT = 14
    SHARE_STATES = 15

    @property
    def is_of_share_group(self) -> bool:
        return RecordKind.SHARE_MEMBER <= self <= RecordKind.SHARE_STATES


class Kinds(NamedTuple):
    """Of the records that every group has whose coordinator assigns."""

    group: RecordKind
    member: RecordKind
    target_epoch: RecordKind
    target: RecordKind
    current: RecordKind


CONSUMER_KINDS: Final = Kinds(
    RecordKind.GROUP, RecordKind.MEMBER, RecordKind.TARGET_EPOCH, RecordKind.TARGET, RecordKind.CURRENT
)
SHARE_KINDS: Final = Kinds(
    RecordKind.SHARE_GROUP,
    RecordKind.SHARE_MEMBER,
    RecordKind.SHARE_TARGET_EPOCH,
    RecordKind.SHARE_TARGET,
    RecordKind.SHARE_CURRENT,
)
NAMED: Final = frozenset(
    (
        RecordKind.MEMBER,
        RecordKind.TARGET,
        RecordKind.CURRENT,
        RecordKind.PATTERN,
        RecordKind.SHARE_MEMBER,
        RecordKind.SHARE_TARGET,
        RecordKind.SHARE_CURRENT,
    )
)
"""Kinds whose keys name a member, or a pattern, behind the group."""


@dataclass(frozen=True, slots=True)
class ConsumerGroupKey:
    kind: RecordKind
    group: str
    name: str = ""


class MemberState(IntEnum):
    STABLE = 1
    UNREVOKED_PARTITIONS = 2
    UNRELEASED_PARTITIONS = 3


@dataclass(frozen=True, slots=True)
class ClassicSession:
    """Of a member that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: Protocols


@dataclass(frozen=True, slots=True)
class MemberSubscription:
    """What a member has told of itself."""

    instance_id: str | None = None
    rack: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicSession | None = None


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """What a member holds, in which epoch. `revoking` it was told to give up, and has not said that it did."""

    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Assignment = field(default_factory=dict)
    revoking: Assignment = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupEpoch:
    epoch: int
    topics_hash: int = 0
    empty_since_ms: int = -1


def encode_key(key: ConsumerGroupKey) -> bytes:
    return struct.pack(">h", key.kind) + string(key.group) + (string(key.name) if key.kind in NAMED else b"")


def decode_key(key: bytes) -> ConsumerGroupKey | None:
    """None for a record of another kind."""
    reader = Reader(key)
    try:
        kind = RecordKind(reader.int16())
    except ValueError:
        return None
    return ConsumerGroupKey(kind, reader.string(), reader.string() if kind in NAMED else "")


# Values.


def encode_group_epoch(value: GroupEpoch) -> bytes:
    fields = [(_FIRST_TAG, struct.pack(">q", value.topics_hash))] if value.topics_hash else []
    if value.empty_since_ms >= 0:
        fields.append((_EMPTY_SINCE_TAG, struct.pack(">q", value.empty_since_ms)))
    return struct.pack(">hi", 0, value.epoch) + tagged(fields)


def decode_group_epoch(value: bytes) -> GroupEpoch:
    reader = versioned(value)
    epoch, tagged = reader.int32(), reader.tagged()
    topics, since = tagged.get(_FIRST_TAG), tagged.get(_EMPTY_SINCE_TAG)
    return GroupEpoch(
        epoch, 0 if topics is None else Reader(topics).int64(), -1 if since is None else Reader(since).int64()
    )


def encode_target_epoch(epoch: int) -> bytes:
    return struct.pack(">hi", 0, epoch) + tagged([])


def decode_target_epoch(value: bytes) -> int:
    return versioned(value).int32()


def encode_subscription(value: MemberSubscription) -> bytes:
    fields = []
    if value.classic is not None:
        protocols = [
            optional_string(name) + _compact_bytes(data) + tagged([]) for name, data in value.classic.protocols
        ]
        session = struct.pack(">bi", 1, value.classic.session_timeout_ms) + array(protocols) + tagged([])
        fields.append((_FIRST_TAG, session))
    parts = (
        struct.pack(">h", 0),
        optional_string(value.instance_id),
        optional_string(value.rack),
        compact_string(value.client_id),
        compact_string(value.client_host),
        array([compact_string(topic) for topic in value.topics]),
        optional_string(value.pattern),
        struct.pack(">i", value.rebalance_timeout_ms),
        optional_string(value.assignor),
        tagged(fields),
    )
    return b"".join(parts)


def decode_subscription(value: bytes) -> MemberSubscription:
    reader = versioned(value)
    instance_id, rack = reader.optional_compact_string(), reader.optional_compact_string()
    client_id, client_host = reader.compact_string(), reader.compact_string()
    topics = tuple(read_array(reader, lambda: reader.compact_string()))
    pattern, timeout_ms, assignor = reader.optional_compact_string(), reader.int32(), reader.optional_compact_string()
    session = reader.tagged().get(_FIRST_TAG)
    return MemberSubscription(
        instance_id,
        rack,
        client_id,
        client_host,
        topics,
        pattern,
        timeout_ms,
        assignor,
        None if session is None else _decode_session(Reader(session)),
    )


def _decode_session(reader: Reader) -> ClassicSession | None:
    if reader.take(1) != b"\x01":  # a nullable struct says first whether it is there
        return None

    def protocol() -> tuple[str, bytes]:
        name, metadata = reader.compact_string(), reader.take(reader.uvarint() - 1)
        reader.tagged()
        return name, metadata

    return ClassicSession(reader.int32(), tuple(read_array(reader, protocol)))


def encode_target(assignment: Assignment) -> bytes:
    return struct.pack(">h", 0) + partitions(assignment) + tagged([])


def decode_target(value: bytes) -> Assignment:
    return read_partitions(versioned(value))


def encode_current(value: CurrentAssignment) -> bytes:
    head = struct.pack(">hiib", 0, value.epoch, value.previous_epoch, value.state)
    return head + partitions(value.assigned) + partitions(value.revoking) + tagged([])


def decode_current(value: bytes) -> CurrentAssignment:
    reader = versioned(value)
    epoch, previous, state = reader.int32(), reader.int32(), member_state(reader)
    return CurrentAssignment(epoch, previous, state, read_partitions(reader), read_partitions(reader))


def member_state(reader: Reader) -> MemberState:
    (state,) = reader.take(1)
    try:
        return MemberState(state)
    except ValueError:
        raise CorruptBatch(f"{OFFSETS_TOPIC}: a member in state {state}; states 1 to 3 are known") from None


def encode_pattern(topics: Sequence[str], version: int, time_ms: int) -> bytes:
    names = [compact_string(topic) for topic in topics]
    return struct.pack(">h", 0) + array(names) + struct.pack(">qq", version, time_ms) + tagged([])


def decode_pattern(value: bytes) -> tuple[str, ...]:
    reader = versioned(value)
    return tuple(read_array(reader, lambda: reader.compact_string()))


# Groups.


class Decoders(NamedTuple):
    """Of the records that differ from one kind of groups to the other."""

    group: Callable[[bytes], GroupEpoch]
    member: Callable[[bytes], MemberSubscription]
    current: Callable[[bytes], CurrentAssignment]


@dataclass(slots=True)
class GroupPieces:
    """What the records of a group say, as they are replayed."""

    kinds: ClassVar[Kinds] = CONSUMER_KINDS
    decoders: ClassVar[Decoders] = Decoders(decode_group_epoch, decode_subscription, decode_current)

    epoch: GroupEpoch | None = None
    target_epoch: int = 0
    members: dict[str, MemberSubscription] = field(default_factory=dict)
    targets: dict[str, Assignment] = field(default_factory=dict)
    current: dict[str, CurrentAssignment] = field(default_factory=dict)
    patterns: set[str] = field(default_factory=set)
    has_partitions: bool = False

    def take(self, key: ConsumerGroupKey, value: bytes | None) -> None:
        """The next record. CorruptBatch if it cannot be read."""
        kind, name, kinds = key.kind, key.name, self.kinds
        if kind is kinds.group:
            self.epoch = None if value is None else self.decoders.group(value)
        elif kind is kinds.target_epoch:
            self.target_epoch = 0 if value is None else decode_target_epoch(value)
        elif kind is kinds.member:
            _put(self.members, name, None if value is None else self.decoders.member(value))
        elif kind is kinds.target:
            _put(self.targets, name, None if value is None else decode_target(value))
        elif kind is kinds.current:
            _put(self.current, name, None if value is None else self.decoders.current(value))
        else:
            self.take_other(key, value)

    def take_other(self, key: ConsumerGroupKey, value: bytes | None) -> None:
        """A record that not every such group has."""
        if key.kind is RecordKind.PARTITIONS:
            self.has_partitions = value is not None
        else:
            (self.patterns.discard if value is None else self.patterns.add)(key.name)

    @property
    def is_over(self) -> bool:
        return self.epoch is None and not self.members


def _put(table: dict[str, T], name: str, value: T | None) -> None:
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


# Parts of values.


def versioned(value: bytes) -> Reader:
    reader = Reader(value)
    version = reader.int16()
    if version != 0:
        raise CorruptBatch(f"{OFFSETS_TOPIC}: a record of a group has version {version}; 0 is known")
    return reader


def tagged(fields: Sequence[tuple[int, bytes]]) -> bytes:
    parts = (uvarint(tag) + uvarint(len(content)) + content for tag, content in fields)
    return uvarint(len(fields)) + b"".join(parts)


def optional_string(text: str | None) -> bytes:
    return b"\x00" if text is None else compact_string(text)


def _compact_bytes(content: bytes) -> bytes:
    return uvarint(len(content) + 1) + content


def array(parts: Sequence[bytes]) -> bytes:
    return uvarint(len(parts) + 1) + b"".join(parts)


def read_array(reader: Reader, read_one: Callable[[], T]) -> list[T]:
    return [read_one() for _ in range(reader.uvarint() - 1)]


def partitions(assignment: Assignment) -> bytes:
    return array([topic + indexes_of(indexes) + tagged([]) for topic, indexes in sorted(assignment.items())])


def indexes_of(partitions: frozenset[int]) -> bytes:
    return uvarint(len(partitions) + 1) + struct.pack(f">{len(partitions)}i", *sorted(partitions))


def read_partitions(reader: Reader) -> Assignment:
    found: dict[bytes, frozenset[int]] = {}
    for _ in range(reader.uvarint() - 1):
        topic = reader.take(16)
        found[topic] = read_indexes(reader)
        reader.tagged()
    return found


def read_indexes(reader: Reader) -> frozenset[int]:
    count = max(0, reader.uvarint() - 1)
    return frozenset(struct.unpack(f">{count}i", reader.take(4 * count)))
