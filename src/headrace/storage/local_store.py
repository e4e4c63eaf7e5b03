"""All logs of one data folder, as far as that is the same in every layout, and the work that they need now and then.

A store holds the folder's lock from its construction to `close`. `open` is called once, with the partitions that the
cluster's metadata gives this broker; folders of others are set aside. How logs are opened, written and stopped is the
layout's: see `segments.store` and `commitlog.store`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar

from headrace.errors import CorruptBatch, HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.settings.values import LogSettings
from headrace.storage import folder
from headrace.storage.checked_bytes import CheckBudget
from headrace.storage.checkpoint import CheckpointWriter, Done
from headrace.storage.cleaner import Cleaner, DirtyLogs, Steps
from headrace.storage.folder import Stray, Trash
from headrace.storage.group_commit import FILES_MAX, Flushes, GroupCommit, SyncedLog
from headrace.storage.log import Log, Phase, TopicPartition
from headrace.storage.producers import ProducerLoads, ProducerTable

log = logging.getLogger(__name__)

LOGS_PER_TICK: Final = 200

Expected = Mapping[TopicPartition, tuple[bytes, LogSettings]]
"""The partitions of this broker: their topics' ids and settings."""


class StoredLog(SyncedLog, Hashable, Protocol):
    """A log as its store knows it."""

    folder: str

    @property
    def producers(self) -> ProducerTable: ...

    def delete(self) -> None: ...

    def close_files(self) -> None: ...


OneLog = TypeVar("OneLog", bound=StoredLog)


AnyLog = TypeVar("AnyLog")


@dataclass(slots=True, kw_only=True)
class StoreServices(Generic[AnyLog]):
    """What a store does for its logs, and what they share."""

    disk: Disk
    clock: Clock
    check_budget: CheckBudget
    producer_loads: ProducerLoads
    staged: dict[AnyLog, None]
    """Logs that the end of the turn writes."""
    checkpoint_soon: Callable[[Done | None], None]
    sync_soon: Callable[[AnyLog], None]
    archived_offset: Callable[[TopicPartition], int]
    """Below it everything is in the archive, as far as anyone can tell now; 0 if nobody can."""


class StoreOptions(TypedDict, total=False):
    """What every layout can be given; defaults are those of `LocalStore`."""

    retention_check_ms: int
    cleaner_backoff_ms: int
    checkpoint_ms: int
    producer_expire_ms: int
    archived_offset: Callable[[TopicPartition], int]
    sync_files_max: int


class LocalStore(ABC, Generic[OneLog]):
    """See `storage.log.LogStore`."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        data: str,
        layout: str,
        *,
        retention_check_ms: int = 300_000,
        cleaner_backoff_ms: int = 15_000,
        checkpoint_ms: int = 60_000,
        producer_expire_ms: int = 86_400_000,
        archived_offset: Callable[[TopicPartition], int] = lambda _: 0,
        sync_files_max: int = FILES_MAX,
    ) -> None:
        self.data = data
        self._disk = disk
        self._clock = clock
        self._lock = folder.lock(disk, data, layout)
        self._new_folders = folder.NewFolders(disk, data)
        self._logs: dict[TopicPartition, OneLog] = {}
        self._staged: dict[OneLog, None] = {}
        self._sync_files_max = sync_files_max
        self.commit = GroupCommit(disk, clock, sync_files_max)
        self._flushes: Flushes[OneLog] = Flushes(clock, self.commit)
        self._checkpoints = CheckpointWriter(disk, clock, data, self, checkpoint_ms)
        self._cleaner = Cleaner(clock, self._cleaned)
        self._dirty: DirtyLogs[OneLog] = DirtyLogs(
            clock, self._cleaner, cleaner_backoff_ms, self._compaction_due, self._compact
        )
        self._trash = Trash(disk, clock)
        self._retention_check_ms = retention_check_ms
        self._producer_expire_ms = producer_expire_ms
        self._archived_offset = archived_offset
        self._checking: deque[OneLog] = deque()
        self._next_check = clock.now() + retention_check_ms / 1000
        self.phase = Phase.LOCKED
        self.was_clean = True
        """Whether `open` found everything as a clean stop leaves it; if not, what was not synced may be lost."""

    def _shared_services(self) -> dict[str, Any]:
        """For the `StoreServices` of the layout."""
        return {
            "disk": self._disk,
            "clock": self._clock,
            "check_budget": CheckBudget(self._clock),
            "producer_loads": ProducerLoads(self._clock),
            "staged": self._staged,
            "checkpoint_soon": self._checkpoints.soon,
            "sync_soon": self._sync_soon,
            "archived_offset": self._archived_offset,
        }

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
            self._write_first_checkpoint()
        except BaseException:
            self.abandon()
            raise
        self.phase = Phase.OPEN
        return strays

    def create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> OneLog:
        assert self.phase is Phase.OPEN
        assert topic_partition not in self._logs, f"{topic_partition} is there"
        return self._create(topic_partition, topic_id, settings)

    def get(self, topic_partition: TopicPartition) -> OneLog | None:
        return self._logs.get(topic_partition)

    def logs(self) -> Iterator[OneLog]:
        return iter(self._logs.values())

    def delete(self, topic_partition: TopicPartition) -> None:
        deleted = self._logs.get(topic_partition)
        if deleted is None:
            self._new_folders.discard(topic_partition)
        else:
            aside = self._let_go_of(deleted, folder.DELETED)
            self._trash.later([aside], deleted.settings.file_delete_delay_ms)

    def set_aside(self, topic_partition: TopicPartition) -> str:
        return self._let_go_of(self._logs[topic_partition], folder.STRAY)

    def delete_left(self, topic: str, topic_id: bytes) -> None:
        opened = {each.folder for each in self._logs.values() if each.topic_partition.topic == topic}
        for path in folder.discard_left(self._disk, self.data, topic, topic_id, opened):
            self._trash.later([path], 0)

    def _let_go_of(self, gone: OneLog, ending: str) -> str:
        aside = folder.set_aside(self._disk, gone.folder, ending)  # or an error, and it stays as it is
        del self._logs[gone.topic_partition]
        self._staged.pop(gone, None)
        self._dirty.drop(gone)
        gone.delete()
        gone.close_files()
        self._checkpoints.soon()
        return aside

    def settings_changed(self, topic_partition: TopicPartition) -> None:
        self._dirty.wrote(self._logs[topic_partition])

    def on_durable(self, listener: Callable[[Log], None]) -> None:
        self.commit.listeners.append(listener)

    def on_sync(self, timer: Callable[[float], None]) -> None:
        """`timer(seconds)` runs after each group commit, with the time that it took."""
        self.commit.timers.append(timer)

    def _sync_soon(self, one: OneLog) -> None:
        self.commit.ask(one)
        self._clock.call_soon(self.commit.start)

    # From time to time.

    def tick(self) -> None:
        now, now_ms = self._clock.now(), self._clock.wall_ms()
        self._flushes.tick(now)
        self._roll_aged(now_ms)
        self._trash.empty(now)
        if now >= self._next_check:
            self._next_check = now + self._retention_check_ms / 1000
            self._checking = deque(self._logs.values())
            self._round_began()
        if self._checking:
            self._check_some(now_ms)
            if not self._checking:
                self._round_ended()
        self._dirty.tick(now)
        self._remove_unwanted()
        self._checkpoints.tick(now)

    def _check_some(self, now_ms: int) -> None:
        for _ in range(min(LOGS_PER_TICK, len(self._checking))):
            checked = self._checking.popleft()
            if checked.offline is None and self._logs.get(checked.topic_partition) is checked:
                checked.producers.expire(now_ms - self._producer_expire_ms)
                self._check(checked, now_ms)

    def _check(self, checked: OneLog, now_ms: int) -> None:
        try:
            self._apply_retention(checked, now_ms)
        except CorruptBatch as error:
            log.error("%s is neither compacted nor shortened: %s", checked.topic_partition, error)
        except (OSError, HeadraceError) as error:
            log.error("%s: %s", checked.topic_partition, error)
        else:
            self._dirty.look(checked)

    @property
    def compacting(self) -> bool:
        """Whether maintenance work is being done."""
        return self._cleaner.busy

    def _cleaned(self) -> None:
        self._checkpoints.soon()

    # Stopping.

    def abandon(self) -> None:
        """Let go of the folder as a dying process does: nothing is written."""
        if self.phase is Phase.CLOSED:
            return
        self._checkpoints.close()
        self._end_jobs()
        self._let_go()

    def _end_jobs(self) -> None:
        """Syncs and maintenance that are under way are not listened to any more."""
        self.commit.close()
        self._cleaner.close()

    def _let_go(self) -> None:
        self.phase = Phase.CLOSED
        self._close_files()
        self._lock.close()

    def _close_files(self) -> None:
        for each in self._logs.values():
            each.close_files()

    # What a layout has to say.

    @abstractmethod
    def encode(self) -> bytes:
        """The checkpoint, as of now (see `checkpoint.Contents`)."""

    @abstractmethod
    def files_to_sync(self) -> Sequence[File]: ...

    @abstractmethod
    def synced(self, error: OSError | None) -> None: ...

    @abstractmethod
    def _open(self, expected: Expected, same_boot: bool) -> list[Stray]: ...

    @abstractmethod
    def _write_first_checkpoint(self) -> None:
        """All logs are open, and what they may have lost is kept."""

    @abstractmethod
    def _create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> OneLog: ...

    @abstractmethod
    def _apply_retention(self, checked: OneLog, now_ms: int) -> None:
        """Retire what the topic's settings do not keep."""

    @abstractmethod
    def _compaction_due(self, one: OneLog, now_ms: int) -> bool: ...

    @abstractmethod
    def _compact(self, one: OneLog) -> Steps: ...

    def _roll_aged(self, now_ms: int) -> None:
        """Close what is written for its age."""

    def _round_began(self) -> None:
        """Retention is looked at for every log."""

    def _round_ended(self) -> None: ...

    def _remove_unwanted(self) -> None:
        """Files that nothing leads to."""
