"""Files beside the batches that still have to be synced: indexes, epochs, snapshots, folders with new names in them."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.ports.disk import Disk, File


class Unsynced:
    """Paths wait until they are taken, and stay until the sync that took them has come back."""

    __slots__ = ("_disk", "_syncing", "_waiting")

    def __init__(self, disk: Disk, paths: Iterable[str]) -> None:
        self._disk = disk
        self._waiting = dict.fromkeys(paths)
        self._syncing: dict[str, None] = {}

    def add(self, *paths: str) -> None:
        for path in paths:
            self._waiting[path] = None

    def take(self) -> list[File]:
        """Everything that is not known to be safe, what a sync under way was to save included."""
        if self._waiting:
            self._syncing |= self._waiting
            self._waiting = {}
        files: list[File] = []
        for path in self._syncing:
            try:
                files.append(self._disk.open(path))
            except FileNotFoundError:
                continue
        return files

    def came_back(self) -> None:
        """What was taken is safe; what was added meanwhile is not."""
        self._syncing = {}
