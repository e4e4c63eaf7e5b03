"""A partition's log in the `partitioned` layout: a folder of segments, of which the newest is written.

    <data>/<topic>/<topic>-<n>/partition                     the topic's id and the format's version (see `folder`)
                               leader-epochs                  see `epochs`
                               <20-digit offset>.log          the batches from that offset on (see `segment`)
                               <20-digit offset>.index        see `index`
                               <20-digit offset>.timeindex    see `index`
                               <20-digit offset>.snapshot     idempotent producers before that offset (see `producers`)
                               <20-digit offset>.txnindex     aborted transactions (see `aborted`)
                               <20-digit offset>.sum          of a compacted segment (see `segment`)
                               <20-digit offset>.gaps         of a segment with gaps between its offsets (see `segment`)
                               <20-digit offset>.<n>.cut      a truncation (see `truncation`)
                               <20-digit offset>.start        the log's start inside a segment (see `truncation`)

`append` stages; `write` puts all that was staged into the file with one call, or takes it all back. What was written
is in the page cache and outlives the process; what lies below `durable_offset` was synced and outlives the machine.
A truncation is synced soon after, and before or with what is appended next: until then a loss of power may bring back
what was cut, but never behind what came after it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from headrace.errors import HeadraceError
from headrace.ports.disk import Disk, File, FileSlice
from headrace.records.batch import BatchHeader
from headrace.settings.values import LogSettings
from headrace.storage import producers, refusal, rewritten
from headrace.storage.aborted import AbortedEntries
from headrace.storage.checkpoint import Done
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.local_log import LocalLog
from headrace.storage.log import ReadResult, TimedOffset, TopicPartition
from headrace.storage.producers import ProducerState, Snapshots
from headrace.storage.segments.segment import INDEX, RELATIVE_OFFSET_MAX, TIME_INDEX, Segment
from headrace.storage.segments.segments import Reader, Segments, greatest_timestamp, offset_for_time
from headrace.storage.segments.truncation import Cuts, StartMarkers

if TYPE_CHECKING:
    from headrace.storage.segments.recovery import RecoveredSegments
    from headrace.storage.segments.store import PartitionedServices

log = logging.getLogger(__name__)

_STAMP = struct.Struct(">qii").pack_into


class Unsynced:
    """Files of the folder, besides the batches, that still have to be synced: indexes, epochs, snapshots, folders with
    new names in them. Paths wait until they are taken, and stay until the sync that took them has come back."""

    __slots__ = ("_disk", "_syncing", "_waiting")

    def __init__(self, disk: Disk, paths: Iterable[str]) -> None:
        self._disk = disk
        self._waiting = dict.fromkeys(paths)
        self._syncing: dict[str, None] = {}

    def add(self, *paths: str) -> None:
        for path in paths:
            self._waiting[path] = None

    def take(self) -> list[File]:
        """Everything that is not known to be safe, what a sync under way was to save included."""
        if self._waiting:
            self._syncing |= self._waiting
            self._waiting = {}
        files: list[File] = []
        for path in self._syncing:
            try:
                files.append(self._disk.open(path))
            except FileNotFoundError:
                continue
        return files

    def came_back(self) -> None:
        """What was taken is safe; what was added meanwhile is not."""
        self._syncing = {}


class Turn(NamedTuple):
    """Where a turn of appends began, to go back to when its write fails."""

    end_offset: int
    index_count: int
    times_count: int
    next_index_at: int
    greatest_ms: int

    def take_back(self, segment: Segment) -> None:
        """As if nothing had been staged; an index may have been rebuilt meanwhile, with less in it."""
        segment.size = segment.written
        segment.next_offset = self.end_offset
        segment.index.count = min(segment.index.count, self.index_count)
        segment.times.count = min(segment.times.count, self.times_count)
        segment.next_index_at = self.next_index_at
        segment.greatest_ms = self.greatest_ms


class PartitionedLog(LocalLog):
    """See `storage.log.Log`."""

    size_bytes: int
    _services: PartitionedServices

    def __init__(
        self,
        services: PartitionedServices,
        folder: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        found: RecoveredSegments,
    ) -> None:
        super().__init__(services, folder, topic_partition, topic_id, settings, found)
        self._disk = services.disk
        self.safe_start_offset = found.start_offset
        self.end_offset = self.written_offset = self.sync_asked_offset = found.end_offset
        self.durable_offset = found.end_offset if found.durable_offset is None else found.durable_offset
        self.recovered = found.recovered
        """Whether the start had to look at more than the checkpoint."""
        self.stopped = False
        """Whether everything is written and synced for a clean checkpoint."""
        self.segments = Segments(found.segments)
        self._active = self.segments.active
        self.began_ms = found.began_ms
        """When the active segment got its first batch."""
        self.size_bytes = sum(segment.size for segment in self.segments)
        self.snapshots = Snapshots(services.disk, folder, found.snapshots)
        self.cuts = Cuts(services.disk, folder, found.cuts)
        self._start_markers = StartMarkers(services.disk, folder, found.start_markers)
        self._starts_to_keep: list[Done] = []
        """They wait until a new beginning is on disk: until then it would take away what a checkpoint says of them."""
        self._unsynced = Unsynced(services.disk, found.unsynced)
        self._reader = Reader(self.segments, self.epochs, services.check_budget, self)
        self._staged: list[memoryview] = []
        self._turn: Turn | None = None

    @property
    def active(self) -> Segment:
        return self._active

    @property
    def rolls_at_ms(self) -> int:
        """When the active segment is closed for its age. Its jitter is drawn from what it is, so that it is the same
        after a restart."""
        settings = self.settings
        age_ms = settings.segment_ms
        most_ms = min(settings.segment_jitter_ms, age_ms)
        if most_ms:
            drawn = crc32c(f"{self.topic_partition} {self._active.base_offset}".encode(), crc32c(self.topic_id))
            age_ms -= drawn % most_ms
        if settings.compact:
            age_ms = min(age_ms, settings.max_compaction_lag_ms)
        return self.began_ms + age_ms

    def _refuse(self, error: OSError) -> HeadraceError:
        return self._shortage.met(self._active.path, error) if refusal.passes(error) else self.fail(error)

    def fail(self, error: OSError) -> HeadraceError:
        """Take the log offline: what its files hold is not known any more."""
        self.offline = self._refusal = refusal.failure(self.topic_partition, self._active.path, error)
        log.error("%s", self.offline)
        rewritten.note(self._services.disk, self.folder)
        for kept in self._starts_to_keep:
            self._services.clock.call_soon(partial(kept, self.offline))
        self._starts_to_keep = []
        return self.offline

    # Appending.

    def append(self, batch: memoryview, header: BatchHeader, epoch: int) -> int:
        base = self.end_offset
        _STAMP(batch, 0, base, header.size_bytes - 12, epoch)
        self._stage(batch, header, base, epoch)
        return base

    def _stage(self, batch: memoryview, header: BatchHeader, base: int, epoch: int) -> None:
        if self._refusal is not None:
            raise self._refusal.again()
        segment = self._active
        size = header.size_bytes
        position = segment.size
        last = base + header.last_offset_delta
        if position and (
            position + size > self.settings.segment_bytes or last - segment.base_offset > RELATIVE_OFFSET_MAX
        ):
            segment = self._roll_in_turn()
            position = 0
        if base != self.end_offset and (not segment.sparse or last - segment.base_offset > RELATIVE_OFFSET_MAX):
            segment = self._allow_gap(segment, base, last)
            position = 0
        if not self._staged:
            self._begin_turn(segment)
        if position >= segment.next_index_at:
            segment = self._index(segment, base, position)
            position = segment.size
        self._staged.append(batch)
        segment.size = position + size
        segment.greatest_ms = max(segment.greatest_ms, header.max_timestamp_ms)
        if epoch != self._epoch:
            self._begin_epoch(epoch, base)
            self._epoch = epoch
        if header.producer_id >= 0:
            self.producers.appended(header, base, batch)
        self.end_offset = segment.next_offset = last + 1

    def _allow_gap(self, segment: Segment, base: int, last: int) -> Segment:
        """A segment that takes offsets with gaps does so from its first batch on."""
        if segment.size:
            segment = self._roll_in_turn()
        try:
            segment.allow_gaps()
            if last - segment.base_offset > RELATIVE_OFFSET_MAX:
                self.roll(base)
                segment = self._active
        except OSError as error:
            raise self._refuse(error).again() from error
        self._unsynced.add(self.folder)
        return segment

    def _begin_turn(self, segment: Segment) -> None:
        """Everything that could fail for lack of room or files is done here, before anything has changed."""
        try:
            file = segment.append_file or segment.open_to_append()
            if segment.size == 0 and self.settings.preallocate:
                file.reserve(self.settings.segment_bytes)
            if not self.producers.loaded:
                self.producers.load()
            if segment.size == 0:  # one that a truncation began has no snapshot yet
                self._remember_producers(segment.base_offset)
            if self._epoch is None:
                self.epochs.load()
        except OSError as error:
            raise self._refuse(error).again() from error
        if segment.size == 0:
            self.began_ms = self._services.clock.wall_ms()
            self._services.segment_began(self)
            self._unsynced.add(self.folder)
        index, times = segment.index, segment.times
        self._turn = Turn(self.end_offset, index.count, times.count, segment.next_index_at, segment.greatest_ms)
        self._services.staged[self] = None

    def _index(self, segment: Segment, base: int, position: int) -> Segment:
        """An index entry for the batch about to be staged; a full index ends the segment."""
        if segment.index.full:
            segment = self._roll_in_turn()
            if base != self.end_offset:
                segment = self._allow_gap(segment, base, base)
            self._begin_turn(segment)
            position = 0
        if base == segment.base_offset or (not position and not segment.sparse):
            return segment
        try:
            segment.add_entry(base - segment.base_offset, position)
        except OSError as error:
            if segment.sparse:
                raise self._refuse(error).again() from error
            # An entry less only makes a search longer; whether there is room for the batch, its write will tell.
            segment.skip_entry(position)
        return segment

    def _roll_in_turn(self) -> Segment:
        if self._staged and (error := self.write()) is not None:
            self._refusal = self._refusal or error
            raise error.again()
        sparse = self._active.sparse and self.copying
        try:
            self.roll()
            if sparse:
                self._active.allow_gaps()
        except OSError as error:
            raise self._refuse(error).again() from error
        return self._active

    def write(self) -> HeadraceError | None:
        """Write what was staged; or take it back and answer why."""
        staged = self._staged
        if not staged:
            return self.take_refusal()
        segment = self._active
        try:
            # Epochs first: without its entry a batch would look wrong, an entry without its batch is dropped at start.
            if self._epochs_before is not None:
                self._save_epochs()
            file = segment.append_file or segment.file
            file.pwritev(staged, segment.written)
        except OSError as error:
            reason = self._undo(error)
            self._refusal = self.offline
            return reason
        self._staged = []
        self._epochs_before = None
        self.size_bytes += segment.size - segment.written
        segment.written = segment.size
        self.written_offset = self.end_offset
        if self.producers.undo:
            self.producers.settled(self.committed_offset)
        if self._shortage.lasts:
            self._shortage.ended()
        return None

    def _undo(self, error: OSError) -> HeadraceError:
        """Go back to where the turn began; appends are refused until the store has reported it."""
        turn, segment = self._turn, self._active
        assert turn is not None
        self._staged = []
        turn.take_back(segment)
        self.end_offset = turn.end_offset
        self._take_back_epochs()
        self.producers.take_back()
        reason = self._refuse(error)
        try:
            segment.file.truncate(segment.written)
        except OSError as second:
            reason = self.fail(second)
        self._refusal = reason
        return reason

    # Segments.

    def roll(self, base_offset: int | None = None) -> None:
        """Close the active segment and begin the next. Nothing may be staged."""
        assert not self._staged
        old = self._active
        base = self.end_offset if base_offset is None else base_offset
        old.load_indexes()
        if self.snapshots.newest_offset != base:
            self.producers.load()  # after a crash only the records tell of the last batches, and they may go now
        if self.settings.preallocate:
            old.file.truncate(old.written)  # the room that it did not need
        old.next_offset = base
        old.end_indexes()
        self._write_snapshot(base)
        new = self._services.new_segment(self.folder, self.settings, base)
        new.file  # noqa: B018
        self._unsynced.add(old.stem + INDEX, old.stem + TIME_INDEX, self.folder)
        self._add(new)

    def _add(self, segment: Segment) -> None:
        self.segments.add(segment)
        self._active = segment
        self._reader.forget()
        self._turn = None

    def _write_snapshot(self, offset: int) -> None:
        if self.producers.loaded:  # else nothing was appended since the last one
            self._write_snapshot_at(offset, self.producers.states)

    def _has_snapshot_at(self, offset: int) -> bool:
        return offset in self.snapshots

    def _decided_by_snapshot(self, offset: int) -> bool:
        return self.snapshots.tells_of_none_open(offset)

    def _write_snapshot_at(self, offset: int, states: dict[int, producers.ProducerState]) -> None:
        snapshot, paths = self._snapshot(offset, states)
        self._unsynced.add(*paths, self.snapshots.write(offset, snapshot, self.segments.bases), self.folder)
        self._tidy_aborted()

    def _aborted_file(self, marker_offset: int, last: AbortedEntries | None) -> int:
        return self.segments.base_of(marker_offset)

    def _load_producers(self, past_damage: bool) -> producers.Load:
        """From the newest whole snapshot, and the batches behind it; without one from all that are there, those below
        the start too. A snapshot from before the first segment says nothing of now. What is deleted and damaged nobody
        copies again: then what lies before the start counts as gone, and whom it told of as unknown."""
        with refusal.reading(self.topic_partition):
            first = self.segments[0].base_offset
            from_offset, known = self._newest_known(self.snapshots, first)
            try:
                yield from self._replay_producers(known, from_offset, past_damage)
            except producers.UnreadableProducers as error:
                if error.offset >= self.start_offset:
                    raise
                log.warning(
                    "%s: producers are known from offset %d on: %s", self.topic_partition, self.start_offset, error
                )
                known = self._no_producers()
                yield from self._replay_producers(known, self.start_offset, past_damage)
        return known

    def _save_epochs(self) -> None:
        if self.cuts.named < self.cuts.number:
            return  # the file's old entries go with the old bytes; a start finds the new ones in the log
        file = self.epochs.save()
        if file is not None:
            file.close()
            self._unsynced.add(f"{self.folder}/{EPOCHS_FILE}", self.folder)

    def _discard(self, segments: list[Segment]) -> None:
        paths: list[str] = []
        for segment in segments:
            self.size_bytes -= segment.written
            paths += segment.set_aside()
            self.snapshots.forget(range(segment.base_offset, segment.base_offset + 1))
        self._unsynced.add(self.folder)
        self._services.discarded(paths, self.settings.file_delete_delay_ms)

    def swap_segments(self, first: int, count: int, size: int) -> Segment:
        """Compaction has put one segment of that size in the place of some."""
        old = self.segments[first : first + count]
        base_offset, next_offset = old[0].base_offset, old[-1].next_offset
        services = self._services
        replacement = services.old_segment(self.folder, self.settings, base_offset, next_offset, size, cleaned=True)
        replacement.trust_all()
        for segment in self.segments.replace(first, count, [replacement]):
            self.size_bytes -= segment.written
            segment.close()
        self.producers.moved()
        self.snapshots.forget(range(replacement.base_offset + 1, replacement.next_offset))
        self.size_bytes += replacement.written
        self._reader.forget()
        return replacement

    # Reading.

    def _read(self, offset: int, max_bytes: int, limit: int, warm: bool) -> ReadResult:
        if self.offline is not None and (not self.segments or offset >= self.segments[-1].next_offset):
            raise self.offline.again()  # it failed while it was cut
        return self._reader.read(offset, max_bytes, limit, self.written_offset, warm=warm)

    def doubt(self) -> None:
        for segment in self.segments:
            segment.doubt()

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        return self.segments.headers(from_offset)

    def sound_headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        return self.segments.sound_headers(from_offset)

    def _checked_headers(self, from_offset: int, past_damage: bool) -> Iterator[tuple[BatchHeader, FileSlice]]:
        left_out = self.producers.left_out
        return self.segments.checked_headers(from_offset, past_damage=past_damage, left_out=left_out)

    def first_damaged_offset(self) -> int | None:
        damaged = (damage for segment in self.segments for damage in segment.damage)
        found = [max(each.first_offset, self.start_offset) for each in damaged if each.next_offset > self.start_offset]
        return min(found, default=None)

    def lost_front(self) -> bool:
        return self.first_damaged_offset() == self.start_offset

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return offset_for_time(self.segments, timestamp_ms, self.start_offset, self.written_offset)

    def greatest_timestamp(self) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return greatest_timestamp(self.segments, self.start_offset, self.written_offset)

    # Cutting.

    def truncate(self, offset: int) -> None:
        self._flush_staged()
        if offset >= self.end_offset:
            return
        if offset <= self.start_offset:
            self._drop_all(offset, self._known_before(offset))
            return
        segment, position = self.segments.locate(offset)
        # A batch that spans the offset goes whole, and a gap before it too, so the end may lie below it.
        end = segment.end_before(position) if position else min(offset, segment.base_offset)
        if end <= self.start_offset:
            self._drop_all(end, self._known_before(end))
            return
        self._begin_cut(end, anew=False)
        if position:
            keep = self.segments.index(segment) + 1
            self.size_bytes -= segment.written - position
            segment.cut(position, end)
            self.cuts.has_tail(segment)
        else:
            keep = self.segments.count_below(end)  # those that compaction left empty before this one go too
            self.segments[keep - 1].next_offset = end
        self._begin_anew(keep, end, {})
        self._cut_to(end)

    def restart_at(self, offset: int) -> None:
        self._flush_staged()
        self._drop_all(offset, {})

    def _drop_all(self, offset: int, known: dict[int, ProducerState]) -> None:
        """All but what is known of producers from before the offset."""
        self._begin_cut(offset, anew=True)
        self._begin_anew(0, offset, known)
        self.start_offset = offset
        self.epochs.truncate(0)
        self._cut_to(offset)

    def _begin_cut(self, offset: int, *, anew: bool) -> None:
        try:
            if anew:
                self._start_markers.forget()
            self.cuts.begin(offset, anew=anew)
        except OSError as error:
            raise self._refuse(error).again() from error

    def _begin_anew(self, keep: int, offset: int, known: dict[int, ProducerState]) -> None:
        """Nothing but the first segments and a new one; a crash keeps the first of these changes (see `truncation`)."""
        try:
            self._discard(self.segments.replace(keep, len(self.segments), [])[::-1])
            self.snapshots.remove_above(offset if keep else -1)
            segment = self._services.new_segment(self.folder, self.settings, offset)
            segment.file  # noqa: B018
            self._add(segment)
            if known:
                self._write_snapshot_at(offset, known)
        except OSError as error:
            raise self.fail(error).again() from error

    def _write_alone(self) -> HeadraceError | None:
        return self.write()

    def _cut_to(self, end_offset: int) -> None:
        super()._cut_to(end_offset)
        self._turn = None
        self._reader.forget()
        self._save_epochs()
        self.snapshots.remove_above(end_offset)
        self._unsynced.add(self.folder, self._active.path)
        self._services.sync_soon(self)
        self._services.checkpoint_soon(None)

    def _keep_start(self, kept: Done) -> None:
        if self.cuts.would_lower(self.start_offset):
            self._starts_to_keep.append(kept)
        else:
            super()._keep_start(kept)

    def _raise_start(self, offset: int) -> None:
        count = 0
        while count < len(self.segments) - 1 and self.segments[count].next_offset <= offset:
            count += 1
        if count:
            self._remember_producers(self.segments[count].base_offset)
        self.start_offset = offset
        if count:
            self._discard(self.segments.replace(0, count, []))
            self._reader.forget()
            self.producers.moved()
            self._drop_aborted_before(self.segments[0].base_offset)
        if offset > self.segments[0].base_offset:
            self._start_markers.note(offset)
            self._unsynced.add(self.folder)
            self._services.sync_soon(self)

    def _sync_snapshot_soon(self) -> None:
        self._services.sync_soon(self)

    # Syncing.

    def take_unsynced(self) -> list[File]:
        """Files to sync so that everything written is safe; they count as asked for from now on."""
        files: list[File] = []
        for segment in reversed(self.segments[:]):
            if segment.next_offset <= self.durable_offset:
                break
            if segment.written:
                files.append(segment.file)
        self.sync_asked_offset = self.written_offset
        self.cuts.asked()
        return files + self._unsynced.take()

    def synced_upto(self, offset: int) -> None:
        """The sync that `take_unsynced` was called for has come back."""
        self._unsynced.came_back()
        self.durable_offset = max(self.durable_offset, offset)
        if self.cuts.settled < self.cuts.number:
            self._settle_cuts()

    def _settle_cuts(self) -> None:
        """Go on with truncations as far as what was synced allows."""
        settled = self.cuts.settled
        if self.cuts.came_back():
            try:
                self._drop_tails()
            except OSError as error:
                self.fail(error)
                return
            self._services.sync_soon(self)
        if self.cuts.settled > settled:
            settled = self.cuts.settled
            self._services.checkpoint_soon(lambda error: None if error else self.cuts.remove_markers(settled))
            if settled == self.cuts.number:
                waiting, self._starts_to_keep = self._starts_to_keep, []
                for kept in waiting:
                    self._services.checkpoint_soon(kept)

    def _drop_tails(self) -> None:
        """The names that tell of the truncations are synced: what was cut may go."""
        for segment in self.cuts.take_tails():
            if segment in self.segments:  # else it was compacted or deleted meanwhile
                self._unsynced.add(self.folder, *segment.drop_tail())
        self._save_epochs()

    def stop(self) -> None:
        """Write what a start without a scan needs; syncing it is the caller's."""
        self._write_snapshot(self.written_offset)
        if self.cuts.settled < self.cuts.number:
            self._disk.sync_folder(self.folder)
            self._drop_tails()
        self._save_epochs()
        if self._active.written and self._active.index.count >= 0:
            self._active.end_indexes()
            self._unsynced.add(self._active.stem + INDEX, self._active.stem + TIME_INDEX)

    def _drop_staged(self) -> None:
        self._staged = []

    def close_files(self) -> None:
        for segment in self.segments:
            segment.close()
