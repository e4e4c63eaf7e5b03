"""The ways to drive a connection, as one interface, so that every test of one runs on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

from headrace.aio.reactor import AsyncioReactor
from headrace.client.connection.reactor import Reactor
from headrace.client.connection.thread_reactor import ThreadReactor

WAIT_S = 20.0
KINDS = ("threads", "background", "asyncio", "uvloop")


class Driver:
    """`until(done)` drives until it holds, or fails. `background` leaves the driving to the reactor's own thread."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reactor: Reactor
        if kind in ("asyncio", "uvloop"):
            self.loop = uvloop.new_event_loop() if kind == "uvloop" else asyncio.new_event_loop()
            self.reactor = AsyncioReactor(self.loop)
        else:
            self.reactor = ThreadReactor()

    def until(self, done: Callable[[], object], within_s: float = WAIT_S) -> None:
        assert self.reached(done, within_s), f"waited {within_s} s"

    def reached(self, done: Callable[[], object], within_s: float) -> bool:
        deadline = self.reactor.now() + within_s
        if self.loop is not None:
            return self.loop.run_until_complete(_watch(self.reactor, done, deadline))
        assert isinstance(self.reactor, ThreadReactor)
        if self.kind == "background":
            from brokers import wait_for

            wait_for("the background thread", lambda: done() or None, within_s, 0.001)
            return True
        return self.reactor.wait(lambda: bool(done()), deadline)

    def close(self) -> None:
        self.reactor.close()
        if self.loop is not None:
            self.loop.close()


async def _watch(reactor: Reactor, done: Callable[[], object], deadline: float) -> bool:
    while not done():
        if reactor.now() > deadline:
            return False
        await asyncio.sleep(0.0005)
    return True
