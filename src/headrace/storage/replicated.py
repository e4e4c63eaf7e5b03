"""What replication asks of a log, the same in every layout: taking copied batches, telling epochs, keeping what is not
committed.

`committed_offset` is the partition's high watermark, as far as the log was told. Everything from it on may still be cut
by a truncation, so retention, compaction and the key index leave it alone: an older record that compaction had dropped
for its sake would be lost with it. Nobody tells a log that was just opened, so nothing of it is removed until someone
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.records.batch import BatchHeader
from headrace.settings import LogSettings
from headrace.storage import copied
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import EpochEnd, TopicPartition


class ReplicatedLog:
    topic_partition: TopicPartition
    settings: LogSettings
    start_offset: int
    end_offset: int
    epochs: EpochHistory

    def __init__(self, archived_offset: Callable[[TopicPartition], int]) -> None:
        self.committed_offset = 0
        self.copying = False
        self._archived = archived_offset

    def archived_offset(self) -> int:
        archived = self._archived(self.topic_partition)
        # An offset that this log never had was committed for another one of that name.
        return archived if 0 <= archived <= self.end_offset else 0

    def deletable_below(self) -> int:
        """Retention and compaction leave everything from this offset on."""
        if self.settings.retention_archived:
            return min(self.committed_offset, self.archived_offset())
        return self.committed_offset

    def last_epoch(self) -> int:
        return self.epochs.last_epoch()

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        return self.epochs.end_of(epoch, self.start_offset, self.end_offset)

    def epoch_starts(self) -> Sequence[tuple[int, int]]:
        return self.epochs.entries

    def append_copied(self, data: memoryview) -> int:
        is_empty = self.start_offset == self.end_offset
        batches = copied.checked(self.topic_partition, data, self.end_offset, self.last_epoch(), is_empty=is_empty)
        self.copying = True
        try:
            if batches and batches[0][1].base_offset < self.end_offset:
                start_offset = self.start_offset
                self.restart_at(batches[0][1].base_offset)
                self.start_offset = start_offset
            for batch, header in batches:
                self._stage(batch, header, header.base_offset, header.leader_epoch)
        finally:
            self.copying = False
        return self.end_offset

    def restart_at(self, offset: int) -> None:
        raise NotImplementedError

    def _stage(self, batch: memoryview, header: BatchHeader, base: int, epoch: int) -> None:
        raise NotImplementedError
