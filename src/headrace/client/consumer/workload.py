"""Records on their way through listener functions: which may begin, which are done, what may be saved. No threads here.

Concurrent: any record may begin whenever there is a hand free for it. Ordered: of each partition one at a time, the
next when the one before is done. A job may be told to wait for a while first, and to be tried again after a while; in
an ordered partition all behind it wait too.

What may be saved of a partition is the first offset that is not done; what was done after it comes again if the
process dies.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.client.consumer.group_protocol import Place
from headrace.client.consumer.progress import Offsets
from headrace.client.consumer.redelivery import Parcel
from headrace.records.consumer_records import ReceivedRecord

SPAN_MAX: Final = 2000
"""Records of a partition that may be done, or on their way, beyond the first that is not."""


class Share(NamedTuple):
    """What of one partition is taken in before it waits; one record at least."""

    records: int
    size_bytes: int


class Track:
    """One partition since it was assigned: what was taken in, in any order, and what of it is done."""

    __slots__ = ("_done", "_end", "_open", "pending", "pending_bytes")

    def __init__(self) -> None:
        self.pending = 0
        """Records that are not done."""
        self.pending_bytes = 0
        self._open: list[int] = []
        self._done: Counter[int] = Counter()
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
        self._done[offset] += 1
        while self._open and (times := self._done[self._open[0]]):
            covered = heapq.heappop(self._open)
            self._done[covered] -= 1
            if times == 1:
                del self._done[covered]


@dataclass(slots=True, eq=False)
class Job:
    record: ReceivedRecord
    """As the listener gets it."""
    place: Place
    offset: int
    """Where it was read: of a record that is tried again, in the retry topic."""
    track: Track
    not_before: float = 0.0
    size_bytes: int = 0
    tries: int = 0
    """How often it failed, before this process too."""
    parcel: Parcel | None = None
    """It has failed and is to be sent there; the listener is not called again."""
    refused: int = 0
    """How often that could not be sent."""


class Workload:
    def __init__(self, *, ordered: bool) -> None:
        self.ordered = ordered
        self.running = 0
        self.holds = 0
        """Nothing begins while somebody holds it."""
        self._tracks: dict[Place, Track] = {}
        self._lines: dict[Place, deque[Job]] = {}
        self._ready: deque[Job] = deque()
        self._waiting: list[tuple[float, int, Job]] = []
        self._order = itertools.count()

    @property
    def pending(self) -> int:
        """Records that were taken in and are not done."""
        return sum(track.pending for track in self._tracks.values())

    def is_full(self, place: Place, share: Share) -> bool:
        """Whether no more of a partition should be taken in: it has enough to do, or one record that is not done keeps
        too many others from being saved.
        """
        track = self._tracks.get(place)
        return track is not None and (
            track.pending >= share.records or track.pending_bytes >= share.size_bytes or track.unsaved >= SPAN_MAX
        )

    def has_room(self, place: Place, share: Share) -> bool:
        """Whether one that was full should be taken in again: when half of what it may have is done, not one by one."""
        track = self._tracks.get(place)
        return track is None or (
            2 * track.pending <= share.records
            and 2 * track.pending_bytes <= share.size_bytes
            and track.unsaved < SPAN_MAX
        )

    def track(self, place: Place) -> Track:
        track = self._tracks.get(place)
        return track if track is not None else self._tracks.setdefault(place, Track())

    def put(self, jobs: Iterable[Job]) -> None:
        """Take in records of partitions that are assigned, each partition in its order."""
        for job in jobs:
            job.track.begin(job.offset, job.size_bytes)
            if not self.ordered:
                self._line_up(job)
                continue
            line = self._lines.setdefault(job.place, deque())
            line.append(job)
            if len(line) == 1:
                self._line_up(job)

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
        job.track.finish(job.offset, job.size_bytes)
        line = self._lines.get(job.place)
        if line and line[0] is job:
            line.popleft()
            if line:
                self._line_up(line[0])

    def again(self, job: Job, not_before: float) -> None:
        """It was not done: once more, later."""
        self.running -= 1
        job.not_before = not_before
        if self.is_current(job):
            self._line_up(job)

    def is_current(self, job: Job) -> bool:
        """Whether its partition is still the one that it was read from; if not, somebody else does it."""
        return self._tracks.get(job.place) is job.track

    def drop(self, places: Iterable[Place]) -> None:
        """These partitions are gone: what of them has not begun does not."""
        for place in places:
            self._tracks.pop(place, None)
            self._lines.pop(place, None)
        # Now, not when a hand is free or they are due: whoever works on them next may hold as many.
        self._ready = deque(job for job in self._ready if self.is_current(job))
        self._waiting = [each for each in self._waiting if self.is_current(each[2])]
        heapq.heapify(self._waiting)

    def positions(self) -> Offsets:
        """What may be saved of each partition that anything was taken in of."""
        return {place: track.position for place, track in self._tracks.items() if track.position >= 0}

    def _line_up(self, job: Job) -> None:
        if job.not_before:
            heapq.heappush(self._waiting, (job.not_before, next(self._order), job))
        else:
            self._ready.append(job)
