"""How records get into their batches on asyncio, where nobody may be kept waiting.

`send_async` never waits: records for a topic that is not known yet are set aside, in order, until it is; where the
queue is full and the policy is to wait, it raises QueueFull, and `await send(...)` waits instead. Has the names that
`headrace.client.producer.producer` has for threads; `tools/unasync.py` makes the asynchronous producer with them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from headrace.aio.reactor import AsyncioReactor, Waiters
from headrace.client.connection.connections import ConnectionPool, shared
from headrace.client.connection.tls import Tls
from headrace.client.errors import ProducerClosed, QueueFull
from headrace.client.producer.accumulator import Need, ProduceResult, not_heard_of
from headrace.client.producer.sender import Sender
from headrace.errors import HeadraceError, InvalidRecord
from headrace.records.builder import Delivery, Report, SentBatch
from headrace.records.record import GivenHeaders

ASIDE_MAX: Final = 10_000

Put = Callable[[], Delivery]
"""Puts a record into its batch; made again after what it would have waited for."""


class _WouldWait(Exception):
    def __init__(self, need: Need, done: Callable[[], bool], deadline: float) -> None:
        super().__init__()
        self.need = need
        self.done = done
        self.deadline = deadline


class LoopDriver(Waiters):
    """How one producer waits: the loop drives, and only coroutines wait."""

    router_encodes = False

    def until(self, need: Need, done: Callable[[], bool], deadline: float) -> bool:
        if done():
            return True
        if self.now() >= deadline:
            return False
        raise _WouldWait(need, done, deadline)

    def turn(self) -> None:
        """The loop does it."""

    def room(self) -> None:
        self.changed()

    async def callbacks_ended(self, deadline: float) -> bool:
        """The loop runs them; nobody waits for them."""
        return True

    def wake(self) -> None:
        """The loop is awake."""

    def wait(self, delivery: Delivery, deadline: float | None) -> None:
        raise RuntimeError("a coroutine must not block: await the delivery instead")

    async def awaited(self, delivery: Delivery) -> Report:
        if not delivery.done:
            future: asyncio.Future[bool] = self.reactor.loop.create_future()
            delivery.add_callback(lambda _: None if future.done() else future.set_result(True))
            await future
        return delivery.result()


class RecordAppender:
    """How records get into their batches, by coroutines of one loop."""

    def __init__(self, sender: Sender, driver: LoopDriver) -> None:
        self.router = sender.accumulator(sender.options.acks).own_router
        self._sender = sender
        self._driver = driver
        self._loop = driver.reactor.loop
        self._encoder = sender.options.encoder
        """Called here, once for a record: a put may be made again."""
        self._acks = sender.options.acks
        self._find_s = sender.options.delivery_timeout_ms / 1000
        self._interval = sender.options.interval_ms > 0
        self._aside: dict[str, deque[tuple[Put, Delivery, float]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        """It takes no record any more."""

    async def send(
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
        self._check_open()
        put = partial(
            self.router.send_async,
            topic,
            value if self._encoder is None else self._encoder(value),
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            acks=acks,
        )
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
        key: bytes | str | None = None,
        headers: GivenHeaders | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        acks: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        if self._encoder is not None:
            value = self._encoder(value)
        if self._interval and not self._aside and not self._closed:
            # The way of nearly every record: one call more than the router's own.
            try:
                return self.router.send_async(
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
        self._check_open()
        put = partial(
            self.router.send_async,
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            acks=acks,
        )
        return self._put_or_set_aside(topic, put, callback)

    send_now = send_async
    """Without an interval every record leaves at once."""

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
        """Put a record into the batch of its order key, or aside until it can be."""
        self._check_open()
        accumulator = self._sender.accumulator(self._acks if acks is None else acks, ordered=True)
        put = partial(
            accumulator.append_ordered,
            topic,
            value if self._encoder is None else self._encoder(value),
            order_key,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            callback=None,
        )
        return self._put_or_set_aside(topic, put, callback)

    def _put_or_set_aside(self, topic: str, put: Put, callback: Callable[[Delivery], object] | None) -> Delivery:
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

    def refuse(self) -> None:
        """Take no record any more; what is aside still gets into its batch."""
        self._closed = True

    def close(self) -> None:
        """What is aside fails."""
        self._sender.refuse(ProducerClosed("the producer is closed; make a new one"))
        for task in self._tasks:
            task.cancel()

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
                found = await self._driver.have(
                    partial(self._may_go_on, wait.done), wait.deadline if room else min(wait.deadline, find_until)
                )
                if not found and room:
                    return self._sender.accumulator(self._acks).drop(topic)
                if not found and self._loop.time() >= find_until:
                    raise not_heard_of(self._sender.pool, topic, self._find_s) from None

    def _may_go_on(self, done: Callable[[], bool]) -> bool:
        """What was waited for has come, or the record is refused by now."""
        return done() or self.router.closed is not None

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
                    delivery.sent.run_callbacks()
                except Exception as error:  # noqa: BLE001 - a value that is no bytes fails alone
                    refused = InvalidRecord(f"a record for {topic} cannot be sent: {error}")
                    refused.__cause__ = error
                    delivery.sent.fail(refused)
                    delivery.sent.run_callbacks()
                aside.popleft()
                self._sender.unbatched -= 1
        finally:
            for _, delivery, _ in aside:
                delivery.sent.fail(ProducerClosed("the producer was closed"))
                delivery.sent.run_callbacks()
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
    sent.run_callbacks()


def connect(bootstrap: str | Iterable[str], client_id: str, tls: Tls) -> tuple[ConnectionPool, LoopDriver]:
    reactor = AsyncioReactor.of_running_loop()
    return shared(bootstrap, client_id=client_id, tls=tls, reactor=reactor), LoopDriver(reactor)
