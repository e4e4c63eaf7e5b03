"""Replace frames of several logs at a time: written one after the other, synced together, then led to by the queues.

A log that was truncated, deleted or taken offline meanwhile keeps its queue as it is: what the frames hold is not used.
Frames with fewer batches are made up for before the truncation is told: what the queue still leads to is written behind
them, so that a start that reads everything in order comes to the same records. Files that the queues no longer lead to
go after the next checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.errors import CorruptBatch, HeadraceError, StorageFailed
from headrace.ports.disk import Buffer, Disk
from headrace.storage import refusal
from headrace.storage.cleaner import Steps, wait_for_sync
from headrace.storage.commitlog.commitlog import CommitLog, FrameWriter
from headrace.storage.commitlog.frames import FRAME_BYTES, REPLACE, Frame, Unsound, read_batches
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import GONE, NO_TIMESTAMP, Replacement, Run
from headrace.storage.group_commit import concerns

if TYPE_CHECKING:
    from headrace.storage.commitlog.store import SharedServices

logger = logging.getLogger(__name__)

Waiting = dict[SharedLog, tuple[int, list[Replacement]]]


Done = Callable[[HeadraceError | None], None]


class Replacer:
    """Giving a partition other batches for some of its offsets: the same ones moved to the end of the commit log, or
    fewer.

    The batches are written as a replace frame and synced; only then does the queue lead to them. Until that moment the
    old ones are served, and after a crash in between a start finds the frame and does the rest. If the partition was
    truncated meanwhile, its queue is left alone: a start that reads both frames comes to the same offsets.
    """

    def __init__(
        self, disk: Disk, commit_log: CommitLog, writer: FrameWriter, failed: Callable[[OSError], None]
    ) -> None:
        self._disk = disk
        self._commit_log = commit_log
        self._writer = writer
        self._failed = failed
        self._closed = False

    def replace(
        self, log: SharedLog, first_offset: int, next_offset: int, batches: Sequence[Buffer], done: Done | None = None
    ) -> None:
        """From first to next the log holds these batches, whose offsets rise and may have gaps. Both are boundaries of
        what it holds. CorruptBatch if one is not whole, OSError if the frame could not be written: nothing has changed
        then. `done` hears when the queue has changed, or why it has not."""
        runs = self.write(log, first_offset, next_offset, batches)
        upto, truncations = self._commit_log.end, log.truncations
        files = self._commit_log.unsynced()

        def synced(error: OSError | None) -> None:
            if self._closed:
                return
            reason: HeadraceError | None = None
            if error is not None:
                if concerns(error, files):
                    self._failed(error)
                reason = log.offline or StorageFailed(f"{log.topic_partition}: {error.strerror}")
            else:
                self._commit_log.synced_to(upto)
                if log.offline is None and log.truncations == truncations:
                    log.replaced([Replacement(first_offset, next_offset, runs)])
                else:
                    reason = log.offline or StorageFailed(f"{log.topic_partition} was truncated meanwhile")
            if done is not None:
                done(reason)

        self._disk.request_sync(files, synced)

    def write(self, log: SharedLog, first_offset: int, next_offset: int, batches: Sequence[Buffer]) -> list[Run]:
        """Write the frame; the queue must not lead to these runs before it is synced."""
        payload = memoryview(b"".join(batches))
        partition = log.topic_partition.partition
        frame = Frame(REPLACE, len(payload), log.topic_id, partition, first_offset, next_offset, 0, 0)
        found = read_batches(payload, frame, log.settings.index_interval_bytes, -1)
        if isinstance(found, Unsound):
            raise CorruptBatch(
                f"{log.topic_partition}: offsets {first_offset} to {next_offset - 1} stay: {found.reason}"
            )
        byte = self._writer.write_frame(frame, payload)
        number = self._commit_log.number
        runs = [run._replace(number=number, byte=run.byte + byte + FRAME_BYTES) for run in found.runs]
        if not runs or runs[0].offset > first_offset:
            runs = [Run(number, byte, GONE, first_offset, NO_TIMESTAMP), *runs]
        return runs

    def close(self) -> None:
        """Syncs under way are not listened to any more."""
        self._closed = True


class Replacements:
    def __init__(self, services: SharedServices, replacer: Replacer) -> None:
        self._services = services
        self._replacer = replacer
        self._waiting: Waiting = {}
        self._syncing: Waiting = {}
        self.runs = 0
        """Runs that wait for the sync."""
        self.written_bytes = 0

    def add(
        self, log: SharedLog, first_offset: int, next_offset: int, batches: Sequence[Buffer], *, fewer: bool = False
    ) -> None:
        """From first to next the log holds these batches, perhaps fewer than before; both are where runs of it begin.
        CorruptBatch if one is not whole, OSError if the frame could not be written: nothing has changed then."""
        try:
            runs = self._replacer.write(log, first_offset, next_offset, batches)
        except OSError as error:
            if not refusal.passes(error):
                self._services.failed(error)
            raise
        self.written_bytes += FRAME_BYTES + sum(map(len, batches))
        self.runs += len(runs)
        truncations, waiting = self._waiting.setdefault(log, (log.truncations, []))
        if truncations == log.truncations:
            waiting.append(Replacement(first_offset, next_offset, runs))
        if fewer:
            log.before_cut = lambda: self._put_back(log)

    def _put_back(self, log: SharedLog) -> None:
        """The queue was cut: what it leads to where frames say otherwise is written behind them."""
        commit_log, queue = self._services.commit_log, log.queue
        found = [each for part in (self._syncing, self._waiting) for each in part.get(log, (0, []))[1]]
        written: list[Replacement] = []
        for first_offset, next_offset, _ in found:
            end = min(next_offset, queue.end_offset)
            if first_offset >= end or end <= log.start_offset:
                continue
            entries = [each for each in queue.entries(first_offset) if each.offset < end]
            try:
                batches = [commit_log.file(e.number).pread(e.size, e.byte) for e in entries if e.has_batches]
                runs = self._replacer.write(log, entries[0].offset, end, batches)
            except (OSError, CorruptBatch) as error:
                logger.error("%s: a start that loses its queue may miss records: %s", log.topic_partition, error)
                continue
            written.append(Replacement(entries[0].offset, end, runs))
        self._waiting[log] = log.truncations + 1, written

    def settle(self) -> Steps:
        """Sync what was written, and have the queues lead to it, one after the other."""
        while self._waiting:
            yield from self._settle()

    def _settle(self) -> Steps:
        waiting, self._waiting, self.runs = self._waiting, {}, 0
        self._syncing = waiting
        services, commit_log = self._services, self._services.commit_log
        files, upto = commit_log.unsynced(), commit_log.end
        try:
            yield from wait_for_sync(services.disk, files)
        except OSError as error:
            if concerns(error, files):
                services.failed(error)
            raise
        commit_log.synced_to(upto)
        failure: OSError | None = None
        for log in waiting:
            try:
                _lead(waiting, log)
            except OSError as error:  # no room for its queue: it leads to the old ones
                failure = error
            yield None
        self._syncing = {}
        services.checkpoint_soon(lambda error: _drop_old(waiting) if error is None else None)
        if failure is not None:
            raise failure

    def stop(self) -> bool:
        """Everything is synced, and nobody goes on with this: have the queues lead to all that waits. Answers whether
        there was any. OSError if there is no room for a queue."""
        found = [part for part in (self._syncing, self._waiting) if part]
        self._syncing, self._waiting = {}, {}
        for waiting in found:
            for log in waiting:
                _lead(waiting, log)
        return bool(found)


def _lead(waiting: Waiting, log: SharedLog) -> None:
    truncations, replacements = waiting[log]
    if log.offline is None and log.truncations == truncations:
        log.replaced(sorted(replacements))
        log.before_cut = _nothing
        replacements.clear()


def _nothing() -> None:
    return None


def _drop_old(logs: Waiting) -> None:
    for log in logs:
        if log.offline is None:
            log.queue.drop_old()
