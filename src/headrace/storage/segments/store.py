"""All logs of one data folder in the `partitioned` layout, and the work that they need from time to time.

The store holds the folder's lock from its construction to `close`. `open` is called once, with the partitions that the
cluster's metadata gives this broker; folders of others are set aside.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from headrace.errors import CorruptBatch, HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.settings.values import LogSettings
from headrace.storage import checkpoint, cut_tails, folder, rewritten
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.checkpoint import CheckpointWriter, LogPoint
from headrace.storage.cleaner import Cleaner, DirtyLogs, Steps
from headrace.storage.folder import Stray
from headrace.storage.group_commit import FILES_MAX, Flushes, GroupCommit, concerns
from headrace.storage.log import Log, Phase, Tail, TopicPartition
from headrace.storage.producers import ProducerLoads
from headrace.storage.segments import compaction, recovery, retention
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.segment import OPEN_SEGMENTS_MAX, OpenSegments
from headrace.storage.segments.services import Surroundings

log = logging.getLogger(__name__)

LOGS_PER_TICK: Final = 200

Expected = Mapping[TopicPartition, tuple[bytes, LogSettings]]


class PartitionedStore:
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
        open_segments_max: int = OPEN_SEGMENTS_MAX,
        sync_files_max: int = FILES_MAX,
    ) -> None:
        self.data = data
        self._disk = disk
        self._clock = clock
        self._retention_check_ms = retention_check_ms
        self._producer_expire_ms = producer_expire_ms
        self._lock = folder.lock(disk, data)
        self._new_folders = folder.NewFolders(disk, data)
        self._logs: dict[TopicPartition, PartitionedLog] = {}
        self._staged: dict[PartitionedLog, None] = {}
        self._sync_files_max = sync_files_max
        self.commit = GroupCommit(disk, clock, sync_files_max)
        self._checkpoints = CheckpointWriter(disk, clock, data, self._points, checkpoint_ms)
        self._around = Surroundings(
            disk=disk,
            clock=clock,
            open_segments=OpenSegments(open_segments_max),
            check_budget=CheckBudget(clock),
            producer_loads=ProducerLoads(clock),
            staged=self._staged,
            checkpoint_soon=self._checkpoints.soon,
            sync_soon=self._sync_soon,
            segment_began=self._segment_began,
            discarded=self._discard_later,
            archived_offset=archived_offset,
        )
        self._cleaner = Cleaner(clock, self._checkpoints.soon)
        self._dirty = DirtyLogs(clock, self._cleaner, cleaner_backoff_ms, compaction.due, self._compact)
        self._flushes: Flushes[PartitionedLog] = Flushes(clock, self.commit)
        self._rolls: list[tuple[int, int, PartitionedLog, int]] = []
        self._trash: list[tuple[float, int, list[str]]] = []
        self._order = 0
        self._checking: deque[PartitionedLog] = deque()
        self._next_check = clock.now() + retention_check_ms / 1000
        self.phase = Phase.LOCKED
        self.was_clean = True
        """Whether `open` found every log as a clean stop leaves it; if not, what was not synced may be lost."""

    def open(
        self, expected: Expected, judge: Callable[[], None] = lambda: None, *, same_boot: bool = False
    ) -> list[Stray]:
        """Open the logs of the expected partitions; answers the folders that were set aside. `judge` is called when all
        of them are open, and the checkpoint still says what the run before left. If anything fails, the store is
        closed, and the checkpoint stays. `same_boot`: the kernel is known to have run on since the run before."""
        assert self.phase is Phase.LOCKED
        self.phase = Phase.OPENING
        try:
            strays = self._open(expected, same_boot)
            judge()
            # From here on the folder is in use: a crash must not look like a clean stop.
            self._checkpoints.open()
            self._checkpoints.write_now()
        except BaseException:
            self.abandon()
            raise
        for each in self._logs.values():
            if each.tail >= Tail.TORN:
                cut_tails.forget(self._disk, each.folder)
        self.phase = Phase.OPEN
        return strays

    def _open(self, expected: Expected, same_boot: bool) -> list[Stray]:
        points = checkpoint.read(self._disk, self.data)
        if points is None:
            log.error("%s/%s is damaged: every log is read and checked", self.data, checkpoint.FILE_NAME)
        # A point of a topic that had the same name is nothing to go by.
        wanted = {where: topic_id.hex() for where, (topic_id, _) in expected.items()}
        found = {where: point for where, point in (points or {}).items() if point.topic_id == wanted.get(where)}
        strays: list[Stray] = []
        for topic_partition, path in list(folder.partitions(self._disk, self.data)):
            reason = self._why_stray(path, expected.get(topic_partition))
            if reason is not None:
                strays.append(Stray(folder.set_aside(self._disk, path, folder.STRAY), reason))
                log.warning("%s set aside as %s: %s", path, strays[-1].path, reason)
                continue
            topic_id, settings = expected[topic_partition]
            self._open_log(path, topic_partition, topic_id, settings, found.get(topic_partition), same_boot)
        for topic_partition, (topic_id, settings) in expected.items():
            if topic_partition not in self._logs:
                self._create(topic_partition, topic_id, settings, found.get(topic_partition))
        rewritten.forget(self._disk, folder.above(self.data, self._logs))
        self._sync_now([each for each in self._logs.values() if each.recovered])
        return strays

    def _why_stray(self, path: str, expected: tuple[bytes, LogSettings] | None) -> str | None:
        if expected is None:
            return "no topic of this cluster has this partition here"
        topic_id = folder.read_topic_id(self._disk, path)
        if isinstance(topic_id, str):
            return topic_id
        if topic_id != expected[0]:
            return f"it belongs to the topic with id {topic_id.hex()}, not to {expected[0].hex()} of the same name"
        return None

    def _open_log(
        self,
        path: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        point: LogPoint | None,
        same_boot: bool,
    ) -> None:
        opened = recovery.open_log(self._around, path, topic_partition, topic_id, settings, point, same_boot=same_boot)
        self._logs[topic_partition] = opened
        self.was_clean = self.was_clean and not opened.recovered
        if opened.active.written:
            self._segment_began(opened)
        self._dirty.wrote(opened)

    def create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> PartitionedLog:
        assert self.phase is Phase.OPEN
        return self._create(topic_partition, topic_id, settings, None)

    def _create(
        self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings, point: LogPoint | None
    ) -> PartitionedLog:
        assert topic_partition not in self._logs, f"{topic_partition} is there"
        with self._new_folders.begin(topic_partition, topic_id) as path:
            created = recovery.open_log(self._around, path, topic_partition, topic_id, settings, point)
        self._logs[topic_partition] = created
        return created

    def get(self, topic_partition: TopicPartition) -> PartitionedLog | None:
        return self._logs.get(topic_partition)

    def logs(self) -> Iterator[PartitionedLog]:
        return iter(self._logs.values())

    def delete(self, topic_partition: TopicPartition) -> None:
        deleted = self._logs.get(topic_partition)
        if deleted is None:
            self._new_folders.discard(topic_partition)
        else:
            aside = self._let_go_of(deleted, folder.DELETED)
            self._discard_later([aside], deleted.settings.file_delete_delay_ms)

    def set_aside(self, topic_partition: TopicPartition) -> str:
        return self._let_go_of(self._logs[topic_partition], folder.STRAY)

    def delete_left(self, topic: str, topic_id: bytes) -> None:
        opened = {each.folder for each in self._logs.values() if each.topic_partition.topic == topic}
        for path in folder.discard_left(self._disk, self.data, topic, topic_id, opened):
            self._discard_later([path], 0)

    def _let_go_of(self, gone: PartitionedLog, ending: str) -> str:
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
        failures: list[tuple[Log, HeadraceError]] = []
        if not self._staged:
            return failures
        commit = self.commit
        for staged in self._staged:
            error = staged.write()
            if error is not None:
                failures.append((staged, error))
                continue
            self._flushes.wrote(staged)
            self._dirty.wrote(staged)
        self._staged.clear()
        commit.start()
        return failures

    @property
    def compacting(self) -> bool:
        return self._cleaner.busy

    def settings_changed(self, topic_partition: TopicPartition) -> None:
        self._dirty.wrote(self._logs[topic_partition])

    def on_durable(self, listener: Callable[[Log], None]) -> None:
        self.commit.listeners.append(listener)

    def on_sync(self, timer: Callable[[float], None]) -> None:
        """`timer(seconds)` runs after each group commit, with the time that it took."""
        self.commit.timers.append(timer)

    # From time to time.

    def tick(self) -> None:
        now, now_ms = self._clock.now(), self._clock.wall_ms()
        self._flushes.tick(now)
        self._roll(now_ms)
        self._empty_trash(now)
        if now >= self._next_check:
            self._next_check = now + self._retention_check_ms / 1000
            self._checking = deque(self._logs.values())
        self._check_some(now_ms)
        self._dirty.tick(now)
        self._checkpoints.tick(now)

    def _segment_began(self, began: PartitionedLog) -> None:
        self._order += 1
        heapq.heappush(self._rolls, (began.rolls_at_ms, self._order, began, began.active.base_offset))

    def _roll(self, now_ms: int) -> None:
        while self._rolls and self._rolls[0][0] <= now_ms:
            _, _, old, base_offset = heapq.heappop(self._rolls)
            if old.active.base_offset != base_offset or old.active.size == 0 or old.offline is not None:
                continue
            if old.rolls_at_ms > now_ms:  # the setting was changed meanwhile
                self._segment_began(old)
            else:
                self.roll(old)

    def roll(self, old: PartitionedLog) -> None:
        """Close the active segment; what was staged is written first by the turn that staged it."""
        if old in self._staged:
            return
        try:
            old.roll()
        except (OSError, HeadraceError) as error:
            log.warning("%s: segment %s stays open: %s", old.topic_partition, old.active.path, error)

    def _check_some(self, now_ms: int) -> None:
        for _ in range(min(LOGS_PER_TICK, len(self._checking))):
            checked = self._checking.popleft()
            if checked.offline is None and self._logs.get(checked.topic_partition) is checked:
                checked.producers.expire(now_ms - self._producer_expire_ms)
                self._check(checked, now_ms)

    def _check(self, checked: PartitionedLog, now_ms: int) -> None:
        if checked.active.written and checked.rolls_at_ms < now_ms:
            self.roll(checked)
        try:
            retention.apply(checked, now_ms, self.roll)
        except CorruptBatch as error:
            log.error("%s is neither compacted nor shortened: %s", checked.topic_partition, error)
        except (OSError, HeadraceError) as error:
            log.error("%s: %s", checked.topic_partition, error)
        else:
            self._dirty.look(checked)

    def _compact(self, one: PartitionedLog) -> Steps:
        return compaction.steps(one, self._disk, self._clock.wall_ms())

    def _sync_soon(self, log: PartitionedLog) -> None:
        self.commit.ask(log)
        self._clock.call_soon(self.commit.start)

    def _discard_later(self, paths: list[str], delay_ms: int) -> None:
        if paths:
            self._order += 1
            heapq.heappush(self._trash, (self._clock.now() + delay_ms / 1000, self._order, paths))

    def _empty_trash(self, now: float) -> None:
        while self._trash and self._trash[0][0] <= now:
            for path in heapq.heappop(self._trash)[2]:
                try:
                    if folder.DELETED in path:
                        self._disk.remove_folder(path)
                    else:
                        self._disk.remove(path)
                except FileNotFoundError:
                    continue  # its partition was deleted meanwhile
                except OSError as error:
                    log.error("%s cannot be removed: %s", path, error.strerror)

    def _points(self) -> Iterator[LogPoint]:
        for each in self._logs.values():
            yield LogPoint(
                each.topic_partition.topic,
                each.topic_partition.partition,
                each.topic_id.hex(),
                each.stopped,
                min(each.durable_offset, each.cuts.least),
                each.start_offset,
                each.end_offset,
                each.active.base_offset,
                each.active.written,
                each.began_ms,
                each.cleanings,
                each.cuts.settled,
            )

    def close(self) -> bool:
        if self.phase is not Phase.OPEN:
            self.abandon()
            return False
        self.write_staged()
        self.commit.close()
        self._cleaner.close()
        self._sync_now([each for each in self._logs.values() if self._stop_log(each)])
        for each in self._logs.values():
            self._look_for_mark(each)
            each.stopped = each.offline is None
        clean = all(each.stopped for each in self._logs.values())
        self._checkpoints.close()
        try:
            self._checkpoints.write_now()
        except OSError as error:
            log.error("no clean checkpoint, the next start reads the logs: %s", error)
            clean = False
        self._let_go()
        return clean

    def abandon(self) -> None:
        """Let go of the folder as a dying process does: nothing is written."""
        if self.phase is Phase.CLOSED:
            return
        self._checkpoints.close()
        self.commit.close()
        self._cleaner.close()
        self._let_go()

    def _let_go(self) -> None:
        self.phase = Phase.CLOSED
        for each in self._logs.values():
            each.close_files()
        self._lock.close()

    def _stop_log(self, stopping: PartitionedLog) -> bool:
        if stopping.offline is not None:
            return False
        try:
            stopping.stop()
        except OSError as error:
            stopping.fail(error)
            return False
        return True

    def _look_for_mark(self, stopping: PartitionedLog) -> None:
        """A sync that was under way may have failed: nobody listens to it any more, and it is told once only."""
        try:
            if stopping.offline is None:
                rewritten.refuse_if_noted(self._disk, stopping.folder)
        except OSError as error:
            stopping.fail(error)

    def _sync_now(self, logs: list[PartitionedLog]) -> None:
        """Make everything that is written durable, many files at a time."""
        waiting: list[tuple[PartitionedLog, list[File]]] = []
        for nth, each in enumerate(logs, 1):
            try:
                waiting.append((each, each.take_unsynced()))
            except OSError as error:
                each.fail(error)
            files = [file for _, own in waiting for file in own]
            if len(files) < self._sync_files_max and nth < len(logs):
                continue
            failure: OSError | None = None
            try:
                self._disk.sync_now(files)
            except OSError as error:
                failure = error
            for log, own in waiting:
                if failure is not None and concerns(failure, own):
                    log.fail(failure)
                else:
                    log.synced_upto(log.written_offset)
            waiting = []
