"""Records on their way through listener functions: which may begin, which are done, what may be saved. No threads here.

Concurrent: any record may begin whenever a worker is free for it. Ordered: of each partition one at a time, the
next when the one before is done. A job may be told to wait for a while first, and to be tried again after a while; in
an ordered partition all behind it wait too.

What may be saved of a partition is the first offset that is not done; what was done after it comes again if the
process dies.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.progress import Offsets
from headrace.client.consumer.retries import OutgoingRecord, retried_record
from headrace.records.consumer_records import ReceivedRecord

QUEUED_PER_WORKER: Final = 64
"""Records that wait for each thread or task, so that it never waits for the network."""
QUEUED_LEAST: Final = 8
"""Of each partition, however many there are."""
SPAN_MAX: Final = 2000
"""Records of a partition that may be done, or on their way, beyond the first that is not."""


class Share(NamedTuple):
    """What of one partition is taken in before it waits; one record at least."""

    records: int
    size_bytes: int


class PartitionProgress:
    """One partition since it was assigned: what was taken in, in any order, and what of it is done."""

    __slots__ = ("_done", "_end", "_open", "pending", "pending_bytes")

    def __init__(self) -> None:
        self.pending = 0
        """Records that are not done."""
        self.pending_bytes = 0
        self._open: list[int] = []
        self._done: dict[int, int] = {}
        """Behind the first that is not done: how often each was."""
        self._end = -1

    @property
    def position(self) -> int:
        """The first offset that is not done; -1 before the first."""
        return self._open[0] if self._open else self._end

    @property
    def unsaved(self) -> int:
        """Records whose being done is not covered by `position`."""
        return len(self._open)

    def begin(self, offset: int, size_bytes: int) -> None:
        heapq.heappush(self._open, offset)
        self.pending += 1
        self.pending_bytes += size_bytes
        self._end = max(self._end, offset + 1)

    def finish(self, offset: int, size_bytes: int) -> None:
        self.pending -= 1
        self.pending_bytes -= size_bytes
        waiting, done = self._open, self._done
        if not waiting or waiting[0] != offset:
            done[offset] = done.get(offset, 0) + 1
            return
        heapq.heappop(waiting)
        while waiting and (times := done.pop(waiting[0], 0)):
            covered = heapq.heappop(waiting)
            if times > 1:
                done[covered] = times - 1


@dataclass(slots=True, eq=False)
class Job:
    record: ReceivedRecord
    """As the listener gets it."""
    place: TopicPartition
    offset: int
    """Where it was read: of a record that is tried again, in the retry topic."""
    progress: PartitionProgress
    not_before: float = 0.0
    size_bytes: int = 0
    tries: int = 0
    """How often it failed, before this process too."""
    outgoing: OutgoingRecord | None = None
    """It has failed and is to be sent there; the listener is not called again."""
    refused: int = 0
    """How often that could not be sent."""


class Workload:
    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self.running = 0
        self.holds = 0
        """Nothing begins while somebody holds it."""
        self._progress: dict[TopicPartition, PartitionProgress] = {}
        self._queues: dict[TopicPartition, deque[Job]] = {}
        self._ready: deque[Job] = deque()
        self._waiting: list[tuple[float, int, Job]] = []
        self._order = itertools.count()

    @property
    def pending(self) -> int:
        """Records that were taken in and are not done."""
        return sum(progress.pending for progress in self._progress.values())

    def is_full(self, place: TopicPartition, share: Share) -> bool:
        """Whether no more of a partition should be taken in: it has enough to do, or one record that is not done keeps
        too many others from being saved.
        """
        progress = self._progress.get(place)
        return progress is not None and (
            progress.pending >= share.records
            or progress.pending_bytes >= share.size_bytes
            or progress.unsaved >= SPAN_MAX
        )

    def has_room(self, place: TopicPartition, share: Share) -> bool:
        """Whether one that was full should be taken in again: when half of what it may have is done, not one by one."""
        progress = self._progress.get(place)
        return progress is None or (
            2 * progress.pending <= share.records
            and 2 * progress.pending_bytes <= share.size_bytes
            and progress.unsaved < SPAN_MAX
        )

    def progress_of(self, place: TopicPartition) -> PartitionProgress:
        progress = self._progress.get(place)
        return progress if progress is not None else self._progress.setdefault(place, PartitionProgress())

    def put_records(self, records: Sequence[ReceivedRecord]) -> None:
        self.put(
            Job(record, place, record.offset, self.progress_of(place), size_bytes=record.size_bytes)
            for record in records
            for place in ((record.topic, record.partition),)
        )

    def put_retries(self, records: Sequence[ReceivedRecord], now: float) -> None:
        """Records of the retry topic as they were first, to wait until they are due."""
        now_ms = time.time() * 1000
        for read in records:
            place = read.topic, read.partition
            back = retried_record(read)
            wait_s = max(0.0, (back.due_ms - now_ms) / 1000)
            not_before = now + wait_s if wait_s else 0.0
            size_bytes = back.record.size_bytes
            self.put(
                [Job(back.record, place, read.offset, self.progress_of(place), not_before, size_bytes, back.tries)]
            )

    def put(self, jobs: Iterable[Job]) -> None:
        """Take in records of partitions that are assigned, each partition in its order."""
        for job in jobs:
            job.progress.begin(job.offset, job.size_bytes)
            if not self.ordered:
                self._enqueue(job)
                continue
            queue = self._queues.setdefault(job.place, deque())
            queue.append(job)
            if len(queue) == 1:
                self._enqueue(job)

    def next(self, now: float) -> Job | None:
        """A job that begins now, if one may."""
        if self.holds:
            return None
        while self._waiting and self._waiting[0][0] <= now:
            self._ready.append(heapq.heappop(self._waiting)[2])
        while self._ready:
            job = self._ready.popleft()
            if self.is_current(job):
                self.running += 1
                return job
        return None

    def next_at(self) -> float | None:
        """When the first of those that wait may begin."""
        return self._waiting[0][0] if self._waiting else None

    def done(self, job: Job) -> None:
        self.running -= 1
        job.progress.finish(job.offset, job.size_bytes)
        queue = self._queues.get(job.place)
        if queue and queue[0] is job:
            queue.popleft()
            if queue:
                self._enqueue(queue[0])

    def again(self, job: Job, not_before: float) -> None:
        """It was not done: once more, later."""
        self.running -= 1
        job.not_before = not_before
        if self.is_current(job):
            self._enqueue(job)

    def is_current(self, job: Job) -> bool:
        """Whether its partition is still the one that it was read from; if not, somebody else does it."""
        return self._progress.get(job.place) is job.progress

    def drop(self, places: Iterable[TopicPartition]) -> None:
        """These partitions are gone: what of them has not begun does not."""
        for place in places:
            self._progress.pop(place, None)
            self._queues.pop(place, None)
        # Now, not when a worker is free or they are due: whoever works on them next may hold as many.
        self._ready = deque(job for job in self._ready if self.is_current(job))
        self._waiting = [each for each in self._waiting if self.is_current(each[2])]
        heapq.heapify(self._waiting)

    def positions(self) -> Offsets:
        """What may be saved of each partition that anything was taken in of."""
        return {place: progress.position for place, progress in self._progress.items() if progress.position >= 0}

    def _enqueue(self, job: Job) -> None:
        if job.not_before:
            heapq.heappush(self._waiting, (job.not_before, next(self._order), job))
        else:
            self._ready.append(job)


def share_of(workers: int, partitions: int, buffer_bytes: int, *, retried: bool) -> Share:
    """What of a partition is taken in before it waits: among them they have the bytes of the consumer's buffer. Of a
    retry partition nothing while there is one that is not done: those behind it are due later.
    """
    count = max(1, partitions)
    most = 1 if retried else max(QUEUED_LEAST, workers * QUEUED_PER_WORKER // count)
    return Share(most, max(1, buffer_bytes // count))
