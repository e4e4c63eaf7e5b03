"""Writing a data folder of the shared layout from the content of another one.

The commit log is written partition by partition, a frame a megabyte or a quarter of a file. What a kill leaves behind
is told by the frames themselves: the next run goes on behind the last whole one. Queues, epochs and the checkpoint come
from the commit log, as at any start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.errors import DataFolderError
from headrace.ports.clock import Clock
from headrace.ports.disk import Buffer, Disk
from headrace.settings.values import LogSettings
from headrace.storage.commitlog import frames
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frame_scan import BrokenBytes, Scanner
from headrace.storage.commitlog.frames import APPEND, BOUNDS, FRAME_BYTES, REPLACE, WITH_BATCHES, Key
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.offline.content import CHUNK_BYTES, Content, chunks, write_epochs, write_partition_files


class CommitLogBuilder:
    def __init__(self, disk: Disk, data: str, file_bytes: int) -> None:
        self._disk = disk
        self._log = CommitLog(disk, data, file_bytes)
        self._log.find_files()
        self._frame_bytes = min(CHUNK_BYTES, file_bytes // 4)
        self._bounds: dict[Key, tuple[int, int]] = {}
        """What the commit log holds of each partition."""
        self._resume()

    def _resume(self) -> None:
        for found in Scanner(self._log).frames(0):
            if isinstance(found, BrokenBytes):
                self._log.cut(found.number, found.byte)
                return
            if found.kind == BOUNDS:
                self._bounds[found.key] = (found.first_offset, found.next_offset)
            elif found.kind in WITH_BATCHES:
                first, _ = self._bounds[found.key]
                self._bounds[found.key] = (first, found.next_offset)

    def add(self, content: Content, wrote: Callable[[int], None]) -> None:
        """Write what is missing of the partition."""
        key = (content.topic_id, content.topic_partition.partition)
        bounds = (content.start_offset, content.end_offset)
        if self._bounds.get(key) == bounds:
            return
        from_offset = self._bounds[key][1] if key in self._bounds else content.start_offset
        for chunk in chunks(content.stretches(from_offset), self._frame_bytes):
            if key not in self._bounds:
                first = min(content.start_offset, chunk.first_offset)
                self._put(BOUNDS, key, first, first)
            expected = self._bounds[key][1]
            kind = APPEND if chunk.dense and chunk.first_offset == expected else REPLACE
            self._put(kind, key, expected, chunk.next_offset, chunk.data)
            wrote(len(chunk.data))
        if key not in self._bounds:
            self._put(BOUNDS, key, content.start_offset, content.start_offset)
        if self._bounds[key][1] < content.end_offset:
            self._put(REPLACE, key, self._bounds[key][1], content.end_offset)
        self._put(BOUNDS, key, *bounds)

    def _put(self, kind: bytes, key: Key, first: int, following: int, payload: bytes = b"") -> None:
        count = FRAME_BYTES + len(payload)
        if self._log.is_full(count):
            told = [frames.pack(BOUNDS, 0, *each, *bounds) for each, bounds in self._bounds.items()]
            self._log.roll(told, len(told) * FRAME_BYTES)
        parts: Sequence[Buffer] = [frames.pack(kind, len(payload), *key, first, following), payload]
        self._log.write(parts, count)
        self._bounds[key] = (first if kind == BOUNDS else self._bounds[key][0], following)

    def close(self) -> None:
        self._disk.sync_now(self._log.unsynced())
        self._log.close()


def build(
    disk: Disk,
    clock: Clock,
    data: str,
    contents: Sequence[Content],
    settings: Callable[[str], LogSettings],
    file_bytes: int,
    wrote: Callable[[int], None],
) -> None:
    """Build the folder, or go on with it."""
    builder = CommitLogBuilder(disk, data, file_bytes)
    for content in contents:
        builder.add(content, wrote)
        write_partition_files(disk, data, content)
    builder.close()
    store = SharedStore(disk, clock, data, file_bytes=file_bytes)
    try:
        expected = {each.topic_partition: (each.topic_id, settings(each.topic_partition.topic)) for each in contents}
        store.open(expected, same_boot=True)  # all of it was just written
        for content in contents:
            opened = store.get(content.topic_partition)
            assert opened is not None
            opened.cleanings = list(content.cleanings)
        if not store.close():
            raise DataFolderError(f"{data} could not be finished: the log says why; nothing was changed")
    except BaseException:
        store.abandon()
        raise
    for content in contents:
        write_epochs(disk, data, content)
