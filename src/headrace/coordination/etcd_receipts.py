"""Transactions that etcd carries out once, though they may be sent more than once.

etcd does not know a request that it has seen before, so a transaction carries its own receipt: it compares the
revision of a receipt key and, in the same revision as its actions, writes its tag there. Sent again it finds the
receipt changed, and the tag says that it was done, and at which revision. When a transaction is refused after an
attempt without an answer, the receipt is changed first, so that the lost attempt can never come through later: then
"not done" is certain too. Only when etcd stays silent until the call's deadline is the outcome unknown.

    /headrace/.receipts/<owner>/<slot>    <process>.<number of the transaction>, "!" behind it when it was shut out

A slot serves one transaction at a time; the number of slots is that of transactions under way at once. The owner is the
broker's number, so that the slots of a process are used again by the next one, which shuts out what its predecessor
left on the way.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aetcd import rpc

from headrace.coordination.etcd_connection import Ask, Doubt, EtcdLink, Metadata, Node
from headrace.coordination.etcd_messages import get_operation, transaction_of
from headrace.errors import CoordinationError
from headrace.ports.coordination import Compare, Delete, OutcomeUnknown, Put, TransactionResult

RECEIPTS: Final = "/headrace/.receipts/"
TAKEN_MAX: Final = 5
"""Times that a slot is found used by another process of the same owner before a transaction gives up."""


@dataclass(slots=True)
class _Slot:
    key: str
    revision: int | None = None
    """Of its key as we left it, 0 when it is not there; None when it has to be read."""

    def unmoved(self) -> Compare:
        assert self.revision is not None
        return Compare(self.key, "mod_revision", "=", self.revision)


class Receipts:
    def __init__(self, link: EtcdLink, owner: str) -> None:
        self._link = link
        self._owner = owner
        self._process = secrets.token_hex(6)
        self._number = 0
        self._free: list[_Slot] = []
        self._slots = 0

    async def carry_out(
        self, what: str, compares: Sequence[Compare], actions: Sequence[Put | Delete]
    ) -> TransactionResult:
        slot = self._take()
        try:
            for _ in range(TAKEN_MAX):
                if slot.revision is None:
                    slot.revision = (await self._read(what, slot))[0]
                self._number += 1
                tag = f"{self._process}.{self._number}".encode()
                result = await self._once(what, slot, tag, compares, actions)
                if result is not None:
                    return result
                slot.revision = None
        except BaseException:
            slot.revision = None
            raise
        finally:
            self._free.append(slot)
        raise CoordinationError(
            f"could not {what}: another process writes the receipts of broker {self._owner}; nothing was changed. "
            "Give each broker a node.id of its own"
        )

    async def _once(
        self, what: str, slot: _Slot, tag: bytes, compares: Sequence[Compare], actions: Sequence[Put | Delete]
    ) -> TransactionResult | None:
        """None when the slot was not as we left it and nothing was done."""
        request = transaction_of(
            (*compares, slot.unmoved()), (*actions, Put(slot.key, tag)), (get_operation(slot.key),)
        )
        doubt = Doubt()
        try:
            response = await self._link.call(what, _transact(request), doubt=doubt)
        except OutcomeUnknown:
            raise
        except CoordinationError:
            if not doubt.any:
                raise
            done = await self._shut_out(what, slot, tag)
            if done is None:
                raise
            return done
        if response.succeeded:
            slot.revision = response.header.revision
            return TransactionResult(True, response.header.revision)
        revision, value = _receipt(response)
        if value == tag:
            slot.revision = revision
            return TransactionResult(True, revision)
        if revision != slot.revision:
            if doubt.any:
                raise OutcomeUnknown(f"could not learn whether etcd could {what}: the receipt {slot.key} was changed")
            return None
        if not doubt.any:
            return TransactionResult(False, response.header.revision)
        return await self._shut_out(what, slot, tag) or TransactionResult(False, response.header.revision)

    async def _shut_out(self, what: str, slot: _Slot, tag: bytes) -> TransactionResult | None:
        """The result of a transaction that was done after all; None when it was not, and now never will be."""
        shut = tag + b"!"
        request = transaction_of((slot.unmoved(),), (Put(slot.key, shut),), (get_operation(slot.key),))
        doubt = Doubt(True)
        response = await self._link.call(what, _transact(request), doubt=doubt)
        if response.succeeded:
            slot.revision = response.header.revision
            return None
        slot.revision, value = _receipt(response)
        if value == tag:
            return TransactionResult(True, slot.revision)
        if value == shut:
            return None
        raise OutcomeUnknown(f"could not learn whether etcd could {what}: the receipt {slot.key} was changed")

    async def _read(self, what: str, slot: _Slot) -> tuple[int, bytes]:
        async def ask(node: Node, seconds: float, metadata: Metadata) -> Any:
            return await node.kv.Range(rpc.RangeRequest(key=slot.key.encode()), timeout=seconds, metadata=metadata)

        return _found(await self._link.call(what, ask))

    def _take(self) -> _Slot:
        if self._free:
            return self._free.pop()
        self._slots += 1
        return _Slot(f"{RECEIPTS}{self._owner}/{self._slots}")


def _transact(request: Any) -> Ask[Any]:
    async def ask(node: Node, seconds: float, metadata: Metadata) -> Any:
        return await node.kv.Txn(request, timeout=seconds, metadata=metadata)

    return ask


def _receipt(response: Any) -> tuple[int, bytes]:
    return _found(response.responses[0].response_range)


def _found(listing: Any) -> tuple[int, bytes]:
    """Revision and content of the receipt, (0, b"") when it is not there."""
    return (listing.kvs[0].mod_revision, listing.kvs[0].value) if listing.kvs else (0, b"")
