"""Following partitions from a start to their end, alone or as a member of a group."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import click

from headrace.client.admin import offsets
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Fetched, FetchLimits, Position, fetch
from headrace.client.admin.member import Member
from headrace.client.errors import Refusal
from headrace.errors import Code, HeadraceError
from headrace.records import kernel
from headrace.records.record import Record

COMMIT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """An offset in every partition, or the offset that each has at a time."""

    offset: int | None = None
    time_ms: int | None = None

    @classmethod
    def beginning(cls) -> Self:
        return cls(time_ms=offsets.EARLIEST)

    @classmethod
    def end(cls) -> Self:
        return cls(time_ms=offsets.LATEST)

    def find(self, cluster: Cluster, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        if self.offset is not None:
            return dict.fromkeys(partitions, self.offset)
        assert self.time_ms is not None
        return offsets.offsets_at(cluster, topic, partitions, self.time_ms)


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
        if not partitions:
            time.sleep(self._limits.max_wait_ms / 1000)  # A member without partitions waits for the next rebalance.
            return []
        positions = [Position(self._topic, n, self._next[n]) for n in partitions]
        return fetch(self._cluster, positions, self._limits)

    def _find_ends(self) -> dict[int, int]:
        found = offsets.list_offsets(self._cluster, self._topic, dict.fromkeys(self._next, offsets.LATEST))
        return {n: timed.offset for n, timed in found.items()}


class GroupReader(Reader):
    """Reads what a group assigns, from where the group left off, and commits what was done."""

    def __init__(self, cluster: Cluster, topic: str, group_id: str, start: Start | None, limits: FetchLimits) -> None:
        super().__init__(cluster, topic, [], start, limits)
        self._member = Member(cluster, group_id, [topic])
        self._done: dict[tuple[str, int], int] = {}
        self._commit_due = 0.0
        self._join()

    def done(self, partition: int, offset: int) -> None:
        self._done[self._topic, partition] = offset

    def close(self) -> None:
        """Commit and leave; a broker that is gone by now keeps neither from ending."""
        with contextlib.suppress(HeadraceError):
            self._commit()
            self._member.leave()

    def _look_around(self) -> None:
        if time.monotonic() >= self._commit_due:
            self._commit()
        if not self._member.keep_alive():
            self._commit()
            self._join()

    def _join(self) -> None:
        self._done.clear()
        mine = self._member.join().get(self._topic, ())
        committed = self._member.committed()
        self._next = {n: committed[self._topic, n] for n in mine if (self._topic, n) in committed}
        fresh = [n for n in mine if n not in self._next]
        if fresh:
            self._next.update(self._start.find(self._cluster, self._topic, fresh))
        self._ends = self._find_ends()

    def _commit(self) -> None:
        self._commit_due = time.monotonic() + COMMIT_SECONDS
        self._member.commit(self._done)
        self._done.clear()

    def _fetch(self, partitions: list[int]) -> list[Fetched]:
        try:
            return super()._fetch(partitions)
        except Refusal as refusal:
            if refusal.kafka_code != Code.OFFSET_OUT_OF_RANGE:
                raise
            starts = offsets.list_offsets(self._cluster, self._topic, dict.fromkeys(partitions, offsets.EARLIEST))
            for n in partitions:
                if self._next[n] < starts[n].offset or self._next[n] > self._ends[n]:
                    click.echo(
                        f"headrace: {self._topic}-{n} has no offset {self._next[n]}; going on at {starts[n].offset}",
                        err=True,
                    )
                    self._next[n] = starts[n].offset
            return []
