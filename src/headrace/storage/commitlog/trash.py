"""Files and folders that were set aside and go after a while."""

from __future__ import annotations

import heapq
import logging

from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.storage import folder

log = logging.getLogger(__name__)


class Trash:
    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._waiting: list[tuple[float, int, list[str]]] = []
        self._order = 0

    def later(self, paths: list[str], delay_ms: int) -> None:
        if paths:
            self._order += 1
            heapq.heappush(self._waiting, (self._clock.now() + delay_ms / 1000, self._order, paths))

    def empty(self, now: float) -> None:
        """Remove what has waited long enough."""
        while self._waiting and self._waiting[0][0] <= now:
            for path in heapq.heappop(self._waiting)[2]:
                try:
                    if folder.DELETED in path:
                        self._disk.remove_folder(path)
                    else:
                        self._disk.remove(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    log.error("%s cannot be removed: %s", path, error.strerror)
