"""The coordination port: a small store of keys with revisions, transactions, leases and watches.

Real: coordination.embedded (one node, a SQLite file); coordination.etcd for a cluster. The words and rules are etcd's:
one global revision that each change raises by one, `mod_revision` and `create_revision` per key, transactions that
compare then act, leases that take their keys with them, watches that resume from a revision without loss.
Calls are coroutines; none of them is on the path of a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from headrace.errors import CoordinationError

ACTIONS_MAX: Final = 128
"""Compares, or actions, in one transaction: etcd's own default."""
TRANSACTION_BYTES_MAX: Final = 1 << 20
"""Keys and values in one transaction, with room for the rest below etcd's bound of 1.5 MiB a request."""


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


class Behind(Exception):
    """The watch asks for revisions that the store, or the node asked, does not know of yet: list again. If the listing
    is older than what was seen before, the store was restored from a copy."""


class CoordinationRefused(CoordinationError):
    """The store decided against the request: asking again does not change that."""


class OutcomeUnknown(CoordinationError):
    """The change was sent and no answer came: it may have been made, or may still be. Read before trying again."""


class Coordination(Protocol):
    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str) -> Listing: ...

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Answers the revision of this change."""
        ...

    async def delete(self, key: str) -> int: ...

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        """All actions in one revision if every compare holds, else nothing. Raises OutcomeUnknown when it cannot tell;
        after any other error nothing was changed.
        """
        ...

    async def grant_lease(self, ttl_seconds: float) -> int: ...

    async def keep_alive(self, lease: int) -> bool:
        """False when the lease is gone."""
        ...

    async def revoke_lease(self, lease: int) -> None: ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        """Every change below the prefix with revision >= from_revision, in order. Raises Compacted, and Behind if the
        revision before that is not there yet. Ends with close."""
        ...

    async def compact(self, revision: int) -> None: ...

    async def close(self) -> None: ...


def check_transaction(compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> None:
    """Refuse what no implementation takes: too many parts, too many bytes, a key that is named twice."""
    if len(compares) > ACTIONS_MAX or len(actions) > ACTIONS_MAX:
        raise CoordinationError(f"a transaction takes {ACTIONS_MAX} compares and actions: send it in parts")
    put = {action.key: action.value for action in actions if isinstance(action, Put)}
    size_bytes = sum(len(key.encode()) + len(value) for key, value in put.items())
    if size_bytes > TRANSACTION_BYTES_MAX:
        raise CoordinationError(
            f"a transaction takes {TRANSACTION_BYTES_MAX} bytes of keys and values, this has {size_bytes}: "
            "send it in parts"
        )
    if len(put) != sum(isinstance(action, Put) for action in actions):
        raise CoordinationError("a transaction may write each key once")
    for action in actions:
        if isinstance(action, Delete) and any(
            key == action.key or (action.prefix and key.startswith(action.key)) for key in put
        ):
            raise CoordinationError(f"a transaction may not write and delete below {action.key}")
