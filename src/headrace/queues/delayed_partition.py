"""The delayed records of one partition: its log is read into the timer (`delay_index`), and where the partition is led
what is due is delivered, by an append to the same log.

The timer follows the log up to the high watermark, on followers too, so that whoever leads next has little to read. A
leader delivers once it has read everything that its epoch began with; from then on it alone delivers, and knows what it
has on its way. So each record is delivered once: by an append that is below the watermark, or that was lost with its
leader, and then the next leader finds no trace of it.

Where records wait in what retention wants to delete, they are carried to the end of the log: a few that wait for long
do not keep everything.

Due is what the wall clock says, whichever way it steps: nothing is delivered before its time by that clock.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

from headrace.coordinators.watermark_wait import WatermarkWait
from headrace.errors import CoordinatorLoading, CorruptBatch, HeadraceError, StorageFailed, TooLate
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Failures, Partitions
from headrace.ports.disk import Disk, FileSlice
from headrace.queues.delay_index import NEVER_MS, DelayIndex, DoubtfulIndex
from headrace.records import delayed
from headrace.records.batch import BatchHeader, check, read_header
from headrace.records.delayed import DELIVERED, Delivery, Entry, HeldBatch, HeldRecords
from headrace.storage.page_cache import are_warm

log = logging.getLogger(__name__)

BATCHES_PER_STEP: Final = 500
STEP_SECONDS: Final = 0.005
"""Of reading the log, before others have their turn."""
BATCHES_PER_SAVE: Final = 20_000
"""Of the log that a start has to read again at most, and what came since the last look at it."""
RECORDS_PER_DELIVERY: Final = 500
BYTES_PER_DELIVERY: Final = 512 << 10
ON_THE_WAY_MAX: Final = 5000
"""Records that are delivered and not below the watermark yet: more wait until they are."""
HELD_MAX_BYTES: Final = 4 << 20
"""Of the held batches that were read last, which have more to deliver soon; one more, if that is larger."""
PAUSE_SECONDS: Final = 0.2
SOON_MS: Final = 150
"""What is due later is seen at a tick."""
ALL_IN_SYNC: Final = -1

Recalled = Callable[[HeadraceError | None], None]


class Broker(Protocol):
    """What is the same for all partitions."""

    disk: Disk
    partitions: Partitions

    def folder_of(self, partition: Partition) -> str: ...


class DelayedPartition:
    """One log, whatever its role. Hears of new data as a fetch that waits does."""

    def __init__(self, broker: Broker, partition: Partition) -> None:
        self.answered = False
        self.delivered = 0
        self.late_ms = 0
        self.latest_ms = 0
        self._broker = broker
        self._clock = broker.partitions.clock
        self._folder = broker.folder_of(partition)
        self._index: DelayIndex | None = None
        """None while it is being loaded."""
        self._loading: tuple[DelayIndex, Iterator[None]] | None = None
        self._limbo: list[int] = []
        """Handles that were due when they came: the next batch of the log has delivered them, or nobody has."""
        self._unsaved_batches = 0
        self._stepping = self._pausing = False
        self._armed_ms = NEVER_MS
        self._delivery: _Delivery | None = None
        self.held = HeldInMemory()
        self._ready_from = 0
        """Where the log ended when nobody knew what is on its way: nothing is delivered before that is read."""
        self._recalling: set[int] = set()
        """Handles whose recalls are on their way..."""
        self._carrying: set[int] = set()
        """...and those that are being carried: both are not delivered meanwhile."""
        self._carried_run = -1
        """The run that these are of."""
        self._dropped = 0
        self._fault = ""
        self._truncations = partition.log.truncations
        self.take_role(partition)

    @property
    def waiting(self) -> int:
        return 0 if self._index is None else self._index.waiting

    @property
    def index(self) -> DelayIndex | None:
        return self._index

    # Roles.

    def take_role(self, partition: Partition) -> None:
        """The log is led or followed in another epoch: what is on its way may be in the log, or not."""
        self.partition = partition
        self._delivery = None
        self.held.forget()
        self.latest_ms = 0
        self._ready_from = partition.log.end_offset
        self._forget_blocked()
        if self._index is not None:
            self._index.give_back(list(self._index.taken))
            self._limbo = []
        partition.log.delayed_from = self._waiting_from
        partition.wait_for_data(self)
        self.grew(0)

    def close(self, *, save: bool) -> None:
        self.answered = True
        self.partition.stop_waiting(self)
        index, self._index, self._delivery = self._index, None, None
        if save and index is not None:
            try:
                index.save()
            except (OSError, DoubtfulIndex) as error:
                log.warning("%s: its delayed records are read from the log at the next start: %s", self._where, error)

    def _waiting_from(self) -> int:
        return 0 if self._index is None else self._index.least_place()

    @property
    def is_ready(self) -> bool:
        """Whether this broker leads, and knows what became of all that was there before."""
        return self.partition.leading and self._index is not None and self._index.applied >= self._ready_from

    # The log into the timer.

    def grew(self, count: int) -> None:
        """See `partitions.partition.FetchWaiter`."""
        if not self._stepping and not self._pausing:
            self._stepping = True
            self._clock.call_soon(self._step)

    def _step(self) -> None:
        self._stepping = False
        if self.answered or self.partition.closed is not None:
            return
        try:
            self._go_on()
        except DoubtfulIndex as doubt:
            self._begin_anew(str(doubt))
        except (HeadraceError, OSError) as error:
            self.failed(error)

    def _go_on(self) -> None:
        if self._index is None and not self._load():
            self.grew(0)
            return
        index = self._index
        assert index is not None
        self._look_for_cuts()
        self._apply(index)
        self._fault = ""
        if index.applied < self.partition.high_watermark:
            self.grew(0)
        self.deliver()

    def _load(self) -> bool:
        """A step of it. True: the timer is what it was when it was saved."""
        if self._loading is None:
            index = DelayIndex(self._broker.disk, self._folder)
            self._loading = index, index.load()
        index, steps = self._loading
        try:
            next(steps)
        except StopIteration:
            self._loading = None
            if not self._agrees(index):
                raise DoubtfulIndex("the log is not what it was made from") from None
            self._index = index
            return True
        except OSError:
            self._loading = None  # what is read so far is a part of it, and goes on no more
            raise
        return False

    def _agrees(self, index: DelayIndex) -> bool:
        held = self.partition.log
        if not held.start_offset <= index.applied <= held.end_offset:
            return False
        if index.epoch < 0:
            return True
        end = held.epoch_end(index.epoch)
        return end is not None and end.epoch == index.epoch and end.end_offset >= index.applied

    def _look_for_cuts(self) -> None:
        """The log may have lost what the timer was made from, in an election outside the in-sync set."""
        if self.partition.log.truncations != self._truncations:
            self._truncations = self.partition.log.truncations
            if self._index is not None and not self._agrees(self._index):
                raise DoubtfulIndex("the log was cut")

    def _begin_anew(self, reason: str) -> None:
        start = self.partition.log.start_offset
        if self.partition.log.end_offset > start:
            log.info("%s: its delayed records are read from offset %d on: %s", self._where, start, reason)
        self._loading, self._limbo, self._delivery = None, [], None
        self.held.forget()
        self._ready_from = self.partition.log.end_offset
        self._forget_blocked()
        try:
            DelayIndex(self._broker.disk, self._folder).discard()
        except OSError as error:
            self.failed(error)
            return
        self._index = DelayIndex(self._broker.disk, self._folder, start)
        self._unsaved_batches = 0
        self.grew(0)

    def _apply(self, index: DelayIndex) -> None:
        """Read the log on, for a while, up to the watermark."""
        held, end = self.partition.log, self.partition.high_watermark
        index.applied = max(index.applied, held.start_offset)  # what lay below was deleted since
        if index.applied >= end:
            return
        until, count = self._clock.now() + STEP_SECONDS, 0
        for header, place in held.headers(index.applied):
            if header.next_offset > end or count >= BATCHES_PER_STEP or self._clock.now() > until:
                break
            count += 1
            if header.next_offset > index.applied:
                self._take(index, header, place)
                index.applied, index.epoch = header.next_offset, header.leader_epoch
        else:
            index.applied = end
        self._unsaved_batches += count
        if index.is_full or self._unsaved_batches >= BATCHES_PER_SAVE:
            self._unsaved_batches = 0
            index.save()

    def _take(self, index: DelayIndex, header: BatchHeader, place: FileSlice) -> None:
        limbo, self._limbo = self._limbo, []
        if header.is_control:
            if not header.is_transactional:
                self._take_control(index, header, place)
        elif header.attributes & DELIVERED:
            for due_ms, handle, held_at in delayed.delivered_entries(place.read()):
                index.finish(handle, held_at)
                index.latest_due_ms = max(index.latest_due_ms, due_ms)
        if limbo:
            index.give_back(limbo)

    def _take_control(self, index: DelayIndex, header: BatchHeader, place: FileSlice) -> None:
        found = delayed.read_control(place.read(), header)
        if isinstance(found, HeldBatch) and found.carried is not None:
            for entry, (_, handle, old_place) in zip(found.entries(), found.carried, strict=True):
                index.carry(entry, old_place)
                self._unblock(index, handle, self._carrying)
        elif isinstance(found, HeldBatch):
            for entry in found.entries():
                if entry[1] < index.began:
                    continue  # the log begins inside the batch
                if entry[0] <= found.taken_ms:
                    index.add_taken(entry)
                    self._limbo.append(entry[1])
                else:
                    index.add(entry)
        elif found is not None:
            for handle, held_at in found.places:
                index.finish(handle, held_at)
                self._recalling.discard(handle)

    def _unblock(self, index: DelayIndex, handle: int, blocked: set[int]) -> None:
        """What became due meanwhile is delivered now."""
        if handle in blocked:
            blocked.discard(handle)
            index.give_back([handle])

    # What is due.

    def deliver(self) -> None:
        """Deliver what is due, if nothing of that is under way; else see that it is looked at in time."""
        if self._delivery is not None or self._pausing or not self.is_ready:
            return
        index = self._index
        assert index is not None
        if len(index.taken) >= ON_THE_WAY_MAX:
            return
        entries = index.take_due(self._clock.wall_ms(), RECORDS_PER_DELIVERY)
        if self._recalling or self._carrying:
            blocked = self._recalling | self._carrying
            entries = [entry for entry in entries if entry[1] not in blocked]
        if entries:
            self._begin(_Delivery(self, self._broker, index, entries))
        else:
            self._arm(index.next_due_ms())

    def _begin(self, work: _Delivery) -> None:
        self._delivery = work
        work.go_on()

    def _arm(self, due_ms: int) -> None:
        wait_ms = due_ms - self._clock.wall_ms()
        if wait_ms <= SOON_MS and due_ms < self._armed_ms:
            self._armed_ms = due_ms
            self._clock.call_later(max(0, wait_ms) / 1000, partial(self._ring, due_ms))

    def _ring(self, due_ms: int) -> None:
        if self._armed_ms == due_ms:
            self._armed_ms = NEVER_MS
        self.tick()

    def tick(self) -> None:
        """At most every 100 ms, and when something is due."""
        if self.answered or self.partition.closed is not None:
            return
        try:
            self._look_for_cuts()
            self.deliver()
            if self.partition.log.wanted_start > self.partition.log.start_offset:
                self._carry_oldest()
        except DoubtfulIndex as doubt:
            self._begin_anew(str(doubt))
        except (HeadraceError, OSError) as error:
            self.failed(error)

    def is_under_way(self, delivery: _Delivery) -> bool:
        return self._delivery is delivery

    def delivery_ended(self, delivery: _Delivery, error: Exception | None) -> None:
        """All of it is staged, or it has failed."""
        assert self._delivery is delivery
        self._delivery = None
        if isinstance(error, DoubtfulIndex):
            self._begin_anew(str(error))
        elif error is not None:
            self.failed(error)
        else:
            self._clock.call_soon(self.tick)

    def count(self, late_ms: Sequence[int]) -> None:
        self.delivered += len(late_ms)
        self.late_ms += sum(late_ms)
        self.latest_ms = max(self.latest_ms, *late_ms)

    def drop(self, entry: Entry) -> None:
        """The batch that holds it was deleted."""
        assert self._index is not None
        self._index.finish(*entry[1:])
        if not self._dropped:
            log.warning("%s: delayed records were deleted from the log before they were due", self._where)
        self._dropped += 1

    # Retention.

    def _carry_oldest(self) -> None:
        """Where retention wants to delete what waits, have it wait elsewhere."""
        index = self._index
        if self._delivery is not None or self._recalling or self._pausing or index is None or not self.is_ready:
            return
        if self._carrying:
            return  # they are not below the watermark yet
        if self._carried_run >= 0:
            index.superseded(self._carried_run)
            index.save()
            self._carried_run = -1
            return
        if index.least_place() >= self.partition.log.wanted_start:
            return
        oldest = index.oldest()
        if oldest is not None:
            self._carried_run, entries = oldest
            self._carrying = {handle for _, handle, _ in entries}
            self._begin(_Carry(self, self._broker, index, sorted(entries, key=lambda entry: entry[2])))

    def skip(self, handle: int) -> None:
        """There is nothing to carry."""
        if self._index is not None:
            self._unblock(self._index, handle, self._carrying)

    def stop_carrying(self, handles: Sequence[int]) -> None:
        """They wait where they did."""
        self._carried_run = -1
        for handle in handles:
            if self._index is not None:
                self._unblock(self._index, handle, self._carrying)

    def _forget_blocked(self) -> None:
        self._recalling.clear()
        self._carrying.clear()
        self._carried_run = -1

    # Recalls.

    def recall(self, handle: int, done: Recalled) -> None:
        """Have a record never delivered; `done` hears when that is certain, or why it is not so. What is due is too
        late; one that was recalled before is recalled."""
        _Recall(self, self._broker, handle, done).go_on()

    def begin_recall(self, handle: int) -> None:
        if handle in self._recalling or handle in self._carrying:
            raise CoordinatorLoading(f"{self._where}: offset {handle} is being moved or recalled: ask again")
        self._recalling.add(handle)

    def end_recall(self, handle: int) -> None:
        """It is not in the log."""
        self._recalling.discard(handle)
        if self._index is not None:
            self._index.give_back([handle])

    # Errors.

    def failed(self, error: Exception) -> None:
        """Try again, after a pause."""
        if isinstance(error, CorruptBatch) and self._index is not None:
            self.partition.found_damage(self._index.applied)
        if str(error) != self._fault:
            self._fault = str(error)
            log.warning("%s: its delayed records wait: %s", self._where, error)
        if not self._pausing:
            self._pausing = True
            self._clock.call_later(PAUSE_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._pausing = False
        self.grew(0)

    @property
    def _where(self) -> str:
        return str(self.partition.topic_partition)


class HeldInMemory(OrderedDict[int, HeldRecords]):
    """Held batches by their offsets, those that were used last."""

    size_bytes = 0

    def __getitem__(self, place: int) -> HeldRecords:
        self.move_to_end(place)
        return super().__getitem__(place)

    def add(self, place: int, records: HeldRecords) -> None:
        while self and self.size_bytes + records.size_bytes > HELD_MAX_BYTES:
            self.size_bytes -= self.popitem(last=False)[1].size_bytes
        self.size_bytes += records.size_bytes
        self[place] = records

    def forget(self) -> None:
        self.clear()
        self.size_bytes = 0


class _HeldRead:
    """Reads held batches from the page cache, or when they have come there."""

    def __init__(self, broker: Broker, partition: Partition, then: Callable[[], None]) -> None:
        self._broker = broker
        self._partition = partition
        self._then = then
        self._warm = False

    def read(self, offset: int) -> HeldBatch | bool | None:
        """The held batch with this offset; None if it is another batch; False: `then` runs when to ask again."""
        disk, partition = self._broker.disk, self._partition
        found = partition.log.read(offset, 1, partition.high_watermark, warm=self._warm)
        if found.unchecked is not None and not found.slices:
            if are_warm(disk, found.wanted, self._warmed):
                self._broker.partitions.clock.call_soon(self._warmed)
            return False
        if not self._warm and not are_warm(disk, found.slices, self._warmed):
            return False
        self._warm = False
        data = b"".join([piece.read() for piece in found.slices])
        if not data:
            return None
        header = read_header(data)
        batch = memoryview(data)[: header.size_bytes]
        check(batch)
        held = delayed.read_control(batch, header)
        return held if isinstance(held, HeldBatch) else None

    def _warmed(self) -> None:
        self._warm = True
        self._then()


class _Delivery:
    """Some records that are due, until they are staged."""

    def __init__(self, owner: DelayedPartition, broker: Broker, index: DelayIndex, entries: Sequence[Entry]) -> None:
        self._owner = owner
        self._partitions = broker.partitions
        self._partition = owner.partition
        self._index = index
        self._entries = entries
        self._at = 0
        self._read = _HeldRead(broker, owner.partition, self.go_on)
        self._held = owner.held
        self._deliveries: list[Delivery] = []
        self._bytes = 0
        self._codec = 0

    def go_on(self) -> None:
        if self._partition.closed is not None or not self._owner.is_under_way(self):
            return  # what was on its way was taken back
        try:
            while self._at < len(self._entries):
                if not self._add(self._entries[self._at]):
                    return
                self._at += 1
                if self._bytes >= BYTES_PER_DELIVERY:
                    self._append()
            self._append()
        except (HeadraceError, OSError, DoubtfulIndex) as error:
            unstaged = [entry for entry, _ in self._deliveries] + list(self._entries[self._at :])
            self._give_back([handle for _, handle, _ in unstaged])
            self._owner.delivery_ended(self, error)
            return
        self._owner.delivery_ended(self, None)

    def _add(self, entry: Entry) -> bool:
        """False: it has to be read from disk first."""
        _, handle, place = entry
        offset = max(handle, place)  # the log may begin inside the batch
        if offset < self._partition.log.start_offset:
            self._is_deleted(entry)
            return True
        if place not in self._held:
            held = self._read.read(offset)
            if isinstance(held, bool):
                return False
            if held is None or held.base_offset != place:
                raise DoubtfulIndex(f"no delayed records are held at offset {place}")
            self._held.add(place, held.records())
        records = self._held[place]
        codec, record = records.codec, records[handle]
        self._codec = codec if self._partition.log.settings.codec < 0 else self._partition.log.settings.codec
        self._deliveries.append((entry, record))
        self._bytes += len(record.key or b"") + len(record.value or b"")
        self._bytes += sum(len(name) + len(value or b"") for name, value in record.headers)
        return True

    def _append(self) -> None:
        if not self._deliveries:
            return
        now_ms = self._partitions.clock.wall_ms()
        batch, header = self._build(now_ms)
        self._partition.append(memoryview(batch), ALL_IN_SYNC, header)
        appended, self._deliveries, self._bytes = self._deliveries, [], 0
        self._appended(appended, now_ms)
        self._partitions.touch(self._partition)
        self._partitions.at_turn_end(partial(self._written, [handle for (_, handle, _), _ in appended]))
        self._partitions.clock.call_soon(self._partitions.end_turn)

    def _written(self, handles: list[int], failures: Failures) -> None:
        """What could not be written is not in the log."""
        error = failures.get(self._partition.topic_partition)
        if error is not None:
            self._give_back(handles)
            self._owner.failed(error)

    def _build(self, now_ms: int) -> tuple[bytearray, BatchHeader]:
        return delayed.delivery_batch(self._deliveries, now_ms, self._codec)

    def _appended(self, deliveries: Sequence[Delivery], now_ms: int) -> None:
        self._owner.count([now_ms - due_ms for (due_ms, _, _), _ in deliveries])

    def _is_deleted(self, entry: Entry) -> None:
        self._owner.drop(entry)

    def _give_back(self, handles: Sequence[int]) -> None:
        self._index.give_back(handles)


class _Carry(_Delivery):
    """The same with records that go on waiting, in another batch."""

    def _build(self, now_ms: int) -> tuple[bytearray, BatchHeader]:
        return delayed.carried_batch(self._deliveries, now_ms, self._codec)

    def _appended(self, deliveries: Sequence[Delivery], now_ms: int) -> None:
        pass

    def _is_deleted(self, entry: Entry) -> None:
        """It was carried before, by a leader who died before it wrote that down; else its due time shows it."""
        self._owner.skip(entry[1])

    def _give_back(self, handles: Sequence[int]) -> None:
        self._owner.stop_carrying(handles)


class _Recall:
    """One record that is not to be delivered, until that is below the watermark."""

    def __init__(self, owner: DelayedPartition, broker: Broker, handle: int, done: Recalled) -> None:
        self._owner = owner
        self._partitions = broker.partitions
        self._partition = owner.partition
        self._handle = handle
        self._done = done
        self._read = _HeldRead(broker, owner.partition, self.go_on)

    def go_on(self) -> None:
        try:
            if self._partition.closed is not None:
                raise self._partition.closed.again()
            if not self._owner.is_ready or self._owner.index is None:
                raise CoordinatorLoading(f"{self._where}: its delayed records are being read: try again")
            index = self._owner.index
            if self._handle < self._partition.log.start_offset:  # if anywhere it is where it was carried to
                self._recall(index, index.find_handle(self._handle))
                return
            held = self._read.read(self._handle)
            if isinstance(held, bool):
                return
            known = {} if held is None or held.carried is not None else {each[1]: each for each in held.entries()}
            due_ms = known[self._handle][0] if self._handle in known else -1
            entry = index.find(due_ms, self._handle)
            if entry is None and due_ms > max(index.latest_due_ms, self._partitions.clock.wall_ms()):
                self._done(None)  # it was recalled before: nothing that is due so late was ever delivered
            else:
                self._recall(index, entry)
        except HeadraceError as error:
            self._done(error)
        except (OSError, DoubtfulIndex) as error:
            self._done(StorageFailed(f"{self._where}: {error}"))

    def _recall(self, index: DelayIndex, entry: Entry | None) -> None:
        handle, now_ms = self._handle, self._partitions.clock.wall_ms()
        if entry is None:
            raise TooLate(f"{self._where}: no record waits that has offset {handle}")
        due_ms, _, place = entry
        if due_ms <= now_ms or handle in index.taken:
            raise TooLate(f"{self._where}: the record of offset {handle} was due at {due_ms}")
        self._owner.begin_recall(handle)
        batch, header = delayed.recall_batch([(handle, place)], now_ms)
        try:
            appended = self._partition.append(memoryview(batch), ALL_IN_SYNC, header)
        except HeadraceError:
            self._owner.end_recall(handle)
            raise
        self._partitions.touch(self._partition)
        self._partitions.at_turn_end(partial(self._written, appended[1]))
        self._partitions.clock.call_soon(self._partitions.end_turn)

    def _written(self, needed: int, failures: Failures) -> None:
        error = failures.get(self._partition.topic_partition)
        if error is not None:
            self._owner.end_recall(self._handle)
            self._done(error)
        else:
            WatermarkWait(self._partitions, self._partition, needed, lambda: self._hear(None), self._hear).begin()

    def _hear(self, error: HeadraceError | None) -> None:
        done, self._done = self._done, _heard
        done(error)

    @property
    def _where(self) -> str:
        return str(self._partition.topic_partition)


def _heard(_error: HeadraceError | None) -> None:
    """It was told before."""
