"""Transactions whose request or answer is lost on the way: done once, and the caller hears what is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from coordination.coordination_contract import absent
from coordination.etcd_clients import client, reaching, until
from coordination.losing_proxy import LosingProxy
from etcd_nodes import EtcdNodes, etcd_nodes
from headrace.coordination.etcd import EtcdCoordination
from headrace.coordination.etcd_connection import EtcdAccess
from headrace.coordination.etcd_receipts import RECEIPTS
from headrace.errors import CoordinationError
from headrace.ports.coordination import Compare, Delete, OutcomeUnknown, Put, TransactionResult
from proving import proves

DEADLINE_SECONDS = 30.0
ATTEMPT_SECONDS = 0.3


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@dataclass(slots=True)
class Roads:
    """A client that reaches etcd by a losing road first, where it has two by the straight one next; and another."""

    subject: EtcdCoordination
    proxy: LosingProxy
    other: EtcdCoordination


@asynccontextmanager
async def roads(etcd: EtcdNodes, straight: bool = True, call_seconds: float = DEADLINE_SECONDS) -> AsyncIterator[Roads]:
    other = client(etcd, "other")
    await other.transact([], [Delete("", prefix=True)])
    proxy = LosingProxy(etcd.addresses[0])
    lossy = await proxy.start()
    subject = reaching(
        EtcdAccess((lossy, etcd.addresses[0]) if straight else (lossy,)),
        "subject",
        call_seconds=call_seconds,
        attempt_seconds=ATTEMPT_SECONDS,
    )
    try:
        await subject.put("/warm", b"")
        yield Roads(subject, proxy, other)
    finally:
        await subject.close()
        await other.close()
        await proxy.close()


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(2 * DEADLINE_SECONDS):
            await body()

    asyncio.run(within())


async def version(road: Roads, key: str) -> int:
    found = await road.other.get(key)
    return 0 if found is None else found.version


@proves("G3")
def test_a_transaction_whose_answer_is_lost_is_done_once_and_said_to_be_done(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            road.proxy.losing = True
            result = await road.subject.transact([absent("/a")], [Put("/a", b"1"), Put("/b", b"2")])
            assert road.proxy.lost_bytes
            found = await road.other.get("/a")
            assert found is not None
            assert result == TransactionResult(True, found.mod_revision)
            assert await version(road, "/b") == 1

    run(body)


@proves("G3")
def test_a_plain_write_whose_answer_is_lost_does_not_come_back_over_a_newer_one(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            road.proxy.losing = True
            writing = asyncio.ensure_future(road.subject.put("/a", b"old"))

            async def written() -> bool:
                return await version(road, "/a") == 1

            await until("the lost write", written)
            await road.other.put("/a", b"new")
            revision = await writing
            found = await road.other.get("/a")
            assert found is not None
            assert (found.value, found.version) == (b"new", 2)
            assert found.create_revision == revision

    run(body)


@proves("G3")
def test_a_request_that_was_held_up_does_nothing_when_it_comes_after_its_repetition(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            road.proxy.holding = True
            result = await road.subject.transact([], [Put("/a", b"1")])
            assert result.succeeded
            assert road.proxy.held_bytes
            await road.other.delete("/a")
            await road.proxy.release()
            await settled(road)
            assert await version(road, "/a") == 0

    run(body)


@proves("G3")
def test_a_refused_transaction_cannot_come_through_later(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            road.proxy.holding = True
            swapping = asyncio.ensure_future(road.subject.transact([absent("/a")], [Put("/a", b"late")]))
            await until("the request", lambda: road.proxy.held_bytes > 0)
            await road.other.put("/a", b"first")
            assert not (await swapping).succeeded
            await road.other.delete("/a")
            await road.proxy.release()
            await settled(road)
            assert await version(road, "/a") == 0

    run(body)


@proves("G3")
def test_what_etcd_never_answered_is_said_to_be_unknown(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node, straight=False, call_seconds=2 * ATTEMPT_SECONDS) as road:
            road.proxy.losing = True
            with pytest.raises(OutcomeUnknown, match="may have been done"):
                await road.subject.transact([absent("/a")], [Put("/a", b"1")])
            assert await version(road, "/a") == 1
            with pytest.raises(CoordinationError, match="nothing was changed") as read:
                await road.subject.get("/a")
            assert not isinstance(read.value, OutcomeUnknown)
            road.proxy.losing = False

            async def answered() -> bool:
                try:
                    return (await road.subject.transact([Compare("/a", "version", "=", 1)], [Put("/b", b"")])).succeeded
                except CoordinationError:
                    return False

            await until("an answer", answered)

    run(body)


def test_a_transaction_without_room_for_a_receipt_is_sent_once(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            road.proxy.losing = True
            with pytest.raises(OutcomeUnknown):
                await road.subject.transact([], [Put(f"/{n}", b"") for n in range(128)])
            assert {entry.version for entry in (await road.other.list("/1")).entries} == {1}

    run(body)


def test_a_lease_whose_grant_is_lost_is_granted_once(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            road.proxy.losing = True
            lease = await road.subject.grant_lease(60)
            assert await road.subject.keep_alive(lease)
            await road.subject.put("/leased", b"", lease)
            await road.subject.revoke_lease(lease)
            assert await version(road, "/leased") == 0

    run(body)


def test_a_lease_that_lapsed_after_its_lost_write_leaves_no_doubt(one_node: EtcdNodes) -> None:
    """The repetition is refused because the lease is gone; the receipt still tells that the first one was done."""

    async def body() -> None:
        async with roads(one_node) as road:
            lease = await road.subject.grant_lease(60)
            road.proxy.losing = True
            writing = asyncio.ensure_future(road.subject.transact([], [Put("/leased", b"", lease)]))

            async def written() -> bool:
                return await version(road, "/leased") == 1

            await until("the lost write", written)
            await road.other.revoke_lease(lease)
            assert (await writing).succeeded
            assert await version(road, "/leased") == 0

    run(body)


def test_receipts_are_as_many_as_transactions_at_once_and_used_again(one_node: EtcdNodes) -> None:
    async def body() -> None:
        async with roads(one_node) as road:
            for _ in range(3):
                await asyncio.gather(*(road.subject.put(f"/{n}", b"") for n in range(4)))
            again = client(one_node, "subject")
            await again.put("/again", b"")
            await road.subject.put("/warm", b"again")
            await again.put("/again", b"again")
            await again.close()
            assert len((await road.other.list(f"{RECEIPTS}subject/")).entries) == 4
            assert await version(road, "/again") == 2

    run(body)


async def settled(road: Roads) -> None:
    """What the proxy let through has reached etcd, which has answered it and some more."""
    await road.proxy.answered.wait()
    for n in range(20):
        await road.other.put("/later", b"%d" % n)
