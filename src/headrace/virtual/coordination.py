"""Coordination on virtual time, with faults: a store in memory that stands for etcd, and a client of it for each host.

A call travels to the store and its answer back, each after a drawn delay. What can go wrong:

cut(host)            what the host asks fails after the client's deadline; its leases run on; its watches end
stop() and start()   the store answers nobody; leases stand still meanwhile and begin anew at its return, as etcd's do
answers_lost         share of the changes that are made and whose answer never arrives
late                 share of the changes that reach the store only after the client has given up
break_watches()      every watch ends with an error and has to be taken up again from the last revision
compact              as the port says; a watch that asks for less hears Compacted
snapshot()           a copy of all that the store holds; restore(copy) puts it back: revisions go back, leases begin
                     anew, every watch ends

A change is never made twice by the client itself: who hears an error has to look.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from headrace.coordination.revisions import Lease, MemoryTable, RevisionStore, Watched
from headrace.errors import CoordinationError
from headrace.ports.clock import Clock
from headrace.ports.coordination import (
    Compare,
    Delete,
    KeyValue,
    Listing,
    OutcomeUnknown,
    Put,
    TransactionResult,
    WatchResponse,
)

DEADLINE_SECONDS: Final = 2.0
"""How long a client waits for an answer before it gives up."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int
    compacted: int
    keys: dict[str, KeyValue]
    history: tuple[WatchResponse, ...]
    leases: dict[int, float]
    """Time to live of each."""


class CoordinationStore(RevisionStore):
    """The one store. `clock` is that of no process: the store runs on while brokers are paused."""

    def __init__(self, clock: Clock, seed: int = 0, delay_seconds: tuple[float, float] = (0.0002, 0.002)) -> None:
        self.table = MemoryTable()
        super().__init__(self.table, clock)
        self.delay_seconds = delay_seconds
        self.answers_lost = 0.0
        self.late = 0.0
        self.restores = 0
        self.running = True
        self.losses = 0
        """Changes whose answer was lost or that came late, so far."""
        self.random = random.Random(seed)
        self._cut: set[str] = set()
        self.breaks = 0

    def client(self, host: str, clock: Clock, first: int = 0) -> VirtualCoordination:
        """The port for a process on that host; its answers arrive by that process's clock. `first` is the node that it
        asks first, where there are several (`virtual.quorum`)."""
        return VirtualCoordination(self, host, clock)

    # What is done to it.

    def cut(self, host: str) -> None:
        self._cut.add(host)
        self.tell_watches()

    def heal(self, host: str) -> None:
        self._cut.discard(host)

    def stop(self) -> None:
        self.running = False
        self.halt_leases()
        self.break_watches()

    def start(self) -> None:
        self.running = True
        self.renew_leases()

    def renew_leases(self, extension_seconds: float = 0.0) -> None:
        for number in self._leases:
            self.renew(number, extension_seconds)

    def snapshot(self) -> Snapshot:
        leases = {number: lease.ttl_seconds for number, lease in self._leases.items()}
        return Snapshot(self.revision, self.compacted, dict(self.table.keys), tuple(self.table.history), leases)

    def restore(self, copy: Snapshot) -> None:
        """Leases granted since are gone; their numbers are not given again, as etcd's are not."""
        self.halt_leases()
        self.revision, self.compacted = copy.revision, copy.compacted
        self.restores += 1
        self.table.keys, self.table.history = dict(copy.keys), list(copy.history)
        self._leases = {number: Lease(ttl_seconds, None) for number, ttl_seconds in copy.leases.items()}
        if self.running:
            self.renew_leases()
        self.break_watches()

    def break_watches(self) -> None:
        self.breaks += 1
        self.tell_watches()

    def reaches(self, host: str) -> bool:
        return self.running and host not in self._cut

    def draw_delay(self) -> float:
        return self.random.uniform(*self.delay_seconds)


class VirtualCoordination:
    """The Coordination port of one process."""

    def __init__(self, store: CoordinationStore, host: str, clock: Clock) -> None:
        self._store = store
        self._host = host
        self._clock = clock
        self._closed = False
        self._watches: dict[asyncio.Future[None], None] = {}

    async def get(self, key: str) -> KeyValue | None:
        return await self._ask(lambda: self._store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._ask(lambda: self._store.list(prefix))

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return (await self.transact((), (Put(key, value, lease),))).revision

    async def delete(self, key: str) -> int:
        return (await self.transact((), (Delete(key),))).revision

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        compares, actions = tuple(compares), tuple(actions)
        return await self._ask(lambda: self._store.transact(compares, actions), change=True)

    async def grant_lease(self, ttl_seconds: float) -> int:
        return await self._ask(lambda: self._store.grant(ttl_seconds), change=True)

    async def keep_alive(self, lease: int) -> bool:
        return await self._ask(lambda: self._store.renew(lease), change=True)

    async def revoke_lease(self, lease: int) -> None:
        await self._ask(lambda: self._store.revoke(lease), change=True)

    async def compact(self, revision: int) -> None:
        await self._ask(lambda: self._store.compact(revision), change=True)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        store = self._store
        following, breaks = from_revision, store.breaks
        while not self._closed:
            if not store.reaches(self._host) or breaks != store.breaks:
                raise CoordinationError(f"the watch of {prefix} is broken: take it up again")
            store.check_known(following)
            response = store.changes(prefix, following)
            if response is None:
                await self._told(store)
                continue
            following = response.revision + 1
            await self._wait(store.draw_delay())
            yield response

    async def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        """Every watch of this client looks again."""
        for waiting in self._watches:
            if not waiting.done():
                waiting.set_result(None)

    async def _ask(self, work: Callable[[], T], *, change: bool = False) -> T:
        """Send, let the store work, wait for the answer; all of it may be lost on the way."""
        if self._closed:
            raise CoordinationError("the connection to coordination is closed: the broker is stopping")
        store = self._store
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        reaches = partial(store.reaches, self._host)

        def arrive() -> None:
            if not reaches():
                return
            try:
                result = work()
            except CoordinationError as error:
                self._back(reaches, partial(settle, answer, error))
                return
            if change and store.random.random() < store.answers_lost:
                store.losses += 1
            else:
                self._back(reaches, partial(settle, answer, None, result))

        # The request is on its way whatever becomes of the process: only the answer needs it.
        store.clock.call_later(self._way_there(change), arrive)
        deadline = self._clock.call_later(DEADLINE_SECONDS, partial(settle, answer, silence(DEADLINE_SECONDS, change)))
        try:
            return await answer
        finally:
            deadline.cancel()

    def _way_there(self, change: bool) -> float:
        store = self._store
        if change and store.random.random() < store.late:
            store.losses += 1
            return store.random.uniform(DEADLINE_SECONDS, 3 * DEADLINE_SECONDS)
        return store.draw_delay()

    def _back(self, reaches: Callable[[], bool], call: Callable[[], None]) -> None:
        """An answer travels back, and counts if the host is reached when it arrives."""

        def arrive() -> None:
            if reaches():
                self._clock.call_soon(call)

        self._store.clock.call_later(self._store.draw_delay(), arrive)

    async def _told(self, source: Watched) -> None:
        """Until something has changed, or the watch is broken, or this client is closed."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told() -> None:
            source.not_watching(told)
            self._clock.call_soon(lambda: None if waiting.done() else waiting.set_result(None))

        source.watching(told)
        self._watches[waiting] = None
        try:
            await waiting
        finally:
            del self._watches[waiting]
            source.not_watching(told)

    async def _wait(self, seconds: float) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        await done


def silence(seconds: float, change: bool) -> CoordinationError:
    return (OutcomeUnknown if change else CoordinationError)(
        f"coordination did not answer within {seconds:g} s" + ("; it may have done it" if change else "")
    )


def settle(answer: asyncio.Future[Any], error: CoordinationError | None, result: object = None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
