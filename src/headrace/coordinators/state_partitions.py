"""The partitions of an internal topic that this broker leads, and their way from the log into the coordinator whose
state they hold.

A partition that is led in a new epoch is read when its watermark has reached what the epoch began with: whatever an
earlier leader has answered is below it, and nothing above it can be taken back. It is read up to the watermark, piece
by piece, each in a turn of its own and from the page cache, so that the loop serves others meanwhile; what it holds
answers COORDINATOR_LOAD_IN_PROGRESS until the end. When the broker does not lead it any more, its state is dropped at
once.

A load opens its partition only when it has seen every batch. What it cannot read it tries again, with longer and longer
pauses. Damage is reported like any other (`Partition.found_damage`): where another member of the in-sync set is alive
the broker resigns, and the partition is loaded there. Where none is, the partition stays closed, because older state
must never be taken for the last; the log says so, and how an operator accepts what is lost (the setting
`StateTopic.loss_setting`). A record that is whole and means nothing to this version closes its partition in the same
way, but is no damage: no other replica has it better.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from headrace.cluster.image import Image
from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import ALL_IN_SYNC, ProducerEpoch
from headrace.errors import CorruptBatch, HeadraceError, InvalidRecord, StorageFailed
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, FileSlice
from headrace.records import kernel
from headrace.records.batch import BatchHeader, batches, check
from headrace.records.control import read_marker
from headrace.storage.log import TopicPartition
from headrace.storage.page_cache import are_warm

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 10
"""Of the log that one turn takes into memory, or one batch if that is larger."""
PAUSE_LEAST_SECONDS: Final = 0.1
PAUSE_MOST_SECONDS: Final = 10.0
UNABLE_AFTER_SECONDS: Final = 30.0
"""How long a load is tried, when nothing is known to be damaged, before another broker shall try."""

Loss = tuple[int, int]
"""A partition and the first offset there that cannot be read."""


def accepted_losses(texts: Iterable[str]) -> frozenset[Loss]:
    """What the setting says; its form was checked when it was set."""
    pairs = (text.split(":") for text in texts)
    return frozenset((int(partition), int(offset)) for partition, offset in pairs)


@dataclass(frozen=True, slots=True)
class StateTopic:
    """An internal topic that holds a coordinator's state, and what its log messages say."""

    name: str
    loss_setting: Literal["offsets.loss.accepted", "transactions.loss.accepted", "share.state.loss.accepted"]
    """The setting by which an operator accepts what cannot be read: a list of partition:offset."""
    kept: str
    """What its records are about, as in "its groups wait"."""
    unknown: str
    """What is not known while a partition cannot be read."""
    after_loss: str
    """What comes of an accepted loss."""


@dataclass(frozen=True, slots=True)
class ClosedPartition:
    """One that this broker leads and cannot read: what it holds is not answered."""

    partition: int
    offset: int
    reason: str
    is_damage: bool


class Loading(Protocol):
    """A partition's state on its way into memory. Of no effect once the partition was resigned."""

    @property
    def wanted(self) -> bool: ...

    def replay(self, records: Iterable[Record], producer: ProducerEpoch | None = None) -> None:
        """The next records of the partition, in order; as many calls as it takes, after a failed one the same again.
        Of a producer's transaction they count when its marker says so. CorruptBatch: one of them cannot be read, and
        the state must not be opened without it."""
        ...

    def replay_marker(self, producer: ProducerEpoch, *, committed: bool) -> None:
        """What the producer wrote in its transaction up to here counts from now on, or is dropped. The epoch may be
        greater than that of what it wrote."""
        ...

    def lost(self) -> None:
        """Here records are gone that were below the watermark: what was replayed up to here may not be the last of
        it."""
        ...

    def ready(self) -> None:
        """Everything below the high watermark was replayed: answer requests."""
        ...


class Coordinator(Protocol):
    """Who keeps the state."""

    def lead(self, partition: int, epoch: int) -> Loading:
        """This broker leads the partition in this epoch: what it holds answers COORDINATOR_LOAD_IN_PROGRESS until it is
        loaded."""
        ...

    def resign(self, partition: int) -> None:
        """This broker does not lead the partition any more; everyone who waits looks for the new coordinator."""
        ...

    def drop_topics(self, ids: Collection[bytes]) -> None:
        """Topics with these ids were deleted; told again after a load."""
        ...


class StatePartitions:
    """Keeps the coordinator's partitions as the roles of this broker are; `follow` after every change, and at ticks."""

    def __init__(
        self,
        topic: StateTopic,
        partitions: Partitions,
        coordinator: Coordinator,
        disk: Disk,
        image: Callable[[], Image],
        accepted: Callable[[], Collection[Loss]] = frozenset,
    ) -> None:
        self.topic = topic
        self._partitions = partitions
        self._coordinator = coordinator
        self._disk = disk
        self._image = image
        self._accepted = accepted
        self._loads: dict[int, _Load] = {}

    @property
    def reading(self) -> bool:
        """Whether a partition is on its way into memory, and nothing but that keeps it."""
        return any(load.reading for load in self._loads.values())

    def closed(self) -> list[ClosedPartition]:
        """Partitions led here that could not be read at the last try."""
        return [load.fault for load in self._loads.values() if load.fault is not None]

    def follow(self) -> None:
        topic = self._image().topics.get(self.topic.name)
        count = 0 if topic is None else len(topic.partitions)
        for index in [index for index in self._loads if index >= count]:
            self._resign(index)
        for index in range(count):
            partition = self._partitions.find(self.topic.name, index)
            load = self._loads.get(index)
            if load is not None and load.partition is not partition:
                self._resign(index)
            if partition is not None:
                self._go_on(index, partition)

    def forget_topics(self, old: Image, new: Image) -> None:
        """An image listener: nobody can come back to topics that were deleted. Topics that are only missing may."""
        gone = new.deleted.keys() - old.deleted.keys()
        if gone:
            self._coordinator.drop_topics(gone)

    def _go_on(self, index: int, partition: Partition) -> None:
        load = self._loads.get(index)
        if load is None:
            load = self._loads[index] = _Load(self, partition, self._partitions.clock, self._disk)
            load.begin(self._coordinator)
        load.wait()

    def _resign(self, index: int) -> None:
        del self._loads[index]
        self._coordinator.resign(index)

    def loaded(self, partition: Partition) -> None:
        self._partitions.unable.discard(partition)
        self._coordinator.drop_topics(self._image().deleted.keys())

    def lost_from(self, partition: Partition) -> int | None:
        """The offset from which on the last election outside the in-sync set has cost records."""
        where = partition.topic_partition
        state = self._image().partition(where.topic, where.partition)
        return None if state is None or state.lost is None else state.lost.start

    def unable(self, partition: Partition) -> None:
        """It could not be loaded for a long time, for no reason that lies in its log."""
        if partition.leading:
            self._partitions.unable.add(partition)

    def is_accepted(self, loss: Loss) -> bool:
        """Whether an operator said that what cannot be read there may be lost."""
        return loss in self._accepted()


class _Load:
    """One partition in one epoch, from the beginning of its lead until it is in memory."""

    def __init__(self, owner: StatePartitions, partition: Partition, clock: Clock, disk: Disk) -> None:
        assert partition.core is not None, "only a leader loads"
        self.partition = partition
        self.answered = False
        self.fault: ClosedPartition | None = None
        """Why the last try failed; None while there is nothing in the way."""
        self._owner = owner
        self._clock = clock
        self._disk = disk
        self._needed = partition.core.epoch_start
        """The watermark that all of earlier epochs is below."""
        self._end = self._needed
        """What is loaded: up to the watermark, and once that is read up to where it has come meanwhile. State of this
        epoch is appended only once it is open, and state of an earlier one cannot be appended to this; but markers of
        transactions come as soon as the partition is led, and none that has passed the watermark may be missed."""
        self._offset = partition.log.start_offset
        """Everything below it was seen: replayed, or not there."""
        self._elected_from = owner.lost_from(partition)
        """Where an election has cost records, until that is passed."""
        self._losing_from: int | None = None
        """The place from which on an accepted loss is passed over, until something can be read again."""
        self._pause_seconds = PAUSE_LEAST_SECONDS
        self._failing_since = 0.0
        self._waiting = self._pausing = self.reading = self._done = False

    def begin(self, coordinator: Coordinator) -> None:
        self._loading = coordinator.lead(self._index, self.partition.epoch)

    # The wait for the watermark, as a produce request waits.

    def wait(self) -> None:
        if self._waiting or self._pausing or self.reading or self._done:
            return
        if self.partition.high_watermark >= self._needed:
            self._begin_reading()
            self._read()
        elif not self.partition.reached(self._needed, ALL_IN_SYNC):
            self._waiting = True
            self.partition.wait(self._needed, ALL_IN_SYNC, self)

    def passed(self) -> None:
        """With a weaker reliability the watermark may not be there yet: then the next `follow` sees it."""
        self._waiting = False
        if self.partition.high_watermark >= self._needed:
            self._begin_reading()
            self._clock.call_soon(self._read)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        """Too few replicas, for now, or another role: the next `follow` sees which."""
        self._waiting = False

    def _begin_reading(self) -> None:
        self.reading = True
        self._end = self.partition.high_watermark

    # Reading. Each step is a turn of its own; an error in one is this load's alone.

    def _read(self) -> None:
        self._step(lambda: self._read_piece(warm=False))

    def _read_warm(self) -> None:
        self._step(lambda: self._read_piece(warm=True))

    def _step(self, step: Callable[[], None]) -> None:
        if not self._loading.wanted:
            self.fault = None
            return
        try:
            step()
        except (HeadraceError, OSError) as error:
            self._cannot_read(error)

    def _read_piece(self, *, warm: bool) -> None:
        held = self.partition.log
        self._offset = max(self._offset, held.start_offset)  # what lay below was deleted since
        if self._offset >= self._end:
            self._end = max(self._end, self.partition.high_watermark)
        if self._offset >= self._end:
            self._open()
            return
        found = held.read(self._offset, PIECE_BYTES, self._end, warm=warm)
        if found.unchecked is not None and not found.slices:
            if are_warm(self._disk, found.wanted, self._read_warm):
                self._clock.call_soon(self._read_warm)
            return

        def take() -> None:
            self._step(lambda: self._take(found.slices))

        if are_warm(self._disk, found.slices, take):
            self._take(found.slices)

    def _take(self, slices: Sequence[FileSlice]) -> None:
        before = self._offset
        for piece in slices:
            data = memoryview(piece.read())
            for header, view in batches(data):
                if header.next_offset > self._offset and header.base_offset < self._end:
                    check(view)
                    self._pass_losses(header.base_offset)
                    self._replay(header, view)
                    self._offset = header.next_offset
        if self._offset == before:
            self._see_nothing()
        self.fault = None
        self._clock.call_soon(self._read)

    def _see_nothing(self) -> None:
        """A read had no batch. That is right only behind the last batch below the end, as compaction leaves it."""
        following = next(iter(self.partition.log.headers(self._offset)), None)
        if following is not None and following[0].base_offset < self._end:
            raise StorageFailed(f"{self._where}: nothing was read at offset {self._offset}, but there is a batch")
        self._pass_losses(self._end)
        self._offset = self._end

    def _replay(self, header: BatchHeader, view: memoryview) -> None:
        try:
            producer = ProducerEpoch(header.producer_id, header.producer_epoch) if header.is_transactional else None
            if not header.is_control:
                self._loading.replay(_records(view), producer)
            elif producer is not None and (marker := read_marker(view, header)) is not None:
                self._loading.replay_marker(producer, committed=marker.committed)
        except CorruptBatch as error:  # the batch is as it was written: its bytes were checked
            raise InvalidRecord(
                f"{self._where}: a record of the batch at offset {header.base_offset}: {error}"
            ) from None

    def _open(self) -> None:
        self._pass_losses(self._end)
        self._done, self.reading, self.fault = True, False, None
        self._loading.ready()
        self._owner.loaded(self.partition)

    # What cannot be read.

    def _cannot_read(self, error: HeadraceError | OSError) -> None:
        lasts = isinstance(error, (CorruptBatch, InvalidRecord)) or _errno_of(error) == errno.EIO
        if lasts and (self._losing_from is not None or self._owner.is_accepted((self._index, self._offset))):
            self._lose()
            return
        is_damage = lasts and not isinstance(error, InvalidRecord)
        if is_damage and self.partition.leading:
            self.partition.found_damage(self._offset)
        if self.fault is None:
            self._failing_since, self._pause_seconds = self._clock.now(), PAUSE_LEAST_SECONDS
        fault = ClosedPartition(self._index, self._offset, str(error), is_damage)
        if self.fault is None or (self.fault.offset, self.fault.is_damage) != (fault.offset, fault.is_damage):
            self._report(fault, lasts=lasts)
        self.fault = fault
        if not lasts and self._clock.now() - self._failing_since >= UNABLE_AFTER_SECONDS:
            self._owner.unable(self.partition)
        self.reading, self._pausing = False, True
        self._clock.call_later(self._pause_seconds, self._try_again)
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_MOST_SECONDS)

    def _report(self, fault: ClosedPartition, *, lasts: bool) -> None:
        topic = self._owner.topic
        if not lasts:
            log.warning("%s: not loaded yet, its %s wait; tried again: %s", self._where, topic.kept, fault.reason)
            return
        log.error(
            "%s: offset %d cannot be read, so %s are not known and its %s are not "
            "answered: %s. If another replica is in sync it leads instead. If none has these records, `headrace log "
            "verify` says what is damaged, and `headrace config set broker %d %s=%d:%d` accepts that the records from "
            "there up to the next readable one are lost: %s",
            self._where, fault.offset, topic.unknown, topic.kept, fault.reason, self.partition.leader,
            topic.loss_setting, self._index, fault.offset, topic.after_loss,
        )  # fmt: skip

    def _try_again(self) -> None:
        self._pausing = False
        if self._loading.wanted:
            self.reading = True
            self._read()

    def _lose(self) -> None:
        """An operator gave up what lies here: go on with the next offset, until one can be read."""
        if self._losing_from is None:
            self._losing_from = self._offset
        self._offset += 1
        self._clock.call_soon(self._read)

    def _pass_losses(self, offset: int) -> None:
        """The next record that can be read is at this offset, or the log ends there."""
        if self._losing_from is not None:
            log.error("%s: offsets %d to %d are lost, as was accepted", self._where, self._losing_from, offset - 1)
            self._losing_from = None
            self._loading.lost()
        if self._elected_from is not None and offset >= self._elected_from:
            self._elected_from = None
            self._loading.lost()

    @property
    def _where(self) -> TopicPartition:
        return self.partition.topic_partition

    @property
    def _index(self) -> int:
        return self.partition.topic_partition.partition


def _records(view: memoryview) -> Iterator[Record]:
    return ((record.key, record.value) for record in kernel.records(view) if record.key is not None)


def _errno_of(error: HeadraceError | OSError) -> int | None:
    """Storage wraps what the disk says."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause.errno if isinstance(cause, OSError) else None
