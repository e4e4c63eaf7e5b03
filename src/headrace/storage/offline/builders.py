"""Writing a data folder in either layout from the content of another one.

In the layout `partitioned` a segment in which offsets have gaps is written as compaction leaves one, with a `.sum` and
an index entry for every batch; the last segment never has any. The `.index` is written last, so a segment that has one
is finished; the file `partition` comes after all segments, so a folder that has one is. What a kill leaves behind of
the rest is thrown away.

In the layout `shared` the commit log is written partition by partition, a frame a megabyte or a quarter of a file. What
a kill leaves behind is told by the frames themselves: the next run goes on behind the last whole one. Queues, epochs
and the checkpoint come from the commit log, as at any start.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from headrace.errors import DataFolderError
from headrace.ports.clock import Clock
from headrace.ports.disk import Buffer, Disk, File, write_atomically
from headrace.settings.values import LogSettings
from headrace.storage import checkpoint, folder
from headrace.storage.checkpoint import LogPoint
from headrace.storage.commitlog import frames
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.frames import (
    APPEND,
    BOUNDS,
    FRAME_BYTES,
    REPLACE,
    WITH_BATCHES,
    BrokenBytes,
    Key,
    Scanner,
)
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import stem
from headrace.storage.offline.content import CHUNK_BYTES, Chunk, Content, chunks, write_epochs, write_partition_files
from headrace.storage.scan import walk
from headrace.storage.segments.index import (
    TIME_ENTRY,
    OffsetIndex,
    TimeIndex,
    closed,
    closed_entries,
)
from headrace.storage.segments.segment import (
    INDEX,
    LOG,
    NO_TIMESTAMP,
    RELATIVE_OFFSET_MAX,
    SUM,
    TIME_INDEX,
    Sum,
    encode_sum,
    read_sum,
)

DIGITS: Final = 20
WRITE_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Segment:
    """One that is being written. Both kinds of index are kept, until it is known whether there are gaps."""

    file: File
    base_offset: int
    interval_bytes: int
    size: int = 0
    next_offset: int = 0
    crc: int = 0
    has_gaps: bool = False
    greatest_ms: int = NO_TIMESTAMP
    entries: array[int] = field(default_factory=lambda: array("Q"))
    every_entry: array[int] = field(default_factory=lambda: array("Q"))
    times: bytearray = field(default_factory=bytearray)
    every_time: bytearray = field(default_factory=bytearray)
    indexed_ms: int = NO_TIMESTAMP
    next_index_at: int = 0
    waiting: list[bytes] = field(default_factory=list)
    waiting_bytes: int = 0

    def add(self, data: bytes, marks: Sequence[tuple[int, int, int, int]], shift: int) -> None:
        """Batches whose marks are relative to a chunk that began `shift` bytes earlier."""
        base_offset = self.base_offset
        for at, base, following, max_ms in marks:
            position, relative = self.size + at - shift, base - base_offset
            if base != self.next_offset:
                self.has_gaps = True
            if position >= self.next_index_at and position:
                self.entries.append(relative << 32 | position)
                self._time(relative)
                self.next_index_at = position + self.interval_bytes
            if relative:
                self.every_entry.append(relative << 32 | position)
            if max_ms > self.greatest_ms:
                self.greatest_ms = max_ms
                self.every_time += TIME_ENTRY.pack(max_ms, following - base_offset)
            self.next_offset = following
        self.size += len(data)
        self.crc = crc32c(data, self.crc)
        self.waiting.append(data)
        self.waiting_bytes += len(data)
        if self.waiting_bytes >= WRITE_BYTES:
            self.flush()

    def _time(self, relative: int) -> None:
        if self.greatest_ms > self.indexed_ms:
            self.indexed_ms = self.greatest_ms
            self.times += TIME_ENTRY.pack(self.greatest_ms, relative)

    def flush(self) -> None:
        if self.waiting:
            self.file.pwritev(self.waiting, self.size - self.waiting_bytes)
            self.waiting, self.waiting_bytes = [], 0

    def finish(self, disk: Disk, next_offset: int) -> None:
        self.flush()
        self.has_gaps = self.has_gaps or next_offset != self.next_offset
        name = self.file.path.removesuffix(LOG)
        self._time(next_offset - self.base_offset)
        written = [self.file]
        entries, times = (self.every_entry, self.every_time) if self.has_gaps else (self.entries, self.times)
        written.append(_write(disk, name + TIME_INDEX, closed(bytes(times), TimeIndex, self.size)))
        if self.has_gaps:
            written.append(_write(disk, name + SUM, encode_sum(Sum(self.crc, self.size, next_offset))))
        disk.sync_now(written)
        _write(disk, name + INDEX, closed(entries.tobytes(), OffsetIndex, self.size)).sync()


def _write(disk: Disk, path: str, content: bytes) -> File:
    file = disk.open(path, create=True, writable=True)
    file.truncate(0)
    file.pwritev([content], 0)
    return file


class PartitionBuilder:
    def __init__(self, disk: Disk, data: str, content: Content, settings: LogSettings) -> None:
        self._disk = disk
        self._data = data
        self._content = content
        self._settings = settings
        self._path = folder.partition_folder(data, content.topic_partition)
        self._segment: _Segment | None = None

    def run(self, wrote: Callable[[int], None]) -> None:
        """Write what is missing of the partition."""
        disk, content = self._disk, self._content
        if disk.exists(f"{self._path}/{folder.PARTITION_FILE}"):
            return
        disk.make_folder(self._path)
        expected = self._resume()
        from_offset = content.start_offset if expected is None else expected
        for chunk in chunks(content.stretches(from_offset)):
            if expected is None:
                expected = min(content.start_offset, chunk.first_offset)
            self._add(chunk, expected)
            expected = chunk.next_offset
            wrote(len(chunk.data))
        if expected is None and content.start_offset < content.end_offset:
            self._roll(content.start_offset)  # all of it is gone
        segment = self._segment
        if segment is None or segment.has_gaps or segment.next_offset < content.end_offset:
            self._roll(content.end_offset)  # what is appended next must not lie behind gaps
        self._end(content.end_offset)
        write_partition_files(disk, self._data, content)

    def _resume(self) -> int | None:
        """Throw away what is not finished; answers the offset to go on with, None if nothing is there."""
        disk, path = self._disk, self._path
        names = disk.list(path)
        finished = sorted(name[:DIGITS] for name in names if name.endswith(INDEX))
        last: int | None = None
        for number in finished:
            file = disk.open(f"{path}/{number}{INDEX}")
            log_bytes = disk.size(f"{path}/{number}{LOG}") if f"{number}{LOG}" in names else -1
            entries = closed_entries(file.pread(file.size(), 0), OffsetIndex, log_bytes) if log_bytes >= 0 else None
            if entries is None:
                break
            last = self._end_of(int(number), entries)
        else:
            number = ""
        for name in names:
            if name[:DIGITS] not in finished or (number and name[:DIGITS] >= number):
                disk.remove(f"{path}/{name}")
        return last

    def _end_of(self, base_offset: int, entries: bytes) -> int:
        name = stem(self._path, base_offset)
        if self._disk.exists(name + SUM):
            found = read_sum(self._disk, name + SUM)
            assert found is not None, f"{name + SUM} was synced before the index was written"
            return found.next_offset
        file = self._disk.open(name + LOG)
        position, end = int.from_bytes(entries[-8:-4], "little") if entries else 0, base_offset
        for _, header in walk(file, position, file.size()):
            end = header.next_offset
        return end

    def _add(self, chunk: Chunk, expected: int) -> None:
        """Batches go to the segment that has room for them."""
        limit, first, data = self._settings.segment_bytes, 0, chunk.data
        marks = chunk.marks
        while first < len(marks):
            segment = self._segment or self._roll(expected)
            count, start = first, marks[first][0]
            while count < len(marks):
                end = marks[count + 1][0] if count + 1 < len(marks) else len(data)
                too_large = segment.size + end - start > limit and (segment.size or count > first)
                if too_large or marks[count][2] - 1 - segment.base_offset > RELATIVE_OFFSET_MAX:
                    break
                count += 1
            if count > first:
                end = marks[count][0] if count < len(marks) else len(data)
                segment.add(data[start:end] if end - start < len(data) else data, marks[first:count], start)
                expected = marks[count - 1][2]
            if count < len(marks):
                self._roll(expected if segment.size else marks[count][1])
            first = count

    def _roll(self, base_offset: int) -> _Segment:
        self._end(base_offset)
        file = self._disk.open(stem(self._path, base_offset) + LOG, create=True, writable=True)
        file.truncate(0)
        interval = self._settings.index_interval_bytes
        self._segment = _Segment(file, base_offset, interval, next_offset=base_offset, next_index_at=interval)
        return self._segment

    def _end(self, next_offset: int) -> None:
        if self._segment is not None:
            self._segment.finish(self._disk, next_offset)
        self._segment = None


def build_partitioned(
    disk: Disk,
    data: str,
    contents: Sequence[Content],
    settings: Callable[[str], LogSettings],
    wrote: Callable[[int], None],
) -> None:
    """Build the folder, or go on with it."""
    points: list[LogPoint] = []
    for content in contents:
        PartitionBuilder(disk, data, content, settings(content.topic_partition.topic)).run(wrote)
        points.append(_point(disk, data, content))
    write_atomically(disk, f"{data}/{checkpoint.FILE_NAME}", checkpoint.encode(points))


def _point(disk: Disk, data: str, content: Content) -> LogPoint:
    where = content.topic_partition
    path = folder.partition_folder(data, where)
    active = max(name for name in disk.list(path) if name.endswith(LOG))
    return LogPoint(
        where.topic,
        where.partition,
        content.topic_id.hex(),
        True,
        content.end_offset,
        content.start_offset,
        content.end_offset,
        int(active[:DIGITS]),
        disk.size(f"{path}/{active}"),
        0,
        list(content.cleanings),
        0,
    )


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


def build_shared(
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
