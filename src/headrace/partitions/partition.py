"""One replica of a partition on this broker, in one role and one epoch: its log, its watermark, and who waits for it.

An append only stages; `advance` runs after the store has written or synced, moves the watermark and answers the waiting
produce requests in log order. A follower's watermark is what its leader told, but never above its own end. Consumers
read below the high watermark, always. No timer, task or future belongs to a partition: 2,000 idle ones cost nothing.

A change of role or epoch closes this object, which answers all that wait, and only then makes another: what was asked
of one epoch can never be answered by the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from headrace.errors import (
    BatchTooLarge,
    CorruptBatch,
    FencedEpoch,
    HeadraceError,
    InvalidProducerEpoch,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OffsetNotAvailable,
    OffsetOutOfRange,
    StorageFailed,
    TransactionCoordinatorFenced,
    TransactionUnverified,
    UnknownEpoch,
)
from headrace.metrics import TopicTraffic
from headrace.partitions import levels
from headrace.partitions.leader_core import LeaderCore
from headrace.partitions.log_start import LogStart
from headrace.partitions.validation import check_records
from headrace.partitions.verification import Verification, Verifications
from headrace.records import delayed, kernel
from headrace.records.batch import TRANSACTIONAL, BatchHeader, check_produced, read_header, stamp_append_time
from headrace.records.control import NO_NUMBER, marker_batch
from headrace.records.transcoder import codec_of
from headrace.storage.log import Log, ReadResult, TopicPartition
from headrace.storage.producers import ProducerState, UnreadableProducers

if TYPE_CHECKING:
    from headrace.partitions.recompression import QueuedBatch

NOTHING_READ = ReadResult((), 0)
TIDY_FETCHES_LEAST: Final = 64
COMMITTED: Final = -2
"""In the place of acks: below the high watermark, also where the topic's policy answers acks=-1 sooner."""
ABORTED_MAX: Final = 1000
"""Aborted transactions that one read tells of, as long as they do not overlap: it ends behind the last one's marker."""
EPOCH_PER_TRANSACTION: Final = 2
"""The transaction version from which on each transaction has a producer epoch of its own (KIP-890)."""

StableSeen = tuple[int | None, int]
"""The last stable offset that a waiting fetch has seen, if it could be told, and the size of the log then."""
Aborted = list[tuple[int, int]]
"""Producer ids and first offsets of aborted transactions: their records up to the next marker do not count."""


class ProduceWaiter(Protocol):
    """A produce request with appends that are not committed yet, or a deletion that not all replicas have made."""

    answered: bool

    def passed(self) -> None:
        """One of the appends has become as durable as asked, or one of the starts has been raised."""
        ...

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None: ...


Waiting = deque[tuple[int, ProduceWaiter]]
"""By the offsets that they need, the lowest first."""


class FetchWaiter(Protocol):
    """A fetch that waits for more data, or a fetch session, which does as long as it has the partition."""

    answered: bool

    def grew(self, count: int) -> None:
        """So many more bytes can be read; 0: what is told of the partition beside its records has changed."""
        ...


Appended = tuple[int, int, int]
"""What an append answers: base offset, the position from which on it counts, append time in ms or -1."""


class Partition:
    __slots__ = (
        "_closed",
        "_damaged",
        "_grown_from_bytes",
        "_reliability",
        "_start",
        "_tidy_fetches_at",
        "_told_watermark",
        "_verifications",
        "_waiting_committed",
        "_waiting_fetches",
        "_waiting_local",
        "_waiting_replicas",
        "_waiting_starts",
        "acknowledged",
        "core",
        "epoch",
        "high_watermark",
        "leader",
        "log",
        "racks",
        "recompressing",
        "replicated",
        "topic_partition",
        "traffic",
        "wall_ms",
    )

    def __init__(
        self,
        log: Log,
        epoch: int,
        leader: int,
        high_watermark: int,
        wall_ms: Callable[[], int],
        core: LeaderCore | None = None,
        racks: Mapping[int, str] | None = None,
        damaged: dict[Partition, int] | None = None,
        traffic: TopicTraffic | None = None,
    ) -> None:
        self.log = log
        self.epoch = epoch
        self.leader = leader
        """The broker that leads it in this epoch; -1 if none does."""
        self.high_watermark = self.acknowledged = log.committed_offset = high_watermark
        """Consumers read below the one; acks=-1 is answered below the other, which is the same by default."""
        self.core = core
        """None unless this broker leads."""
        self.racks = {} if racks is None else racks
        self._damaged = {} if damaged is None else damaged
        self._reliability = levels.weaker_or_stronger(log.settings)
        self.recompressing: deque[QueuedBatch] = deque()
        """What waits for its codec, or behind something that does (`partitions.recompression`)."""
        self.replicated = False
        """Whether a link wants to hear of what is written."""
        self.traffic = TopicTraffic() if traffic is None else traffic
        """Of the topic, over all partitions and roles."""
        self.wall_ms = wall_ms
        self.topic_partition = log.topic_partition
        self._closed: HeadraceError | None = None
        self._told_watermark = high_watermark
        self._waiting_replicas: Waiting = deque()
        # Made when somebody waits, which in most partitions nobody does: an empty queue is large.
        self._waiting_local: Waiting | None = None
        self._waiting_committed: Waiting | None = None
        self._verifications = Verifications()
        self._waiting_starts: list[tuple[int, ProduceWaiter]] = []
        self._start = LogStart(log, self._start_settled)
        self._waiting_fetches: dict[FetchWaiter, StableSeen | None] = {}
        self._tidy_fetches_at = TIDY_FETCHES_LEAST
        self._grown_from_bytes = log.size_bytes

    @property
    def leading(self) -> bool:
        return self.core is not None

    @property
    def closed(self) -> HeadraceError | None:
        """Why this role has ended, if it has."""
        return self._closed

    def check_epoch(self, epoch: int) -> None:
        """The client's idea of the leader epoch, -1 if it has none (KIP-320)."""
        if epoch < 0 or epoch == self.epoch:
            return
        if epoch < self.epoch:
            raise FencedEpoch(f"{self.topic_partition}: epoch {epoch} is older than ours, {self.epoch}")
        raise UnknownEpoch(f"{self.topic_partition}: epoch {epoch} is newer than ours, {self.epoch}")

    # Producing.

    def append(self, records: memoryview, acks: int, own: BatchHeader | None = None) -> Appended:
        """Stage what a producer sent, which must be exactly one batch. `own` is the header of one that this broker has
        built itself, of records that the topic takes: neither its CRC nor its records are looked at again."""
        log, core = self.log, self.core
        if core is None:
            self.refuse(records)
            raise self._not_leading() if self._closed is None else self._closed.again()
        if log.offline is not None:  # and it stays so: what comes behind this batch is refused as well
            raise log.offline.again()
        if acks == -1 and (not core.has_min_isr or self._reliability is not None):
            self._check_enough(core, records)
        header = check_produced(records) if own is None else own
        settings = log.settings
        # A delayed record that was taken is delivered with headers of ours besides.
        if header.size_bytes > settings.max_message_bytes and (own is None or not settings.delays):
            if header.record_count > 1:  # it may be split, and its first part bears the same sequence
                log.producers.refused(header)
            raise BatchTooLarge(
                f"{self.topic_partition}: a batch of {header.size_bytes} bytes; "
                f"max.message.bytes is {settings.max_message_bytes}"
            )
        if settings.checks_records and own is None:
            check_records(self.topic_partition, header, records, settings, self.wall_ms())
        if not log.producers.loaded:
            self._load_producers(header)
        opens = False
        if header.producer_id >= 0:
            if log.producers.left_out:
                self._check_producers_whole(header)
            duplicate_at = log.producers.check(header)
            if duplicate_at is not None:
                return duplicate_at, duplicate_at + header.record_count, -1
            if header.attributes & TRANSACTIONAL:
                opens = self._check_transaction(header)
                if opens and own is None:
                    self._end_unmarked(header, core.epoch)
        if settings.delays and own is None and not header.attributes & TRANSACTIONAL:
            now_ms = self.wall_ms()
            dues = delayed.due_times(records, header, now_ms, settings.delay_max_ms)
            if dues is not None:
                return self._append_held(records, header, dues, now_ms, core.epoch)
        append_time_ms = -1
        if settings.append_time:
            append_time_ms = self.wall_ms()
            stamp_append_time(records, append_time_ms)
            header = read_header(records)
        try:
            base_offset = log.append(records, header, core.epoch)
        except HeadraceError:
            log.producers.refused(header)
            raise
        if opens:
            self._verifications.used(header.producer_id)
        traffic = self.traffic
        traffic.batches_in += 1
        traffic.records_in += header.record_count
        traffic.bytes_in += header.size_bytes
        return base_offset, base_offset + header.record_count, append_time_ms

    def _append_held(
        self, records: memoryview, header: BatchHeader, dues: list[int], now_ms: int, epoch: int
    ) -> Appended:
        """Stage a batch that has delayed records, and behind it those of them that are due now. Who reads the log waits
        for that second batch: nobody else delivers them unless it is missing."""
        log, traffic = self.log, self.traffic
        batch, held = delayed.held_batch(records, header, now_ms)
        try:
            base_offset = log.append(memoryview(batch), held, epoch)
        except HeadraceError:
            log.producers.refused(header)
            raise
        traffic.batches_in += 1
        traffic.records_in += header.record_count
        traffic.bytes_in += header.size_bytes
        end_offset = base_offset + header.record_count
        due = [place for place, due_ms in enumerate(dues) if due_ms <= now_ms]
        if due:
            produced = kernel.records(records)
            deliveries = [((now_ms, base_offset + place, base_offset), produced[place]) for place in due]
            codec = log.settings.codec if log.settings.codec >= 0 else header.codec
            batch, delivery = delayed.delivery_batch(deliveries, now_ms, codec)
            if log.settings.append_time:
                stamp_append_time(batch, now_ms)
                delivery = read_header(batch)
            end_offset = log.append(memoryview(batch), delivery, epoch) + len(due)
        return base_offset, end_offset, now_ms if log.settings.append_time else -1

    # Transactions.

    def _check_transaction(self, header: BatchHeader) -> bool:
        """The batch belongs to a transaction that is open here, or its coordinator has said that it is going on. True:
        it is the first of its transaction."""
        producer_id, epoch = header.producer_id, header.producer_epoch
        if self.has_open_transaction(producer_id, epoch):
            return False
        if not self._verifications.is_verified(producer_id, epoch):
            self.log.producers.refused(header)
            raise TransactionUnverified(
                f"{self.topic_partition}: producer {producer_id} (epoch {epoch}) has no open transaction here"
            )
        return True

    def _end_unmarked(self, header: BatchHeader, leader_epoch: int) -> None:
        """A producer has a transaction of an earlier epoch open here, which has ended for its coordinator: its marker
        was lost, with the records that an election has cost. Whether it was committed nobody knows any more. It is
        aborted, so that it does not end as the one does that begins now."""
        state = self.log.producers.states.get(header.producer_id)
        if state is None or state.txn_start < 0:
            return
        batch, marker = marker_batch(
            header.producer_id,
            state.epoch,
            max(0, state.coordinator_epoch),
            committed=False,
            now_ms=self.wall_ms(),
        )
        try:
            self.log.append(memoryview(batch), marker, leader_epoch)
        except HeadraceError:
            self.log.producers.refused(header)
            raise

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether this epoch of the producer has written to a transaction that has no marker here. StorageFailed where
        the log cannot tell now."""
        if not self.log.producers.loaded:
            self._read_producers()
        state = self.log.producers.states.get(producer_id)
        return state is not None and state.txn_start >= 0 and state.epoch == producer_epoch

    def verification(self, producer_id: int, producer_epoch: int) -> Verification:
        """Begin to verify the first write of a transaction: take this, ask the coordinator, then call `verified`."""
        if self.core is None:
            raise self._not_leading() if self._closed is None else self._closed.again()
        return self._verifications.begin(producer_id, producer_epoch)

    def verified(self, verification: Verification) -> bool:
        """The coordinator has said that the transaction is going on: its next batch is taken. False: meanwhile it may
        have ended, or another has taken over; ask again."""
        if verification.is_void:
            return False
        verification.verified = True
        return True

    def append_marker(
        self,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        *,
        committed: bool,
        number: int = NO_NUMBER,
        transaction_version: int = 0,
    ) -> Appended:
        """Stage the marker of a producer's transaction. One that is there already is answered as it was then: it counts
        when that one does. `transaction_version`: how the coordinator counts epochs. The answer's position is to be
        waited for as COMMITTED."""
        log, core = self.log, self.core
        if core is None:
            raise self._not_leading() if self._closed is None else self._closed.again()
        if log.offline is not None:
            raise log.offline.again()
        if not core.has_min_isr or self._reliability is not None:
            self._check_enough(core, memoryview(b""))
        now_ms = self.wall_ms()
        batch, header = marker_batch(
            producer_id, producer_epoch, coordinator_epoch, committed=committed, number=number, now_ms=now_ms
        )
        if not log.producers.loaded:
            self._load_producers(header)
        if log.producers.left_out:
            self._check_producers_whole(header)
        state = log.producers.states.get(producer_id)
        if state is not None:
            # A coordinator that has lost a part of its log counts again from below, but under a newer epoch.
            if NO_NUMBER < number <= state.txn_number and producer_epoch <= state.epoch:
                return state.marker_offset, state.marker_offset + 1, -1
            self._check_marker(header, coordinator_epoch, state, transaction_version)
            # The records of the one that it ends are lost: what is open is an earlier one, and not committed by this.
            if committed and transaction_version >= EPOCH_PER_TRANSACTION and state.epoch < producer_epoch - 1:
                self._end_unmarked(header, core.epoch)
        # A client may write to its next transaction before this marker has come; only where each has an epoch of its
        # own can that be told from a write that comes late.
        last_ended = producer_epoch - 1 if transaction_version >= EPOCH_PER_TRANSACTION else producer_epoch
        self._verifications.void(producer_id, last_ended)
        base_offset = log.append(memoryview(batch), header, core.epoch)
        return base_offset, base_offset + 1, -1

    def _check_marker(
        self, header: BatchHeader, coordinator_epoch: int, state: ProducerState, transaction_version: int
    ) -> None:
        where = f"{self.topic_partition}: a marker of producer {header.producer_id}"
        if coordinator_epoch < state.coordinator_epoch:
            raise TransactionCoordinatorFenced(
                f"{where} comes from a coordinator of epoch {coordinator_epoch}, and {state.coordinator_epoch} was seen"
            )
        least = state.epoch
        if transaction_version >= EPOCH_PER_TRANSACTION and state.txn_start >= 0:
            least += 1  # the open transaction is a later one than the marker's
        if header.producer_epoch < least:
            raise InvalidProducerEpoch(f"{where} bears epoch {header.producer_epoch}, and {least} is the least here")

    def stored_otherwise(self, records: memoryview) -> bool:
        """Whether a batch cannot be appended as it is and now: it has to take the way through another codec, or behind
        one that does. One that will be refused anyway can."""
        settings = self.log.settings
        if self.core is None or len(records) > settings.max_message_bytes:
            return False
        if self.recompressing:
            return True
        codec = codec_of(records)
        return settings.codec >= 0 and codec is not None and codec != settings.codec

    def _load_producers(self, header: BatchHeader) -> None:
        """An append needs what the log says of its producers."""
        try:
            self._read_producers()
        except StorageFailed:
            self.log.producers.refused(header)
            raise

    def _read_producers(self) -> None:
        """What the log says of its producers may be long, or damaged."""
        try:
            self.log.producers.load()
        except UnreadableProducers as error:
            self._unreadable_producers(error)
            raise StorageFailed(f"{self.topic_partition}: {error}") from None

    def _unreadable_producers(self, error: UnreadableProducers) -> None:
        """Not the producer's batch is damaged: another must lead. If there is none, what is whole has to do."""
        self.found_damage(error.offset)
        if not self.others_hold:
            self.log.producers.pass_damage()

    def hidden_producers(self) -> int | None:
        """Where damage hides what the log says of its producers, if another replica can tell."""
        hidden = self.log.producers.left_out
        if not hidden or not self.others_hold:
            return None
        return min((offset for offset in hidden if offset >= self.log.start_offset), default=None)

    def _check_producers_whole(self, header: BatchHeader) -> None:
        """A batch that is hidden would be taken for missing, or taken twice: another must lead."""
        offset = self.hidden_producers()
        if offset is None:
            return
        self.found_damage(offset)
        self.log.producers.refused(header)
        raise StorageFailed(
            f"{self.topic_partition}: what the log says of its producers is damaged at offset {offset}; "
            "another replica is asked to lead: try again"
        )

    def refuse(self, records: memoryview) -> None:
        """A batch is refused that can be sent again: what its producer sent behind it must not come before it."""
        header = sequenced(records)
        if header is not None:
            self.log.producers.refused(header)

    def _check_enough(self, core: LeaderCore, records: memoryview) -> None:
        """A weaker policy says itself how many replicas it needs."""
        policy = self._reliability.policy if self._reliability is not None else levels.ALL
        if policy == levels.ALL and not core.has_min_isr:
            self.refuse(records)
            raise NotEnoughReplicas(
                f"{self.topic_partition}: {len(core.isr)} replicas are in sync, acks=-1 needs {core.min_isr}"
            )
        if policy == levels.RACKS and not levels.stands_elsewhere(core, self.racks):
            self.refuse(records)
            raise NotEnoughReplicas(
                f"{self.topic_partition}: no replica stands in another rack than the leader, and "
                "replication.policy=racks needs one: move a replica, or choose another policy"
            )

    def local_position(self) -> int:
        """Below this the leader's own copy is as durable as the topic asks."""
        log = self.log
        return log.durable_offset if log.settings.durability == "disk" else log.written_offset

    def reached(self, needed_offset: int, acks: int) -> bool:
        """Whether an append counts already for this acks."""
        if acks == -1:
            return needed_offset <= self.acknowledged
        if acks == COMMITTED:
            return needed_offset <= self.high_watermark
        return needed_offset <= self.local_position()

    def wait(self, needed_offset: int, acks: int, waiter: ProduceWaiter) -> None:
        """`waiter.passed()` runs when the append counts; waiters are answered in log order."""
        error = self._closed or self.log.offline
        if error is not None:  # it failed in this very turn: nothing would ever answer
            waiter.failed(self.topic_partition, error)
            return
        queue = self._queue(acks)
        if queue and queue[-1][0] > needed_offset:  # a duplicate of an earlier batch
            entries = sorted([*queue, (needed_offset, waiter)], key=lambda entry: entry[0])
            queue.clear()
            queue.extend(entries)
        else:
            queue.append((needed_offset, waiter))

    def _queue(self, acks: int) -> Waiting:
        if acks == -1:
            return self._waiting_replicas
        if acks == COMMITTED:
            if self._waiting_committed is None:
                self._waiting_committed = deque()
            return self._waiting_committed
        if self._waiting_local is None:
            self._waiting_local = deque()
        return self._waiting_local

    def advance(self) -> bool:
        """After a write or a sync: move the watermark and answer who waited. True: the watermark rose."""
        core = self.core
        if core is None:
            return self.told(self._told_watermark)
        position = self.local_position()
        core.moved(position)
        if self._waiting_local:
            _answer(self._waiting_local, position)
        return self.settle()

    def settle(self) -> bool:
        """Take over what the leader's core has decided, and answer who waited for it. True: the watermark rose."""
        core = self.core
        if core is None:
            return False
        watermark = core.high_watermark
        rose = watermark > self.high_watermark
        if rose:
            self.high_watermark = self.log.committed_offset = watermark
        if self._reliability is None:
            self.acknowledged = watermark
        else:
            reached = levels.acknowledged(core, self._reliability, self.log.durable_offset, self.racks)
            self.acknowledged = max(self.acknowledged, reached)
        if self._waiting_replicas:
            _answer(self._waiting_replicas, self.acknowledged)
        if self._waiting_committed:
            _answer(self._waiting_committed, self.high_watermark)
        if core.start != core.wanted_start:
            self._settle_start(core)
        return rose

    def settings_changed(self) -> None:
        self._reliability = levels.weaker_or_stronger(self.log.settings)

    def told(self, watermark: int) -> bool:
        """The leader told its watermark. True: ours rose; it never passes what is written here."""
        self._told_watermark = watermark
        ours = min(watermark, self.log.written_offset)
        if ours <= self.high_watermark:
            return False
        self.high_watermark = self.log.committed_offset = ours
        return True

    def expect(self, watermark: int) -> None:
        """The leader told its watermark with records that are staged: it counts once they are written."""
        self._told_watermark = watermark

    def truncated(self) -> None:
        """The log was cut: its watermark cannot lie above its end, nor below its start."""
        log = self.log
        self.high_watermark = max(log.start_offset, min(self.high_watermark, log.end_offset))
        self._told_watermark = log.committed_offset = self.high_watermark
        self.bounds_changed()

    def failed(self, error: HeadraceError) -> None:
        """What was appended and not yet counted is lost: tell its producers."""
        waiting = [
            *(self._waiting_local or ()),
            *self._waiting_replicas,
            *(self._waiting_committed or ()),
            *self._waiting_starts,
        ]
        self._waiting_local = self._waiting_committed = None
        self._waiting_replicas.clear()
        self._waiting_starts.clear()
        for _, waiter in waiting:
            waiter.failed(self.topic_partition, error)

    def too_few(self) -> None:
        """The in-sync set has become too small for what waits for it: its producers hear it now, not by a timeout."""
        core = self.core
        if core is None or core.has_min_isr or not self._waiting_replicas:
            return
        if self._reliability is not None and self._reliability.policy != levels.ALL:
            return
        waiting, self._waiting_replicas = self._waiting_replicas, deque()
        error = NotEnoughReplicasAfterAppend(
            f"{self.topic_partition}: written, but only {len(core.isr)} replicas are in sync, "
            f"and acks=-1 needs {core.min_isr}"
        )
        for _, waiter in waiting:
            waiter.failed(self.topic_partition, error)

    def close(self, error: HeadraceError | None = None) -> None:
        """The role ends: no producer may wait any more, nor begin to."""
        self._closed = error or self._not_leading()
        self.core = None
        self._verifications.void_all()
        for queued in self.recompressing:
            self.refuse(memoryview(queued.batch))
        self.failed(self._closed)

    def release_readers(self) -> None:
        """After the role has ended: waiting fetches look again for who serves them."""
        waiters, self._waiting_fetches = self._waiting_fetches, {}
        for waiter in waiters:
            waiter.grew(1 << 31)

    def _not_leading(self) -> NotLeader:
        return NotLeader(f"{self.topic_partition}: this broker does not lead it")

    # The start.

    @property
    def start_offset(self) -> int:
        """Where the partition begins, as consumers are told; a new leader may not know it yet, then it is -1."""
        return self.log.start_offset if self.core is None else self.core.start

    def first_offset(self) -> int:
        """The same, or OffsetNotAvailable."""
        if self.start_offset < 0:
            raise OffsetNotAvailable(f"{self.topic_partition}: not all replicas in sync have told where they begin")
        return self.start_offset

    def want_start(self, offset: int, now: float) -> None:
        """Begin at this offset as soon as all replicas in sync can."""
        core = self.core
        if core is None:
            raise self._not_leading()
        if not 0 <= offset <= self.high_watermark:
            raise OffsetOutOfRange(f"{self.topic_partition}: {offset} is not between 0 and {self.high_watermark}")
        core.want_start(offset, now)
        self.log.retiring_to = core.wanted_start

    def wait_for_start(self, offset: int, waiter: ProduceWaiter) -> None:
        """`waiter.passed()` runs when consumers are told that the partition begins there, or behind it."""
        error = self._closed or self.log.offline
        if error is not None:
            waiter.failed(self.topic_partition, error)
        elif self.start_offset >= offset:
            waiter.passed()
        else:
            self._waiting_starts = [each for each in self._waiting_starts if not each[1].answered]
            self._waiting_starts.append((offset, waiter))

    def followers_begin_at(self, offset: int) -> bool:
        """Whether the other replicas that count have this start: only this broker's own disk is waited for then."""
        return self.core is not None and self.core.agreed_start() >= offset

    def _settle_start(self, core: LeaderCore) -> None:
        """The leader's own start rises last, and is told when it is safe."""
        self._start.raise_to(core.agreed_start())
        if core.start_safe(self.log.safe_start_offset):
            reached = [waiter for offset, waiter in self._waiting_starts if offset <= core.start]
            self._waiting_starts = [each for each in self._waiting_starts if each[0] > core.start]
            for waiter in reached:
                waiter.passed()
            self.bounds_changed()

    def _start_settled(self, error: HeadraceError | None) -> None:
        if self.core is None:
            return
        if error is None:
            self._settle_start(self.core)
            return
        self.log.retiring_to = 0  # retention may want it again
        waiting, self._waiting_starts = self._waiting_starts, []
        for _, waiter in waiting:
            waiter.failed(self.topic_partition, error)

    # Consuming.

    def read(self, offset: int, max_bytes: int, *, warm: bool = False) -> ReadResult:
        """What a consumer may see from this offset on; for `warm` see `Log.read`."""
        watermark = self.high_watermark
        if offset == watermark:
            return NOTHING_READ
        log = self.log
        if log.start_offset <= offset < watermark:
            try:
                return log.read(offset, max_bytes, watermark, warm=warm)
            except CorruptBatch as error:
                raise self._damage(error) from None
        if watermark < offset <= log.end_offset:
            return NOTHING_READ
        if self.core is not None and self.core.start <= offset < log.start_offset:
            raise OffsetNotAvailable(f"{self.topic_partition}: offset {offset} is being deleted")
        raise OffsetOutOfRange(f"{self.topic_partition}: offset {offset} is outside {log.start_offset} to {watermark}")

    def _damage(self, error: CorruptBatch) -> HeadraceError:
        """What a reader hears of damage that it has found."""
        if not self.others_hold:
            return error
        return StorageFailed(f"{error}; another replica is asked to lead: try again")

    def producers(self) -> dict[int, ProducerState]:
        """What is known of producers, by id. OffsetNotAvailable while that is being read."""
        producers = self.log.producers
        try:
            producers.load()
        except (UnreadableProducers, StorageFailed) as error:
            raise self._producers_fault(error) from None
        return producers.states

    def _producers_fault(self, error: UnreadableProducers | StorageFailed) -> HeadraceError:
        """What a reader hears who needs to know the producers."""
        if isinstance(error, UnreadableProducers):
            self._unreadable_producers(error)
            return StorageFailed(f"{self.topic_partition}: {error}")
        return error if self.log.offline is not None else OffsetNotAvailable(f"{self.topic_partition}: {error}")

    @property
    def last_stable_offset(self) -> int:
        """Below it every transaction is decided: it has a marker, which is below the watermark. OffsetNotAvailable
        while the log's producers are being read."""
        undecided, watermark = self._first_undecided(), self.high_watermark
        return watermark if undecided is None else max(self.log.start_offset, min(watermark, undecided))

    def stable_end(self) -> int:
        """The same, as who asks for the end is told: no leader tells a lower one later. Where a transaction is open
        since before the start, that is the start, which is safe here only after a while."""
        undecided, watermark = self._first_undecided(), self.high_watermark
        if undecided is None or undecided >= self.log.start_offset:
            return watermark if undecided is None else min(watermark, undecided)
        return max(undecided, self.first_offset())

    def _first_undecided(self) -> int | None:
        """Where the first transaction begins that is not decided."""
        try:
            return self.log.producers.first_undecided(self.high_watermark)
        except (UnreadableProducers, StorageFailed) as error:
            raise self._producers_fault(error) from None

    def read_committed(
        self, offset: int, max_bytes: int, *, stable: int | None = None, warm: bool = False
    ) -> tuple[ReadResult, Aborted]:
        """What a consumer may see that reads only what is committed, and which transactions of it were aborted.
        `stable`: the last stable offset, from who has asked for it in this turn."""
        limit = self.last_stable_offset if stable is None else stable
        if not self.log.start_offset <= offset < limit:
            if limit <= offset < self.high_watermark:
                return NOTHING_READ, []
            return self.read(offset, max_bytes, warm=warm), []
        limit = self.log.committed_limit(offset, limit, ABORTED_MAX)
        try:
            found = self.log.read(offset, max_bytes, limit, warm=warm)
        except CorruptBatch as error:
            raise self._damage(error) from None
        return found, self.log.aborted(offset, limit) if found.count else []

    @property
    def others_hold(self) -> bool:
        """Whether, as far as is known here, another broker can be asked for what cannot be read here."""
        core = self.core
        return len(core.isr) > 1 if core is not None else self.leader >= 0

    def found_damage(self, offset: int) -> None:
        """What lies at this offset cannot be read: whoever copies from others can mend it."""
        self._damaged[self] = min(offset, self._damaged.get(self, offset))

    def mended(self) -> None:
        """What was damaged is cut and will be copied again."""
        self._damaged.pop(self, None)

    @property
    def has_readers(self) -> bool:
        return bool(self._waiting_fetches)

    def wait_for_data(self, waiter: FetchWaiter, *, committed: bool = False) -> None:
        """`committed`: it reads only what is decided, and hears nothing while that stays the same."""
        if not self._waiting_fetches:
            self._grown_from_bytes = self.log.size_bytes
        elif len(self._waiting_fetches) >= self._tidy_fetches_at:
            waiting = self._waiting_fetches.items()
            self._waiting_fetches = {waiter: seen for waiter, seen in waiting if not waiter.answered}
            self._tidy_fetches_at = max(TIDY_FETCHES_LEAST, 2 * len(self._waiting_fetches))
        self._waiting_fetches[waiter] = (self.stable_offset_or_none(), self.log.size_bytes) if committed else None

    def stable_offset_or_none(self) -> int | None:
        """The last stable offset, None while it cannot be told."""
        try:
            return self.last_stable_offset
        except HeadraceError:  # who asks for it hears why
            return None

    def stop_waiting(self, waiter: FetchWaiter) -> None:
        self._waiting_fetches.pop(waiter, None)

    def bounds_changed(self) -> None:
        """The start rose, or the log was cut: that answers nobody, but a session has something to tell."""
        for waiter in list(self._waiting_fetches):
            waiter.grew(0)

    def wake(self) -> None:
        """Tell the waiting fetches, once per turn, by how much the log has grown."""
        waiters = self._waiting_fetches
        if not waiters:
            return
        size = self.log.size_bytes
        grown, self._grown_from_bytes = max(1, size - self._grown_from_bytes), size
        self._waiting_fetches = {}
        for waiter, seen in waiters.items():
            if waiter.answered:
                continue
            if seen is None:
                waiter.grew(grown)
            else:
                seen = self._wake_committed(waiter, seen, size)
            if not waiter.answered:
                self._waiting_fetches[waiter] = seen

    def _wake_committed(self, waiter: FetchWaiter, seen: StableSeen, size: int) -> StableSeen:
        """Tell it if there is more that is decided; answers what it has seen now."""
        stable, size_before = self.stable_offset_or_none(), seen[1]
        if stable is not None and stable == seen[0]:
            waiter.grew(0)
            return seen
        waiter.grew(max(1, size - size_before))
        return stable, size


def sequenced(records: memoryview) -> BatchHeader | None:
    """The header of an idempotent producer's batch; None if it is not one."""
    with suppress(HeadraceError):
        header = read_header(records)
        if header.producer_id >= 0 and header.base_sequence >= 0:
            return header
    return None


def _answer(queue: Waiting, position: int) -> None:
    while queue and queue[0][0] <= position:
        queue.popleft()[1].passed()
