"""A reactor on an asyncio loop, uvloop's too. The loop is one thread, so the lock is none."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from headrace.client.connection.reactor import Callback, Timer
from headrace.client.errors import EngineClosed


class AsyncioReactor:
    """Use `of_running_loop`: one for each loop, so that clients of one id share their connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lock: AbstractContextManager[None] = contextlib.nullcontext()
        self.loop = loop
        self._watched: dict[int, bool] = {}

    @staticmethod
    def of_running_loop() -> AsyncioReactor:
        loop = asyncio.get_running_loop()
        reactor = _reactors.get(id(loop))
        if reactor is None:
            reactor = _reactors[id(loop)] = AsyncioReactor(loop)
        return reactor

    def now(self) -> float:
        return self.loop.time()

    def call_at(self, when: float, fn: Callback) -> Timer:
        self._check_open()
        return self.loop.call_at(when, fn)

    def call_soon(self, fn: Callback) -> None:
        self._check_open()
        self.loop.call_soon(fn)

    def run_callback(self, fn: Callback) -> None:
        self._check_open()
        self.loop.call_soon(fn)

    def post(self, fn: Callback) -> None:
        # A name that is found after the loop was closed is of no use to anyone.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(fn)

    def watch(self, sock: socket.socket, on_readable: Callback, on_writable: Callback | None) -> None:
        fd = sock.fileno()
        self.loop.add_reader(fd, on_readable)
        if on_writable is not None:
            self.loop.add_writer(fd, on_writable)
        elif self._watched.get(fd):
            self.loop.remove_writer(fd)
        self._watched[fd] = on_writable is not None

    def unwatch(self, sock: socket.socket) -> None:
        fd = sock.fileno()
        writes = self._watched.pop(fd, None)
        if writes is None:
            return
        self.loop.remove_reader(fd)
        if writes:
            self.loop.remove_writer(fd)

    def close(self) -> None:
        """The loop is not ours to close."""

    def _check_open(self) -> None:
        if self.loop.is_closed():
            raise EngineClosed("the event loop of this client is closed; make a new client in the running one")


class Waiters:
    """Coroutines that wait for something to be true, and are asked again when it may be."""

    def __init__(self, reactor: AsyncioReactor) -> None:
        self.reactor = reactor
        self.lock = reactor.lock
        self.now = reactor.now
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[bool]]] = []

    async def have(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Until `done()`, which is asked at every change; False at the deadline."""
        loop = self.reactor.loop
        while not done():
            woken: asyncio.Future[bool] = loop.create_future()
            entry = done, woken
            self._waiting.append(entry)
            timer = loop.call_at(deadline, wake, woken, False) if deadline is not None and deadline < math.inf else None
            try:
                in_time = await woken
            finally:
                self._waiting.remove(entry)
                if timer is not None:
                    timer.cancel()
            if not in_time:
                return done()
        return True

    def changed(self) -> None:
        """What somebody waits for may have come."""
        for done, woken in self._waiting:
            if not woken.done() and done():
                woken.set_result(True)


def wake(woken: asyncio.Future[bool], in_time: bool) -> None:
    if not woken.done():
        woken.set_result(in_time)


# A reactor keeps its loop, so as long as it is here the number is not given to another loop.
_reactors: weakref.WeakValueDictionary[int, AsyncioReactor] = weakref.WeakValueDictionary()
