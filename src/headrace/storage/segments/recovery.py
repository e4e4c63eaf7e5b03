"""Opening a partition's folder.

After a clean stop the checkpoint says where the log ends and how large its active segment is; if the file agrees, and
no sync has failed (`rewritten`), nothing is read. Otherwise every batch from the segment that holds the recovery point
on is read and checked, and indexes are built anew. What is broken is judged by where it lies:

- below the recovery point it was synced and has been damaged since: it stays where it is and is never served, and what
  is whole before and after it is. Only when nothing whole follows, the damage is cut, so that the log can go on;
- the same holds above it as long as the kernel has run on since the batches were written: a write that died with its
  process has nothing behind it;
- else it is a torn tail there: nothing is known to have been synced, so everything from it on is cut, even if whole
  batches follow, because a hole in the offsets must not be served.

Only deletions raise a start. First segments that are gone, though nobody deleted them, are damage from where the
checkpoint had the log begin: an empty segment stands for them.

A truncation of which the checkpoint does not speak yet (see `truncation`) lowers the recovery point, and what a segment
still holds behind it is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk, read_whole
from headrace.settings.values import LogSettings
from headrace.storage import producers, rewritten, shortfall
from headrace.storage.aborted import TXN_INDEX
from headrace.storage.checkpoint import LogPoint
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory
from headrace.storage.folder import PARTITION_FILE, stem
from headrace.storage.local_log import RecoveredLog
from headrace.storage.log import Tail, TopicPartition
from headrace.storage.producers import SNAPSHOT
from headrace.storage.scan import Broken, Chain, is_cut_short, scan, walk
from headrace.storage.segments import swap, truncation
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.segment import (
    DELETED,
    GAPS,
    INDEX,
    LOG,
    RELATIVE_OFFSET_MAX,
    SUM,
    TIME_INDEX,
    Damage,
    Segment,
)
from headrace.storage.segments.segments import Segments
from headrace.storage.segments.truncation import Marker

if TYPE_CHECKING:
    from headrace.storage.segments.store import PartitionedServices

log = logging.getLogger(__name__)

NEVER = 1 << 62
LEFTOVERS = (DELETED, ".tmp", swap.CLEANED)
DIGITS = 20


@dataclass(slots=True, kw_only=True)
class RecoveredSegments(RecoveredLog):
    """What a start found of a log of segments in its folder."""

    segments: list[Segment] = field(default_factory=list)
    end_offset: int = 0
    began_ms: int = 0
    start_markers: list[int] = field(default_factory=list)
    recovered: bool = False
    durable_offset: int | None = None
    """Where what is known to be synced ends, if that is not the log's end."""
    unsynced: list[str] = field(default_factory=list)
    cuts: int = 0
    """How many truncations are told by names that were found, or by the checkpoint."""


def open_log(
    services: PartitionedServices,
    folder: str,
    topic_partition: TopicPartition,
    topic_id: bytes,
    settings: LogSettings,
    point: LogPoint | None,
    *,
    same_boot: bool = False,
) -> PartitionedLog:
    """The log in a folder that is known to be this partition's. `same_boot`: the kernel is known to have run on since
    the run before."""
    names = services.disk.list(folder)
    was_raised = point is not None and _was_raised(services.disk, folder, names, point.start_offset)
    names = _tidy(services.disk, folder, names)
    bases = _offsets(names, LOG)
    pending_cuts = _pending_cuts(services.disk, folder, names, point)
    if pending_cuts:
        services.disk.sync_folder(folder)  # before any file is cut for their sake
        point = _lowered(point, pending_cuts) if point is not None else None
    if point is not None:
        bases = _drop_empty(services.disk, folder, bases, max(point.recovery_offset, point.start_offset))
        bases = _drop_deleted(services.disk, folder, bases, point.start_offset)
        was_raised = was_raised or any(marker.anew for marker in pending_cuts)
        if bases and bases[0] > point.start_offset and not was_raised:
            bases = _stand_in(services.disk, folder, bases, point.start_offset)
    found = RecoveredSegments(snapshots=_offsets(names, SNAPSHOT), cuts=point.cuts if point else 0)
    found.aborted = _offsets(names, TXN_INDEX)
    found.start_markers = _start_markers(services.disk, folder, names, point)
    found.cuts = max([found.cuts, *(marker.number for marker in pending_cuts)])
    if point is not None:
        found.cleanings = [(cleaned_to, at_ms) for cleaned_to, at_ms in point.cleanings]
    if not bases:
        _nothing_there(services, folder, settings, found, point, pending_cuts)
        rewritten.forget(services.disk, [folder])
    else:
        cleaned, sparse = set(_offsets(names, SUM)), set(_offsets(names, GAPS))
        ends = [*bases[1:], point.end_offset if point else bases[-1]]
        for base, end in zip(bases, ends, strict=True):
            size = services.disk.size(stem(folder, base) + LOG)
            found.segments.append(
                services.old_segment(folder, settings, base, end, size, cleaned=base in cleaned, sparse=base in sparse)
            )
        _doubt_empty(topic_partition, found.segments)
        found.end_offset = max(ends[-1], bases[-1])
        active = found.segments[-1]
        same = point is not None and (point.active_base, point.active_bytes) == (active.base_offset, active.size)
        if point is None or not point.clean or not same or rewritten.MARKER in names:
            _Recovery(services, folder, topic_partition, found, point, pending_cuts, same_boot=same_boot).run()
    found.tail = shortfall.known_tail(names, found.tail)
    found.began_ms = services.clock.wall_ms()
    if point is not None and point.active_base == found.segments[-1].base_offset:
        found.began_ms = point.began_ms
    known_start = point.start_offset if point is not None else _marked_start(found.start_markers, pending_cuts)
    found.start_offset = max(found.start_offset, found.segments[0].base_offset, known_start)
    opened = PartitionedLog(services, folder, topic_partition, topic_id, settings, found)
    if found.start_offset > found.end_offset:
        opened.restart_at(found.start_offset)
    return opened


def _start_markers(disk: Disk, folder: str, names: list[str], point: LogPoint | None) -> list[int]:
    """Those that may be true; one above the checkpoint's start tells of a deletion that was not kept."""
    found = _offsets(names, truncation.START)
    for offset in found:
        if point is not None and offset > point.start_offset:
            disk.remove(stem(folder, offset) + truncation.START)
    return [offset for offset in found if point is None or offset <= point.start_offset]


def _marked_start(markers: list[int], pending_cuts: list[Marker]) -> int:
    """Where the folder says that the log begins, if it did not begin anew since."""
    return 0 if any(marker.anew for marker in pending_cuts) else max(markers, default=0)


def _pending_cuts(disk: Disk, folder: str, names: list[str], point: LogPoint | None) -> list[Marker]:
    """Truncations of which the checkpoint does not speak; markers of others go."""
    known = point.cuts if point is not None else 0
    found = truncation.markers(names)
    for marker in found:
        if marker.number <= known:
            disk.remove(f"{folder}/{marker.name}")
    return [marker for marker in found if marker.number > known]


def _lowered(point: LogPoint, pending_cuts: list[Marker]) -> LogPoint:
    """What can be relied on of a checkpoint that was taken before these truncations."""
    least = min(marker.offset for marker in pending_cuts)
    starts = [marker.offset for marker in pending_cuts if marker.anew]
    return point._replace(
        clean=False,
        recovery_offset=min(point.recovery_offset, least),
        start_offset=min([point.start_offset, *starts]),
        cleanings=[(min(cleaned_to, least), at_ms) for cleaned_to, at_ms in point.cleanings],
    )


def _epochs_known_to(pending_cuts: list[Marker]) -> int:
    """From this offset on the log alone tells its epochs, not their file."""
    return min((0 if marker.anew else marker.offset for marker in pending_cuts), default=NEVER)


def _tidy(disk: Disk, folder: str, names: list[str]) -> list[str]:
    """Finish or forget what a crash interrupted; answers the names that are left."""
    if any(name.endswith(swap.SWAP) for name in names):
        swap.finish_all(disk, folder)
        names = disk.list(folder)
    logs = {name[:DIGITS] for name in names if name.endswith(LOG)}
    beside = (INDEX, TIME_INDEX, SUM, GAPS)
    left: list[str] = []
    for name in names:
        if name.endswith(LEFTOVERS) or (name.endswith(beside) and name[:DIGITS] not in logs):
            disk.remove(f"{folder}/{name}")
        else:
            left.append(name)
    return left


def _drop_empty(disk: Disk, folder: str, bases: list[int], known_end: int) -> list[int]:
    """An empty last segment that begins before the known end cannot be what the log goes on with."""
    while len(bases) > 1 and bases[-1] < known_end and disk.size(stem(folder, bases[-1]) + LOG) == 0:
        log.warning("%s is empty, but the log went on to offset %d: removed", stem(folder, bases[-1]) + LOG, known_end)
        _remove(disk, stem(folder, bases.pop()))
    return bases


def _drop_deleted(disk: Disk, folder: str, bases: list[int], start_offset: int) -> list[int]:
    """Segments that were deleted, but came back because that was not synced; answers the others."""
    while len(bases) > 1 and bases[1] <= start_offset:
        _remove(disk, stem(folder, bases.pop(0)))
    return bases


def _was_raised(disk: Disk, folder: str, names: list[str], start_offset: int) -> bool:
    """Whether the segment that held the checkpoint's start was deleted after it: then it is there, set aside. One that
    was deleted before may be there too, and ends before that start."""
    base = max((base for base in _offsets(names, LOG + DELETED) if base <= start_offset), default=None)
    if base is None or base == start_offset:
        return base is not None
    path = stem(folder, base) + LOG + DELETED
    file = disk.open(path)
    try:
        return any(header.last_offset >= start_offset for _, header in walk(file, 0, file.size()))
    except CorruptBatch as error:
        log.error("%s, which was deleted: %s", path, error)
        return False
    finally:
        file.close()


def _stand_in(disk: Disk, folder: str, bases: list[int], start_offset: int) -> list[int]:
    disk.open(stem(folder, start_offset) + LOG, create=True, writable=True).close()
    return [start_offset, *bases]


def _doubt_empty(topic_partition: TopicPartition, segments: list[Segment]) -> None:
    """Nothing is in a segment, though others follow."""
    for segment in segments[:-1]:
        if not segment.size and segment.has_lost_all():
            segment.damage = (Damage(0, 0, segment.base_offset, segment.next_offset, "the segment is missing"),)
            log.error("%s: %s", topic_partition, segment.damaged(segment.damage[0]))


def _remove(disk: Disk, segment_stem: str) -> None:
    for ending in (LOG, INDEX, TIME_INDEX, SUM, GAPS, SNAPSHOT):
        if disk.exists(segment_stem + ending):
            disk.remove(segment_stem + ending)


def _offsets(names: Iterable[str], ending: str) -> list[int]:
    return sorted(int(name[:DIGITS]) for name in names if name.endswith(ending) and name[:DIGITS].isdigit())


def _nothing_there(
    services: PartitionedServices,
    folder: str,
    settings: LogSettings,
    found: RecoveredSegments,
    point: LogPoint | None,
    pending_cuts: list[Marker],
) -> None:
    base = max(point.recovery_offset, point.start_offset) if point else 0
    if pending_cuts:
        base = pending_cuts[-1].offset
        found.epochs = EpochHistory(services.disk, folder)
        found.epochs.truncate(_epochs_known_to(pending_cuts))
        _save(found.epochs)
        found.recovered = True  # the epochs must be safe before a checkpoint tells of the truncations
    elif base:
        log.error("%s: the segments that the checkpoint tells of are gone; the log goes on at offset %d", folder, base)
    found.segments = [services.new_segment(folder, settings, base)]
    if base:
        found.segments[0].file  # noqa: B018
    found.end_offset = base
    if point is None or not point.clean:
        found.unsynced = _perhaps_unsynced(folder, found, [])


def _perhaps_unsynced(folder: str, found: RecoveredSegments, segments: list[Segment]) -> list[str]:
    """Beside the batches: whatever a dead process may have written and not synced."""
    topic_folder = folder.rpartition("/")[0]
    paths = [segment.stem + ending for segment in segments for ending in (INDEX, TIME_INDEX)]
    paths += [f"{folder}/{name}" for name in (EPOCHS_FILE, PARTITION_FILE)]
    paths += [stem(folder, offset) + SNAPSHOT for offset in found.snapshots]
    paths += [stem(folder, offset) + TXN_INDEX for offset in found.aborted]
    return [*paths, folder, topic_folder, topic_folder.rpartition("/")[0]]


class _Recovery:
    """One pass over the segments that may not be whole."""

    def __init__(
        self,
        services: PartitionedServices,
        folder: str,
        topic_partition: TopicPartition,
        found: RecoveredSegments,
        point: LogPoint | None,
        pending_cuts: list[Marker],
        *,
        same_boot: bool,
    ) -> None:
        self._same_boot = same_boot
        self._disk = services.disk
        self._folder = folder
        self._topic_partition = topic_partition
        self._found = found
        self._safe_to = point.recovery_offset if point else 0
        self._cut_at = {marker.offset for marker in pending_cuts}
        self._epochs_known_to = _epochs_known_to(pending_cuts)
        self._epochs = EpochHistory(services.disk, folder)
        self._whole_end: int | None = None
        """Where the last whole batch ends, as far as they were read."""

    def run(self) -> None:
        self._found.recovered = True
        segments = self._found.segments
        first = len(segments) - 1
        # The segment that was cut must be looked at, though nothing of it may be above the recovery point.
        while first > 0 and segments[first].base_offset > min(self._safe_to, self._epochs_known_to - 1):
            first -= 1
        self._epochs.rebuild_from(lambda: self._epochs_in(segments[:first]))
        self._epochs.truncate(self._epochs_known_to)
        for at in range(first, len(segments)):
            segment = segments[at]
            is_last = at == len(segments) - 1
            only_empty_follow = not any(after.size for after in segments[at + 1 :])
            torn = self._check(segment, is_last, only_empty_follow)
            if torn:
                self._drop(segments[at + 1 :])
                del segments[at + 1 :]
                break
        active = segments[-1]
        self._found.end_offset = active.next_offset
        self._epochs.truncate(active.next_offset)
        _save(self._epochs)
        self._found.epochs = self._epochs
        self._check_snapshots(active.next_offset)
        self._found.durable_offset = segments[first].base_offset
        if first > 0:
            self._load_indexes(segments[first - 1])
        self._found.unsynced += _perhaps_unsynced(self._folder, self._found, segments[max(0, first - 1) :])
        there = [segment.path for segment in segments[first:] if self._disk.exists(segment.path)]
        rewritten.write_again(self._disk, self._folder, there)

    def _epochs_in(self, segments: list[Segment]) -> Iterator[tuple[int, int]]:
        """Of the segments that need no check, from the last epoch on that the file still tells."""
        known = self._epochs.entries[-1][1] if self._epochs.entries else 0
        for segment in segments:
            if segment.next_offset <= known:
                continue
            try:
                for header, _ in Segments([segment]).sound_headers(segment.base_offset):
                    yield header.leader_epoch, self._least_start(segment, header.base_offset)
                    self._whole_end = header.next_offset
            except CorruptBatch as error:
                log.error("%s: %s", self._topic_partition, error)

    def _least_start(self, segment: Segment, base_offset: int) -> int:
        """Of the epoch of a batch (see `epochs`)."""
        return min(segment.base_offset if self._whole_end is None else self._whole_end, base_offset)

    def _load_indexes(self, segment: Segment) -> None:
        """The segment may have been closed just before the crash, its indexes not yet synced."""
        try:
            segment.load_indexes()
        except CorruptBatch as error:
            log.error("%s: %s", self._topic_partition, error)

    def _check_snapshots(self, end_offset: int) -> None:
        """Those that are torn, or speak of what was cut, go."""
        whole: list[int] = []
        for offset in self._found.snapshots:
            path = stem(self._folder, offset) + SNAPSHOT
            if not self._disk.exists(path):
                continue  # it went with its segment
            if offset > end_offset or producers.decode(read_whole(self._disk, path)) is None:
                self._disk.remove(path)
            else:
                whole.append(offset)
        self._found.snapshots = whole

    def _check(self, segment: Segment, is_last: bool, only_empty_follow: bool) -> bool:
        """Read one segment; True if the log ends with it, because its tail was cut or reaches over empty ones."""
        limit = segment.next_offset
        expected, epoch, position = segment.base_offset, -1, 0
        damage: list[Damage] = []
        most = segment.base_offset + RELATIVE_OFFSET_MAX
        chain = Chain(not segment.sparse, self._epoch_in_file, segment.bases_by_position(), most)
        cut_at = limit if not is_last and limit in self._cut_at else NEVER
        segment.begin_indexes()
        torn: Broken | None = None
        for found in scan(segment.file, segment.size, expected, chain):
            if (found.expected_offset if isinstance(found, Broken) else found.header.last_offset) >= cut_at:
                self._drop_tail(segment, found.position)
                break
            if isinstance(found, Broken):
                if self._is_torn(segment, found, is_last, only_empty_follow):
                    torn = found
                    break
                next_offset = min(limit if found.next_offset is None else found.next_offset, cut_at)
                damage.append(Damage(found.position, found.end, found.expected_offset, next_offset, found.reason))
                expected, position = next_offset, found.end
                continue
            header = found.header
            segment.index_batch(header.base_offset, found.position)
            segment.greatest_ms = max(segment.greatest_ms, header.max_timestamp_ms)
            if header.leader_epoch > epoch:
                epoch = header.leader_epoch
                self._epochs.begin(epoch, self._least_start(segment, header.base_offset))
            expected, position = header.next_offset, found.position + header.size_bytes
            self._whole_end = expected
        short = not is_last and segment.is_short(expected, limit)
        if not is_last and expected < limit not in self._cut_at:
            short = short or segment.is_less_than_its_sum()
        if short and (expected < self._safe_to or (self._same_boot and not only_empty_follow)):
            damage.append(Damage(position, position, expected, limit, "the end of the segment is missing"))
            short = False
        if torn is not None:
            self._found.tail = self._judge(segment, torn, only_empty_follow)
            shortfall.note_cut(self._disk, self._folder, self._found.tail)
            self._cut(segment, torn)
        over = expected > limit and only_empty_follow
        if is_last or torn or short or over:
            segment.next_offset = expected
        segment.damage = tuple(damage)
        for bad in damage:
            log.error("%s: %s", self._topic_partition, segment.damaged(bad))
        segment.end_indexes()
        segment.trust_all()
        return torn is not None or short or over

    def _is_torn(self, segment: Segment, broken: Broken, is_last: bool, only_empty_follow: bool) -> bool:
        if broken.next_offset is None and is_last:
            return True
        if broken.expected_offset < self._safe_to:
            return False
        if not self._same_boot:
            return True
        # What is whole behind it in the same file may be a value of the batch that was being written.
        return only_empty_follow and (broken.next_offset is None or self._is_cut_short(segment, broken))

    def _judge(self, segment: Segment, torn: Broken, only_empty_follow: bool) -> Tail:
        if not only_empty_follow or (torn.next_offset is not None and not self._same_boot):
            return Tail.HOLED
        return Tail.CUT_SHORT if self._is_cut_short(segment, torn) else Tail.TORN

    def _is_cut_short(self, segment: Segment, torn: Broken) -> bool:
        dense = not segment.sparse
        return is_cut_short(segment.file, torn.position, segment.size, torn.expected_offset, dense=dense)

    def _drop_tail(self, segment: Segment, position: int) -> None:
        """What a truncation has left in the file."""
        segment.found_bytes(position)
        segment.drop_tail()

    def _epoch_in_file(self, offset: int) -> int | None:
        """The epochs file is written before the batches and synced with them, so it is right if it is whole. A batch
        of which it knows nothing was never synced, or says another epoch than it did."""
        if self._epochs.was_rebuilt or offset >= self._epochs_known_to:
            return None
        return self._epochs.epoch_at(offset)

    def _cut(self, segment: Segment, torn: Broken) -> None:
        lost = segment.size - torn.position
        say = log.error if torn.expected_offset < self._safe_to else log.warning
        say(
            "%s: %s is cut at byte %d, offset %d: %d bytes behind it are not whole (%s)%s",
            self._topic_partition,
            segment.path,
            torn.position,
            torn.expected_offset,
            lost,
            torn.reason,
            f"; offsets up to {self._safe_to - 1} had been synced" if torn.expected_offset < self._safe_to else "",
        )
        segment.file.truncate(torn.position)
        segment.found_bytes(torn.position)

    def _drop(self, segments: list[Segment]) -> None:
        for segment in segments:
            log.warning(
                "%s: %s cannot follow what was found before it and is removed", self._topic_partition, segment.path
            )
            segment.close()
            _remove(self._disk, segment.stem)


def _save(epochs: EpochHistory) -> None:
    file = epochs.save()
    if file is not None:
        file.close()
