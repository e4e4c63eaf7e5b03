"""Following partitions from a start to their end, alone or as a member of a group."""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import click

from headrace.cli.options import time_ms
from headrace.cli.record_filter import RecordFilter
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import (
    Fetched,
    Position,
    Span,
    fetch,
    fetch_once,
    list_offsets,
    offsets_at,
    span_records,
)
from headrace.client.connection.metadata import NO_LEADER, Partition
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
LEADER_LOOK_MS: Final = 500
"""How often partitions without a leader are looked at again."""

_MOVED_ON: Final = frozenset(
    {ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID}
)


@dataclass(frozen=True, slots=True)
class Start:
    """One of: an offset in every partition, that which each has at a time, and so many before the end of each."""

    offset: int | None = None
    time_ms: int | None = None
    before_end: int | None = None

    @classmethod
    def beginning(cls) -> Self:
        return cls(time_ms=EARLIEST)

    @classmethod
    def end(cls) -> Self:
        return cls(time_ms=LATEST)

    @classmethod
    def parse(cls, text: str) -> Self:
        """What --from takes."""
        match text:
            case "beginning":
                return cls.beginning()
            case "end":
                return cls.end()
            case _ if text.isascii() and text.isdigit():
                return cls(offset=int(text))
            case _ if text[:1] == "-" and text[1:].isascii() and text[1:].isdigit():
                return cls(before_end=int(text[1:]))
            case _:
                return cls(time_ms=time_ms(text, "--from", ", nor beginning, end, an offset or -N"))

    def find(self, cluster: Cluster, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        if self.offset is not None:
            return dict.fromkeys(partitions, self.offset)
        if self.before_end is None:
            assert self.time_ms is not None
            return offsets_at(cluster, topic, partitions, self.time_ms)
        starts, ends = log_bounds(cluster, topic, partitions)
        return {n: max(starts[n], end - self.before_end) for n, end in ends.items()}


def parse_until(text: str | None) -> tuple[int | None, int | None]:
    """What --until takes: an offset, or a time in ms."""
    if text is None:
        return None, None
    if text.isascii() and text.isdigit():
        return int(text), None
    return None, time_ms(text, "--until", ", nor an offset")


def log_bounds(cluster: Cluster, topic: str, partitions: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Where partitions begin and end now."""
    wanted = list(partitions)
    starts, ends = (
        {n: found.offset for n, found in list_offsets(cluster, topic, dict.fromkeys(wanted, moment)).items()}
        for moment in (EARLIEST, LATEST)
    )
    return starts, ends


class Chunk(NamedTuple):
    """Records of a partition that are wanted, none at times, and how far it has been read."""

    partition: int
    records: list[Record]
    next_offset: int
    passed: int
    """Offsets that this step went over."""


class Reader:
    """Reads partitions that were named.

    Those that no broker leads are put aside: the others are read, and these as soon as they have a leader.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partitions: Iterable[int],
        start: Start | None,
        limits: FetchLimits,
        wanted: RecordFilter | None = None,
        until_offset: int | None = None,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._limits = limits
        self._start = start or Start.beginning()
        self._filter = wanted or RecordFilter()
        self._until_offset = until_offset
        self._floor: dict[int, int] = {}
        """Where to begin; a log that ends before grows up to it first."""
        self._next: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._aside = {n: cluster.partition(topic, n) for n in partitions}
        """Partitions without a leader as they were last seen; at first all, until their places are found."""
        self._aside_since = time.monotonic()
        self._look_due = 0.0
        self._told: set[int] = set()
        if self._aside:
            self._take_up()

    @property
    def left(self) -> int:
        """Offsets up to the ends that were found at the start."""
        return sum(max(0, self._ends[n] - at) for n, at in self._next.items())

    @property
    def partition_count(self) -> int:
        return len(self._next.keys() | self._aside.keys())

    def beyond(self) -> dict[int, int]:
        """The ends of partitions that end before the offset that was to be the start."""
        return {n: self._ends[n] for n, at in sorted(self._floor.items()) if at > self._ends[n]}

    def read(self, count: int | None, follow: bool) -> Iterator[Chunk]:
        """Never more than `count` records in all, until the ends that were found at the start."""
        left = sys.maxsize if count is None else count
        while left:
            self._look_around()
            if follow:
                self._follow_aside()
            wanted = [n for n, at in self._next.items() if n not in self._aside and (follow or at < self._ends[n])]
            if not wanted and not follow:
                if self._await_leaders():
                    continue
                return
            for fetched in self._fetch(wanted):
                for chunk in self._chunks(fetched, follow, left):
                    left -= len(chunk.records)
                    yield chunk
                    if not left:
                        return

    def _chunks(self, fetched: Fetched, follow: bool, left: int) -> Iterator[Chunk]:
        """Batch by batch; at most `left` records."""
        partition = fetched.position.partition
        stop = sys.maxsize if follow else self._ends[partition]
        for header, batch in fetched.shown_batches():
            at = self._next[partition]
            first = max(at, self._floor.get(partition, 0))
            records = [] if batch is None else kernel.records(batch)
            chosen = self._filter.choose(record for record in records if first <= record.offset < stop)
            next_offset = chosen[left - 1].offset + 1 if len(chosen) > left else min(header.next_offset, stop)
            self._next[partition] = header.next_offset
            yield Chunk(partition, chosen[:left], next_offset, next_offset - at)
            left -= min(left, len(chosen))

    def tail(self, count: int, seen: Callable[[int], None]) -> list[Chunk]:
        """The last records of each partition, merged by time, of which the last are given; then it stands at the ends.

        Looks back further, each time twice as far, until there are enough that are wanted. `seen` is told the offsets
        that were looked at. As it takes all to merge them, leaders are waited for first.
        """
        while self._await_leaders():
            pass
        starts, _ = log_bounds(self._cluster, self._topic, self._next)
        found: list[list[tuple[int, Record]]] = []
        for n in self._next:
            newest: deque[Record] = deque(maxlen=count)
            high, step = self._ends[n], count
            while high > starts[n] and len(newest) < count:
                low = max(starts[n], high - step)
                here = deque(self._between(n, low, high), maxlen=count)
                newest.extendleft(list(reversed(here))[: count - len(newest)])
                seen(high - low)
                high, step = low, step * 2
            found.append([(n, record) for record in newest])
            self._next[n] = self._ends[n]
        merged = list(heapq.merge(*found, key=lambda place: place[1].timestamp_ms))[-count:]
        runs = [(n, [record for _, record in run]) for n, run in itertools.groupby(merged, key=lambda place: place[0])]
        return [Chunk(n, run, run[-1].offset + 1, 0) for n, run in runs]

    def _between(self, partition: int, low: int, high: int) -> Iterator[Record]:
        """What is wanted of the offsets from `low` up to `high`."""
        span = Span(self._topic, partition, low, high, self._cluster.topic(self._topic).topic_id)
        for records, _ in span_records(self._cluster, span):
            yield from self._filter.choose(records)

    def done(self, partition: int, offset: int) -> None:
        """Everything below the offset has been dealt with."""

    def close(self) -> None: ...

    def _look_around(self) -> None:
        """Called between two fetches."""

    def _fetch(self, partitions: list[int]) -> list[Fetched]:
        if not partitions:
            self._cluster.wait(lambda: False, LEADER_LOOK_MS)
            return []

        def ask() -> list[Fetched]:
            if leaderless := self._leaderless(partitions):
                self._aside_since = time.monotonic()
                self._aside.update(leaderless)
            led = [n for n in partitions if n not in leaderless]
            return fetch_once(self._cluster, self._positions(led), self._limits)

        return self._cluster.retry(ask)

    def _positions(self, partitions: Iterable[int]) -> list[Position]:
        return [Position(self._topic, n, self._next[n]) for n in partitions]

    def unread(self) -> str:
        """The partitions that have no leader, and where their replicas are; empty if all have one."""
        return ", ".join(f"{self._topic}-{n} ({_replicas(part)})" for n, part in sorted(self._aside.items()))

    def _leaderless(self, partitions: Iterable[int]) -> dict[int, Partition]:
        found = {n: self._cluster.partition(self._topic, n) for n in partitions}
        return {n: partition for n, partition in found.items() if partition.leader_id == NO_LEADER}

    def _take_up(self, again: bool = True) -> None:
        """Go on with partitions that were put aside and have a leader by now; find the places of those that are new."""
        self._look_due = time.monotonic() + LEADER_LOOK_MS / 1000
        self._cluster.forget()
        leaderless = self._leaderless(self._aside)
        fresh = [n for n in self._aside if n not in leaderless and n not in self._next]
        try:
            floor = self._start.find(self._cluster, self._topic, fresh)
            ends = self._find_ends(fresh)
        except HeadraceError as error:
            # A broker that has just died leads in name, for a while.
            if not again or not error.mapping.retriable or self._leaderless(self._aside).keys() == leaderless.keys():
                raise
            self._take_up(again=False)
            return
        self._floor.update(floor)
        self._ends.update(ends)
        self._next.update((n, min(at, ends[n])) for n, at in floor.items())
        self._aside = leaderless

    def _await_leaders(self) -> bool:
        """Whether a partition that was put aside has got a leader, within the time that it may take."""
        before = len(self._aside)
        deadline = self._aside_since + self._cluster.timeout_ms / 1000
        while self._aside:
            self._take_up()
            if len(self._aside) < before:
                return True
            if time.monotonic() >= deadline:
                break
            self._cluster.wait(lambda: False, LEADER_LOOK_MS)
        return False

    def _follow_aside(self) -> None:
        """Say which partitions are without a leader, once each time, and look at them again now and then."""
        if self._aside and time.monotonic() >= self._look_due:
            self._take_up()
        if self._aside.keys() - self._told:
            click.echo(f"headrace: no broker leads {self.unread()}: going on without, until one does", err=True)
        self._told = set(self._aside)

    def _find_ends(self, partitions: Iterable[int]) -> dict[int, int]:
        found = list_offsets(self._cluster, self._topic, dict.fromkeys(partitions, LATEST))
        stop = sys.maxsize if self._until_offset is None else self._until_offset
        return {n: min(timed.offset, stop) for n, timed in found.items()}


def _replicas(partition: Partition) -> str:
    brokers = ", ".join(map(str, partition.replicas))
    return f"on {'broker' if len(partition.replicas) == 1 else 'brokers'} {brokers}"


class GroupReader(Reader):
    """Reads what a group assigns, from where the group left off, and commits what was done.

    The range assignor is eager: all partitions go before any come. That happens between two fetches alone, when all
    that was read is done.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        group_id: str,
        start: Start | None,
        limits: FetchLimits,
        wanted: RecordFilter | None = None,
    ) -> None:
        super().__init__(cluster, topic, [], start, limits, wanted)
        self._group_id = group_id
        self._done: dict[TopicPartition, int] = {}
        """What is not committed yet."""
        self._commit_due = 0.0
        self._assigned: dict[int, int | None] | None = None
        """The group's progress in each partition; None while there is no assignment."""
        self._current: dict[int, int | None] | None = None
        """The assignment that is being read."""
        self._tells_progress = start is not None
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
        if self._next:
            self._tell_progress(list(self._next))
        self._tells_progress = False  # later progress is this member's own, or of those that it shares with
        fresh = [n for n in assigned if n not in self._next]
        if fresh:
            self._next.update(self._start.find(self._cluster, self._topic, fresh))
        self._ends = self._find_ends(self._next)
        for n in fresh:
            if self._next[n] > self._ends[n]:
                told = f"ends at {self._ends[n]}, before offset {self._next[n]}"
                click.echo(f"headrace: {self._topic}-{n} {told}", err=True)

    def _tell_progress(self, partitions: list[int]) -> None:
        """Say that the group goes on where it left off, if a place to start was given."""
        if self._tells_progress:
            places = ", ".join(f"{self._topic}-{n}" for n in partitions)
            click.echo(
                f"headrace: group {self._group_id} goes on where it left off in {places}, not at the start given; "
                "`headrace group reset` moves it",
                err=True,
            )

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
            return fetch(self._cluster, self._positions(partitions), self._limits)
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
