"""A batch of the broker's own until the high watermark has passed it, however often its sender was told to try again.

What a coordinator has in memory follows the log: what was appended and is still there counts once the watermark has
passed it, though its sender heard meanwhile that there are too few replicas, or that the time is over. It waits with
the other appends of its partition, so all are heard in the order of the log; and for the watermark itself, also where
the topic's reliability acknowledges records below a weaker mark, because only that is never taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.errors import HeadraceError
from headrace.partitions.partition import COMMITTED, Partition
from headrace.partitions.partitions import Partitions
from headrace.storage.log import TopicPartition

ALL_IN_SYNC: Final = -1


class WatermarkWait:
    """`passed` runs once. `failed` hears why it has not come yet, perhaps several times; after the end of the role
    nothing follows."""

    __slots__ = ("_failed", "_needed", "_partition", "_partitions", "_passed", "answered")

    def __init__(
        self,
        partitions: Partitions,
        partition: Partition,
        needed: int,
        passed: Callable[[], None],
        failed: Callable[[HeadraceError], None],
    ) -> None:
        self.answered = False
        self._partitions = partitions
        self._partition = partition
        self._needed = needed
        self._passed = passed
        self._failed = failed

    def begin(self) -> None:
        """After the write."""
        if self._partition.reached(self._needed, COMMITTED):
            self._pass()
        else:
            self._partition.wait(self._needed, ALL_IN_SYNC, self)

    def passed(self) -> None:
        """See `partitions.partition.ProduceWaiter`."""
        if self._partition.reached(self._needed, COMMITTED):
            self._pass()
        else:
            self._partition.wait(self._needed, COMMITTED, self)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        partition = self._partition
        if partition.closed is None and partition.log.offline is None:
            self._partitions.clock.call_soon(self.begin)
        else:
            self.answered = True
        self._failed(error)

    def _pass(self) -> None:
        self.answered = True
        self._passed()
