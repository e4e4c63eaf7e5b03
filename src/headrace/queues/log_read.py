"""What a share partition reads of its log: which batches there are, by their headers alone, and the slices of a file
that they lie in. Records are not looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from headrace.errors import StorageFailed
from headrace.partitions.partition import Partition
from headrace.ports.disk import Disk, FileSlice
from headrace.queues.messages import AcquiredRecords
from headrace.queues.share_partition import FoundBatch
from headrace.records.batch import BatchHeader
from headrace.records.isolation import AbortedFilter, Isolation
from headrace.storage.log import ReadResult
from headrace.storage.page_cache import read_ahead
from headrace.storage.scan import walk

BATCHES_MAX: Final = 2000
"""That are looked at in one read: a read of many bytes may have hundreds of thousands."""


class LogRead:
    """Whole batches from an offset on, not many more than are needed to acquire so many records from another one on."""

    def __init__(
        self, found: ReadResult, aborted: Sequence[tuple[int, int]], next_offset: int, max_records: int
    ) -> None:
        self.batches: list[FoundBatch] = []
        self._places: list[tuple[FileSlice, int, int]] = []
        """For each of them the slice, where it begins in that, and its length."""
        hidden = AbortedFilter(aborted) if aborted else None
        for piece, at, header in _headers(found.slices):
            # The filter has to see every header, markers too.
            is_hidden = hidden is not None and hidden.hides(header)
            is_data = not header.is_control and not is_hidden and header.record_count > 0
            self.batches.append(FoundBatch(header.base_offset, header.last_offset, is_data))
            self._places.append((piece, at, header.size_bytes))
            if is_data and header.last_offset >= next_offset:
                max_records -= header.next_offset - max(header.base_offset, next_offset)
            if max_records <= 0 or len(self.batches) >= BATCHES_MAX:
                break

    @property
    def least_bytes(self) -> int:
        """Of the first batch."""
        return self._places[0][2] if self._places else 0

    def slices_of(self, records: Sequence[AcquiredRecords]) -> tuple[FileSlice, ...]:
        """The batches that hold any of these records, neighbours as one slice."""
        slices: list[FileSlice] = []
        current: FileSlice | None = None
        first = end = index = 0
        for batch, (piece, at, count) in zip(self.batches, self._places, strict=True):
            while index < len(records) and records[index].last_offset < batch.base_offset:
                index += 1
            if index == len(records):
                break
            if records[index].first_offset > batch.last_offset:
                continue
            if piece is current and at == end:
                end += count
                continue
            if current is not None:
                slices.append(current.part(first, end - first))
            current, first, end = piece, at, at + count
        if current is not None:
            slices.append(current.part(first, end - first))
        return tuple(slices)


def read_log(
    partition: Partition,
    disk: Disk,
    offset: int,
    max_bytes: int,
    isolation: Isolation,
    next_offset: int,
    max_records: int,
    *,
    warm: bool,
) -> LogRead | Sequence[FileSlice]:
    """What a group may see from this offset on, with so many records from `next_offset` on; or the slices that have to
    be in the page cache first, if they are not `warm`. Raises what `Partition.read` does."""
    aborted: Sequence[tuple[int, int]] = ()
    if isolation is Isolation.COMMITTED:
        found, aborted = partition.read_committed(offset, max_bytes, warm=warm)
    else:
        found = partition.read(offset, max_bytes, warm=warm)
    if found.unchecked is not None and not found.slices:
        return found.wanted
    if found.beyond:
        read_ahead(disk, found.beyond)
    if not warm and not all(piece.file.in_cache(piece.position, piece.count) for piece in found.slices):
        return found.slices
    try:
        return LogRead(found, aborted, next_offset, max_records)
    except OSError as error:
        raise StorageFailed(f"{partition.topic_partition}: {error}") from error


def readable_end(partition: Partition, isolation: Isolation) -> int:
    """Where that ends. OffsetNotAvailable while it cannot be told."""
    return partition.last_stable_offset if isolation is Isolation.COMMITTED else partition.high_watermark


def _headers(slices: Sequence[FileSlice]) -> Iterator[tuple[FileSlice, int, BatchHeader]]:
    for piece in slices:
        for position, header in walk(piece.file, piece.position, piece.position + piece.count, may_be_cut=True):
            yield piece, position - piece.position, header
