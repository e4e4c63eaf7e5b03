"""A share session (KIP-932) as its member has it, one for each broker: what the broker knows, so that a request names
only what differs. No I/O.

It begins with a fetch in epoch 0, which acknowledges nothing. Each request that follows bears the next epoch, and -1
ends it. After an error its state may not be the broker's: the next fetch begins another one, and what the member has
acquired is still its own if the broker, or the next leader, has kept the lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

from headrace.errors import ErrorCode
from headrace.wire.message import Message

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
EPOCH_MAX: Final = (1 << 31) - 1
LOST: Final = frozenset({ErrorCode.SHARE_SESSION_NOT_FOUND, ErrorCode.INVALID_SHARE_SESSION_EPOCH})
"""Answers that say that the session is not what this end thinks, and that nothing was done."""

TopicIdPartition = tuple[bytes, int]


class Changes(NamedTuple):
    """What a fetch says of its session."""

    epoch: int
    added: tuple[TopicIdPartition, ...]
    forgotten: tuple[TopicIdPartition, ...]


class ShareSession:
    def __init__(self) -> None:
        self.generation = 0
        """Rises when it is lost: answers to requests of an earlier one say nothing of it."""
        self._epoch = INITIAL_EPOCH
        self._partitions: dict[TopicIdPartition, None] = {}

    @property
    def is_open(self) -> bool:
        return self._epoch != INITIAL_EPOCH

    def changes(self, wanted: Collection[TopicIdPartition]) -> Changes:
        """What the next fetch has to name, so that it is of these partitions and no others."""
        known = self._partitions
        added = tuple(place for place in wanted if place not in known)
        forgotten = tuple(place for place in known if place not in wanted)
        self._partitions = dict.fromkeys(wanted)
        return Changes(self.next_epoch(), added, forgotten)

    def next_epoch(self) -> int:
        """Of a request that leaves now."""
        epoch = self._epoch
        self._epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        return epoch

    def lose(self) -> None:
        """The next fetch begins another one."""
        self.generation += 1
        self._epoch = INITIAL_EPOCH
        self._partitions = {}


def by_topic(rows: Iterable[tuple[TopicIdPartition, Any]]) -> list[Message]:
    """What is said of partitions, under the ids of their topics."""
    topics: dict[bytes, Message] = {}
    for (topic_id, _), row in rows:
        topics.setdefault(topic_id, Message(topic_id=topic_id, partitions=[])).partitions.append(row)
    return list(topics.values())
