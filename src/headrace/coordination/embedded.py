"""Coordination for a single node: a store of revisions (`revisions`) in one SQLite file, owned by one process.

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
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from headrace.coordination.revisions import HISTORY_MAX, RevisionStore
from headrace.errors import CoordinationError, DataFolderError
from headrace.ports.clock import Clock
from headrace.ports.coordination import (
    Compare,
    Delete,
    Event,
    KeyValue,
    Listing,
    Put,
    TransactionResult,
    WatchResponse,
)

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


class SqliteTable:
    """Keys and history in one file, and the counters that go on rising over restarts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False
        self._db = _open(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._closed:
            raise CoordinationError(f"metadata file {self._path} is closed: the broker is stopping")
        try:
            self._db.execute("BEGIN")
            yield
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

    def counter(self, name: str) -> int:
        return int(self._db.execute("SELECT number FROM counters WHERE name = ?", (name,)).fetchone()[0])

    def _count(self, name: str, number: int) -> None:
        self._db.execute("UPDATE counters SET number = ? WHERE name = ?", (number, name))

    def get(self, key: str) -> KeyValue | None:
        row = self._db.execute(f"SELECT {KEY_COLUMNS} FROM keys WHERE key = ?", (key,)).fetchone()
        return None if row is None else KeyValue(*row)

    def below(self, prefix: str) -> Sequence[KeyValue]:
        where, bounds = _below(prefix)
        rows = self._db.execute(f"SELECT {KEY_COLUMNS} FROM keys WHERE {where} ORDER BY key", bounds)
        return [KeyValue(*row) for row in rows]

    def leased(self, lease: int) -> Sequence[str]:
        return [key for (key,) in self._db.execute("SELECT key FROM keys WHERE lease = ? ORDER BY key", (lease,))]

    def all_leased(self) -> Sequence[str]:
        return [key for (key,) in self._db.execute("SELECT key FROM keys WHERE lease != 0 ORDER BY key")]

    def put(self, entry: KeyValue) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO keys ({KEY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
            (entry.key, entry.value, entry.create_revision, entry.mod_revision, entry.version, entry.lease),
        )

    def delete(self, keys: Iterable[str]) -> None:
        self._db.executemany("DELETE FROM keys WHERE key = ?", [(key,) for key in keys])

    def record(self, revision: int, events: Sequence[Event]) -> None:
        self._db.executemany(
            "INSERT INTO history VALUES (?, ?, ?, ?, ?)",
            [(revision, position, event.kind, event.key, event.value) for position, event in enumerate(events)],
        )
        self._count("revision", revision)

    def events(self, prefix: str, first: int, last: int) -> Sequence[Event]:
        where, bounds = _below(prefix)
        rows = self._db.execute(
            "SELECT kind, key, value, revision FROM history "
            f"WHERE revision BETWEEN ? AND ? AND {where} ORDER BY revision, position",
            (first, last, *bounds),
        )
        return [Event(*row) for row in rows]

    def forget_before(self, revision: int) -> None:
        self._db.execute("DELETE FROM history WHERE revision < ?", (revision,))
        self._count("compacted", revision)

    def next_lease(self) -> int:
        lease = self.counter("lease") + 1
        self._count("lease", lease)
        return lease

    def close(self) -> None:
        self._closed = True
        with suppress(sqlite3.Error):
            self._db.close()


class EmbeddedCoordination:
    """The Coordination port on one SQLite file."""

    def __init__(self, path: str, clock: Clock, history_max: int = HISTORY_MAX) -> None:
        self._table = table = SqliteTable(path)
        self._store = RevisionStore(table, clock, table.counter("revision"), table.counter("compacted"), history_max)
        self._closed = False
        with table.transaction():
            of_the_process_before = table.all_leased()
        self._store.change((), [Delete(key) for key in of_the_process_before])

    async def get(self, key: str) -> KeyValue | None:
        return self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        return self._store.list(prefix)

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return self._store.transact((), (Put(key, value, lease),)).revision

    async def delete(self, key: str) -> int:
        return self._store.transact((), (Delete(key),)).revision

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        return self._store.transact(compares, actions)

    async def grant_lease(self, ttl_seconds: float) -> int:
        return self._store.grant(ttl_seconds)

    async def keep_alive(self, lease: int) -> bool:
        return self._store.renew(lease)

    async def revoke_lease(self, lease: int) -> None:
        self._store.revoke(lease)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        store, following = self._store, from_revision
        store.check_known(following)
        while not self._closed:
            if following > store.revision:
                await self._changed()
                continue
            last = min(store.revision, following + WATCH_REVISIONS_MAX - 1)
            response = store.changes(prefix, following, last)
            following = last + 1
            if response is not None:
                yield response

    async def compact(self, revision: int) -> None:
        self._store.compact(revision)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._store.halt_leases()
            self._store.tell_watches()
            self._table.close()

    async def _changed(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told() -> None:
            if not waiting.done():
                waiting.set_result(None)

        self._store.watching(told)
        try:
            await waiting
        finally:
            self._store.not_watching(told)


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
