"""What the consumer and its listeners need of threads. `headrace.aio.tasks` has the same names for asyncio, with
coroutines where these block: `tools/unasync.py` makes the asynchronous consumer of the one that uses this module.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

from headrace.client.connection import exits
from headrace.client.connection.connections import ConnectionPool, shared
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.connection.tls import Tls
from headrace.client.consumer.rebalance_notices import Notifier, T
from headrace.client.consumer.retries import ASKED_LATER, LATER, Failure, FailurePolicy
from headrace.client.consumer.workload import Job
from headrace.errors import HeadraceError, RequestTimedOut
from headrace.records.consumer_records import ReceivedRecord

if TYPE_CHECKING:
    from headrace.client.consumer.listener import Listening

IDLE_S: Final = 3600.0
TURN_S: Final = 0.0005
"""While records are there, the network is looked after no more often than this."""

Condition = threading.Condition
Event = threading.Event
Work = Callable[[], None]
Listener = Callable[[ReceivedRecord], object]
"""What `listen` calls for every record."""

P = ParamSpec("P")
Result = TypeVar("Result")
Core = TypeVar("Core", bound="LeavingCore")


class ConnectionOptions(Protocol):
    """Of a consumer of any kind."""

    @property
    def bootstrap(self) -> str | Iterable[str]: ...
    @property
    def client_id(self) -> str: ...
    @property
    def tls(self) -> Tls: ...


class LeavingOptions(Protocol):
    @property
    def group(self) -> str | None: ...
    @property
    def exit_timeout_ms(self) -> int: ...


class LeavingCore(Protocol):
    """Of a consumer of any kind that has a group to leave."""

    @property
    def options(self) -> LeavingOptions: ...


log = logging.getLogger(__name__)


class Driver:
    """How one consumer waits: whoever waits drives the reactor meanwhile, so that no thread hands over to another."""

    def __init__(self, reactor: ThreadReactor) -> None:
        self.reactor = reactor
        self.lock = reactor.lock
        self.now = reactor.now
        self.wake = reactor.wake
        self.turn = reactor.turn
        self._turned_at = 0.0

    def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Until `done()`, which is asked under the lock after every turn; False at the deadline, or now and then."""
        return self.reactor.wait(done, self.now() + IDLE_S if deadline is None else deadline)

    def changed(self) -> None:
        """What somebody waits for may have come: the reactor asks them by itself."""

    def cede(self) -> None:
        """Let others run before records are taken: threads do by themselves."""

    def tell(self, core: Notifier[T], *, closing: bool = False) -> None:
        """Call the application back about its partitions, here and now; raises what it raises."""
        while True:
            with self.lock:
                notice = core.next_notice(closing=closing)
            if notice is None:
                return
            try:
                notice.tell()
            finally:
                with self.lock:
                    core.told(notice)

    def drive(self) -> None:
        """Look after the network, no more often than every TURN_S."""
        now = self.now()
        if now - self._turned_at >= TURN_S:
            self._turned_at = now
            self.turn()


class Crew:
    """The threads of a listener."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, work: Work) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, deadline: float) -> None:
        """Until the others have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - monotonic()))


def connect(options: ConnectionOptions) -> tuple[ConnectionPool, Driver]:
    pool = shared(options.bootstrap, client_id=options.client_id, tls=options.tls)
    assert isinstance(pool.reactor, ThreadReactor)
    return pool, Driver(pool.reactor)


def blocking(fn: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
    """Call what blocks."""
    return fn(*args, **options)


def call(listener: Listener, policy: FailurePolicy, job: Job) -> Failure | None:
    """None if the record is done, else what is wrong."""
    try:
        result = listener(policy.shown(job))
    except BaseException as error:  # noqa: BLE001 - a listener may raise anything; SystemExit ends no process here
        return Failure.of(error)
    return ASKED_LATER if result is LATER else None


def end_with_program(
    core: Core,
    driver: Driver,
    listening: Listening | None,
    leave: Callable[[list[Core], Callable[[HeadraceError | None], None]], None],
    since: float,
) -> Iterator[None]:
    """A consumer that was not closed ends: as after an error in a `with` block, the last call's records come again.

    Connections are not let go, as that may wait for callbacks: they end with the process.
    """
    options, cores, results = core.options, [core], list[HeadraceError | None]()
    within_s = options.exit_timeout_ms / 1000
    failure: BaseException | None
    try:
        if listening is None:
            leave(cores, results.append)
        else:
            listening.stop()
        yield
        if listening is not None:
            listening.join(since + exits.LISTENERS_PART * within_s)
        yield
        if listening is not None:
            retries: Any = listening.retries  # a core of the same kind
            cores += [] if retries is None else [retries]
            leave(cores, results.append)
        yield
        if not driver.wait(lambda: len(results) == len(cores), since + within_s):
            raise RequestTimedOut(f"not within {within_s * 1000:g} ms (exit_timeout_ms); close the consumer")
        failure = next((result for result in results if result is not None), None)
    except (HeadraceError, KeyboardInterrupt, SystemExit) as error:
        failure = error
    if failure is not None:
        log.warning("group %s could not be left at the end of the program: %r", options.group, failure)
