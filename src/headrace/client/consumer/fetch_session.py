"""A fetch session (KIP-227) as its consumer has it, one for each broker: what the broker knows, so that a fetch names
only what differs. No I/O.

It begins with a full fetch in epoch 0. A broker that gives it no id has no room for it, or no sessions at all: the next
fetch is full again, and asks again. Whenever its state may not be the broker's, after an error or a lost connection,
a full fetch that names its id ends it and begins another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.fetch_requests import FetchChanges, by_topic
from headrace.errors import ErrorCode
from headrace.wire.message import Message

EPOCH_MAX: Final = (1 << 31) - 1
_NO_ID: Final = 0
_FULL: Final = 0
_LOST: Final = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)

Asked = tuple[bytes, int, int, int, int]
"""Topic id, offset, current leader epoch, epoch of the last record, most bytes."""


class FetchSession:
    def __init__(self) -> None:
        self._id = _NO_ID
        self._epoch = _FULL
        self._asked: dict[TopicPartition, Asked] = {}
        """As the broker has it, once the fetch that is under way has arrived."""

    def changes(self, wanted: Mapping[TopicPartition, Asked]) -> FetchChanges:
        """What the next fetch has to name, so that it asks for these and no others."""
        asked = self._asked
        if self._epoch != _FULL and any(
            place in asked and asked[place][0] != each[0] for place, each in wanted.items()
        ):
            self.reset()  # of a topic that was made anew the old one cannot be forgotten by its name
        if self._epoch == _FULL:
            named, gone = dict(wanted), {}
        else:
            named = {place: each for place, each in wanted.items() if asked.get(place) != each}
            gone = {place: each for place, each in asked.items() if place not in wanted}
        self._asked = dict(wanted)
        topics = by_topic((name, each[0], _partition(index, each)) for (name, index), each in named.items())
        forgotten = by_topic((name, each[0], index) for (name, index), each in gone.items())
        return FetchChanges(self._id, self._epoch, topics, forgotten)

    def answered(self, answer: Message) -> None:
        """The fetch was answered without an error."""
        self._id = answer.session_id or _NO_ID
        if self._id == _NO_ID:
            self._epoch = _FULL
        else:
            self._epoch = 1 if self._epoch == EPOCH_MAX else self._epoch + 1

    def lost(self, code: int) -> bool:
        """The fetch was answered with an error. True: it is the session's, and a full fetch can be sent at once."""
        was_full = self._epoch == _FULL
        self.reset()
        if code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND:
            self._id = _NO_ID
        return code in _LOST and not was_full

    def reset(self) -> None:
        """The next fetch is full."""
        self._epoch = _FULL


def _partition(index: int, asked: Asked) -> Message:
    _, offset, leader_epoch, epoch, most_bytes = asked
    return Message(
        partition=index,
        fetch_offset=offset,
        current_leader_epoch=leader_epoch,
        last_fetched_epoch=epoch,
        partition_max_bytes=most_bytes,
    )
