"""Where a log begins inside a segment: `<20-digit offset>.start`, an empty file in its folder.

The checkpoint holds the start of every log, and counts. But a start that cannot read one would let a log begin with its
first segment, and what DeleteRecords has deleted of that would come back; where it is alone, or the last in sync, for
good. So the folder says it too. The file is synced soon, and nothing waits for that: it is needed only when the
checkpoint is lost. A log that begins anew has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from headrace.ports.disk import Disk

log = logging.getLogger(__name__)

ENDING: Final = ".start"


class StartMarkers:
    def __init__(self, disk: Disk, folder: str, offsets: Iterable[int]) -> None:
        self._disk = disk
        self._folder = folder
        self._offsets = set(offsets)

    def note(self, offset: int) -> None:
        """The log begins there from now on."""
        try:
            self._disk.open(self._path(offset), create=True, writable=True).close()
            self._offsets.add(offset)
            self._remove(self._offsets - {offset})
        except OSError as error:
            log.warning("%s: only the checkpoint says where it begins: %s", self._folder, error)

    def forget(self) -> None:
        """It begins elsewhere, perhaps before. OSError: then it must not."""
        self._remove(set(self._offsets))

    def _remove(self, offsets: set[int]) -> None:
        for offset in offsets:
            if self._disk.exists(self._path(offset)):
                self._disk.remove(self._path(offset))
            self._offsets.discard(offset)

    def _path(self, offset: int) -> str:
        return f"{self._folder}/{offset:020d}{ENDING}"
