"""A partition's log in the `shared` layout: a start, an end, and a queue of entries into the broker's commit log.

    <data>/<topic>/<topic>-<n>/partition                  the topic's id and the format's version (see `folder`)
                               leader-epochs              see `epochs`
                               <20-digit offset>.snapshot idempotent producers before that offset (see `producers`)
                               <20-digit offset>.txnindex aborted transactions (see `aborted`)
                               <20-digit offset>.queue    see `queuefile`

`append` stages; the store writes the staged batches of all logs as one frame each, with one call, or takes them all
back. All files here can be derived from the commit log, so they are synced by checkpoints only: the sync of the commit
log alone makes batches durable. A truncation and a raised start are a frame that tells the log's bounds, a new
beginning is two: that nothing is left, then the new bounds. Where there is no room for them, they are written with the
next batch, and until then a crash may bring back what was cut.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from headrace.errors import HeadraceError, StorageFailed, UnknownPartition
from headrace.ports.disk import Buffer, Disk, File, FileSlice
from headrace.records.batch import BatchHeader
from headrace.settings.values import LogSettings
from headrace.storage import producers, refusal
from headrace.storage.aborted import AbortedEntries, AbortedIndex, by_count
from headrace.storage.commitlog import frames, reader
from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import DAMAGED, GONE, NO_TIMESTAMP, Replacement, Run
from headrace.storage.commitlog.reader import Reader
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory
from headrace.storage.folder import PARTITION_FILE
from headrace.storage.local_log import LocalLog
from headrace.storage.log import ReadResult, TimedOffset, TopicPartition
from headrace.storage.producers import Snapshot, Snapshots

if TYPE_CHECKING:
    from headrace.storage.commitlog.recovery import RecoveredQueue
    from headrace.storage.commitlog.store import SharedServices

log = logging.getLogger(__name__)

NEVER: Final = 1 << 62

_STAMP = struct.Struct(">qii").pack_into


class DerivedFiles:
    """The small files of a partition beside its queue: leader epochs and snapshots of producers.

    They can be derived from the commit log, so a checkpoint syncs them, and nothing waits for that. A start believes
    neither them nor the queue without their CRCs, so a checkpoint may leave some of them to the next one.
    """

    def __init__(
        self, disk: Disk, folder: str, epochs: EpochHistory, snapshots: Iterable[int], aborted: AbortedIndex
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._epochs = epochs
        self._aborted = aborted
        self.snapshots = Snapshots(disk, folder, snapshots)
        self._unsynced: dict[str, None] = {}

    def save_epochs(self) -> None:
        file = self._epochs.save()
        if file is not None:
            file.close()
            self._unsynced |= {f"{self._folder}/{EPOCHS_FILE}": None, self._folder: None}

    def write_snapshot(self, offset: int, snapshot: Snapshot, starts: Iterable[int], paths: Iterable[str]) -> None:
        """Those at the starts stay, because nothing else tells of what lies below them; and the newest one, for a
        truncation that takes this one. `paths` were written with it."""
        newest = self.snapshots.newest_offset
        path = self.snapshots.write(offset, snapshot, [*starts] if newest is None else [*starts, newest])
        self._unsynced |= dict.fromkeys([*paths, path, self._folder])

    def remove_snapshots_above(self, offset: int) -> None:
        self.snapshots.remove_above(offset)
        self._unsynced[self._folder] = None

    def take_unsynced(self) -> list[File]:
        files: list[File] = []
        for path in self._unsynced:
            try:
                files.append(self._disk.open(path))
            except FileNotFoundError:
                continue
        self._unsynced = {}
        return files

    def sync_again(self) -> None:
        """Whatever is here may not be on disk."""
        topic_folder = self._folder.rpartition("/")[0]
        paths = [f"{self._folder}/{name}" for name in (EPOCHS_FILE, PARTITION_FILE)]
        paths += [self.snapshots.path(offset) for offset in self.snapshots.offsets]
        paths += self._aborted.paths
        paths += [self._folder, topic_folder]
        self._unsynced |= dict.fromkeys(paths)


class DerivedFilesSync:
    """What checkpoints sync of all logs: so many files at a time, and next time the others first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._next = 0

    def take(self, logs: Sequence[SharedLog]) -> list[File]:
        files: list[File] = []
        for nth in range(len(logs)):
            if len(files) >= self.most:
                self._next += nth
                break
            files += logs[(self._next + nth) % len(logs)].take_derived()
        return files


class Turn:
    """A run begins with the frame, at a gap between offsets, and when the one before it is long enough."""

    __slots__ = (
        "_runs",
        "_runs_ms",
        "base",
        "batches",
        "gap",
        "next_run_at",
        "run_ms",
        "single",
        "size",
    )

    def __init__(self) -> None:
        self.batches: list[Buffer] = []
        self.base = self.next_run_at = 0
        self.single = True
        """Whether all of it is one run that begins with `base`; most turns are."""
        self._runs: list[tuple[int, int]] = []
        self._runs_ms: list[int] = []
        self.clear()

    def clear(self) -> None:
        self.batches.clear()
        self.size = 0
        self.gap = False
        self.run_ms = NO_TIMESTAMP
        if not self.single:
            self.single = True
            self._runs, self._runs_ms = [], []

    def begin(self, base: int, interval_bytes: int, *, gap: bool) -> None:
        self.base = base
        self.gap = gap
        self.next_run_at = interval_bytes
        if gap:
            self._several()

    def _several(self) -> None:
        self.single = False
        self._runs.append((0, self.base))

    def next_run(self, base: int, interval_bytes: int) -> None:
        """The batch about to be staged begins a run."""
        if self.single:
            self._several()
        self._runs_ms.append(self.run_ms)
        self.run_ms = NO_TIMESTAMP
        self._runs.append((self.size, base))
        self.next_run_at = self.size + interval_bytes

    def prepare(self, queue: Queue, first_offset: int) -> None:
        """Nothing more is staged in several runs: make room for the entries. OSError if there is none."""
        runs, runs_ms = self._runs, self._runs_ms
        runs_ms.append(self.run_ms)
        greatest_ms = max(runs_ms)
        fits = queue.ready(len(runs) + self.gap, first_offset, runs_ms[0], runs[-1][1], greatest_ms)
        if not fits and not self.gap:
            self.single, self.run_ms = True, greatest_ms
            self._runs, self._runs_ms = [], []

    def enter(self, queue: Queue, number: int, byte: int, first_offset: int, next_offset: int) -> None:
        """Several runs are in the commit log, from this byte on."""
        runs = self._runs
        if self.gap and runs[0][1] > first_offset:
            queue.add_roomy(Run(number, byte - FRAME_BYTES, GONE, first_offset, NO_TIMESTAMP), runs[0][1])
        ends = [*runs[1:], (self.size, next_offset)]
        for (at, base), (end, next_base), run_ms in zip(runs, ends, self._runs_ms, strict=True):
            queue.add_roomy(Run(number, byte + at, end - at, base, run_ms), next_base)


class SharedLog(LocalLog):
    """See `storage.log.Log`."""

    _services: SharedServices

    def __init__(
        self,
        services: SharedServices,
        folder: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        found: RecoveredQueue,
    ) -> None:
        super().__init__(services, folder, topic_partition, topic_id, settings, found)
        self._partition = topic_partition.partition
        self.queue = found.queue
        self.safe_start_offset = found.safe_start_offset
        end_offset = found.queue.end_offset
        self.end_offset = self.written_offset = self.durable_offset = self.sync_asked_offset = end_offset
        self.damaged_from = found.damaged_from
        self.bounds_unwritten = False
        """Whether a frame with the log's bounds is still to be written..."""
        self.begun_anew = False
        """...and before it one that says that nothing of what was there counts, its epochs and producers neither."""
        self.frame_bytes = 0
        """What the next write of the log takes, headers of frames included; told by `prepare`."""
        self.before_cut: Callable[[], None] = lambda: None
        """Called when the queue is cut, before the commit log says so."""
        self.snapshot_bytes = 0
        """Bytes appended since the last snapshot."""
        self.derived = DerivedFiles(services.disk, folder, self.epochs, found.snapshots, self.aborted_index)
        checked_from = end_offset if found.checked_from is None else found.checked_from
        self._reader = Reader(self.queue, services.commit_log, self.epochs, services.check_budget, checked_from, self)
        self._turn = Turn()

    @property
    def size_bytes(self) -> int:
        return self.queue.size_bytes

    # Appending.

    def append(self, batch: memoryview, header: BatchHeader, epoch: int) -> int:
        base = self.end_offset
        _STAMP(batch, 0, base, header.size_bytes - 12, epoch)
        self._stage(batch, header, base, epoch)
        return base

    def _stage(self, batch: memoryview, header: BatchHeader, base: int, epoch: int) -> None:
        if self._refusal is not None:
            raise self._refusal.again()
        turn, size = self._turn, header.size_bytes
        if not turn.batches:
            self._begin_turn(base)
        elif turn.size + size > self._services.commit_log.file_bytes - FRAME_BYTES:
            self._write_in_turn()
            self._begin_turn(base)
        elif base != self.end_offset:
            turn.next_run(base, self.settings.index_interval_bytes)
            turn.gap = True
        elif turn.size >= turn.next_run_at:
            turn.next_run(base, self.settings.index_interval_bytes)
        turn.batches.append(batch)
        turn.size += size
        turn.run_ms = max(turn.run_ms, header.max_timestamp_ms)
        if epoch != self._epoch:
            self._begin_epoch(epoch, base)
            self._epoch = epoch
        if header.producer_id >= 0:
            self.producers.appended(header, base, batch)
        self.end_offset = base + header.last_offset_delta + 1

    def _begin_turn(self, base: int) -> None:
        """What could fail for lack of files is done here, before anything has changed."""
        try:
            if not self.producers.loaded:
                self.producers.load()
            if self._epoch is None:
                self.epochs.load()
        except OSError as error:
            raise self._refuse(error).again() from error
        self._services.staged[self] = None
        self._turn.begin(base, self.settings.index_interval_bytes, gap=base != self.end_offset)

    def _write_in_turn(self) -> None:
        error = self._services.write_now(self)
        if error is not None:
            self._refusal = self._refusal or error
            raise error.again()

    def prepare(self) -> HeadraceError | None:
        """Make sure that what was staged can be written and found; or take it back and answer why."""
        turn = self._turn
        self.frame_bytes = FRAME_BYTES * len(self.bounds_frames()) if self.bounds_unwritten else 0
        if not turn.batches:
            return self.take_refusal()
        self.frame_bytes += FRAME_BYTES * (1 + len(self._epochs_of_turn())) + turn.size
        if self.offline is not None:
            self._roll_back()
            return self.offline
        try:
            # Epochs first: without its entry a batch would look wrong, an entry without its batch is dropped at start.
            if self._epochs_before is not None:
                self.derived.save_epochs()
            if turn.single:
                offset, run_ms = self.written_offset, turn.run_ms
                self.queue.ready(1, offset, run_ms, offset, run_ms)
            else:
                turn.prepare(self.queue, self.written_offset)
        except OSError as error:
            return self.take_back(error)
        return None

    def frames(self, parts: list[Buffer]) -> int:
        """Put the log's frames into a write; answers how many bytes of them come before the batches."""
        count = 0
        if self.bounds_unwritten:
            bounds = self.bounds_frames()
            parts += bounds
            count = FRAME_BYTES * len(bounds)
        turn = self._turn
        if turn.batches:
            epochs = self._epoch_frames(self._epochs_of_turn())
            parts += epochs
            count += FRAME_BYTES * len(epochs)
            kind = frames.REPLACE if turn.gap else frames.APPEND
            parts.append(
                frames.pack(kind, turn.size, self.topic_id, self._partition, self.written_offset, self.end_offset)
            )
            parts += turn.batches
            count += FRAME_BYTES
        return count

    def bounds_frames(self) -> list[bytes]:
        bounds = [(min(self.start_offset, self.written_offset), self.written_offset)]
        if self.begun_anew and self.written_offset:
            bounds.insert(0, (0, 0))
        return [frames.pack(frames.BOUNDS, 0, self.topic_id, self._partition, *each) for each in bounds]

    def opening_frames(self) -> list[bytes]:
        """What a new commit file begins with: bounds and last epoch, without what is staged."""
        written = self.epochs.entries[: self._epochs_before]
        return self.bounds_frames() + self._epoch_frames(written[-1:])

    def _epochs_of_turn(self) -> Sequence[tuple[int, int]]:
        return () if self._epochs_before is None else self.epochs.entries[self._epochs_before :]

    def _epoch_frames(self, entries: Sequence[tuple[int, int]]) -> list[bytes]:
        return [frames.pack(frames.EPOCH, 0, self.topic_id, self._partition, start, epoch) for epoch, start in entries]

    def wrote(self, number: int, byte: int) -> None:
        """The frames are in the commit log, the batches from this byte on."""
        self.bounds_unwritten = self.begun_anew = False
        turn = self._turn
        if turn.batches:
            if turn.single:
                self.queue.add(Run(number, byte, turn.size, self.written_offset, turn.run_ms), self.end_offset)
            else:
                turn.enter(self.queue, number, byte, self.written_offset, self.end_offset)
            self.snapshot_bytes += turn.size
            self.written_offset = self.end_offset
            self._epochs_before = None
            turn.clear()
            if self.producers.undo:
                self.producers.settled(self.committed_offset)
        if self._shortage.lasts:
            self._shortage.ended()

    def take_back(self, error: OSError) -> HeadraceError:
        """Go back to where the turn began; appends are refused until the store has reported it."""
        self._roll_back()
        reason = self._refuse(error)
        self._refusal = self.offline
        return reason

    def _roll_back(self) -> None:
        if self._turn.batches:
            self._take_back_epochs()
            self.end_offset = self.written_offset
            self.producers.take_back()
            self._turn.clear()

    def _refuse(self, error: OSError) -> HeadraceError:
        path = self._services.commit_log.path(self._services.commit_log.number)
        return self._shortage.met(error.filename or path, error) if refusal.passes(error) else self.fail(error)

    def fail(self, error: OSError) -> HeadraceError:
        """The commit log is not known any more to hold what it should: all logs go offline."""
        self._services.failed(error)
        assert self.offline is not None
        return self.offline

    def go_offline(self, reason: HeadraceError) -> None:
        if self.offline is None:
            self.offline = self._refusal = reason

    # Reading.

    def _read(self, offset: int, max_bytes: int, limit: int, warm: bool) -> ReadResult:
        if isinstance(self.offline, UnknownPartition):
            raise self.offline.again()
        return self._reader.read(offset, max_bytes, limit, warm=warm)

    def doubt(self) -> None:
        self._reader.doubt(self.written_offset)

    def headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        return reader.headers(self.queue, self._services.commit_log, from_offset, from_offset)

    def sound_headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        return reader.headers(self.queue, self._services.commit_log, from_offset, NEVER)

    def _checked_headers(self, from_offset: int, past_damage: bool) -> Iterator[tuple[BatchHeader, FileSlice]]:
        commit_log, left_out = self._services.commit_log, self.producers.left_out
        return reader.checked_headers(self.queue, commit_log, from_offset, past_damage=past_damage, left_out=left_out)

    def first_damaged_offset(self) -> int | None:
        known = (self.start_offset, self.damaged_from)
        return next((offset for offset in known if offset is not None and self._is_damaged(offset)), None)

    def lost_front(self) -> bool:
        return self._is_damaged(self.start_offset)

    def _is_damaged(self, offset: int) -> bool:
        entry = next(self.queue.entries(offset), None) if offset >= self.start_offset else None
        return entry is not None and entry.size == DAMAGED

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return reader.offset_for_time(
                self.queue, self._services.commit_log, timestamp_ms, self.start_offset, self.written_offset
            )

    def greatest_timestamp(self) -> TimedOffset | None:
        with refusal.reading(self.topic_partition):
            return reader.greatest_timestamp(
                self.queue, self._services.commit_log, self.start_offset, self.written_offset
            )

    # Cutting.

    def truncate(self, offset: int) -> None:
        self._flush_staged()
        if offset >= self.end_offset:
            return
        if offset <= self.start_offset:
            # Unlike a new beginning this leaves what is known of producers from before the offset.
            self._remember_producers(offset)
            self._drop_all(offset, snapshots_to=offset)
            return
        with refusal.reading(self.topic_partition):
            end = self.queue.cut(offset)
        with self._cutting():
            self.before_cut()
            self.start_offset = min(self.start_offset, end)
            self.queue.drop_before(self.start_offset)
            self._cut_to(end)

    def restart_at(self, offset: int) -> None:
        self._flush_staged()
        self._drop_all(offset, snapshots_to=0)

    def _drop_all(self, offset: int, snapshots_to: int) -> None:
        with self._cutting():
            self.begun_anew = True
            self.start_offset = offset
            self.queue.drop_all(offset)
            self.derived.remove_snapshots_above(snapshots_to)
            self._forget_from(0)
            self._cut_to(offset)

    @contextmanager
    def _cutting(self) -> Iterator[None]:
        """What was cut in part is not known any more: no checkpoint may speak of it, and the next start reads it."""
        try:
            yield
        except OSError as error:
            reason = refusal.failure(self.topic_partition, self.folder, error)
            self.go_offline(reason)
            raise reason from error

    def _write_alone(self) -> HeadraceError | None:
        return self._services.write_now(self) if self._turn.batches else None

    def _cut_to(self, end_offset: int) -> None:
        super()._cut_to(end_offset)
        self._reader.forget()
        self.derived.remove_snapshots_above(end_offset)
        self.derived.save_epochs()
        self._write_bounds()
        self._services.sync_soon(self)
        self._services.checkpoint_soon(None)
        self._services.emptied()

    def _forget_from(self, offset: int) -> None:
        super()._forget_from(offset)
        self._reader.checked.cut(offset)

    def _write_bounds(self) -> None:
        self.bounds_unwritten = True
        self._services.write_now(self)

    def _raise_start(self, offset: int) -> None:
        refused = self._write_alone()
        if refused is not None:
            self._refusal = self._refusal or refused
        self._remember_producers(offset)
        self.producers.moved()
        self.start_offset = offset
        self.queue.drop_before(offset)
        self._drop_aborted_before(offset)
        self._reader.forget()
        self._write_bounds()
        self._services.emptied()

    def replaced(self, replacements: Sequence[Replacement]) -> None:
        """The commit log holds replace frames with these runs, and they are synced: let the queue lead to them.
        After an OSError some of them may be as they were."""
        wanted = [each for each in replacements if each.next_offset > self.start_offset]
        try:
            self.queue.splice(wanted)
        except OSError as error:
            if self.queue.broken:
                self.go_offline(
                    StorageFailed(
                        f"{self.topic_partition}: {error.filename}: {error.strerror}: the log is offline until the "
                        "broker is restarted; nothing is lost"
                    )
                )
            raise
        finally:
            if self.offline is None:
                self.queue.drop_before(self.start_offset)
            self.producers.moved()
            self._reader.forget()
            self._services.checkpoint_soon(None)
            self._services.emptied()

    def _load_producers(self, past_damage: bool) -> producers.Load:
        """From the newest whole snapshot, and the batches behind it."""
        with refusal.reading(self.topic_partition):
            # What came between an older one and the start is gone, so it says nothing of now.
            from_offset, known = self._newest_known(self.derived.snapshots, self.start_offset)
            yield from self._replay_producers(known, from_offset, past_damage)
        return known

    def _aborted_file(self, marker_offset: int, last: AbortedEntries | None) -> int:
        return by_count(marker_offset, last)

    def write_snapshot(self) -> None:
        if self.producers.loaded and self.snapshot_bytes:  # else nothing was appended since the last one
            self._write_snapshot_at(self.written_offset, self.producers.states)
            self.snapshot_bytes = 0

    def _has_snapshot_at(self, offset: int) -> bool:
        return offset in self.derived.snapshots

    def _decided_by_snapshot(self, offset: int) -> bool:
        return self.derived.snapshots.tells_of_none_open(offset)

    def _write_snapshot_at(self, offset: int, states: dict[int, producers.ProducerState]) -> None:
        starts = (
            self.derived.snapshots.offsets if self.bounds_unwritten else (self.safe_start_offset, self.start_offset)
        )
        snapshot, paths = self._snapshot(offset, states)
        self.derived.write_snapshot(offset, snapshot, starts, paths)
        self._tidy_aborted()

    def _sync_snapshot_soon(self) -> None:
        self._services.checkpoint_soon(None)

    # Syncing.

    def take_unsynced(self) -> list[File]:
        """Files to sync so that everything written is safe; it counts as asked for from now on."""
        self.sync_asked_offset = self.written_offset
        return self._services.commit_log.ask()

    def synced_upto(self, offset: int) -> None:
        """The sync that `take_unsynced` was called for has come back."""
        self._services.commit_log.answered()
        self.durable_offset = max(self.durable_offset, offset)

    def take_derived(self) -> list[File]:
        """What a checkpoint syncs: the files that could be derived from the commit log."""
        return self.queue.unsynced() + self.derived.take_unsynced()

    def sync_derived_again(self) -> None:
        """What was written beside the commit log may not be on disk: the next checkpoints sync it."""
        self.queue.sync_again()
        self.derived.sync_again()

    def stop(self) -> None:
        """Write what a start without a scan needs; syncing it is the caller's."""
        self.write_snapshot()
        self.derived.save_epochs()

    def _drop_staged(self) -> None:
        self._turn.clear()

    def close_files(self) -> None:
        self.queue.close()
