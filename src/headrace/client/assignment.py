"""What the members of a consumer group tell each other: subscriptions, assignments, and the range assignor.

Both blobs are opaque to the broker and common to all Kafka clients. Big-endian: int16 version, then in a subscription
an array of topic names, in an assignment an array of (topic name, array of int32 partitions), then nullable bytes of
user data. Arrays and bytes have int32 lengths, names int16. Later versions only append fields, which are not read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from headrace.errors import ProtocolError

PROTOCOL_TYPE: Final = "consumer"
RANGE: Final = "range"

_VERSION: Final = 0
_NO_USER_DATA: Final = struct.pack(">i", -1)

Assignment = dict[str, tuple[int, ...]]


def encode_subscription(topics: Iterable[str]) -> bytes:
    names = sorted(set(topics))
    return b"".join((struct.pack(">hi", _VERSION, len(names)), *map(_name, names), _NO_USER_DATA))


def decode_subscription(blob: bytes) -> tuple[str, ...]:
    """The topics that a member asks for."""
    reader = _Reader(blob, "subscription")
    reader.version()
    return tuple(reader.name() for _ in range(reader.count(2)))


def encode_assignment(assignment: Mapping[str, Sequence[int]]) -> bytes:
    parts = [struct.pack(">hi", _VERSION, len(assignment))]
    for topic, partitions in sorted(assignment.items()):
        parts += (_name(topic), struct.pack(f">i{len(partitions)}i", len(partitions), *partitions))
    return b"".join((*parts, _NO_USER_DATA))


def decode_assignment(blob: bytes) -> Assignment:
    """Topic to partitions; empty for a member that has been given nothing yet."""
    if not blob:
        return {}
    reader = _Reader(blob, "assignment")
    reader.version()
    return {reader.name(): reader.partitions() for _ in range(reader.count(6))}


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

    def name(self) -> str:
        length = self._number(">h", 2)
        piece = self._blob[self._pos : self._pos + max(length, 0)]
        if length < 0 or len(piece) != length:
            raise self._malformed()
        self._pos += length
        try:
            return piece.decode()
        except UnicodeDecodeError:
            raise self._malformed() from None

    def partitions(self) -> tuple[int, ...]:
        count = self.count(4)
        partitions = struct.unpack_from(f">{count}i", self._blob, self._pos)
        self._pos += 4 * count
        return partitions

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
