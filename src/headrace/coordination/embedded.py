"""Coordination for a single node: one SQLite file, owned by one process.

Tables: `counters` (revision, compacted, lease), `keys` (what is there now), `history` (every change since the
compacted revision, for watches). A call is one SQLite transaction, written ahead and synced (synchronous=FULL) before
it answers, so an acknowledged change survives power loss and a change cut short leaves nothing. The file is locked
while it is open.

Lease holders live in this process and die with it, so opening the file ends every lease of the process before. Lease
numbers and revisions go on rising over restarts. Calls run on the loop: they are short and none is on the path of a
message.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from headrace.errors import CoordinationError, DataFolderError
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
WATCH_REVISIONS_MAX: Final = 1000
"""Revisions delivered in one watch response."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL,
    version INTEGER NOT NULL, lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS keys_by_lease ON keys (lease) WHERE lease != 0;
CREATE TABLE IF NOT EXISTS history (
    revision INTEGER NOT NULL, position INTEGER NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (revision, position)
) WITHOUT ROWID;
INSERT OR IGNORE INTO counters VALUES ('revision', 1), ('compacted', 0), ('lease', 0);
"""
KEY_COLUMNS: Final = "key, value, create_revision, mod_revision, version, lease"
PUT: Final = f"""
INSERT INTO keys ({KEY_COLUMNS}) VALUES (?, ?, ?, ?, 1, ?) ON CONFLICT (key) DO UPDATE SET
    value = excluded.value, mod_revision = excluded.mod_revision, version = version + 1, lease = excluded.lease
"""


@dataclass(slots=True)
class _Lease:
    ttl_seconds: float
    deadline: float
    timer: Timer


class EmbeddedCoordination:
    """The Coordination port on one SQLite file."""

    def __init__(self, path: str, clock: Clock, history_max: int = HISTORY_MAX) -> None:
        self._path = path
        self._clock = clock
        self._history_max = history_max
        self._leases: dict[int, _Lease] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self._db = _open(path)
        self._revision = self._counter("revision")
        self._compacted = self._counter("compacted")
        self._end_leases_of_the_process_before()

    async def get(self, key: str) -> KeyValue | None:
        with self._transaction():
            return self._get(key)

    async def list(self, prefix: str) -> Listing:
        with self._transaction() as db:
            where, bounds = _below(prefix)
            rows = db.execute(f"SELECT {KEY_COLUMNS} FROM keys WHERE {where} ORDER BY key", bounds)
            return Listing(tuple(KeyValue(*row) for row in rows), self._revision)

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return (await self.transact((), (Put(key, value, lease),))).revision

    async def delete(self, key: str) -> int:
        return (await self.transact((), (Delete(key),))).revision

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        check_transaction(compares, actions)
        for action in actions:
            if isinstance(action, Put) and action.lease and action.lease not in self._leases:
                raise CoordinationError(f"lease {action.lease} is gone: key {action.key} was not written")
        with self._transaction():
            if not all(self._holds(compare) for compare in compares):
                return TransactionResult(False, self._revision)
            changed = self._act(actions)
        self._publish(changed)
        return TransactionResult(True, self._revision)

    async def grant_lease(self, ttl_seconds: float) -> int:
        with self._transaction() as db:
            lease = self._counter("lease") + 1
            db.execute("UPDATE counters SET number = ? WHERE name = 'lease'", (lease,))
        self._leases[lease] = _Lease(ttl_seconds, self._clock.now() + ttl_seconds, self._expiry(lease, ttl_seconds))
        return lease

    async def keep_alive(self, lease: int) -> bool:
        held = self._leases.get(lease)
        if held is None:
            return False
        held.deadline = self._clock.now() + held.ttl_seconds
        return True

    async def revoke_lease(self, lease: int) -> None:
        held = self._leases.get(lease)
        if held is not None:
            self._end_lease(lease)
            held.timer.cancel()

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        following = from_revision
        if following > self._revision + 1:
            raise Behind(f"revision {following} is asked for, and {self._revision} is the newest")
        while not self._closed:
            if following < self._compacted:
                raise Compacted(f"revision {following} is gone; {self._compacted} is the oldest kept")
            if following > self._revision:
                await self._changed()
                continue
            last = min(self._revision, following + WATCH_REVISIONS_MAX - 1)
            events = self._events(prefix, following, last)
            following = last + 1
            if events:
                yield WatchResponse(last, events)

    async def compact(self, revision: int) -> None:
        if revision > self._revision:
            raise CoordinationError(f"cannot compact to revision {revision}: the newest is {self._revision}")
        if revision > self._compacted:
            with self._transaction():
                self._forget_before(revision)
            self._compacted = revision

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for held in self._leases.values():
            held.timer.cancel()
        self._wake()
        with suppress(sqlite3.Error):
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._closed:
            raise CoordinationError(f"metadata file {self._path} is closed: the broker is stopping")
        try:
            self._db.execute("BEGIN")
            yield self._db
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            raise _refusal(self._path, error) from error
        except BaseException:
            self._rollback()
            raise

    def _rollback(self) -> None:
        with suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _counter(self, name: str) -> int:
        return int(self._db.execute("SELECT number FROM counters WHERE name = ?", (name,)).fetchone()[0])

    def _get(self, key: str) -> KeyValue | None:
        row = self._db.execute(f"SELECT {KEY_COLUMNS} FROM keys WHERE key = ?", (key,)).fetchone()
        return None if row is None else KeyValue(*row)

    def _holds(self, compare: Compare) -> bool:
        found = self._get(compare.key)
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

    def _act(self, actions: Sequence[Put | Delete]) -> int:
        """Write the actions as the next revision; answers it, or the present one if nothing changed."""
        revision = self._revision + 1
        events: list[tuple[str, str, bytes]] = []
        for action in actions:
            if isinstance(action, Put):
                self._db.execute(
                    PUT,
                    (action.key, action.value, revision, revision, action.lease),
                )
                events.append(("put", action.key, action.value))
            else:
                where, bounds = _below(action.key) if action.prefix else ("key = ?", (action.key,))
                gone = self._db.execute(f"DELETE FROM keys WHERE {where} RETURNING key", bounds).fetchall()
                events.extend(("delete", key, b"") for (key,) in sorted(gone))
        return self._record(revision, events)

    def _record(self, revision: int, events: Sequence[tuple[str, str, bytes]]) -> int:
        if not events:
            return self._revision
        self._db.executemany(
            "INSERT INTO history VALUES (?, ?, ?, ?, ?)",
            [(revision, position, *event) for position, event in enumerate(events)],
        )
        self._db.execute("UPDATE counters SET number = ? WHERE name = 'revision'", (revision,))
        if revision - self._compacted > self._history_max:
            self._forget_before(revision - self._history_max // 2)
        return revision

    def _publish(self, revision: int) -> None:
        """Take up what was committed, and let the watches see it."""
        if revision != self._revision:
            self._revision = revision
            self._compacted = self._counter("compacted")
            self._wake()

    def _forget_before(self, revision: int) -> None:
        self._db.execute("DELETE FROM history WHERE revision < ?", (revision,))
        self._db.execute("UPDATE counters SET number = ? WHERE name = 'compacted'", (revision,))

    def _events(self, prefix: str, first: int, last: int) -> tuple[Event, ...]:
        with self._transaction() as db:
            where, bounds = _below(prefix)
            rows = db.execute(
                "SELECT kind, key, value, revision FROM history "
                f"WHERE revision BETWEEN ? AND ? AND {where} ORDER BY revision, position",
                (first, last, *bounds),
            )
            return tuple(Event(*row) for row in rows)

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _expiry(self, lease: int, delay_seconds: float) -> Timer:
        return self._clock.call_later(delay_seconds, lambda: self._expire(lease))

    def _expire(self, lease: int) -> None:
        """One timer a lease: when it rings early because the lease was kept alive, it is set again."""
        held = self._leases.get(lease)
        if held is None or self._closed:
            return
        left = held.deadline - self._clock.now()
        if left > 0:
            held.timer = self._expiry(lease, left)
        else:
            self._end_lease(lease)

    def _end_lease(self, lease: int) -> None:
        with self._transaction() as db:
            keys = [key for (key,) in db.execute("SELECT key FROM keys WHERE lease = ? ORDER BY key", (lease,))]
            changed = self._act([Delete(key) for key in keys])
        del self._leases[lease]
        self._publish(changed)

    def _end_leases_of_the_process_before(self) -> None:
        with self._transaction() as db:
            keys = [key for (key,) in db.execute("SELECT key FROM keys WHERE lease != 0 ORDER BY key")]
            changed = self._act([Delete(key) for key in keys])
        self._publish(changed)


def _open(path: str) -> sqlite3.Connection:
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, timeout=0, isolation_level=None)
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute("COMMIT")
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        raise _unusable(path, error) from error
    return db


def _unusable(path: str, error: sqlite3.Error) -> DataFolderError:
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
        return DataFolderError(
            f"metadata file {path} is in use by another process: stop it, or use another data folder"
        )
    if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return DataFolderError(f"metadata file {path} cannot be opened for writing ({error}): check folder and rights")
    return DataFolderError(
        f"metadata file {path} is damaged ({error}): put back a copy of it; the logs beside it are not touched"
    )


def _refusal(path: str, error: sqlite3.Error) -> CoordinationError:
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
        return CoordinationError(
            f"metadata file {path}: the disk is full, nothing was changed; make room and try again"
        )
    return CoordinationError(
        f"metadata file {path}: {error}; nothing was changed. Check the disk, then restart the broker"
    )


def _below(prefix: str) -> tuple[str, tuple[str, ...]]:
    """A range of keys as SQL. The last code point bounds it: keys are compared as UTF-8 bytes."""
    return ("key >= ? AND key < ?", (prefix, prefix + "\U0010ffff")) if prefix else ("1", ())
