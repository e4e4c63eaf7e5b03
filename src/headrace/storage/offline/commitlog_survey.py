"""A data folder of the shared layout as the next start would find it, without changing anything.

`Folder.open` believes queues that agree with their CRCs and reads the commit log from the checkpoint's position on, as
a start does; `Folder.survey` believes nothing but the commit log and reads all of it. Either way every partition has a
queue in memory then, and what is wrong is told as problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.ports.disk import Disk, File
from headrace.records.batch import BatchHeader, batches
from headrace.storage import checkpoint as sealed
from headrace.storage import folder
from headrace.storage.commitlog import checkpoint
from headrace.storage.commitlog.checkpoint import Checkpoint, LogPoint
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frames import (
    FRAME_BYTES,
    REPLACE,
    SYNCED,
    WITH_BATCHES,
    BrokenBytes,
    Frame,
    Key,
    Unsound,
    read_batches,
)
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import DAMAGED, OpenQueues
from headrace.storage.commitlog.replay import Replay, State
from headrace.storage.log import TopicPartition
from headrace.storage.offline.overlay import OverlayDisk
from headrace.storage.offline.report import CommitFileReport, Problem
from headrace.storage.scan import find, walk

INTERVAL_BYTES: Final = 4096
OPEN_QUEUES_MAX: Final = 1 << 20
"""They are in memory: no descriptor is held."""


@dataclass(slots=True)
class Stretch:
    """Neighbouring batches of one partition in one file."""

    file: File
    position: int
    size: int
    first_offset: int
    next_offset: int
    joints: list[tuple[int, int]] = field(default_factory=list)
    """Position and first offset of what was joined to it. Offsets have gaps before these alone."""

    @property
    def end(self) -> int:
        return self.position + self.size


@dataclass(slots=True)
class Partition:
    topic_partition: TopicPartition
    path: str
    topic_id: bytes
    point: LogPoint | None
    state: State
    problems: list[Problem] = field(default_factory=list)

    @property
    def start_offset(self) -> int:
        return min(self.state.start_offset, self.end_offset)

    @property
    def end_offset(self) -> int:
        return self.state.queue.end_offset


class Folder:
    def __init__(self, disk: Disk, data: str) -> None:
        self._disk = OverlayDisk(disk)
        self._open_queues = OpenQueues(OPEN_QUEUES_MAX)
        self.data = data
        self.commit_log = CommitLog(self._disk, data)
        self.commit_log.find_files()
        found = checkpoint.read(disk, data)
        self.checkpoint = found or Checkpoint()
        self.problems: list[Problem] = []
        if found is None:
            self.problems.append(Problem(f"{data}/{sealed.FILE_NAME}", None, None, "checkpoint is damaged"))
        self.is_clean = self.checkpoint.clean and self.checkpoint.position == self.commit_log.end
        """Whether it is as a clean stop leaves it: then queues speak for the whole commit log."""
        self.partitions: dict[TopicPartition, Partition] = {}
        for where, path in folder.partitions(disk, data):
            self._find(where, path)
        if self.commit_log.end < self.checkpoint.position:
            what = f"the commit log had been synced to position {self.checkpoint.position}, but ends before"
            self.problems.append(Problem(self.commit_log.path(self.commit_log.number), None, None, what))

    def _find(self, where: TopicPartition, path: str) -> None:
        point = self.checkpoint.logs.get(where)
        topic_id = folder.read_topic_id(self._disk, path)
        problems: list[Problem] = []
        if isinstance(topic_id, str):
            problems.append(Problem(f"{path}/{folder.PARTITION_FILE}", None, None, topic_id))
            topic_id = bytes.fromhex(point.topic_id) if point is not None else b""
        elif point is not None and point.topic_id != topic_id.hex():
            if self.is_clean:
                what = f"it names the topic id {topic_id.hex()}, but the checkpoint {point.topic_id}"
                problems.append(Problem(f"{path}/{folder.PARTITION_FILE}", None, None, what))
            point = None
        state = State(where, self.new_queue(path), INTERVAL_BYTES)
        self.partitions[where] = Partition(where, path, topic_id, point, state, problems)

    def new_queue(self, path: str) -> Queue:
        """An empty one; what is on disk of it is to be loaded or cleared."""
        return Queue(self._disk, self.commit_log, self._open_queues, path)

    # Opening.

    def open(self) -> None:
        position, rebuilt = self.checkpoint.position, False
        believed = self.commit_log.end >= position
        for each in self.partitions.values():
            if each.point is None:
                each.state.queue.clear_files()
                each.state.from_position = position
            elif not believed or not self._load(each, each.point):
                each.state = State(each.topic_partition, self.new_queue(each.path), INTERVAL_BYTES)
                each.state.queue.clear_files()
                rebuilt = True
        if rebuilt or not self.is_clean:
            for _ in _Survey(self, position, thorough=False).files(0 if rebuilt else position):
                pass
        self._settle()

    def _load(self, each: Partition, point: LogPoint) -> bool:
        queue = self.new_queue(each.path)
        if not queue.load(point.queue_first, point.queue_count, point.queue_crc):
            return False
        if not {number for number, _ in point.live} <= self.commit_log.sizes.keys():
            return False
        queue.end_offset, queue.size_bytes, queue.live = point.end_offset, point.size_bytes, dict(point.live)
        queue.find_front(point.start_offset)
        if not queue.speaks_from(point.start_offset):
            return False
        state = each.state = State(each.topic_partition, queue, INTERVAL_BYTES)
        state.start_offset, state.known, state.from_position = point.start_offset, True, self.checkpoint.position
        return True

    def survey(self) -> Iterator[CommitFileReport]:
        """Read every byte of the commit log, a report for each file."""
        for each in self.partitions.values():
            each.state.queue.clear_files()
        yield from _Survey(self, self.checkpoint.position, thorough=True).files(0)
        self._settle()

    def by_key(self) -> dict[Key, State]:
        return {(each.topic_id, each.topic_partition.partition): each.state for each in self.partitions.values()}

    def _settle(self) -> None:
        """What was missed is a problem."""
        for each in self.partitions.values():
            state = each.state
            for entry in list(state.queue.entries(state.start_offset)) if state.missing else ():
                if entry.size != DAMAGED or entry.offset >= entry.next_offset:
                    continue
                holes = [hole for hole in state.missing if hole[0] < entry.next_offset and entry.offset < hole[1]]
                broken = next((hole[2] for hole in holes if hole[2] is not None), None)
                first = max(entry.offset, state.start_offset)
                reason = broken.reason if broken else "no frame holds them"
                what = f"{each.topic_partition}: offsets {first} to {entry.next_offset - 1} are missing: {reason}"
                each.problems.append(Problem(self.commit_log.path(entry.number), entry.byte, first, what))

    # Reading.

    def stretches(self, each: Partition, from_offset: int) -> Iterator[Stretch]:
        """Bytes of a partition in order of offsets, from the batch that holds the offset on, neighbours joined;
        known damage is left out."""
        last: Stretch | None = None
        for entry in each.state.queue.entries(from_offset):
            if not entry.has_batches or entry.next_offset <= from_offset:
                continue
            byte, end, offset = entry.byte, entry.byte + entry.size, entry.offset
            file = self.commit_log.file(entry.number)
            if offset < from_offset:
                at = find(file, byte, end, offset, from_offset, dense=True)
                if at == end:
                    continue
                if at > byte:
                    byte, offset = at, int.from_bytes(file.pread(8, at), "big")
            if last is not None and last.file is file and last.end == byte:
                last.joints.append((byte, offset))
                last.size += end - byte
                last.next_offset = entry.next_offset
                continue
            if last is not None:
                yield last
            last = Stretch(file, byte, end - byte, offset, entry.next_offset)
        if last is not None:
            yield last

    def headers(self, each: Partition, from_offset: int) -> Iterator[tuple[File, int, BatchHeader]]:
        """CorruptBatch where headers make no sense."""
        for stretch in self.stretches(each, from_offset):
            for position, header in walk(stretch.file, stretch.position, stretch.end):
                yield stretch.file, position, header


class _Survey(Replay):
    """A replay that tells what is wrong instead of logging it, and cuts nothing on disk."""

    def __init__(self, surveyed: Folder, synced: int, *, thorough: bool) -> None:
        super().__init__(surveyed.commit_log, surveyed.by_key(), synced)
        self._partitions = {(e.topic_id, e.topic_partition.partition): e for e in surveyed.partitions.values()}
        self._thorough = thorough
        self._problems: list[Problem] = []

    def files(self, from_position: int) -> Iterator[CommitFileReport]:
        number, count = -1, 0
        for found in self._scanner.frames(from_position):
            if found.number != number:
                if number >= 0:
                    yield self._report(number, count)
                number, count = found.number, 0
            count += 1
            torn = self._broken_bytes(found) if isinstance(found, BrokenBytes) else self._frame(found)
            if torn is not None:
                self._cut(torn)
                break
        if number >= 0:
            yield self._report(number, count)

    def _report(self, number: int, count: int) -> CommitFileReport:
        problems, self._problems = self._problems, []
        path = self._commit_log.path(number)
        return CommitFileReport(path, count, self._commit_log.sizes.get(number, 0), tuple(problems))

    def _broken_bytes(self, found: BrokenBytes) -> BrokenBytes | None:
        if self._is_torn(found.number, found.byte):
            return found
        self._damaged(found)
        return None

    def _damaged(self, found: BrokenBytes) -> None:
        self._broken = found
        self._tell(found, found.reason)

    def _frame(self, frame: Frame) -> BrokenBytes | None:
        if frame.kind == SYNCED:
            self._synced = max(self._synced, frame.first_offset)
            return self._lost_before(frame) if frame.next_offset else None
        each = self._partitions.get(frame.key)
        if each is not None:
            known = len(each.state.missing)
            torn = self._take(frame)
            for first, _, where in each.state.missing[known:]:
                if where is not None and where is not self._broken:
                    path = self._commit_log.path(where.number)
                    self._problems.append(Problem(path, where.byte, first, f"{each.topic_partition}: {where.reason}"))
            return torn
        if self._thorough and frame.kind in WITH_BATCHES:
            found = read_batches(self._scanner.payload(frame), frame, INTERVAL_BYTES, -1)
            if isinstance(found, Unsound):
                start = frame.byte - FRAME_BYTES
                whose = f"partition {frame.partition} of topic {frame.topic_id.hex()}, which is not here any more"
                self._tell(BrokenBytes(frame.number, start, frame.end, ""), f"{found.reason}; it belonged to {whose}")
        return None

    def _epoch_floor(self, state: State, frame: Frame) -> int:
        """None: one wrong epoch must not condemn all that follows it. Epochs are compared with their file."""
        return -1

    def _right_epoch(self, state: State, frame: Frame) -> None:
        return None

    def _take(self, frame: Frame) -> BrokenBytes | None:
        """A frame with gaps could be told to hold any offset by one wrong bit. One that lies is not believed at all."""
        beyond = self._beyond(frame) if frame.kind == REPLACE else None
        if beyond is None:
            return super()._take(frame)
        self._broken = BrokenBytes(frame.number, beyond, frame.end, "a batch lies beyond the offsets of its frame")
        self._tell(self._broken, self._broken.reason)
        return None

    def _beyond(self, frame: Frame) -> int | None:
        """Where a batch begins that holds offsets that its frame does not."""
        at = 0
        try:
            for header, view in batches(self._scanner.payload(frame)):
                if header.next_offset > frame.next_offset:
                    return frame.byte + at
                at += len(view)
        except (CorruptBatch, InvalidRecord):
            return None
        return None

    def _cut(self, found: BrokenBytes) -> None:
        self.torn = True
        what = f"{found.reason}; it was not known to be synced: the next start may cut the log here"
        self._tell(found, what, torn=True)
        self._commit_log.cut(found.number, found.byte)

    def _tell(self, found: BrokenBytes, what: str, *, torn: bool = False) -> None:
        self._problems.append(Problem(self._commit_log.path(found.number), found.byte, None, what, torn))
