"""A consumer of committed records, as Kafka's is: it is told which transactions were aborted, and leaves them out."""

from __future__ import annotations

from headrace.partitions.partition import Partition
from headrace.records import kernel
from headrace.records.batch import batches, check
from headrace.records.control import read_marker
from headrace.storage.log import ReadResult

Aborted = list[tuple[int, int]]


def consumed(found: ReadResult, aborted: Aborted, from_offset: int = 0) -> tuple[list[bytes], int]:
    """The values that one answer gives to who asked for this offset, and the offset to ask for next."""
    waiting = sorted(aborted, key=lambda each: each[1])
    left_out: set[int] = set()
    values: list[bytes] = []
    offset = from_offset
    for _, view in batches(memoryview(b"".join(piece.read() for piece in found.slices))):
        header = check(view)
        offset = max(offset, header.next_offset)
        while waiting and waiting[0][1] <= header.last_offset:
            left_out.add(waiting.pop(0)[0])
        if header.is_control:
            marker = read_marker(view, header)
            if marker is not None and not marker.committed:
                left_out.discard(header.producer_id)
        elif not header.is_transactional or header.producer_id not in left_out:
            records = [record for record in kernel.records(view) if record.offset >= from_offset]
            values += [record.value for record in records if record.value is not None]
    return values, offset


def read(partition: Partition, offset: int, *, committed: bool, max_bytes: int = 300) -> list[bytes]:
    """All that there is from an offset on, a little at a time."""
    values: list[bytes] = []
    while True:
        if committed:
            found, aborted = partition.read_committed(offset, max_bytes, warm=True)
        else:
            found, aborted = partition.read(offset, max_bytes, warm=True), []
        more, reached = consumed(found, aborted, offset)
        values += more
        if reached == offset:
            return values
        offset = reached
