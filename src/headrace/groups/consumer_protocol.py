"""What consumers put into the bytes of the classic protocol: their subscriptions and assignments. Pure.

They belong to the clients; the broker looks into them where classic members are in a group of the consumer protocol,
or go into one. Big-endian, strings and arrays with their lengths in front (int16, int32):

    subscription    version int16, topics, user data (nullable bytes), from version 1 the partitions owned (topic,
                    partitions), from 2 the generation int32, from 3 the rack (nullable)
    assignment      version int16, partitions (topic, partitions), user data (nullable bytes)

Later versions add at the end; what follows is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.coordinators.record_fields import Reader, string
from headrace.errors import CorruptBatch

CONSUMER: Final = "consumer"
"""Protocol type of groups whose members' bytes have these forms."""
NEWEST_VERSION: Final = 3

PartitionsByName = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class ConsumerSubscription:
    version: int
    topics: tuple[str, ...]
    owned: PartitionsByName
    rack: str | None = None


def decode_subscription(metadata: bytes) -> ConsumerSubscription:
    """CorruptBatch when it has another form."""
    reader = Reader(metadata)
    version = reader.int16()
    if version < 0:
        raise CorruptBatch(f"a subscription of version {version}")
    topics = tuple(reader.string() for _ in range(_count(reader, metadata)))
    _skip_user_data(reader)
    owned = _partitions(reader, metadata) if version >= 1 else {}
    if version >= 2:
        reader.int32()
    return ConsumerSubscription(version, topics, owned, reader.optional_string() if version >= 3 else None)


def decode_assignment(content: bytes) -> PartitionsByName:
    """CorruptBatch when it has another form. No bytes are no partitions."""
    if not content:
        return {}
    reader = Reader(content)
    reader.int16()
    return _partitions(reader, content)


def encode_assignment(partitions: PartitionsByName, version: int) -> bytes:
    parts = [struct.pack(">hi", min(version, NEWEST_VERSION), len(partitions))]
    for topic, indexes in sorted(partitions.items()):
        parts.append(string(topic) + struct.pack(f">i{len(indexes)}i", len(indexes), *sorted(indexes)))
    return b"".join(parts) + struct.pack(">i", -1)


def _count(reader: Reader, content: bytes) -> int:
    """Of an array: never more than there are bytes."""
    count = reader.int32()
    if count > len(content):
        raise CorruptBatch(f"an array of {count} in {len(content)} bytes")
    return max(0, count)


def _partitions(reader: Reader, content: bytes) -> PartitionsByName:
    found: dict[str, frozenset[int]] = {}
    for _ in range(_count(reader, content)):
        topic = reader.string()
        found[topic] = frozenset(reader.int32() for _ in range(_count(reader, content)))
    return found


def _skip_user_data(reader: Reader) -> None:
    length = reader.int32()
    if length > 0:
        reader.take(length)
