"""All key indexes of a broker: built behind the logs whose topics want one, and asked.

Building runs on the loop in short turns (see `steps`). A query first lets its partition's index catch up with what
consumers can see, so it finds what was written a moment ago; an index that is far behind makes it wait, up to a limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from headrace.errors import HeadraceError, KeyIndexMissing, RequestTimedOut, StorageFailed
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File
from headrace.storage import folder
from headrace.storage.keys.index import KeyLimits, PartitionKeys, Syncs, remove_files
from headrace.storage.keys.query import KeyQueryResult, Search, Wanted
from headrace.storage.keys.steps import Job, Steps, Turns
from headrace.storage.log import Log, LogStore, TopicPartition

logger = logging.getLogger(__name__)

LOGS_PER_TICK: Final = 200
ROUND_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 5.0
QUERY_SECONDS: Final = 20.0

Answered = Callable[[KeyQueryResult | HeadraceError], None]


class KeyIndexes:
    def __init__(self, store: LogStore, disk: Disk, clock: Clock, data: str, limits: KeyLimits | None = None) -> None:
        self._store = store
        self._disk = disk
        self._clock = clock
        self._data = data
        self._limits = limits or KeyLimits()
        self._turns = Turns(clock)
        self._syncs = Syncs()
        self._indexes: dict[Log, PartitionKeys] = {}
        self._building: dict[PartitionKeys, Job] = {}
        self._retry_at: dict[PartitionKeys, float] = {}
        self._without: set[Log] = set()
        self._to_see: list[Log] = []
        self._next_round = clock.now()

    def tick(self) -> None:
        """Go on building; and look at some logs, all of them in a round: begin and drop as their settings say."""
        for log in list(self._indexes):
            self._see(log)
        if not self._to_see:
            if self._clock.now() < self._next_round:
                return
            self._next_round = self._clock.now() + ROUND_SECONDS
            self._to_see = list(self._store.logs())
            self._forget()
        seen, self._to_see = self._to_see[-LOGS_PER_TICK:], self._to_see[:-LOGS_PER_TICK]
        for log in seen:
            if log not in self._indexes:
                self._see(log)

    def _see(self, log: Log) -> None:
        keys = self._indexes.get(log)
        if not log.settings.key_index:
            if keys is not None or log not in self._without:
                self._turn_off(log, keys)
            return
        self._without.discard(log)
        if keys is None:
            where = folder.partition_folder(self._data, log.topic_partition)
            keys = self._indexes[log] = PartitionKeys(self._disk, self._clock, log, where, self._limits, self._syncs)
        keys.sync_sometimes()
        if keys.work():
            self._build(keys)

    def _turn_off(self, log: Log, keys: PartitionKeys | None) -> None:
        self._without.add(log)
        try:
            if keys is not None:
                self._drop(keys)
            remove_files(self._disk, folder.partition_folder(self._data, log.topic_partition))
        except OSError as error:
            logger.warning("%s: files of its key index are left: %s", log.topic_partition, error)

    def _forget(self) -> None:
        """Partitions that are gone; their files went with them."""
        for log in [log for log in self._indexes if self._store.get(log.topic_partition) is not log]:
            self._drop(self._indexes[log])
        self._without = {log for log in self._without if self._store.get(log.topic_partition) is log}

    def _drop(self, keys: PartitionKeys) -> None:
        keys.let_go()
        del self._indexes[keys.log]
        self._retry_at.pop(keys, None)
        job = self._building.pop(keys, None)
        if job is not None:
            self._turns.drop(job)

    def _build(self, keys: PartitionKeys) -> None:
        if keys not in self._building and self._retry_at.get(keys, 0.0) <= self._clock.now():
            self._building[keys] = self._turns.add(keys.steps(), partial(self._built, keys))

    def _built(self, keys: PartitionKeys, error: Exception | None) -> None:
        self._building.pop(keys, None)
        if error is None:
            return
        if isinstance(error, OSError):
            error = StorageFailed(f"the key index of {keys.log.topic_partition} cannot be written: {error}")
        if not isinstance(error, HeadraceError):
            logger.error("%s: building its key index failed", keys.log.topic_partition, exc_info=error)
            error = StorageFailed(f"building the key index of {keys.log.topic_partition} failed: {error!r}")
        if str(error) != str(keys.error):
            logger.warning("%s: its key index stays behind: %s", keys.log.topic_partition, error)
        keys.error = error
        self._retry_at[keys] = self._clock.now() + RETRY_SECONDS

    def get(self, topic_partition: TopicPartition) -> PartitionKeys | None:
        """The index of a partition, if its topic wants one."""
        log = self._store.get(topic_partition)
        if log is None or not log.settings.key_index:
            return None
        if log not in self._indexes:
            self._see(log)
        return self._indexes[log]

    # Queries.

    def query(self, topic_partition: TopicPartition, wanted: Wanted, limit_offset: int, answered: Answered) -> None:
        """`answered` hears what was found below the limit, or why nothing can be; at once, if that is quick."""
        keys = self.get(topic_partition)
        if keys is None:
            answered(no_index(topic_partition.topic))
            return
        search = Search(self._disk, keys, wanted, limit_offset)

        def ended(error: Exception | None) -> None:
            if error is None:
                answered(search.found)
            elif isinstance(error, HeadraceError):
                answered(error)
            elif isinstance(error, ValueError):
                self._make_again(keys, error)
                answered(RequestTimedOut(f"the key index of {topic_partition} is made again: ask again later"))
            else:
                logger.error("a query of %s failed", topic_partition, exc_info=error)
                answered(StorageFailed(f"the key index of {topic_partition} cannot be read: {error!r}"))

        self._turns.add(self._steps(keys, search, limit_offset), ended, urgent=True)
        self._turns.run_now()

    def _make_again(self, keys: PartitionKeys, error: ValueError) -> None:
        """A chain was met that is none: what is in memory is not what was written."""
        logger.error("%s: its key index is damaged and made again from the log: %s", keys.log.topic_partition, error)
        job = self._building.pop(keys, None)
        if job is not None:
            self._turns.drop(job)
        keys.start_again()
        self._build(keys)

    def _steps(self, keys: PartitionKeys, search: Search, limit_offset: int) -> Steps:
        yield from self._catch_up(keys, limit_offset)
        yield from search.steps()

    def _catch_up(self, keys: PartitionKeys, limit_offset: int) -> Steps:
        until = self._clock.now() + QUERY_SECONDS
        self._retry_at.pop(keys, None)
        while not keys.opened or keys.next_offset < min(limit_offset, keys.goal) or not keys.agrees():
            if keys.closed:
                raise no_index(keys.log.topic_partition.topic)
            if keys.log.offline is not None:
                raise keys.log.offline
            if self._clock.now() > until:
                raise RequestTimedOut(
                    f"the key index of {keys.log.topic_partition} is {keys.behind} records behind and being built: "
                    "ask again later"
                )
            if keys not in self._building:
                if self._retry_at.get(keys, 0.0) > self._clock.now():
                    assert keys.error is not None
                    raise keys.error
                self._build(keys)
            yield lambda: keys not in self._building or self._clock.now() > until

    # The end.

    def close(self) -> None:
        """Write what a start needs to believe all of it."""
        self._turns.close()
        files: list[File] = []
        for keys in self._indexes.values():
            try:
                files += keys.close()
            except OSError as error:
                logger.warning("%s: its key index is made again at the next start: %s", keys.log.topic_partition, error)
        try:
            self._disk.sync_now(files)
        except OSError as error:
            logger.warning("key indexes could not be synced: %s", error)
        for file in files:
            file.close()

    def abandon(self) -> None:
        """Let go as a dying process does: nothing is written."""
        self._turns.close()
        for keys in self._indexes.values():
            keys.let_go()


def no_index(topic: str) -> KeyIndexMissing:
    return KeyIndexMissing(
        f"topic {topic!r} has no key index; `headrace topic alter {topic} --config key.index=true` has one built"
    )
