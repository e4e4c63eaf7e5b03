"""A partition's log in the `partitioned` layout: a folder of segments, of which the newest is written.

    <data>/<topic>/<topic>-<n>/partition                     the topic's id and the format's version (see `folder`)
                               leader-epochs                  see `epochs`
                               <20-digit offset>.log          the batches from that offset on (see `segment`)
                               <20-digit offset>.index        see `index`
                               <20-digit offset>.timeindex    see `index`
                               <20-digit offset>.snapshot     idempotent producers before that offset (see `producers`)
                               <20-digit offset>.sum          of a compacted segment (see `sums`)

`append` stages; `write` puts all that was staged into the file with one call, or takes it all back. What was written
is in the page cache and outlives the process; what lies below `durable_offset` was synced and outlives the machine.
"""

from __future__ import annotations

import errno
import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headrace.errors import CorruptBatch, HeadraceError, OffsetOutOfRange, StorageFailed, StorageFull
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, FileSlice
from headrace.records.batch import BatchHeader
from headrace.settings import LogSettings
from headrace.storage import producers, search
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import EpochEnd, ReadResult, TimedOffset, TopicPartition
from headrace.storage.segment import INDEX, LOG, RELATIVE_OFFSET_MAX, SNAPSHOT, SUM, TIME_INDEX, OpenSegments, Segment

log = logging.getLogger(__name__)

NOTHING: Final = ReadResult((), 0)
PLACES_MAX: Final = 16
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DELETED: Final = ".deleted"

_STAMP = struct.Struct(">qii").pack_into


@dataclass(slots=True)
class Surroundings:
    """What the logs of one store share."""

    disk: Disk
    clock: Clock
    open_segments: OpenSegments
    staged: dict[PartitionedLog, None]
    checkpoint_soon: Callable[[], None]
    segment_began: Callable[[PartitionedLog], None]
    discarded: Callable[[list[str], int], None]
    """Paths to remove after so many milliseconds."""


class _Mark(NamedTuple):
    """Where a turn began, to go back to when its write fails."""

    end_offset: int
    size: int
    index_count: int
    times_count: int
    next_index_at: int
    greatest_ms: int
    epochs: int


@dataclass(slots=True)
class Found:
    """What opening a folder found out about its log."""

    segments: list[Segment]
    start_offset: int
    end_offset: int
    cleanings: list[tuple[int, int]] = field(default_factory=list)
    began_ms: int = 0
    epochs: EpochHistory | None = None
    producers: dict[int, producers.ProducerState] | None = None
    snapshots: list[int] = field(default_factory=list)
    recovered: bool = False
    durable_offset: int | None = None
    unsynced: list[str] = field(default_factory=list)


class PartitionedLog:
    """See `storage.log.Log`."""

    def __init__(
        self,
        around: Surroundings,
        folder: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        found: Found,
    ) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.folder = folder
        self.offline: HeadraceError | None = None
        self.start_offset = found.start_offset
        self.end_offset = self.written_offset = found.end_offset
        self.durable_offset = found.end_offset if found.durable_offset is None else found.durable_offset
        self.sync_asked_offset = found.end_offset
        self.truncations = 0
        self.stopped = False
        self.cleanings = found.cleanings
        self.began_ms = found.began_ms
        self.snapshots = found.snapshots
        self.recovered = found.recovered
        self._around = around
        self._disk = around.disk
        self.segments = found.segments
        self._active = self.segments[-1]
        self._bases = [segment.base_offset for segment in self.segments]
        self.size_bytes = sum(segment.size for segment in self.segments)
        self._staged: list[memoryview] = []
        self._mark: _Mark | None = None
        self._refusal: HeadraceError | None = None
        self._places: dict[int, tuple[Segment, int]] = {}
        self._unsynced: dict[str, None] = dict.fromkeys(found.unsynced)
        self.epochs = found.epochs or EpochHistory(self._disk, folder)
        self.epochs.rebuild_from(self._epochs_in_log)
        self._epoch: int | None = None
        self.producers = producers.ProducerTable(around.clock.wall_ms, self._load_producers)
        if found.producers is not None:
            self.producers.replace(found.producers)
        self.settings = settings

    def __repr__(self) -> str:
        return f"<log {self.topic_partition} {self.start_offset}..{self.end_offset}>"

    @property
    def settings(self) -> LogSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: LogSettings) -> None:
        self._settings = settings
        self._segment_bytes = settings.segment_bytes

    @property
    def cleaned_to(self) -> int:
        """Everything before it has been compacted at least once."""
        return self.cleanings[-1][0] if self.cleanings else 0

    @property
    def active(self) -> Segment:
        return self._active

    # Appending.

    def append(self, batch: memoryview, header: BatchHeader, epoch: int) -> int:
        base = self.end_offset
        self._stage(batch, header, base, epoch)
        return base

    def append_copied(self, batch: memoryview, header: BatchHeader) -> None:
        if header.base_offset < self.end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: a batch with offset {header.base_offset} cannot follow {self.end_offset - 1}"
            )
        self._stage(batch, header, header.base_offset, header.leader_epoch)

    def _stage(self, batch: memoryview, header: BatchHeader, base: int, epoch: int) -> None:
        if self._refusal is not None:
            raise self._refusal
        segment = self._active
        size = header.size_bytes
        position = segment.size
        last = base + header.last_offset_delta
        if position and (position + size > self._segment_bytes or last - segment.base_offset > RELATIVE_OFFSET_MAX):
            segment = self._roll_in_turn(base)
            position = 0
        if not self._staged:
            self._begin_turn(segment)
        if position >= segment.next_index_at:
            segment = self._index(segment, base, position)
            position = segment.size
        _STAMP(batch, 0, base, size - 12, epoch)
        self._staged.append(batch)
        segment.size = position + size
        segment.greatest_ms = max(segment.greatest_ms, header.max_timestamp_ms)
        if epoch != self._epoch:
            self.epochs.begin(epoch, base)
            self._epoch = epoch
        if header.producer_id >= 0:
            self.producers.appended(header, base)
        self.end_offset = segment.next_offset = last + 1

    def _begin_turn(self, segment: Segment) -> None:
        """Everything that could fail for lack of room or files is done here, before anything has changed."""
        try:
            segment.file  # noqa: B018
            segment.load_indexes()
            self.producers.load()
        except OSError as error:
            raise self._refuse(error) from error
        if segment.size == 0:
            self.began_ms = self._around.clock.wall_ms()
            self._around.segment_began(self)
        self._mark = _Mark(
            self.end_offset,
            segment.size,
            segment.index.count,
            segment.times.count,
            segment.next_index_at,
            segment.greatest_ms,
            len(self.epochs.entries),
        )
        self._around.staged[self] = None

    def _index(self, segment: Segment, base: int, position: int) -> Segment:
        """An index entry for the batch about to be staged; a full index ends the segment."""
        if segment.index.full:
            segment = self._roll_in_turn(base)
            self._begin_turn(segment)
            return segment
        try:
            segment.add_entry(base - segment.base_offset, position)
        except OSError as error:
            if not self._staged:
                raise self._refuse(error) from error
            raise self._undo(error) from error
        return segment

    def _roll_in_turn(self, base: int) -> Segment:
        if self._staged and (error := self.write()) is not None:
            self._refusal = self._refusal or error
            raise error
        try:
            self.roll(base)
        except OSError as error:
            raise self._refuse(error) from error
        return self._active

    def write(self) -> HeadraceError | None:
        """Write what was staged; or take it back and answer why."""
        staged = self._staged
        if not staged:
            error, self._refusal = self._refusal, self.offline
            return error
        segment = self._active
        try:
            segment.file.pwritev(staged, segment.written)
        except OSError as error:
            refusal = self._undo(error)
            self._refusal = self.offline
            return refusal
        self._staged = []
        self.size_bytes += segment.size - segment.written
        segment.written = segment.size
        self.written_offset = self.end_offset
        self.producers.settled()
        if self._mark is not None and len(self.epochs.entries) != self._mark.epochs:
            self.save_epochs()
        return None

    def _undo(self, error: OSError) -> HeadraceError:
        """Go back to where the turn began; appends are refused until the store has reported it."""
        mark, segment = self._mark, self._active
        assert mark is not None
        self._staged = []
        segment.size = segment.written
        segment.next_offset = self.end_offset = mark.end_offset
        segment.index.count = min(segment.index.count, mark.index_count)
        segment.times.count = min(segment.times.count, mark.times_count)
        segment.next_index_at = mark.next_index_at
        segment.greatest_ms = mark.greatest_ms
        self.epochs.cut(mark.epochs)
        self._epoch = None
        self.producers.take_back()
        refusal = self._refuse(error)
        try:
            segment.file.truncate(segment.written)
        except OSError as second:
            refusal = self.fail(second)
        self._refusal = refusal
        return refusal

    def _refuse(self, error: OSError) -> HeadraceError:
        if error.errno in NO_ROOM:
            return StorageFull(
                f"{self.topic_partition}: no room to write {self._active.path}: free some space on its file system; "
                "nothing is lost, and writing goes on when there is room"
            )
        return self.fail(error)

    def fail(self, error: OSError) -> HeadraceError:
        """Take the log offline: what its files hold is not known any more."""
        self.offline = self._refusal = StorageFailed(
            f"{self.topic_partition}: {error.filename or self._active.path}: {error.strerror}: the log is offline; "
            "mend the disk and restart the broker"
        )
        log.error("%s", self.offline)
        return self.offline

    # Segments.

    def roll(self, base_offset: int | None = None) -> None:
        """Close the active segment and begin the next. Nothing may be staged."""
        assert not self._staged
        old = self._active
        base = self.end_offset if base_offset is None else base_offset
        old.load_indexes()
        old.next_offset = base
        new = self.new_segment(base)
        new.file  # noqa: B018
        old.end_indexes()
        self.write_snapshot(base)
        for path in (old.stem + INDEX, old.stem + TIME_INDEX, self.folder):
            self._unsynced[path] = None
        self._add(new)

    def new_segment(self, base_offset: int) -> Segment:
        return Segment(
            self._disk,
            self._around.open_segments,
            self.folder,
            base_offset,
            next_offset=base_offset,
            size=0,
            index_bytes=self._settings.segment_index_bytes,
            interval_bytes=self._settings.index_interval_bytes,
            fresh=True,
        )

    def cleaned_segment(self, base_offset: int, next_offset: int, size: int) -> Segment:
        """A segment that compaction has just written."""
        segment = Segment(
            self._disk,
            self._around.open_segments,
            self.folder,
            base_offset,
            next_offset=next_offset,
            size=size,
            index_bytes=self._settings.segment_index_bytes,
            interval_bytes=self._settings.index_interval_bytes,
            cleaned=True,
        )
        segment.trust_all()
        return segment

    def _add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._bases.append(segment.base_offset)
        self._active = segment
        self._mark = None

    def write_snapshot(self, offset: int) -> None:
        """Producer states before the offset; older snapshots that no segment begins with go."""
        if not self.producers.loaded:
            return  # nothing was appended since the last one
        path = f"{self.folder}/{offset:020d}{SNAPSHOT}"
        file = self._disk.open(path, create=True, writable=True)
        content = producers.encode(self.producers.states)
        file.truncate(0)
        file.pwritev([content], 0)
        file.close()
        self._unsynced[path] = None
        bases = {*self._bases, offset}
        for old in [snapshot for snapshot in self.snapshots if snapshot not in bases]:
            self.snapshots.remove(old)
            self._remove(f"{self.folder}/{old:020d}{SNAPSHOT}")
        if offset not in self.snapshots:
            self.snapshots.append(offset)

    def _load_producers(self) -> dict[int, producers.ProducerState]:
        """From the newest whole snapshot that is not beyond the end, and the headers behind it."""
        states: dict[int, producers.ProducerState] = {}
        from_offset = self.start_offset
        for offset in sorted((s for s in self.snapshots if s <= self.written_offset), reverse=True):
            found = self._read_snapshot(offset)
            if found is not None:
                states, from_offset = found, offset
                break
        if from_offset < self.written_offset:
            now_ms = self._around.clock.wall_ms()
            producers.replay(states, (header for header, _ in self._sound_headers(from_offset)), now_ms)
        return states

    def _read_snapshot(self, offset: int) -> dict[int, producers.ProducerState] | None:
        path = f"{self.folder}/{offset:020d}{SNAPSHOT}"
        try:
            file = self._disk.open(path)
        except FileNotFoundError:
            return None
        states = producers.decode(file.pread(file.size(), 0))
        if states is None:
            log.warning("%s: not whole: left out, the log itself is read instead", path)
        return states

    def _epochs_in_log(self) -> Iterator[tuple[int, int]]:
        for header, _ in self._sound_headers(self.start_offset):
            yield header.leader_epoch, header.base_offset

    def save_epochs(self) -> None:
        file = self.epochs.save()
        if file is not None:
            file.close()
            self._unsynced[f"{self.folder}/{EPOCHS_FILE}"] = None
            self._unsynced[self.folder] = None

    def drop_segments(self, count: int) -> None:
        """Remove the oldest segments. Reads under way keep their files."""
        self._discard(self.segments[:count])
        del self.segments[:count]
        del self._bases[:count]
        self._places.clear()

    def _discard(self, segments: list[Segment]) -> None:
        paths: list[str] = []
        for segment in segments:
            self.size_bytes -= segment.written
            segment.close()
            for ending in (INDEX, TIME_INDEX, SNAPSHOT, SUM, LOG):
                path = segment.stem + ending
                if self._disk.exists(path):
                    self._disk.rename(path, path + DELETED)
                    paths.append(path + DELETED)
            if segment.base_offset in self.snapshots:
                self.snapshots.remove(segment.base_offset)
        self._unsynced[self.folder] = None
        self._around.discarded(paths, self._settings.file_delete_delay_ms)

    def swap_segments(self, first: int, count: int, replacement: Segment) -> None:
        """Compaction has put one segment in the place of some."""
        for segment in self.segments[first : first + count]:
            self.size_bytes -= segment.written
            segment.close()
        self.segments[first : first + count] = [replacement]
        self._bases[first : first + count] = [replacement.base_offset]
        inside = range(replacement.base_offset + 1, replacement.next_offset)
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot not in inside]
        self.size_bytes += replacement.written
        self._places.clear()

    def _remove(self, path: str) -> None:
        if self._disk.exists(path):
            self._disk.remove(path)

    # Reading.

    def read(self, offset: int, max_bytes: int, limit_offset: int) -> ReadResult:
        limit = min(limit_offset, self.written_offset)
        if offset < self.start_offset or offset > self.end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is not in the log, which holds "
                f"{self.start_offset} to {self.end_offset - 1}"
            )
        if offset >= limit:
            return NOTHING
        try:
            return self._read(offset, max_bytes, limit)
        except OSError as error:
            raise StorageFailed(f"{self.topic_partition}: {error.filename}: {error.strerror}") from error

    def _read(self, offset: int, max_bytes: int, limit: int) -> ReadResult:
        place = self._places.get(offset)
        segment, position = place if place is not None else self._locate(offset)
        end = self._end_in(segment, limit)
        if position + max_bytes < end:
            end = self._cut_end(segment, position, max_bytes)
        sound = segment.sound_end(position, end, offset, self.epochs, exact=place is not None)
        slices = [FileSlice(segment.file, position, sound - position)]
        count = sound - position
        while sound == segment.written and segment.next_offset < limit and count < max_bytes:
            segment = self.segments[bisect_right(self._bases, segment.base_offset)]
            end = self._end_in(segment, limit)
            if max_bytes - count < end:
                end = self._cut_end(segment, 0, max_bytes - count, whole_first=False)
            try:
                sound = segment.sound_end(0, end, segment.base_offset, self.epochs, exact=True)
            except CorruptBatch:
                break  # the next read begins there, and says so
            if sound:
                slices.append(FileSlice(segment.file, 0, sound))
                count += sound
        return ReadResult(tuple(slices), count)

    def _end_in(self, segment: Segment, limit: int) -> int:
        """Where the limit, which is the boundary of a batch, lies in the segment."""
        if limit >= segment.next_offset or limit == self.written_offset:
            end = segment.written
        else:
            place = self._places.get(limit)
            end = place[1] if place is not None and place[0] is segment else segment.locate(limit)
        self._remember(limit, segment, end)
        return end

    def _cut_end(self, segment: Segment, position: int, max_bytes: int, *, whole_first: bool = True) -> int:
        """Where to cut for the byte limit: where an index entry lies, if the first batch fits before it, so that
        the next read finds its place without a search."""
        segment.load_indexes()
        first_end = position
        if whole_first:
            length = segment.file.pread(4, position + 8)
            first_end = position + int.from_bytes(length, "big") + 12
        relative_offset, boundary = segment.index.at_or_below_position(position + max_bytes)
        if boundary > position and boundary >= first_end:
            self._remember(segment.base_offset + relative_offset, segment, boundary)
            return boundary
        return max(first_end, position + max_bytes)

    def _locate(self, offset: int) -> tuple[Segment, int]:
        at = bisect_right(self._bases, offset) - 1
        segment = self.segments[max(at, 0)]
        while True:
            position = segment.locate(offset)
            if position < segment.written or segment is self._active:
                return segment, position
            at += 1
            segment = self.segments[at]

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        if position == segment.written and segment is not self._active:
            return  # that offset begins the next segment, or the one after
        places = self._places
        if len(places) >= PLACES_MAX:
            del places[next(iter(places))]
        places[offset] = (segment, position)

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        yield from self._headers(from_offset, -1)

    def _sound_headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """The same, but damage is left out."""
        yield from self._headers(from_offset, 1 << 62)

    def _headers(self, from_offset: int, wanted_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        first = max(0, bisect_right(self._bases, from_offset) - 1)
        for segment in self.segments[first:]:
            if segment.written == 0:
                continue
            segment.load_indexes()
            relative_offset, position = segment.index.at_or_before(max(0, from_offset - segment.base_offset))
            expected = segment.base_offset + relative_offset
            for found_at, header in segment.headers(position, expected, max(wanted_offset, from_offset)):
                if header.next_offset > from_offset:
                    yield header, FileSlice(segment.file, found_at, header.size_bytes)

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        return search.offset_for_time(self.segments, timestamp_ms, self.start_offset, self.written_offset)

    def greatest_timestamp(self) -> TimedOffset | None:
        greatest_ms = max((segment.greatest_ms for segment in self.segments if segment.written), default=-1)
        return self.offset_for_time(greatest_ms) if greatest_ms >= 0 else None

    def last_epoch(self) -> int:
        return self.epochs.last_epoch()

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        return self.epochs.end_of(epoch, self.start_offset, self.end_offset)

    # Cutting.

    def truncate(self, offset: int) -> None:
        self._flush_staged()
        if offset >= self.end_offset:
            return
        if offset <= self.start_offset:
            self.restart_at(offset)
            return
        segment, position = self._locate(offset)
        keep = self.segments.index(segment) + 1
        dropped = self.segments[keep:]
        del self.segments[keep:]
        del self._bases[keep:]
        self._discard(dropped)
        # A batch that spans the offset goes whole, so the end may lie below it.
        end = min(offset, self._first_offset_at(segment, position))
        self.size_bytes -= segment.written - position
        segment.cut(position, end)
        self._active = segment
        self._cut_to(end)

    def _first_offset_at(self, segment: Segment, position: int) -> int:
        return (
            int.from_bytes(segment.file.pread(8, position), "big")
            if position < segment.written
            else segment.next_offset
        )

    def restart_at(self, offset: int) -> None:
        self._flush_staged()
        self._discard(self.segments)
        self.segments.clear()
        self._bases.clear()
        self.start_offset = offset
        segment = self.new_segment(offset)
        segment.file  # noqa: B018
        self._add(segment)
        self._cut_to(offset)

    def _flush_staged(self) -> None:
        error = self.write()
        if error is not None:
            log.warning("%s: what was staged before a truncation is dropped: %s", self.topic_partition, error)
        if self.offline is not None:
            raise self.offline

    def _cut_to(self, end_offset: int) -> None:
        self.end_offset = self.written_offset = end_offset
        self.durable_offset = min(self.durable_offset, end_offset)
        self.sync_asked_offset = min(self.sync_asked_offset, end_offset)
        self.cleanings = [(min(cleaned_to, end_offset), at_ms) for cleaned_to, at_ms in self.cleanings]
        self.truncations += 1
        self._mark = None
        self._epoch = None
        self._places.clear()
        self.epochs.truncate(end_offset)
        self.save_epochs()
        for snapshot in [s for s in self.snapshots if s > end_offset]:
            self.snapshots.remove(snapshot)
            self._remove(f"{self.folder}/{snapshot:020d}{SNAPSHOT}")
        self.producers.forget()
        self._around.checkpoint_soon()

    def delete_before(self, offset: int) -> None:
        offset = min(offset, self.written_offset)
        if offset <= self.start_offset:
            return
        self.start_offset = offset
        count = 0
        while count < len(self.segments) - 1 and self.segments[count].next_offset <= offset:
            count += 1
        if count:
            self.drop_segments(count)
        self._around.checkpoint_soon()

    # Syncing.

    def must_sync_too(self, path: str) -> None:
        self._unsynced[path] = None

    def take_unsynced(self) -> list[File]:
        """Files to sync so that everything written is safe; they count as asked for from now on."""
        files: list[File] = []
        for segment in reversed(self.segments):
            if segment.next_offset <= self.durable_offset:
                break
            if segment.written:
                files.append(segment.file)
        if self._unsynced:
            for path in self._unsynced:
                try:
                    files.append(self._disk.open(path))
                except FileNotFoundError:
                    continue
            self._unsynced = {}
        self.sync_asked_offset = self.written_offset
        return files

    def stop(self) -> None:
        """Write what a start without a scan needs; syncing it is the caller's."""
        if self.producers.loaded:
            self.write_snapshot(self.written_offset)
            self._unsynced[self.folder] = None
        if self._active.written and self._active.index.count >= 0:
            self._active.end_indexes()
            for ending in (INDEX, TIME_INDEX):
                self._unsynced[self._active.stem + ending] = None

    def close_files(self) -> None:
        for segment in self.segments:
            segment.close()
