"""What happened in one run, and whether it may: every rule is checked as soon as it can be seen to be broken.

While it runs: one batch has one offset and one offset one batch among all that was acknowledged; one leader in an
epoch; a watermark never falls within an epoch; what a consumer has read never changes, and the end that it is told
never falls.
At the end: the log that all replicas agree on, byte for byte below the watermark, holds every acknowledged batch at its
offset, no batch twice, each producer's in order, and everything that a consumer saw.

A topic that may lose by its level (page caches alone, and all of them gone) is judged by the agreement of its replicas
only.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headrace.storage.log import TopicPartition

TRACE_LINES: Final = 400

Batch = tuple[int, int]
"""Producer id and number of the batch."""


class Violation(Exception):
    """A rule is broken."""


class Trace:
    """The course of a run: the last lines of it, and a sum over all."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=TRACE_LINES)
        self.count = 0
        self._sum = hashlib.blake2b(digest_size=8)

    def note(self, now: float, text: str) -> None:
        line = f"{now:10.6f} {text}"
        self.lines.append(line)
        self.count += 1
        self._sum.update(line.encode())

    @property
    def sum(self) -> str:
        return self._sum.hexdigest()


@dataclass(slots=True)
class Record:
    """One record of the final log."""

    offset: int
    epoch: int
    batch: Batch
    nth: int


@dataclass(slots=True)
class Watched:
    """One partition as the outside has seen it."""

    may_lose: bool
    acknowledged: dict[Batch, int] = field(default_factory=dict)
    batch_at: dict[int, Batch] = field(default_factory=dict)
    records_of: dict[Batch, int] = field(default_factory=dict)
    consumed: dict[int, bytes] = field(default_factory=dict)
    leaders: dict[int, str] = field(default_factory=dict)
    watermarks: dict[tuple[str, int], int] = field(default_factory=dict)


class History:
    def __init__(self, trace: Trace, now: Callable[[], float]) -> None:
        self._trace = trace
        self._now = now
        self.counts: Counter[str] = Counter()
        self._watched: dict[TopicPartition, Watched] = {}

    def watch(self, where: TopicPartition, *, may_lose: bool) -> None:
        self._watched[where] = Watched(may_lose)

    def may_lose(self, where: TopicPartition) -> bool:
        return self._watched[where].may_lose

    def partitions(self) -> list[TopicPartition]:
        return list(self._watched)

    def note(self, text: str) -> None:
        self._trace.note(self._now(), text)

    # While it runs.

    def acknowledged(self, where: TopicPartition, batch: Batch, records: int, offset: int, epoch: int, by: str) -> None:
        """A leader decided to answer a producer: its batch is safe at this offset."""
        watched = self._watched[where]
        self.note(f"ack {where} {batch} at {offset} epoch {epoch} by {by}")
        self.counts["acknowledged"] += 1
        self.leads(where, epoch, by)
        known = watched.acknowledged.setdefault(batch, offset)
        if watched.may_lose:
            watched.acknowledged[batch] = offset
            return
        watched.records_of[batch] = records
        if known != offset:
            raise Violation(f"{where}: batch {batch} acknowledged at {known} and by {by} at {offset}")
        other = watched.batch_at.setdefault(offset, batch)
        if other != batch:
            raise Violation(f"{where}: offset {offset} acknowledged for {other} and by {by} for {batch}")

    def leads(self, where: TopicPartition, epoch: int, who: str) -> None:
        leader = self._watched[where].leaders.setdefault(epoch, who)
        if leader != who:
            raise Violation(f"{where}: both {leader} and {who} lead epoch {epoch}")

    def watermark(self, where: TopicPartition, epoch: int, who: str, watermark: int) -> None:
        """Of one replica in one epoch."""
        known = self._watched[where].watermarks.get((who, epoch), 0)
        if watermark < known:
            raise Violation(f"{where}: the watermark of {who} fell from {known} to {watermark} within epoch {epoch}")
        self._watched[where].watermarks[who, epoch] = watermark

    def consumed(self, where: TopicPartition, offset: int, content: bytes, by: str) -> None:
        watched = self._watched[where]
        known = watched.consumed.setdefault(offset, content)
        if known != content and not watched.may_lose:
            raise Violation(f"{where}: offset {offset} was read as {known!r} and from {by} as {content!r}")

    # At the end.

    def check(self, where: TopicPartition, records: list[Record], contents: dict[int, bytes]) -> None:
        """Compare with the final log."""
        watched = self._watched[where]
        if watched.may_lose:
            return
        self._check_order(where, records)
        found = {(record.batch, record.nth): record.offset for record in records}
        for batch, offset in watched.acknowledged.items():
            for nth in range(watched.records_of[batch]):
                at = found.get((batch, nth))
                if at is None:
                    raise Violation(f"{where}: acknowledged batch {batch} at {offset} is lost")
                if at != offset + nth:
                    raise Violation(f"{where}: batch {batch}, acknowledged at {offset}, is at {at - nth}")
        for offset, content in watched.consumed.items():
            if contents.get(offset) != content:
                raise Violation(
                    f"{where}: a consumer read {content!r} at {offset}, where the log has {contents.get(offset)!r}"
                )

    def _check_order(self, where: TopicPartition, records: list[Record]) -> None:
        last: dict[int, tuple[int, int]] = {}
        offset, epoch = -1, -1
        for record in records:
            if record.offset != offset + 1:
                raise Violation(f"{where}: offset {record.offset} follows {offset}")
            if record.epoch < epoch:
                raise Violation(f"{where}: epoch {record.epoch} follows {epoch} at offset {record.offset}")
            offset, epoch = record.offset, record.epoch
            producer, number = record.batch
            before = last.get(producer, (-1, 0))
            if (number, record.nth) <= before:
                raise Violation(f"{where}: record {number}.{record.nth} of producer {producer} follows {before}")
            last[producer] = (number, record.nth)
