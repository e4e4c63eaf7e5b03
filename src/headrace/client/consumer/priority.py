"""Priority order in a consumer's memory: of what is there, records with the higher number first.

The number is in a header, as decimal text; a record without it, or with something else in it, has priority 0. Records
of one priority keep the order in which they came, so within a partition the order of their offsets. Since others may
overtake a record, progress is only what was handed out without a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from headrace.client.consumer.cursor import CompletedFetch, Cursor


class Contiguous:
    """Progress through records that are done in any order: only what is done without a gap may be saved. `position` is
    the first offset that is not done: all before it are, or hold no record.
    """

    __slots__ = ("_done", "_end", "_waiting")

    def __init__(self, position: int) -> None:
        self._end = position
        self._waiting: deque[int] = deque()
        self._done: set[int] = set()

    @property
    def position(self) -> int:
        return self._waiting[0] if self._waiting else self._end

    @property
    def waiting(self) -> int:
        """Offsets that are expected and not yet covered by `position`."""
        return len(self._waiting)

    def expect(self, offsets: Iterable[int], next_offset: int) -> None:
        """Records that will be done: their offsets, which rise, and where the log goes on after them."""
        self._waiting.extend(offsets)
        self._end = next_offset

    def done(self, offset: int) -> None:
        """One of the expected; once each, in any order."""
        waiting, done = self._waiting, self._done
        if waiting and waiting[0] == offset:
            waiting.popleft()
            while waiting and waiting[0] in done:
                done.remove(waiting.popleft())
        else:
            done.add(offset)


LOWEST: Final = 0
RECORDS_MAX: Final = 100_000
"""How many records may wait in order; what is above stays in its record sets."""
BYTES_MAX: Final = 16 << 20
UNBOUNDED: Final = 1 << 62


class _Waiting:
    """The records of one set that were not handed out yet."""

    __slots__ = ("cursor", "held_bytes", "left", "progress", "size_bytes", "version")

    def __init__(self, completed: CompletedFetch, progress: Contiguous, left: int, size_bytes: int) -> None:
        self.cursor = completed.cursor
        self.version = completed.version
        self.held_bytes = len(completed.records)
        """What the set was when it came; its records are copies, so its memory is not kept."""
        self.progress = progress
        self.left = left
        self.size_bytes = size_bytes
        """Of the set's records, which may be far more than the set was when it came compressed."""

    @property
    def counts(self) -> bool:
        return self.cursor.version == self.version


class PriorityOrder:
    """Takes whole record sets, gives single records; `freed_bytes` grows by a set's size when its last one went, and
    while it is set aside, so that what is of paused partitions does not hold up the others. No record
    is taken in beyond `most_bytes`.

    What is aside counts, but never takes all: beside `n` partitions that are, an `n+1`-th part may be taken in. So with
    all of 100 partitions paused one by one, five times `most_bytes` are there, not a hundred times.
    """

    def __init__(self, header: str, most_bytes: int = BYTES_MAX) -> None:
        self._header = header
        self._most_bytes = most_bytes
        self._bytes = 0
        self._by_priority: dict[int, deque[tuple[Any, _Waiting]]] = {}
        self._highest_first: list[int] = []
        self._aside: list[tuple[int, Any, _Waiting]] = []
        self._aside_bytes = self._aside_cursors = 0
        self._progress: WeakKeyDictionary[Cursor, tuple[int, Contiguous]] = WeakKeyDictionary()
        self.count = 0
        """Records that may be taken."""
        self.freed_bytes = 0

    @property
    def has_room(self) -> bool:
        return self.count < self._beside(len(self._aside), RECORDS_MAX) and self._bytes < self._may_have_bytes

    @property
    def room_bytes(self) -> int:
        return max(1, self._may_have_bytes - self._bytes)

    @property
    def _may_have_bytes(self) -> int:
        return self._beside(self._aside_bytes, self._most_bytes)

    def _beside(self, aside: int, most: int) -> int:
        """Of `most`, what may be there to be taken."""
        return max(1, most - aside, most // (self._aside_cursors + 1))

    def put(self, completed: CompletedFetch, records: Sequence[Any], size_bytes: int = 0) -> None:
        """All records of a set, in their order, with what they take of `most_bytes`."""
        progress = self._progress_of(completed)
        progress.expect([record.offset for record in records], completed.next_offset)
        waiting = _Waiting(completed, progress, len(records), size_bytes)
        for record in records:
            self._put(priority_of(record.headers, self._header), record, waiting)
        if records:
            self._bytes += size_bytes
        else:
            self.freed_bytes += len(completed.records)
            completed.cursor.position = progress.position

    def _put(self, priority: int, record: Any, waiting: _Waiting) -> None:
        queue = self._by_priority.get(priority)
        if queue is None:
            queue = self._by_priority[priority] = deque()
            self._highest_first = sorted(self._by_priority, reverse=True)
        queue.append((record, waiting))
        self.count += 1

    def set_aside(self) -> None:
        """What is of paused cursors is not to be taken."""
        paused: list[tuple[int, Any, _Waiting]] = []
        for priority, queue in self._by_priority.items():
            found = [(priority, *each) for each in queue if each[1].cursor.paused]
            if found:
                paused += found
                self._by_priority[priority] = deque(each for each in queue if not each[1].cursor.paused)
        self._keep_aside(self._aside + paused)
        self.count -= len(paused)
        self._bytes -= sum(waiting.size_bytes for waiting in _sets_of(paused))
        self.freed_bytes += _bytes_of(paused)

    def bring_back(self) -> None:
        """What is of cursors that go on; nothing of them was put meanwhile, so their order is kept."""
        aside = [each for each in self._aside if each[2].counts]
        self._keep_aside([each for each in aside if each[2].cursor.paused])
        back = [each for each in aside if not each[2].cursor.paused]
        self.freed_bytes -= _bytes_of(back)
        self._bytes += sum(waiting.size_bytes for waiting in _sets_of(back))
        for each in back:
            self._put(*each)

    def _keep_aside(self, records: list[tuple[int, Any, _Waiting]]) -> None:
        sets = _sets_of(records)
        self._aside = records
        self._aside_bytes = sum(waiting.size_bytes for waiting in sets)
        self._aside_cursors = len({waiting.cursor for waiting in sets})

    def clear(self) -> set[Cursor]:
        """Keep nothing; the cursors, still to be read, of which there was anything."""
        waiting = {each for queue in self._by_priority.values() for _, each in queue}
        aside = {each for _, _, each in self._aside}
        self.freed_bytes += sum(each.held_bytes for each in waiting)
        self._by_priority, self._highest_first, self.count, self._bytes = {}, [], 0, 0
        self._keep_aside([])
        return {each.cursor for each in waiting | aside if each.counts}

    def take(self, into: list[Any], most: int, most_bytes: int = UNBOUNDED) -> list[Cursor]:
        """Append up to `most` records, highest first, none after those that reach `most_bytes`; the cursors whose
        `position` moved or may have.
        """
        moved: list[Cursor] = []
        for priority in self._highest_first:
            queue = self._by_priority[priority]
            while queue and most > 0 and most_bytes > 0:
                record, waiting = queue.popleft()
                self.count -= 1
                waiting.left -= 1
                if waiting.left == 0:
                    self.freed_bytes += waiting.held_bytes
                    self._bytes -= waiting.size_bytes
                if not waiting.counts:
                    continue
                into.append(record)
                most -= 1
                most_bytes -= record.size_bytes
                waiting.progress.done(record.offset)
                waiting.cursor.position = waiting.progress.position
                moved.append(waiting.cursor)
            if most == 0 or most_bytes <= 0:
                break
        return moved

    def _progress_of(self, completed: CompletedFetch) -> Contiguous:
        version, progress = self._progress.get(completed.cursor, (-1, None))
        if progress is None or version != completed.version:
            progress = Contiguous(completed.first_offset)
            self._progress[completed.cursor] = completed.version, progress
        return progress


def _bytes_of(records: Sequence[tuple[int, Any, _Waiting]]) -> int:
    """Of the sets that these records are of; each is wholly among them, or what is left of it."""
    return sum(waiting.held_bytes for waiting in _sets_of(records))


def _sets_of(records: Sequence[tuple[int, Any, _Waiting]]) -> set[_Waiting]:
    return {waiting for _, _, waiting in records}


def priority_of(headers: Sequence[tuple[str, bytes | None]], name: str) -> int:
    """The last header of that name counts, as with other headers that are given twice."""
    for key, value in reversed(headers):
        if key == name:
            try:
                return int(value or b"")
            except ValueError:
                return LOWEST
    return LOWEST
