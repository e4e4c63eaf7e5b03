"""Records of `__consumer_offsets`: the formats of their keys and values.

They are Kafka's own, so that its tools read the topic. Big-endian; a string is its length (int16, -1 for null) and
UTF-8; bytes are their length (int32) and the bytes. The first int16 of a key tells what it is, that of a value its
version:

    key 0, 1    group, topic, partition int32
    value 0     offset int64, metadata, commit time int64          (written by old brokers)
    value 1     offset int64, metadata, commit time int64, expiry time int64
    value 2     offset int64, metadata, commit time int64
    value 3     offset int64, leader epoch int32, metadata, commit time int64
    value 4     as 3, with a compact string (its length and one more as a varint) and then tagged fields:
                tag 0 the topic's id, 16 bytes; tag 10000, ours, expiry time int64

    key 2       group
    value 3     protocol type, generation int32, protocol (nullable), leader (nullable), time of the present state
                int64, count int32 of members, each: member id, instance id (nullable), client id, client host,
                rebalance timeout int32, session timeout int32, metadata bytes, assignment bytes
    value 2     without instance ids
    value 1     without time of state either
    value 0     without rebalance timeouts either

A record without a value removes its key. We write key 1 with value 4, and key 2 with value 3, with each assignment and
when a group empties. An offset belongs to the topic with the id that it was committed to: another topic of that name,
made later, has no part in it. Older values have no id; the coordinator that loads them gives them that of the topic
which then has the name, and writes them anew.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.record_fields import Reader, blob, compact_string, string, uvarint
from headrace.errors import CorruptBatch
from headrace.groups.messages import NO_EPOCH

NO_EXPIRY: Final = -1

_OFFSET_KEY: Final = 1
_GROUP_KEY: Final = 2

_TOPIC_ID_TAG: Final = 0
_EXPIRY_TAG: Final = 10_000
"""Readers pass over tags that they do not know, and Kafka numbers its own from 0."""


@dataclass(frozen=True, slots=True)
class OffsetKey:
    group: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    group: str


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int
    expiry_ms: int = NO_EXPIRY
    """When the client itself said how long it is kept."""
    topic_id: bytes | None = None
    """Of the topic that it was committed to; None in records that were written without."""

    def is_of(self, topic_id: bytes | None) -> bool:
        """Whether it may have been committed to the topic that has this id; None: there is none of that name just now,
        which is no reason to forget what was committed."""
        return topic_id is None or self.topic_id is None or self.topic_id == topic_id


def encode_offset_key(key: OffsetKey) -> bytes:
    return struct.pack(">h", _OFFSET_KEY) + string(key.group) + string(key.topic) + struct.pack(">i", key.partition)


def encode_group_key(group: str) -> bytes:
    return struct.pack(">h", _GROUP_KEY) + string(group)


def decode_key(key: bytes) -> OffsetKey | GroupKey | None:
    """What the record is about; None for a kind that is not ours to know."""
    reader = Reader(key)
    version = reader.int16()
    if version in (0, _OFFSET_KEY):
        return OffsetKey(reader.string(), reader.string(), reader.int32())
    return GroupKey(reader.string()) if version == _GROUP_KEY else None


def encode_offset(committed: OffsetAndMetadata) -> bytes:
    if committed.topic_id is not None:
        return _encode_with_id(committed, committed.topic_id)
    if committed.expiry_ms != NO_EXPIRY:
        head = struct.pack(">hq", 1, committed.offset)
        return head + string(committed.metadata) + struct.pack(">qq", committed.commit_ms, committed.expiry_ms)
    head = struct.pack(">hqi", 3, committed.offset, committed.leader_epoch)
    return head + string(committed.metadata) + struct.pack(">q", committed.commit_ms)


def _encode_with_id(committed: OffsetAndMetadata, topic_id: bytes) -> bytes:
    fields = [(_TOPIC_ID_TAG, topic_id)]
    if committed.expiry_ms != NO_EXPIRY:
        fields.append((_EXPIRY_TAG, struct.pack(">q", committed.expiry_ms)))
    tagged = b"".join(uvarint(tag) + uvarint(len(content)) + content for tag, content in fields)
    head = struct.pack(">hqi", 4, committed.offset, committed.leader_epoch) + compact_string(committed.metadata)
    return head + struct.pack(">q", committed.commit_ms) + uvarint(len(fields)) + tagged


def decode_offset(value: bytes) -> OffsetAndMetadata:
    reader = Reader(value)
    version = reader.int16()
    if not 0 <= version <= 4:
        raise CorruptBatch(f"{OFFSETS_TOPIC}: offset value of version {version}; versions 0 to 4 are known")
    offset = reader.int64()
    epoch = reader.int32() if version >= 3 else NO_EPOCH
    metadata = reader.compact_string() if version >= 4 else reader.string()
    commit_ms = reader.int64()
    if version >= 4:
        tagged = reader.tagged()
        expiry = tagged.get(_EXPIRY_TAG)
        expiry_ms = NO_EXPIRY if expiry is None else Reader(expiry).int64()
        return OffsetAndMetadata(offset, epoch, metadata, commit_ms, expiry_ms, tagged.get(_TOPIC_ID_TAG))
    return OffsetAndMetadata(offset, epoch, metadata, commit_ms, reader.int64() if version == 1 else NO_EXPIRY)


# Groups.


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    group_id: str
    protocol_type: str
    generation_id: int
    protocol_name: str | None
    leader: str | None
    state_since_ms: int
    members: tuple[MemberSnapshot, ...] = ()


def encode_group(snapshot: GroupSnapshot) -> bytes:
    parts = [
        struct.pack(">h", 3),
        string(snapshot.protocol_type),
        struct.pack(">i", snapshot.generation_id),
        string(snapshot.protocol_name),
        string(snapshot.leader),
        struct.pack(">qi", snapshot.state_since_ms, len(snapshot.members)),
    ]
    for member in snapshot.members:
        parts += [
            string(member.member_id),
            string(member.group_instance_id),
            string(member.client_id),
            string(member.client_host),
            struct.pack(">ii", member.rebalance_timeout_ms, member.session_timeout_ms),
            blob(member.metadata),
            blob(member.assignment),
        ]
    return b"".join(parts)


def decode_group(group_id: str, value: bytes) -> GroupSnapshot:
    reader = Reader(value)
    version = reader.int16()
    if not 0 <= version <= 3:
        raise CorruptBatch(f"group {group_id}: value of version {version}; versions 0 to 3 are known")
    protocol_type, generation = reader.string(), reader.int32()
    protocol, leader = reader.optional_string(), reader.optional_string()
    since_ms = reader.int64() if version >= 2 else -1
    members = tuple(_decode_member(reader, version) for _ in range(reader.int32()))
    return GroupSnapshot(group_id, protocol_type, generation, protocol, leader, since_ms, members)


def _decode_member(reader: Reader, version: int) -> MemberSnapshot:
    member_id = reader.string()
    instance_id = reader.optional_string() if version >= 3 else None
    client_id, client_host = reader.string(), reader.string()
    rebalance_ms = reader.int32() if version >= 1 else 0
    session_ms = reader.int32()
    return MemberSnapshot(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_ms or session_ms,
        session_ms,
        reader.blob(),
        reader.blob(),
    )
