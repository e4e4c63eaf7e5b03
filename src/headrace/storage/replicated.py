"""What replication asks of a log, the same in every layout: taking copied batches, telling epochs, keeping what is not
committed.

`committed_offset` is the partition's high watermark, as far as the log was told. Everything from it on may still be cut
by a truncation, so retention, compaction and the key index leave it alone: an older record that compaction had dropped
for its sake would be lost with it. Nobody tells a log that was just opened, so nothing of it is removed until someone
does.

`retire` is what retention calls instead of deleting: whoever serves the log decides when its start rises. A replica
must not begin where the others do not, and a follower never decides by its own clock. A log that nobody has taken over
deletes at once. `safe_start_offset` is the start that a checkpoint holds, so that no crash lowers it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headrace.errors import CorruptBatch, FencedEpoch, HeadraceError, OffsetOutOfRange
from headrace.records.batch import BatchHeader, check
from headrace.settings.values import LogSettings
from headrace.storage import producers
from headrace.storage.checkpoint import Done
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import EpochEnd, TopicPartition
from headrace.storage.producers import ProducerState, ProducerTable

log = logging.getLogger(__name__)


def check_copied(
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


class ReplicatedLog:
    topic_partition: TopicPartition
    settings: LogSettings
    start_offset: int
    safe_start_offset: int
    retiring_to: int
    retire: Callable[[int], None]
    on_damage: Callable[[int], None]
    end_offset: int
    written_offset: int
    committed_offset: int
    truncations: int
    sync_asked_offset: int
    copying: bool
    epochs: EpochHistory
    producers: ProducerTable

    def __init__(self, archived_offset: Callable[[TopicPartition], int]) -> None:
        self.committed_offset = 0
        self.safe_start_offset = self.retiring_to = 0
        self.retire = self.delete_before
        self.copying = False
        self.on_damage = lambda _offset: None
        self._told_epochs: Sequence[tuple[int, int]] = ()
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

    def producers_before(self, offset: int) -> dict[int, ProducerState]:
        return producers.before(self.producers.states, offset)

    def learn_producers(self, states: dict[int, ProducerState]) -> None:
        if self.start_offset != self.end_offset:
            return
        self.producers.learn(states)
        self._write_snapshot_at(self.written_offset, self.producers.states)
        self._sync_snapshot_soon()

    def _remember_producers(self, offset: int) -> None:
        """Have a snapshot at the offset, before what lies below it goes: nothing else tells of it then, and one further
        on may be cut. The last batches of a producer are enough: it has no older ones on their way. OSError and
        HeadraceError: nothing may go. What is damaged nobody can keep."""
        if not self._has_snapshot_at(offset) and (known := self._known_before(offset)):
            self._write_snapshot_at(offset, known)

    def _known_before(self, offset: int) -> dict[int, ProducerState]:
        """Of producers; nothing where that is damaged."""
        try:
            return self.producers_before(offset)
        except CorruptBatch as error:
            log.warning("%s: what lies below offset %d tells of no producers: %s", self.topic_partition, offset, error)
            return {}

    def append_copied(self, data: memoryview, epoch_starts: Sequence[tuple[int, int]] = ()) -> int:
        is_empty = self.start_offset == self.end_offset
        batches = check_copied(self.topic_partition, data, self.end_offset, self.last_epoch(), is_empty=is_empty)
        self.copying, self._told_epochs = True, epoch_starts
        try:
            if batches and batches[0][1].base_offset < self.end_offset:
                start_offset, states = self.start_offset, self.producers.states
                self.restart_at(batches[0][1].base_offset)
                self.learn_producers(states)
                self.start_offset = start_offset
            for batch, header in batches:
                self._stage(batch, header, header.base_offset, header.leader_epoch)
        finally:
            self.copying, self._told_epochs = False, ()
        return self.end_offset

    def _begin_epoch(self, epoch: int, base: int) -> None:
        """The batch that is staged at this offset is the first of its epoch here. Copied batches may have been
        compacted: where the leader has told when epochs began, that counts, else what `epochs` says of the least
        start. What is here belongs to epochs before."""
        entries = self.epochs.entries
        is_empty = self.start_offset >= self.end_offset
        least = (entries[-1][1] if entries else 0) if is_empty else self.end_offset
        for told, start in self._told_epochs:
            if told <= epoch:
                self.epochs.begin(told, min(max(start, least), base))
        self.epochs.begin(epoch, min(self.end_offset, base))

    def start_kept(self, done: Done | None) -> Done:
        """What a checkpoint that holds the start of now calls when it is written, or could not be."""
        start_offset, truncations = self.start_offset, self.truncations

        def kept(error: HeadraceError | None) -> None:
            if error is None and truncations == self.truncations:
                self.safe_start_offset = max(self.safe_start_offset, start_offset)
            if done is not None:
                done(error)

        return kept

    def _has_snapshot_at(self, offset: int) -> bool:
        raise NotImplementedError

    def _write_snapshot_at(self, offset: int, states: dict[int, ProducerState]) -> None:
        """What is known of producers before the offset; it is to be synced."""
        raise NotImplementedError

    def _sync_snapshot_soon(self) -> None:
        raise NotImplementedError

    def delete_before(self, offset: int, done: Done | None = None) -> None:
        raise NotImplementedError

    def restart_at(self, offset: int) -> None:
        raise NotImplementedError

    def _stage(self, batch: memoryview, header: BatchHeader, base: int, epoch: int) -> None:
        raise NotImplementedError
