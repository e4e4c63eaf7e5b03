"""Reading a data folder offline: what is in it, and whether it is whole.

Nothing is changed. A folder of the layout `shared` is read by `commitlog_verify`; the rest here is for `partitioned`.
Every byte of a `.log` is covered: what no batch's CRC covers (see `scan`) is told by the chain of
offsets, by the epochs file and, in compacted segments, by the `.sum`. Indexes are compared with the log entry by
entry and with their own CRC; snapshots, epochs and the checkpoint bear a CRC each. The index of aborted transactions is
compared with a log that is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import DataFolderError
from headrace.ports.disk import Disk, read_whole
from headrace.records.batch import BatchHeader
from headrace.storage import checkpoint, folder, producers
from headrace.storage.checkpoint import LogPoint
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory, read_entries
from headrace.storage.log import TopicPartition
from headrace.storage.offline import commitlog_verify as shared
from headrace.storage.offline.commitlog_survey import Folder
from headrace.storage.offline.report import (
    CommitFileReport,
    DumpedBatch,
    FolderReport,
    PartitionReport,
    Problem,
    SegmentReport,
)
from headrace.storage.offline.transactions import TransactionSurvey, index_faults
from headrace.storage.producers import SNAPSHOT
from headrace.storage.scan import Broken, Chain, scan
from headrace.storage.segments.index import LOW_HALF, TIME_ENTRY, OffsetIndex, SegmentIndex, TimeIndex, closed_entries
from headrace.storage.segments.segment import (
    GAPS,
    INDEX,
    LARGE_GAP,
    LOG,
    NO_TIMESTAMP,
    RELATIVE_OFFSET_MAX,
    SUM,
    TIME_INDEX,
    crc_of_file,
    read_sum,
)

DIGITS: Final = 20


def inspect_folder(disk: Disk, data: str) -> FolderReport:
    layout = layout_of(disk, data)
    problems: list[Problem] = []
    if layout == folder.SHARED:
        problems += Folder(disk, data).problems
    elif checkpoint.read(disk, data) is None:
        problems.append(Problem(f"{data}/{checkpoint.FILE_NAME}", None, None, "checkpoint is damaged"))
    strays = [
        path
        for topic in sorted({topic_partition.topic for topic_partition, _ in folder.partitions(disk, data)})
        for _, path in folder.strays_of(disk, data, topic)
    ]
    return FolderReport(layout, folder.holder(disk, data), tuple(strays), tuple(problems))


def layout_of(disk: Disk, data: str) -> str:
    """DataFolderError if it has none that is known."""
    layout = folder.layout_of(disk, data)
    if layout in (folder.PARTITIONED, folder.SHARED):
        return layout
    raise DataFolderError(
        f"data folder {data} has the layout {layout!r}: a conversion was interrupted, and goes on when "
        "`headrace log convert` is run again; or its file 'layout' is damaged"
    )


def reports(disk: Disk, data: str) -> Iterator[PartitionReport | CommitFileReport]:
    """One report for each partition and, in the layout `shared`, before those one for each file of the commit log.
    While a broker runs on the folder, its newest batches may look torn."""
    return shared.reports(disk, data) if layout_of(disk, data) == folder.SHARED else verify(disk, data)


def verify(disk: Disk, data: str) -> Iterator[PartitionReport]:
    """One report for each partition of a folder of the layout `partitioned`."""
    points = checkpoint.read(disk, data) or {}
    for topic_partition, path in folder.partitions(disk, data):
        yield _Partition(disk, topic_partition, path, points.get(topic_partition)).report()


def transactions_of(disk: Disk, data: str, topic_partition: TopicPartition) -> TransactionSurvey:
    """Of all batches of a partition. Markers tell, and those of its last batches may lie far behind them."""
    survey = TransactionSurvey()
    for found in dump(disk, data, topic_partition):
        if isinstance(found, DumpedBatch) and found.header.is_transactional:
            with closing(disk.open(found.path)) as file:
                survey.add(file, found.position, found.header)
    return survey


def dump(disk: Disk, data: str, only: TopicPartition | None = None) -> Iterator[DumpedBatch | Problem]:
    """Every whole batch in order, and a Problem where there is none."""
    if layout_of(disk, data) == folder.SHARED:
        yield from shared.dump(disk, data, only)
        return
    for topic_partition, path in folder.partitions(disk, data):
        if only is not None and topic_partition != only:
            continue
        for base_offset in _offsets(disk, path, LOG):
            file = disk.open(f"{path}/{base_offset:020d}{LOG}")
            sparse = any(disk.exists(f"{path}/{base_offset:020d}{ending}") for ending in (SUM, GAPS))
            for found in scan(file, file.size(), base_offset, Chain(dense=not sparse)):
                if isinstance(found, Broken):
                    yield Problem(file.path, found.position, found.expected_offset, found.reason)
                else:
                    yield DumpedBatch(topic_partition, file.path, found.position, found.header)


def _offsets(disk: Disk, path: str, ending: str) -> list[int]:
    return sorted(int(name[:DIGITS]) for name in disk.list(path) if name.endswith(ending) and name[:DIGITS].isdigit())


class _Partition:
    def __init__(self, disk: Disk, topic_partition: TopicPartition, path: str, point: LogPoint | None) -> None:
        self._disk = disk
        self._topic_partition = topic_partition
        self._path = path
        self._point = point
        self._problems: list[Problem] = []

    def report(self) -> PartitionReport:
        topic_id = folder.read_topic_id(self._disk, self._path)
        if isinstance(topic_id, str):
            self._problem(f"{self._path}/{folder.PARTITION_FILE}", topic_id)
        bases = _offsets(self._disk, self._path, LOG)
        chain_epochs = self._epochs(bool(bases))
        reports: list[SegmentReport] = []
        transactions = TransactionSurvey()
        for nth, base_offset in enumerate(bases):
            next_base = bases[nth + 1] if nth + 1 < len(bases) else None
            stem = f"{self._path}/{base_offset:020d}"
            segment = _SegmentCheck(self._disk, stem, base_offset, next_base, transactions)
            segment.must_be_closed = next_base is not None or (self._point is not None and self._point.clean)
            reports.append(segment.run(chain_epochs, self._problems))
        self._snapshots()
        end_offset = reports[-1].next_offset if reports else 0
        self._compare_with_checkpoint(end_offset, reports)
        start_offset = bases[0] if bases else 0
        if not self._problems:
            compacted = any(each.compacted for each in reports)
            for path, what in index_faults(
                self._disk, self._path, transactions, start_offset, end_offset, compacted=compacted
            ):
                self._problem(path, what)
        if self._point is not None:
            start_offset = max(start_offset, self._point.start_offset)
        return PartitionReport(
            self._topic_partition,
            self._path,
            None if isinstance(topic_id, str) else topic_id,
            start_offset,
            end_offset,
            tuple(reports),
            tuple(self._problems),
            transactions,
        )

    def _problem(self, path: str, what: str, position: int | None = None, offset: int | None = None) -> None:
        self._problems.append(Problem(path, position, offset, what))

    def _epochs(self, needed: bool) -> EpochHistory | None:
        """The epoch history if it is whole, for batches to be compared with."""
        path = f"{self._path}/{EPOCHS_FILE}"
        entries, wrong = read_entries(self._disk, path)
        if wrong:
            self._problem(path, wrong)
            return None
        return EpochHistory(self._disk, self._path) if entries and needed else None

    def _snapshots(self) -> None:
        for offset in _offsets(self._disk, self._path, SNAPSHOT):
            path = f"{self._path}/{offset:020d}{SNAPSHOT}"
            if producers.decode(read_whole(self._disk, path)) is None:
                self._problem(path, "snapshot of producers is damaged; the log itself is read instead")

    def _compare_with_checkpoint(self, end_offset: int, reports: list[SegmentReport]) -> None:
        point = self._point
        if point is None:
            return
        path = reports[-1].path if reports else self._path
        if point.clean and point.end_offset != end_offset:
            self._problem(path, f"log ends at offset {end_offset}, but ended at {point.end_offset} at the clean stop")
        elif end_offset < point.recovery_offset:
            self._problem(path, f"log ends at offset {end_offset}, but was synced up to {point.recovery_offset}")


@dataclass(slots=True)
class _SegmentCheck:
    """One pass over a segment; its indexes are followed along."""

    disk: Disk
    stem: str
    base_offset: int
    next_base: int | None
    transactions: TransactionSurvey
    must_be_closed: bool = False
    problems: list[Problem] = field(default_factory=list)

    def run(self, epochs: EpochHistory | None, problems: list[Problem]) -> SegmentReport:
        self.problems = problems
        file = self.disk.open(self.stem + LOG)
        size = file.size()
        compacted = self.disk.exists(self.stem + SUM)
        sparse = compacted or self.disk.exists(self.stem + GAPS)
        index = _IndexCheck(self, compacted, size)
        batches = records = 0
        expected = self.base_offset
        bases, most = index.bases if compacted else None, self.base_offset + RELATIVE_OFFSET_MAX
        chain = Chain(not sparse, epochs.epoch_at if epochs else None, bases, most)
        for found in scan(file, size, expected, chain):
            if isinstance(found, Broken):
                behind = "" if found.next_offset is not None else "; nothing whole follows in this segment"
                self.add(LOG, found.reason + behind, found.position, found.expected_offset)
                expected = found.next_offset if found.next_offset is not None else expected
                index.skip()
                continue
            index.batch(found.position, found.header)
            self.transactions.add(file, found.position, found.header)
            batches += 1
            records += found.header.record_count
            expected = found.header.next_offset
        index.end(expected, size)
        next_offset = self._end(expected, compacted, sparse, size)
        return SegmentReport(self.stem + LOG, self.base_offset, next_offset, batches, records, size, compacted)

    def add(self, ending: str, what: str, position: int | None = None, offset: int | None = None) -> None:
        self.problems.append(Problem(self.stem + ending, position, offset, what))

    def _end(self, expected: int, compacted: bool, sparse: bool, size: int) -> int:
        if compacted:
            return self._compare_with_sum(expected, size)
        if self.next_base not in (None, expected) and not (sparse and (self.next_base or 0) - expected > LARGE_GAP):
            what = f"segment ends before offset {expected}, but the next one begins with {self.next_base}"
            self.add(LOG, what, size, expected)
        return expected

    def _compare_with_sum(self, expected: int, size: int) -> int:
        found = read_sum(self.disk, self.stem + SUM)
        if found is None:
            self.add(SUM, "sum of a compacted segment is damaged")
            return max(expected, self.next_base or 0)
        if found.size != size:
            what = f"compacted segment has {size} bytes, but its sum was taken of {found.size}"
            self.add(LOG, what, min(size, found.size))
        elif found.crc != crc_of_file(self.disk.open(self.stem + LOG), size):
            self.add(LOG, "compacted segment does not agree with its sum: a byte outside its batches' CRCs has changed")
        if self.next_base is not None and found.next_offset != self.next_base:
            self.add(SUM, f"range ends at {found.next_offset}, but the next segment begins with {self.next_base}")
        return found.next_offset


class _IndexCheck:
    """Follows a segment's indexes while its batches go by."""

    def __init__(self, segment: _SegmentCheck, compacted: bool, log_bytes: int) -> None:
        self._segment = segment
        self._log_bytes = log_bytes
        self._whole = True
        self._entries = memoryview(self._load(INDEX, OffsetIndex)).cast("Q")
        self._times = self._load(TIME_INDEX, TimeIndex)
        self._at = self._time_at = 0
        self._greatest_ms = NO_TIMESTAMP
        self._blind = False
        self.bases: dict[int, int] | None = None
        if self._whole and compacted:
            base = segment.base_offset
            self.bases = {0: base} | {entry & LOW_HALF: base + (entry >> 32) for entry in self._entries}

    def _load(self, ending: str, kind: type[SegmentIndex]) -> bytes:
        path = self._segment.stem + ending
        if not self._segment.disk.exists(path):
            if self._segment.must_be_closed and self._segment.disk.size(self._segment.stem + LOG):
                self._segment.add(ending, "index is missing; it is rebuilt at next use")
            return b""
        data = read_whole(self._segment.disk, path)
        entries = closed_entries(data, kind, self._log_bytes)
        if entries is not None:
            return entries
        self._whole = False
        if self._segment.must_be_closed:
            self._segment.add(ending, "index does not agree with its CRC; it is rebuilt at next use")
        # An active index after a crash: entries up to the zeros.
        entry_bytes = len(kind.last_entry(0))
        end = len(data) // entry_bytes * entry_bytes
        while end and not any(data[end - entry_bytes : end]):
            end -= entry_bytes
        return data[:end]

    def skip(self) -> None:
        """Entries that point into broken bytes cannot be judged any more."""
        self._blind = True

    def batch(self, position: int, header: BatchHeader) -> None:
        relative_offset = header.base_offset - self._segment.base_offset
        self._time_entries(relative_offset)
        while self._at < len(self._entries) and (self._entries[self._at] & LOW_HALF) <= position:
            entry = self._entries[self._at]
            if entry != relative_offset << 32 | position and not self._blind:
                self._wrong(INDEX, self._at, 8, f"entry ({entry >> 32}, {entry & LOW_HALF}) leads to no batch")
            self._at += 1
        self._greatest_ms = max(self._greatest_ms, header.max_timestamp_ms)

    def _time_entries(self, relative_offset: int) -> None:
        """Entries for what lies before this offset."""
        while self._time_at < len(self._times) // TIME_ENTRY.size:
            timestamp_ms, upto = TIME_ENTRY.unpack_from(self._times, self._time_at * TIME_ENTRY.size)
            if upto > relative_offset:
                return
            if timestamp_ms != self._greatest_ms and not self._blind:
                before = f"before offset {self._segment.base_offset + upto}"
                what = f"entry says {timestamp_ms} {before}, but the greatest timestamp there is {self._greatest_ms}"
                self._wrong(TIME_INDEX, self._time_at, TIME_ENTRY.size, what)
            self._time_at += 1

    def end(self, next_offset: int, size: int) -> None:
        upto = max(next_offset, self._segment.next_base or 0)
        self._time_entries(upto - self._segment.base_offset)
        if self._blind:
            return
        if self._at < len(self._entries):
            self._wrong(INDEX, self._at, 8, f"entry leads beyond the log's {size} bytes")
        if self._time_at < len(self._times) // TIME_ENTRY.size:
            self._wrong(TIME_INDEX, self._time_at, TIME_ENTRY.size, "entry speaks of offsets beyond the segment")

    def _wrong(self, ending: str, at: int, entry_bytes: int, what: str) -> None:
        self._segment.add(ending, what, at * entry_bytes)
