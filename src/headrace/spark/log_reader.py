"""Reading one split of a data folder: Arrow batches, and problems where there is no whole batch.

Every batch's CRC, place in the chain of offsets and epoch are checked (see `storage.scan`) before its records are
unpacked. Bytes are read once, in pieces, and unpacked from memory; they are never mapped, since a running broker may
cut the file. Reading begins where the index leads, if there is such a batch, and at the segment's start if not: a wrong
index costs time, no rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import pyarrow as pa

from headrace.errors import CorruptBatch, DataFolderError, HeadraceError, InvalidRecord
from headrace.ports.disk import File, read_whole
from headrace.records.arrow import PASSED_ON_BYTES, TYPES, Decoder
from headrace.records.batch import HEADER_BYTES, batches, read_header
from headrace.records.isolation import NOTHING_HIDDEN
from headrace.spark.log_options import FOLDER, SEGMENT, SHOWN
from headrace.spark.log_plan import (
    FolderCheck,
    LogProblem,
    PlannedRun,
    SegmentFile,
    SharedSplit,
    Split,
    covering,
    entry_before,
    index_entries,
)
from headrace.storage.commitlog.commitlog import DELETED
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory, read_entries
from headrace.storage.log import TopicPartition
from headrace.storage.offline.report import PartitionReport, Problem
from headrace.storage.offline.transactions import NONE, TransactionSurvey
from headrace.storage.offline.verify import inspect_folder, reports, transactions_of
from headrace.storage.scan import Broken, Chain, ValidBatch, scan
from headrace.storage.segments.index import LOW_HALF, OffsetIndex, closed_entries
from headrace.storage.segments.segment import NEVER, crc_of_file, read_sum
from headrace.system.disk import SystemDisk, SystemFile

PIECE_BYTES: Final = 8 << 20
OPEN_TRIES_MAX: Final = 20

RowsOrProblem: TypeAlias = pa.RecordBatch | LogProblem


def read_split(
    split: Split, columns: Sequence[str], *, thorough: bool = False, isolation: str = "uncommitted"
) -> Iterator[RowsOrProblem]:
    """Rows with those columns, and problems; `thorough` looks at index and sum too, which no row depends on.
    `isolation` says of which transactions records are rows."""
    if not os.path.isdir(split.path) and not os.path.isdir(split.folder):
        raise DataFolderError(f"there is no folder {split.folder} on {os.uname().nodename}; every worker has to see it")
    if isinstance(split, SharedSplit):
        yield from _SharedReading(split, columns, isolation).run()
    else:
        yield from _Reading(split, columns, thorough, isolation).run()


def check_folder(check: FolderCheck) -> Iterator[LogProblem]:
    """Everything that is not as it should be in a folder of the layout `shared`; damage of a commit file that is known
    to be a partition's is told of that alone."""
    disk = SystemDisk()
    for problem in inspect_folder(disk, check.folder).problems:
        yield _told(check.folder, None, problem)
    found = list(reports(disk, check.folder))
    whose = [problem for report in found if isinstance(report, PartitionReport) for problem in report.problems]
    places = {(problem.path, problem.position) for problem in whose}
    for report in found:
        where = report.topic_partition if isinstance(report, PartitionReport) else None
        if where is not None and where not in check.partitions:
            continue
        for problem in report.problems:
            if where is not None or (problem.path, problem.position) not in places:
                yield _told(check.folder, where, problem)


def _told(data: str, where: TopicPartition | None, problem: Problem) -> LogProblem:
    topic, partition = (where.topic, where.partition) if where is not None else (None, None)
    name = os.path.basename(problem.path)
    kind = next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "missing")
    kind = "torn" if problem.torn else kind
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
    """A file that is read ahead, but not beyond a limit: the piece that was used last, and the one before, are there
    when they are wanted."""

    __slots__ = ("_limit", "_pieces")

    def __init__(self, file: File, limit: int) -> None:
        super().__init__(file.path, os.dup(file.fileno()))
        self._limit = limit
        self._pieces: tuple[tuple[int, bytes], ...] = ()

    def pread(self, count: int, position: int) -> bytes:
        for at, piece in self._pieces:
            if at <= position and position + count <= at + len(piece):
                break
        else:
            wanted = min(max(count, PIECE_BYTES), self._limit - position)
            at, piece = position, super().pread(max(0, wanted), position)
        others = [each for each in self._pieces if each[1] is not piece]
        self._pieces = ((at, piece), *others[:1])
        return piece[position - at : position - at + count]

    def used_last(self, at: int, end: int) -> memoryview | None:
        """The range, if all of it is in the piece that was used last."""
        first, piece = self._pieces[0]
        return memoryview(piece)[at - first : end - first] if first <= at and end <= first + len(piece) else None


class _Checked:
    """Neighbouring batches that `_scan` has found whole: the very bytes, never read again. They lie in one piece."""

    __slots__ = ("_at", "_file", "_view")

    def __init__(self, file: _Pieces) -> None:
        self._file = file
        self._at = 0
        self._view: memoryview | None = None

    def add(self, found: ValidBatch) -> bool:
        """Add the batch that was just found; False if it is not in the piece of those before it."""
        at = found.position if self._view is None else self._at
        view = self._file.used_last(at, found.position + found.header.size_bytes)
        if self._view is not None and (view is None or view.obj is not self._view.obj):
            return False
        assert view is not None, "a batch is checked in a piece"
        self._at, self._view = at, view
        return True

    def take(self) -> tuple[int, memoryview]:
        at, view, self._view = self._at, self._view, None
        return at, view if view is not None else memoryview(b"")


def _scan(
    file: _Pieces, size: int, expected_offset: int, chain: Chain, position: int, epoch: int = -1
) -> Iterator[ValidBatch | Broken]:
    """As `scan`, but begun anew behind broken bytes: the search for a whole batch has read other pieces meanwhile."""
    found: ValidBatch | Broken | None
    while True:
        found = None
        for found in scan(file, size, expected_offset, chain, position, epoch):
            yield found
            if isinstance(found, Broken):
                break
            epoch = found.header.leader_epoch
        if not isinstance(found, Broken) or found.next_offset is None:
            return
        position, expected_offset = found.end, found.next_offset


class _Reading:
    def __init__(self, split: Split, columns: Sequence[str], thorough: bool, isolation: str) -> None:
        self._disk = SystemDisk()
        self._shown = SHOWN[isolation]
        self._transactions: TransactionSurvey | None = None
        self._split = split
        self._columns = columns
        self._thorough = thorough
        decoded = [name for name in columns if name in TYPES]
        # Without a column of the records themselves, one is needed to count them.
        self._decoder = Decoder(split.topic, split.partition, decoded or ["offset"], batch_bytes=PASSED_ON_BYTES)
        self._segment: SegmentFile | None = None
        self._newest = False

    def run(self) -> Iterator[RowsOrProblem]:
        split = self._split
        opened = self._open()
        if opened is None:
            reason = f"offsets up to {split.next_offset - 1} were deleted by the running broker before they were read"
            yield self._problem("removed", split.first_offset, None, reason, fails=True)
            return
        # The size before the epochs: a broker writes an epoch before the first batch of it.
        size = opened.size()
        file = _Pieces(opened, size)
        chain = self._chain()
        position, expected = self._start(file)
        checked = _Checked(file)
        for found in _scan(file, size, expected, chain, position):
            if isinstance(found, Broken):
                yield from self._rows(checked)
                yield from self._broken(file, size, found)
                if found.next_offset is None:
                    return
                continue
            if found.header.base_offset >= split.next_offset:
                yield from self._rows(checked)
                return
            expected = found.header.next_offset
            yield from self._add(checked, found)
        yield from self._rows(checked)
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
            return Chain(not segment.sparse, epoch_at)
        data = read_whole(self._disk, f"{path}/{segment.index}") if segment.index else b""
        if closed_entries(data, OffsetIndex, self._disk.size(f"{path}/{segment.log}")) is None:
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

    def _add(self, checked: _Checked, found: ValidBatch) -> Iterator[RowsOrProblem]:
        """Rows, if the batch is in another piece than those before it."""
        if not checked.add(found):
            yield from self._rows(checked)
            checked.add(found)

    def _rows(self, checked: _Checked) -> Iterator[RowsOrProblem]:
        """The rows of whole batches; a batch that does not unpack is a problem, and those around it are rows."""
        split, told = self._split, 0
        at, piece = checked.take()
        if not piece:
            return
        hidden = self._hidden(piece)
        bounds = split.first_offset, split.next_offset
        try:
            for rows in self._decoder.decode(piece, *bounds, checked=True, hidden=hidden):
                told += len(rows)
                yield self._with_place(rows)
        except (CorruptBatch, InvalidRecord):
            yield from self._batch_by_batch(piece, at, told, hidden)

    def _hidden(self, piece: memoryview) -> frozenset[int]:
        """Base offsets of the batches whose records are no rows. What became of a transaction may be told by a marker
        far behind, so the partition is looked through, once, where there are any."""
        if self._shown == SHOWN["uncommitted"]:
            return NOTHING_HIDDEN
        hidden = []
        for header, _ in batches(piece):
            if header.is_transactional and self._transactions is None:
                where = TopicPartition(self._split.topic, self._split.partition)
                self._transactions = transactions_of(self._disk, self._split.folder, where)
            outcome = NONE if self._transactions is None else self._transactions.of_batch(header)
            if outcome not in self._shown:
                hidden.append(header.base_offset)
        return frozenset(hidden)

    def _batch_by_batch(self, piece: memoryview, at: int, told: int, hidden: frozenset[int]) -> Iterator[RowsOrProblem]:
        """The same rows without the first `told` of them, and a problem for each batch that does not unpack."""
        split = self._split
        for header, batch in batches(piece):
            try:
                bounds = split.first_offset, split.next_offset
                decoded = list(self._decoder.decode(batch, *bounds, checked=True, hidden=hidden))
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
        if not segment.sparse and not self._newest and expected < split.next_offset:
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
        log_bytes = self._disk.size(f"{self._split.path}/{segment.log}")
        if data is None or closed_entries(data, OffsetIndex, log_bytes) is None:
            what = "is missing" if data is None else "does not agree with its CRC"
            yield self._problem("index", None, None, f"the index {what}; a broker builds it anew")

    def _sum(self, file: File, size: int, name: str) -> Iterator[LogProblem]:
        found, segment = read_sum(self._disk, f"{self._split.path}/{name}"), self._known()
        if found is None:
            yield self._problem("sum", None, None, "the sum of this compacted segment is damaged")
        elif found.size != size or found.crc != crc_of_file(file, size):
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


class _SharedReading(_Reading):
    """A split whose batches lie in a commit log, in runs."""

    def __init__(self, split: SharedSplit, columns: Sequence[str], isolation: str) -> None:
        super().__init__(split, columns, False, isolation)
        self._shared = split

    def run(self) -> Iterator[RowsOrProblem]:
        yield from self._shared.problems
        entries, wrong = read_entries(self._disk, f"{self._split.path}/{EPOCHS_FILE}")
        epoch_at = EpochHistory(self._disk, self._split.path).epoch_at if entries and not wrong else None
        for run in self._shared.runs:
            self._segment = SegmentFile(run.first_offset, None, os.path.basename(run.path), None, None)
            try:
                opened = self._open_commit_file(run.path)
            except FileNotFoundError:
                reason = "the running broker removed its commit file before it was read; run this again"
                yield self._problem("removed", run.first_offset, run.position, reason, fails=True)
                continue
            # Others' batches lie behind it.
            yield from self._read_run(_Pieces(opened, run.position + run.size), run, Chain(True, epoch_at))

    def _open_commit_file(self, path: str) -> File:
        try:
            return self._disk.open(path)
        except FileNotFoundError:
            return self._disk.open(path + DELETED)  # for a while

    def _read_run(self, file: _Pieces, run: PlannedRun, chain: Chain) -> Iterator[RowsOrProblem]:
        """Offsets are dense between the places that the queue has, so each base offset is told by it."""
        checked, epoch = _Checked(file), -1
        begins = [(run.position, run.first_offset), *run.joints, (run.position + run.size, run.next_offset)]
        for (position, offset), (end, following) in pairwise(begins):
            for found in _scan(file, end, offset, chain, position, epoch):
                if isinstance(found, Broken):
                    yield from self._rows(checked)
                    yield self._problem("corrupt", found.expected_offset, found.position, found.reason, fails=True)
                elif found.header.next_offset > following:
                    yield from self._rows(checked)
                    reason = f"it ends with offset {found.header.next_offset - 1}, but {following} comes next"
                    yield self._problem("corrupt", found.header.base_offset, found.position, reason, fails=True)
                else:
                    epoch = found.header.leader_epoch
                    yield from self._add(checked, found)
        yield from self._rows(checked)


def _is_cut(file: File, position: int, size: int) -> bool:
    """Whether the file ends inside a batch."""
    try:
        return position + read_header(file.pread(HEADER_BYTES, position)).size_bytes > size
    except HeadraceError:
        return size - position < HEADER_BYTES


def _bare(error: HeadraceError) -> str:
    """The reason without topic, partition and offset, which a problem has of its own."""
    return str(error).partition(": ")[2] or str(error)
