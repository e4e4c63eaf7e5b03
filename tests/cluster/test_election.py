from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace.cluster import keys
from headrace.cluster.controller_state import Controls
from headrace.cluster.election import Election, Term, may_claim, predecessor
from headrace.cluster.image import Broker, Image, Previous
from headrace.cluster.membership import LEASE_SECONDS, Membership
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import OperatorError
from headrace.ports.coordination import Delete, Put
from headrace.virtual.clock import VirtualClock
from proving import proves

PREFIX = "/headrace/c/"


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Peer:
    """A broker as far as elections know it."""

    def __init__(self, coordination: EmbeddedCoordination, clock: VirtualClock, broker: Broker) -> None:
        self.view = ClusterView(coordination, PREFIX, clock, unexpected)
        self.membership = Membership(coordination, PREFIX, clock, broker, unexpected)
        self.election = Election(coordination, self.view, self.membership)

    async def start(self) -> None:
        await self.view.start()
        await self.membership.start()

    async def close(self) -> None:
        await self.membership.close()
        await self.view.close()

    def won(self) -> Term:
        assert self.election.term is not None
        return self.election.term


def cluster(folder: Path, brokers: Sequence[Broker], body: Callable[..., object]) -> None:
    async def within() -> None:
        clock = VirtualClock()
        coordination = EmbeddedCoordination(str(folder / "metadata.sqlite"), clock)
        peers = [Peer(coordination, clock, broker) for broker in brokers]
        for peer in peers:
            await peer.start()
        await turns()
        result = body(coordination, clock, *peers)
        assert asyncio.iscoroutine(result)
        await result
        for peer in peers:
            await peer.close()
        await coordination.close()

    asyncio.run(within())


def brokers(count: int) -> list[Broker]:
    return [Broker(number, {}, f"i{number}", 5) for number in range(1, count + 1)]


@proves("G3")
def test_candidates_wait_in_order_for_the_one_just_before_them() -> None:
    image = Image(PREFIX, controls=Controls(candidates={30: 5, 10: 7, 20: 9}))
    assert [predecessor(image, lease) for lease in (30, 10, 20)] == [None, 30, 10]
    assert [may_claim(image, lease) for lease in (30, 10, 20)] == [True, False, False]
    assert not may_claim(image, 40)


@proves("G3")
def test_the_next_in_line_takes_over_with_a_higher_epoch(tmp_path: Path) -> None:
    async def body(_: EmbeddedCoordination, clock: VirtualClock, first: Peer, second: Peer, third: Peer) -> None:
        assert await third.election.claim() is None
        assert await second.election.claim() is None
        term = await first.election.claim()
        assert term is not None
        assert (term.epoch, first.election.term) == (1, term)
        await first.membership.close()
        await turns()
        assert first.election.term is None
        assert await third.election.claim() is None
        assert await second.election.claim() is not None
        assert second.won().epoch == 2

    cluster(tmp_path, brokers(3), body)


@proves("G3")
def test_a_controller_that_was_paused_wakes_up_and_can_change_nothing(tmp_path: Path) -> None:
    async def body(coordination: EmbeddedCoordination, clock: VirtualClock, first: Peer, second: Peer) -> None:
        term = await first.election.claim()
        assert term is not None
        await first.membership.stop_renewing()
        await first.view.close()  # from here on it hears nothing
        for _ in range(4):
            clock.advance(LEASE_SECONDS / 2)
            await turns()
        assert first.election.term is None
        # The fence alone stops it too, before and after somebody else has won.
        change = [Put(PREFIX + "anything", b"{}")]
        assert not (await coordination.transact(term.fence, change)).succeeded
        assert await second.election.claim() is not None
        assert not (await coordination.transact(term.fence, change)).succeeded
        assert (await coordination.transact(second.won().fence, change)).succeeded

    cluster(tmp_path, brokers(2), body)


@proves("G3")
def test_a_controller_whose_lease_lapsed_stands_again_at_the_end_of_the_line(tmp_path: Path) -> None:
    async def body(_: EmbeddedCoordination, clock: VirtualClock, first: Peer, second: Peer) -> None:
        assert await first.election.claim() is not None
        clock.advance(3 * LEASE_SECONDS)  # both lapse; they register again in the order in which they renew
        await turns(60)
        assert first.election.term is None
        winners = [peer for peer in (first, second) if await peer.election.claim() is not None]
        assert len(winners) == 1
        assert winners[0].won().epoch == 2

    cluster(tmp_path, brokers(2), body)


@proves("G3")
def test_a_term_ends_when_its_key_is_another_though_of_no_higher_epoch(tmp_path: Path) -> None:
    async def body(coordination: EmbeddedCoordination, clock: VirtualClock, first: Peer) -> None:
        key = keys.controller_key(PREFIX)
        assert await first.election.claim() is not None
        for change in (Put(key, keys.encode({"broker": 2, "epoch": 1})), Delete(key)):
            await coordination.transact((), [change])
            await turns()
            assert first.election.term is None
            assert first.election.is_due
            assert await first.election.claim() is not None
            assert (await coordination.transact(first.won().fence, [Put(PREFIX + "anything", b"{}")])).succeeded

    cluster(tmp_path, brokers(1), body)


@proves("G13")
def test_a_broker_that_returns_before_its_lease_ends_replaces_its_own_registration(tmp_path: Path) -> None:
    async def body(coordination: EmbeddedCoordination, clock: VirtualClock, first: Peer, second: Peer) -> None:
        assert await first.election.claim() is not None
        await first.membership.stop_renewing()  # killed
        again = Peer(coordination, clock, Broker(1, {}, "j1", 9, previous=Previous("i1", "b", False)))
        await again.start()
        await turns()
        found = second.view.image.brokers[1]
        assert (found.incarnation, found.previous) == ("j1", Previous("i1", "b", False))
        assert set(second.view.image.controls.candidates) == {second.membership.lease, again.membership.lease}
        assert await second.election.claim() is not None
        await again.close()

    cluster(tmp_path, brokers(2), body)


@proves("G13")
def test_a_broker_notices_a_copy_of_itself(tmp_path: Path) -> None:
    async def body(coordination: EmbeddedCoordination, clock: VirtualClock, first: Peer) -> None:
        failures: list[BaseException] = []
        first.membership._failed = failures.append
        first.view.listen(first.membership.follow)
        copy = Peer(coordination, clock, Broker(1, {}, "copy", 9, previous=Previous("i1", "b", False)))
        await copy.start()
        await turns()
        with pytest.raises(OperatorError, match=r"node\.id 1 was taken over"):
            raise failures[0]
        await copy.close()

    cluster(tmp_path, brokers(1), body)


@proves("G13")
def test_a_leaving_broker_says_so(tmp_path: Path) -> None:
    async def body(_: EmbeddedCoordination, clock: VirtualClock, first: Peer) -> None:
        await first.membership.leave()
        await turns()
        assert first.view.image.brokers[1].state == "leaving"
        await first.membership.close()
        await turns()
        assert first.view.image.brokers == {}
        assert keys.broker_key(PREFIX, 1) == "/headrace/c/brokers/1"

    cluster(tmp_path, brokers(1), body)
