"""The small files of a partition beside its queue: leader epochs and snapshots of producers.

They can be derived from the commit log, so a checkpoint syncs them, and nothing waits for that. A start believes
neither them nor the queue without their CRCs, so a checkpoint may leave some of them to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.ports.disk import Disk, File
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory
from headrace.storage.folder import PARTITION_FILE
from headrace.storage.producers import ProducerState
from headrace.storage.snapshots import Snapshots

if TYPE_CHECKING:
    from headrace.storage.commitlog.log import SharedLog


class DerivedFiles:
    def __init__(self, disk: Disk, folder: str, epochs: EpochHistory, snapshots: Iterable[int]) -> None:
        self._disk = disk
        self._folder = folder
        self._epochs = epochs
        self.snapshots = Snapshots(disk, folder, snapshots)
        self._unsynced: dict[str, None] = {}

    def save_epochs(self) -> None:
        file = self._epochs.save()
        if file is not None:
            file.close()
            self._unsynced |= {f"{self._folder}/{EPOCHS_FILE}": None, self._folder: None}

    def newest_producers(self, start_offset: int, end_offset: int) -> tuple[int, dict[int, ProducerState]]:
        """What a snapshot says of the producers, and from which offset on the log has to be read as well."""
        found = self.snapshots.newest(end_offset)
        # What came between an older one and the start is gone, so it says nothing of now.
        return found if found is not None and found[0] >= start_offset else (start_offset, {})

    def write_snapshot(self, offset: int, states: dict[int, ProducerState], starts: Iterable[int]) -> None:
        """Those at the starts stay, because nothing else tells of what lies below them; and the newest one, for a
        truncation that takes this one."""
        newest = self.snapshots.newest_offset
        path = self.snapshots.write(offset, states, [*starts] if newest is None else [*starts, newest])
        self._unsynced |= {path: None, self._folder: None}

    def remove_snapshots_above(self, offset: int) -> None:
        self.snapshots.remove_above(offset)
        self._unsynced[self._folder] = None

    def take_unsynced(self) -> list[File]:
        files: list[File] = []
        for path in self._unsynced:
            try:
                files.append(self._disk.open(path))
            except FileNotFoundError:
                continue
        self._unsynced = {}
        return files

    def doubt(self) -> None:
        """Whatever is here may not be on disk."""
        topic_folder = self._folder.rpartition("/")[0]
        paths = [f"{self._folder}/{name}" for name in (EPOCHS_FILE, PARTITION_FILE)]
        paths += [self.snapshots.path(offset) for offset in self.snapshots.offsets]
        paths += [self._folder, topic_folder]
        self._unsynced |= dict.fromkeys(paths)


class DerivedFilesSync:
    """What checkpoints sync of all logs: so many files at a time, and next time the others first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._next = 0

    def take(self, logs: Sequence[SharedLog]) -> list[File]:
        files: list[File] = []
        for nth in range(len(logs)):
            if len(files) >= self.most:
                self._next += nth
                break
            files += logs[(self._next + nth) % len(logs)].take_derived()
        return files
