"""Records of `__consumer_offsets`, and the committed offsets that they add up to.

The format is Kafka's own, so that its tools read the topic. Big-endian; a string is its length (int16, -1 for null)
and UTF-8; bytes are their length (int32) and the bytes. The first int16 of a key tells what it is, that of a value
its version:

    key 0, 1    group, topic, partition int32
    value 0     offset int64, metadata, commit time int64          (written by old brokers)
    value 1     offset int64, metadata, commit time int64, expiry time int64
    value 2     offset int64, metadata, commit time int64
    value 3     offset int64, leader epoch int32, metadata, commit time int64
    value 4     as 3, with a compact string (its length and one more as a varint) and then tagged fields:
                tag 0 the topic's id, 16 bytes; tag 10000, ours, expiry time int64
    key 2       group                                              (value: groups.snapshot)

A record without a value removes its key. We write key 1 with value 4. An offset belongs to the topic with the id that
it was committed to: another topic of that name, made later, has no part in it. Older values have no id; the
coordinator that loads them gives them that of the topic which then has the name, and writes them anew. What is in the
topic's log is the truth; the cache is rebuilt from it when a partition gets its leader.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.errors import CorruptBatch
from headrace.groups.messages import NO_EPOCH
from headrace.groups.record_reader import Reader, compact_string, string, uvarint

__all__ = ["OFFSETS_TOPIC", "GroupKey", "OffsetAndMetadata", "OffsetCache", "OffsetKey", "decode_key"]

Record = tuple[bytes, bytes | None]
TopicId = Callable[[str], bytes | None]
"""The id that the topic of this name has now; None if there is none."""
NO_TOPIC_ID: Final = bytes(16)
"""Kafka's way to say that no topic is meant."""
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


class OffsetCache:
    """Committed offsets of the groups in one partition of the offsets topic."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[str, int], OffsetAndMetadata]] = {}

    def groups(self) -> Collection[str]:
        return self._groups.keys()

    def of(self, group: str) -> Mapping[tuple[str, int], OffsetAndMetadata]:
        return self._groups.get(group, {})

    def put(self, group: str, topic: str, partition: int, committed: OffsetAndMetadata) -> None:
        self._groups.setdefault(group, {})[topic, partition] = committed

    def drop(self, key: OffsetKey) -> None:
        offsets = self._groups.get(key.group)
        if offsets is None:
            return
        offsets.pop((key.topic, key.partition), None)
        if not offsets:
            del self._groups[key.group]

    def of_topics(self, ids: Collection[bytes]) -> list[OffsetKey]:
        return [
            OffsetKey(group, topic, partition)
            for group, offsets in self._groups.items()
            for (topic, partition), committed in offsets.items()
            if committed.topic_id in ids
        ]

    def without_id(self) -> list[tuple[OffsetKey, OffsetAndMetadata]]:
        """Those whose records do not say which topic of the name they belong to."""
        return [
            (OffsetKey(group, topic, partition), committed)
            for group, offsets in self._groups.items()
            for (topic, partition), committed in offsets.items()
            if committed.topic_id is None
        ]
