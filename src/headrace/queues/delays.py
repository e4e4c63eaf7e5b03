"""The delayed records of all partitions on this broker whose topics have delays (`headrace.delay.enable`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace import metrics
from headrace.errors import CoordinatorLoading, InvalidRequest
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import Disk
from headrace.queues.delayed_partition import DelayedPartition, Recalled
from headrace.storage.folder import partition_folder
from headrace.storage.log import Log

TICKS_PER_LOOK: Final = 10
"""Between two looks at all partitions."""


class Delays:
    """`follow` after every change of roles or settings; `tick` every 100 ms."""

    def __init__(self, partitions: Partitions, disk: Disk, data_folder: str) -> None:
        self.partitions = partitions
        self.disk = disk
        self._data_folder = data_folder
        self._delayed: dict[Log, DelayedPartition] = {}
        self._ticks = 0

    def __len__(self) -> int:
        """Records that wait, of partitions led here."""
        return sum(each.waiting for each in self._delayed.values() if each.partition.leading)

    def folder_of(self, partition: Partition) -> str:
        return partition_folder(self._data_folder, partition.topic_partition)

    def follow(self) -> None:
        wanted = {each.log: each for each in self.partitions if each.log.settings.delays}
        for log in self._delayed.keys() - wanted.keys():
            served = self.partitions.store.get(log.topic_partition) is log
            self._delayed.pop(log).close(save=served)
        for log, partition in wanted.items():
            known = self._delayed.get(log)
            if known is None:
                self._delayed[log] = DelayedPartition(self, partition)
            elif known.partition is not partition:
                known.take_role(partition)

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % TICKS_PER_LOOK == 0:
            self.follow()
        for each in list(self._delayed.values()):
            each.tick()

    def recall(self, partition: Partition, handle: int, done: Recalled) -> None:
        """Have the delayed record with this handle never delivered; see `DelayedPartition.recall`. Raises what refuses
        it at once."""
        known = self._delayed.get(partition.log)
        if not partition.log.settings.delays:
            where = partition.topic_partition
            raise InvalidRequest(f"{where}: its topic has no delays (headrace.delay.enable)")
        if known is None or known.partition is not partition:
            raise CoordinatorLoading(f"{partition.topic_partition}: its delayed records are being read: try again")
        known.recall(handle, done)

    def close(self) -> None:
        while self._delayed:
            self._delayed.popitem()[1].close(save=True)

    def samples(self) -> Iterator[metrics.Sample]:
        topics: dict[str, list[DelayedPartition]] = {}
        for each in self._delayed.values():
            if each.partition.leading:
                topics.setdefault(each.partition.topic_partition.topic, []).append(each)
        for topic, led in topics.items():
            yield metrics.Sample(metrics.DELAYED_WAITING, (topic,), sum(each.waiting for each in led))
            yield metrics.Sample(metrics.DELAYED_DELIVERED, (topic,), sum(each.delivered for each in led))
            yield metrics.Sample(metrics.DELAYED_LATE_SECONDS, (topic,), sum(each.late_ms for each in led) / 1000)
            yield metrics.Sample(metrics.DELAYED_LATEST_SECONDS, (topic,), max(each.latest_ms for each in led) / 1000)
