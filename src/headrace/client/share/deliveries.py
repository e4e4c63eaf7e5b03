"""What a share consumer was handed and has not acknowledged, and what it has said that no broker was told yet. No I/O.

    acquired -> handed out -> said -> told to the leader
                    \\ renewed: said, and still handed out

What is said of an offset last counts: a lock that was to be renewed is not, once its record is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.share.offset_runs import OffsetRuns, Run
from headrace.errors import InvalidRequest
from headrace.queues.messages import AcknowledgeType
from headrace.wire.message import Message

TYPES: Final = {
    "accept": AcknowledgeType.ACCEPT,
    "release": AcknowledgeType.RELEASE,
    "reject": AcknowledgeType.REJECT,
    "renew": AcknowledgeType.RENEW,
}
"""What an application may say of a record."""


class Said(NamedTuple):
    """One thing said of offsets in a row; the last is included."""

    first: int
    last: int
    type: AcknowledgeType


class Deliveries:
    """Of all partitions."""

    def __init__(self) -> None:
        self._held: dict[TopicPartition, OffsetRuns] = {}
        self._renewed: dict[TopicPartition, OffsetRuns] = {}
        """Of these, those whose locks were renewed since: they may be kept over a poll."""
        self._said: dict[TopicPartition, list[Said]] = {}

    @property
    def unacknowledged(self) -> int:
        """Records that the application has, and has said nothing of."""
        return sum(map(len, self._held.values())) - sum(map(len, self._renewed.values()))

    @property
    def has_said(self) -> bool:
        return bool(self._said)

    def hand_out(self, place: TopicPartition, runs: Iterable[Run]) -> None:
        held = self._held.setdefault(place, OffsetRuns())
        renewed = self._renewed.get(place)
        for run in runs:
            held.add(*run)
            if renewed is not None:
                renewed.remove(*run)

    def say(self, place: TopicPartition, run: Run, type: AcknowledgeType) -> None:
        """Of records that were acquired, whether or not they were handed out."""
        self._said.setdefault(place, []).append(Said(*run, type))

    def say_of_all(self, type: AcknowledgeType, but: Mapping[TopicPartition, OffsetRuns]) -> None:
        """Of all that is handed out; `but` these stay as they are."""
        for place, held in self._held.items():
            for run in but.get(place, ()):
                held.remove(*run)
            for run in held:
                self.say(place, run, type)
        self._held = {place: runs for place, runs in but.items() if runs}
        self._renewed.clear()

    def acknowledge(self, place: TopicPartition, run: Run, type: AcknowledgeType) -> None:
        """What the application says; InvalidRequest, and nothing is said, if it does not hold all of these."""
        held = self._held.get(place)
        if run.last < run.first:
            raise InvalidRequest(f"{place[0]}-{place[1]}: the range ends before it begins: {run.first} to {run.last}")
        if held is None or not held.has(*run):
            which = f"offset {run.first}" if run.first == run.last else f"offsets {run.first} to {run.last}"
            raise InvalidRequest(
                f"{which} of {place[0]}-{place[1]}: not all handed out by this consumer and not yet acknowledged"
            )
        if type is AcknowledgeType.RENEW:
            self._renewed.setdefault(place, OffsetRuns()).add(*run)
        else:
            held.remove(*run)
            if place in self._renewed:
                self._renewed[place].remove(*run)
            if not held:
                del self._held[place]
                self._renewed.pop(place, None)
        self.say(place, run, type)

    def take_said(self) -> dict[TopicPartition, list[Said]]:
        """What no broker was told yet, in order; from now on that is the caller's to tell."""
        said, self._said = self._said, {}
        return {place: settled(each) for place, each in said.items()}


def settled(said: Iterable[Said]) -> list[Said]:
    """The same in the order of offsets, each named once: what was said last counts."""
    seen = OffsetRuns()
    kept: list[Said] = []
    for each in reversed(list(said)):
        kept += [Said(*run, each.type) for run in seen.outside(each.first, each.last)]
        seen.add(each.first, each.last)
    kept.sort()
    joined: list[Said] = []
    for each in kept:
        if joined and joined[-1].last == each.first - 1 and joined[-1].type is each.type:
            each = Said(joined.pop().first, each.last, each.type)
        joined.append(each)
    return joined


def batches_of(said: Iterable[Said]) -> list[Message]:
    """As ShareFetch and ShareAcknowledge have it."""
    return [
        Message(first_offset=each.first, last_offset=each.last, acknowledge_types=[int(each.type)]) for each in said
    ]
