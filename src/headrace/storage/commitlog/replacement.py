"""Giving a partition other batches for some of its offsets: the same ones moved to the end of the commit log, or fewer.

The batches are written as a replace frame and synced; only then does the queue lead to them. Until that moment the old
ones are served, and after a crash in between a start finds the frame and does the rest. If the partition was truncated
meanwhile, its queue is left alone: a start that reads both frames comes to the same offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import CorruptBatch, HeadraceError, StorageFailed
from headrace.ports.disk import Buffer, Disk
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frame_scan import Unsound, read_batches
from headrace.storage.commitlog.frame_writer import FrameWriter
from headrace.storage.commitlog.frames import FRAME_BYTES, REPLACE, Frame
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import GONE, NO_TIMESTAMP, Run
from headrace.storage.commitlog.splice import Replacement
from headrace.storage.group_commit import concerns

Done = Callable[[HeadraceError | None], None]


class Replacer:
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
