"""All logs of one data folder in the `shared` layout, and the work that they need from time to time.

The store holds the folder's lock from its construction to `close`. `open` is called once, with the partitions that the
cluster's metadata gives this broker; folders of others are set aside.
"""

from __future__ import annotations

import errno
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from headrace.errors import CorruptBatch, HeadraceError, StorageFailed
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.settings.values import LogSettings
from headrace.storage import cut_tails, folder, rewritten
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.checkpoint import FILE_NAME as CHECKPOINT_FILE
from headrace.storage.checkpoint import CheckpointWriter
from headrace.storage.cleaner import Cleaner, DirtyLogs, Steps
from headrace.storage.commitlog import checkpoint, compaction, retention, rewriter
from headrace.storage.commitlog.checkpoint import LogPoint
from headrace.storage.commitlog.commitlog import FILE_BYTES, CommitLog, FrameWriter
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.partition_files import DerivedFiles
from headrace.storage.commitlog.queuefile import OpenQueues
from headrace.storage.commitlog.recovery import Expected, Opening
from headrace.storage.commitlog.replace_frames import Replacements, Replacer
from headrace.storage.commitlog.rewriter import REWRITE_SHARE, EmptyFiles, Rewriter
from headrace.storage.commitlog.services import Found, Surroundings
from headrace.storage.folder import Stray, Trash
from headrace.storage.group_commit import FILES_MAX, Flushes, GroupCommit, concerns
from headrace.storage.log import Log, Phase, TopicPartition
from headrace.storage.producers import ProducerLoads

log = logging.getLogger(__name__)

LOGS_PER_TICK: Final = 200
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


class SharedStore:
    """See `storage.log.LogStore`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        *,
        retention_check_ms: int = 300_000,
        cleaner_backoff_ms: int = 15_000,
        checkpoint_ms: int = 60_000,
        producer_expire_ms: int = 86_400_000,
        archived_offset: Callable[[TopicPartition], int] = lambda _: 0,
        open_segments_max: int = OPEN_QUEUES_MAX,
        sync_files_max: int = FILES_MAX,
        file_bytes: int = FILE_BYTES,
        rewrite_share: float = REWRITE_SHARE,
    ) -> None:
        self.data = data
        self._disk = disk
        self._clock = clock
        self._retention_check_ms = retention_check_ms
        self._producer_expire_ms = producer_expire_ms
        self._lock = folder.lock(disk, data, folder.SHARED)
        self._new_folders = folder.NewFolders(disk, data)
        self._logs: dict[TopicPartition, SharedLog] = {}
        self._staged: dict[SharedLog, None] = {}
        self.commit_log = CommitLog(disk, data, file_bytes)
        self.commit = GroupCommit(disk, clock, sync_files_max)
        self._writer = FrameWriter(self.commit_log, self._logs.values)
        self._checkpoints = CheckpointWriter(disk, clock, data, self, checkpoint_ms)
        self.replacer = Replacer(disk, self.commit_log, self._writer, self._failed)
        self._derived_files = DerivedFiles(sync_files_max)
        self._checkpoint_position = 0
        self._commit_files: Sequence[File] = ()
        self._around = Surroundings(
            disk=disk,
            clock=clock,
            commit_log=self.commit_log,
            open_queues=OpenQueues(max(8, open_segments_max * A_SEGMENT // A_QUEUE)),
            check_budget=CheckBudget(clock),
            producer_loads=ProducerLoads(clock),
            staged=self._staged,
            checkpoint_soon=self._checkpoints.soon,
            sync_soon=self._sync_soon,
            write_now=self._write_now,
            failed=self._failed,
            emptied=self._emptied,
            archived_offset=archived_offset,
        )
        self.rewriter = Rewriter(self.commit_log, self._logs.values, self._new_replacements, rewrite_share)
        self._cleaner = Cleaner(clock, self._cleaned)
        self._dirty = DirtyLogs(clock, self._cleaner, cleaner_backoff_ms, self._compaction_due, self._compact)
        self._flushes: Flushes[SharedLog] = Flushes(clock, self.commit)
        self._trash = Trash(disk, clock)
        self._empty_files = EmptyFiles(self.commit_log, self._writer)
        self._checking: deque[SharedLog] = deque()
        self._next_check = clock.now() + retention_check_ms / 1000
        self._perhaps_empty = False
        self.phase = Phase.LOCKED
        self._clean = self._keeps_files = False
        self._failure: StorageFailed | None = None
        self._replacements: Replacements | None = None
        self.was_clean = True
        """Whether `open` found the commit log as a clean stop leaves it; if not, what was not synced may be lost."""

    def open(
        self, expected: Expected, judge: Callable[[], None] = lambda: None, *, same_boot: bool = False
    ) -> list[Stray]:
        """Open the logs of the expected partitions; answers the folders that were set aside. `judge` is called when all
        of them are open, and the checkpoint still says what the run before left. If anything fails, the store is
        closed, and the checkpoint stays. `same_boot`: the kernel is known to have run on since the run before."""
        assert self.phase is Phase.LOCKED
        self.phase = Phase.OPENING
        try:
            opened = self._open(expected, same_boot)
            is_synced = self._sync_now()
            judge()
            # From here on the folder is in use: a crash must not look like a clean stop.
            self._checkpoints.open()
            if is_synced:
                self._checkpoints.write_now()
                cut_tails.forget(self._disk, self.commit_log.folder)
            else:
                self._checkpoints.soon()
        except BaseException:
            self.abandon()
            raise
        self.phase = Phase.OPEN
        return opened

    def _open(self, expected: Expected, same_boot: bool) -> list[Stray]:
        found = checkpoint.read(self._disk, self.data)
        if found is None:
            log.error("%s/%s is damaged: the whole commit log is read", self.data, CHECKPOINT_FILE)
        opened = Opening(self._around, self.data, expected, found, same_boot=same_boot).run()
        self._logs.update(opened.logs)
        for each in opened.logs.values():
            self._dirty.wrote(each)
        self.was_clean = opened.was_clean and found is not None
        if self.was_clean:
            self.commit_log.synced_to(self.commit_log.end)
        else:
            # A kill may have left a file without its head: all bounds are told again.
            for each in self._logs.values():
                each.bounds_untold = True
                self._staged[each] = None
        for staged, error in self._writer.write(list(self._staged)):
            log.warning("%s: %s", staged.topic_partition, error)
        self._staged.clear()
        self._perhaps_empty = True
        self._keep_for(rewriter.strays_with_topics(self._disk, self.data))
        return opened.strays

    def _keep_for(self, found: list[str]) -> None:
        """Folders that are set aside hold queues only, their batches are in commit files that look unwanted."""
        self._keeps_files = bool(found)
        if found:
            log.warning("%s", rewriter.strays_advice(self.data, found))

    def create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> SharedLog:
        assert self.phase is Phase.OPEN
        assert topic_partition not in self._logs, f"{topic_partition} is there"
        with self._new_folders.begin(topic_partition, topic_id, self.commit_log.synced) as path:
            found = Found(self._around.new_queue(path))
            created = SharedLog(self._around, path, topic_partition, topic_id, settings, found)
            created.doubt_beside()
        # The partition may have been here before, under the same id; nothing of that counts.
        created.bounds_untold = True
        self._staged[created] = None
        self._logs[topic_partition] = created
        if self._failure is not None:
            created.go_offline(self._failure)
        return created

    def get(self, topic_partition: TopicPartition) -> SharedLog | None:
        return self._logs.get(topic_partition)

    def logs(self) -> Iterator[SharedLog]:
        return iter(self._logs.values())

    def delete(self, topic_partition: TopicPartition) -> None:
        deleted = self._logs.get(topic_partition)
        if deleted is None:
            self._new_folders.discard(topic_partition)
        else:
            aside = self._let_go_of(deleted, folder.DELETED)
            self._trash.later([aside], deleted.settings.file_delete_delay_ms)
            self._perhaps_empty = True

    def set_aside(self, topic_partition: TopicPartition) -> str:
        self._keeps_files = True
        aside = self._let_go_of(self._logs[topic_partition], folder.STRAY)
        log.warning("%s", rewriter.strays_advice(self.data, [aside]))
        return aside

    def delete_left(self, topic: str, topic_id: bytes) -> None:
        opened = {each.folder for each in self._logs.values() if each.topic_partition.topic == topic}
        gone = False
        try:
            for path in folder.discard_left(self._disk, self.data, topic, topic_id, opened):
                self._trash.later([path], 0)
                gone = True
        finally:
            if gone and self._keeps_files:
                self._keeps_files = bool(rewriter.strays_with_topics(self._disk, self.data))
                self._perhaps_empty = True

    def _let_go_of(self, gone: SharedLog, ending: str) -> str:
        aside = folder.set_aside(self._disk, gone.folder, ending)  # or an error, and it stays as it is
        del self._logs[gone.topic_partition]
        self._staged.pop(gone, None)
        self._dirty.drop(gone)
        gone.delete()
        gone.close_files()
        self._checkpoints.soon()
        return aside

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
            self._dirty.wrote(written)
        staged.clear()
        self.commit.start()
        return [(each, error) for each, error in failures]

    def _write_now(self, one: SharedLog) -> HeadraceError | None:
        failures = self._writer.write([one])
        return failures[0][1] if failures else None

    @property
    def compacting(self) -> bool:
        """Whether maintenance work is being done."""
        return self._cleaner.busy

    def settings_changed(self, topic_partition: TopicPartition) -> None:
        self._dirty.wrote(self._logs[topic_partition])

    def on_durable(self, listener: Callable[[Log], None]) -> None:
        self.commit.listeners.append(listener)

    def on_sync(self, timer: Callable[[float], None]) -> None:
        """`timer(seconds)` runs after each group commit, with the time that it took."""
        self.commit.timers.append(timer)

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
                self._clock.call_soon(lambda each=each: self._tell(each))  # type: ignore[misc]

    def _tell(self, one: SharedLog) -> None:
        for listener in self.commit.listeners:
            listener(one)

    # From time to time.

    def tick(self) -> None:
        now, now_ms = self._clock.now(), self._clock.wall_ms()
        self._flushes.tick(now)
        self._trash.empty(now)
        if now >= self._next_check:
            self._next_check = now + self._retention_check_ms / 1000
            self._checking = deque(self._logs.values())
            self.rewriter.begin_round()
        if self._checking:
            self._check_some(now_ms)
            if not self._checking:
                self._rewrite_some()
        self._dirty.tick(now)
        if self._perhaps_empty:
            self._remove_empty_files()
        self._checkpoints.tick(now)

    def _check_some(self, now_ms: int) -> None:
        for _ in range(min(LOGS_PER_TICK, len(self._checking))):
            checked = self._checking.popleft()
            if checked.offline is None and self._logs.get(checked.topic_partition) is checked:
                checked.producers.expire(now_ms - self._producer_expire_ms)
                self._check(checked, now_ms)

    def _check(self, checked: SharedLog, now_ms: int) -> None:
        try:
            if checked.snapshot_bytes >= SNAPSHOT_BYTES and checked not in self._staged:
                checked.write_snapshot()
            if retention.apply(checked, now_ms, self._disk, self.commit_log):
                self._checking.append(checked)
        except CorruptBatch as error:
            log.error("%s is neither compacted nor shortened: %s", checked.topic_partition, error)
        except (OSError, HeadraceError) as error:
            log.error("%s: %s", checked.topic_partition, error)
        else:
            self._dirty.look(checked)

    def _compaction_due(self, one: SharedLog, now_ms: int) -> bool:
        return compaction.due(one, self._disk, self.commit_log, now_ms)

    def _sync_soon(self, one: SharedLog) -> None:
        self.commit.ask(one)
        self._clock.call_soon(self.commit.start)

    def _compact(self, one: SharedLog) -> Steps:
        return compaction.steps(one, self._disk, self.commit_log, self._new_replacements(), self._clock.wall_ms())

    def _new_replacements(self) -> Replacements:
        """Of the job that begins; the cleaner does one at a time."""
        self._replacements = Replacements(self._around, self.replacer)
        return self._replacements

    def _cleaned(self) -> None:
        self._checkpoints.soon()
        if not self._checking:
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

    def _remove_empty_files(self) -> None:
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

    def beside(self) -> Sequence[File]:
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
            each.doubt_beside()

    # Stopping.

    def close(self) -> bool:
        if self.phase is not Phase.OPEN:
            self.abandon()
            return False
        self.write_staged()
        self.commit.close()
        self.replacer.close()
        self._cleaner.close()
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

    def abandon(self) -> None:
        """Let go of the folder as a dying process does: nothing is written."""
        if self.phase is Phase.CLOSED:
            return
        self._checkpoints.close()
        self.commit.close()
        self.replacer.close()
        self._cleaner.close()
        self._let_go()

    def _let_go(self) -> None:
        self.phase = Phase.CLOSED
        for each in self._logs.values():
            each.close_files()
        self.commit_log.close()
        self._lock.close()

    def _sync_now(self) -> bool:
        """Make everything that is written durable, many files at a time; answers whether all of it is."""
        if self._offline:
            return False
        failure: OSError | None = None
        self._checkpoint_position = self.commit_log.end
        while files := self.beside():
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
