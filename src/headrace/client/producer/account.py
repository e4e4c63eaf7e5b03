"""When a settled batch ceases to count in the queue: at once, or, where callbacks hear of it, when they have run.

So callbacks that are slower than the brokers fill the queue, and not the memory. A callback that itself sends into a
full queue would wait for what only it can bring about: for its thread, what is still to be told does not count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from headrace.client.connection.reactor import Reactor
from headrace.client.producer.driver import Driver
from headrace.records.builder import OpenBatch, SentBatch
from headrace.records.router import Quota


class Account:
    def __init__(self, reactor: Reactor, driver: Driver, quota: Quota) -> None:
        self._reactor = reactor
        self._driver = driver
        self._quota = quota
        self._untold: dict[int, OpenBatch] = {}
        self._teller: int | None = None
        """The thread in which callbacks run now."""
        self._teller_waits = False

    def has_room(self, needed_bytes: int) -> bool:
        quota = self._quota
        return not quota.records or (
            quota.records < quota.max_records and quota.bytes + needed_bytes <= quota.max_bytes
        )

    @property
    def untold_records(self) -> int:
        """Records whose fate is known and that count until their callbacks have run."""
        with self._reactor.lock:
            return sum(counted.count for counted in self._untold.values())

    def settle(self, sent: SentBatch, counted: OpenBatch, tells: bool) -> None:
        """Give back what a batch counts; `tells` says whether callbacks hear of it. With the lock."""
        if tells and not self._teller_waits:
            self._untold[id(counted)] = counted
        else:
            self._quota.give_back(counted)
        if tells:
            self._reactor.tell(partial(self.tell, sent, counted))

    def spare(self) -> bool:
        """Where callbacks run: count what is still to be told no more. True if there was any."""
        if self._teller != threading.get_ident():
            return False
        with self._reactor.lock:
            untold, self._untold = self._untold, {}
            for counted in untold.values():
                self._quota.give_back(counted)
        return bool(untold)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for room."""
        tells = self._teller == threading.get_ident()
        if tells:
            self._teller_waits = True
        try:
            yield
        finally:
            if tells:
                self._teller_waits = False

    def tell(self, sent: SentBatch, counted: OpenBatch | None = None) -> None:
        """Run the callbacks of a batch. Without the lock."""
        outer, self._teller = self._teller, threading.get_ident()
        try:
            sent.tell()
        finally:
            self._teller = outer
            with self._reactor.lock:
                if counted is not None and self._untold.pop(id(counted), None) is not None:
                    self._quota.give_back(counted)
            self._driver.room()
