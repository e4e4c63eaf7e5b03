"""The sender: what is ready leaves when a turn ends, in requests to each leader for each acks; answers settle batches.

All of this runs under the reactor's lock. A batch is open until it is full, or its linger (`interval_ms`) is over and
its lane can send; it is settled when its fate is known, at the latest when its delivery timeout is over. A record
counts in the queue from when it is in a batch until that batch is settled.
"""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

from headrace.client.connection import exits
from headrace.client.connection.broker_connection import LATEST_VERSION, Written
from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.metadata import Topic
from headrace.client.connection.reactor import Backoff, Timer, WeakIdentitySet
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.errors import (
    BrokerUnreachable,
    DeliveryUnknown,
    ForkedEngine,
    NeverSent,
    NotDelivered,
    Refusal,
    UnknownTopic,
)
from headrace.client.producer.accumulator import (
    Accumulator,
    BufferMemory,
    Driver,
    IncompleteBatches,
    PartitionBuffer,
    ProducerBatch,
)
from headrace.client.producer.lane import SIZES, Fate, Lane, Outcome, Verdict, outcome_of_code, outcome_of_error
from headrace.client.producer.options import ProducerOptions
from headrace.client.producer.request import (
    Acknowledged,
    Attempt,
    ProduceRequest,
    add,
    answered_rows,
    producer_id_request,
)
from headrace.client.producer.sticky_partitioner import FaultLatency, next_partition
from headrace.client.producer.transaction_core import TransactionCore
from headrace.errors import ErrorCode, HeadraceError, InvalidRecord, SettingError
from headrace.records.builder import Delivery, Report, SentBatch
from headrace.records.router import Quota
from headrace.wire import api as apis
from headrace.wire.message import Message

log = logging.getLogger(__name__)
ANSWER_MARGIN_S: Final = 1.0
LEADERLESS_S: Final = 0.1
ABANDON_AFTER_S: Final = 0.5
SLOW_AFTER_S: Final = 1.0
NO_OFFSET: Final = -1
ID_BACKOFF_S: Final = 0.05


@dataclass(slots=True)
class Counts:
    """Records by their fate; batches, bytes and requests that left; batches moved to another partition, and split."""

    delivered: int = 0
    failed: int = 0
    unknown: int = 0
    dropped: int = 0
    batches: int = 0
    bytes: int = 0
    requests: int = 0
    retries: int = 0
    moved: int = 0
    splits: int = 0
    direct: int = 0
    """Records whose sender wrote them and read their answer itself."""


class ProducerIds:
    """The producer id of an accumulator's batches: asked for once, and again when a lane has used it up.

    Accumulators have ids of their own: two lanes of one partition under one id would mix their sequences. `on_change`
    is called when an id has come, or when it is time to ask again.
    """

    def __init__(self, pool: ConnectionPool, timeout_s: float, on_change: Callable[[], None]) -> None:
        self.failure: HeadraceError | None = None
        """Why there is none."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._known: tuple[int, int] | None = None
        self._asking = False
        self._backoff = Backoff(ID_BACKOFF_S)

    def give(self, lane: Lane[ProducerBatch]) -> bool:
        """Let the lane have an id that it has not used; False if it has to wait for one."""
        if self._known is None or self._known[0] == lane.producer_id:
            self._known = None
            return False
        lane.adopt(*self._known)
        return True

    def ask(self) -> None:
        if self._asking or self._known is not None:
            return
        self._asking = True
        self._pool.ask_any(apis.INIT_PRODUCER_ID, producer_id_request(), self._on_response, timeout_s=self._timeout_s)

    def _on_response(self, answer: Message | HeadraceError) -> None:
        if not isinstance(answer, HeadraceError) and answer.error_code != ErrorCode.NONE:
            answer = Refusal(answer.error_code, "producer id")
        if isinstance(answer, HeadraceError):
            self.failure = answer
            reactor = self._pool.reactor
            reactor.call_at(reactor.now() + self._backoff.take(), self._again)
            return
        self._asking, self.failure = False, None
        self._backoff.reset()
        self._known = (answer.producer_id, answer.producer_epoch)
        self._on_change()

    def _again(self) -> None:
        self._asking = False
        self._on_change()


class Sender:
    def __init__(self, pool: ConnectionPool, options: ProducerOptions, driver: Driver) -> None:
        self.pool = pool
        self.reactor = pool.reactor
        self.options = options
        self.driver = driver
        self.quota = Quota(options.queue_bytes, options.queue_records)
        self.memory = BufferMemory(self.reactor, driver, self.quota)
        self.count = Counts()
        self.latency = FaultLatency(options.latency_table)
        delivery_s = options.delivery_timeout_ms / 1000
        # A batch leaves while there is time for its delivery, however long it lingers.
        linger_s = min(options.interval_ms / 1000, delivery_s / 2)
        self.incomplete = IncompleteBatches(self.reactor, linger_s, delivery_s, self.leave, self._expire)
        self._accumulators: dict[tuple[int, bool], Accumulator] = {}
        self._ready: dict[PartitionBuffer, None] = {}
        """Partitions to look at when this turn ends."""
        self._send_due = False
        """`send_ready` is called at the end of this turn."""
        self._unanswered: dict[int, ProduceRequest] = {}
        """Requests in flight, the oldest first."""
        self._slow_check: Timer | None = None
        self._gate: HeadraceError | None = None
        """What sends hear outside of transactions, of a producer that has them."""
        self.refusal: HeadraceError | None = None
        """What every send hears from now on."""
        self._closed = False
        """Nothing leaves any more, whatever is heard."""
        self.ordered_partitions: dict[str, int] = {}
        """Over how many partitions of a topic order keys are spread."""
        self.unbatched = 0
        """Records that wait outside of batches."""
        named = options.transactional_id
        self.transactions = None if named is None else TransactionCore(self, named)
        """Where the transaction stands, of a producer that has them."""
        if self.transactions is not None:
            self._gate = self.transactions.gate
        pool.metadata.listeners.append(self._on_metadata)
        _senders.add(self)
        exits.opened(self)

    # For accumulators and producers.

    def accumulator(self, acks: int, ordered: bool = False) -> Accumulator:
        with self.reactor.lock:
            found = self._accumulators.get((acks, ordered))
            if found is None:
                if self.transactions is not None and (ordered or acks != -1):
                    raise SettingError(
                        "in a transaction all replicas in sync are waited for (acks=-1), and records of a partition "
                        "keep their order: use `t.send`, with a key where order matters"
                    )
                found = self._accumulators[acks, ordered] = Accumulator(self, acks, ordered)
                found.own_router.closed = self.refusal or self._gate
            return found

    def accumulators(self) -> list[Accumulator]:
        return list(self._accumulators.values())

    def producer_ids(self, on_change: Callable[[], None]) -> ProducerIds | TransactionCore:
        if self.transactions is not None:
            return self.transactions
        return ProducerIds(self.pool, self.options.request_timeout_ms / 1000, on_change)

    def refuse(self, error: HeadraceError) -> None:
        """Take no record any more. What is in batches goes on."""
        with self.reactor.lock:
            self.refusal = error
            for accumulator in self._accumulators.values():
                accumulator.own_router.closed = error

    def set_gate(self, error: HeadraceError | None) -> None:
        """Take records of a transaction from now on, or none."""
        self._gate = error
        for accumulator in self._accumulators.values():
            accumulator.own_router.closed = self.refusal or error
        self.driver.changed()

    def drop_unsent(self, error: HeadraceError) -> bool:
        """Fail all that is not on its way; True if there was any. What is on its way is not sent again."""
        left = list(self.incomplete.unsettled.values())
        dropped = False
        for pending in left:
            self._close_open(pending)
        for buffer in {pending.buffer: None for pending in left}:
            dropped |= self._drop_waiting(buffer, error)
        return dropped

    def _drop_waiting(self, buffer: PartitionBuffer, error: HeadraceError) -> bool:
        verdicts = buffer.lane.withdraw(lambda _: True)
        for pending, fate in verdicts:
            if not pending.settled:
                self._fail(pending, fate, error)
        return bool(verdicts)

    def avoided(self) -> frozenset[int]:
        """Brokers that records which may go anywhere stay away from."""
        failing = self.pool.failing()
        return failing | self.latency.avoided(self.reactor.now()) if self.options.avoid_slow else failing

    def wait(self, delivery: Delivery, deadline: float | None) -> None:
        self.driver.wait(delivery, deadline)

    def awaited(self, delivery: Delivery) -> Awaitable[Report]:
        return self.driver.awaited(delivery)

    def leave(self, pending: ProducerBatch) -> None:
        """Let an open batch leave without lingering."""
        if pending.buffer.open_batch is pending:
            pending.buffer.due = True
            self.make_ready(pending.buffer)

    def leave_now(self, pending: ProducerBatch) -> None:
        """Let an open batch leave, and all else that is ready, without waiting for the end of a turn."""
        if pending.buffer.open_batch is pending:
            pending.buffer.due = True
            self._ready[pending.buffer] = None
        if self._ready:
            self.send_ready()

    def make_ready(self, buffer: PartitionBuffer) -> None:
        """Look at the partition at the end of this turn."""
        if self._closed:
            return
        self._ready[buffer] = None
        if not self._send_due:
            self._send_due = True
            self.reactor.call_soon(self.send_ready)

    def begin_flush(self) -> int:
        """Let everything that lingers leave; gives what `flushed` is to be asked with."""
        for pending in self.incomplete.unsettled.values():
            self.leave(pending)
        return self.incomplete.last_number

    def close_batches(self) -> int:
        """Close all that is open, and let it leave: what comes after is in other batches. Gives the last number."""
        for pending in list(self.incomplete.unsettled.values()):
            if pending.buffer.open_batch is pending:
                pending.buffer.accumulator.close(pending.buffer)
                self.make_ready(pending.buffer)
        return self.incomplete.last_number

    def make_all_ready(self) -> None:
        """Look at every partition with something to send."""
        for pending in self.incomplete.unsettled.values():
            self.make_ready(pending.buffer)

    def flushed(self, mark: int) -> bool:
        return self.incomplete.are_settled(mark)

    def metrics(self) -> dict[str, int]:
        with self.reactor.lock:
            every = self._accumulators.values()
            buffers = [buffer for each in every for topic in each.own_router.topics for buffer in each.buffers(topic)]
            return {
                **asdict(self.count),
                "renewals": sum(buffer.lane.renewals for buffer in buffers),
                "queue_bytes": self.quota.bytes,
                "queue_records": self.quota.records,
            }

    def close(self, error: HeadraceError) -> None:
        """Settle what is left as it is. The connections may go on for others, so nothing of it stays in a lane."""
        self._closed = True
        exits.closed(self)
        if self.transactions is not None:
            self.transactions.close()
        left = list(self.incomplete.unsettled.values())
        for pending in left:
            self._close_open(pending)
        for lane in {pending.buffer: pending.buffer.lane for pending in left}.values():
            for pending, fate in lane.expire(math.inf):
                self._fail(pending, fate, error)
        self._ready.clear()
        self.pool.metadata.listeners.remove(self._on_metadata)
        self.incomplete.end()
        if self._slow_check is not None:
            self._slow_check.cancel()

    # Leaving.

    def send_ready(self) -> None:
        """Send what may leave."""
        self._send_due = False
        if not self._ready or self._closed:
            return
        ready, self._ready = self._ready, {}
        requests: dict[tuple[int, int], list[ProduceRequest]] = {}
        failing = self.pool.failing()
        for buffer in ready:
            self._drain(buffer, failing, requests)
        for (leader, acks), rounds in requests.items():
            for request in rounds:
                self.send(leader, acks, request)

    def _drain(
        self, buffer: PartitionBuffer, failing: frozenset[int], requests: dict[tuple[int, int], list[ProduceRequest]]
    ) -> None:
        """Put the batches of a partition that may leave into requests to its leader."""
        now, lane, accumulator = self.reactor.now(), buffer.lane, buffer.accumulator
        if self.transactions is not None and not self.transactions.admits(buffer):
            return
        leader = self.pool.metadata.leader(buffer.topic, buffer.partition)
        if leader is None or leader in failing:
            self._move_away(buffer, failing)
        if leader is None:
            self.pool.metadata.stale(buffer.topic)
            self._look_again(buffer, now + LEADERLESS_S)
            return
        rounds = requests.setdefault((leader, accumulator.acks), [])
        after = 0
        while True:
            if buffer.due and not lane.waiting and len(lane.in_flight) < lane.max_in_flight:
                accumulator.close(buffer)
            if (
                self.transactions is not None
                and lane.waiting
                and lane.waiting[0].number > self.transactions.last_number
            ):
                break
            pending = lane.next(now, leader)
            if pending is None:
                if lane.wants_producer_id and lane.waiting and accumulator.producer_ids.give(lane):
                    continue
                break
            try:
                after = add(rounds, after, buffer, pending)
            except Exception as error:
                log.exception("a batch for %s cannot be packed", buffer.label)
                pending.reason = InvalidRecord(f"the batch cannot be packed: {error!r}")
                self.settle(lane.answered(pending, pending.attempt, Outcome.FATAL, now))
        if lane.waiting and lane.wants_producer_id:
            accumulator.producer_ids.ask()
        if lane.waiting and lane.backoff_until > now:
            self._look_again(buffer, lane.backoff_until)
        elif lane.idempotent and lane.in_flight and lane.leader != leader:
            self._abandon(buffer, now)
        else:
            buffer.moved_at = None

    def _move_away(self, buffer: PartitionBuffer, failing: frozenset[int]) -> None:
        """Give what may go anywhere, and is not in this log, to a partition whose broker answers."""
        buffers = buffer.accumulator.buffers(buffer.topic)
        leader = partial(self.pool.metadata.leader, buffer.topic)
        if not buffers:
            return
        target = next_partition(buffer.partition, len(buffers), leader, self.avoided())
        if leader(target) is None or leader(target) in failing:
            return
        if self.transactions is not None and self.transactions.is_closing and buffers[target].lane.waiting:
            # It would come to stand behind what waits for the end of its transaction.
            return
        if buffer.due and buffer.open_batch is not None and not buffer.open_batch.batch.pinned:
            buffer.accumulator.close(buffer)
        for pending in [pending for pending in buffer.lane.waiting if pending.movable]:
            if buffer.lane.release(pending):
                pending.buffer = buffers[target]
                pending.batch.sent.partition = target
                buffers[target].lane.add(pending)
                self.count.moved += 1
                self.make_ready(buffers[target])

    def _abandon(self, buffer: PartitionBuffer, now: float) -> None:
        """Send again what went to a broker that leads no more and does not answer."""
        if buffer.moved_at is None:
            buffer.moved_at = now
        if now - buffer.moved_at < ABANDON_AFTER_S:
            self._look_again(buffer, buffer.moved_at + ABANDON_AFTER_S)
            return
        buffer.moved_at = None
        for pending in buffer.lane.in_flight:
            pending.lent = True
        self.settle(buffer.lane.abandon(now))
        self.make_ready(buffer)

    def send(self, leader: int, acks: int, request: ProduceRequest, written: Written | None = None) -> None:
        """`written` says that the request was written already (see `direct`)."""
        self.count.requests += 1
        self._unanswered[id(request)] = request
        if self._slow_check is None:
            self._slow_check = self.reactor.call_at(self.reactor.now() + SLOW_AFTER_S, self._look_for_slow)
        self.count.retries += sum(each.number > 1 for each in request.attempts)
        body = request.body(self.pool.metadata, acks, int(self.options.request_timeout_ms))
        heard = partial(self._on_response, leader, acks, request, self.reactor.now())
        try:
            connection = self.pool.broker(leader)
        except BrokerUnreachable as error:
            heard(NeverSent(str(error)))
            return
        timeout_s = self.options.request_timeout_ms / 1000 + ANSWER_MARGIN_S
        reads, answered = request.read if len(request.attempts) == 1 else None, acks != 0
        latest = LATEST_VERSION if self.transactions is None else self.transactions.produce_version
        connection.ask(
            apis.PRODUCE,
            body,
            heard,
            timeout_s=timeout_s,
            answered=answered,
            reads=reads,
            written=written,
            max_version=latest,
        )

    # Answers.

    def _on_response(
        self,
        leader: int,
        acks: int,
        request: ProduceRequest,
        sent_at: float,
        answer: Message | Acknowledged | HeadraceError,
    ) -> None:
        now = self.reactor.now()
        del self._unanswered[id(request)]
        if isinstance(answer, HeadraceError):
            if self.options.avoid_slow:
                self.latency.failed(leader, now)
            outcome = outcome_of_error(answer, not isinstance(answer, NeverSent))
            if acks == 0 and outcome is Outcome.UNSURE:
                outcome = Outcome.FATAL_UNKNOWN
            for each in request.attempts:
                self.pool.metadata.stale(each.buffer.topic)
                self._ended(each, outcome, answer, now)
            return
        if self.options.avoid_slow:
            self.latency.took(leader, (now - sent_at) * 1000, now)
        if isinstance(answer, Acknowledged):
            self._ended(request.attempts[0], Outcome.WRITTEN, None, now, answer.base_offset, answer.append_ms)
            return
        rows = answered_rows(answer, request.names) if acks else {}
        for each in request.attempts:
            row = rows.get((each.buffer.topic, each.buffer.partition))
            if acks == 0:
                self._ended(each, Outcome.WRITTEN, None, now)
            elif row is None:
                missing = Refusal(
                    ErrorCode.UNKNOWN_SERVER_ERROR,
                    f"produce to {each.buffer.label}",
                    "the answer leaves this partition out",
                )
                self._ended(each, Outcome.UNSURE, missing, now)
            else:
                self._on_partition_response(each, row, answer, leader, now)

    def _on_partition_response(self, each: Attempt, row: Message, answer: Message, leader: int, now: float) -> None:
        buffer, code = each.buffer, int(row.error_code)
        outcome = outcome_of_code(code)
        if outcome is Outcome.WRITTEN:
            self._ended(each, outcome, None, now, row.base_offset, row.log_append_time_ms)
            return
        metadata = self.pool.metadata
        hinted = row.current_leader
        if hinted is not None and hinted.leader_id >= 0:
            ends = answer.node_endpoints
            metadata.hint(buffer.topic, buffer.partition, hinted.leader_id, hinted.leader_epoch, ends)
        if code == ErrorCode.KAFKA_STORAGE_ERROR:
            self.pool.failed(leader)
        self._ended(each, outcome, Refusal(code, f"produce to {buffer.label}", row.error_message), now)
        if metadata.leader(buffer.topic, buffer.partition) != leader:
            buffer.lane.end_backoff()
        elif outcome in (Outcome.UNSURE, Outcome.REFUSED):
            metadata.stale(buffer.topic)

    def _ended(
        self,
        each: Attempt,
        outcome: Outcome,
        reason: HeadraceError | None,
        now: float,
        base_offset: int = NO_OFFSET,
        append_ms: int = -1,
    ) -> None:
        """One attempt at one batch is over."""
        if reason is not None:
            each.pending.reason = reason
        buffer = each.buffer
        if outcome is not Outcome.TOO_LARGE or not self._split(each, now):
            self.settle(buffer.lane.answered(each.pending, each.number, outcome, now), base_offset, append_ms)
        if self.transactions is not None and not self._closed and (why := self.transactions.dropped_for) is not None:
            # Its transaction has failed, or is over: what was to be sent again is not.
            self._drop_waiting(buffer, why)
        if buffer.due or buffer.lane.waiting:
            self.make_ready(buffer)

    def _split(self, refused: Attempt, now: float) -> bool:
        """A batch that its topic refuses for its size goes on in parts, in its place, down to single records.

        Each part holds about half of the bytes, or what its partition is known to take. False if there is nothing to
        divide.
        """
        buffer, pending = refused.buffer, refused.pending
        if not buffer.lane.splits(pending, refused.number):
            return False
        parts = pending.split(bytes(refused.data), buffer.narrow(pending, now))
        for part in parts:
            self.quota.take(part.batch)
        self.quota.give_back(pending.counted)
        buffer.lane.split(pending, parts)
        self.count.splits += 1
        return True

    # Fates.

    def settle(self, verdicts: list[Verdict[ProducerBatch]], base_offset: int = NO_OFFSET, append_ms: int = -1) -> None:
        for pending, fate in verdicts:
            if pending.settled:
                continue
            if fate is not Fate.DELIVERED:
                self._fail(pending, fate, pending.reason)
                continue
            batch = pending.batch
            self.count.delivered += batch.count
            self.count.bytes += batch.record_bytes
            self.count.batches += 1
            self.complete(pending, batch.sent.finish(base_offset, append_ms))

    def complete(self, pending: ProducerBatch, has_callbacks: bool = False) -> None:
        """The fate of a batch is known, and its deliveries say it."""
        assert not pending.settled
        self.memory.settle(pending.batch.sent, pending.counted, has_callbacks)
        pending.settled = True
        pending.let_go()
        root = pending.root or pending
        root.unsettled_parts -= 1
        if not root.unsettled_parts:
            root.settled = True
            self.incomplete.settled(root)
            if self.transactions is not None:
                self.transactions.batch_settled()
        self.driver.changed()

    def _fail(self, pending: ProducerBatch, fate: Fate, reason: HeadraceError | None) -> None:
        count, where = pending.batch.count, pending.buffer.label
        reason = reason or self._obstacle(pending.buffer)
        unknown = fate is Fate.UNKNOWN
        if unknown:
            self.count.unknown += count
        else:
            self.count.failed += count
        error = _failure(count, where, unknown, reason)
        self.complete(pending, pending.batch.sent.fail(error))
        if self.transactions is not None:
            self.transactions.batch_failed(pending.number, error)
        if pending.orders and not self._closed:
            self._fail_followers(pending, error)

    def _obstacle(self, buffer: PartitionBuffer) -> HeadraceError | None:
        """What keeps a batch that was never tried from leaving, as far as it is known."""
        metadata = self.pool.metadata
        if metadata.topic(buffer.topic) is None:
            return UnknownTopic(buffer.topic)
        if metadata.leader(buffer.topic, buffer.partition) is None:
            return Refusal(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {buffer.label}")
        return buffer.accumulator.producer_ids.failure if buffer.lane.wants_producer_id else None

    def _fail_followers(self, failed: ProducerBatch, reason: HeadraceError) -> None:
        """Fail what waits behind a batch of ordered records that failed, record by record, for the keys that it held.

        They are taken out of their batches, which are built anew from the others.
        """
        order_keys = {order_key for order_key, _ in failed.orders}
        buffer = failed.buffer
        error = NotDelivered(
            f"records for {buffer.label} were not sent: an earlier one of the same order key failed ({reason})", reason
        )
        if buffer.open_batch is not None:
            buffer.accumulator.close(buffer)
            self.make_ready(buffer)
        for pending in list(buffer.lane.waiting):
            if pending.settled or all(order_key not in order_keys for order_key, _ in pending.orders):
                continue
            this_one = partial(operator.is_, pending)
            if pending.stamped:
                # Part of a batch that may be written as it was: none of its records can be told to be not.
                pending.reason = error
                self.settle(buffer.lane.withdraw(this_one))
                continue
            removed, count = pending.take_out(order_keys)
            self.count.failed += count
            if not pending.orders:
                buffer.lane.withdraw(this_one)
                self.complete(pending)
            self._fail_apart(removed, error)

    def _fail_apart(self, sent: SentBatch, error: HeadraceError) -> None:
        """Fail records that are in no batch any more."""
        if sent.fail(error):
            self.reactor.run_callback(partial(self.memory.run_callbacks, sent))

    # Time.

    def _look_again(self, buffer: PartitionBuffer, when: float) -> None:
        if self._closed or self.reactor.now() < buffer.looked_at <= when:
            return
        buffer.looked_at = when
        self.reactor.call_at(when, partial(self.make_ready, buffer))

    def _look_for_slow(self) -> None:
        """A broker that does not answer may have ceased to lead: ask the others."""
        self._slow_check = None
        now = self.reactor.now()
        for request in self._unanswered.values():
            if request.attempts[0].pending.sent_at > now - SLOW_AFTER_S:
                break
            for each in request.attempts:
                self.pool.metadata.stale(each.buffer.topic)
        if self._unanswered:
            self._slow_check = self.reactor.call_at(now + SLOW_AFTER_S, self._look_for_slow)

    def _expire(self, pending: ProducerBatch) -> None:
        """Its delivery timeout is over."""
        self._close_open(pending)
        self.settle(pending.buffer.lane.expire(self.reactor.now()))
        assert pending.settled
        self.make_ready(pending.buffer)

    def _close_open(self, pending: ProducerBatch) -> None:
        if pending.buffer.open_batch is pending:
            pending.buffer.accumulator.close(pending.buffer)

    def _on_metadata(self, name: str, topic: Topic | None) -> None:
        """A topic has more partitions, other leaders, or is another one."""
        for accumulator in self._accumulators.values():
            if topic is not None and name in accumulator.own_router.topics:
                accumulator.update_topic(topic)
            for buffer in accumulator.buffers(name):
                leader = self.pool.metadata.leader(name, buffer.partition)
                if leader is not None and leader != buffer.lane.leader:
                    buffer.lane.end_backoff()
                if buffer.due or not buffer.lane.idle:
                    self.make_ready(buffer)
        self.driver.changed()

    # The end of the program.

    def at_exit(self, since: float) -> Iterator[None]:
        """A program ends that has not closed its producer: what waits is sent for a while yet, what is lost is logged.

        Until `exit_timeout_ms` after `since`; see `exits.OpenClient`.
        """
        reactor = self.reactor
        if not isinstance(reactor, ThreadReactor):
            self._log_lost("its loop has ended; `await producer.close()` in it, or use `async with`")
            return
        within_ms = self.options.exit_timeout_ms
        failed = self.count.failed + self.count.unknown
        try:
            if within_ms > 0:
                self._begin_flush_locked()
                yield
                yield
                mark = self._begin_flush_locked()
                yield
                deadline = since + within_ms / 1000
                reactor.wait(lambda: self.flushed(mark), deadline)
                reactor.wait_callbacks(deadline)
        except (KeyboardInterrupt, SystemExit):
            self._log_lost("interrupted")
            return
        except HeadraceError as error:
            log.warning("what a producer holds cannot be sent at the end of the program: %s", error)
        failed = self.count.failed + self.count.unknown - failed
        if failed:
            log.warning("%d records failed at the end of the program; their deliveries say why", failed)
        self._log_lost(f"the program ended, and {within_ms:g} ms (exit_timeout_ms) were not enough; close the producer")

    def _begin_flush_locked(self) -> int:
        with self.reactor.lock:
            return self.begin_flush()

    def _log_lost(self, why: str) -> None:
        uncalled = self.memory.uncalled_records
        lost = self.quota.records - uncalled + self.unbatched
        client_id = self.pool.client_id
        if lost:
            log.warning("%d records of a producer (%s) are not known to be delivered: %s", lost, client_id, why)
        if uncalled:
            log.warning("callbacks of up to %d records of a producer (%s) have not ended: %s", uncalled, client_id, why)


def _failure(count: int, where: str, unknown: bool, reason: HeadraceError | None) -> NotDelivered:
    """What the records of a batch hear that was not acknowledged."""
    why = f": {reason}" if reason is not None else ": no answer came in time"
    if reason is not None and reason.kafka_code in SIZES:
        why += "; the record alone is larger than its topic takes: send less, or raise max.message.bytes of the topic"
    if unknown:
        return DeliveryUnknown(
            f"whether {count} records for {where} were written is not known{why}; look before sending them again",
            reason,
        )
    return NotDelivered(f"{count} records for {where} were not written{why}", reason)


_senders: WeakIdentitySet[Sender] = WeakIdentitySet()


def _after_fork() -> None:
    """In a forked child every send of a producer made before is refused: nobody there would let its batches leave."""
    for sender in _senders:
        sender.refusal = ForkedEngine()
        for accumulator in sender.accumulators():
            accumulator.own_router.closed = sender.refusal
    _senders.clear()


os.register_at_fork(after_in_child=_after_fork)
