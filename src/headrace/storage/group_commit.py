"""Group commit: one sync serves every log that asked while the last one ran.

A log's durable offset rises to what was written when the sync was asked for, not to what was when it came back.
A sync that failed is not tried again, because the kernel forgets what it could not write: the logs of the files that
failed go offline, the others count.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from headrace.errors import HeadraceError
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, File, SyncFailed
from headrace.storage import refusal
from headrace.storage.log import Log

logger = logging.getLogger(__name__)

FILES_MAX: Final = 1000
RETRY_SECONDS: Final = 1.0

Listener = Callable[[Log], None]


class SyncedLog(Log, Protocol):
    """A log that can be synced."""

    truncations: int
    sync_asked_offset: int

    def take_unsynced(self) -> list[File]:
        """Files to sync so that everything written is safe; they count as asked for from now on."""
        ...

    def synced_upto(self, offset: int) -> None:
        """The sync that `take_unsynced` was called for has come back."""
        ...

    def fail(self, error: OSError) -> HeadraceError:
        """Take the log offline: what its files hold is not known any more."""
        ...


class _Target(NamedTuple):
    """A log in a sync: what is durable once its files are."""

    log: SyncedLog
    written_offset: int
    truncations: int
    files: Sequence[File]


def concerns(error: OSError, files: Sequence[File]) -> bool:
    """Whether a failed sync says something of these files; one that does not name its files says it of all."""
    return not isinstance(error, SyncFailed) or any(file in error.files for file in files)


class GroupCommit:
    def __init__(self, disk: Disk, clock: Clock, files_max: int = FILES_MAX) -> None:
        self._disk = disk
        self._clock = clock
        self._files_max = files_max
        self._asked: dict[SyncedLog, None] = {}
        self._running = False
        self._retrying = False
        self._closed = False
        self.listeners: list[Listener] = []
        self.timers: list[Callable[[float], None]] = []

    def ask(self, log: SyncedLog) -> None:
        """Have the log in the next sync, which `start` begins."""
        self._asked[log] = None

    def start(self) -> None:
        """Begin a sync of all that asked, unless one is running: its end begins the next."""
        if self._running or not self._asked or self._closed:
            return
        files: dict[File, None] = {}  # logs that share a file have it synced once
        targets: list[_Target] = []
        for log in list(self._asked):
            if len(files) >= self._files_max:
                break  # the others are in the next one
            del self._asked[log]
            if log.offline is not None:
                continue
            try:
                own = log.take_unsynced()
            except OSError as error:
                if refusal.passes(error):
                    self._try_again(log, error)
                    continue
                log.fail(error)
                self._notify(log)
                continue
            files.update(dict.fromkeys(own))
            targets.append(_Target(log, log.written_offset, log.truncations, own))
        if not targets:
            return
        self._running = True
        began = self._clock.now()
        self._disk.request_sync(list(files), lambda error: self._done(targets, error, began))

    def _try_again(self, log: SyncedLog, error: OSError) -> None:
        """What is to be synced could not be opened: nothing has failed yet, and nothing counts as durable."""
        self._asked[log] = None
        if not self._retrying:
            self._retrying = True
            logger.warning("%s: not synced yet, tried again soon: %s", log.topic_partition, error)
            self._clock.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        self.start()

    def _done(self, targets: list[_Target], error: OSError | None, began: float) -> None:
        self._running = False
        if self._closed:
            return
        took_seconds = self._clock.now() - began
        for timer in self.timers:
            timer(took_seconds)
        for log, written_offset, truncations, files in targets:
            if log.offline is not None:
                continue  # deleted meanwhile
            if error is not None and concerns(error, files):
                log.fail(error)
            elif truncations != log.truncations:
                log.synced_upto(0)
                self._asked[log] = None  # it was cut meanwhile, and what the offsets mean has changed
                continue
            else:
                log.synced_upto(written_offset)
            self._notify(log)
        self.start()

    def _notify(self, log: SyncedLog) -> None:
        for listener in self.listeners:
            listener(log)

    def close(self) -> None:
        """Answers of syncs under way are not listened to any more."""
        self._closed = True


OneLog = TypeVar("OneLog", bound=SyncedLog)


class Flushes(Generic[OneLog]):
    """When what was written to a log is synced: in this turn's commit, after so many records, or after its interval."""

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
