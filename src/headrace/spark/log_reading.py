"""Reading one split of a data folder: Arrow batches, and problems where there is no whole batch.

Every batch's CRC, place in the chain of offsets and epoch are checked (see `storage.scan`) before its records are
unpacked. Bytes are read once, in pieces, and unpacked from memory; they are never mapped, since a running broker may
cut the file. Reading begins where the index leads, if there is such a batch, and at the segment's start if not: a wrong
index costs time, no rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from headrace.errors import CorruptBatch, DataFolderError, HeadraceError, InvalidRecord
from headrace.ports.disk import File, read_whole
from headrace.records.arrow import PASSED_ON_BYTES, TYPES, Decoder
from headrace.records.batch import HEADER_BYTES, batches, read_header
from headrace.spark.log_options import FOLDER, SEGMENT
from headrace.spark.log_planning import (
    FolderCheck,
    LogProblem,
    SegmentFile,
    SharedSplit,
    Split,
    covering,
    entry_before,
    index_entries,
)
from headrace.storage import sums
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory, read_entries
from headrace.storage.index import LOW_HALF, OffsetIndex, closed_entries
from headrace.storage.log import TopicPartition
from headrace.storage.report import PartitionReport, Problem
from headrace.storage.scan import Broken, Chain, scan
from headrace.storage.segment import NEVER
from headrace.storage.shared.commitlog import DELETED
from headrace.storage.shared.offline import CUT_BY_START
from headrace.storage.verify import inspect_folder, reports
from headrace.system.disk import SystemDisk, SystemFile

PIECE_BYTES: Final = 8 << 20
OPEN_TRIES_MAX: Final = 20

Found: TypeAlias = pa.RecordBatch | LogProblem


def read_split(split: Split, columns: Sequence[str], *, thorough: bool = False) -> Iterator[Found]:
    """Rows with those columns, and problems; `thorough` looks at index and sum too, which no row depends on."""
    if not os.path.isdir(split.path) and not os.path.isdir(split.folder):
        raise DataFolderError(f"there is no folder {split.folder} on {os.uname().nodename}; every worker has to see it")
    if isinstance(split, SharedSplit):
        yield from _SharedReading(split, columns).run()
    else:
        yield from _Reading(split, columns, thorough).run()


def check_folder(check: FolderCheck) -> Iterator[LogProblem]:
    """Everything that is not as it should be in a folder of the layout `shared`."""
    disk = SystemDisk()
    for problem in inspect_folder(disk, check.folder).problems:
        yield _told(check.folder, None, problem)
    for report in reports(disk, check.folder):
        where = report.topic_partition if isinstance(report, PartitionReport) else None
        if where is None or where in check.partitions:
            for problem in report.problems:
                yield _told(check.folder, where, problem)


def _told(data: str, where: TopicPartition | None, problem: Problem) -> LogProblem:
    topic, partition = (where.topic, where.partition) if where is not None else (None, None)
    name = os.path.basename(problem.path)
    kind = next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "missing")
    if kind == "corrupt" and CUT_BY_START in problem.what:
        kind = "torn"
    return LogProblem(data, topic, partition, name, problem.position, problem.offset, kind, problem.what)


_KINDS: Final = {
    ".log": "corrupt",
    ".queue": "index",
    EPOCHS_FILE: "epochs",
    "partition": "partition",
    "@checkpoint": "checkpoint",
    ".snapshot": "snapshot",
}


class _Pieces(SystemFile):
    """A file that is read ahead: the last piece that was read, and the one before, are there when they are wanted."""

    __slots__ = ("_pieces",)

    def __init__(self, file: File) -> None:
        super().__init__(file.path, os.dup(file.fileno()))
        self._pieces: tuple[tuple[int, bytes], ...] = ()

    def pread(self, count: int, position: int) -> bytes:
        return bytes(self.view(count, position))

    def view(self, count: int, position: int) -> memoryview:
        for at, piece in self._pieces:
            if at <= position and position + count <= at + len(piece):
                return memoryview(piece)[position - at : position - at + count]
        piece = super().pread(max(count, PIECE_BYTES), position)
        self._pieces = ((position, piece), *self._pieces[:1])
        return memoryview(piece)[:count]

    def holds_together(self, at: int, end: int) -> bool:
        """Whether a range is in one piece, so that a view of it reads nothing."""
        return any(first <= at and end <= first + len(piece) for first, piece in self._pieces)


class _Reading:
    def __init__(self, split: Split, columns: Sequence[str], thorough: bool) -> None:
        self._disk = SystemDisk()
        self._split = split
        self._columns = columns
        self._thorough = thorough
        decoded = [name for name in columns if name in TYPES]
        # Without a column of the records themselves, one is needed to count them.
        self._decoder = Decoder(split.topic, split.partition, decoded or ["offset"], batch_bytes=PASSED_ON_BYTES)
        self._segment: SegmentFile | None = None
        self._newest = False

    def run(self) -> Iterator[Found]:
        split = self._split
        opened = self._open()
        if opened is None:
            reason = f"offsets up to {split.next_offset - 1} were deleted by the running broker before they were read"
            yield self._problem("removed", split.first_offset, None, reason, fails=True)
            return
        file = _Pieces(opened)
        # The size before the epochs: a broker writes an epoch before the first batch of it.
        size = file.size()
        chain = self._chain()
        position, expected = self._start(file)
        piece_at = piece_end = position
        for found in scan(file, size, expected, chain, position):
            if isinstance(found, Broken):
                yield from self._rows(file, piece_at, piece_end)
                piece_at = piece_end = found.end
                yield from self._broken(file, size, found)
                if found.next_offset is None:
                    return
                continue
            if found.header.base_offset >= split.next_offset:
                yield from self._rows(file, piece_at, piece_end)
                return
            expected = found.header.next_offset
            end = found.position + found.header.size_bytes
            if not file.holds_together(piece_at, end):
                yield from self._rows(file, piece_at, piece_end)
                piece_at = piece_end
            piece_end = end
        yield from self._rows(file, piece_at, piece_end)
        yield from self._end(file, size, expected)

    def _open(self) -> File | None:
        """The file that has the range now; None if it was deleted."""
        split = self._split
        for _ in range(OPEN_TRIES_MAX):
            try:
                found = covering(self._disk, split.path, split.first_offset)
                if found is None:
                    return None
                path = f"{split.path}/{found[0].log}"
                file = self._disk.open(path)
                # Compaction may put another file in its place at any moment; what was seen has to be one state.
                same = os.stat(path).st_ino == os.fstat(file.fileno()).st_ino
                if same and covering(self._disk, split.path, split.first_offset) == found:
                    self._segment, self._newest = found
                    return file
            except FileNotFoundError:
                if not self._disk.exists(split.path):
                    return None
        raise DataFolderError(f"{split.path} changes faster than it can be read; run this again")

    def _chain(self) -> Chain:
        """What is known of the segment's offsets and epochs."""
        segment, path = self._known(), self._split.path
        entries, wrong = read_entries(self._disk, f"{path}/{EPOCHS_FILE}")
        epoch_at = EpochHistory(self._disk, path).epoch_at if entries and not wrong else None
        if segment.sum is None:
            return Chain(True, epoch_at)
        data = read_whole(self._disk, f"{path}/{segment.index}") if segment.index else b""
        if closed_entries(data, OffsetIndex) is None:
            return Chain(False, epoch_at)
        base, index = segment.base_offset, index_entries(self._disk, path, segment)
        return Chain(False, epoch_at, {0: base} | {entry & LOW_HALF: base + (entry >> 32) for entry in index})

    def _start(self, file: File) -> tuple[int, int]:
        """Position and base offset of a batch at or before the first offset of the split."""
        segment = self._known()
        entries = index_entries(self._disk, self._split.path, segment)
        relative, position = entry_before(entries, self._split.first_offset - segment.base_offset)
        offset = segment.base_offset + relative
        try:
            if position and read_header(file.pread(HEADER_BYTES, position)).base_offset == offset:
                return position, offset
        except (CorruptBatch, InvalidRecord):
            pass
        return 0, segment.base_offset

    def _rows(self, file: _Pieces, at: int, end: int) -> Iterator[Found]:
        """The rows of whole batches; a batch that does not unpack is a problem, and those around it are rows."""
        if at == end:
            return
        split, told = self._split, 0
        piece = file.view(end - at, at)
        try:
            for rows in self._decoder.decode(piece, split.first_offset, split.next_offset, checked=True):
                told += len(rows)
                yield self._with_place(rows)
        except (CorruptBatch, InvalidRecord):
            yield from self._batch_by_batch(piece, at, told)

    def _batch_by_batch(self, piece: memoryview, at: int, told: int) -> Iterator[Found]:
        """The same rows without the first `told` of them, and a problem for each batch that does not unpack."""
        split = self._split
        for header, batch in batches(piece):
            try:
                decoded = list(self._decoder.decode(batch, split.first_offset, split.next_offset, checked=True))
            except (CorruptBatch, InvalidRecord) as error:
                yield self._problem("corrupt", header.base_offset, at, _bare(error), fails=True)
                decoded = []
            for rows in decoded:
                skipped = min(told, len(rows))
                told -= skipped
                if skipped < len(rows):
                    yield self._with_place(rows.slice(skipped))
            at += header.size_bytes

    def _with_place(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The columns asked for, in their order."""
        places = {FOLDER: self._split.folder, SEGMENT: self._known().log}
        if not any(name in places for name in self._columns):
            return rows
        arrays = [
            pa.repeat(pa.scalar(places[name], pa.string()), len(rows)) if name in places else rows[name]
            for name in self._columns
        ]
        return pa.RecordBatch.from_arrays(arrays, names=list(self._columns))

    def _broken(self, file: File, size: int, found: Broken) -> Iterator[LogProblem]:
        """A problem, if this split is the one to tell it."""
        split, offset = self._split, found.expected_offset
        if not split.first_offset <= max(offset, split.start_offset) < split.next_offset:
            return
        deleted = found.next_offset is not None and found.next_offset <= split.start_offset
        last = found.next_offset is None and self._newest
        if last and (offset >= split.synced_offset or _is_cut(file, found.position, size)):
            yield self._problem("torn", offset, found.position, f"{found.reason}; the log ends before it")
            yield from self._short(size, offset)
            return
        behind = f"offset {found.next_offset} follows" if found.next_offset else "nothing whole follows in this segment"
        unsynced = "; it was not synced, so a broker that starts here cuts the log before it"
        reason = f"{found.reason}; {behind}{unsynced if offset >= split.synced_offset else ''}"
        yield self._problem("corrupt", offset, found.position, reason, fails=not deleted)

    def _end(self, file: File, size: int, expected: int) -> Iterator[LogProblem]:
        """The segment has been read to its end."""
        segment, split = self._known(), self._split
        if split.next_offset < (NEVER if self._newest else segment.next_base or NEVER):
            return
        if segment.sum is None and not self._newest and expected < split.next_offset:
            reason = f"offsets {expected} to {split.next_offset - 1} are missing: the next segment begins behind them"
            yield self._problem("missing", expected, size, reason, fails=split.next_offset > split.start_offset)
        if self._newest and segment.sum is None:
            yield from self._short(size, expected)
        if self._thorough:
            yield from self._index()
            if segment.sum is not None:
                yield from self._sum(file, size, segment.sum)

    def _short(self, size: int, expected: int) -> Iterator[LogProblem]:
        if expected < self._split.synced_offset:
            reason = f"the log ends at offset {expected}, but was synced up to {self._split.synced_offset}"
            yield self._problem("missing", expected, size, reason)

    def _index(self) -> Iterator[LogProblem]:
        segment = self._known()
        if self._newest and not self._split.clean:
            return  # it is closed with a CRC when its segment is
        data = read_whole(self._disk, f"{self._split.path}/{segment.index}") if segment.index else None
        if data is None or closed_entries(data, OffsetIndex) is None:
            what = "is missing" if data is None else "does not agree with its CRC"
            yield self._problem("index", None, None, f"the index {what}; a broker builds it anew")

    def _sum(self, file: File, size: int, name: str) -> Iterator[LogProblem]:
        found, segment = sums.read(self._disk, f"{self._split.path}/{name}"), self._known()
        if found is None:
            yield self._problem("sum", None, None, "the sum of this compacted segment is damaged")
        elif found.size != size or found.crc != sums.of_file(file, size):
            yield self._problem("sum", None, None, "this compacted segment does not agree with its sum")
        elif segment.next_base is not None and found.next_offset != segment.next_base:
            reason = f"offsets {found.next_offset} to {segment.next_base - 1} are missing"
            yield self._problem("missing", found.next_offset, size, reason)

    def _known(self) -> SegmentFile:
        assert self._segment is not None, "the segment is known once it is open"
        return self._segment

    def _problem(
        self, kind: str, offset: int | None, position: int | None, reason: str, *, fails: bool = False
    ) -> LogProblem:
        split = self._split
        segment = self._segment.log if self._segment else None
        return LogProblem(split.folder, split.topic, split.partition, segment, position, offset, kind, reason, fails)


class _Run(_Pieces):
    """A commit file of which no more is read than one run, since others' batches lie behind it."""

    __slots__ = ("limit",)

    def __init__(self, file: File, limit: int) -> None:
        super().__init__(file)
        self.limit = limit

    def view(self, count: int, position: int) -> memoryview:
        if not self.holds_together(position, position + count):
            wanted = min(max(count, PIECE_BYTES), self.limit - position)
            piece = SystemFile.pread(self, wanted, position)
            self._pieces = ((position, piece), *self._pieces[:1])
        return super().view(count, position)


class _SharedReading(_Reading):
    """A split whose batches lie in a commit log, in runs."""

    def __init__(self, split: SharedSplit, columns: Sequence[str]) -> None:
        super().__init__(split, columns, thorough=False)
        self._shared = split

    def run(self) -> Iterator[Found]:
        yield from self._shared.problems
        entries, wrong = read_entries(self._disk, f"{self._split.path}/{EPOCHS_FILE}")
        epoch_at = EpochHistory(self._disk, self._split.path).epoch_at if entries and not wrong else None
        for path, position, size, offset in self._shared.runs:
            self._segment = SegmentFile(offset, None, os.path.basename(path), None, None)
            try:
                opened = self._open_commit_file(path)
            except FileNotFoundError:
                reason = "the running broker removed its commit file before it was read; run this again"
                yield self._problem("removed", offset, position, reason, fails=True)
                continue
            yield from self._read_run(_Run(opened, position + size), position, offset, Chain(False, epoch_at))

    def _open_commit_file(self, path: str) -> File:
        try:
            return self._disk.open(path)
        except FileNotFoundError:
            return self._disk.open(path + DELETED)  # for a while

    def _read_run(self, file: _Run, position: int, offset: int, chain: Chain) -> Iterator[Found]:
        piece_at = piece_end = position
        for found in scan(file, file.limit, offset, chain, position):
            if isinstance(found, Broken):
                yield from self._rows(file, piece_at, piece_end)
                piece_at = piece_end = found.end
                yield self._problem("corrupt", found.expected_offset, found.position, found.reason, fails=True)
                continue
            end = found.position + found.header.size_bytes
            if not file.holds_together(piece_at, end):
                yield from self._rows(file, piece_at, piece_end)
                piece_at = piece_end
            piece_end = end
        yield from self._rows(file, piece_at, piece_end)


def _is_cut(file: File, position: int, size: int) -> bool:
    """Whether the file ends inside a batch."""
    try:
        return position + read_header(file.pread(HEADER_BYTES, position)).size_bytes > size
    except HeadraceError:
        return size - position < HEADER_BYTES


def _bare(error: HeadraceError) -> str:
    """The reason without topic, partition and offset, which a problem has of its own."""
    return str(error).partition(": ")[2] or str(error)
