"""What the consumer and its listeners need of asyncio: the names of `headrace.client.consumer.threads`, with coroutines
where those block.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Final, ParamSpec, TypeVar

from headrace.aio.reactor import AsyncioReactor, Waiters, wake
from headrace.client.connection.connections import ConnectionPool, shared
from headrace.client.consumer.rebalance_notices import Notifier, T
from headrace.client.consumer.retries import ASKED_LATER, LATER, Failure, FailurePolicy
from headrace.client.consumer.threads import ConnectionOptions, Core
from headrace.client.consumer.workload import Job
from headrace.errors import HeadraceError
from headrace.records.consumer_records import ReceivedRecord

TURN_S: Final = 0.0005
"""While records are there, others on the loop run no more seldom than this."""

Work = Callable[[], Coroutine[None, None, None]]
Listener = Callable[[ReceivedRecord], Awaitable[object]]
"""What `listen` calls for every record."""

P = ParamSpec("P")
Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Driver(Waiters):
    """How one consumer waits: the loop drives."""

    def __init__(self, reactor: AsyncioReactor) -> None:
        super().__init__(reactor)
        self._ceded_at = 0.0

    async def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        came = await self.have(done, deadline)
        self._ceded_at = self.now()
        return came

    def wake(self) -> None:
        """Whoever waits looks again."""
        self.changed()

    async def turn(self) -> None:
        """Let the others on the loop run once, what is ready among them."""
        await asyncio.sleep(0)
        self._ceded_at = self.now()

    async def cede(self) -> None:
        """Let others run before records are taken, also while there are always some: never after, as a task that is
        cancelled there would lose what was taken.
        """
        if self.now() - self._ceded_at >= TURN_S:
            await self.turn()

    async def tell(self, core: Notifier[T], *, closing: bool = False) -> None:
        """Call the application back about its partitions, here and now; raises what it raises."""
        while (notice := core.next_notice(closing=closing)) is not None:
            try:
                result = notice.tell()
                if inspect.isawaitable(result):
                    await result
            finally:
                core.told(notice)

    def drive(self) -> None:
        """Look after the network: the loop does."""


class Condition:
    """As `threading.Condition` for the tasks of one loop, which need no lock."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[bool]] = set()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    async def wait(self, timeout_s: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        self._waiting.add(woken)
        timer = None if timeout_s is None else loop.call_later(timeout_s, wake, woken, False)
        try:
            await woken
        finally:
            self._waiting.discard(woken)
            if timer is not None:
                timer.cancel()

    async def wait_for(self, done: Callable[[], bool], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not done() and (left_s := deadline - loop.time()) > 0:
            await self.wait(left_s)

    def notify_all(self) -> None:
        for woken in self._waiting:
            wake(woken, True)


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class Crew:
    """The tasks of a listener."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Work) -> None:
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def join(self, deadline: float) -> None:
        """Until the others have ended; those that do not are cancelled."""
        others = self._tasks - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
            for task in late:
                task.cancel()


def connect(options: ConnectionOptions) -> tuple[ConnectionPool, Driver]:
    reactor = AsyncioReactor.of_running_loop()
    pool = shared(options.bootstrap, client_id=options.client_id, tls=options.tls, reactor=reactor)
    return pool, Driver(reactor)


async def blocking(fn: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
    """Call what blocks, in a thread."""
    return await asyncio.to_thread(fn, *args, **options)


async def call(listener: Listener, policy: FailurePolicy, job: Job) -> Failure | None:
    """None if the record is done, else what is wrong."""
    try:
        result: object = listener(policy.shown(job))
        if inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Failure("what the listener waited for was cancelled")
    except Exception as error:  # noqa: BLE001 - a listener may raise anything
        return Failure.of(error)
    return ASKED_LATER if result is LATER else None


def end_with_program(
    core: Core,
    _driver: Driver,
    _listening: object,
    _leave: Callable[[list[Core], Callable[[HeadraceError | None], None]], None],
    _since: float,
) -> Iterator[None]:
    """What a consumer does that was not closed: without its loop, nothing but a word in the log."""
    log.warning(
        "a consumer of group %s was not closed, and its loop has ended: others get its partitions when its session "
        "is over, and what it did since it last saved progress comes again; `await consumer.close()`",
        core.options.group,
    )
    yield from ()
