"""The start of one replica's log on its way to disk: raised at once, told to others only when no crash can lower it.

A start that could not be made safe is asked for again, with the next checkpoint that is tried. Files that could not be
removed stay behind, and the next start of the broker removes them: the start itself does not depend on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from headrace.errors import HeadraceError, StorageFailed
from headrace.storage.log import Log

logger = logging.getLogger(__name__)

NONE = -1


class LogStart:
    """`settled(error)` runs when a start has become safe, or could not be made so now."""

    __slots__ = ("_asked", "_log", "_settled")

    def __init__(self, log: Log, settled: Callable[[HeadraceError | None], None]) -> None:
        self._log = log
        self._settled = settled
        self._asked = NONE
        """A checkpoint was asked for that holds this start."""

    def raise_to(self, offset: int) -> None:
        """Begin at this offset, if that is not below the start, and have the start made safe if it is not."""
        log = self._log
        offset = max(log.start_offset, min(offset, log.written_offset))
        if offset <= max(log.safe_start_offset, self._asked) or log.offline is not None:
            return
        self._asked = offset
        try:
            self._delete(offset)
        except (HeadraceError, OSError) as error:
            self._asked = NONE
            logger.error("%s: cannot begin at offset %d: %s", log.topic_partition, offset, error)
            self._settled(error if isinstance(error, HeadraceError) else StorageFailed(str(error)))

    def _delete(self, offset: int) -> None:
        log, kept = self._log, partial(self._kept, offset)
        try:
            log.delete_before(offset, kept)
        except OSError as error:
            logger.error("%s: not all below offset %d could be removed: %s", log.topic_partition, offset, error)
            log.delete_before(offset, kept)  # it begins there now, which is only to be made safe

    def _kept(self, offset: int, error: HeadraceError | None) -> None:
        if self._asked == offset:
            self._asked = NONE
        self._settled(error)
        if error is not None:
            self.raise_to(self._log.start_offset)
