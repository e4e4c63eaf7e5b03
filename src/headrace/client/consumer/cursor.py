"""One partition as a consumer reads it, which partitions are asked for next, and what waits to be handed out. No I/O.

A cursor has three offsets. `offset` is the next to be fetched, `position` the next to be handed out, and `done` what
may be saved as progress: everything before it was handed out by an earlier call than the last, or the caller has
committed it. They stand in this order, unless the caller has committed ahead, and all move together on a seek.

Record sets that were fetched wait in a buffer, in the order of arrival, within a bound of bytes. A set counts with its
bytes until it is taken, or, if it was taken to be held, until it is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace.client.connection.reactor import Backoff
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.errors import HeadraceError
from headrace.records.isolation import Aborted, hidden_batches

REPLICA_KEPT_S: Final = 300.0
"""How long a follower is read that a leader named, before the leader is asked again."""


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A Fetch on its way; its response counts for the cursors that still hold it."""

    broker_id: int
    offset: int


class Cursor:
    """State of one partition. `version` rises with every seek: what was fetched for an earlier one no longer counts."""

    __slots__ = (
        "__weakref__",
        "asked",
        "backoff",
        "begun",
        "committed",
        "done",
        "end",
        "epoch",
        "failure",
        "in_flight",
        "most_bytes",
        "not_before",
        "offset",
        "partition",
        "paused",
        "position",
        "replica",
        "replica_until",
        "reset",
        "saved",
        "stuck",
        "topic",
        "topic_id",
        "version",
        "wanted",
    )

    def __init__(self, topic: str, partition: int, most_bytes: int) -> None:
        self.topic = topic
        self.partition = partition
        self.topic_id = b""
        self.offset = self.position = self.done = -1
        self.begun = -1
        """Where the last seek, or the assignment, put `position`: what was handed out is between the two."""
        self.committed = -1
        """What the caller has committed: nothing saves less by itself, until a seek or a cut log."""
        self.asked = -1
        """What was asked to be saved last."""
        self.saved = -1
        """What the group's log has, if it was this consumer that wrote last; -1 while that is not known."""
        self.wanted: int | None = None
        """A moment (as ListOffsets has them) whose offset is still to be found; nothing is fetched till then."""
        self.reset: tuple[int, str] | None = None
        """From which offset, and why, `wanted` was set other than by the caller; `on_reset` hears of it then."""
        self.stuck = False
        """The log does not have `offset`: nothing is asked for until what was fetched before it is handed out."""
        self.version = 0
        self.in_flight: InFlight | None = None
        self.paused = False
        self.epoch = -1
        """Leader epoch of the last batch that was fetched."""
        self.end = -1
        """How far the last response said that records can be read, -1 before."""
        self.replica: int | None = None
        self.replica_until = 0.0
        self.backoff = Backoff()
        self.not_before = 0.0
        self.failure: HeadraceError | None = None
        """What ended the reading until somebody seeks."""
        self.most_bytes = most_bytes

    @property
    def place(self) -> TopicPartition:
        return self.topic, self.partition

    def __repr__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def seek(self, offset: int) -> None:
        """Go on at an offset; what was asked for or buffered before no longer counts."""
        self._invalidate()
        self.offset = self.position = self.done = self.begun = offset
        self.committed = self.saved = -1

    def read_again(self, offset: int) -> None:
        """What is before `position` from this offset on was not given out after all; progress stays."""
        self._invalidate()
        self.offset = self.position = offset

    def seek_moment(self, moment: int, reset: tuple[int, str] | None = None) -> None:
        """Go on at the offset of a moment, once it is found."""
        self._invalidate()
        self.offset = self.position = self.done = self.begun = -1
        self.committed = self.saved = -1
        self.wanted, self.reset = moment, reset

    def _invalidate(self) -> None:
        self.version += 1
        self.in_flight = None
        self.wanted = self.reset = None
        self.failure = None
        self.stuck = False
        self.epoch = -1
        self.backoff.reset()
        self.not_before = 0.0

    def fetch_again(self, offset: int) -> None:
        """What was fetched from this offset on was not kept."""
        self.offset, self.epoch, self.in_flight = offset, -1, None
        self.stuck = False

    def leave(self) -> None:
        """Nothing that was asked for or fetched counts any more."""
        self.version += 1
        self.in_flight = None

    def succeed(self) -> None:
        self.backoff.reset()
        self.not_before = 0.0

    def back_off(self, now: float) -> None:
        """Not again before a pause, which doubles while it goes on."""
        self.not_before = now + self.backoff.take()

    def read_from(self, leader: int, now: float) -> int:
        """The follower that the leader named, for a while, or the leader itself."""
        if self.replica is not None and now >= self.replica_until:
            self.replica = None
        return leader if self.replica is None else self.replica

    def prefer(self, replica: int, now: float) -> None:
        self.replica, self.replica_until = replica, now + REPLICA_KEPT_S

    def is_fetchable(self, now: float) -> bool:
        return self.in_flight is None and self.failure is None and not self.stuck and now >= self.not_before


def fetchable(
    cursors: Iterable[Cursor], leader_of: Callable[[Cursor], int | None], busy: Callable[[int], bool], now: float
) -> tuple[dict[int, list[Cursor]], list[Cursor]]:
    """By broker, what a Fetch may ask it for; and the cursors that no leader is known of.

    A broker that is busy with a question is left alone: one is under way at each broker at most.
    """
    found: dict[int, list[Cursor]] = {}
    lost: list[Cursor] = []
    for cursor in cursors:
        if cursor.paused or cursor.wanted is not None or not cursor.is_fetchable(now):
            continue
        leader = leader_of(cursor)
        if leader is None:
            lost.append(cursor)
            continue
        broker_id = cursor.read_from(leader, now)
        if not busy(broker_id):
            found.setdefault(broker_id, []).append(cursor)
    return found, lost


def next_time(cursors: Iterable[Cursor], now: float) -> float | None:
    """When the first of the cursors that pause may be asked for again."""
    times = [
        cursor.not_before
        for cursor in cursors
        if cursor.not_before > now and cursor.in_flight is None and not cursor.paused
    ]
    return min(times, default=None)


@dataclass(frozen=True, slots=True)
class CompletedFetch:
    """Whole batches of one partition as they came, from `first_offset` on; records before it do not count."""

    cursor: Cursor
    version: int
    records: memoryview
    first_offset: int
    next_offset: int
    aborted: tuple[Aborted, ...] = ()
    """Transactions whose records do not count either."""

    @property
    def hidden(self) -> frozenset[int]:
        """Base offsets of the batches of aborted transactions."""
        return hidden_batches(self.records, self.aborted)

    @property
    def counts(self) -> bool:
        return self.cursor.version == self.version


class FetchBuffer:
    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._sets: deque[CompletedFetch] = deque()

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._most_bytes

    @property
    def ready(self) -> bool:
        """Whether there is a record set to take."""
        return any(not completed.cursor.paused for completed in self._sets)

    def add(self, completed: CompletedFetch) -> None:
        self._sets.append(completed)
        self.bytes += len(completed.records)

    def put_back(self, completed: CompletedFetch) -> None:
        """What was taken, or the rest of it, is the next of its partition again."""
        self._sets.appendleft(completed)
        self.bytes += len(completed.records)

    def take(self, *, hold: bool = False) -> CompletedFetch | None:
        """The oldest record set whose partition is not paused."""
        sets = self._sets
        for nth, completed in enumerate(sets):
            if not completed.cursor.paused:
                del sets[nth]
                if not hold:
                    self.bytes -= len(completed.records)
                return completed
        return None

    def drop_stale(self) -> None:
        """Those that no longer count."""
        self._drop(lambda completed: not completed.counts)

    def drop_of(self, cursor: Cursor) -> None:
        self._drop(lambda completed: completed.cursor is cursor)

    def drop_paused(self) -> None:
        """What waits of paused partitions is fetched again when they go on, so that it does not hold up the others."""
        for completed in reversed(self._sets):
            if completed.cursor.paused:
                completed.cursor.fetch_again(completed.first_offset)
        self._drop(lambda completed: completed.cursor.paused)

    def _drop(self, gone: Callable[[CompletedFetch], bool]) -> None:
        dropped = [completed for completed in self._sets if gone(completed)]
        if dropped:
            self._sets = deque(completed for completed in self._sets if not gone(completed))
            self.bytes -= sum(len(completed.records) for completed in dropped)
