"""Following partitions from a start to their end, alone or as a member of a group."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Self

import click

from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Fetched, Position, fetch, list_offsets, offsets_at
from headrace.client.consumer.coordinator import passes
from headrace.client.consumer.group_protocol import RANGE, TopicPartition
from headrace.client.consumer.membership import Membership
from headrace.client.consumer.progress import NotHeld
from headrace.client.errors import Refusal
from headrace.client.fetch_requests import EARLIEST, LATEST, FetchLimits
from headrace.errors import ErrorCode, HeadraceError, RequestTimedOut
from headrace.records import kernel
from headrace.records.record import Record

COMMIT_SECONDS: Final = 1.0
SESSION_TIMEOUT_MS: Final = 10_000
REBALANCE_TIMEOUT_MS: Final = 60_000
CHECK_MS: Final = 5_000

_MOVED_ON: Final = frozenset(
    {ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID}
)


@dataclass(frozen=True, slots=True)
class Start:
    """An offset in every partition, or the offset that each has at a time."""

    offset: int | None = None
    time_ms: int | None = None

    @classmethod
    def beginning(cls) -> Self:
        return cls(time_ms=EARLIEST)

    @classmethod
    def end(cls) -> Self:
        return cls(time_ms=LATEST)

    def find(self, cluster: Cluster, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        if self.offset is not None:
            return dict.fromkeys(partitions, self.offset)
        assert self.time_ms is not None
        return offsets_at(cluster, topic, partitions, self.time_ms)


class Reader:
    """Reads partitions that were named."""

    def __init__(
        self, cluster: Cluster, topic: str, partitions: Iterable[int], start: Start | None, limits: FetchLimits
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._limits = limits
        self._start = start or Start.beginning()
        self._next = self._start.find(cluster, topic, list(partitions))
        self._ends = self._find_ends()

    def read(self, count: int | None, follow: bool) -> Iterator[tuple[int, list[Record]]]:
        """Partition and records, never more than `count` in all, until the ends that were found at the start."""
        left = sys.maxsize if count is None else count
        while left:
            self._look_around()
            wanted = [n for n, at in self._next.items() if follow or at < self._ends[n]]
            if not wanted and not follow:
                return
            for fetched in self._fetch(wanted):
                partition = fetched.position.partition
                for header, batch in fetched.whole_batches():
                    stop = sys.maxsize if follow else self._ends[partition]
                    records = [] if header.is_control else kernel.records(batch)
                    chosen = [r for r in records if self._next[partition] <= r.offset < stop][:left]
                    self._next[partition] = header.next_offset
                    if chosen:
                        left -= len(chosen)
                        yield partition, chosen
                    if not left:
                        return

    def done(self, partition: int, offset: int) -> None:
        """Everything below the offset has been dealt with."""

    def close(self) -> None: ...

    def _look_around(self) -> None:
        """Called between two fetches."""

    def _fetch(self, partitions: list[int]) -> list[Fetched]:
        positions = [Position(self._topic, n, self._next[n]) for n in partitions]
        return fetch(self._cluster, positions, self._limits)

    def _find_ends(self) -> dict[int, int]:
        found = list_offsets(self._cluster, self._topic, dict.fromkeys(self._next, LATEST))
        return {n: timed.offset for n, timed in found.items()}


class GroupReader(Reader):
    """Reads what a group assigns, from where the group left off, and commits what was done.

    The range assignor is eager: all partitions go before any come. That happens between two fetches alone, when all
    that was read is done.
    """

    def __init__(self, cluster: Cluster, topic: str, group_id: str, start: Start | None, limits: FetchLimits) -> None:
        super().__init__(cluster, topic, [], start, limits)
        self._group_id = group_id
        self._done: dict[TopicPartition, int] = {}
        """What is not committed yet."""
        self._commit_due = 0.0
        self._assigned: dict[int, int | None] | None = None
        """The group's progress in each partition; None while there is no assignment."""
        self._current: dict[int, int | None] | None = None
        """The assignment that is being read."""
        self._failure: HeadraceError | None = None
        self._membership = Membership(
            cluster.pool,
            group_id,
            [topic],
            RANGE,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_lost=self._on_lost,
            on_error=self._on_error,
        )
        self._membership.start()

    def done(self, partition: int, offset: int) -> None:
        self._done[self._topic, partition] = offset

    def close(self) -> None:
        """Commit and leave; a broker that is gone by now keeps neither from ending."""
        left: list[HeadraceError | None] = []
        self._membership.leave(left.append)
        self._cluster.wait(lambda: bool(left), self._cluster.timeout_ms)

    def _look_around(self) -> None:
        self._membership.on_poll()
        if time.monotonic() >= self._commit_due:
            self._commit()
        while (assigned := self._assigned) is None:
            self._wait(lambda: self._assigned is not None)
        self._membership.on_poll_end()
        if assigned is self._current:
            return
        self._current = assigned
        self._next = {n: offset for n, offset in assigned.items() if offset is not None}
        fresh = [n for n in assigned if n not in self._next]
        if fresh:
            self._next.update(self._start.find(self._cluster, self._topic, fresh))
        self._ends = self._find_ends()

    def _wait(self, done: Callable[[], bool]) -> None:
        """For a while. A group may take as long as its members do, but its coordinator is to be there."""
        if not self._cluster.wait(lambda: done() or self._failure is not None, CHECK_MS):
            self._cluster.forget()
            self._cluster.retry(lambda: self._cluster.coordinator(self._group_id))
        if self._failure is not None:
            raise self._failure

    def _commit(self) -> None:
        self._commit_due = time.monotonic() + COMMIT_SECONDS
        offsets, answers = dict(self._done), list[HeadraceError | None]()
        if not offsets:
            return
        self._membership.commit(offsets, answers.append)
        if not self._cluster.wait(lambda: bool(answers), self._cluster.timeout_ms):
            raise RequestTimedOut(f"commit of group {self._group_id!r}: no answer within the timeout")
        error = answers[0]
        if error is not None and not isinstance(error, NotHeld) and error.kafka_code not in _MOVED_ON:
            raise error
        for place in offsets:
            self._done.pop(place, None)

    def _on_assigned(self, places: Iterable[TopicPartition], offsets: Mapping[TopicPartition, int]) -> None:
        self._assigned = {place[1]: offsets.get(place) for place in sorted(places)}

    def _on_revoked(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        offsets = dict(self._done)
        self._on_lost(places)
        return offsets

    def _on_lost(self, _: Iterable[TopicPartition]) -> None:
        self._assigned = None
        self._done.clear()

    def _on_error(self, error: HeadraceError) -> None:
        if not passes(error):
            self._failure = error

    def _fetch(self, partitions: list[int]) -> list[Fetched]:
        if not partitions:
            current = self._current
            self._wait(lambda: self._assigned is not current)
            return []
        try:
            return super()._fetch(partitions)
        except Refusal as refusal:
            if refusal.kafka_code != ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            starts = list_offsets(self._cluster, self._topic, dict.fromkeys(partitions, EARLIEST))
            for n in partitions:
                if self._next[n] < starts[n].offset or self._next[n] > self._ends[n]:
                    click.echo(
                        f"headrace: {self._topic}-{n} has no offset {self._next[n]}; going on at {starts[n].offset}",
                        err=True,
                    )
                    self._next[n] = starts[n].offset
            return []
