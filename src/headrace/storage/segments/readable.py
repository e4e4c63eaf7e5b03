"""A folder of segments as a log that is read and goes on with new segments; how it is written: see `log`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Final

from crc32c import crc32c

from headrace.errors import CorruptBatch, HeadraceError, OffsetOutOfRange
from headrace.ports.disk import FileSlice
from headrace.records.batch import BatchHeader
from headrace.settings.values import LogSettings
from headrace.storage import producers, refusal, rewritten
from headrace.storage.checkpointer import Done
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory, starts_in
from headrace.storage.log import ReadResult, TimedOffset, TopicPartition
from headrace.storage.replicated import ReplicatedLog
from headrace.storage.segments import search
from headrace.storage.segments.reader import Reader
from headrace.storage.segments.segment import INDEX, TIME_INDEX, Segment
from headrace.storage.segments.segments import Segments
from headrace.storage.segments.services import Found, Surroundings
from headrace.storage.segments.start_markers import StartMarkers
from headrace.storage.segments.truncation import Cuts
from headrace.storage.segments.turn import Turn
from headrace.storage.snapshots import Snapshots
from headrace.storage.unsynced import Unsynced

log = logging.getLogger(__name__)

NOTHING: Final = ReadResult((), 0)


class SegmentedLog(ReplicatedLog):
    def __init__(
        self,
        around: Surroundings,
        folder: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        found: Found,
    ) -> None:
        super().__init__(around.archived_offset)
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.folder = folder
        self.offline: HeadraceError | None = None
        self.start_offset = self.safe_start_offset = found.start_offset
        self.end_offset = self.written_offset = found.end_offset
        self.durable_offset = found.end_offset if found.durable_offset is None else found.durable_offset
        self.sync_asked_offset = found.end_offset
        self.truncations = 0
        self.cuts = Cuts(around.disk, folder, found.cuts)
        self.stopped = False
        self.cleanings = found.cleanings
        self.began_ms = found.began_ms
        self.snapshots = Snapshots(around.disk, folder, found.snapshots)
        self._start_markers = StartMarkers(around.disk, folder, found.start_markers)
        self._starts_to_keep: list[Done] = []
        """They wait until a new beginning is on disk: until then it would take away what a checkpoint says of them."""
        self.recovered = found.recovered
        self.tail = found.tail
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
        self._reader = Reader(self.segments, self.epochs, around.check_budget, self)
        self._epoch: int | None = None
        self.producers = producers.ProducerTable(around.producer_loads, self._load_producers)
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
        rewritten.note(self._around.disk, self.folder)
        for kept in self._starts_to_keep:
            self._around.clock.call_soon(partial(kept, self.offline))
        self._starts_to_keep = []
        return self.offline

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
            self._write_snapshot_at(offset, self.producers.states)

    def _has_snapshot_at(self, offset: int) -> bool:
        return offset in self.snapshots

    def _write_snapshot_at(self, offset: int, states: dict[int, producers.ProducerState]) -> None:
        self._unsynced.add(self.snapshots.write(offset, states, self.segments.bases), self.folder)

    def _load_producers(self, past_damage: bool) -> producers.Load:
        """From the newest whole snapshot, and the batches behind it; without one from all that are there, those below
        the start too. A snapshot from before the first segment says nothing of now. What is deleted and damaged nobody
        copies again: then what lies before the start counts as gone, and whom it told of as unknown."""
        with refusal.reading(self.topic_partition):
            first = self.segments[0].base_offset
            found = self.snapshots.newest(self.written_offset)
            from_offset, states = found if found is not None and found[0] >= first else (first, {})
            try:
                yield from self._replay(states, from_offset, past_damage)
            except producers.UnreadableProducers as error:
                if error.offset >= self.start_offset:
                    raise
                log.warning(
                    "%s: producers are known from offset %d on: %s", self.topic_partition, self.start_offset, error
                )
                states = {}
                yield from self._replay(states, self.start_offset, past_damage)
        return states

    def _replay(
        self, states: dict[int, producers.ProducerState], from_offset: int, past_damage: bool
    ) -> producers.Load:
        if from_offset < self.written_offset:
            found = self.segments.checked_headers(
                from_offset, past_damage=past_damage, left_out=self.producers.left_out
            )
            headers = (header for header, _ in found)
            loads = self._around.producer_loads
            yield from producers.replay(
                states, from_offset, self.written_offset, headers, loads.wall_ms(), loads.budget
            )
        return states

    def _epochs_in_log(self) -> Iterator[tuple[int, int]]:
        headers = (header for header, _ in self.segments.sound_headers(self.start_offset))
        return starts_in(headers, self.start_offset)

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
        self.producers.moved()
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
        if self.offline is not None and (not self.segments or offset >= self.segments[-1].next_offset):
            raise self.offline.again()  # it failed while it was cut
        try:
            return self._reader.read(offset, max_bytes, limit, self.written_offset, warm=warm)
        except CorruptBatch:
            self.on_damage(offset)
            raise
        except OSError as error:
            raise refusal.unreadable(self.topic_partition, error) from error

    def doubt(self) -> None:
        for segment in self.segments:
            segment.doubt()

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        return self.segments.headers(from_offset)

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return search.offset_for_time(self.segments, timestamp_ms, self.start_offset, self.written_offset)

    def greatest_timestamp(self) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return search.greatest_timestamp(self.segments, self.start_offset, self.written_offset)
