"""One segment of a partition's log: `<20-digit first offset>.log` with its `.index` and `.timeindex`.

The `.log` file is the record batches as clients sent them, one behind the other and nothing else. Only the newest
segment is written. A segment that was compacted has a `.sum` file (see `Sum`); one that took copied batches with gaps
between their offsets has an empty `.gaps` file. Both are sparse: the index has an entry for every batch. Files are
opened at first use and dropped when too many are open; a slice keeps its file alive.
"""

from __future__ import annotations

import errno
import logging
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from headrace.errors import CorruptBatch, UnreadableBatch
from headrace.ports.disk import Disk, File, FileSlice, read_whole
from headrace.records.batch import HEADER_BYTES
from headrace.storage.checked_bytes import TURN_BYTES, CheckBudget, CheckedBytes
from headrace.storage.epochs import EpochHistory
from headrace.storage.folder import stem
from headrace.storage.producers import SNAPSHOT
from headrace.storage.scan import Headers, Walk, find, read_log, sound_run, walk, walk_checked
from headrace.storage.segments.index import OffsetIndex, TimeIndex

log = logging.getLogger(__name__)

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
SUM: Final = ".sum"
GAPS: Final = ".gaps"
DELETED: Final = ".deleted"
NO_TIMESTAMP: Final = -1
NOT_READ: Final = -2
NEVER: Final = 1 << 62
RELATIVE_OFFSET_MAX: Final = (1 << 31) - 1
LARGE_GAP: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that must not be served, and the offsets that were in them."""

    position: int
    end: int
    first_offset: int
    next_offset: int
    reason: str


@dataclass(slots=True)
class Checks:
    """What one read checks with, and what it leaves unchecked."""

    epochs: EpochHistory
    budget: CheckBudget
    warm: bool
    """The bytes were read ahead: they are checked wherever they are."""
    unchecked: FileSlice | None = None


class Segment:
    """`size` counts staged bytes too, `written` only those in the file; `next_offset` follows the last staged batch.
    `greatest_ms` is the greatest timestamp of any batch, once `load_greatest_ms` has seen to it. `append_file` is
    the file while all that appends need is at hand, its indexes and greatest timestamp too; else None, see
    `open_to_append`."""

    __slots__ = (
        "_checked",
        "_disk",
        "_file",
        "_fresh",
        "_gone",
        "_index_doubted",
        "_interval_bytes",
        "_open_segments",
        "_seen_complete",
        "append_file",
        "base_offset",
        "cleaned",
        "damage",
        "greatest_ms",
        "index",
        "next_index_at",
        "next_offset",
        "size",
        "sparse",
        "stem",
        "times",
        "written",
    )

    def __init__(
        self,
        disk: Disk,
        open_segments: OpenSegments,
        folder: str,
        base_offset: int,
        next_offset: int,
        *,
        index_bytes: int,
        interval_bytes: int,
        cleaned: bool = False,
        sparse: bool = False,
        fresh: bool = False,
    ) -> None:
        self._disk = disk
        self._open_segments = open_segments
        self._file: File | None = None
        self.append_file: File | None = None
        self._interval_bytes = interval_bytes
        self.stem = stem(folder, base_offset)
        self.base_offset = base_offset
        self._seen_complete: tuple[int, int, tuple[Damage, ...]] | None = None
        self.next_offset = next_offset
        self.size = self.written = 0
        self.cleaned = cleaned
        self.sparse = cleaned or sparse
        self.damage: tuple[Damage, ...] = ()
        count = 0 if fresh else -1
        self.index = OffsetIndex(disk, self.stem + INDEX, index_bytes, count, self._remake_indexes)
        self.times = TimeIndex(disk, self.stem + TIME_INDEX, index_bytes, count, self._remake_indexes)
        self.next_index_at = interval_bytes if fresh else 0
        self.greatest_ms = NO_TIMESTAMP if fresh else NOT_READ
        self._checked = CheckedBytes()
        self._fresh = fresh
        self._gone = False
        self._index_doubted = False

    @property
    def path(self) -> str:
        return self.stem + LOG

    @property
    def file(self) -> File:
        if self._file is None:
            self._refuse_if_gone()
            self._file = self._disk.open(self.path, create=self._fresh, writable=True)
            self._fresh = False
            self._open_segments.opened(self)
        return self._file

    def open_to_append(self) -> File:
        file = self.file
        self.load_indexes()
        self.load_greatest_ms()
        self.append_file = file
        return file

    def _refuse_if_gone(self) -> None:
        if self._gone:  # a file of that name would belong to someone else
            raise FileNotFoundError(errno.ENOENT, "the segment was removed", self.path)

    def found_bytes(self, size: int) -> None:
        """The file has this size on opening it."""
        self.size = self.written = self._checked.own_from = size

    def load_indexes(self) -> None:
        """Learn from the files how many entries there are; an index that cannot be true is rebuilt."""
        if self.index.count >= 0:
            return
        self._refuse_if_gone()
        if self.written == 0:
            self.begin_indexes()
        elif not (self.index.load(self.size) and self.times.load(self.size) and self._fits()):
            log.warning("%s: index is missing or does not fit its log: rebuilt", self.index.path)
            self.rebuild_indexes()
        self._next_index_at_end()

    def _next_index_at_end(self) -> None:
        last = self.index.entry(self.index.count - 1)[1] if self.index.count else 0
        self.next_index_at = 0 if self.sparse else last + self._interval_bytes

    def _fits(self) -> bool:
        if not self.index.count:
            return True
        relative_offset, position = self.index.entry(self.index.count - 1)
        return position < self.size and 0 < relative_offset < self.next_offset - self.base_offset

    def rebuild_indexes(self) -> None:
        headers = self.headers(0, self.base_offset, NEVER)
        if self.cleaned:
            self._agree_with_sum()
        if self.sparse:
            headers = walk(self.file, 0, self.written)
        self.begin_indexes()
        for position, header in headers:
            self.index_batch(header.base_offset, position)
            self.greatest_ms = max(self.greatest_ms, header.max_timestamp_ms)
        self.end_indexes()

    def _remake_indexes(self) -> None:
        """One of them was lost while it was in use."""
        try:
            self.rebuild_indexes()
        except BaseException:
            self.index.count = self.times.count = -1  # there may be less in them than there must be
            self.append_file = None
            raise

    def _agree_with_sum(self) -> None:
        """Without its index, only the sum can tell whether the offsets of a compacted segment are right."""
        found = read_sum(self._disk, self.stem + SUM)
        if found is None or found.crc != crc_of_file(self.file, self.written):
            raise CorruptBatch(
                f"{self.path}: neither its index nor its sum agrees with it; `headrace log verify` says more"
            )

    def begin_indexes(self) -> None:
        """Empty indexes, to be filled by `index_batch` for every batch in turn."""
        self.index.drop()
        self.times.drop()
        self.index.count = self.times.count = 0
        self.next_index_at = 0 if self.sparse else self._interval_bytes
        self.greatest_ms = NO_TIMESTAMP

    def index_batch(self, base_offset: int, position: int) -> None:
        """Make an entry if enough bytes have passed since the last; comes before the batch's own timestamp counts.
        A sparse segment has an entry for every batch that does not begin where it does."""
        if base_offset - self.base_offset > RELATIVE_OFFSET_MAX:
            raise CorruptBatch(f"{self.path} at byte {position}: offset {base_offset} is too far from where it begins")
        if self.sparse:
            if base_offset > self.base_offset:
                self.add_entry(base_offset - self.base_offset, position)
        elif position >= self.next_index_at and position and not self.index.full:
            self.add_entry(base_offset - self.base_offset, position)

    def add_entry(self, relative_offset: int, position: int) -> None:
        self.index.make_room()
        self.times.make_room()
        self.index.append(relative_offset, position)
        self.times.append(self.greatest_ms, relative_offset)
        self.next_index_at = 0 if self.sparse else position + self._interval_bytes

    def skip_entry(self, position: int) -> None:
        """Leave this entry out and try again after the usual interval."""
        self.next_index_at = position + self._interval_bytes

    def end_indexes(self) -> None:
        """Say the segment's greatest timestamp in a last time entry, and cut both files to their size."""
        if self.load_greatest_ms() != NO_TIMESTAMP:
            self.times.append(self.greatest_ms, self.next_offset - self.base_offset)
        self.index.cut(self.size)
        self.times.cut(self.size)

    def load_greatest_ms(self) -> int:
        """A closed index says it in its last time entry."""
        if self.greatest_ms == NOT_READ:
            self.load_indexes()
            self.greatest_ms = self.times.entry(self.times.count - 1)[0] if self.times.count else NO_TIMESTAMP
            if self._file is None and not self.index.writable:  # no open segment, so nobody would let go of them
                self.index.drop()
                self.times.drop()
        return self.greatest_ms

    def newest_ms(self) -> int:
        """The greatest timestamp, or the time of the last write if no batch has one."""
        greatest_ms = self.load_greatest_ms()
        return greatest_ms if greatest_ms != NO_TIMESTAMP else self._disk.changed_ms(self.path)

    def locate(self, offset: int) -> int:
        """Position of the first batch that ends at or after the offset; the segment's end if there is none."""
        if offset >= self.next_offset:
            return self.written
        if not (self.written or self.damage or self.is_short(self.base_offset, self.next_offset)):
            return self.written
        self.load_indexes()
        try:
            return self._locate(offset)
        except CorruptBatch as error:
            if self._index_doubted or self.damage or isinstance(error, UnreadableBatch):
                raise
            # The index may have led to a place where no batch begins: the log itself decides.
            self._index_doubted = True
            log.warning("%s: does not lead to a batch for offset %d: rebuilt", self.index.path, offset)
            self.rebuild_indexes()
            return self._locate(offset)

    def _locate(self, offset: int) -> int:
        relative_offset, position = self.index.at_or_before(offset - self.base_offset)
        expected = self.base_offset + relative_offset
        if not self.damage:
            found = find(self.file, position, self.written, expected, offset, dense=not self.sparse)
            if 0 <= found < self.written or (found >= 0 and self.sparse):
                return found
        for found_at, header in self.headers(position, expected, offset):
            if header.base_offset + header.last_offset_delta >= offset:
                return found_at
        if self.sparse or self.damage:
            return self.written
        raise self._wrong(self.written, f"the last batch ends before offset {offset}, which is here")

    def end_before(self, position: int) -> int:
        """The offset behind the last batch before the position, at which one begins or the segment ends."""
        if not self.sparse and position < self.written:
            return int.from_bytes(read_log(self.file, 8, position), "big")
        self.load_indexes()
        _, indexed = self.index.at_or_below_position(position - 1)
        end = self.base_offset
        for _, header in walk(self.file, indexed, position):
            end = header.next_offset
        return end

    @property
    def is_complete(self) -> bool:
        """Of one that others follow: whether it reaches to where the next begins, as far as its last batches tell."""
        if self.cleaned and not self.damage:
            return True
        seen = self.written, self.next_offset, self.damage
        if self._seen_complete != seen:
            if not self._reaches_its_end():
                return False
            self._seen_complete = seen
        return True

    def _reaches_its_end(self) -> bool:
        if self.damage and self.damage[-1].next_offset >= self.next_offset:
            return False
        try:
            return not self.is_short(self.end_before(self.written), self.next_offset)
        except CorruptBatch:
            return False

    def has_lost_all(self) -> bool:
        """Of one without a byte that others follow: whether it had some. A compacted one may be empty; its sum says."""
        return self.is_less_than_its_sum() or self.is_short(self.base_offset, self.next_offset)

    def is_less_than_its_sum(self) -> bool:
        """Whether a compacted one has lost its end."""
        found = read_sum(self._disk, self.stem + SUM) if self.cleaned else None
        return found is not None and found.size > self.size

    def missing_end(self) -> CorruptBatch:
        """What a reader hears who would go on behind one that is not complete."""
        if self.damage and self.damage[-1].next_offset >= self.next_offset:
            return self.damaged(self.damage[-1])
        return self._wrong(self.written, f"the end of the segment is missing, up to offset {self.next_offset}")

    def is_short(self, end: int, limit: int) -> bool:
        """Whether batches are missing between these: only compaction leaves a gap at the end, and one too large for
        relative offsets."""
        return end < limit and not self.cleaned and not (self.sparse and limit - end > LARGE_GAP)

    def headers(
        self, position: int, expected_offset: int, wanted_offset: int = -1, walk_batches: Walk = walk
    ) -> Headers:
        """Headers in order, their chain checked. Damage is skipped while it lies below the wanted offset, else
        raised."""
        end = self.written
        for damage in self.damage:
            if damage.position < position:
                continue
            yield from self._chained(walk_batches(self.file, position, damage.position), expected_offset)
            if wanted_offset < damage.next_offset:
                raise self.damaged(damage)
            position, expected_offset = damage.end, damage.next_offset
        yield from self._chained(walk_batches(self.file, position, end), expected_offset)

    def _chained(self, headers: Headers, expected_offset: int) -> Headers:
        """Headers that follow from each other; any first one is right if the expected offset is -1."""
        for found_at, header in headers:
            base = header.base_offset
            if self.sparse:
                right = base >= expected_offset and self._like_index(base, found_at)
            else:
                right = base == expected_offset or expected_offset < 0
            if not right:
                raise self._wrong(found_at, f"base offset is {base}, but {expected_offset} comes next")
            yield found_at, header
            expected_offset = base + header.last_offset_delta + 1

    def _like_index(self, base_offset: int, position: int) -> bool:
        """A sparse segment may jump, but only to where its index, which has every batch, says."""
        self.load_indexes()
        return self.index.at_or_below_position(position) == (base_offset - self.base_offset, position)

    def bases_by_position(self) -> dict[int, int] | None:
        """Where each batch of a compacted segment begins, with which offset; None if its index is not whole."""
        if not self.cleaned or not self.index.load(self.size):
            return None
        entries = (self.index.entry(at) for at in range(self.index.count))
        return {0: self.base_offset} | {position: self.base_offset + relative for relative, position in entries}

    def _wrong(self, position: int, what: str) -> CorruptBatch:
        return CorruptBatch(f"{self.path} at byte {position}: {what}; `headrace log verify` says more")

    def sound_end(self, position: int, end: int, offset: int, checks: Checks, *, exact: bool) -> int:
        """How far bytes from `position` up to `end` can be served. The batch there holds `offset`, and begins with it
        if `exact`. What is left to check is told in `checks`."""
        for damage in self.damage:
            if damage.position <= position < damage.end:
                raise self.damaged(damage)
            if position < damage.position < end:
                end = damage.position
        checked = self._checked
        if checked.covers(position, end):
            return end
        wanted = min(end, checked.own_from)
        sound, due = checked.reached(position) or (position, offset if exact else -1)
        if not checks.warm and not self.file.in_cache(sound, min(wanted - sound, TURN_BYTES)):
            checks.unchecked = FileSlice(self.file, sound, wanted - sound)
            return sound
        try:
            while sound < wanted and (sound == position or not checks.budget.spent):
                sound, due = self._check_some(sound, wanted, due, checks, offset if sound == position else None)
                checked.add(position, sound, due)
        except CorruptBatch as error:
            if sound == position:
                raise
            log.error("%s", error)
            return sound
        if sound < wanted:
            checks.unchecked = FileSlice(self.file, sound, wanted - sound)
        return end if sound >= checked.own_from else min(sound, end)

    def _check_some(
        self, position: int, wanted_end: int, due: int, checks: Checks, held: int | None
    ) -> tuple[int, int]:
        """Check from the batch at the position on, which has the offset `due` (any if -1) and, if that is given, holds
        the offset `held`; answers where the next batch begins, and with which offset."""
        epoch = checks.epochs.epoch_at(due) if due >= 0 and not self.sparse else None
        if epoch is not None:
            budget = checks.budget
            count = max(HEADER_BYTES, min(budget.bytes, wanted_end - position))
            window = read_log(self.file, count, position, HEADER_BYTES)
            used, due, batches = sound_run(window, due, epoch, max(1, budget.batches))
            if used:
                budget.spend(used, batches)
                return position + used, due
        headers = walk_checked(self.file, position, self.written, position + 1)
        found_at, header = next(self._chained(headers, due))
        if held is not None and not header.base_offset <= held <= header.last_offset and not self.sparse:
            raise self._wrong(found_at, f"base offset is {header.base_offset}, but {held} is due here")
        epoch = checks.epochs.epoch_at(header.base_offset)
        if epoch is not None and epoch != header.leader_epoch:
            raise self._wrong(found_at, f"leader epoch is {header.leader_epoch}, not {epoch}")
        checks.budget.spend(header.size_bytes, 1)
        return found_at + header.size_bytes, header.next_offset

    def doubt(self) -> None:
        """What was checked, or written by this process, is checked again before it is served."""
        self._checked = CheckedBytes()
        self._checked.own_from = self.written

    def trust_all(self) -> None:
        """Everything was checked just now."""
        self._checked.own_from = 0

    def damaged(self, damage: Damage) -> CorruptBatch:
        return CorruptBatch(
            f"{self.path} at byte {damage.position}: offsets {damage.first_offset} to {damage.next_offset - 1} are "
            f"damaged and not served ({damage.reason}); `headrace log verify` says more"
        )

    def cut(self, position: int, next_offset: int) -> None:
        """Count nothing from the position on; the file keeps it until `drop_tail`."""
        self.load_indexes()
        self.index.count = self.index.entries_below(position)
        self.times.count = self.times.entries_upto(next_offset - self.base_offset)
        self._checked.cut(position)
        self.size = self.written = position
        self.next_offset = next_offset
        self.damage = tuple(damage for damage in self.damage if damage.end <= position)
        self._next_index_at_end()
        greatest_ms, relative_offset = self.times.entry(self.times.count - 1) if self.times.count else (NO_TIMESTAMP, 0)
        for _, header in walk(self.file, self.locate(self.base_offset + relative_offset), position):
            greatest_ms = max(greatest_ms, header.max_timestamp_ms)
        self.greatest_ms = greatest_ms

    def drop_tail(self) -> list[str]:
        """Bring the files to what counts; answers what is to be synced."""
        self.file.truncate(self.written)
        if self.cleaned:  # its sum is of more than is left
            self.allow_gaps()
            self._disk.remove(self.stem + SUM)
            self.cleaned = False
        self.end_indexes()
        return [self.path, self.index.path, self.times.path]

    def allow_gaps(self) -> None:
        """From its first batch on offsets may jump."""
        self._disk.open(self.stem + GAPS, create=True, writable=True).close()
        self.sparse = True
        self.next_index_at = 0

    def release(self) -> None:
        """Let go of files and maps; they come back at next use."""
        self._file = self.append_file = None
        if self.index.writable:
            self.end_indexes()
        self.index.drop()
        self.times.drop()

    def close(self) -> None:
        """Let go for good; an index that is being written keeps its spare room."""
        self._open_segments.closed(self)
        self._file = self.append_file = None
        self._gone = True
        self.index.drop()
        self.times.drop()

    def set_aside(self) -> list[str]:
        """Let go for good and mark the files as deleted; answers what they are called now."""
        self.close()
        paths = []
        # The log first: what is left beside it is removed by a start, but without them it would be misread.
        for ending in (LOG, INDEX, TIME_INDEX, SNAPSHOT, SUM, GAPS):
            path = self.stem + ending
            if self._disk.exists(path):
                self._disk.rename(path, path + DELETED)
                paths.append(path + DELETED)
        return paths


OPEN_SEGMENTS_MAX: Final = 2000


class OpenSegments:
    """Bounds how many segments have open files: the longest open is dropped first, unless it is being written."""

    def __init__(self, most: int = OPEN_SEGMENTS_MAX) -> None:
        self._most = most
        self._open: deque[Segment] = deque()

    def opened(self, segment: Segment) -> None:
        self._open.append(segment)
        for _ in range(len(self._open) - self._most):
            oldest = self._open.popleft()
            if oldest.written < oldest.size:
                self._open.append(oldest)
            else:
                oldest.release()

    def __len__(self) -> int:
        return len(self._open)

    def closed(self, segment: Segment) -> None:
        if segment in self._open:
            self._open.remove(segment)


SUM_VERSION: Final = 1
SUM_CHUNK_BYTES: Final = 1 << 20

_SUM = struct.Struct(">IIQQ")


@dataclass(frozen=True, slots=True)
class Sum:
    """The `.sum` file of a compacted segment: CRC-32C of its whole `.log`, its size, and the offset after its range.

    Compaction leaves gaps, so a wrong base offset cannot be told by its neighbours; this sum covers the bytes that no
    batch's own CRC does. 28 bytes, big-endian: version uint32, CRC uint32, size uint64, next offset uint64, CRC of the
    above uint32.
    """

    crc: int
    size: int
    next_offset: int


def encode_sum(found: Sum) -> bytes:
    body = _SUM.pack(SUM_VERSION, found.crc, found.size, found.next_offset)
    return body + crc32c(body).to_bytes(4, "big")


def read_sum(disk: Disk, path: str) -> Sum | None:
    """None if it is not whole."""
    data = read_whole(disk, path)
    if len(data) != _SUM.size + 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "big"):
        return None
    version, crc, size, next_offset = _SUM.unpack_from(data)
    return Sum(crc, size, next_offset) if version == SUM_VERSION else None


def crc_of_file(file: File, size: int) -> int:
    crc, position = 0, 0
    while position < size:
        chunk = file.pread(min(SUM_CHUNK_BYTES, size - position), position)
        if not chunk:
            break
        crc = crc32c(chunk, crc)
        position += len(chunk)
    return crc
