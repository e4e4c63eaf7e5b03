# Made by tools/unasync.py of src/headrace/client/consumer/listener.py: change that one, then run `make unasync`.
"""Push on asyncio: an async function is called for every record, by several tasks; progress follows what is done.

One task polls: it reads ahead and takes part in the group. The others call the listener. A second consumer of the
same group reads the retry topic, where there is one, with a task of its own; what is due there is done by the same
tasks. A record is done when its listener has returned, or when the retry or dead-letter topic has acknowledged it.

When the group rebalances, nothing new is begun, what is running is finished (for a while at most), and then partitions
are given up with their exact progress.

Locks: the reactor's first, then the workload's (`_changed`); nobody calls a listener or the network with the latter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from headrace.aio.producer import Producer
from headrace.aio.tasks import Condition, Crew, Driver, Event, Listener, Work, blocking, call
from headrace.client.consumer.core import ConsumerCore
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.progress import Offsets
from headrace.client.consumer.retries import (
    LARGEST_BYTES,
    Failure,
    OutgoingRecord,
    failure_policy,
    make_topic,
    retry_options,
)
from headrace.client.consumer.workload import Job, Share, Workload, share_of
from headrace.errors import HeadraceError, SettingError
from headrace.records.consumer_records import ReceivedRecord

CHUNK_RECORDS: Final = 500
POLL_WAIT_S: Final = 1.0
"""How long a consumer waits for records before it looks at its partitions again."""
JOIN_S: Final = 30.0
GRACE_S: Final = 30.0
"""How long a rebalance waits for what is being worked on, at most."""

log = logging.getLogger(__name__)


class Source:
    """Where records come from: a consumer, polled by one task."""

    def __init__(self, driver: Driver, core: ConsumerCore) -> None:
        self.core = core
        self.held: frozenset[TopicPartition] = frozenset()
        """Partitions of which nothing is taken now."""
        self.share = Share(1, 1)
        """What of each is taken in before it is held."""
        self.failures: dict[TopicPartition, HeadraceError] = {}
        self._driver = driver

    async def take(
        self, most: int, wait_s: float, put: Callable[[list[ReceivedRecord]], None], enough: Callable[[], bool]
    ) -> None:
        """Put up to `most` records, those that are there or the first that come, unless `enough` comes first."""
        driver, core = self._driver, self.core

        def taken() -> bool:
            # In one go with putting, so that no partition can go in between.
            records: list[ReceivedRecord] = []
            if core.must_tell:
                return False
            core.collector.take(records, most, self.share.size_bytes)
            if records:
                put(records)
                core.end()
            return bool(records)

        with driver.lock:
            core.begin()
            at_once = taken()
        if at_once:
            await driver.turn()
            return
        # A partition that failed is no reason to wake up: it stays so.
        await driver.wait(
            lambda: core.collector.ready or core.error is not None or core.must_tell or enough(), driver.now() + wait_s
        )
        with driver.lock:
            if not taken():
                core.end()
                core.raise_final_error()

    async def step_aside(self) -> None:
        await self.tell()
        with self._driver.lock:
            self.core.step_aside()
        await self._driver.turn()

    async def tell(self) -> None:
        """Call the application back about its partitions."""
        try:
            await self._driver.tell(self.core)
        except Exception:
            log.exception("a callback of a rebalance failed; the rebalance goes on")

    def hold(self, is_held: Callable[[TopicPartition], bool]) -> None:
        """Pause those partitions, and no others."""
        with self._driver.lock:
            self.held = self.core.hold(is_held)
            self.failures = self.core.failures(self.failures)


class Listening:
    """Made by `Consumer.listen`. Ends with `close`, or by itself when the group refuses this consumer for good: it has
    left the group then. A partition that cannot be read on holds up no other; see `failures`.
    """

    def __init__(
        self,
        driver: Driver,
        core: ConsumerCore,
        close: Work,
        listener: Listener,
        *,
        tasks: int,
        ordered: bool,
        max_tries: int | None,
        delays_ms: Sequence[int],
        pause_ms: int,
    ) -> None:
        if tasks < 1:
            raise SettingError(f"tasks is {tasks}, and has to be 1 or more")
        self._driver = driver
        self._close_consumer = close
        self._listener = listener
        self._policy = failure_policy(
            core.options, ordered=ordered, max_tries=max_tries, delays_ms=delays_ms, pause_ms=pause_ms
        )
        self._load = Workload(ordered=ordered)
        self._changed = Condition()
        self._workers = tasks
        self._stopping = False
        self._ended = Event()
        self.error: Exception | None = None
        """What ended it, other than `close`."""
        self._producer: Producer | None = None
        self._made: set[str] = set()
        """Topics for what failed that are known to be there."""
        self.retries: ConsumerCore | None = None
        """Of the retry topic."""
        self._sources = [Source(driver, core)]
        self._crew = Crew()
        self._open()

    def _open(self) -> None:
        core, rules = self._sources[0].core, self._policy.rules
        options = core.options
        if rules is not None:
            self._producer = Producer(
                options.bootstrap, client_id=options.client_id, tls=options.tls, max_record_bytes=LARGEST_BYTES
            )
        if rules is not None and self._policy.retries_elsewhere:
            with self._driver.lock:
                self.retries = ConsumerCore(core.pool, retry_options(options, rules), self._driver.changed)
                self.retries.start()
            self._sources.append(Source(self._driver, self.retries))
        with self._driver.lock:
            for source in self._sources:
                source.core.track_by(self)
        for source in self._sources:
            self._crew.start(partial(self._run, partial(self._poll, source)))
        for _ in range(self._workers):
            self._crew.start(partial(self._run, self._work))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended; False if it still goes on. Raises what ended it."""
        ended = await self._ended.wait(timeout_s)
        if self.error is not None:
            raise self.error
        return ended

    @property
    def failures(self) -> dict[TopicPartition, HeadraceError]:
        """Partitions that are assigned and cannot be read on, with the reason, which the log has too."""
        return {place: failure for source in self._sources for place, failure in source.failures.items()}

    async def close(self) -> None:
        """Finish what is running, save progress, leave the group: closes the consumer. What was only read ahead comes
        again elsewhere.
        """
        await self._close_consumer()

    async def halt(self) -> None:
        """All but the consumer itself, which is closed next."""
        self.stop()
        await self.join(self._driver.now() + JOIN_S)
        if self.retries is not None:
            await self._leave(self.retries, JOIN_S)
        if self._producer is not None:
            await self._producer.close()
        self._ended.set()

    def stop(self) -> None:
        """Begin nothing new."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._driver.wake()

    async def join(self, deadline: float) -> None:
        """After `stop`: until what is running has ended."""
        await self._crew.join(deadline)

    # What the consumers ask, under the reactor's lock.

    def positions(self) -> Offsets:
        with self._changed:
            return self._load.positions()

    def drop(self, places: Iterable[TopicPartition]) -> None:
        with self._changed:
            self._load.drop(places)
            self._changed.notify_all()

    def when_idle(self, fn: Callable[[], None]) -> None:
        with self._changed:
            if not self._load.pending and not self._load.running:
                fn()

    # Polling.

    async def _run(self, work: Work) -> None:
        try:
            await work()
        except Exception as error:
            log.error("listening has ended: %s", error, exc_info=not isinstance(error, HeadraceError))
            self.error = self.error or error
            self.stop()
            for source in self._sources:
                # A member that reads nothing would keep its partitions from the others.
                if source.core.options.mode == "cluster" and source.core.options.group:
                    await self._leave(source.core, JOIN_S)
            self._ended.set()

    async def _leave(self, core: ConsumerCore, within_s: float) -> None:
        """Save what is done, and leave the group; again is harmless."""
        results: list[HeadraceError | None] = []

        def done(error: HeadraceError | None) -> None:
            results.append(error)
            self._driver.changed()

        with self._driver.lock:
            core.close(handed_out=False, on_done=done)
        if not await self._driver.wait(lambda: bool(results), self._driver.now() + within_s):
            log.warning("the group could not be left in %g s; its members notice by themselves", within_s)
        elif results[0] is not None:
            log.warning("progress was not saved when the group was left, and comes again: %s", results[0])

    async def _poll(self, source: Source) -> None:
        while not self._stopping:
            if source.core.rebalance_waits:
                await self._step_aside(source)
            elif source.core.must_tell:
                await source.tell()
            else:
                core = source.core
                source.share = share_of(
                    self._workers, len(core.assigned), core.options.buffer_bytes, retried=core is self.retries
                )
                source.hold(partial(self._is_held, source))
                await self._take(source)

    def _is_held(self, source: Source, place: TopicPartition) -> bool:
        if place in source.held:
            return not self._load.has_room(place, source.share)
        return self._load.is_full(place, source.share)

    async def _take(self, source: Source) -> None:
        def put(records: list[ReceivedRecord]) -> None:
            retried = source.core is self.retries
            with self._changed:
                if retried:
                    self._load.put_retries(records, self._driver.now())
                else:
                    self._load.put_records(records)
                self._changed.notify_all()

        def enough() -> bool:
            has_room = any(self._load.has_room(place, source.share) for place in source.held)
            return self._stopping or source.core.rebalance_waits or has_room

        await source.take(CHUNK_RECORDS, POLL_WAIT_S, put, enough)

    async def _step_aside(self, source: Source) -> None:
        """A rebalance waits: let what is running finish, then give up what is asked for."""
        with self._changed:
            self._load.holds += 1
        try:
            with self._changed:
                await self._changed.wait_for(lambda: not self._load.running or self._stopping, GRACE_S)
            await source.step_aside()
        finally:
            with self._changed:
                self._load.holds -= 1
                self._changed.notify_all()

    # Working.

    async def _work(self) -> None:
        while (job := await self._next()) is not None:
            failure = None
            if job.outgoing is None:
                failure = await call(self._listener, self._policy, job)
            await self._settle(job, failure)

    async def _next(self) -> Job | None:
        with self._changed:
            while not self._stopping:
                now = self._driver.now()
                job = self._load.next(now)
                if job is not None:
                    return job
                next_at = self._load.next_at()
                await self._changed.wait(None if next_at is None or self._load.holds else max(0.0, next_at - now))
        return None

    async def _settle(self, job: Job, failure: Failure | None) -> None:
        after = None
        if failure is not None and self._load.is_current(job):
            after = self._policy.after_failure(job, failure)
        if job.outgoing is not None:
            after = await self._send(job, job.outgoing)
        with self._changed:
            if after is None:
                self._load.done(job)
            else:
                self._load.again(job, self._driver.now() + after)
            self._changed.notify_all()
        for source in self._sources:
            if job.place in source.held and self._load.has_room(job.place, source.share):
                self._driver.wake()

    async def _send(self, job: Job, outgoing: OutgoingRecord) -> float | None:
        """None once it is acknowledged; else how long to wait before it is sent again."""
        options, rules, topic = self._sources[0].core.options, self._policy.rules, outgoing.topic
        assert self._producer is not None
        assert rules is not None
        try:
            if topic not in self._made:
                await blocking(make_topic, options, rules, topic)
                self._made.add(topic)
            await self._producer.send(
                topic, outgoing.value, key=outgoing.key, headers=outgoing.headers, partition=outgoing.partition
            )
        except HeadraceError as error:
            self._made.discard(topic)
            return self._policy.after_refusal(job, outgoing, error)
        return None
