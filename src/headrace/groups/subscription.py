"""The topics in a consumer's protocol metadata: version int16, then an array of strings; what follows is not read.

The metadata belongs to the clients. The broker looks into it for one purpose: to keep the offsets of topics in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.errors import CorruptBatch
from headrace.groups.record_reader import Reader

CONSUMER: Final = "consumer"
"""Protocol type of groups whose metadata has this form."""


def topics_of(metadata: bytes) -> frozenset[str] | None:
    """None when the metadata is not of this form."""
    reader = Reader(metadata)
    try:
        reader.int16()
        return frozenset(reader.string() for _ in range(min(reader.int32(), len(metadata))))
    except CorruptBatch:
        return None


def subscribed(metadata: Iterable[bytes]) -> frozenset[str] | None:
    """All topics of all members; None when one of them cannot be read, and so any topic may be in use."""
    topics: set[str] = set()
    for one in metadata:
        found = topics_of(one)
        if found is None:
            return None
        topics |= found
    return frozenset(topics)
