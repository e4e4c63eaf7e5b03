"""Coordination on etcd, version 3.4 or newer: a thin client on gRPC.

Needs the extra `headrace[etcd]`; `choice` imports this module only when etcd is asked for. gRPC has
threads of its own, which a forked child does not have: make this after every process that the broker forks at start
(the sync helper). It works on asyncio's loop and on uvloop.

What is sent twice when an answer is lost, and what the caller may believe:
- reads, keep-alives and compaction are asked again until the call's deadline;
- a lease is granted under a number that we draw, so that a second grant finds the first;
- a transaction that writes, or compares, is carried out once and its outcome is exact (see `etcd_receipts`);
- deletions without a compare are sent again: they find nothing the second time;
- a transaction of ACTIONS_MAX compares or actions leaves no room for a receipt: it is sent once.
Whoever gets OutcomeUnknown has to look at the keys. Any other CoordinationError means that nothing was changed.

A lease lives on etcd's clock, in whole seconds. Who holds one judges it by a deadline of its own, counted from before
the last renewal was asked for: `keep_alive` that raises says nothing about the lease.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from aetcd import rpc

from headrace.coordination import etcd_watch
from headrace.coordination.etcd_connection import (
    ATTEMPT_SECONDS,
    CALL_SECONDS,
    Doubt,
    EtcdAccess,
    EtcdLink,
    Metadata,
    NoAnswer,
    Node,
)
from headrace.coordination.etcd_messages import key_value_of, range_of, transaction_of
from headrace.coordination.etcd_receipts import Receipts
from headrace.errors import CoordinationError
from headrace.ports.clock import Clock
from headrace.ports.coordination import (
    ACTIONS_MAX,
    Compare,
    Delete,
    KeyValue,
    Listing,
    Put,
    TransactionResult,
    WatchResponse,
    check_transaction,
)

PAGE_KEYS: Final = 2000
"""Keys in one answer to a listing."""
LISTINGS_MAX: Final = 5
"""Times that a listing starts over because its revision was compacted under it."""
KEEP_ALIVE_SHARE: Final = 3
"""A renewal is given up after this part of the lease, so that the next one still comes in time."""


class EtcdCoordination:
    """The Coordination port on etcd. `owner` names this client's receipts; `first` is the node that is asked first, so
    that brokers spread over the nodes.
    """

    def __init__(
        self,
        access: EtcdAccess,
        clock: Clock,
        owner: str,
        first: int = 0,
        call_seconds: float = CALL_SECONDS,
        attempt_seconds: float = ATTEMPT_SECONDS,
    ) -> None:
        self._link = EtcdLink(access, clock, first, call_seconds, attempt_seconds)
        self._receipts = Receipts(self._link, owner)
        self._ttl_seconds: dict[int, int] = {}

    async def get(self, key: str) -> KeyValue | None:
        async def ask(node: Node, seconds: float, metadata: Metadata) -> Any:
            return await node.kv.Range(rpc.RangeRequest(key=key.encode()), timeout=seconds, metadata=metadata)

        found = (await self._link.call(f"read {key}", ask)).kvs
        return key_value_of(found[0]) if found else None

    async def list(self, prefix: str) -> Listing:
        for _ in range(LISTINGS_MAX):
            listing = await self._list_once(prefix)
            if listing is not None:
                return listing
        raise CoordinationError(f"the keys below {prefix} were compacted while they were read, {LISTINGS_MAX} times")

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        return (await self.transact((), (Put(key, value, lease),))).revision

    async def delete(self, key: str) -> int:
        return (await self.transact((), (Delete(key),))).revision

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        check_transaction(compares, actions)
        what = f"write {actions[0].key}" if actions else "compare"
        harmless = not actions or (not compares and not any(isinstance(action, Put) for action in actions))
        if not harmless and max(len(compares), len(actions)) < ACTIONS_MAX:
            return await self._receipts.carry_out(what, compares, actions)
        request = transaction_of(compares, actions)

        async def ask(node: Node, seconds: float, metadata: Metadata) -> Any:
            return await node.kv.Txn(request, timeout=seconds, metadata=metadata)

        doubt = Doubt() if actions else None
        response = await self._link.call(what, ask, doubt=doubt, resend=harmless)
        return TransactionResult(response.succeeded, response.header.revision)

    async def grant_lease(self, ttl_seconds: float) -> int:
        number, whole = secrets.randbits(62) + 1, max(1, math.ceil(ttl_seconds))
        request = rpc.LeaseGrantRequest(ID=number, TTL=whole)

        async def ask(node: Node, seconds: float, metadata: Metadata) -> None:
            try:
                await node.lease.LeaseGrant(request, timeout=seconds, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if "lease already exists" not in str(error.details()):
                    raise

        await self._link.call("grant a lease", ask)
        self._ttl_seconds[number] = whole
        return number

    async def keep_alive(self, lease: int) -> bool:
        async def ask(node: Node, seconds: float, metadata: Metadata) -> int:
            call = node.lease.LeaseKeepAlive(timeout=seconds, metadata=metadata)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                response = await call.read()
            except asyncio.InvalidStateError:
                raise NoAnswer("the stream of the renewal ended") from None
            finally:
                call.cancel()
            if response is grpc.aio.EOF:
                raise NoAnswer("the stream of the renewal ended")
            return int(response.TTL)

        seconds = self._link.call_seconds
        if lease in self._ttl_seconds:
            seconds = min(seconds, self._ttl_seconds[lease] / KEEP_ALIVE_SHARE)
        holds = await self._link.call("renew a lease", ask, seconds) > 0
        if not holds:
            self._ttl_seconds.pop(lease, None)
        return holds

    async def revoke_lease(self, lease: int) -> None:
        async def ask(node: Node, seconds: float, metadata: Metadata) -> None:
            try:
                await node.lease.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease), timeout=seconds, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise

        self._ttl_seconds.pop(lease, None)
        await self._link.call("revoke a lease", ask)

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[WatchResponse]:
        return etcd_watch.watch(self._link, prefix, from_revision)

    async def compact(self, revision: int) -> None:
        async def ask(node: Node, seconds: float, metadata: Metadata) -> None:
            try:
                await node.kv.Compact(rpc.CompactionRequest(revision=revision), timeout=seconds, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if "has been compacted" not in str(error.details()):
                    raise

        await self._link.call(f"compact to revision {revision}", ask)

    async def close(self) -> None:
        await self._link.close()

    async def _list_once(self, prefix: str) -> Listing | None:
        """All pages at the revision of the first; None when that was compacted before the last."""
        entries: list[KeyValue] = []
        revision = 0
        while True:
            request = range_of(prefix, entries[-1].key.encode() if entries else b"", revision, PAGE_KEYS)

            async def ask(node: Node, seconds: float, metadata: Metadata, request: Any = request) -> Any:
                try:
                    return await node.kv.Range(request, timeout=seconds, metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    if "has been compacted" not in str(error.details()):
                        raise
                    return None

            response = await self._link.call(f"list {prefix}", ask)
            if response is None:
                return None
            entries.extend(key_value_of(found) for found in response.kvs)
            revision = revision or response.header.revision
            if not response.more:
                return Listing(tuple(entries), revision)
