"""Coordination in memory, on virtual time, with faults: a store that stands for etcd, and a client of it for each host.

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
from typing import Any, Final, Protocol, TypeVar

from headrace.errors import CoordinationError
from headrace.ports.clock import Clock, Timer
from headrace.ports.coordination import (
    Behind,
    Compacted,
    Compare,
    Delete,
    Event,
    KeyValue,
    Listing,
    OutcomeUnknown,
    Put,
    TransactionResult,
    WatchResponse,
    check_transaction,
)

DEADLINE_SECONDS: Final = 2.0
"""How long a client waits for an answer before it gives up."""

T = TypeVar("T")


@dataclass(slots=True)
class _Lease:
    ttl_seconds: float
    timer: Timer | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    revision: int
    compacted: int
    keys: dict[str, KeyValue]
    history: tuple[WatchResponse, ...]
    leases: dict[int, float]
    """Time to live of each."""


class CoordinationStore:
    """The one store. `clock` is that of no process: the store runs on while brokers are paused."""

    def __init__(self, clock: Clock, seed: int = 0, delay_seconds: tuple[float, float] = (0.0002, 0.002)) -> None:
        self.clock = clock
        self.delay_seconds = delay_seconds
        self.answers_lost = 0.0
        self.late = 0.0
        self.revision = 1
        self.compacted = 0
        self.restores = 0
        self.running = True
        self.losses = 0
        """Changes whose answer was lost or that came late, so far."""
        self.random = random.Random(seed)
        self._keys: dict[str, KeyValue] = {}
        self._history: list[WatchResponse] = []
        self._leases: dict[int, _Lease] = {}
        self._lease_number = 0
        self._cut: set[str] = set()
        self._watching: dict[Callable[[], None], None] = {}
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

    def halt_leases(self) -> None:
        for lease in self._leases.values():
            if lease.timer is not None:
                lease.timer.cancel()
                lease.timer = None

    def renew_leases(self, extension_seconds: float = 0.0) -> None:
        for number in self._leases:
            self.renew(number, extension_seconds)

    def snapshot(self) -> Snapshot:
        leases = {number: lease.ttl_seconds for number, lease in self._leases.items()}
        return Snapshot(self.revision, self.compacted, dict(self._keys), tuple(self._history), leases)

    def restore(self, copy: Snapshot) -> None:
        """Leases granted since are gone; their numbers are not given again, as etcd's are not."""
        self.halt_leases()
        self.revision, self.compacted = copy.revision, copy.compacted
        self.restores += 1
        self._keys, self._history = dict(copy.keys), list(copy.history)
        self._leases = {number: _Lease(ttl_seconds, None) for number, ttl_seconds in copy.leases.items()}
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

    # The store itself.

    def get(self, key: str) -> KeyValue | None:
        return self._keys.get(key)

    def list(self, prefix: str) -> Listing:
        below = sorted((key for key in self._keys if key.startswith(prefix)), key=str.encode)
        return Listing(tuple(self._keys[key] for key in below), self.revision)

    def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        check_transaction(compares, actions)
        for action in actions:
            if isinstance(action, Put) and action.lease and action.lease not in self._leases:
                raise CoordinationError(f"lease {action.lease} is gone: key {action.key} was not written")
        if not all(self._holds(compare) for compare in compares):
            return TransactionResult(False, self.revision)
        revision = self.revision + 1
        events: list[Event] = []
        for action in actions:
            if isinstance(action, Put):
                self._put(action, revision)
                events.append(Event("put", action.key, action.value, revision))
            else:
                events.extend(self._delete(action, revision))
        if events:
            self.revision = revision
            self._history.append(WatchResponse(revision, tuple(events)))
            self.tell_watches()
        return TransactionResult(True, self.revision)

    def _put(self, put: Put, revision: int) -> None:
        old = self._keys.get(put.key)
        created, version = (revision, 1) if old is None else (old.create_revision, old.version + 1)
        self._keys[put.key] = KeyValue(put.key, put.value, created, revision, version, put.lease)

    def _delete(self, delete: Delete, revision: int) -> Sequence[Event]:
        gone = [key for key in self._keys if key == delete.key or (delete.prefix and key.startswith(delete.key))]
        for key in gone:
            del self._keys[key]
        return [Event("delete", key, b"", revision) for key in sorted(gone)]

    def _holds(self, compare: Compare) -> bool:
        found = self._keys.get(compare.key)
        number = 0 if found is None else int(getattr(found, compare.attribute))
        return {
            "=": number == compare.number,
            "!=": number != compare.number,
            "<": number < compare.number,
            ">": number > compare.number,
        }[compare.relation]

    def grant(self, ttl_seconds: float) -> int:
        self._lease_number += 1
        self._leases[self._lease_number] = _Lease(ttl_seconds, None)
        self.renew(self._lease_number)
        return self._lease_number

    def renew(self, number: int, extension_seconds: float = 0.0) -> bool:
        lease = self._leases.get(number)
        if lease is None:
            return False
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = self.clock.call_later(lease.ttl_seconds + extension_seconds, lambda: self.revoke(number))
        return True

    def revoke(self, number: int) -> None:
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        if lease.timer is not None:
            lease.timer.cancel()
        gone = [key for key, found in self._keys.items() if found.lease == number]
        self.transact((), [Delete(key) for key in gone])

    def compact(self, revision: int) -> None:
        if revision > self.revision:
            raise CoordinationError(f"cannot compact to revision {revision}: the newest is {self.revision}")
        self.compacted = max(self.compacted, revision)
        self._history = [response for response in self._history if response.revision >= self.compacted]

    def has_lease(self, number: int) -> bool:
        return number in self._leases

    def changes(self, prefix: str, from_revision: int, upto: int | None = None) -> WatchResponse | None:
        """What a watch has to be told from that revision on, in one response; `upto` is the newest that is known."""
        if from_revision < self.compacted:
            raise Compacted(f"revision {from_revision} is gone; {self.compacted} is the oldest kept")
        events: list[Event] = []
        for response in reversed(self._history):
            if response.revision < from_revision:
                break
            if upto is None or response.revision <= upto:
                events[:0] = [event for event in response.events if event.key.startswith(prefix)]
        return WatchResponse(self.revision if upto is None else upto, tuple(events)) if events else None

    def watching(self, told: Callable[[], None]) -> None:
        self._watching[told] = None

    def not_watching(self, told: Callable[[], None]) -> None:
        self._watching.pop(told, None)

    def tell_watches(self) -> None:
        for told in list(self._watching):
            told()


class Source(Protocol):
    """Where a watch hears that there is something new."""

    def watching(self, told: Callable[[], None]) -> None: ...
    def not_watching(self, told: Callable[[], None]) -> None: ...


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
            if following > store.revision + 1:
                raise Behind(f"revision {following} is asked for, and {store.revision} is the newest")
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

        def arrive() -> None:
            if not store.reaches(self._host):
                return
            try:
                result = work()
            except CoordinationError as error:
                self._back(partial(settle, answer, error))
                return
            if change and store.random.random() < store.answers_lost:
                store.losses += 1
            else:
                self._back(partial(settle, answer, None, result))

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

    def _back(self, call: Callable[[], None]) -> None:
        def arrive() -> None:
            if self._store.reaches(self._host):
                self._clock.call_soon(call)

        self._store.clock.call_later(self._store.draw_delay(), arrive)

    async def _told(self, source: Source) -> None:
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
