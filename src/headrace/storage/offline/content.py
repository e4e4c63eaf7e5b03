"""What a data folder holds of each partition, whatever its layout. The folder must be as a clean stop leaves it.

Two folders hold the same if for every partition topic id, bounds, epochs, producers and cleanings are the same, and the
bytes of all batches from the one that holds the start offset on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk, FileSlice, write_atomically
from headrace.records.batch import HEADER_BYTES, LENGTH_END, MAGIC
from headrace.storage import checkpoint, folder, producers
from headrace.storage.aborted import AbortedIndex, AbortedTransactions, by_count
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.epochs import EpochHistory, read_entries
from headrace.storage.folder import stem
from headrace.storage.log import TopicPartition
from headrace.storage.offline.commitlog_survey import Folder, Stretch
from headrace.storage.producers import SNAPSHOT, LogProducers, Snapshots, newest_known
from headrace.storage.scan import find, walk_checked
from headrace.storage.segments.segment import GAPS, LOG, SUM

CHUNK_BYTES: Final = 1 << 20
DIGITS: Final = 20

_FIELDS = struct.Struct(">qi4xb6xi8xq").unpack_from

Mark = tuple[int, int, int, int]
"""Of a batch in a chunk: where it begins, its base offset, the offset behind it, its greatest timestamp."""


@dataclass(frozen=True, slots=True)
class Content:
    topic_partition: TopicPartition
    path: str
    topic_id: bytes
    start_offset: int
    end_offset: int
    cleanings: list[tuple[int, int]]
    epochs: list[tuple[int, int]]
    producers: LogProducers
    stretches: Callable[[int], Iterator[Stretch]]
    """Bytes in order of offsets, from the batch that holds the offset on."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole batches; `dense` if there is no gap between their offsets."""

    data: bytes
    marks: list[Mark]
    dense: bool

    @property
    def first_offset(self) -> int:
        return self.marks[0][1]

    @property
    def next_offset(self) -> int:
        return self.marks[-1][2]


def is_clean(disk: Disk, data: str) -> bool:
    """Whether the folder is as a clean stop leaves it."""
    if folder.layout_of(disk, data) == folder.SHARED:
        found = Folder(disk, data)
        return found.is_clean and found.checkpoint.logs.keys() == found.partitions.keys()
    points, partitions = checkpoint.read(disk, data), dict(folder.partitions(disk, data))
    if points is None or points.keys() != partitions.keys():
        return False
    for where, path in partitions.items():
        point = points[where]
        active = stem(path, point.active_base) + LOG
        if not point.clean or (disk.size(active) if disk.exists(active) else 0) != point.active_bytes:
            return False
    return True


def contents(disk: Disk, data: str, now_ms: int) -> list[Content]:
    if folder.layout_of(disk, data) == folder.SHARED:
        return list(_shared(disk, data, now_ms))
    return list(_partitioned(disk, data, now_ms))


def _shared(disk: Disk, data: str, now_ms: int) -> Iterator[Content]:
    found = Folder(disk, data)
    found.open()
    for where, each in found.partitions.items():
        bounds, cleanings = (each.start_offset, each.end_offset), each.point.cleanings if each.point else []
        stretches = partial(found.stretches, each)
        yield _content(disk, where, each.path, each.topic_id, bounds, cleanings, stretches, now_ms, is_shared=True)


def _partitioned(disk: Disk, data: str, now_ms: int) -> Iterator[Content]:
    points = checkpoint.read(disk, data) or {}
    for where, path in folder.partitions(disk, data):
        topic_id, point = folder.read_topic_id(disk, path), points[where]
        assert isinstance(topic_id, bytes), topic_id
        bounds = point.start_offset, point.end_offset
        stretches = partial(_segments, disk, path, point.end_offset)
        yield _content(disk, where, path, topic_id, bounds, point.cleanings, stretches, now_ms, is_shared=False)


def _content(
    disk: Disk,
    where: TopicPartition,
    path: str,
    topic_id: bytes,
    bounds: tuple[int, int],
    cleanings: list[tuple[int, int]],
    stretches: Callable[[int], Iterator[Stretch]],
    now_ms: int,
    *,
    is_shared: bool,
) -> Content:
    start_offset, end_offset = bounds
    snapshots = Snapshots(disk, path, _offsets(disk, path, SNAPSHOT))
    first_offset = start_offset if is_shared else min(_offsets(disk, path, LOG), default=start_offset)
    index = AbortedIndex(disk, path, ())
    from_offset, known = newest_known(snapshots, index, by_count, first_offset, end_offset)
    if from_offset < end_offset:
        batches = (
            (header, FileSlice(stretch.file, position, header.size_bytes))
            for stretch in stretches(from_offset)
            for position, header in walk_checked(stretch.file, stretch.position, stretch.end)
        )
        for _ in producers.replay(known, from_offset, end_offset, batches, now_ms):
            pass
    epochs, _ = read_entries(disk, f"{path}/{EPOCHS_FILE}")
    return Content(where, path, topic_id, start_offset, end_offset, cleanings, epochs, known, stretches)


def _segments(disk: Disk, path: str, end_offset: int, from_offset: int) -> Iterator[Stretch]:
    bases = _offsets(disk, path, LOG)
    for base, following in zip(bases, [*bases[1:], end_offset], strict=False):
        file = disk.open(stem(path, base) + LOG)
        size, at, first = file.size(), 0, base
        if following <= from_offset or not size:
            continue
        if base < from_offset:
            sparse = any(disk.exists(stem(path, base) + ending) for ending in (SUM, GAPS))
            at = find(file, 0, size, base, from_offset, dense=not sparse)
            if at < 0:
                raise CorruptBatch(f"{file.path}: no batches up to offset {from_offset}")
        if at < size:
            first = int.from_bytes(file.pread(8, at), "big")
            yield Stretch(file, at, size - at, first, following)


def _offsets(disk: Disk, path: str, ending: str) -> list[int]:
    return sorted(int(name[:DIGITS]) for name in disk.list(path) if name.endswith(ending) and name[:DIGITS].isdigit())


def chunks(stretches: Iterable[Stretch], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Whole batches, about so many bytes at a time."""
    for stretch in stretches:
        position, end, count = stretch.position, stretch.end, size
        while position < end:
            data = stretch.file.pread(min(count, end - position), position)
            used, marks, dense = _marks(data)
            if not used:
                if len(data) == end - position:
                    raise CorruptBatch(f"{stretch.file.path} at byte {position}: no whole batch is here")
                count *= 4
                continue
            yield Chunk(data if used == len(data) else data[:used], marks, dense)
            position, count = position + used, size


def _marks(data: bytes) -> tuple[int, list[Mark], bool]:
    """How many bytes are whole batches, where those begin, and whether there is no gap between them."""
    at, size, dense = 0, len(data), True
    marks: list[Mark] = []
    expected = -1
    while size - at >= HEADER_BYTES:
        base, length, magic, last_delta, max_ms = _FIELDS(data, at)
        end = at + length + LENGTH_END
        if magic != MAGIC or length < HEADER_BYTES - LENGTH_END or last_delta < 0 or base < expected:
            raise CorruptBatch(f"the header of a batch (base offset {base}) makes no sense")
        if end > size:
            break
        dense = dense and (base == expected or expected < 0)
        expected = base + last_delta + 1
        marks.append((at, base, expected, max_ms))
        at = end
    return at, marks, dense


def differences(left: Content, right: Content) -> Iterator[str]:
    """In words; none if they are the same."""
    for name in ("topic_id", "start_offset", "end_offset", "cleanings", "epochs"):
        one, other = getattr(left, name), getattr(right, name)
        if one != other:
            yield f"{name.replace('_', ' ')}: {one!r} and {other!r}"
    if _known(left.producers) != _known(right.producers):
        yield f"producers: {_known(left.producers)} and {_known(right.producers)}"
    aborted, others = (list(each.producers.aborted) for each in (left, right))
    if aborted != others:
        yield f"aborted transactions: {aborted} and {others}"


def _known(known: LogProducers) -> dict[int, tuple[object, ...]]:
    """Without the times of last use: a header that is read again has none."""
    return {producer_id: state._replace(used_ms=0) for producer_id, state in known.states.items()}


def compare_bytes(left: Content, right: Content, compared: Callable[[int], None]) -> int | None:
    """The first byte at which the batches differ; None if all are the same. `compared` hears how many were."""
    pieces = [_pieces(each.stretches(each.start_offset)) for each in (left, right)]
    rest = [memoryview(b""), memoryview(b"")]
    at = 0
    while True:
        for side in (0, 1):
            if not rest[side]:
                rest[side] = memoryview(next(pieces[side], b""))
        count = min(map(len, rest))
        if not count:
            return None if not any(map(len, rest)) else at
        # Views compare item by item, bytes at once.
        if bytes(rest[0][:count]) != bytes(rest[1][:count]):
            return at
        rest = [each[count:] for each in rest]
        at += count
        compared(count)


def _pieces(stretches: Iterable[Stretch]) -> Iterator[bytes]:
    for stretch in stretches:
        for position in range(stretch.position, stretch.end, CHUNK_BYTES):
            yield stretch.file.pread(min(CHUNK_BYTES, stretch.end - position), position)


def write_partition_files(disk: Disk, data: str, content: Content) -> None:
    """Epochs, producers and, last, the file that makes the folder a partition's."""
    path = folder.partition_folder(data, content.topic_partition)
    disk.make_folder(path)
    write_epochs(disk, data, content)
    known = content.producers
    if known.states or known.aborted.files:
        aborted = AbortedTransactions(by_count)
        for entry in known.aborted:
            aborted.add(entry)
        for each in AbortedIndex(disk, path, ()).write(aborted):
            disk.open(each).sync()
        snapshot = LogProducers(known.states, known.transactions, aborted).snapshot(content.end_offset)
        write_atomically(disk, stem(path, content.end_offset) + SNAPSHOT, producers.encode_snapshot(snapshot))
    disk.open(folder.write_partition_file(disk, path, content.topic_id)).sync()
    for each in (path, path.rpartition("/")[0], data):
        disk.sync_folder(each)


def write_epochs(disk: Disk, data: str, content: Content) -> None:
    """The whole history, of offsets below the start as well."""
    history = EpochHistory(disk, folder.partition_folder(data, content.topic_partition), fresh=True)
    for epoch, offset in content.epochs:
        history.begin(epoch, offset)
    file = history.save()
    if file is not None:
        file.sync()
        file.close()
