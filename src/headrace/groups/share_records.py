"""Records of share groups (KIP-932) in `__consumer_offsets`: formats of their values.

They are Kafka's own. Keys and parts of values are formed as in `groups/consumer_records.py`, and every value begins
with its version, 0:

    key 10   group, member      rack (nullable), client id, client host, topics
    key 11   group              epoch of the group int32, hash of its topics int64
    key 12   group              epoch of the target assignment int32
    key 13   group, member      its target assignment: topic ids, each with partitions int32
    key 14   group, member      member epoch int32, the one before it int32, state int8 (1: stable), partitions assigned
    key 15   group              share partitions whose state may be kept (Kafka: initializing), those whose state is
                                kept (initialized), each by topic id, name and partitions int32; topics whose state is
                                being deleted: we write none

A record without a value removes its key. Everything survives a change of the coordinator but sessions, which begin
anew.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.coordinators.record_fields import Reader, compact_string
from headrace.groups.assignors import NOTHING, Assignment
from headrace.groups.consumer_records import (
    SHARE_KINDS,
    ConsumerGroupKey,
    CurrentAssignment,
    Decoders,
    GroupEpoch,
    GroupPieces,
    Kinds,
    MemberSubscription,
    array,
    indexes_of,
    member_state,
    optional_string,
    partitions,
    read_array,
    read_indexes,
    read_partitions,
    tagged,
    versioned,
)


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The share partitions of a group whose state may be kept by the share coordinator, and those whose is."""

    initializing: Assignment = field(default_factory=dict)
    initialized: Assignment = field(default_factory=dict)


def encode_member(value: MemberSubscription) -> bytes:
    parts = (
        struct.pack(">h", 0),
        optional_string(value.rack),
        compact_string(value.client_id),
        compact_string(value.client_host),
        array([compact_string(topic) for topic in value.topics]),
        tagged([]),
    )
    return b"".join(parts)


def decode_member(value: bytes) -> MemberSubscription:
    reader = versioned(value)
    rack, client_id, client_host = reader.optional_compact_string(), reader.compact_string(), reader.compact_string()
    topics = tuple(read_array(reader, lambda: reader.compact_string()))
    return MemberSubscription(None, rack, client_id, client_host, topics)


def encode_group_epoch(value: GroupEpoch) -> bytes:
    return struct.pack(">hiq", 0, value.epoch, value.topics_hash) + tagged([])


def decode_group_epoch(value: bytes) -> GroupEpoch:
    reader = versioned(value)
    return GroupEpoch(reader.int32(), reader.int64())


def encode_current(value: CurrentAssignment) -> bytes:
    head = struct.pack(">hiib", 0, value.epoch, value.previous_epoch, value.state)
    return head + partitions(value.assigned) + tagged([])


def decode_current(value: bytes) -> CurrentAssignment:
    reader = versioned(value)
    epoch, previous, state = reader.int32(), reader.int32(), member_state(reader)
    return CurrentAssignment(epoch, previous, state, read_partitions(reader))


def encode_states(value: KeptStates, names: Mapping[bytes, str]) -> bytes:
    head = struct.pack(">h", 0)
    deleting = array([])
    return head + _named(value.initializing, names) + _named(value.initialized, names) + deleting + tagged([])


def decode_states(value: bytes) -> KeptStates:
    reader = versioned(value)
    return KeptStates(_read_named(reader), _read_named(reader))


def _named(places: Assignment, names: Mapping[bytes, str]) -> bytes:
    return array(
        [
            topic + compact_string(names.get(topic, "")) + indexes_of(indexes) + tagged([])
            for topic, indexes in sorted(places.items())
        ]
    )


def _read_named(reader: Reader) -> Assignment:
    found: dict[bytes, frozenset[int]] = {}
    for _ in range(reader.uvarint() - 1):
        topic = reader.take(16)
        reader.compact_string()
        found[topic] = read_indexes(reader)
        reader.tagged()
    return found or NOTHING


@dataclass(slots=True)
class SharePieces(GroupPieces):
    """What the records of a share group say, as they are replayed."""

    kinds: ClassVar[Kinds] = SHARE_KINDS
    decoders: ClassVar[Decoders] = Decoders(decode_group_epoch, decode_member, decode_current)

    states: KeptStates = field(default_factory=KeptStates)

    def take_other(self, key: ConsumerGroupKey, value: bytes | None) -> None:
        self.states = KeptStates() if value is None else decode_states(value)
