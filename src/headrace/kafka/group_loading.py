"""The partitions of __consumer_offsets that this broker leads, and their way from the log into the coordinator.

A partition that is led in a new epoch is read when its watermark has reached what the epoch began with: a commit that
was answered by an earlier leader is below it, and nothing above it can be taken back. It is read piece by piece, each
in a turn of its own and from the page cache, so that the loop serves others meanwhile; its groups answer
COORDINATOR_LOAD_IN_PROGRESS until the end. When the broker does not lead it any more, its groups are dropped at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from headrace.cluster.image import Image
from headrace.errors import CorruptBatch, HeadraceError, InvalidRecord
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.offsets import OFFSETS_TOPIC, Record
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import Disk, FileSlice
from headrace.records import kernel
from headrace.records.batch import BatchHeader, batches
from headrace.storage.log import TopicPartition
from headrace.storage.warming import are_warm

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
"""Of the log that one turn takes into memory, or one batch if that is larger."""
ALL_IN_SYNC: Final = -1


class GroupPartitions:
    """Keeps the coordinator's partitions as the roles of this broker are; `follow` after every change, and at ticks."""

    def __init__(
        self, partitions: Partitions, groups: GroupCoordinator, disk: Disk, image: Callable[[], Image]
    ) -> None:
        self._partitions = partitions
        self._groups = groups
        self._disk = disk
        self._image = image
        self._loads: dict[int, _Load] = {}

    @property
    def reading(self) -> bool:
        """Whether a partition is on its way into memory, and nothing but that keeps it."""
        return any(load.reading for load in self._loads.values())

    def follow(self) -> None:
        topic = self._image().topics.get(OFFSETS_TOPIC)
        count = 0 if topic is None else len(topic.partitions)
        for index in [index for index in self._loads if index >= count]:
            self._resign(index)
        for index in range(count):
            partition = self._partitions.find(OFFSETS_TOPIC, index)
            load = self._loads.get(index)
            if load is not None and load.partition is not partition:
                self._resign(index)
            if partition is not None:
                self._go_on(index, partition)

    def forget_topics(self, old: Image, new: Image) -> None:
        """An image listener: offsets of topics that are gone must not be found by others of their names."""
        gone = [name for name, topic in old.topics.items() if name not in new.topics or new.topics[name].id != topic.id]
        if gone:
            self._groups.drop_topics(gone)

    def _go_on(self, index: int, partition: Partition) -> None:
        load = self._loads.get(index)
        if load is None:
            load = self._loads[index] = _Load(self, partition, self._partitions.clock.call_soon, self._disk)
            load.begin(self._groups)
        load.wait()

    def _resign(self, index: int) -> None:
        del self._loads[index]
        self._groups.resign(index)

    def loaded(self, index: int) -> None:
        self._groups.keep_topics(index, self._image().topics)


class _Load:
    """One partition in one epoch, from the beginning of its lead until it is in memory."""

    def __init__(
        self,
        owner: GroupPartitions,
        partition: Partition,
        call_soon: Callable[[Callable[[], None]], object],
        disk: Disk,
    ) -> None:
        assert partition.core is not None, "only a leader loads"
        self.partition = partition
        self.answered = False
        self._owner = owner
        self._call_soon = call_soon
        self._disk = disk
        self._end = partition.core.epoch_start
        self._offset = partition.log.start_offset
        self._waiting = self.reading = self._done = False

    def begin(self, groups: GroupCoordinator) -> None:
        self._loading = groups.lead(self.partition.topic_partition.partition)

    # The wait for the watermark, as a produce request waits.

    def wait(self) -> None:
        if self._waiting or self.reading or self._done:
            return
        if self.partition.high_watermark >= self._end:
            self.reading = True
            self._read()
        elif not self.partition.reached(self._end, ALL_IN_SYNC):
            self._waiting = True
            self.partition.wait(self._end, ALL_IN_SYNC, self)

    def passed(self) -> None:
        """With a weaker reliability the watermark may not be there yet: then the next `follow` sees it."""
        self._waiting = False
        if self.partition.high_watermark >= self._end:
            self.reading = True
            self._call_soon(self._read)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        """Too few replicas, for now, or another role: the next `follow` sees which."""
        self._waiting = False

    # Reading.

    def _read(self, *, warm: bool = False) -> None:
        if not self._loading.wanted:
            return
        if self._offset >= self._end:
            self._done, self.reading = True, False
            self._loading.ready()
            self._owner.loaded(self.partition.topic_partition.partition)
            return
        try:
            found = self.partition.log.read(self._offset, PIECE_BYTES, self._end, warm=warm)
        except HeadraceError as error:
            self._pass_over(error)
            return
        if found.unchecked is not None and not found.slices:
            if are_warm(self._disk, found.wanted, self._read_warm):
                self._call_soon(self._read_warm)
        elif are_warm(self._disk, found.slices, lambda: self._take(found.slices)):
            self._take(found.slices)

    def _read_warm(self) -> None:
        self._read(warm=True)

    def _take(self, slices: Sequence[FileSlice]) -> None:
        before = self._offset
        for piece in slices:
            data = piece.file.pread(piece.count, piece.position)
            for header, view in batches(memoryview(data)):
                if header.base_offset < self._end:
                    self._replay(header, view)
                    self._offset = max(self._offset, header.next_offset)
        if self._offset == before:
            self._offset = self._end
        self._call_soon(self._read)

    def _replay(self, header: BatchHeader, view: memoryview) -> None:
        try:
            self._loading.replay(() if header.is_control else _records(view))
        except (CorruptBatch, InvalidRecord) as error:
            log.error("%s: a batch at offset %d is passed over: %s", self._where, header.base_offset, error)

    def _pass_over(self, error: HeadraceError) -> None:
        """A damaged batch: what it held is lost here, what follows is not."""
        log.error("%s: offset %d cannot be read and is passed over: %s", self._where, self._offset, error)
        rising = (header.base_offset for header, _ in self.partition.log.headers(self._offset))
        self._offset = next((offset for offset in rising if offset > self._offset), self._end)
        self._call_soon(self._read)

    @property
    def _where(self) -> TopicPartition:
        return self.partition.topic_partition


def _records(view: memoryview) -> Iterator[Record]:
    return ((record.key, record.value) for record in kernel.records(view) if record.key is not None)
