from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.cluster import keys
from headrace.cluster.image import Broker, Endpoint, Image
from headrace.cluster.membership import (
    LEASE_SECONDS,
    Membership,
    settle_cluster_id,
)
from headrace.cluster.producer_ids import allocate_producer_ids
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import CoordinationError, DataFolderError, OperatorError, RequestTimedOut
from headrace.ports.coordination import Delete, Put
from headrace.virtual.clock import VirtualClock
from proving import proves

PREFIX = "/headrace/c/"
DEADLINE_SECONDS = 20.0


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


def broker(number: int, incarnation: str = "i") -> Broker:
    return Broker(number, {"inside": Endpoint("127.0.0.1", 9092)}, incarnation, 5, "rack", Endpoint("127.0.0.1", 8082))


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[EmbeddedCoordination, VirtualClock]]:
    clock = VirtualClock()
    coordination = EmbeddedCoordination(str(folder / "metadata.sqlite"), clock)
    try:
        yield coordination, clock
    finally:
        await coordination.close()


async def turns(count: int = 20) -> None:
    """Let tasks that are ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


@proves("G14", "J5")
def test_a_registration_that_is_gone_though_its_lease_lives_is_written_again(tmp_path: Path) -> None:
    """As in a copy of coordination that was made between the two."""

    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            view = ClusterView(coordination, PREFIX, clock, unexpected)
            await view.start()
            member = Membership(coordination, PREFIX, clock, broker(1), unexpected)
            await member.start()
            view.listen(member.follow)
            await asyncio.wait_for(view.wait_for(lambda image: 1 in image.brokers, 10), DEADLINE_SECONDS)
            await coordination.transact((), [Delete(keys.broker_key(PREFIX, 1)), Delete(f"{PREFIX}election/", True)])
            await asyncio.wait_for(view.wait_for(lambda image: 1 not in image.brokers, 10), DEADLINE_SECONDS)
            for _ in range(10):
                clock.advance(LEASE_SECONDS / 4)
                await turns()
            await asyncio.wait_for(view.wait_for(lambda image: 1 in image.brokers, 10), DEADLINE_SECONDS)
            assert member.lease in view.image.controls.candidates
            await member.close()
            await view.close()

    asyncio.run(body())


@proves("L3", "G13", "J5")
def test_a_broker_registers_keeps_its_lease_and_leaves(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            view = ClusterView(coordination, PREFIX, clock, unexpected)
            await view.start()
            member = Membership(coordination, PREFIX, clock, broker(1), unexpected)
            await member.start()
            await asyncio.wait_for(view.wait_for(lambda image: 1 in image.brokers, 10), DEADLINE_SECONDS)
            assert view.image.brokers[1] == broker(1)
            for _ in range(20):
                clock.advance(LEASE_SECONDS / 2)
                await turns()
                assert member.standing
            assert 1 in view.image.brokers
            await member.close()
            assert not member.standing
            await asyncio.wait_for(view.wait_for(lambda image: 1 not in image.brokers, 10), DEADLINE_SECONDS)
            await view.close()

    asyncio.run(body())


@proves("L3")
def test_a_broker_whose_lease_lapsed_becomes_live_again(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            view = ClusterView(coordination, PREFIX, clock, unexpected)
            await view.start()
            member = Membership(coordination, PREFIX, clock, broker(1), unexpected)
            await member.start()
            await turns()
            before = view.image.revision
            clock.advance(3 * LEASE_SECONDS)
            assert not member.standing
            again = view.wait_for(lambda image: image.revision >= before + 2 and 1 in image.brokers, 10)
            await asyncio.wait_for(again, DEADLINE_SECONDS)
            assert member.standing
            await member.close()
            await view.close()

    asyncio.run(body())


def test_a_second_live_broker_of_the_same_number_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            first = Membership(coordination, PREFIX, clock, broker(1, "first"), unexpected)
            await first.start()
            second = Membership(coordination, PREFIX, clock, broker(1, "second"), unexpected)
            starting = asyncio.ensure_future(second.start())
            while not starting.done():
                clock.advance(1)
                await turns()
            with pytest.raises(OperatorError, match=r"node\.id 1 is taken .* 127\.0\.0\.1:9092"):
                await starting
            await first.close()

    asyncio.run(body())


@proves("R4")
def test_the_cluster_id_is_drawn_once_and_kept(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, _):
            assert await settle_cluster_id(coordination, "", lambda: b"\0" * 16) == "A" * 22
            assert await settle_cluster_id(coordination, "", lambda: b"\1" * 16) == "A" * 22
            assert await settle_cluster_id(coordination, "A" * 22, lambda: b"\1" * 16) == "A" * 22
            with pytest.raises(DataFolderError, match="belongs to cluster 'AAAA"):
                await settle_cluster_id(coordination, "mine", lambda: b"\1" * 16)

    asyncio.run(body())


@proves("J10", "R4")
def test_producer_ids_are_given_out_once_over_restarts_and_rivals(tmp_path: Path) -> None:
    async def body() -> None:
        draw = random.Random(1).randbytes
        ids: set[int] = set()
        for _ in range(3):
            async with opened(tmp_path) as (coordination, _):
                blocks = await asyncio.gather(*(allocate_producer_ids(coordination, PREFIX, draw) for _ in range(5)))
                assert all(len(block) == 1000 and ids.isdisjoint(block) for block in blocks)
                ids.update(*blocks)
        assert len(ids) == 15_000

    asyncio.run(body())


@proves("G14", "J10")
def test_no_producer_id_twice_though_the_counter_was_put_back_unseen(tmp_path: Path) -> None:
    """A broker that was cut off has seen less than the copy holds: to it, nothing has gone back."""

    async def body() -> None:
        draw = random.Random(1).randbytes
        async with opened(tmp_path) as (coordination, _):
            for copied in (False, True):
                copy = await coordination.get(keys.producer_ids_key(PREFIX))
                assert (copy is not None) == copied
                before = [await allocate_producer_ids(coordination, PREFIX, draw) for _ in range(5)]
                if copy is None:
                    await coordination.delete(keys.producer_ids_key(PREFIX))
                else:
                    await coordination.put(copy.key, copy.value)
                after = [await allocate_producer_ids(coordination, PREFIX, draw) for _ in range(5)]
                assert len(set().union(*before, *after)) == 10_000

    asyncio.run(body())


def test_no_producer_ids_from_coordination_that_was_put_back(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, _):
            await coordination.put("a", b"")
            seen = await coordination.put("a", b"")
            assert len(await allocate_producer_ids(coordination, PREFIX, bytes, seen)) == 1000
            with pytest.raises(CoordinationError, match="it was put back to an older copy"):
                await allocate_producer_ids(coordination, PREFIX, bytes, seen + 100)

    asyncio.run(body())


@proves("L2")
def test_a_view_left_behind_by_compaction_lists_again(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            view = ClusterView(coordination, PREFIX, clock, unexpected)
            changes: list[tuple[Image, Image]] = []
            view.listen(lambda old, new: changes.append((old, new)))
            await view.start()
            for number in range(5):
                revision = await coordination.put(keys.cluster_config_key(PREFIX), b'{"n":"%d"}' % number)
            await coordination.compact(revision)
            image = await asyncio.wait_for(
                view.wait_for(lambda image: image.cluster_config == {"n": "4"}, 10), DEADLINE_SECONDS
            )
            assert image.revision >= revision
            assert all(new.version == old.version + 1 for old, new in changes)
            await view.close()

    asyncio.run(body())


def test_a_wait_that_is_not_met_ends_at_its_deadline(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            view = ClusterView(coordination, PREFIX, clock, unexpected)
            await view.start()
            waiting = asyncio.ensure_future(view.wait_for(lambda image: "t" in image.topics, 5))
            await turns()
            clock.advance(6)
            with pytest.raises(RequestTimedOut, match="5 s"):
                await asyncio.wait_for(waiting, DEADLINE_SECONDS)
            stopped = asyncio.ensure_future(view.wait_for(lambda image: "t" in image.topics, 5))
            await turns()
            await view.close()
            with pytest.raises(CoordinationError, match="stopping"):
                await stopped

    asyncio.run(body())


def test_the_owner_hears_of_a_view_that_cannot_go_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with opened(tmp_path) as (coordination, clock):
            failures: asyncio.Queue[BaseException] = asyncio.Queue()
            view = ClusterView(coordination, PREFIX, clock, failures.put_nowait)

            def refuse(_old: Image, new: Image) -> None:
                if new.cluster_config:
                    raise RuntimeError("listener")

            view.listen(refuse)
            await view.start()
            await coordination.transact([], [Put(keys.cluster_config_key(PREFIX), b'{"a":"b"}')])
            assert isinstance(await asyncio.wait_for(failures.get(), DEADLINE_SECONDS), RuntimeError)
            await view.close()

    asyncio.run(body())
