"""The timer of one partition: which of its records wait, and which of them is due next.

Entries are (due ms, handle, offset of the held batch). New ones are in a heap. When there are ENTRIES_MAX of them they
become a *run*, a file of entries in the order of their due times, of which only the next few are in memory: so millions
wait on disk, and the next one is the least of the heap and of the heads of all runs. Entries are never changed; one
that is gone, delivered or recalled, is passed over when its turn comes. A record that was carried to another batch has
an entry for each; they are next to each other in the order, and the last counts.

In the folder of the partition, little-endian:

    <n>.delays    a run: due ms int64, handle int64, offset of the held batch int64, of each entry
    delays        JSON, and its CRC-32C as eight hexadecimal digits in a line before it: which runs there are, how far
                  each was taken, and up to which offset of the log, written in which epoch, all of this is true

All of it is made from the log, and nothing waits for a sync. A start believes it if every run has the bytes that the
file `delays` tells of, and if the log still has what it was made from; then it reads the log from there on. Else, as
after a loss of power, it is made again from the beginning of the log.
"""

from __future__ import annotations

import heapq
import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from crc32c import crc32c

from headrace.ports.disk import Disk, read_derived, read_whole
from headrace.records.delayed import Entry

ENTRIES_MAX: Final = 16_384
"""In the heap; beyond that they become a run."""
BLOCK_ENTRIES: Final = 170
"""Of a run that are in memory."""
ENDING: Final = ".delays"
FILE_NAME: Final = "delays"
FORMAT: Final = 1
NEVER: Final = 1 << 62
NEVER_MS: Final = NEVER

_ENTRY = struct.Struct("<qqq")
_HANDLE = struct.Struct("<q")


class DoubtfulIndex(Exception):
    """The files are not what was written: the index is to be made again from the log."""


@dataclass(slots=True)
class Run:
    number: int
    count: int
    crc: int
    least_place: int
    """No entry of it is of a batch before this offset."""
    taken: int = 0
    """Entries that have left it."""
    block: list[Entry] = field(default_factory=list)
    """The next ones, the first of them last."""

    @property
    def left(self) -> int:
        return self.count - self.taken


class DelayIndex:
    """What waits, as of `applied`: everything of the log below that offset is in it. OSError and DoubtfulIndex: a run
    cannot be read."""

    def __init__(self, disk: Disk, folder: str, began: int = 0, entries_max: int = ENTRIES_MAX) -> None:
        self._disk = disk
        self._folder = folder
        self._entries_max = entries_max
        self.began = began
        """Where it began to read the log: of handles before that it knows nothing."""
        self.applied = began
        self.epoch = -1
        """Of the last batch below `applied`."""
        self.latest_due_ms = -1
        """The latest due time of all that was ever taken or delivered."""
        self.waiting = 0
        """Records that are not gone, with those that were taken. One that was carried twice since the log was read from
        its beginning may count twice, until nothing waits."""
        self.taken: dict[int, Entry] = {}
        """By handle: on their way, until the log says that they are gone."""
        self._heap: list[Entry] = []
        self._heads: list[tuple[Entry, int]] = []
        """The next entry of each run that has one, and its number."""
        self._runs: dict[int, Run] = {}
        self._gone: set[int] = set()
        """Handles of entries in the heap or in runs that do not count any more."""
        self._emptied: list[int] = []
        """Runs that are through: their files go when the list of runs does not speak of them any more."""
        self._next_number = 0

    def __len__(self) -> int:
        return self.waiting

    @property
    def is_full(self) -> bool:
        """Whether the heap should become a run."""
        return len(self._heap) >= self._entries_max

    @property
    def run_count(self) -> int:
        return len(self._runs)

    # Entries.

    def add(self, entry: Entry) -> None:
        self.waiting += 1
        heapq.heappush(self._heap, entry)

    def add_taken(self, entry: Entry) -> None:
        """One that is on its way already."""
        self.waiting += 1
        self.taken[entry[1]] = entry

    def carry(self, entry: Entry, old_place: int) -> None:
        """Another batch holds the record now."""
        handle = entry[1]
        if handle in self.taken:
            self.taken[handle] = entry
        elif old_place < self.began:
            self.add(entry)
        elif handle not in self._gone:
            heapq.heappush(self._heap, entry)

    def finish(self, handle: int, place: int) -> None:
        """It was delivered or recalled, or is not in the log any more; the batch at `place` held it then."""
        if self.taken.pop(handle, None) is not None:
            self.waiting -= 1
        elif place >= self.began and handle not in self._gone:
            self.waiting -= 1
            self._gone.add(handle)

    def find(self, due_ms: int, handle: int) -> Entry | None:
        """Its entry, if it waits."""
        if handle in self._gone:
            return None
        if handle in self.taken:
            return self.taken[handle]
        found = [entry for entry in self._heap if entry[1] == handle]
        for run in self._runs.values():
            entry = self._search(run, due_ms, handle)
            if entry is not None:
                found.append(entry)
        return max(found, default=None)

    def find_handle(self, handle: int) -> Entry | None:
        """The same of one of which only the handle is known. Reads all runs."""
        if handle in self._gone:
            return None
        if handle in self.taken:
            return self.taken[handle]
        found = [entry for entry in self._heap if entry[1] == handle]
        wanted = _HANDLE.pack(handle)
        for run in self._runs.values():
            data = read_whole(self._disk, self._path(run.number))
            at = data.find(wanted, run.taken * _ENTRY.size)
            while at >= 0 and at % _ENTRY.size != _HANDLE.size:
                at = data.find(wanted, at + 1)
            if at >= 0:
                found.append(_ENTRY.unpack_from(data, at - _HANDLE.size))
        return max(found, default=None)

    def give_back(self, handles: Iterable[int]) -> None:
        """They were taken, and are not on their way after all."""
        for handle in handles:
            entry = self.taken.pop(handle, None)
            if entry is not None:
                heapq.heappush(self._heap, entry)

    def next_due_ms(self) -> int:
        """When the next one is due; NEVER_MS if nothing waits."""
        while (least := self._least()) is not None:
            if least[1] not in self._gone:
                return least[0]
            self._gone.discard(self._pop_last()[1])
        self.waiting = len(self.taken)
        return NEVER_MS

    def take_due(self, now_ms: int, most: int) -> list[Entry]:
        """Those that are due, the earliest first."""
        found: list[Entry] = []
        while len(found) < most and self.next_due_ms() <= now_ms:
            entry = self._pop_last()
            self.taken[entry[1]] = entry
            self.latest_due_ms = max(self.latest_due_ms, entry[0])
            found.append(entry)
        return found

    def least_place(self) -> int:
        """No batch before this offset holds anything that waits."""
        least = min((run.least_place for run in self._runs.values()), default=self.applied)
        for entries in (self._heap, self.taken.values()):
            least = min(least, min((entry[2] for entry in entries), default=least))
        return least

    def _least(self) -> Entry | None:
        heap, heads = self._heap, self._heads
        if not heads:
            return heap[0] if heap else None
        return min(heap[0], heads[0][0]) if heap else heads[0][0]

    def _pop_last(self) -> Entry:
        """The next one; of a record that was carried, the last of its entries."""
        entry = self._pop()
        while (least := self._least()) is not None and least[:2] == entry[:2]:
            entry = self._pop()
        return entry

    def _pop(self) -> Entry:
        heap, heads = self._heap, self._heads
        if heap and (not heads or heap[0] <= heads[0][0]):
            return heapq.heappop(heap)
        entry, number = heads[0]
        run = self._runs[number]
        following = self._following(run)
        if following is None:
            heapq.heappop(heads)
            del self._runs[number]
            self._emptied.append(number)
        else:
            heapq.heapreplace(heads, (following, number))
        return entry

    # Runs.

    def _following(self, run: Run) -> Entry | None:
        """The head of the run leaves it: the one behind."""
        run.taken += 1
        run.block.pop()
        if not run.block and run.left:
            self._fill(run)
        return run.block[-1] if run.block else None

    def _fill(self, run: Run) -> None:
        file = self._disk.open(self._path(run.number))
        try:
            count = min(BLOCK_ENTRIES, run.left)
            data = file.pread(count * _ENTRY.size, run.taken * _ENTRY.size)
        finally:
            file.close()
        if len(data) != count * _ENTRY.size:
            raise DoubtfulIndex(f"{self._path(run.number)} ends before entry {run.taken + count}")
        run.block = list(_ENTRY.iter_unpack(data))
        run.block.reverse()

    def _search(self, run: Run, due_ms: int, handle: int) -> Entry | None:
        """In the file, by halves."""
        wanted = due_ms, handle
        file = self._disk.open(self._path(run.number))
        try:
            low, high = run.taken, run.count
            while low < high:
                middle = (low + high) // 2
                found: Entry = _ENTRY.unpack(file.pread(_ENTRY.size, middle * _ENTRY.size))
                if found[:2] == wanted:
                    return found
                low, high = (middle + 1, high) if found[:2] < wanted else (low, middle)
        except struct.error:
            raise DoubtfulIndex(f"{file.path} is shorter than {run.count} entries") from None
        finally:
            file.close()
        return None

    # What holds up retention.

    def oldest(self) -> tuple[int, list[Entry]] | None:
        """The run that holds up retention, by its number, and what waits there. What is in the heap becomes a run
        first."""
        if self._heap:
            self.save()
        run = min(self._runs.values(), key=lambda run: run.least_place, default=None)
        if run is None or run.least_place == NEVER:
            return None
        return run.number, [entry for entry in self._entries(run) if entry[1] not in self._gone]

    def superseded(self, number: int) -> None:
        """All that waited in the run has entries elsewhere by now, with later places."""
        if number in self._runs:
            self._runs[number].least_place = NEVER

    def save(self) -> None:
        """Write what a start needs to go on from here. Small runs are taken into the new one, so that there are not
        many of them."""
        entries, absorbed = self._heap, []
        for run in sorted(self._runs.values(), key=lambda run: run.left):
            if run.least_place == NEVER:
                continue
            if len(entries) + run.left > self._entries_max:
                break
            entries = entries + self._entries(run)
            absorbed.append(run)
        added = self._write_run(_last_of_each(sorted(entries))) if entries else None
        self._heap = []
        for run in absorbed:
            del self._runs[run.number]
        if added is not None:
            self._runs[added.number] = added
        self._heads = [(run.block[-1], run.number) for run in self._runs.values()]
        heapq.heapify(self._heads)
        self._write_list()
        self._emptied += [run.number for run in absorbed]
        while self._emptied:
            self._remove(self._emptied.pop())

    def _entries(self, run: Run) -> list[Entry]:
        data = read_whole(self._disk, self._path(run.number))
        found = list(_ENTRY.iter_unpack(data[run.taken * _ENTRY.size :]))
        if len(found) != run.left:
            raise DoubtfulIndex(f"{self._path(run.number)} has {len(found)} entries left, not {run.left}")
        return found

    def _write_run(self, entries: list[Entry]) -> Run:
        number, self._next_number = self._next_number, self._next_number + 1
        data = b"".join([_ENTRY.pack(*entry) for entry in entries])
        self._write(self._path(number), data)
        run = Run(number, len(entries), crc32c(data), min(entry[2] for entry in entries))
        run.block = entries[BLOCK_ENTRIES - 1 :: -1] if len(entries) > BLOCK_ENTRIES else entries[::-1]
        return run

    def _write_list(self) -> None:
        content = {
            "format": FORMAT,
            "began": self.began,
            "applied": self.applied,
            "epoch": self.epoch,
            "latest_due_ms": self.latest_due_ms,
            "waiting": self.waiting,
            "next_number": self._next_number,
            "runs": [[run.number, run.count, run.crc, run.least_place, run.taken] for run in self._runs.values()],
            "taken": list(self.taken.values()),
            "gone": sorted(self._gone),
        }
        text = json.dumps(content).encode()
        path = f"{self._folder}/{FILE_NAME}"
        self._write(path + ".tmp", b"%08x\n%b" % (crc32c(text), text))
        self._disk.rename(path + ".tmp", path)

    def _write(self, path: str, data: bytes) -> None:
        file = self._disk.open(path, create=True, writable=True)
        try:
            file.truncate(0)
            file.pwritev([data], 0)
        finally:
            file.close()

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number}{ENDING}"

    def _remove(self, number: int) -> None:
        with suppress(FileNotFoundError):
            self._disk.remove(self._path(number))

    # Starting.

    def load(self) -> Iterator[None]:
        """Take what an earlier run has saved, a step at a time. DoubtfulIndex: there is nothing, or it is not whole."""
        content = self._read_list()
        self.began, self.applied, self.epoch = content["began"], content["applied"], content["epoch"]
        self.latest_due_ms = content["latest_due_ms"]
        self._next_number = content["next_number"]
        self._gone = set(content["gone"])
        for number, count, crc, least_place, taken in content["runs"]:
            self._check_run(number, count, crc)
            run = self._runs[number] = Run(number, count, crc, least_place, taken)
            self._fill(run)
            self._heads.append((run.block[-1], number))
            yield
        heapq.heapify(self._heads)
        self._heap = [(due_ms, handle, place) for due_ms, handle, place in content["taken"]]
        heapq.heapify(self._heap)
        self.waiting = content["waiting"]
        self._tidy()

    def _read_list(self) -> dict[str, Any]:
        path = f"{self._folder}/{FILE_NAME}"
        data = read_derived(self._disk, path) if self._disk.exists(path) else None
        if data is None:
            raise DoubtfulIndex(f"{path} is not there")
        head, _, text = data.partition(b"\n")
        if head != b"%08x" % crc32c(text):
            raise DoubtfulIndex(f"{path} is not whole")
        content: dict[str, Any] = json.loads(text)
        if content["format"] != FORMAT:
            raise DoubtfulIndex(f"{path} has format {content['format']}, and this is {FORMAT}")
        return content

    def _check_run(self, number: int, count: int, crc: int) -> None:
        path = self._path(number)
        data = read_derived(self._disk, path) if self._disk.exists(path) else None
        if data is None or len(data) != count * _ENTRY.size or crc32c(data) != crc:
            raise DoubtfulIndex(f"{path} is not what was written")

    def _tidy(self) -> None:
        """Runs that nothing speaks of go."""
        for name in self._disk.list(self._folder):
            number = name.removesuffix(ENDING)
            if number != name and number.isdigit() and int(number) not in self._runs:
                self._remove(int(number))

    def discard(self) -> None:
        """Remove all files: what they say is not true of the log."""
        with suppress(FileNotFoundError):
            self._disk.remove(f"{self._folder}/{FILE_NAME}")
        self._runs = {}
        self._tidy()


def _last_of_each(entries: list[Entry]) -> list[Entry]:
    """Of a record that was carried only the last entry."""
    return [
        entry
        for entry, following in zip(entries, [*entries[1:], None], strict=True)
        if following is None or following[:2] != entry[:2]
    ]
