"""What groups append: records go to a partition of __consumer_offsets as one batch."""

from __future__ import annotations

from collections.abc import Callable

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.errors import Code, HeadraceError
from headrace.groups.offsets import Record
from headrace.partitions.partitions import Partitions
from headrace.partitions.submission import submit
from headrace.records import kernel
from headrace.records.batch import read_header

ALL_IN_SYNC = -1
TIMEOUT_MS = 5000


class GroupLog:
    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    def append(self, index: int, epoch: int, records: list[Record], done: Callable[[int], None]) -> None:
        """`done(error code)` runs when the high watermark has passed the records, or they cannot be had. Groups that
        were loaded in one epoch append to that one only: who loads the next must not miss what they add."""
        partition = self._partitions.find(OFFSETS_TOPIC, index)
        if partition is None or partition.epoch != epoch:
            done(Code.NOT_COORDINATOR)
            return
        now_ms = self._partitions.clock.wall_ms()
        batch = kernel.build([(now_ms, key, value, ()) for key, value in records])

        def answered(error: HeadraceError | None, _base_offset: int) -> None:
            done(Code.NONE if error is None else error.kafka_code)

        submit(self._partitions, partition, batch, ALL_IN_SYNC, TIMEOUT_MS, answered, own=read_header(batch))
        self._partitions.clock.call_soon(self._partitions.end_turn)
