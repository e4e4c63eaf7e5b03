"""One file of a partition's queue: `<20-digit first offset>.queue`, mapped into memory.

    header   24 bytes, big-endian: "HRQ1", first offset int64, base ms int64, CRC-32C of those uint32
    entries  20 bytes each, five little-endian uint32: number of the commit file, byte in it, size, offset relative to
             the first offset, greatest timestamp since the file's first entry, its own run's included, relative to
             base ms

An entry is a run of neighbouring batches without a gap between their offsets. It speaks for all offsets up to the
next entry's; those behind its batches are gone (compacted). Size 0: all of them are gone, and the replace frame at the
byte says so. Size 0xffffffff: they are damaged, and the byte says where the damage was found.

An active file is given its blocks before it is written, so that a mapped write cannot meet a full disk. A closed one is
cut to its size and ends with 20 bytes, little-endian: the next file's first offset uint64, eight times 0xff, CRC-32C
of its entries and of those uint32. So a file that is missing between two others is missed. How many entries of an
active one count, and their CRC, is told by the checkpoint. A file that does not agree is dropped, with all the
partition's others, and built anew from the commit log.

Where other entries take the place of some in the middle of a queue, the queue files that they lie in are written anew
beside the old ones and take their names when all are whole, so a disk without room leaves everything as it was. A crash
while several take their names leaves files that do not follow each other, and the queue is built from the commit log.
Of an active file the old one is kept, as `.queue.old`, until a checkpoint no longer tells of it: a start takes
whichever agrees. A closed file is right either way, because the frames that its entries lead to were synced before.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.ports.disk import Disk, File, read_derived

QUEUE: Final = ".queue"
OLD: Final = ".old"
NEW: Final = ".new"
ENTRY_BYTES: Final = 20
HEAD_BYTES: Final = 24
FIRST_BYTES: Final = 4096
GROWTH: Final = 4
ENTRIES_MAX: Final = 1 << 18
U32_MAX: Final = 0xFFFFFFFF
GONE: Final = 0
DAMAGED: Final = U32_MAX
NO_TIMESTAMP: Final = -1

_HEAD = struct.Struct(">4sqqI")
_HEAD_BODY = struct.Struct(">4sqq")
_MAGIC: Final = b"HRQ1"
ENTRY = struct.Struct("<5I")
_TRAILER_BODY = struct.Struct("<QQ")
_ONES: Final = (1 << 64) - 1


class Entry(NamedTuple):
    """An entry, and the offset that the next one begins with."""

    number: int
    byte: int
    size: int
    offset: int
    next_offset: int
    greatest_ms: int

    @property
    def has_batches(self) -> bool:
        return self.size not in (GONE, DAMAGED)


class Run(NamedTuple):
    """An entry to be: where its batches lie, its first offset, and the greatest timestamp among them."""

    number: int
    byte: int
    size: int
    offset: int
    greatest_ms: int


class OpenQueues:
    """Bounds how many queue files are open: the longest open is dropped first, and comes back at next use. Each takes
    two descriptors, its own and the map's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: deque[QueueFile] = deque()

    def opened(self, file: QueueFile) -> None:
        self._open.append(file)
        if len(self._open) > self._most:
            self._open.popleft().release()

    def closed(self, file: QueueFile) -> None:
        if file in self._open:
            self._open.remove(file)


class QueueFile:
    """Entries are in order of their offsets; `count` of them count."""

    __slots__ = (
        "_base_ms",
        "_crc",
        "_crc_count",
        "_disk",
        "_entries",
        "_file",
        "_open_queues",
        "_view",
        "closed",
        "count",
        "first_offset",
        "greatest_ms",
        "next_first_offset",
        "numbers",
        "offsets",
        "path",
        "room",
        "synced",
        "times",
    )

    def __init__(self, disk: Disk, open_queues: OpenQueues, folder: str, first_offset: int) -> None:
        self._disk = disk
        self._open_queues = open_queues
        self.path = f"{folder}/{first_offset:020d}{QUEUE}"
        self.first_offset = first_offset
        self._base_ms = 0
        self.greatest_ms = NO_TIMESTAMP
        self.count = 0
        self.closed = False
        self.next_first_offset = -1
        """Of a closed file: what the next one begins with."""
        self.synced = False
        """Whether the file is on disk as it is in memory."""
        self._crc = self._crc_count = 0
        self._file: File | None = None
        self._drop_views()

    def _drop_views(self) -> None:
        self.room = 0
        self._view: memoryview | None = None
        self._entries: memoryview | None = None
        self.numbers: memoryview | None = None
        self.offsets: memoryview | None = None
        self.times: memoryview | None = None

    # On disk.

    def begin(self, first_ms: int) -> None:
        """Create the file, with room for some entries; the first will have this timestamp."""
        self._base_ms = first_ms
        self.greatest_ms = NO_TIMESTAMP
        self._file = self._disk.open(self.path, create=True, writable=True)
        self._file.truncate(0)
        self._open_queues.opened(self)
        self.make_room(1)
        assert self._view is not None
        body = _HEAD_BODY.pack(_MAGIC, self.first_offset, first_ms)
        self._view[:HEAD_BYTES] = body + crc32c(body).to_bytes(4, "big")

    def make_room(self, more: int) -> None:
        """Room for so many entries more. OSError when the disk has none; nothing has changed then."""
        if self.count + more <= self.room:
            return
        wanted = _wanted_bytes(self.count + more)
        file = self.file
        self._drop_views()
        file.allocate(wanted)
        self._take(file.map(wanted, writable=True, populate=True))
        self.room = (wanted - HEAD_BYTES) // ENTRY_BYTES

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._disk.open(self.path, writable=not self.closed)
            self._open_queues.opened(self)
        return self._file

    def _take(self, view: memoryview) -> None:
        entries = view[HEAD_BYTES : HEAD_BYTES + (len(view) - HEAD_BYTES) // ENTRY_BYTES * ENTRY_BYTES].cast("I")
        self._view, self._entries = view, entries
        self.numbers, self.offsets, self.times = entries[0::5], entries[3::5], entries[4::5]

    def _mapped(self) -> memoryview:
        if self._view is None:
            if self.closed:
                size = HEAD_BYTES + self.count * ENTRY_BYTES
                self._take(self.file.map(size, writable=False, populate=False))
            else:
                size = self.file.size()
                self._take(self.file.map(size, writable=True, populate=True))
                self.room = (size - HEAD_BYTES) // ENTRY_BYTES
        assert self._view is not None
        return self._view

    def load(self, count: int | None, crc: int = 0) -> bool:
        """Take what is on disk: a closed file, or the first entries of an active one. False if it does not agree."""
        if not self._disk.exists(self.path):
            return False
        data = read_derived(self._disk, self.path)
        if data is None or len(data) < HEAD_BYTES:
            return False
        magic, first_offset, base_ms, head_crc = _HEAD.unpack_from(data)
        if (magic, first_offset) != (_MAGIC, self.first_offset) or crc32c(data[: _HEAD_BODY.size]) != head_crc:
            return False
        self.closed = count is None
        if count is None:
            count, rest = divmod(len(data) - HEAD_BYTES - ENTRY_BYTES, ENTRY_BYTES)
            if rest or count < 0:
                return False
        end = HEAD_BYTES + count * ENTRY_BYTES
        if len(data) < end:
            return False
        found_crc = crc32c(data[HEAD_BYTES:end])
        if self.closed:
            crc, (self.next_first_offset, _) = found_crc, _TRAILER_BODY.unpack_from(data, end)
            if data[end:] != _trailer(crc, self.next_first_offset):
                return False
        if found_crc != crc:
            return False
        self._base_ms, self.count = base_ms, count
        self._crc, self._crc_count = crc, count
        if count:
            self.greatest_ms = base_ms + int.from_bytes(data[end - 4 : end], "little")
        self.synced = True
        return True

    def crc(self) -> int:
        """Of the entries that count."""
        if self._crc_count < self.count:
            start, end = (HEAD_BYTES + n * ENTRY_BYTES for n in (self._crc_count, self.count))
            self._crc = crc32c(self._mapped()[start:end], self._crc)
            self._crc_count = self.count
        return self._crc

    def close(self, next_first_offset: int) -> None:
        """Nothing is added any more, the next file begins with that offset: cut to its size and signed."""
        if self.closed:
            if self.next_first_offset == next_first_offset:
                return
            self.reopen()
        crc = self.crc()
        self._drop_views()
        end = HEAD_BYTES + self.count * ENTRY_BYTES
        self.file.truncate(end)
        self.file.pwritev([_trailer(crc, next_first_offset)], end)
        self.closed, self.synced = True, False
        self.next_first_offset = next_first_offset

    def reopen(self) -> None:
        """A closed file becomes the active one again."""
        if self.closed:
            self.release()
            self.closed = False
            self.file.truncate(HEAD_BYTES + self.count * ENTRY_BYTES)

    def rewrite(self, entries: bytes, *, keep_old: bool) -> QueueFile:
        """A file with these entries that takes this one's place, which is not used any more; or OSError."""
        new = QueueFile(self._disk, self._open_queues, self.path.rpartition("/")[0], self.first_offset)
        new.write_new(self._base_ms, entries, self.next_first_offset if self.closed else None)
        new.take_place(keep_old=keep_old and not self.closed)
        self.replaced()
        return new

    def write_new(self, base_ms: int, entries: bytes, next_first_offset: int | None) -> None:
        """Write a file with these entries, a closed one if another follows it, that has no name of its own yet. After
        an OSError there is none."""
        self._base_ms, self.count = base_ms, len(entries) // ENTRY_BYTES
        self.greatest_ms = base_ms + int.from_bytes(entries[-4:], "little")
        self._crc, self._crc_count = crc32c(entries), self.count
        body = _HEAD_BODY.pack(_MAGIC, self.first_offset, base_ms)
        parts = [body + crc32c(body).to_bytes(4, "big"), entries]
        try:
            file = self._disk.open(self.path + NEW, create=True, writable=True)
            file.truncate(0)
            if next_first_offset is not None:
                self.closed, self.next_first_offset = True, next_first_offset
                parts.append(_trailer(self._crc, next_first_offset))
            else:
                file.allocate(_wanted_bytes(self.count + 1))
            file.pwritev(parts, 0)
        except OSError:
            self.drop_new()
            raise

    def drop_new(self) -> None:
        if self._disk.exists(self.path + NEW):
            self._disk.remove(self.path + NEW)

    def take_place(self, *, keep_old: bool) -> None:
        """What was written beside takes the file's name; the one that has it may be kept as the old one."""
        if keep_old and not self._disk.exists(self.path + OLD):
            self._disk.rename(self.path, self.path + OLD)
        self._disk.rename(self.path + NEW, self.path)

    def replaced(self) -> None:
        """Another file has its name: whoever still reads this one finds nothing."""
        self._open_queues.closed(self)
        self.release()
        self.path += OLD + NEW

    def take_old(self) -> bool:
        """Go back to what `rewrite` kept, if it did."""
        there = self._disk.exists(self.path + OLD)
        if there:
            self._disk.rename(self.path + OLD, self.path)
        return there

    def drop_old(self) -> None:
        """What `rewrite` kept is not needed any more."""
        if self._disk.exists(self.path + OLD):
            self._disk.remove(self.path + OLD)

    def release(self) -> None:
        self._drop_views()
        self._file = None

    def remove(self) -> None:
        self._open_queues.closed(self)
        self.release()
        for path in (self.path, self.path + OLD, self.path + NEW):
            if self._disk.exists(path):
                self._disk.remove(path)

    # Entries.

    def fits(self, offset: int, greatest_ms: int, more: int) -> bool:
        """Whether so many entries, the last of them with this offset and timestamp, can be said in this file."""
        return (
            self.count + more <= ENTRIES_MAX
            and offset - self.first_offset <= U32_MAX
            and greatest_ms - self._base_ms <= U32_MAX
        )

    def add(self, number: int, byte: int, size: int, offset: int, run_ms: int) -> None:
        """There is room. A run's own greatest timestamp is enough: what came before is known."""
        if run_ms > self.greatest_ms or not self.count:
            self.greatest_ms = max(run_ms, self._base_ms)
        view = self._view
        if view is None or not self.room:
            view = self._mapped()
        at = HEAD_BYTES + self.count * ENTRY_BYTES
        ENTRY.pack_into(view, at, number, byte, size, offset - self.first_offset, self.greatest_ms - self._base_ms)
        self.count += 1
        self.synced = False

    def raw(self, at: int) -> tuple[int, int, int, int, int]:
        number, byte, size, relative, since_ms = ENTRY.unpack_from(self._mapped(), HEAD_BYTES + at * ENTRY_BYTES)
        return number, byte, size, self.first_offset + relative, self._base_ms + since_ms

    @property
    def base_ms(self) -> int:
        return self._base_ms

    def entries(self, first: int, last: int) -> memoryview:
        """As they are in the file."""
        return self._mapped()[HEAD_BYTES + first * ENTRY_BYTES : HEAD_BYTES + last * ENTRY_BYTES]

    def numbers_of(self, first: int, last: int) -> list[int]:
        """Numbers of the commit files of these entries."""
        return self.entries(first, last).cast("I")[0::5].tolist()

    def sizes_of(self, first: int, last: int) -> list[int]:
        return self.entries(first, last).cast("I")[2::5].tolist()

    def size_at(self, at: int) -> int:
        return self.raw(at)[2]

    def put(self, at: int, entries: bytes) -> None:
        """These are the entries from that one on, of an active file that nobody else will need as it was."""
        self.make_room(at + len(entries) // ENTRY_BYTES - self.count)
        start = HEAD_BYTES + at * ENTRY_BYTES
        self._mapped()[start : start + len(entries)] = entries
        self.cut(at + len(entries) // ENTRY_BYTES)
        self._crc = self._crc_count = 0

    def offset_at(self, at: int) -> int:
        if self.offsets is None:
            self._mapped()
            assert self.offsets is not None
        return self.first_offset + int(self.offsets[at])

    def at_or_before(self, offset: int) -> int:
        """The last entry that does not begin above the offset; -1 if there is none."""
        if self.offsets is None:
            self._mapped()
            assert self.offsets is not None
        return bisect_right(self.offsets, offset - self.first_offset, 0, self.count) - 1

    def first_with_time(self, timestamp_ms: int) -> int:
        """The first entry by which a timestamp not below this one was seen; the count if none."""
        self._mapped()
        assert self.times is not None
        return bisect_left(self.times, timestamp_ms - self._base_ms, 0, self.count)

    def cut(self, count: int) -> None:
        """Keep the first entries only, of an active file."""
        self.count = count
        self.greatest_ms = self.raw(count - 1)[4] if count else NO_TIMESTAMP
        if self._crc_count > count:
            self._crc = self._crc_count = 0
        self.synced = False


def _trailer(entries_crc: int, next_first_offset: int) -> bytes:
    body = _TRAILER_BODY.pack(next_first_offset, _ONES)
    return body + crc32c(body, entries_crc).to_bytes(4, "little")


def _wanted_bytes(count: int) -> int:
    """How much room a file with so many entries is given."""
    used = HEAD_BYTES + count * ENTRY_BYTES
    wanted = FIRST_BYTES
    while wanted < used:
        wanted *= GROWTH
    return max(used, min(wanted, HEAD_BYTES + ENTRIES_MAX * ENTRY_BYTES))


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
