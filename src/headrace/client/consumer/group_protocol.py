"""What the members of a consumer group tell each other: subscriptions, assignments, and the range assignor.

Both blobs are opaque to the broker and common to all Kafka clients. Big-endian: int16 version, then in a subscription
an array of topic names, in an assignment an array of (topic name, array of int32 partitions), then nullable bytes of
user data. Arrays and bytes have int32 lengths, names int16. Later versions only append. A subscription has from
version 1 the partitions that the member holds (an array as in an assignment), from 2 the int32 generation in which it
was given them (-1: none), from 3 its rack (a nullable name); what comes after that is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.errors import ProtocolError

PROTOCOL_TYPE: Final = "consumer"
RANGE: Final = "range"

NO_GENERATION: Final = -1

_VERSION: Final = 0
_SUBSCRIPTION_VERSION: Final = 3
_NULL_NAME: Final = struct.pack(">h", -1)

Assignment = dict[str, tuple[int, ...]]
TopicPartition = tuple[str, int]
"""A topic and a partition of it."""


@dataclass(frozen=True, slots=True)
class Subscription:
    topics: tuple[str, ...]
    owned: frozenset[TopicPartition] = frozenset()
    """What the member held when it joined; members that rebalance step by step keep reading it meanwhile."""
    generation: int = NO_GENERATION
    rack: str = ""
    user_data: bytes | None = None


def encode_subscription(
    topics: Iterable[str],
    *,
    owned: Iterable[TopicPartition] = (),
    generation: int = NO_GENERATION,
    rack: str = "",
    user_data: bytes | None = None,
) -> bytes:
    names = sorted(set(topics))
    return b"".join(
        (
            struct.pack(">hi", _SUBSCRIPTION_VERSION, len(names)),
            *map(_name, names),
            _bytes(user_data),
            *_places(by_topic(owned)),
            struct.pack(">i", generation),
            _name(rack) if rack else _NULL_NAME,
        )
    )


def decode_subscription(blob: bytes) -> Subscription:
    """All that a member says, in whichever version it says it."""
    reader = _Reader(blob, "subscription")
    version = reader.version()
    topics = tuple(reader.name() for _ in range(reader.count(2)))
    user_data = reader.data()
    owned = reader.places() if version >= 1 else {}
    generation = reader.number() if version >= 2 else NO_GENERATION
    rack = reader.nullable_name() if version >= 3 else None
    return Subscription(topics, frozenset(places_of(owned)), generation, rack or "", user_data)


def encode_assignment(assignment: Mapping[str, Sequence[int]]) -> bytes:
    return b"".join((struct.pack(">h", _VERSION), *_places(assignment), _bytes(None)))


def decode_assignment(blob: bytes) -> Assignment:
    """Topic to partitions; empty for a member that has been given nothing yet."""
    if not blob:
        return {}
    reader = _Reader(blob, "assignment")
    reader.version()
    return reader.places()


def by_topic(places: Iterable[TopicPartition]) -> Assignment:
    """The same places as an assignment has them."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(places):
        topics.setdefault(topic, []).append(partition)
    return {topic: tuple(partitions) for topic, partitions in topics.items()}


def places_of(assignment: Mapping[str, Sequence[int]]) -> list[TopicPartition]:
    return [(topic, partition) for topic, partitions in assignment.items() for partition in partitions]


def assign_ranges(
    subscriptions: Mapping[str, Iterable[str]], partition_counts: Mapping[str, int]
) -> dict[str, Assignment]:
    """Member to assignment: each topic's partitions in order, cut into runs as equal as can be, members by name."""
    assignments: dict[str, Assignment] = {member: {} for member in subscriptions}
    wanted: dict[str, list[str]] = {}
    for member in sorted(subscriptions):
        for topic in subscriptions[member]:
            wanted.setdefault(topic, []).append(member)
    for topic, members in sorted(wanted.items()):
        share, extra = divmod(partition_counts.get(topic, 0), len(members))
        first = 0
        for nth, member in enumerate(members):
            count = share + (nth < extra)
            if count:
                assignments[member][topic] = tuple(range(first, first + count))
            first += count
    return assignments


def _name(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


def _bytes(data: bytes | None) -> bytes:
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


def _places(assignment: Mapping[str, Sequence[int]]) -> list[bytes]:
    parts = [struct.pack(">i", len(assignment))]
    for topic, partitions in sorted(assignment.items()):
        parts += (_name(topic), struct.pack(f">i{len(partitions)}i", len(partitions), *partitions))
    return parts


class _Reader:
    """Reads one blob; a blob comes from another client, so every length is checked."""

    def __init__(self, blob: bytes, what: str) -> None:
        self._blob = blob
        self._what = what
        self._pos = 0

    def version(self) -> int:
        return self._number(">h", 2)

    def count(self, least_bytes: int) -> int:
        """The count of an array whose elements take at least so many bytes each."""
        count = self._number(">i", 4)
        if count < 0 or count * least_bytes > len(self._blob) - self._pos:
            raise self._malformed()
        return count

    def number(self) -> int:
        return self._number(">i", 4)

    def name(self) -> str:
        name = self.nullable_name()
        if name is None:
            raise self._malformed()
        return name

    def nullable_name(self) -> str | None:
        piece = self._piece(self._number(">h", 2))
        try:
            return None if piece is None else piece.decode()
        except UnicodeDecodeError:
            raise self._malformed() from None

    def data(self) -> bytes | None:
        return self._piece(self._number(">i", 4))

    def places(self) -> Assignment:
        return {self.name(): self.partitions() for _ in range(self.count(6))}

    def partitions(self) -> tuple[int, ...]:
        count = self.count(4)
        partitions = struct.unpack_from(f">{count}i", self._blob, self._pos)
        self._pos += 4 * count
        return partitions

    def _piece(self, length: int) -> bytes | None:
        if length == -1:
            return None
        piece = bytes(self._blob[self._pos : self._pos + max(length, 0)])
        if length < 0 or len(piece) != length:
            raise self._malformed()
        self._pos += length
        return piece

    def _number(self, code: str, width: int) -> int:
        try:
            (number,) = struct.unpack_from(code, self._blob, self._pos)
        except struct.error:
            raise self._malformed() from None
        self._pos += width
        return int(number)

    def _malformed(self) -> ProtocolError:
        return ProtocolError(
            f"the {self._what} of a group member is malformed at byte {self._pos} of {len(self._blob)}"
        )
