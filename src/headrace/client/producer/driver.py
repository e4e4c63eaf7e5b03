"""How those who use a sender wait for it: on threads whoever waits drives the engine, on asyncio the loop does."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Protocol

from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.records.builder import Delivery, Report


class Need(Enum):
    """What somebody waits for before a record can be put into a batch."""

    TOPIC = "a topic"
    ROOM = "room in the queue"


class Driver(Protocol):
    def until(self, need: Need, done: Callable[[], bool], deadline: float) -> bool:
        """Wait until `done()`; False at the deadline. Where nobody may wait, it raises."""
        ...

    def turn(self) -> None:
        """Let what is ready leave, if the caller is the one to do it."""
        ...

    def changed(self) -> None:
        """What somebody waits for may have come."""
        ...

    def room(self) -> None:
        """There may be room in the queue, outside of any turn."""
        ...

    def wait(self, delivery: Delivery, deadline: float | None) -> None: ...

    def awaited(self, delivery: Delivery) -> Awaitable[Report]: ...


class ThreadDriver:
    def __init__(self, reactor: ThreadReactor) -> None:
        self._reactor = reactor
        self._for_room = 0

    def until(self, need: Need, done: Callable[[], bool], deadline: float) -> bool:
        if need is not Need.ROOM:
            return self._reactor.wait(done, deadline)
        with self._reactor.lock:
            self._for_room += 1
        try:
            return self._reactor.wait(done, deadline)
        finally:
            with self._reactor.lock:
                self._for_room -= 1

    def turn(self) -> None:
        self._reactor.turn()

    def changed(self) -> None:
        """The reactor itself asks all who wait, after every turn."""

    def room(self) -> None:
        if self._for_room:
            self._reactor.wake()

    def wait(self, delivery: Delivery, deadline: float | None) -> None:
        self._reactor.wait(lambda: delivery.done, math.inf if deadline is None else deadline)

    def awaited(self, delivery: Delivery) -> Awaitable[Report]:
        raise TypeError("this producer is for threads: call delivery.result(), or use headrace.aio.Producer")
