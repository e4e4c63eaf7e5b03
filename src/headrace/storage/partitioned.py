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
A truncation is synced soon after: until then a loss of power may bring back what was cut.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from typing import Final

from headrace.errors import HeadraceError, OffsetOutOfRange, UnknownPartition
from headrace.ports.disk import File, FileSlice
from headrace.records.batch import BatchHeader
from headrace.settings import LogSettings
from headrace.storage import producers, refusal, search
from headrace.storage.checkpointing import Done
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import EpochEnd, ReadResult, TimedOffset, TopicPartition
from headrace.storage.reader import Reader
from headrace.storage.segment import INDEX, RELATIVE_OFFSET_MAX, TIME_INDEX, Segment
from headrace.storage.segments import Segments
from headrace.storage.snapshots import Snapshots
from headrace.storage.surroundings import Found, Surroundings
from headrace.storage.turn import Turn
from headrace.storage.unsynced import Unsynced

log = logging.getLogger(__name__)

NOTHING: Final = ReadResult((), 0)

_STAMP = struct.Struct(">qii").pack_into


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
        self.snapshots = Snapshots(around.disk, folder, found.snapshots)
        self.recovered = found.recovered
        self._around = around
        self._disk = around.disk
        self.segments = Segments(found.segments)
        self._active = self.segments.active
        self.size_bytes = sum(segment.size for segment in self.segments)
        self.held_bytes = 0
        self._staged: list[memoryview] = []
        self._turn: Turn | None = None
        self._refusal: HeadraceError | None = None
        self._shortage = refusal.Shortage(topic_partition)
        self._unsynced = Unsynced(around.disk, found.unsynced)
        self.epochs = found.epochs or EpochHistory(self._disk, folder)
        self.epochs.rebuild_from(self._epochs_in_log)
        self._reader = Reader(self.segments, self.epochs, around.check_budget)
        self._epoch: int | None = None
        self.producers = producers.ProducerTable(around.clock.wall_ms, self._load_producers)
        self.settings = settings

    def __repr__(self) -> str:
        return f"<log {self.topic_partition} {self.start_offset}..{self.end_offset}>"

    @property
    def cleaned_to(self) -> int:
        """Everything before it has been compacted at least once."""
        return self.cleanings[-1][0] if self.cleanings else 0

    @property
    def active(self) -> Segment:
        return self._active

    def archived_offset(self) -> int:
        archived = self._around.archived_offset(self.topic_partition)
        # An offset that this log never had was committed for another one of that name.
        return archived if 0 <= archived <= self.end_offset else 0

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
        if position and (
            position + size > self.settings.segment_bytes or last - segment.base_offset > RELATIVE_OFFSET_MAX
        ):
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
            self._unsynced.add(self.folder)
        self._turn = Turn.begin(self.end_offset, segment, self.epochs)
        self._around.staged[self] = None

    def _index(self, segment: Segment, base: int, position: int) -> Segment:
        """An index entry for the batch about to be staged; a full index ends the segment."""
        if segment.index.full:
            segment = self._roll_in_turn(base)
            self._begin_turn(segment)
            return segment
        try:
            segment.add_entry(base - segment.base_offset, position)
        except OSError:
            # An entry less only makes a search longer; whether there is room for the batch, its write will tell.
            segment.skip_entry(position)
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
            # Epochs first: without its entry a batch would look wrong, an entry without its batch is dropped at start.
            if self._turn is not None and len(self.epochs.entries) != self._turn.epochs:
                self.save_epochs()
            segment.file.pwritev(staged, segment.written)
        except OSError as error:
            reason = self._undo(error)
            self._refusal = self.offline
            return reason
        self._staged = []
        self.size_bytes += segment.size - segment.written
        segment.written = segment.size
        self.written_offset = self.end_offset
        self.producers.settled()
        if self._shortage.lasts:
            self._shortage.ended()
        return None

    def _undo(self, error: OSError) -> HeadraceError:
        """Go back to where the turn began; appends are refused until the store has reported it."""
        turn, segment = self._turn, self._active
        assert turn is not None
        self._staged = []
        turn.take_back(segment, self.epochs)
        self.end_offset = turn.end_offset
        self._epoch = None
        self.producers.take_back()
        reason = self._refuse(error)
        try:
            segment.file.truncate(segment.written)
        except OSError as second:
            reason = self.fail(second)
        self._refusal = reason
        return reason

    def _refuse(self, error: OSError) -> HeadraceError:
        return self._shortage.met(self._active.path, error) if refusal.passes(error) else self.fail(error)

    def fail(self, error: OSError) -> HeadraceError:
        """Take the log offline: what its files hold is not known any more."""
        self.offline = self._refusal = refusal.failure(self.topic_partition, self._active.path, error)
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
        old.end_indexes()
        self._write_snapshot(base)
        new = self._around.new_segment(self.folder, self.settings, base)
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
            path = self.snapshots.write(offset, self.producers.states, self.segments.bases)
            self._unsynced.add(path, self.folder)

    def _load_producers(self) -> dict[int, producers.ProducerState]:
        """From the newest whole snapshot, and the headers behind it."""
        with refusal.reading(self.topic_partition):
            from_offset, states = self.snapshots.newest(self.written_offset) or (self.start_offset, {})
            if from_offset < self.written_offset:
                now_ms = self._around.clock.wall_ms()
                producers.replay(states, (header for header, _ in self.segments.sound_headers(from_offset)), now_ms)
        return states

    def _epochs_in_log(self) -> Iterator[tuple[int, int]]:
        for header, _ in self.segments.sound_headers(self.start_offset):
            yield header.leader_epoch, header.base_offset

    def save_epochs(self) -> None:
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
        self._around.discarded(paths, self.settings.file_delete_delay_ms)

    def swap_segments(self, first: int, count: int, size: int) -> Segment:
        """Compaction has put one segment of that size in the place of some."""
        old = self.segments[first : first + count]
        base_offset, next_offset = old[0].base_offset, old[-1].next_offset
        around = self._around
        replacement = around.old_segment(self.folder, self.settings, base_offset, next_offset, size, cleaned=True)
        replacement.trust_all()
        for segment in self.segments.replace(first, count, [replacement]):
            self.size_bytes -= segment.written
            segment.close()
        self.snapshots.forget(range(replacement.base_offset + 1, replacement.next_offset))
        self.size_bytes += replacement.written
        self._reader.forget()
        return replacement

    # Reading.

    def read(self, offset: int, max_bytes: int, limit_offset: int, *, warm: bool = False) -> ReadResult:
        limit = min(limit_offset, self.written_offset)
        if offset < self.start_offset or offset > self.end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is not in the log, which holds "
                f"{self.start_offset} to {self.end_offset - 1}"
            )
        if offset >= limit:
            return NOTHING
        try:
            return self._reader.read(offset, max_bytes, limit, self.written_offset, warm=warm)
        except OSError as error:
            raise refusal.unreadable(self.topic_partition, error) from error

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        return self.segments.headers(from_offset)

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return search.offset_for_time(self.segments, timestamp_ms, self.start_offset, self.written_offset)

    def greatest_timestamp(self) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return search.greatest_timestamp(self.segments, self.start_offset, self.written_offset)

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
        segment, position = self.segments.locate(offset)
        keep = self.segments.index(segment) + 1
        self._discard(self.segments.replace(keep, len(self.segments), []))
        # A batch that spans the offset goes whole, so the end may lie below it.
        end = min(offset, segment.first_offset_at(position))
        self.size_bytes -= segment.written - position
        segment.cut(position, end)
        self.start_offset = min(self.start_offset, end)
        self._active = segment
        self._cut_to(end)

    def restart_at(self, offset: int) -> None:
        self._flush_staged()
        self._discard(self.segments.replace(0, len(self.segments), []))
        self.start_offset = offset
        segment = self._around.new_segment(self.folder, self.settings, offset)
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
        self._turn = None
        self._epoch = None
        self._reader.forget()
        self.epochs.truncate(end_offset)
        self.save_epochs()
        self.snapshots.remove_above(end_offset)
        self.producers.forget()
        self._unsynced.add(self._active.path)
        self._around.sync_soon(self)
        self._around.checkpoint_soon(None)

    def delete_before(self, offset: int, done: Done | None = None) -> None:
        if self.offline is not None:
            raise self.offline
        offset = min(offset, self.written_offset)
        if offset > self.start_offset:
            self._raise_start(offset)
        elif done is None:
            return
        self._around.checkpoint_soon(done)

    def _raise_start(self, offset: int) -> None:
        self.start_offset = offset
        count = 0
        while count < len(self.segments) - 1 and self.segments[count].next_offset <= offset:
            count += 1
        if count:
            self._discard(self.segments.replace(0, count, []))
            self._reader.forget()

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
        return files + self._unsynced.take()

    def synced_upto(self, offset: int) -> None:
        """The sync that `take_unsynced` was called for has come back."""
        self._unsynced.came_back()
        self.durable_offset = max(self.durable_offset, offset)

    def stop(self) -> None:
        """Write what a start without a scan needs; syncing it is the caller's."""
        self._write_snapshot(self.written_offset)
        self.save_epochs()
        if self._active.written and self._active.index.count >= 0:
            self._active.end_indexes()
            self._unsynced.add(self._active.stem + INDEX, self._active.stem + TIME_INDEX)

    def delete(self) -> None:
        """Take nothing more: the partition is going away."""
        self.offline = self._refusal = UnknownPartition(f"{self.topic_partition} was deleted")
        self._staged = []

    def close_files(self) -> None:
        for segment in self.segments:
            segment.close()
