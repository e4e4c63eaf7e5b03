"""What happened in one run, and whether it may: every rule is checked as soon as it can be seen to be broken.

While it runs: one batch has one offset and one offset one batch among all that was acknowledged; one leader in an
epoch; a watermark never falls within an epoch, a leader's or a follower's; what a consumer has read never changes, and
the bounds that it is told never fall; a committed offset that was acknowledged is answered until a later one is; a
partition has one owner in a generation of a group, and once a later one has its own, commits of this one are refused.
At the end: the log that all replicas agree on, byte for byte below the watermark, holds every acknowledged batch at its
offset, no batch twice, each producer's in order, and everything that a consumer saw, but for what clients had deleted.
Where that is damaged as well, a batch may be there twice, and a producer's out of order.

A topic that may lose by its level (page caches alone, and all of them gone) is judged by the agreement of its replicas
only.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from headrace.simulator.registers import NEVER, Floor, Register, floor_of
from headrace.storage.log import TopicPartition

TRACE_LINES: Final = 400

Batch = tuple[int, int]
"""Producer id and number of the batch."""
MARKER: Final[Batch] = (-1, -1)
"""In the place of a batch: the end of a transaction."""
KeyOf = Callable[[Batch, int], bytes]


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
    starts: Floor = field(default_factory=Floor)
    """Told by leaders, as an answer to who asked or who deleted."""
    ends: Floor = field(default_factory=Floor)
    to_delete: int = 0
    """Below this a client has asked to delete, or retention may."""
    damaged_from: int = NEVER
    """The first offset of the batches that are damaged on some machine."""
    asked: int = 0
    """Below this a client has asked to delete."""
    written_ms: dict[int, int] = field(default_factory=dict)
    """When the records at these offsets were made, of all that was acknowledged."""
    key_of: KeyOf | None = None
    """Of a compacted topic: the key of a record, by its batch and place in it."""
    firm: dict[Batch, int] | None = None
    """Once somebody has asked that page caches may count, and all of them may go: what was acknowledged as synced."""
    firm_end: int = 0
    """Below this everything was synced then."""
    firm_reads: dict[int, bytes] = field(default_factory=dict)


class History:
    def __init__(self, trace: Trace, now: Callable[[], float]) -> None:
        self.trace = trace
        self.now = now
        self.counts: Counter[str] = Counter()
        self._watched: dict[TopicPartition, Watched] = {}
        self._commits: dict[tuple[str, TopicPartition], Register] = {}
        self._owners: dict[tuple[str, int, TopicPartition], str] = {}
        self._generations: dict[tuple[str, TopicPartition], int] = {}
        self._spared = False

    def watch(
        self, where: TopicPartition, *, may_lose: bool, retained: bool = False, key_of: KeyOf | None = None
    ) -> None:
        """`key_of`: of a compacted topic."""
        self._watched[where] = Watched(may_lose, to_delete=NEVER if retained else 0, key_of=key_of)

    def may_lose(self, where: TopicPartition, offset: int | None = None) -> bool:
        """Whether records may be lost; or the one at that offset."""
        watched = self._watched[where]
        return watched.may_lose or (watched.firm is not None and (offset is None or offset >= watched.firm_end))

    def damaged(self, where: TopicPartition, offset: int) -> None:
        """A batch that begins there is not as it was on one machine."""
        watched = self._watched.get(where)
        if watched is not None:
            watched.damaged_from = min(watched.damaged_from, offset)

    def may_repeat(self, where: TopicPartition) -> bool:
        """Whether a batch may be told to be out of order, and be in the log twice: what is damaged and then deleted
        nobody mends, and a log does not know whom only that told of."""
        watched = self._watched[where]
        return watched.damaged_from < watched.to_delete

    def weaken(self, where: TopicPartition) -> None:
        """From now on only what is acknowledged as synced may not be lost, and all that was told before."""
        watched = self._watched[where]
        if watched.firm is not None or watched.may_lose:
            return
        ends = [offset + watched.records_of[batch] for batch, offset in watched.acknowledged.items()]
        watched.firm, watched.firm_reads = dict(watched.acknowledged), dict(watched.consumed)
        watched.firm_end = max([0, *ends, *(offset + 1 for offset in watched.consumed)])

    def spare_all(self, why: str) -> None:
        """From now on nobody promises anything of any partition, nor of what groups have committed."""
        self.note(f"nothing is promised any more: {why}")
        self.counts["spared"] += 1
        self._spared = True
        for watched in self._watched.values():
            watched.may_lose = True

    def partitions(self) -> list[TopicPartition]:
        return list(self._watched)

    def note(self, text: str) -> None:
        self.trace.note(self.now(), text)

    # While it runs.

    def acknowledged(
        self,
        where: TopicPartition,
        batch: Batch,
        records: int,
        offset: int,
        epoch: int,
        by: str,
        at_ms: int = 0,
        *,
        synced: bool = True,
    ) -> None:
        """A leader decided to answer a producer: its batch, made at `at_ms`, is safe at this offset. `synced`: for
        certain as one that page caches do not count for."""
        watched = self._watched[where]
        watched.written_ms.update(dict.fromkeys(range(offset, offset + records), at_ms))
        self.note(f"ack {where} {batch} at {offset} epoch {epoch} by {by}")
        self.counts["acknowledged"] += 1
        if epoch >= 0:
            self.leads(where, epoch, by)
        known = watched.acknowledged.setdefault(batch, offset)
        if watched.may_lose:
            watched.acknowledged[batch] = offset
            return
        watched.records_of[batch] = records
        if watched.firm is not None:
            self._acknowledged_again(where, watched, batch, offset, synced=synced)
            return
        if known != offset and not self.may_repeat(where):
            raise Violation(f"{where}: batch {batch} acknowledged at {known} and by {by} at {offset}")
        other = watched.batch_at.setdefault(offset, batch)
        if other != batch:
            raise Violation(f"{where}: offset {offset} acknowledged for {other} and by {by} for {batch}")

    def _acknowledged_again(
        self, where: TopicPartition, watched: Watched, batch: Batch, offset: int, *, synced: bool
    ) -> None:
        assert watched.firm is not None
        watched.acknowledged[batch] = offset
        known = watched.firm.get(batch, offset)
        if known != offset:
            raise Violation(f"{where}: batch {batch} was acknowledged and synced at {known}, and now at {offset}")
        if synced:
            watched.firm[batch] = offset
            watched.firm_end = max(watched.firm_end, offset + watched.records_of[batch])

    def leads(self, where: TopicPartition, epoch: int, who: str) -> None:
        leader = self._watched[where].leaders.setdefault(epoch, who)
        if leader != who and not self._spared:
            raise Violation(f"{where}: both {leader} and {who} lead epoch {epoch}")

    def watermark(self, where: TopicPartition, epoch: int, who: str, watermark: int) -> None:
        """Of one replica in one epoch."""
        known = self._watched[where].watermarks.get((who, epoch), 0)
        if watermark < known:
            raise Violation(f"{where}: the watermark of {who} fell from {known} to {watermark} within epoch {epoch}")
        self._watched[where].watermarks[who, epoch] = watermark

    def consumed(self, where: TopicPartition, offset: int, content: bytes, by: str) -> None:
        watched = self._watched[where]
        if watched.firm is None:
            known = watched.consumed.setdefault(offset, content)
        elif offset < watched.firm_end:
            known = watched.firm_reads.setdefault(offset, content)
        else:
            return
        if known != content and not watched.may_lose:
            raise Violation(f"{where}: offset {offset} was read as {known!r} and from {by} as {content!r}")

    # Bounds of a partition.

    def watched(self, where: TopicPartition) -> Watched:
        """All that was seen of the partition."""
        return self._watched[where]

    def bound(
        self, where: TopicPartition, what: str, floor: Floor, known: dict[int, int], epoch: int, value: int, by: str
    ) -> None:
        """A leader answers where the log starts or ends; `known` was told before it was asked."""
        least = floor_of(known, epoch)
        if value < least and not self.may_lose(where):
            raise Violation(f"{where}: the {what} {least} was told, and then by {by} {value} in epoch {epoch}")
        floor.told(epoch, value)

    def asks_to_delete(self, where: TopicPartition, before: int) -> None:
        watched = self._watched[where]
        watched.to_delete = max(watched.to_delete, before)
        watched.asked = max(watched.asked, before)

    def deleted(self, where: TopicPartition, before: int, start: int, epoch: int, by: str) -> None:
        """A leader decided to answer that everything below is gone."""
        self.note(f"deleted {where} below {before} by {by}, start {start}")
        self.counts["deletions"] += 1
        if start < before:
            raise Violation(f"{where}: {by} answers a deletion below {before} with the start {start}")
        self._watched[where].starts.told(epoch, before)

    # Groups.

    def commits(self, group: str, where: TopicPartition) -> Register:
        return self._commits.setdefault((group, where), Register())

    def committed(self, group: str, where: TopicPartition, number: int, epoch: int, by: str) -> None:
        """A coordinator decided to answer a commit."""
        register = self.commits(group, where)
        self.note(f"commit {group} {where} {register.writes[number].value} epoch {epoch} by {by}")
        self.counts["commits"] += 1
        register.acknowledged(number, epoch)

    def committed_told(
        self, group: str, where: TopicPartition, asked: dict[int, int], number: int | None, epoch: int, by: str
    ) -> None:
        """A coordinator answers what is committed."""
        fault = self.commits(group, where).fault(asked, number, epoch)
        if fault and not self._spared:
            raise Violation(f"{group} {where}: {by} in epoch {epoch} answers as committed {fault}")

    def assigned(self, group: str, generation: int, where: TopicPartition, member: str) -> None:
        owner = self._owners.setdefault((group, generation, where), member)
        if owner != member and not self._spared:
            raise Violation(f"{group}: {where} is given to {owner} and to {member} in generation {generation}")
        self._generations[group, where] = max(generation, self._generations.get((group, where), generation))

    def is_given_on(self, group: str, generation: int, where: TopicPartition) -> bool:
        """Whether a later generation has an owner of the partition: commits of this one are not taken any more."""
        return not self._spared and self._generations.get((group, where), -1) > generation

    def behind(self, where: TopicPartition, end: int) -> str:
        """The first group that has not committed everything; empty if there is none."""
        for (group, of), register in self._commits.items():
            last = register.last
            if of == where and end and (last is None or last.value != end):
                return f"{group} has committed {None if last is None else last.value} of {end} in {where}"
        return ""

    # At the end.

    def check(
        self, where: TopicPartition, records: list[Record], contents: dict[int, bytes], starts: Collection[int] = (0,)
    ) -> None:
        """Compare with the final log. Its replicas may begin at different offsets: a deletion that was not
        acknowledged may have come as far as some of them."""
        watched = self._watched[where]
        if watched.may_lose:
            return
        start = max(starts)
        if watched.firm is not None:
            self._check_firm(where, watched, records, contents, start)
            return
        if min(starts) < watched.starts.highest:
            raise Violation(f"{where}: the start {watched.starts.highest} was told, and a log begins at {min(starts)}")
        if start > watched.to_delete:
            raise Violation(f"{where}: the log begins at {start}, and nobody deleted more than {watched.to_delete}")
        records = [record for record in records if record.offset >= start]
        self._check_order(where, records, start, gaps=watched.key_of is not None, repeats=self.may_repeat(where))
        found = {(record.batch, record.nth): record.offset for record in records}
        there = {record.offset: (record.batch, record.nth) for record in records}
        latest = self.latest(where, records)
        for offset, batch in watched.batch_at.items():
            for nth in range(max(0, start - offset), watched.records_of[batch]):
                if there.get(offset + nth) == (batch, nth):
                    continue
                at = found.get((batch, nth))
                if at is None and watched.key_of is not None:
                    key = watched.key_of(batch, nth)
                    if latest.get(key, -1) <= offset + nth:
                        raise Violation(
                            f"{where}: record {nth} of {batch} at {offset} was the last of {key!r}, and is lost"
                        )
                    continue
                if at is None:
                    raise Violation(f"{where}: acknowledged batch {batch} at {offset} is lost")
                raise Violation(f"{where}: batch {batch}, acknowledged at {offset}, is at {at - nth}")
        for offset, content in watched.consumed.items():
            if watched.key_of is not None and offset not in contents:
                continue
            if offset >= start and contents.get(offset) != content:
                raise Violation(
                    f"{where}: a consumer read {content!r} at {offset}, where the log has {contents.get(offset)!r}"
                )

    def _check_firm(
        self, where: TopicPartition, watched: Watched, records: list[Record], contents: dict[int, bytes], start: int
    ) -> None:
        assert watched.firm is not None
        found = {record.offset: (record.batch, record.nth) for record in records}
        latest = self.latest(where, records)
        for batch, offset in watched.firm.items():
            for nth in range(max(0, start - offset), watched.records_of[batch]):
                at = found.get(offset + nth)
                is_compacted = watched.key_of is not None and latest.get(watched.key_of(batch, nth), -1) > offset + nth
                if at != (batch, nth) and not (at is None and is_compacted):
                    raise Violation(
                        f"{where}: batch {batch}, acknowledged and synced at {offset}, is lost: {at} is there"
                    )
        for offset, content in watched.firm_reads.items():
            there = contents.get(offset)
            if offset >= start and there != content and not (there is None and watched.key_of is not None):
                raise Violation(f"{where}: a consumer read {content!r} at {offset}, where the log has {there!r}")

    def latest(self, where: TopicPartition, records: list[Record]) -> dict[bytes, int]:
        """By key: the offset of its last record. Empty if the topic is not compacted."""
        key_of = self._watched[where].key_of
        return {} if key_of is None else {key_of(record.batch, record.nth): record.offset for record in records}

    def _check_order(
        self, where: TopicPartition, records: list[Record], start: int, *, gaps: bool, repeats: bool
    ) -> None:
        last: dict[int, tuple[int, int]] = {}
        offset, epoch = start - 1, -1
        for record in records:
            if record.offset != offset + 1 and not (gaps and record.offset > offset):
                raise Violation(f"{where}: offset {record.offset} follows {offset}")
            if record.epoch < epoch:
                raise Violation(f"{where}: epoch {record.epoch} follows {epoch} at offset {record.offset}")
            offset, epoch = record.offset, record.epoch
            if record.batch == MARKER:
                continue
            producer, number = record.batch
            before = last.get(producer, (-1, 0))
            if (number, record.nth) <= before and not repeats:
                raise Violation(f"{where}: record {number}.{record.nth} of producer {producer} follows {before}")
            last[producer] = (number, record.nth)
