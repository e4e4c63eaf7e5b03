"""A store of keys with revisions: etcd's rules for transactions, leases, history and watches, over a table of keys.

Every change raises the one revision by one and is kept in the history, from which watches are told, until it is
compacted. Two stores are made of this: the embedded one on a table in SQLite, and the one that the simulator breaks, on
a table in memory. The store knows no port and does not wait: its callers do.

A change is in the table before the store counts it: where the table refuses, revision, leases and watches stay as they
were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

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
    Put,
    TransactionResult,
    WatchResponse,
    check_transaction,
)

HISTORY_MAX: Final = 50_000
"""Revisions kept for watches before the older half is compacted."""


class KeyTable(Protocol):
    """Where a store's keys and history are. Every call is made inside `transaction`."""

    def transaction(self) -> AbstractContextManager[object]:
        """All that is written inside it, or, after an error, nothing."""
        ...

    def get(self, key: str) -> KeyValue | None: ...

    def below(self, prefix: str) -> Sequence[KeyValue]:
        """In the order of the keys' UTF-8 bytes."""
        ...

    def leased(self, lease: int) -> Sequence[str]:
        """The keys that go with this lease."""
        ...

    def put(self, entry: KeyValue) -> None: ...

    def delete(self, keys: Iterable[str]) -> None: ...

    def record(self, revision: int, events: Sequence[Event]) -> None:
        """Into the history; this revision is the newest."""
        ...

    def events(self, prefix: str, first: int, last: int) -> Sequence[Event]:
        """The history below a prefix, from one revision to another, both included."""
        ...

    def forget_before(self, revision: int) -> None: ...

    def next_lease(self) -> int:
        """A number that no lease has had."""
        ...


class MemoryTable:
    """Nothing of it outlives the process."""

    def __init__(self) -> None:
        self.keys: dict[str, KeyValue] = {}
        self.history: list[WatchResponse] = []
        self._leases = 0
        self._transaction = nullcontext()

    def transaction(self) -> AbstractContextManager[object]:
        return self._transaction

    def get(self, key: str) -> KeyValue | None:
        return self.keys.get(key)

    def below(self, prefix: str) -> Sequence[KeyValue]:
        return [self.keys[key] for key in sorted((key for key in self.keys if key.startswith(prefix)), key=str.encode)]

    def leased(self, lease: int) -> Sequence[str]:
        return [key for key, found in self.keys.items() if found.lease == lease]

    def put(self, entry: KeyValue) -> None:
        self.keys[entry.key] = entry

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self.keys[key]

    def record(self, revision: int, events: Sequence[Event]) -> None:
        self.history.append(WatchResponse(revision, tuple(events)))

    def events(self, prefix: str, first: int, last: int) -> Sequence[Event]:
        found: list[Event] = []
        for response in reversed(self.history):
            if response.revision < first:
                break
            if response.revision <= last:
                found[:0] = [event for event in response.events if event.key.startswith(prefix)]
        return found

    def forget_before(self, revision: int) -> None:
        self.history = [response for response in self.history if response.revision >= revision]

    def next_lease(self) -> int:
        self._leases += 1
        return self._leases


@dataclass(slots=True)
class Lease:
    ttl_seconds: float
    timer: Timer | None
    """None while leases stand still."""


class Watched:
    """What watches follow: each is told when there may be something new."""

    def __init__(self) -> None:
        self._watching: dict[Callable[[], None], None] = {}

    def watching(self, told: Callable[[], None]) -> None:
        """Call it when there may be something new, until `not_watching`."""
        self._watching[told] = None

    def not_watching(self, told: Callable[[], None]) -> None:
        self._watching.pop(told, None)

    def tell_watches(self) -> None:
        for told in list(self._watching):
            told()


class RevisionStore(Watched):
    """`revision` is the newest, `compacted` the oldest that a watch may still ask for."""

    def __init__(
        self, table: KeyTable, clock: Clock, revision: int = 1, compacted: int = 0, history_max: int = HISTORY_MAX
    ) -> None:
        super().__init__()
        self.clock = clock
        self.revision = revision
        self.compacted = compacted
        self._table = table
        self._history_max = history_max
        self._leases: dict[int, Lease] = {}

    # Keys.

    def get(self, key: str) -> KeyValue | None:
        with self._table.transaction():
            return self._table.get(key)

    def list(self, prefix: str) -> Listing:
        with self._table.transaction():
            return Listing(tuple(self._table.below(prefix)), self.revision)

    def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        check_transaction(compares, actions)
        for action in actions:
            if isinstance(action, Put) and action.lease and action.lease not in self._leases:
                raise CoordinationError(f"lease {action.lease} is gone: key {action.key} was not written")
        return TransactionResult(self.change(compares, actions), self.revision)

    def change(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> bool:
        """Without the bounds of a client's transaction: all keys of a lease go in one revision. False: it was not made,
        because a compare does not hold."""
        revision, compacted = self.revision + 1, self.compacted
        with self._table.transaction():
            if not all(self._holds(compare) for compare in compares):
                return False
            events = [event for action in actions for event in self._act(action, revision)]
            if not events:
                return True
            self._table.record(revision, events)
            if revision - compacted > self._history_max:
                compacted = revision - self._history_max // 2
                self._table.forget_before(compacted)
        self.revision, self.compacted = revision, compacted
        self.tell_watches()
        return True

    def _holds(self, compare: Compare) -> bool:
        found = self._table.get(compare.key)
        number = 0 if found is None else int(getattr(found, compare.attribute))
        match compare.relation:
            case "=":
                return number == compare.number
            case "!=":
                return number != compare.number
            case "<":
                return number < compare.number
            case ">":
                return number > compare.number

    def _act(self, action: Put | Delete, revision: int) -> Sequence[Event]:
        old = self._table.get(action.key)
        if isinstance(action, Put):
            created, version = (revision, 1) if old is None else (old.create_revision, old.version + 1)
            self._table.put(KeyValue(action.key, action.value, created, revision, version, action.lease))
            return [Event("put", action.key, action.value, revision)]
        if action.prefix:
            gone = [found.key for found in self._table.below(action.key)]
        else:
            gone = [] if old is None else [action.key]
        self._table.delete(gone)
        return [Event("delete", key, b"", revision) for key in gone]

    # Leases.

    def grant(self, ttl_seconds: float) -> int:
        with self._table.transaction():
            number = self._table.next_lease()
        self._leases[number] = Lease(ttl_seconds, None)
        self.renew(number)
        return number

    def has_lease(self, number: int) -> bool:
        return number in self._leases

    def renew(self, number: int, extension_seconds: float = 0.0) -> bool:
        """False when it is gone."""
        lease = self._leases.get(number)
        if lease is None:
            return False
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = self.clock.call_later(lease.ttl_seconds + extension_seconds, lambda: self.revoke(number))
        return True

    def revoke(self, number: int) -> None:
        lease = self._leases.get(number)
        if lease is not None:
            self.delete_leased(number)
            del self._leases[number]
            if lease.timer is not None:
                lease.timer.cancel()

    def delete_leased(self, number: int) -> None:
        with self._table.transaction():
            gone = self._table.leased(number)
        self.change((), [Delete(key) for key in gone])

    def halt_leases(self) -> None:
        """None of them ends until it is renewed."""
        for lease in self._leases.values():
            if lease.timer is not None:
                lease.timer.cancel()
                lease.timer = None

    # Watches.

    def check_known(self, from_revision: int) -> None:
        """Raises Behind: the revision before that one is not there yet."""
        if from_revision > self.revision + 1:
            raise Behind(f"revision {from_revision} is asked for, and {self.revision} is the newest")

    def changes(self, prefix: str, from_revision: int, upto: int | None = None) -> WatchResponse | None:
        """What a watch has to be told from that revision on, in one response; `upto` is the newest that is known."""
        if from_revision < self.compacted:
            raise Compacted(f"revision {from_revision} is gone; {self.compacted} is the oldest kept")
        last = self.revision if upto is None else upto
        with self._table.transaction():
            events = self._table.events(prefix, from_revision, last)
        return WatchResponse(last, tuple(events)) if events else None

    def compact(self, revision: int) -> None:
        if revision > self.revision:
            raise CoordinationError(f"cannot compact to revision {revision}: the newest is {self.revision}")
        if revision > self.compacted:
            with self._table.transaction():
                self._table.forget_before(revision)
            self.compacted = revision
