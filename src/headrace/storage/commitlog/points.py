"""What all logs of a store come to: their points in the checkpoint, and the bytes that they want."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.storage.commitlog.checkpoint import LogPoint
from headrace.storage.commitlog.log import SharedLog


def points(logs: Iterable[SharedLog]) -> Iterator[LogPoint]:
    for each in logs:
        where, queue = each.topic_partition, each.queue
        yield LogPoint(
            where.topic,
            where.partition,
            each.topic_id.hex(),
            each.start_offset,
            each.written_offset,
            queue.size_bytes,
            *queue.active_point(),
            each.epochs.crc_below(each.written_offset),
            list(queue.live.items()),
            each.cleanings,
        )


def live_bytes(numbers: Iterable[int], logs: Iterable[SharedLog]) -> dict[int, int]:
    """Wanted bytes in each commit file, by its number."""
    live = dict.fromkeys(numbers, 0)
    for each in logs:
        for number, count in each.queue.live.items():
            live[number] = live.get(number, 0) + count
    return live
