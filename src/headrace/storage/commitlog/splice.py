"""Other entries for some offsets in the middle of a queue.

The queue files that they lie in are written anew beside the old ones and take their names when all are whole, so a disk
without room leaves everything as it was. A crash while several take their names leaves files that do not follow each
other, and the queue is built from the commit log. Of an active file the old one is kept, as `.queue.old`, until a
checkpoint no longer tells of it: a start takes whichever agrees. A closed file is right either way, because the frames
that its entries lead to were synced before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from headrace.storage.commitlog.queuefile import ENTRY, ENTRY_BYTES, U32_MAX, QueueFile, Run


class Replacement(NamedTuple):
    """These runs now speak for the offsets from first to next; they begin with the first."""

    first_offset: int
    next_offset: int
    runs: Sequence[Run]


class Patch(NamedTuple):
    """These runs take the place of entries first to last, the latter not included."""

    first: int
    last: int
    runs: Sequence[Run]


def patched(file: QueueFile, patches: Sequence[Patch]) -> bytes | None:
    """All entries of a file with some of them replaced, patches in order; None if that cannot be said in one file."""
    pieces: list[bytes | memoryview] = []
    at = since_ms = 0
    for patch in patches:
        if patch.first > at:
            kept = file.entries(at, patch.first)
            if _since_ms(kept, 0) < since_ms:
                return None
            pieces.append(kept)
            since_ms = _since_ms(kept, patch.first - at - 1)
        for run in patch.runs:
            relative = run.offset - file.first_offset
            since_ms = max(since_ms, run.greatest_ms - file.base_ms)
            if not 0 <= relative <= U32_MAX or since_ms > U32_MAX:
                return None
            pieces.append(ENTRY.pack(run.number, run.byte, run.size, relative, since_ms))
        at = patch.last
    if at < file.count:
        kept = file.entries(at, file.count)
        if _since_ms(kept, 0) < since_ms:
            return None
        pieces.append(kept)
    return b"".join(pieces)


class Columns:
    """Entries of several files in one, with their offsets and timestamps as they are."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.bytes: list[int] = []
        self.sizes: list[int] = []
        self.offsets: list[int] = []
        self.times: list[int] = []

    def take_file(self, file: QueueFile, front: int) -> None:
        fields = file.entries(front, file.count).cast("I")
        self.numbers += fields[0::5].tolist()
        self.bytes += fields[1::5].tolist()
        self.sizes += fields[2::5].tolist()
        self.offsets += [file.first_offset + relative for relative in fields[3::5].tolist()]
        self.times += [file.base_ms + since_ms for since_ms in fields[4::5].tolist()]

    def run(self, at: int) -> Run:
        return Run(self.numbers[at], self.bytes[at], self.sizes[at], self.offsets[at], self.times[at])

    def patched(self, patches: Sequence[Patch]) -> Columns:
        new, at = Columns(), 0
        for patch in patches:
            new._take(self, at, patch.first)
            for number, byte, size, offset, greatest_ms in patch.runs:
                new.numbers.append(number)
                new.bytes.append(byte)
                new.sizes.append(size)
                new.offsets.append(offset)
                new.times.append(greatest_ms)
            at = patch.last
        new._take(self, at, len(self.numbers))
        return new

    def _take(self, other: Columns, first: int, last: int) -> None:
        self.numbers += other.numbers[first:last]
        self.bytes += other.bytes[first:last]
        self.sizes += other.sizes[first:last]
        self.offsets += other.offsets[first:last]
        self.times += other.times[first:last]

    def parts(self, first_offset: int, entries_max: int) -> Iterator[tuple[int, int, bytes]]:
        """As few files as they fit in: first offset, base ms and entries of each; the first one's offset is given."""
        at = 0
        while at < len(self.numbers):
            base_ms = self.times[at]
            last = min(len(self.numbers), at + entries_max)
            last = bisect_right(self.offsets, first_offset + U32_MAX, at, last)
            times = list(accumulate(self.times[at:last], max))
            last = at + bisect_right(times, base_ms + U32_MAX)
            fields = array("I", bytes((last - at) * ENTRY_BYTES))
            fields[0::5] = array("I", self.numbers[at:last])
            fields[1::5] = array("I", self.bytes[at:last])
            fields[2::5] = array("I", self.sizes[at:last])
            fields[3::5] = array("I", [offset - first_offset for offset in self.offsets[at:last]])
            fields[4::5] = array("I", [greatest_ms - base_ms for greatest_ms in times[: last - at]])
            yield first_offset, base_ms, fields.tobytes()
            at = last
            first_offset = self.offsets[at] if at < len(self.offsets) else 0


def _since_ms(entries: bytes | memoryview, nth: int) -> int:
    end = (nth + 1) * ENTRY_BYTES
    return int.from_bytes(entries[end - 4 : end], "little")
