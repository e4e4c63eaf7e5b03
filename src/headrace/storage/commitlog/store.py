"""All logs of one data folder in the `shared` layout, which write to one commit log.

One write and one sync of the commit log serve all logs; where they fail, all logs are offline. What is derived from it
is synced by checkpoints. Commit files of which little is wanted are rewritten, those of which nothing is go.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Unpack

from headrace.errors import HeadraceError, StorageFailed
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.settings.values import LogSettings
from headrace.storage import folder, rewritten, shortfall
from headrace.storage.checkpoint import FILE_NAME as CHECKPOINT_FILE
from headrace.storage.cleaner import Steps
from headrace.storage.commitlog import checkpoint, compaction, retention, rewriter
from headrace.storage.commitlog.checkpoint import LogPoint
from headrace.storage.commitlog.commitlog import FILE_BYTES, CommitLog, FrameWriter
from headrace.storage.commitlog.log import DerivedFilesSync, SharedLog
from headrace.storage.commitlog.queue import Queue
from headrace.storage.commitlog.queuefile import OpenQueues
from headrace.storage.commitlog.recovery import RecoveredQueue, StoreRecovery
from headrace.storage.commitlog.replace_frames import Replacements, Replacer
from headrace.storage.commitlog.rewriter import REWRITE_SHARE, EmptyFiles, Rewriter
from headrace.storage.folder import Stray
from headrace.storage.group_commit import concerns
from headrace.storage.local_store import Expected, LocalStore, StoreOptions, StoreServices
from headrace.storage.log import Log, Phase, TopicPartition

log = logging.getLogger(__name__)

OPEN_QUEUES_MAX: Final = 2000
A_SEGMENT: Final = 3
A_QUEUE: Final = 2
"""Descriptors of an open segment, which the bound given is meant for, and of an open queue."""
SNAPSHOT_BYTES: Final = 64 << 20


def points(logs: Iterable[SharedLog]) -> Iterator[LogPoint]:
    for each in logs:
        where, queue = each.topic_partition, each.queue
        yield LogPoint(
            where.topic,
            where.partition,
            each.topic_id.hex(),
            each.start_offset,
            each.written_offset,
            queue.size_bytes,
            *queue.active_point(),
            each.epochs.crc_below(each.written_offset),
            list(queue.live.items()),
            each.cleanings,
        )


def live_bytes(numbers: Iterable[int], logs: Iterable[SharedLog]) -> dict[int, int]:
    """Wanted bytes in each commit file, by its number."""
    live = dict.fromkeys(numbers, 0)
    for each in logs:
        for number, count in each.queue.live.items():
            live[number] = live.get(number, 0) + count
    return live


@dataclass(slots=True, kw_only=True)
class SharedServices(StoreServices[SharedLog]):
    commit_log: CommitLog
    open_queues: OpenQueues
    write_now: Callable[[SharedLog], HeadraceError | None]
    """Write what one log has staged, its bounds if they are to be told, before the turn ends."""
    failed: Callable[[OSError], None]
    """The commit log cannot be relied on any more: every log goes offline."""
    emptied: Callable[[], None]
    """A log points to less than before: commit files may have become empty."""

    def new_queue(self, folder: str) -> Queue:
        return Queue(self.disk, self.commit_log, self.open_queues, folder)


class SharedStore(LocalStore[SharedLog]):
    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        *,
        open_segments_max: int = OPEN_QUEUES_MAX,
        file_bytes: int = FILE_BYTES,
        rewrite_share: float = REWRITE_SHARE,
        **options: Unpack[StoreOptions],
    ) -> None:
        super().__init__(disk, clock, data, folder.SHARED, **options)
        self.commit_log = CommitLog(disk, data, file_bytes)
        self._writer = FrameWriter(self.commit_log, self._logs.values)
        self.replacer = Replacer(disk, self.commit_log, self._writer, self._failed)
        self._replacements: Replacements | None = None
        self.rewriter = Rewriter(self.commit_log, self._logs.values, self._new_replacements, rewrite_share)
        self._empty_files = EmptyFiles(self.commit_log, self._writer)
        self._perhaps_empty = False
        """Whether a commit file may have become empty since that was last looked at."""
        self._keeps_files = False
        """Whether folders are set aside whose batches may be in any commit file."""
        self._derived_files = DerivedFilesSync(self._sync_files_max)
        self._checkpoint_position = 0
        self._commit_files: Sequence[File] = ()
        self._opened_synced = False
        self._clean = False
        """What the checkpoint says of the stop."""
        self._failure: StorageFailed | None = None
        self._services = SharedServices(
            commit_log=self.commit_log,
            open_queues=OpenQueues(max(8, open_segments_max * A_SEGMENT // A_QUEUE)),
            write_now=self._write_now,
            failed=self._failed,
            emptied=self._emptied,
            **self._shared_services(),
        )

    def _open(self, expected: Expected, same_boot: bool) -> list[Stray]:
        found = checkpoint.read(self._disk, self.data)
        if found is None:
            log.error("%s/%s is damaged: the whole commit log is read", self.data, CHECKPOINT_FILE)
        opened = StoreRecovery(self._services, self.data, expected, found, same_boot=same_boot).run()
        self._logs.update(opened.logs)
        for each in opened.logs.values():
            self._dirty.wrote(each)
        self.was_clean = opened.was_clean and found is not None
        if self.was_clean:
            self.commit_log.synced_to(self.commit_log.end)
        else:
            # A kill may have left a file without its head: all bounds are told again.
            for each in self._logs.values():
                each.bounds_unwritten = True
                self._staged[each] = None
        for staged, error in self._writer.write(list(self._staged)):
            log.warning("%s: %s", staged.topic_partition, error)
        self._staged.clear()
        self._perhaps_empty = True
        self._keep_for(rewriter.strays_with_topics(self._disk, self.data))
        self._opened_synced = self._sync_now()
        return opened.strays

    def _write_first_checkpoint(self) -> None:
        if self._opened_synced:
            self._checkpoints.write_now()
            shortfall.forget_cut(self._disk, self.commit_log.folder)
        else:
            self._checkpoints.soon()

    def _keep_for(self, found: list[str]) -> None:
        """Folders that are set aside hold queues only, their batches are in commit files that look unwanted."""
        self._keeps_files = bool(found)
        if found:
            log.warning("%s", rewriter.strays_advice(self.data, found))

    def _create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> SharedLog:
        with self._new_folders.begin(topic_partition, topic_id, self.commit_log.synced) as path:
            found = RecoveredQueue(queue=self._services.new_queue(path))
            created = SharedLog(self._services, path, topic_partition, topic_id, settings, found)
            created.sync_derived_again()
        # The partition may have been here before, under the same id; nothing of that counts.
        created.bounds_unwritten = True
        self._staged[created] = None
        self._logs[topic_partition] = created
        if self._failure is not None:
            created.go_offline(self._failure)
        return created

    def delete(self, topic_partition: TopicPartition) -> None:
        is_open = topic_partition in self._logs
        super().delete(topic_partition)
        self._perhaps_empty = self._perhaps_empty or is_open

    def set_aside(self, topic_partition: TopicPartition) -> str:
        self._keeps_files = True
        aside = super().set_aside(topic_partition)
        log.warning("%s", rewriter.strays_advice(self.data, [aside]))
        return aside

    def delete_left(self, topic: str, topic_id: bytes) -> None:
        waiting = len(self._trash)
        try:
            super().delete_left(topic, topic_id)
        finally:
            if len(self._trash) > waiting and self._keeps_files:
                self._keeps_files = bool(rewriter.strays_with_topics(self._disk, self.data))
                self._perhaps_empty = True

    # Every turn of the loop.

    def write_staged(self) -> list[tuple[Log, HeadraceError]]:
        staged = self._staged
        if not staged:
            return []
        failures = self._writer.write(staged)
        failed = {each for each, _ in failures} if failures else ()
        for written in staged:
            if written in failed:
                continue
            self._flushes.wrote(written)
            if written.settings.compact:
                self._dirty.written[written] = self._clock.now()
        staged.clear()
        self.commit.start()
        return [(each, error) for each, error in failures]

    def _write_now(self, one: SharedLog) -> HeadraceError | None:
        failures = self._writer.write([one])
        return failures[0][1] if failures else None

    def _failed(self, error: OSError) -> None:
        """Nobody knows any more what the commit log holds."""
        path = error.filename or self.commit_log.folder
        text = "every log of this broker is offline; mend the disk and restart the broker"
        reason = self._failure = StorageFailed(f"{path}: {error.strerror}: {text}")
        log.error("%s", reason)
        rewritten.note(self._disk, self.commit_log.folder)
        for each in self._logs.values():
            if each.offline is None:
                each.go_offline(reason)
                self._clock.call_soon(lambda each=each: self._notify(each))  # type: ignore[misc]

    def _notify(self, one: SharedLog) -> None:
        for listener in self.commit.listeners:
            listener(one)

    # From time to time.

    def _apply_retention(self, checked: SharedLog, now_ms: int) -> None:
        if checked.snapshot_bytes >= SNAPSHOT_BYTES and checked not in self._staged:
            checked.write_snapshot()
        if retention.apply(checked, now_ms, self._disk, self.commit_log):
            self._checking.append(checked)

    def _compaction_due(self, one: SharedLog, now_ms: int) -> bool:
        return compaction.due(one, self._disk, self.commit_log, now_ms)

    def _compact(self, one: SharedLog) -> Steps:
        return compaction.steps(one, self._disk, self.commit_log, self._new_replacements(), self._clock.wall_ms())

    def _new_replacements(self) -> Replacements:
        """Of the job that begins; the cleaner does one at a time."""
        self._replacements = Replacements(self._services, self.replacer)
        return self._replacements

    def _cleaned(self) -> None:
        super()._cleaned()
        if not self._checking:
            self._rewrite_some()

    def _round_began(self) -> None:
        self.rewriter.begin_round()

    def _round_ended(self) -> None:
        self._rewrite_some()

    # Commit files of which little or nothing is wanted.

    def _rewrite_some(self) -> None:
        idle = not (self._cleaner.busy or self._offline or self._keeps_files)
        number = None if not idle else self.rewriter.sparse_file(self.live_bytes())
        if number is not None:
            self._cleaner.add(number, lambda: self.rewriter.steps(number))

    def live_bytes(self) -> dict[int, int]:
        """Wanted bytes in each commit file, by its number."""
        return live_bytes(self.commit_log.sizes, self._logs.values())

    def _emptied(self) -> None:
        self._perhaps_empty = True

    def _remove_unwanted(self) -> None:
        if not self._perhaps_empty:
            return
        self._perhaps_empty = False
        if self._keeps_files or self._offline:
            return
        removal = self._empty_files.removal(self.live_bytes())
        self._set_aside(removal.numbers)
        self._perhaps_empty = removal.waits
        if removal.wants_checkpoint:
            self._checkpoints.soon()

    def _set_aside(self, numbers: list[int]) -> None:
        delay_ms = max((each.settings.file_delete_delay_ms for each in self._logs.values()), default=0)
        try:
            self._trash.later(self.commit_log.set_aside(numbers), delay_ms)
        except OSError as error:
            log.error("a commit file without anything wanted cannot be set aside: %s", error)

    @property
    def _offline(self) -> bool:
        """Whether a log is, by a failure of the disk: no checkpoint may speak for it, and no file goes."""
        return self._failure is not None or any(isinstance(each.offline, StorageFailed) for each in self._logs.values())

    # The checkpoint (see `storage.checkpoint.Contents`).

    def encode(self) -> bytes:
        self._refuse_if_offline()
        self._checkpoint_position = self.commit_log.end
        return checkpoint.encode(self._clean, self._checkpoint_position, points(self._logs.values()))

    def _refuse_if_offline(self) -> None:
        if self._offline:
            raise OSError(errno.EIO, "a log is offline; mend the disk and restart the broker", self.data)

    def files_to_sync(self) -> Sequence[File]:
        self._commit_files = self.commit_log.unsynced()
        return [*self._commit_files, *self._derived_files.take(list(self._logs.values()))]

    def synced(self, error: OSError | None) -> None:
        if error is None:
            self._refuse_if_offline()  # what failed is not asked for again, so this sync says nothing of it
            self.commit_log.synced_to(self._checkpoint_position)
            self._empty_files.checkpointed = self._checkpoint_position
            return
        if concerns(error, self._commit_files):
            self._failed(error)
        for each in self._logs.values():
            each.sync_derived_again()

    # Stopping.

    def close(self) -> bool:
        if self.phase is not Phase.OPEN:
            self.abandon()
            return False
        self.write_staged()
        self._end_jobs()
        for each in self._logs.values():
            try:
                if each.offline is None:
                    each.stop()
            except OSError as error:
                log.warning("%s: the next start reads more of it: %s", each.topic_partition, error)
        self._clean = self._sync_now() and self._finish_replacing() and self._is_unmarked()
        self._checkpoints.close()
        try:
            if self._clean:
                self._checkpoints.write_now()
        except OSError as error:
            log.error("no clean checkpoint, the next start reads the commit log: %s", error)
            self._clean = False
        self._let_go()
        return self._clean

    def _finish_replacing(self) -> bool:
        """Have the queues lead to what a job had written: the commit log speaks of it already."""
        try:
            return self._replacements is None or not self._replacements.stop() or self._sync_now()
        except OSError as error:
            log.error("no clean checkpoint, the next start reads the commit log: %s", error)
            return False

    def _is_unmarked(self) -> bool:
        """A sync that was under way may have failed: nobody listens to it any more, and it is told once only."""
        try:
            rewritten.refuse_if_noted(self._disk, self.commit_log.folder)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _end_jobs(self) -> None:
        super()._end_jobs()
        self.replacer.close()

    def _close_files(self) -> None:
        super()._close_files()
        self.commit_log.close()

    def _sync_now(self) -> bool:
        """Make everything that is written durable, many files at a time; answers whether all of it is."""
        if self._offline:
            return False
        failure: OSError | None = None
        self._checkpoint_position = self.commit_log.end
        while files := self.files_to_sync():
            try:
                self._disk.sync_now(files)
            except OSError as error:
                failure = error
            self.synced(failure)
            if failure is not None or len(files) < self._derived_files.most:
                break
        if not self._offline:
            for each in self._logs.values():
                each.synced_upto(each.written_offset)
        return failure is None
