"""The public producer, for threads: any of them may send, and whoever waits drives the connections meanwhile.

    with Producer("127.0.0.1:9092") as producer:
        report = producer.send("orders", b"...", key=b"42")           # waits; Report(topic, partition, offset, ...)
        delivery = producer.send_async("orders", b"...", callback=done)   # delivery.result() waits
        producer.flush()

A record is acknowledged when its delivery says so, and not before: what is in the queue is lost if the process dies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.connection.connections import ConnectionPool, shared
from headrace.client.connection.exits import EXIT_TIMEOUT_MS
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.connection.tls import Tls
from headrace.client.errors import NoTransaction, ProducerClosed, TransactionInDoubt
from headrace.client.keywords import takes_options
from headrace.client.producer.accumulator import Need, ProducerBatch, ProduceResult
from headrace.client.producer.direct import Direct
from headrace.client.producer.lane import REMEMBERED_BATCHES
from headrace.client.producer.options import (
    BATCH_BYTES,
    QUEUE_BYTES,
    QUEUE_RECORDS,
    RECORD_BYTES,
    TRANSACTION_TIMEOUT_MS,
    ProducerOptions,
)
from headrace.client.producer.sender import Sender
from headrace.client.producer.sticky_partitioner import TABLE
from headrace.client.producer.transaction import Transaction
from headrace.client.producer.transaction_core import Step, TransactionCore
from headrace.errors import HeadraceError, RequestTimedOut
from headrace.records.builder import Delivery, Report
from headrace.records.record import GivenHeaders

ONE_WAY: Final = 0
log = logging.getLogger(__name__)


class ThreadDriver:
    """How threads wait for one producer: see `accumulator.Driver`. Whoever waits drives the connections meanwhile."""

    router_encodes = True

    def __init__(self, reactor: ThreadReactor) -> None:
        self.reactor = reactor
        self.lock = reactor.lock
        self.now = reactor.now
        self._for_room = 0

    def have(self, done: Callable[[], bool], deadline: float) -> bool:
        """Wait until `done()`; False at the deadline. For the producer itself; `until` is for its accumulators."""
        return self.reactor.wait(done, deadline)

    def callbacks_ended(self, deadline: float) -> bool:
        """Wait until the user's code has heard all that it is to hear; False at the deadline."""
        return self.reactor.wait_callbacks(deadline)

    def until(self, need: Need, done: Callable[[], bool], deadline: float) -> bool:
        if need is not Need.ROOM:
            return self.reactor.wait(done, deadline)
        with self.reactor.lock:
            self._for_room += 1
        try:
            return self.reactor.wait(done, deadline)
        finally:
            with self.reactor.lock:
                self._for_room -= 1

    def turn(self) -> None:
        self.reactor.turn()

    def wake(self) -> None:
        """Let what is ready leave, and whoever waits look again."""
        self.reactor.turn()
        self.reactor.wake()

    def changed(self) -> None:
        """The reactor itself asks all who wait, after every turn."""

    def room(self) -> None:
        if self._for_room:
            self.reactor.wake()

    def wait(self, delivery: Delivery, deadline: float | None) -> None:
        self.reactor.wait(lambda: delivery.done, math.inf if deadline is None else deadline)

    def awaited(self, delivery: Delivery) -> Awaitable[Report]:
        raise TypeError("this producer is for threads: call delivery.result(), or use headrace.aio.Producer")


class RecordAppender:
    """How records get into their batches, by threads that may be kept waiting."""

    def __init__(self, sender: Sender, driver: ThreadDriver) -> None:
        self.router = sender.accumulator(sender.options.acks).own_router
        # The router's own method, so that a record takes one call.
        self.send_async = self.router.send_async
        self._sender = sender
        self._driver = driver
        self._direct = Direct(sender, driver.reactor)
        self._acks = sender.options.acks
        # A batch of a transaction leaves by the sender, which adds its partition.
        self._waits = self._acks != ONE_WAY and sender.transactions is None

    def send(
        self,
        topic: str,
        value: Any,
        key: bytes | str | None,
        headers: GivenHeaders | None,
        partition: int | None,
        timestamp_ms: int | None,
        acks: int | None,
    ) -> Report:
        """Send a record at once, and wait."""
        if self._waits and (acks is None or acks == self._acks):
            found = self.router.send_lone(topic, value, key, headers, partition, timestamp_ms)
            if type(found) is ProducerBatch:
                return self._direct.deliver(found)
        else:
            found = self.router.send_async(
                topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms, acks=acks
            )
        delivery: Delivery = found
        self._leave(delivery)
        return delivery.result()

    def send_now(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | str | None,
        headers: GivenHeaders | None,
        partition: int | None,
        timestamp_ms: int | None,
        acks: int | None,
        callback: Callable[[Delivery], object] | None,
    ) -> Delivery:
        """Put a record into its batch, which leaves."""
        delivery = self.send_async(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            acks=acks,
            callback=callback,
        )
        self._leave(delivery)
        self._driver.turn()
        return delivery

    def send_ordered(
        self,
        topic: str,
        value: Any,
        order_key: bytes | str,
        *,
        key: bytes | str | None,
        headers: GivenHeaders | None,
        timestamp_ms: int | None,
        acks: int | None,
        callback: Callable[[Delivery], object] | None,
    ) -> Delivery:
        """Put a record into the batch of its order key."""
        encoder = self._sender.options.encoder
        accumulator = self._sender.accumulator(self._acks if acks is None else acks, ordered=True)
        return accumulator.append_ordered(
            topic,
            value if encoder is None else encoder(value),
            order_key,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            callback=callback,
        )

    def refuse(self) -> None:
        """Take no record any more."""
        self._sender.refuse(ProducerClosed("the producer is closed; make a new one"))

    def close(self) -> None:
        """What was taken is in its batch."""

    def _leave(self, delivery: Delivery) -> None:
        sent = delivery.sent
        if isinstance(sent, ProduceResult) and not sent.done:
            with self._driver.lock:
                if sent.pending is not None:
                    # In the middle of a send, which a signal's handler interrupts, it is that one's turn.
                    leave = self._sender.leave if self._driver.reactor.running else self._sender.leave_now
                    leave(sent.pending)


def connect(bootstrap: str | Iterable[str], client_id: str, tls: Tls) -> tuple[ConnectionPool, ThreadDriver]:
    pool = shared(bootstrap, client_id=client_id, tls=tls)
    assert isinstance(pool.reactor, ThreadReactor)
    return pool, ThreadDriver(pool.reactor)


@takes_options()
class Producer:
    """Sends records to the leaders of their partitions; thread-safe. Use as a context manager, or close it.

    bootstrap: `host:port` of some brokers, with commas between or in a list; the others are heard of from them.
    client_id: what brokers log and set quotas by; clients of one id and bootstrap share their connections.
    acks: -1 all replicas in sync have the record, 1 the leader has, 0 nobody is asked; may be given for each send.
    idempotent: with acks=-1, a record that is sent again is written once, and records of a partition keep their order.
    codec: none, gzip, snappy, lz4 or zstd.
    batch_bytes, interval_ms: a batch leaves when it is full, or this long after its first record.
    queue_bytes, queue_records: how much may wait for its acknowledgement.
    when_full: 0 drops the record (its delivery fails with QueueFull), below 0 waits, above 0 waits at most so many ms.
    max_record_bytes: larger records are refused at once (BatchTooLarge).
    encoder: makes bytes or text of what is given as a value; called once for a record, by who sends it.
    delivery_timeout_ms: after so long without an acknowledgement a record fails, whatever was tried.
    request_timeout_ms: how long a broker may take for an answer.
    in_flight: batches of a partition on their way at once, at most 5 where they are idempotent.
    avoid_slow, latency_table: keep records that may go anywhere away from brokers that were slow: (took ms, avoid ms).
    exit_timeout_ms: how long a program that ends without `close` sends what waits; what is left is logged.
    transactional_id: the name under which this producer has transactions, and sends in them only. The same in every run
        of a task, and no other's at the same time: the one that begins last takes over, and those before are refused.
    transaction_timeout_ms: a transaction that is open for longer is aborted by the broker.
    tls: speak TLS with the brokers: True trusts the system's authorities, the path of a PEM file those in it; or an
        ssl.SSLContext.
    """

    def __init__(
        self,
        bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP,
        *,
        client_id: str = "headrace",
        acks: int = -1,
        idempotent: bool = True,
        codec: str = "none",
        batch_bytes: int = BATCH_BYTES,
        interval_ms: float = 5,
        queue_bytes: int = QUEUE_BYTES,
        queue_records: int = QUEUE_RECORDS,
        when_full: float = -1,
        max_record_bytes: int = RECORD_BYTES,
        encoder: Callable[[Any], bytes | str | None] | None = None,
        delivery_timeout_ms: float = 120_000,
        request_timeout_ms: float = 30_000,
        in_flight: int = REMEMBERED_BATCHES,
        avoid_slow: bool = False,
        latency_table: Sequence[tuple[int, int]] = TABLE,
        exit_timeout_ms: float = EXIT_TIMEOUT_MS,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
        tls: Tls = None,
    ) -> None:
        options = ProducerOptions(
            acks=acks,
            idempotent=idempotent,
            codec=codec,
            batch_bytes=batch_bytes,
            interval_ms=interval_ms,
            queue_bytes=queue_bytes,
            queue_records=queue_records,
            when_full=when_full,
            max_record_bytes=max_record_bytes,
            encoder=encoder,
            delivery_timeout_ms=delivery_timeout_ms,
            request_timeout_ms=request_timeout_ms,
            in_flight=in_flight,
            avoid_slow=avoid_slow,
            latency_table=latency_table,
            exit_timeout_ms=exit_timeout_ms,
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
        )
        self._pool, self._driver = connect(bootstrap, client_id, tls)
        self._sender = Sender(self._pool, options, self._driver)
        self._appender = RecordAppender(self._sender, self._driver)
        self._committing: Transaction | None = None
        """The transaction whose commit nobody has waited for yet."""
        self._closed = False
        if interval_ms > 0 and type(self).send_async is Producer.send_async:
            # Without a call in between.
            self.send_async = self._appender.send_async  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
    ) -> Report:
        """Send a record at once and wait for its acknowledgement; raises NotDelivered if there is none in time.

        Value, key and headers are bytes or text, which is written as UTF-8; headers are a dict, or pairs.
        """
        return self._appender.send(topic, value, key, headers, partition, timestamp_ms, acks)

    def send_async(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Put a record into its batch. The delivery says what becomes of it; `callback(delivery)` hears of it.

        Without a partition the key's hash chooses (murmur2, as in other clients), without a key records are spread.
        """
        return self._appender.send_now(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            acks=acks,
            callback=callback,
        )

    def send_oneway(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Send a record that no broker answers for: it may be lost without a sign."""
        self._appender.send_async(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms, acks=ONE_WAY
        )

    def send_ordered(
        self,
        topic: str,
        value: Any,
        order_key: bytes | str,
        *,
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Send in the order of `order_key`, which alone chooses the partition, and keeps it when the topic grows.

        When a record fails, those of its order key that wait behind it fail too.
        """
        return self._appender.send_ordered(
            topic, value, order_key, key=key, headers=headers, timestamp_ms=timestamp_ms, acks=acks, callback=callback
        )

    def transaction(self, *, two_phase: bool = False, wait: bool = True) -> Transaction:
        """A transaction of this producer, for `with`: one at a time, and everything that is sent meanwhile is in it.

        Needs a `transactional_id`. With `two_phase` no timeout ends it, and it can be left prepared, for another
        process to end: see `Transaction.prepare`. With `wait=False` the end of its block does not wait for its commit,
        so that the next one is filled meanwhile: see `Transaction.wait`.
        """
        core = self._sender.transactions
        if core is None:
            raise NoTransaction(
                "this producer has no transactional id: Producer(transactional_id='...'), with a name that is the same "
                "in every run of this task"
            )
        return Transaction(self, core, two_phase=two_phase, wait=wait)

    def _transact(self, begin: Callable[[], Step], timeout_s: float | None = None) -> None:
        """Begin a step of a transaction, and wait until it is done; raises what it ended with."""
        with self._driver.lock:
            step = begin()
        self._wait_for(step, timeout_s)
        if step.error is not None:
            raise step.error

    def _wait_for(self, step: Step, timeout_s: float | None) -> None:
        driver = self._driver
        if not driver.have(lambda: step.done, math.inf if timeout_s is None else driver.now() + timeout_s):
            raise RequestTimedOut(f"the transaction's coordinator has not answered after {timeout_s} s")

    def _commit_when_written(self, core: TransactionCore) -> Step:
        """Let all that was sent leave, to be committed when it is written."""
        driver, sender = self._driver, self._sender
        if sender.unbatched:
            driver.have(lambda: not sender.unbatched, math.inf)
        with driver.lock:
            step = core.commit_when_written()
        driver.wake()
        return step

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent so far is acknowledged or has failed, and callbacks have heard which."""
        driver, sender = self._driver, self._sender
        deadline = math.inf if timeout_s is None else driver.now() + timeout_s
        in_time = not sender.unbatched or driver.have(lambda: not sender.unbatched, deadline)
        with driver.lock:
            mark = sender.begin_flush()
        if not in_time or not driver.have(lambda: sender.flushed(mark), deadline):
            raise RequestTimedOut(
                f"{sender.quota.records + sender.unbatched} records are not acknowledged after {timeout_s} s and still "
                "under way: wait longer, or look at the brokers"
            )
        if not driver.callbacks_ended(deadline):
            raise RequestTimedOut(f"callbacks have not ended after {timeout_s} s: let them do less, or wait longer")

    def metrics(self) -> dict[str, int]:
        """Counts of records by fate, of batches, bytes and requests, and what waits now."""
        return self._sender.metrics()

    def close(self, timeout_s: float | None = None) -> None:
        """Send what waits, for at most `timeout_s`, and let go of the connections. What is left over fails. An open
        transaction is aborted; one that is prepared stays so; one that is being committed is waited for, and if it is
        not committed, this says so.

        A close that is interrupted gives up at once what is left.
        """
        if self._closed:
            return
        core, before = self._sender.transactions, self._committing
        try:
            if before is not None:
                before.wait(timeout_s)
            if core is not None and core.is_open:
                self._abandon(core, timeout_s)
            self._appender.refuse()
            self.flush(timeout_s)
        except RequestTimedOut as late:
            if before is not None and not before.is_settled:
                words = "the producer was closed before it was known whether its last transaction is committed"
                raise TransactionInDoubt(f"{words}: {late}", late) from None
        finally:
            self._let_go()

    def _abandon(self, core: TransactionCore, timeout_s: float | None) -> None:
        """Abort the transaction that is open. If that does not succeed, its timeout will."""
        try:
            with self._driver.lock:
                core.begin_abort()
            self.flush(timeout_s)
            self._transact(partial(core.end, commit=False), timeout_s)
        except RequestTimedOut:
            raise
        except HeadraceError as error:
            log.warning("the open transaction of %r was not aborted: %s", core.transactional_id, error)

    def _let_go(self) -> None:
        with self._driver.lock:
            if self._closed:
                return
            self._appender.close()
            self._sender.close(ProducerClosed("the producer was closed before that"))
            self._closed = True
        try:
            self._driver.wake()
        finally:
            self._pool.release()
