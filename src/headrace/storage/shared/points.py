"""What the checkpoint says of each log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.storage.shared.checkpoint import LogPoint
from headrace.storage.shared.log import SharedLog


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
