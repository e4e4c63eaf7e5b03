"""Bytes that a failed sync has left in the page cache alone: the next start writes them again.

The kernel tells a failed sync once and counts the pages as clean from then on. A process that is started again on the
same kernel reads them from the page cache, finds them whole, and no later sync would ever write them: a loss of power
would take what counts as durable. So the sync that fails leaves an empty file `sync-failed` in the folder, from where
it fails (`ports.disk`), because the broker may be killed before it hears of it; the log that goes offline does the same
for all other reasons. It needs no sync: after a loss of power the page cache is gone too, and the log is recovered from
what the disk holds. A start takes a log whose folder bears it for one that was not stopped in order.

Folders without records can bear it too. What they hold is written anew by a start or follows from the records, so there
it is only removed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from headrace.ports.disk import SYNC_FAILED, Disk

log = logging.getLogger(__name__)

MARKER: Final = SYNC_FAILED
PIECE_BYTES: Final = 1 << 20


def note(disk: Disk, folder: str) -> None:
    """A sync of something in the folder has failed."""
    try:
        disk.open(f"{folder}/{MARKER}", create=True, writable=True).close()
    except OSError as error:
        log.error("%s: that a sync failed cannot be noted for the next start: %s", folder, str(error))


def is_noted(disk: Disk, folder: str) -> bool:
    return disk.exists(f"{folder}/{MARKER}")


def refuse_if_noted(disk: Disk, folder: str) -> None:
    """OSError if a sync of something in the folder has failed, or if nobody can tell."""
    if is_noted(disk, folder):
        raise OSError(errno.EIO, "a sync has failed", folder)


def forget(disk: Disk, folders: Iterable[str]) -> None:
    """Of folders without records, before the start syncs them."""
    for folder in folders:
        if is_noted(disk, folder):
            disk.remove(f"{folder}/{MARKER}")


def write_again(disk: Disk, folder: str, paths: Sequence[str]) -> None:
    """If a sync failed in the folder: write these files as they are. The sync of the start makes them safe, or fails
    again and is noted again."""
    if not is_noted(disk, folder):
        return
    log.warning("%s: a sync failed when it was last in use: %d files are written again", folder, len(paths))
    for path in paths:
        file = disk.open(path, writable=True)
        for position in range(0, file.size(), PIECE_BYTES):
            file.pwritev([file.pread(PIECE_BYTES, position)], position)
        file.close()
    disk.remove(f"{folder}/{MARKER}")
