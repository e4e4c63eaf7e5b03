"""The public producer for asyncio: the same sender as for threads, on the running loop.

    async with Producer("127.0.0.1:9092") as producer:
        report = await producer.send("orders", b"...", key=b"42")
        delivery = producer.send_async("orders", b"...")    # await delivery, or let its callback hear
        await producer.flush()

`send_async` never waits: records for a topic that is not known yet are set aside, in order, until it is; where the
queue is full and the policy is to wait, it raises QueueFull, and `await send(...)` waits instead.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack

from headrace.aio.reactor import AsyncioReactor
from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.connection.connections import shared
from headrace.client.producer.accumulator import FIND_WITHIN_S, Need, ProduceResult, not_heard_of
from headrace.client.producer.errors import ProducerClosed, QueueFull
from headrace.client.producer.options import OptionFields, Options
from headrace.client.producer.sender import Sender
from headrace.errors import HeadraceError, InvalidRecord, RequestTimedOut
from headrace.records.builder import Delivery, Report, SentBatch
from headrace.records.record import Header

ASIDE_MAX: Final = 10_000
ONE_WAY: Final = 0

Put = Callable[[], Delivery]


class _WouldWait(Exception):
    def __init__(self, need: Need, done: Callable[[], bool], deadline: float) -> None:
        super().__init__()
        self.need = need
        self.done = done
        self.deadline = deadline


class _LoopDriver:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[bool]]] = []

    def until(self, need: Need, done: Callable[[], bool], deadline: float) -> bool:
        if done():
            return True
        if self._loop.time() >= deadline:
            return False
        raise _WouldWait(need, done, deadline)

    def turn(self) -> None:
        """The loop does it."""

    def changed(self) -> None:
        for done, future in self._waiting:
            if not future.done() and done():
                future.set_result(True)

    def room(self) -> None:
        self.changed()

    async def have(self, done: Callable[[], bool], deadline: float) -> bool:
        """Wait until `done()`; False at the deadline."""
        if done():
            return True
        future: asyncio.Future[bool] = self._loop.create_future()
        entry = (done, future)
        self._waiting.append(entry)
        timer = self._loop.call_at(deadline, _let_go, future) if deadline < math.inf else None
        try:
            return await future
        finally:
            self._waiting.remove(entry)
            if timer is not None:
                timer.cancel()

    def wait(self, delivery: Delivery, deadline: float | None) -> None:
        raise RuntimeError("a coroutine must not block: await the delivery instead")

    async def awaited(self, delivery: Delivery) -> Report:
        if not delivery.done:
            future: asyncio.Future[bool] = self._loop.create_future()
            delivery.add_callback(lambda _: None if future.done() else future.set_result(True))
            await future
        return delivery.result()


def _let_go(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)


class Producer:
    """As `headrace.Producer`, with the same options, for coroutines of one loop. Make it where the loop runs."""

    def __init__(
        self,
        bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP,
        *,
        client_id: str = "headrace",
        tls: ssl.SSLContext | None = None,
        **options: Unpack[OptionFields],
    ) -> None:
        checked = Options(**options)
        reactor = AsyncioReactor.of_running_loop()
        self._loop = reactor.loop
        self._network = shared(bootstrap, client_id=client_id, tls=tls, reactor=reactor)
        self._driver = _LoopDriver(self._loop)
        self._sender = Sender(self._network, checked, self._driver)
        self._router = self._sender.accumulator(checked.acks).own_router
        self._acks = checked.acks
        self._find_s = min(FIND_WITHIN_S, checked.delivery_timeout_ms / 1000)
        self._interval = checked.interval_ms > 0
        self._aside: dict[str, deque[tuple[Put, Delivery, float]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        """It takes no record any more."""
        self._released = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | None = None,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
    ) -> Report:
        """Send a record at once and wait for its acknowledgement; raises NotDelivered if there is none in time."""

        def put() -> Delivery:
            return self._router.send_async(
                topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms, acks=acks
            )

        self._check_open()
        if topic in self._aside:
            return await self._set_aside(topic, put)
        delivery = await self._put(topic, put, self._loop.time() + self._find_s)
        self._leave(delivery)
        return await delivery

    def send_async(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | None = None,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Put a record into its batch. `await` the delivery, or let `callback(delivery)` hear what becomes of it."""
        if self._interval and not self._aside and not self._closed:
            # The way of nearly every record: one call more than the router's own.
            try:
                return self._router.send_async(
                    topic,
                    value,
                    key=key,
                    headers=headers,
                    partition=partition,
                    timestamp_ms=timestamp_ms,
                    acks=acks,
                    callback=callback,
                )
            except _WouldWait as wait:
                if wait.need is Need.ROOM:
                    raise self._no_room(topic) from None
        put = partial(
            self._router.send_async,
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            acks=acks,
        )
        return self._put_now(topic, put, callback)

    def send_oneway(
        self,
        topic: str,
        value: Any,
        *,
        key: bytes | None = None,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Send a record that no broker answers for: it may be lost without a sign."""
        self.send_async(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms, acks=ONE_WAY
        )

    def send_ordered(
        self,
        topic: str,
        value: Any,
        order_key: bytes,
        *,
        key: bytes | None = None,
        headers: Sequence[Header] | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Send in the order of `order_key`, which alone chooses the partition; see `headrace.Producer`."""

        def put() -> Delivery:
            return self._sender.accumulator(self._acks if acks is None else acks, ordered=True).append_ordered(
                topic,
                value,
                order_key,
                key=key,
                headers=headers,
                timestamp_ms=timestamp_ms,
                callback=None,
            )

        return self._put_now(topic, put, callback)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent so far is acknowledged or has failed; deliveries say which."""
        deadline = math.inf if timeout_s is None else self._loop.time() + timeout_s
        in_time = await self._driver.have(lambda: not self._aside, deadline)
        mark = self._sender.begin_flush()
        if not in_time or not await self._driver.have(lambda: self._sender.flushed(mark), deadline):
            raise RequestTimedOut(
                f"{self._sender.quota.records + self._sender.unbatched} records are not acknowledged after "
                f"{timeout_s} s and still under way: wait longer, or look at the brokers"
            )

    def metrics(self) -> dict[str, int]:
        """Counts of records by fate, of batches, bytes and requests, and what waits now."""
        return self._sender.metrics()

    async def close(self, timeout_s: float | None = None) -> None:
        """Send what waits, for at most `timeout_s`, and let go of the connections. What is left over fails.

        A close that is cancelled gives up at once what is left.
        """
        if self._released:
            return
        self._closed = True
        try:
            await self.flush(timeout_s)
        except RequestTimedOut:
            pass
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._released:
            return
        self._released = True
        self._sender.refuse(ProducerClosed("the producer is closed; make a new one"))
        for task in self._tasks:
            task.cancel()
        self._sender.close(ProducerClosed("the producer was closed before that"))
        self._network.release()

    def _put_now(self, topic: str, put: Put, callback: Callable[[Delivery], object] | None) -> Delivery:
        self._check_open()
        if topic in self._aside:
            delivery = self._set_aside(topic, put)
        else:
            try:
                delivery = put()
            except _WouldWait as wait:
                if wait.need is Need.ROOM:
                    raise self._no_room(topic) from None
                delivery = self._set_aside(topic, put)
            else:
                if not self._interval:
                    self._leave(delivery)
        if callback is not None:
            delivery.add_callback(callback)
        return delivery

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosed("the producer is closed; make a new one")

    def _no_room(self, topic: str) -> QueueFull:
        quota = self._sender.quota
        return QueueFull(
            f"no record for {topic} was taken: {quota.records} records, {quota.bytes} bytes wait for their "
            "acknowledgement; `await producer.send(...)` or `await producer.flush()` waits for room"
        )

    async def _put(self, topic: str, put: Put, find_until: float) -> Delivery:
        """Put a record into its batch, waiting for what stands in its way; for its topic until `find_until`."""
        while True:
            try:
                return put()
            except _WouldWait as wait:
                room = wait.need is Need.ROOM
                found = await self._driver.have(wait.done, wait.deadline if room else min(wait.deadline, find_until))
                if not found and room:
                    return self._sender.accumulator(self._acks).drop(topic)
                if not found and self._loop.time() >= find_until:
                    raise not_heard_of(topic, self._find_s) from None

    def _set_aside(self, topic: str, put: Put) -> Delivery:
        """Keep a record until its topic is known, and those before it are in their batches."""
        if self._sender.unbatched >= ASIDE_MAX:
            raise QueueFull(f"{ASIDE_MAX} records wait for topics that are not known yet: await one of them first")
        delivery = Delivery(SentBatch(topic, -1, self._sender), 0, -1)
        self._sender.unbatched += 1
        record = (put, delivery, self._loop.time() + self._find_s)
        if topic in self._aside:
            self._aside[topic].append(record)
            return delivery
        self._aside[topic] = deque([record])
        task = self._loop.create_task(self._take_up(topic))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return delivery

    async def _take_up(self, topic: str) -> None:
        """Put what was set aside into batches, in order; the deliveries given out hear of the real ones."""
        aside = self._aside[topic]
        try:
            while aside:
                put, delivery, find_until = aside[0]
                try:
                    real = await self._put(topic, put, find_until)
                    delivery.timestamp_ms = real.timestamp_ms
                    real.add_callback(partial(_pass_on, sent=delivery.sent))
                except HeadraceError as error:
                    delivery.sent.fail(error)
                    delivery.sent.tell()
                except Exception as error:  # noqa: BLE001 - what an encoder raises is for this record alone
                    refused = InvalidRecord(f"a record for {topic} cannot be sent: {error}")
                    refused.__cause__ = error
                    delivery.sent.fail(refused)
                    delivery.sent.tell()
                aside.popleft()
                self._sender.unbatched -= 1
        finally:
            for _, delivery, _ in aside:
                delivery.sent.fail(ProducerClosed("the producer was closed"))
                delivery.sent.tell()
                self._sender.unbatched -= 1
            del self._aside[topic]
            self._driver.changed()

    def _leave(self, delivery: Delivery) -> None:
        sent = delivery.sent
        if isinstance(sent, ProduceResult) and sent.pending is not None:
            self._sender.leave_now(sent.pending)


def _pass_on(real: Delivery, sent: SentBatch) -> None:
    error = real.exception()
    if error is not None:
        sent.fail(error)
    else:
        report = real.result()
        sent.partition = report.partition
        sent.finish(report.offset, report.timestamp_ms)
    sent.tell()
