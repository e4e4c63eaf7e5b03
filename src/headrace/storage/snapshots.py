"""The snapshot files of one partition (format: `producers`): written when a segment begins or a start rises, read when
a log is first used."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from headrace.ports.disk import Disk, read_derived
from headrace.storage import producers
from headrace.storage.producers import ProducerState
from headrace.storage.segments.segment import SNAPSHOT, stem

log = logging.getLogger(__name__)


class Snapshots:
    def __init__(self, disk: Disk, folder: str, offsets: Iterable[int]) -> None:
        self._disk = disk
        self._folder = folder
        self._offsets = set(offsets)

    def path(self, offset: int) -> str:
        return stem(self._folder, offset) + SNAPSHOT

    def __contains__(self, offset: int) -> bool:
        return offset in self._offsets

    def write(self, offset: int, states: dict[int, ProducerState], kept: Iterable[int]) -> str:
        """State before the offset; of the others only those stay. Answers the path, to be synced. OSError: the others
        all stay."""
        path = self.path(offset)
        self._offsets.discard(offset)  # until it is whole
        file = self._disk.open(path, create=True, writable=True)
        try:
            file.truncate(0)
            file.pwritev([producers.encode(states)], 0)
        finally:
            file.close()
        self._keep(self._offsets.intersection(kept) | {offset})
        return path

    @property
    def offsets(self) -> list[int]:
        return sorted(self._offsets)

    @property
    def newest_offset(self) -> int | None:
        return max(self._offsets, default=None)

    def newest(self, end_offset: int) -> tuple[int, dict[int, ProducerState]] | None:
        """The newest whole one that is not beyond the end, and its offset."""
        for offset in sorted((each for each in self._offsets if each <= end_offset), reverse=True):
            try:
                data = read_derived(self._disk, self.path(offset))
            except FileNotFoundError:
                continue
            states = producers.decode(data) if data is not None else None
            if states is not None:
                return offset, states
            log.warning("%s: not whole: left out, the log itself is read instead", self.path(offset))
        return None

    def forget(self, offsets: range) -> None:
        """Their files are gone already, or going."""
        self._offsets = {offset for offset in self._offsets if offset not in offsets}

    def remove_above(self, offset: int) -> None:
        self._keep({each for each in self._offsets if each <= offset})

    def _keep(self, kept: set[int]) -> None:
        for offset in self._offsets - kept:
            if self._disk.exists(self.path(offset)):
                self._disk.remove(self.path(offset))
        self._offsets = kept
