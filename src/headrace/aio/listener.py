"""Push on asyncio: a coroutine function is called for every record, by several tasks; progress follows what is done.

The same as `headrace.client.consumer.listener` has for threads, with tasks of the running loop: one feeds, another
feeds from the retry topic where there is one, the others call the listener.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from time import monotonic
from types import TracebackType
from typing import Final, Self

from headrace.aio.producer import Producer
from headrace.client.consumer.core import ConsumerCore
from headrace.client.consumer.failure_policy import (
    LARGEST_BYTES,
    LATER,
    failure_policy,
    make_topics,
    retry_options,
)
from headrace.client.consumer.group_protocol import Place
from headrace.client.consumer.progress import Offsets
from headrace.client.consumer.redelivery import OutgoingRecord
from headrace.client.consumer.workload import Job, Share, Workload, share_of
from headrace.errors import HeadraceError, SettingError
from headrace.records.consumer_records import ReceivedRecord

CHUNK: Final = 500
FEED_WAIT_S: Final = 0.2
JOIN_S: Final = 30.0
GRACE_S: Final = 30.0
"""How long a rebalance waits for what is being worked on, at most."""

Listener = Callable[[ReceivedRecord], Awaitable[object]]

log = logging.getLogger(__name__)


class Listening:
    """Made by `Consumer.listen`. Ends with `close`, or by itself when the group refuses this consumer for good: it has
    left the group then. A partition that cannot be read on holds up no other; see `failures`.
    """

    def __init__(
        self,
        core: ConsumerCore,
        close: Callable[[], Awaitable[None]],
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
        self._core = core
        self._close_consumer = close
        self._listener = listener
        self._policy = failure_policy(
            core.options, ordered=ordered, max_tries=max_tries, delays_ms=delays_ms, pause_ms=pause_ms
        )
        self._load = Workload(ordered=ordered)
        self._workers = tasks
        self._waiting: set[asyncio.Future[None]] = set()
        self._stopping = False
        self._ended = asyncio.Event()
        self.error: BaseException | None = None
        """What ended it, other than `close`."""
        self._failures: dict[ConsumerCore, dict[Place, HeadraceError]] = {}
        self._producer: Producer | None = None
        self._retries: ConsumerCore | None = None
        core.track_by(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._run(self._begin())
        for _ in range(tasks):
            self._run(self._work())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def wait(self) -> None:
        """Until it has ended. Raises what ended it."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    @property
    def failures(self) -> dict[Place, HeadraceError]:
        """Partitions that are assigned and cannot be read on, with the reason, which the log has too."""
        return {place: failure for found in self._failures.values() for place, failure in found.items()}

    async def close(self) -> None:
        """Finish what is running, save progress, leave the group: closes the consumer. What was only read ahead comes
        again elsewhere.
        """
        await self._close_consumer()

    async def halt(self) -> None:
        """All but the consumer itself, which is closed next."""
        self._stop()
        others = self._tasks - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=JOIN_S)
            for task in late:
                task.cancel()
        if self._retries is not None:
            await self._leave(self._retries)
        if self._producer is not None:
            await self._producer.close()
        self._ended.set()

    # What the consumers ask.

    def positions(self) -> Offsets:
        return self._load.positions()

    def drop(self, places: Iterable[Place]) -> None:
        self._load.drop(places)
        self.ring()

    def when_idle(self, fn: Callable[[], None]) -> None:
        if not self._load.pending and not self._load.running:
            fn()

    def ring(self) -> None:
        """Something has changed: whoever waits looks again."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # Feeding.

    async def _begin(self) -> None:
        options, rules = self._core.options, self._policy.rules
        if rules is not None:
            await asyncio.to_thread(make_topics, options, rules, retry=self._policy.retries_elsewhere)
            self._producer = Producer(
                options.bootstrap, client_id=options.client_id, tls=options.tls, max_record_bytes=LARGEST_BYTES
            )
        if rules is not None and self._policy.retries_elsewhere:
            self._retries = ConsumerCore(self._core.network, retry_options(options, rules), self.ring)
            self._retries.track_by(self)
            self._retries.start()
            self._run(self._feed(self._retries))
        await self._feed(self._core)

    async def _feed(self, core: ConsumerCore) -> None:
        held: frozenset[Place] = frozenset()
        share = Share(1, 1)

        def is_held(place: Place) -> bool:
            return not self._load.has_room(place, share) if place in held else self._load.is_full(place, share)

        def has_room() -> bool:
            return any(self._load.has_room(place, share) for place in held)

        while not self._stopping:
            if core.wants_touch:
                await self._step_aside(core)
            else:
                share = share_of(
                    self._workers, len(core.assigned), core.options.buffer_bytes, retried=core is self._retries
                )
                held = core.hold(is_held)
                self._failures[core] = core.failures(self._failures.get(core, {}))
                await self._take(core, has_room, share.size_bytes)

    async def _take(self, core: ConsumerCore, has_room: Callable[[], bool], most_bytes: int) -> None:
        def taken() -> bool:
            records: list[ReceivedRecord] = []
            core.collector.take(records, CHUNK, most_bytes)
            if records:
                retried = core is self._retries
                if retried:
                    self._load.put_retries(records, monotonic())
                else:
                    self._load.put_records(records)
                core.end()
                self.ring()
            return bool(records)

        core.begin()
        if taken():
            await asyncio.sleep(0)
            return

        def enough() -> bool:
            # A partition that failed is no reason to wake up: it stays so.
            return core.collector.ready or core.error is not None or self._stopping or core.wants_touch or has_room()

        await self._until(enough, FEED_WAIT_S)
        if not taken():
            core.end()
            core.raise_final_error()

    async def _step_aside(self, core: ConsumerCore) -> None:
        """A rebalance waits: let what is running finish, then give up what is asked for."""
        self._load.holds += 1
        try:
            await self._until(lambda: not self._load.running or self._stopping, GRACE_S)
            core.step_aside()
        finally:
            self._load.holds -= 1
            self.ring()

    # Working.

    async def _work(self) -> None:
        while (job := await self._next()) is not None:
            await self._settle(job, await self._call(job) if job.outgoing is None else None)

    async def _next(self) -> Job | None:
        while not self._stopping:
            job = self._load.next(monotonic())
            if job is not None:
                return job
            next_at = self._load.next_at()
            await self._rung(None if next_at is None or self._load.holds else max(0.0, next_at - monotonic()))
        return None

    async def _call(self, job: Job) -> str | None:
        """None if it is done, else what is wrong."""
        try:
            result: object = self._listener(self._policy.shown(job))
            if inspect.isawaitable(result):
                result = await result
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return "what the listener waited for was cancelled"
        except Exception as error:  # noqa: BLE001 - a listener may raise anything
            return f"{type(error).__name__}: {error}"
        return "the listener asked for it later" if result is LATER else None

    async def _settle(self, job: Job, error: str | None) -> None:
        after = None
        if error is not None and self._load.is_current(job):
            after = self._policy.after_failure(job, error)
        if job.outgoing is not None:
            after = await self._send(job, job.outgoing)
        if after is None:
            self._load.done(job)
        else:
            self._load.again(job, monotonic() + after)
        self.ring()

    async def _send(self, job: Job, outgoing: OutgoingRecord) -> float | None:
        """None once it is acknowledged; else how long to wait before it is sent again."""
        assert self._producer is not None
        try:
            await self._producer.send(
                outgoing.topic, outgoing.value, key=outgoing.key, headers=outgoing.headers, partition=outgoing.partition
            )
        except HeadraceError as error:
            return self._policy.after_refusal(job, outgoing, error)
        return None

    # Tasks.

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("listening has ended: %s", error, exc_info=None if isinstance(error, HeadraceError) else error)
            is_first, self.error = self.error is None, self.error or error
            self._stop()
            if is_first:
                self._run(self._end())

    async def _end(self) -> None:
        """After an error: a member that reads nothing would keep its partitions from the others."""
        try:
            for core in (self._core, self._retries):
                if core is not None and core.options.mode == "cluster" and core.options.group:
                    await self._leave(core)
        finally:
            self._ended.set()

    async def _leave(self, core: ConsumerCore) -> None:
        """Save what is done, and leave the group; again is harmless."""
        left = asyncio.Event()
        core.close(handed_out=False, on_done=lambda _: left.set())
        try:
            await asyncio.wait_for(left.wait(), JOIN_S)
        except TimeoutError:
            log.warning("the group could not be left in %g s; its members notice by themselves", JOIN_S)

    def _stop(self) -> None:
        self._stopping = True
        self.ring()

    async def _until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        while not done() and (left_s := deadline - monotonic()) > 0:
            await self._rung(left_s)

    async def _rung(self, timeout_s: float | None) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            self._waiting.discard(future)
