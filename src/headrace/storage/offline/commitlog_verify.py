"""Whether a data folder of the shared layout is whole. Nothing is changed.

First every byte of the commit log is read: headers of frames and batches by their CRCs, offsets by their chain. Then,
for each partition, what is wanted of it is compared with the epochs file and, after a clean stop, with the queue: an
entry must lead to the batches that it says, which tells a wrong offset where a chain has gaps. Queues are compared with
their CRCs; the spare room of an active queue file, and whatever is no longer wanted, can hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk, File, read_whole
from headrace.records.batch import BatchHeader
from headrace.storage import producers
from headrace.storage.commitlog.checkpoint import LogPoint
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import QUEUE, Entry, OpenQueues, QueueFile
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory, read_entries
from headrace.storage.log import TopicPartition
from headrace.storage.offline.commitlog_survey import Folder, Partition
from headrace.storage.offline.overlay import OverlayDisk
from headrace.storage.offline.report import CommitFileReport, DumpedBatch, PartitionReport, Problem, SegmentReport
from headrace.storage.offline.transactions import TransactionSurvey, index_faults
from headrace.storage.producers import SNAPSHOT
from headrace.storage.scan import Broken, Chain, scan, walk


def reports(disk: Disk, data: str) -> Iterator[CommitFileReport | PartitionReport]:
    """One for each file of the commit log, then one for each partition."""
    found = Folder(disk, data)
    yield from found.survey()
    for each in found.partitions.values():
        yield _PartitionCheck(disk, found, each).report()


def dump(disk: Disk, data: str, only: TopicPartition | None = None) -> Iterator[DumpedBatch | Problem]:
    """Every whole batch that is wanted, in order, and a Problem where there is none."""
    found = Folder(disk, data)
    found.open()
    for where, each in found.partitions.items():
        if only is not None and where != only:
            continue
        yield from each.problems
        for stretch in found.stretches(each, each.start_offset):
            for part in scan(stretch.file, stretch.end, stretch.first_offset, Chain(dense=False), stretch.position):
                if isinstance(part, Broken):
                    yield Problem(stretch.file.path, part.position, part.expected_offset, part.reason)
                else:
                    yield DumpedBatch(where, stretch.file.path, part.position, part.header)


def _content(header: BatchHeader) -> tuple[int, int, int]:
    """Tells batches apart. A rewritten one may lie in two places with the same content, if its log was truncated before
    the queue led to the copy."""
    return header.base_offset, header.size_bytes, header.crc


@dataclass(slots=True)
class _Segment:
    """What a commit file holds of a partition without another one between."""

    path: str
    base_offset: int
    next_offset: int = 0
    batches: int = 0
    records: int = 0
    size_bytes: int = 0
    has_gaps: bool = False

    def report(self) -> SegmentReport:
        return SegmentReport(
            self.path, self.base_offset, self.next_offset, self.batches, self.records, self.size_bytes, self.has_gaps
        )


@dataclass(slots=True)
class _PartitionCheck:
    disk: Disk
    folder: Folder
    partition: Partition
    problems: list[Problem] = field(default_factory=list)
    segments: list[_Segment] = field(default_factory=list)
    transactions: TransactionSurvey = field(default_factory=TransactionSurvey)

    def report(self) -> PartitionReport:
        each, self.problems = self.partition, self.partition.problems
        epochs = self._epochs()
        queue = self._queue()
        try:
            for file, position, header in self.folder.headers(each, each.start_offset):
                self._batch(file, position, header, epochs)
        except CorruptBatch as error:
            self.problems.append(Problem(each.path, None, None, str(error)))
        if queue is not None and self.folder.is_clean and not self.problems:
            self._compare_with_queue(queue)
        self._snapshots()
        self._compare_with_checkpoint()
        if not self.problems:
            # Whether a partition was compacted, its frames do not tell: what was taken is not looked for.
            for path, what in index_faults(
                self.disk, each.path, self.transactions, each.start_offset, each.end_offset, compacted=True
            ):
                self._add(path, what)
        return PartitionReport(
            each.topic_partition,
            each.path,
            each.topic_id or None,
            each.start_offset,
            each.end_offset,
            tuple(segment.report() for segment in self.segments),
            tuple(self.problems),
            self.transactions,
        )

    def _add(self, path: str, what: str, position: int | None = None, offset: int | None = None) -> None:
        self.problems.append(Problem(path, position, offset, what))

    def _batch(self, file: File, position: int, header: BatchHeader, epochs: EpochHistory | None) -> None:
        segment = self.segments[-1] if self.segments else None
        if segment is None or segment.path != file.path:
            segment = _Segment(file.path, header.base_offset)
            self.segments.append(segment)
        elif header.base_offset != segment.next_offset:
            segment.has_gaps = True
        segment.next_offset = header.next_offset
        segment.batches += 1
        segment.records += header.record_count
        segment.size_bytes += header.size_bytes
        self.transactions.add(file, position, header)
        right = epochs.epoch_at(header.base_offset) if epochs is not None else None
        if right is not None and right != header.leader_epoch:
            what = (
                f"leader epoch is {header.leader_epoch}, but offset {header.base_offset} was written in epoch {right}"
            )
            self._add(file.path, f"{self.partition.topic_partition}: {what}", position, header.base_offset)

    # Beside the commit log.

    def _epochs(self) -> EpochHistory | None:
        """The epoch history if it is whole, for batches to be compared with."""
        path = f"{self.partition.path}/{EPOCHS_FILE}"
        entries, wrong = read_entries(self.disk, path)
        if wrong:
            self._add(path, wrong)
            return None
        return EpochHistory(self.disk, self.partition.path) if entries else None

    def _snapshots(self) -> None:
        for name in sorted(self.disk.list(self.partition.path)):
            path = f"{self.partition.path}/{name}"
            if name.endswith(SNAPSHOT) and producers.decode(read_whole(self.disk, path)) is None:
                self._add(path, "snapshot of producers is damaged; the log itself is read instead")

    def _queue(self) -> Queue | None:
        """The queue as it is on disk, if its files are whole as far as the checkpoint knows them."""
        each, point = self.partition, self.partition.point
        if point is None:
            return None
        queue = Folder(self.disk, self.folder.data).new_queue(each.path)
        if queue.load(point.queue_first, point.queue_count, point.queue_crc):
            queue.end_offset = point.end_offset
            queue.find_front(point.start_offset)
            if queue.speaks_from(point.start_offset) or not self.folder.is_clean:
                return queue
        self._add(
            self._wrong_file(point), "queue is missing or does not agree with its CRC; the next start rebuilds it"
        )
        return None

    def _wrong_file(self, point: LogPoint) -> str:
        """Which file of the queue is missing or not whole; the folder if its first one is, whose name nobody knows."""
        each, overlay = self.partition, OverlayDisk(self.disk)
        active = f"{point.queue_first:020d}{QUEUE}"
        names = sorted(name for name in self.disk.list(each.path) if name.endswith(QUEUE) and name[:-6].isdigit())
        if names and int(names[0][:-6]) > point.start_offset:
            return each.path
        for name, following in pairwise([*(name for name in names if name < active), active]):
            file = QueueFile(overlay, OpenQueues(1), each.path, int(name[:-6]))
            if not file.load(None):
                return file.path
            expected = f"{file.next_first_offset:020d}{QUEUE}"
            if expected != following:
                return f"{each.path}/{expected}"
        return f"{each.path}/{active}"

    def _compare_with_queue(self, queue: Queue) -> None:
        wanted = self.folder.headers(self.partition, self.partition.start_offset)
        for entry in queue.entries(self.partition.start_offset):
            if not entry.has_batches:
                continue
            try:
                wrong = self._compare(entry, wanted)
            except (CorruptBatch, FileNotFoundError) as error:
                wrong = str(error)
            if wrong:
                path = self.folder.commit_log.path(entry.number)
                self._add(path, f"{self.partition.topic_partition}: {wrong}", entry.byte, entry.offset)
                return
        left = next(wanted, None)
        if left is not None:
            self._add(left[0].path, "the queue does not lead to this batch", left[1], left[2].base_offset)

    def _compare(self, entry: Entry, wanted: Iterator[tuple[File, int, BatchHeader]]) -> str:
        """What is wrong with an entry, if anything is; takes the batches that it leads to."""
        file, expected, greatest_ms = self.folder.commit_log.file(entry.number), entry.offset, -1
        start = self.partition.start_offset
        for position, header in walk(file, entry.byte, entry.byte + entry.size):
            if header.base_offset != expected:
                return f"base offset is {header.base_offset} at byte {position}, but the queue has {expected} here"
            expected, greatest_ms = header.next_offset, max(greatest_ms, header.max_timestamp_ms)
            if expected <= start:
                continue
            found = next(wanted, None)
            if found is None or _content(found[2]) != _content(header):
                return f"the queue leads to offset {header.base_offset} here, the commit log does not"
        if expected > entry.next_offset or entry.greatest_ms < greatest_ms:
            return f"the queue's entry says offset {entry.next_offset} and time {entry.greatest_ms}, which is too low"
        return ""

    def _compare_with_checkpoint(self) -> None:
        each, point, is_clean = self.partition, self.partition.point, self.folder.is_clean
        if point is None:
            return
        path = self.segments[-1].path if self.segments else each.path
        if not each.state.known and point.end_offset:  # a log that never held anything need not be told of
            self._add(path, f"nothing of {each.topic_partition} is in the commit log")
        elif is_clean and point.end_offset != each.end_offset:
            what = f"log ends at offset {each.end_offset}, but ended at {point.end_offset} at the clean stop"
            self._add(path, f"{each.topic_partition}: {what}")
        elif is_clean and point.start_offset != each.start_offset:
            what = f"log starts at offset {each.start_offset}, but started at {point.start_offset} at the clean stop"
            self._add(path, f"{each.topic_partition}: {what}")
