"""The record that keeps a group over a change of its coordinator, written with each assignment and when it empties.

Value of key 2 of `__consumer_offsets` (groups.offsets gives the rules of the encoding), Kafka's version 3:

    protocol type, generation int32, protocol (nullable), leader (nullable), time of the present state int64,
    count int32 of members, each: member id, instance id (nullable), client id, client host, rebalance timeout int32,
    session timeout int32, metadata bytes, assignment bytes

Version 2 has no instance id, version 1 no time of state either, version 0 no rebalance timeout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from headrace.errors import CorruptBatch
from headrace.groups.record_reader import Reader, blob, string


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
