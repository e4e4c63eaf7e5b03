"""When what was written to a log is synced: in this turn's commit, after so many records, or after its interval."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from headrace.ports.clock import Clock
from headrace.storage.group_commit import GroupCommit, SyncedLog

OneLog = TypeVar("OneLog", bound=SyncedLog)


class Flushes(Generic[OneLog]):
    def __init__(self, clock: Clock, commit: GroupCommit) -> None:
        self._clock = clock
        self._commit = commit
        self._waiting: list[tuple[float, int, OneLog]] = []
        self._due: set[OneLog] = set()
        self._order = 0

    def wrote(self, log: OneLog) -> None:
        settings = log.settings
        if settings.durability == "disk" or log.written_offset - log.sync_asked_offset >= settings.flush_messages:
            self._commit.ask(log)
        elif settings.durability == "os" and log not in self._due:
            self._due.add(log)
            self._order += 1
            heapq.heappush(self._waiting, (self._clock.now() + settings.flush_ms / 1000, self._order, log))

    def tick(self, now: float) -> None:
        while self._waiting and self._waiting[0][0] <= now:
            log = heapq.heappop(self._waiting)[2]
            self._due.discard(log)
            if log.durable_offset < log.written_offset:
                self._commit.ask(log)
        self._commit.start()
