"""What a follower is about to append: batches exactly as the leader has them, checked before any of them is staged."""

from __future__ import annotations

from headrace.errors import CorruptBatch, FencedEpoch, OffsetOutOfRange
from headrace.records.batch import BatchHeader, check
from headrace.storage.log import TopicPartition


def checked(
    where: TopicPartition, data: memoryview, end_offset: int, last_epoch: int, *, is_empty: bool
) -> list[tuple[memoryview, BatchHeader]]:
    """The batches, which fill `data` and follow a log that ends so. Their offsets rise, perhaps with gaps, as in a log
    that was compacted; their epochs do not fall. The first may span the end of a log
    that is empty, as it may span the start of the leader's."""
    found: list[tuple[memoryview, BatchHeader]] = []
    at, size, due = 0, len(data), end_offset
    while at < size:
        try:
            header = check(data, at)
        except CorruptBatch as error:
            raise CorruptBatch(f"{where}: what was copied behind offset {due - 1}: {error}") from None
        if header.base_offset < due and not (is_empty and not found and header.next_offset > due):
            raise OffsetOutOfRange(f"{where}: a batch with offset {header.base_offset} cannot follow {due - 1}")
        if header.leader_epoch < last_epoch:
            raise FencedEpoch(
                f"{where}: a batch of epoch {header.leader_epoch} (offset {header.base_offset}) cannot follow one of "
                f"epoch {last_epoch}"
            )
        end = at + header.size_bytes
        found.append((data[at:end], header))
        at, due, last_epoch = end, header.next_offset, header.leader_epoch
    return found
