"""A server as a process of its own: its loop, its signals, the line that says where it listens, its background tasks.

A broker and a registry differ in what they build; how they are started, watched over and stopped is the same.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

import uvloop

from headrace import __version__, logs
from headrace.kafka.listeners import DEFAULT_NAME
from headrace.ports.network import Address
from headrace.settings.values import BrokerSettings

log = logging.getLogger(__name__)

STOP_SECONDS: Final = 30.0
GC_ALLOCATIONS: Final = 50_000

Failed = Callable[[BaseException], None]


class Server(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None:
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

    def stop(error: BaseException | None = None) -> None:
        if not stopping.done():
            stopping.set_result(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    server = make(loop, stop)
    try:
        if await _started(server, stopping):
            _quieten_collector()
            _say_ready(server)
        error = await stopping
        if error is not None:
            log.error("stopping: a part of the server failed: %r", error, exc_info=error)
    finally:
        await asyncio.wait_for(server.stop(), STOP_SECONDS)
    return 0 if error is None else 1


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
