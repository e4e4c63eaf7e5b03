"""The coordination port: a small store of keys with revisions, transactions, leases and watches.

Real: cluster.embedded (one node, a SQLite file); etcd for a cluster. The words and rules are etcd's: one global
revision that each change raises by one, `mod_revision` and `create_revision` per key, transactions that compare then
act, leases that take their keys with them, watches that resume from a revision without loss.
Calls are coroutines; none of them is on the path of a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Compare:
    """True when the key's attribute stands in this relation to the number. A key that is not there has revision 0."""

    key: str
    attribute: Literal["mod_revision", "create_revision", "version"]
    relation: Literal["=", "!=", "<", ">"]
    number: int


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class TransactionResult:
    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys below a prefix, in key order, at one revision."""

    entries: tuple[KeyValue, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    kind: Literal["put", "delete"]
    key: str
    value: bytes
    mod_revision: int


@dataclass(frozen=True, slots=True)
class WatchResponse:
    """All changes of one or more whole revisions; never half a transaction."""

    revision: int
    events: tuple[Event, ...]


class Compacted(Exception):
    """The watch asks for revisions that are gone: list again and watch from there."""


class Coordination(Protocol):
    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Answers the revision of this change."""
        ...

    async def delete(self, key: str) -> int: ...

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        """All actions in one revision if every compare holds, else nothing."""
        ...

    async def grant_lease(self, ttl_seconds: float) -> int: ...

    async def keep_alive(self, lease: int) -> bool:
        """False when the lease is gone."""
        ...

    async def revoke_lease(self, lease: int) -> None: ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        """Every change below the prefix with revision >= from_revision, in order. Raises Compacted."""
        ...

    async def compact(self, revision: int) -> None: ...

    async def close(self) -> None: ...
