"""What is in data folders, cut into splits for Spark's tasks. Nothing in a folder is changed.

A split is a range of offsets, not a file: a broker may run on the folder, and compaction may have put one file in the
place of several between planning and reading. So a task asks `segment_files` again and reads the file that holds its
range now, and no record is read twice or left out. Files that a crash left behind count as recovery would have it: an
unfinished swap of compaction is finished, `.cleaned`, `.deleted` and `.tmp` are nothing, and a partition folder that
was set aside (`.stray-`, `.deleted-`) is none.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from headrace.errors import DataFolderError
from headrace.ports.disk import Disk, read_whole
from headrace.spark.log_options import LogOptions
from headrace.storage import checkpoint, folder
from headrace.storage.checkpoint import LogPoint
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import read_entries
from headrace.storage.log import TopicPartition
from headrace.storage.offline.commitlog_survey import Folder
from headrace.storage.offline.verify import layout_of
from headrace.storage.segments.index import LOW_HALF, OFFSET_ENTRY_BYTES, OffsetIndex, closed_entries
from headrace.storage.segments.segment import GAPS, INDEX, LOG, NEVER, SUM, read_sum
from headrace.storage.segments.swap import DIGITS, SWAP

TOPICS_SHOWN_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class LogProblem:
    """A row of the table of problems. `fails`: rows are missing because of it, and nobody deleted them."""

    folder: str
    topic: str | None
    partition: int | None
    segment: str | None
    position: int | None
    offset: int | None
    kind: str
    reason: str
    fails: bool = False

    def __str__(self) -> str:
        where = f"{self.topic}-{self.partition}" if self.topic is not None else self.folder
        offset = f" at offset {self.offset}" if self.offset is not None else ""
        file = f", segment {self.segment}" if self.segment is not None else ""
        byte = f", byte {self.position}" if self.position is not None else ""
        return f"{where}{offset}{file}{byte} in {self.folder}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """The files of one segment by name, as they are now; `sum` only if it was compacted."""

    base_offset: int
    next_base: int | None
    log: str
    index: str | None
    sum: str | None
    sparse: bool = False
    """Whether there may be gaps between its offsets."""


@dataclass(frozen=True, slots=True)
class Split:
    """Offsets of one partition that one task reads, all in one segment, and what the checkpoint says of the log."""

    folder: str
    path: str
    topic: str
    partition: int
    first_offset: int
    next_offset: int
    start_offset: int
    synced_offset: int
    clean: bool


class PlannedRun(NamedTuple):
    """Neighbouring batches in a commit file, and the offset that comes behind them."""

    path: str
    position: int
    size: int
    first_offset: int
    next_offset: int
    joints: tuple[tuple[int, int], ...]
    """Where offsets may have a gap before them: position and offset."""


@dataclass(frozen=True, slots=True)
class SharedSplit(Split):
    """The same in the layout `shared`: where the batches lay when this was planned, and what was missing then."""

    runs: tuple[PlannedRun, ...]
    problems: tuple[LogProblem, ...]


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """A folder of the layout `shared` that one task reads for problems, all at once as its commit log is."""

    folder: str
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Plan:
    splits: list[Split]
    checks: list[FolderCheck]
    problems: list[LogProblem]


def check_folder(disk: Disk, given: str) -> str:
    """The absolute path of a data folder; DataFolderError if it is none."""
    path = os.path.abspath(given)
    if not os.path.isdir(path):
        raise DataFolderError(f"there is no folder {path} on {socket.gethostname()}; every worker has to see it")
    if not disk.exists(f"{path}/{folder.LOCK_FILE}"):
        raise DataFolderError(
            f"{path} is not the data folder of a broker; it is what `headrace serve --data` was given"
        )
    return path


def chosen(disk: Disk, options: LogOptions) -> dict[str, dict[TopicPartition, str]]:
    """Partition folders by data folder; DataFolderError for a topic or partition that no folder has."""
    found: dict[str, dict[TopicPartition, str]] = {}
    topics: set[str] = set()
    for data in (check_folder(disk, each) for each in options.folders):
        everything = dict(folder.partitions(disk, data))
        topics |= {each.topic for each in everything}
        found[data] = {each: path for each, path in everything.items() if options.chooses(each.topic, each.partition)}
    unknown = [topic for topic in options.topics if topic not in topics]
    if unknown or (options.pattern and not any(found.values())):
        wanted = f"no topic {unknown[0]!r}" if unknown else f"no topic that {options.pattern!r} matches"
        shown = ", ".join(sorted(topics)[:TOPICS_SHOWN_MAX]) or "nothing"
        raise DataFolderError(f"{' and '.join(found)} has {wanted}; there is {shown}")
    numbers = {each.partition for partitions in found.values() for each in partitions}
    for number in options.partitions:
        if number not in numbers:
            raise DataFolderError(f"{' and '.join(found)} has no partition {number} of what was asked for")
    return found


def plan(disk: Disk, options: LogOptions) -> Plan:
    planned = Plan([], [], [])
    for data, partitions in chosen(disk, options).items():
        if layout_of(disk, data) == folder.SHARED:
            if options.table == "problems":
                planned.checks.append(FolderCheck(data, frozenset(partitions)))
            else:
                _plan_shared(disk, data, partitions, options, planned)
            continue
        points = checkpoint.read(disk, data)
        if points is None:
            damaged = f"{checkpoint.FILE_NAME} is damaged: records that were deleted inside a segment are rows again"
            planned.problems.append(LogProblem(data, None, None, None, None, None, "checkpoint", damaged))
        for topic_partition, path in partitions.items():
            _plan_partition(disk, data, path, topic_partition, (points or {}).get(topic_partition), options, planned)
    return planned


def _plan_shared(
    disk: Disk, data: str, partitions: dict[TopicPartition, str], options: LogOptions, planned: Plan
) -> None:
    """Splits of about the wanted size; a long run of batches is not cut."""
    found = Folder(disk, data)
    found.open()
    for where, path in partitions.items():
        each = found.partitions.get(where)
        if each is None:
            continue  # it was created just now
        problems = tuple(
            LogProblem(data, where.topic, where.partition, None, told.position, told.offset, "missing", told.what, True)
            for told in each.problems
            if told.offset is not None
        )
        runs: list[PlannedRun] = []
        size, first = 0, each.start_offset
        base = (data, path, where.topic, where.partition)
        state = (each.start_offset, each.end_offset, found.is_clean)
        for stretch in found.stretches(each, each.start_offset):
            if size and size + stretch.size > options.split_bytes:
                following = max(first, stretch.first_offset)
                planned.splits.append(SharedSplit(*base, first, following, *state, tuple(runs), problems))
                runs, size, first, problems = [], 0, following, ()
            lies = (stretch.file.path, stretch.position, stretch.size)
            offsets = (stretch.first_offset, stretch.next_offset, tuple(stretch.joints))
            runs.append(PlannedRun(*lies, *offsets))
            size += stretch.size
        if runs or problems:
            planned.splits.append(SharedSplit(*base, first, each.end_offset, *state, tuple(runs), problems))


def _plan_partition(
    disk: Disk,
    data: str,
    path: str,
    where: TopicPartition,
    point: LogPoint | None,
    options: LogOptions,
    planned: Plan,
) -> None:
    def tell(kind: str, reason: str, offset: int | None = None) -> None:
        planned.problems.append(LogProblem(data, where.topic, where.partition, None, None, offset, kind, reason))

    try:
        topic_id = folder.read_topic_id(disk, path)
        _, wrong = read_entries(disk, f"{path}/{EPOCHS_FILE}")
        segments = [each for each in segment_files(disk, path) if disk.size(f"{path}/{each.log}")]
    except FileNotFoundError:
        return  # the topic was deleted just now
    if isinstance(topic_id, str):
        tell("partition", topic_id)
    elif point is not None and point.topic_id != topic_id.hex():
        point = None  # it speaks of a topic that had the same name
    if wrong:
        tell("epochs", f"{EPOCHS_FILE} {wrong}")
    start = point.start_offset if point is not None else 0
    synced = max(point.recovery_offset, point.end_offset if point.clean else 0) if point is not None else 0
    if not segments and start < synced:
        tell("missing", f"there is no segment, but the log was synced up to offset {synced}", start)
    for nth, segment in enumerate(segments):
        last = nth + 1 == len(segments)
        end = NEVER if last or segment.next_base is None else segment.next_base
        if end <= start:
            continue
        clean = point is not None and point.clean
        bounds = [max(segment.base_offset, start), *_cuts(disk, path, segment, start, options.split_bytes), end]
        for first, following in pairwise(bounds):
            planned.splits.append(
                Split(data, path, where.topic, where.partition, first, following, start, synced, clean)
            )


def _cuts(disk: Disk, path: str, segment: SegmentFile, start: int, split_bytes: int) -> list[int]:
    """Offsets that cut a large segment into pieces of about that size. A wrong index makes them uneven, no more."""
    try:
        size = disk.size(f"{path}/{segment.log}")
        entries = index_entries(disk, path, segment) if size > split_bytes else memoryview(b"").cast("Q")
    except FileNotFoundError:
        return []
    cuts: list[int] = []
    for target in range(split_bytes, size, split_bytes):
        at = bisect_left(entries, target, key=_position)
        if at < len(entries):
            cuts.append(segment.base_offset + (entries[at] >> 32))
    return sorted({cut for cut in cuts if cut > max(start, segment.base_offset)})


def segment_files(disk: Disk, path: str) -> list[SegmentFile]:
    """The segments of a partition folder in order."""
    names = set(disk.list(path))
    logs = {int(name[:DIGITS]): name for name in names if name.endswith(LOG) and name[:DIGITS].isdigit()}
    for name in names:
        if name.endswith(LOG + SWAP):
            base = int(name[:DIGITS])
            logs[base] = name
            for replaced in [old for old in logs if base < old < _swap_end(disk, path, name, names)]:
                del logs[replaced]
    bases = sorted(logs)
    found: list[SegmentFile] = []
    for base, following in zip(bases, [*bases, None][1:], strict=True):
        swapped = logs[base].endswith(SWAP)
        index, total = (_beside(f"{base:020d}{ending}", names, swapped) for ending in (INDEX, SUM))
        sparse = total is not None or f"{base:020d}{GAPS}" in names
        found.append(SegmentFile(base, following, logs[base], index, total, sparse))
    return found


def _beside(name: str, names: set[str], swapped: bool) -> str | None:
    """The file of that name, or the one that is about to take it."""
    if swapped and name + SWAP in names:
        return name + SWAP
    return name if name in names else None


def _swap_end(disk: Disk, path: str, log: str, names: set[str]) -> int:
    name = _beside(log[:DIGITS] + SUM, names, swapped=True)
    try:
        found = read_sum(disk, f"{path}/{name}") if name else None
    except FileNotFoundError:
        found = None
    return found.next_offset if found else 0


def index_entries(disk: Disk, path: str, segment: SegmentFile) -> memoryview:
    """Entries `relative offset << 32 | position` in rising order. Only those of a closed index were checked."""
    data = read_whole(disk, f"{path}/{segment.index}") if segment.index else b""
    entries = closed_entries(data, OffsetIndex, disk.size(f"{path}/{segment.log}"))
    if entries is None:
        # An index that is being written: entries up to the zeros.
        entries = data[: len(data) // OFFSET_ENTRY_BYTES * OFFSET_ENTRY_BYTES].rstrip(b"\0")
        entries += bytes(-len(entries) % OFFSET_ENTRY_BYTES)
    return memoryview(entries).cast("Q")


def entry_before(entries: memoryview, relative_offset: int) -> tuple[int, int]:
    """Relative offset and position of the last entry that is not above the offset; (0, 0) if there is none."""
    at = bisect_right(entries, relative_offset << 32 | LOW_HALF)
    entry = entries[at - 1] if at else 0
    return entry >> 32, entry & LOW_HALF


def covering(disk: Disk, path: str, offset: int) -> tuple[SegmentFile, bool] | None:
    """The segment that has the offset now, and whether nothing was written after it; None if it was deleted."""
    segments = segment_files(disk, path)
    at = bisect_right(segments, offset, key=_base) - 1
    if at < 0:
        return None
    newest = not any(disk.size(f"{path}/{later.log}") for later in segments[at + 1 :])
    return segments[at], newest


def _position(entry: int) -> int:
    return entry & LOW_HALF


def _base(segment: SegmentFile) -> int:
    return segment.base_offset
