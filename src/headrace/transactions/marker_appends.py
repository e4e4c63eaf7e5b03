"""Markers for partitions that this broker leads: appended, and answered when the high watermark has passed them.

A marker may come again, and late: from a coordinator that has not heard our answer, or from its successor. What is
there already is not appended again; it is answered when what is there has passed the watermark. A marker that is lost
after it was answered would leave its transaction open for ever, so it is the watermark itself that is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace.coordinators.watermark_wait import WatermarkWait
from headrace.errors import ErrorCode, HeadraceError, RequestTimedOut
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Failures, Partitions
from headrace.transactions.messages import MarkerRequest, Place

WAIT_MS: Final = 2000
"""For the watermark. What takes longer is answered by REQUEST_TIMED_OUT, and asked for again."""

Codes = dict[Place, int]
Written = Callable[[Codes], None]
"""Hears the error code of each partition, once."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The end of a producer's transaction in a partition, now that the watermark has passed its marker."""

    partition: Partition
    producer_id: int
    committed: bool
    marker_offset: int


class MarkerAppends:
    """`not_led` is the code for a partition that is not led here. `decided` hears of each marker that was appended, in
    the order of the log."""

    def __init__(
        self, partitions: Partitions, not_led: Callable[[str, int], int], decided: Callable[[Decision], None]
    ) -> None:
        self.partitions = partitions
        self.not_led = not_led
        self.decided = decided

    def write(self, request: MarkerRequest, places: Iterable[Place], done: Written) -> None:
        """The caller ends the turn when it has handed in all."""
        writing = _Writing(self, request, done)
        for place in dict.fromkeys(places):
            writing.append(place)
        self.partitions.at_turn_end(writing.written)


class _Writing:
    """The markers of one request until the last of them is answered."""

    def __init__(self, owner: MarkerAppends, request: MarkerRequest, done: Written) -> None:
        self.answered = False
        self._owner = owner
        self._request = request
        self._done = done
        self._codes: Codes = {}
        self._waits: list[tuple[Place, Partition, WatermarkWait]] = []
        self._left = 0

    def append(self, place: Place) -> None:
        owner, request = self._owner, self._request
        partition = owner.partitions.find(*place)
        if partition is None:
            self._codes[place] = owner.not_led(*place)
            return
        end_before = partition.log.end_offset
        try:
            offset, needed, _ = partition.append_marker(
                request.producer_id,
                request.epoch,
                request.coordinator_epoch,
                committed=request.committed,
                number=request.number,
                transaction_version=request.transaction_version,
            )
        except HeadraceError as error:
            self._codes[place] = error.kafka_code
            return
        is_new = offset >= end_before
        if is_new:
            owner.partitions.touch(partition)

        def passed() -> None:
            if is_new:
                owner.decided(Decision(partition, request.producer_id, request.committed, offset))
            self._settle(place, ErrorCode.NONE)

        def failed(error: HeadraceError) -> None:
            self._settle(place, error.kafka_code)

        wait = WatermarkWait(owner.partitions, partition, needed, passed, failed)
        self._waits.append((place, partition, wait))

    def written(self, failures: Failures) -> None:
        self._left = 1 + len(self._waits)  # held until all are looked at
        for place, partition, wait in self._waits:
            error = failures.get(partition.topic_partition)
            if error is not None:  # one that was there already may be of this very turn
                self._settle(place, error.kafka_code)
            else:
                wait.begin()
        self._release()
        if not self.answered:
            partitions = self._owner.partitions
            partitions.deadlines.add(partitions.clock.now() + WAIT_MS / 1000, self)

    def _settle(self, place: Place, code: int) -> None:
        """The first answer of a place is the one that is told."""
        if place not in self._codes:
            self._codes[place] = code
            self._release()

    def _release(self) -> None:
        self._left -= 1
        if not self._left:
            self._answer()

    def expire(self) -> None:
        for place, _, _ in self._waits:
            self._codes.setdefault(place, RequestTimedOut.mapping.kafka_code)
        self._answer()

    def _answer(self) -> None:
        if not self.answered:
            self.answered = True
            self._done(self._codes)
