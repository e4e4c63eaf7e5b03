"""A server as a process of its own: its loop, its signals, the line that says where it listens, its background tasks.

A broker and a registry differ in what they build; how they are started, watched over and stopped is the same.

    SIGTERM, SIGINT   stop in order, within STOP_SECONDS
    SIGINT again      end at once; the next start recovers what was open
    SIGTERM again     nothing but a line: whoever wants no order has SIGKILL
    SIGHUP            a terminal that is gone is a reason to stop; a service has none, and rereads nothing
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol

import uvloop

from headrace import __version__, logs
from headrace.kafka.listeners import DEFAULT_NAME
from headrace.ports.network import Address
from headrace.server import first_process
from headrace.server.supervisor import Supervisor
from headrace.settings.values import BrokerSettings

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 30.0
GC_ALLOCATIONS: Final = 50_000
INTERRUPTED: Final = 130
TERMINAL: Final = "/dev/tty"
RECOVERED: Final = "the next start looks through what was open"

Failed = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Ending:
    closed: str
    """What was closed, for the log."""
    undone: str = ""
    """What could not be left as it should be; empty: all is clean."""


class Server(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> Ending:
        """Safe at any point of a start that failed."""
        ...

    def listening(self) -> list[str]:
        """Words of the ready line: `kafka=HOST:PORT` and so on."""
        ...

    def described(self) -> str:
        """What runs here, for the log."""
        ...


def run(settings: BrokerSettings, make: Callable[[asyncio.AbstractEventLoop, Failed], Server]) -> int:
    """Serve until SIGTERM or SIGINT, or until a part calls `failed`; the exit code."""
    logs.setup(settings["log.format"], settings["log.level"])
    return uvloop.run(_serve(make))


async def _serve(make: Callable[[asyncio.AbstractEventLoop, Failed], Server]) -> int:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[BaseException | None] = loop.create_future()
    supervisor = Supervisor(loop)

    def stop(error: BaseException | None = None) -> None:
        if not stopping.done():
            stopping.set_result(error)
            supervisor.stopping("asked to" if error is None else "a part of the server failed")

    first_process.reap_orphans()
    _handle_signals(loop, stop)
    supervisor.starting()
    server = make(loop, stop)
    stood = False
    try:
        if await _started(server, stopping):
            _quieten_collector()
            _say_ready(server)
            supervisor.ready(" ".join(server.listening()))
        error = await stopping
        stood = True
        if error is not None:
            log.error("stopping: a part of the server failed: %r", error, exc_info=error)
    finally:
        ended = await _stopped(server, supervisor, quiet=not stood)
    return 0 if error is None and ended else 1


async def _stopped(server: Server, supervisor: Supervisor, *, quiet: bool) -> bool:
    """Whether all is closed in order, which is said; of a start that failed, who started it says why."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            ending = await server.stop()
    except TimeoutError:
        ending = Ending("", f"it took more than {STOP_SECONDS:g} s; {RECOVERED}")
    took = f"{time.monotonic() - began:.2f} s"
    if ending.undone:
        log.error("not stopped cleanly after %s: %s", took, ending.undone)
    elif not quiet:
        log.info("stopped cleanly: %s in %s", ending.closed, took)
    supervisor.ended("not stopped cleanly" if ending.undone else "stopped cleanly")
    return not ending.undone


def _handle_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    asked: list[str] = []

    def end(name: str) -> None:
        if asked:
            log.warning("%s again: stopping since %s, for at most %g s", name, asked[0], STOP_SECONDS)
            return
        asked.append(name)
        log.info("stopping: %s", name)
        # Not a handler of the loop: closing logs may hold that up.
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, _end_at_once)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number.name)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: it is to go on
        has_terminal = _has_terminal()
        loop.add_signal_handler(signal.SIGHUP, end if has_terminal else _nothing_reread, signal.SIGHUP.name)


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    log.error("not stopped cleanly: interrupted again; %s", RECOVERED)
    os._exit(INTERRUPTED)


def _nothing_reread(name: str) -> None:
    log.warning("%s is passed over: settings are read at the start; `headrace config set` changes some at once", name)


def _has_terminal() -> bool:
    try:
        os.close(os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _started(server: Server, stopping: asyncio.Future[BaseException | None]) -> bool:
    """False when a signal, or a part that failed, ended it before it stood: a start may wait for others for long."""
    starting = asyncio.ensure_future(server.start())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    starting.cancel()  # nothing, once it is done
    await asyncio.wait((starting,))
    if starting.cancelled():
        log.info("stopped while it started")
        return False
    starting.result()
    return True


def _quieten_collector() -> None:
    """What stands after the start stands for good; looking through it again and again would only stop the loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    gc.enable()


def _say_ready(server: Server) -> None:
    """One line on standard output for people and scripts: where to connect."""
    sys.stdout.write(" ".join(("ready", *server.listening(), f"pid={os.getpid()}")) + "\n")
    sys.stdout.flush()
    log.info("headrace %s on %s, %s", __version__, socket.gethostname(), server.described())


def where(kafka: Mapping[str, Address], http: Address | None) -> list[str]:
    """Listeners as the ready line names them."""
    words = [("kafka=" if name == DEFAULT_NAME else f"kafka.{name}=") + str(at) for name, at in kafka.items()]
    return words if http is None else [*words, f"http={http}"]


class OwnedTasks:
    """Coroutines in the background, held and watched: one that dies of something unforeseen is told to `failed`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Failed) -> None:
        self._loop = loop
        self._failed = failed
        self._under_way: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._done)

    def cancel(self) -> None:
        for task in list(self._under_way):
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
