from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.cluster import keys
from headrace.cluster.controller import UNFINISHED_SECONDS, Controller
from headrace.cluster.controller_core import Rules
from headrace.cluster.image import (
    CREATING,
    NO_LEADER,
    Broker,
    Image,
    PartitionState,
    Previous,
    Topic,
    encode_partition,
    encode_topic,
)
from headrace.cluster.membership import LEASE_SECONDS, ClusterAccess, Membership
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import InvalidConfig
from headrace.ports.coordination import Compare, Coordination, Delete, Put, TransactionResult
from headrace.virtual.clock import VirtualClock
from proving import proves

PREFIX = "/headrace/c/"
TOPIC_ID = b"t" * 16


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


class Gated:
    """Coordination whose transactions can be held back on their way there, as those of a paused process are."""

    def __init__(self, coordination: EmbeddedCoordination) -> None:
        self._coordination = coordination
        self.open = asyncio.Event()
        self.open.set()
        self.held = 0
        self.answers: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordination, name)

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        if not self.open.is_set():
            self.held += 1
            await self.open.wait()
        result = await self._coordination.transact(compares, actions)
        self.answers.append(result.succeeded)
        return result


class Peer:
    """A broker as far as the controller knows it."""

    def __init__(self, cluster: Cluster, broker: Broker) -> None:
        self.gate = Gated(cluster.coordination)
        coordination: Coordination = self.gate
        self.view = ClusterView(coordination, PREFIX, cluster.clock, unexpected)
        self.membership = Membership(cluster.coordination, PREFIX, cluster.clock, broker, unexpected)
        access = ClusterAccess(coordination, self.view, self.membership, cluster.clock, unexpected)
        self.controller = Controller(access, lambda topic: cluster.rules(topic))

    async def start(self) -> None:
        await self.view.start()
        await self.membership.start()
        self.controller.start()

    async def kill(self) -> None:
        await self.membership.stop_renewing()
        await self.controller.close()
        await self.view.close()

    async def close(self) -> None:
        await self.kill()
        await self.membership.close()


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.coordination = EmbeddedCoordination(str(folder / "metadata.sqlite"), self.clock)
        self.peers: dict[int, Peer] = {}
        self.rules: Callable[[Topic], Rules] = lambda _: Rules()

    async def add(self, number: int, previous: Previous | None = None, incarnation: str = "") -> Peer:
        drawn = incarnation or f"{number}a"
        peer = self.peers[number] = Peer(self, Broker(number, {}, drawn, 5, boot="b", previous=previous))
        await peer.start()
        await self.turns()
        return peer

    async def turns(self, count: int = 40) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def let_pass(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            for peer in self.peers.values():
                peer.controller.tick()
            await self.turns()

    async def until(self, holds: Callable[[Image], bool], seconds: float) -> Image:
        """An image, as the last broker sees it, for which it holds."""
        for _ in range(round(seconds / 0.5)):
            image = list(self.peers.values())[-1].view.image
            if holds(image):
                return image
            await self.let_pass(0.5)
        raise AssertionError(f"not within {seconds} s: {list(self.peers.values())[-1].view.image.topics}")

    async def create(self, states: Sequence[PartitionState], name: str = "t") -> None:
        topic = Topic(name, TOPIC_ID if name == "t" else name.encode().ljust(16), ())
        await self.coordination.put(keys.topic_key(PREFIX, name), encode_topic(topic, len(states)))
        for state in states:
            key = keys.partition_key(PREFIX, name, state.index)
            await self.coordination.put(key, encode_partition(topic.id, state))
        await self.turns()


def led(index: int, leader: int, isr: Sequence[int], replicas: Sequence[int]) -> PartitionState:
    return PartitionState(
        index, leader, 1, tuple(isr), tuple(replicas), incarnations={member: f"{member}a" for member in isr}
    )


def leaders(image: Image) -> list[int]:
    return [state.leader for state in image.topics["t"].partitions]


def run(folder: Path, body: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        cluster = Cluster(folder)
        await body(cluster)
        for peer in cluster.peers.values():
            await peer.close()
        await cluster.coordination.close()

    asyncio.run(asyncio.wait_for(within(), 60))


@proves("G14")
def test_the_leaderships_of_a_dead_broker_move_as_soon_as_its_lease_has_ended(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2, 3):
            await cluster.add(number)
        await cluster.let_pass(1.5 * LEASE_SECONDS)
        await cluster.create(
            [led(n, 1 + n % 3, (1, 2, 3), (1 + n % 3, 1 + (n + 1) % 3, 1 + (n + 2) % 3)) for n in range(130)]
        )
        await cluster.let_pass(1)
        assert leaders(cluster.peers[3].view.image) == [1 + n % 3 for n in range(130)]
        await cluster.peers.pop(1).kill()  # the controller, too
        image = await cluster.until(lambda image: 1 not in leaders(image), LEASE_SECONDS + 2)
        assert leaders(image) == [2 if n % 3 == 0 else 1 + n % 3 for n in range(130)]
        moved = image.topics["t"].partitions[0]
        assert (moved.leader_epoch, set(moved.isr), moved.controller) == (2, {2, 3}, 2)

    run(tmp_path, body)


@proves("G14")
def test_a_leader_that_returns_in_time_stays_in_sync_and_one_that_was_there_leads(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2):
            await cluster.add(number)
        await cluster.create([led(0, 2, (1, 2), (2, 1))])
        await cluster.peers.pop(2).kill()
        await cluster.add(2, Previous("2a", "b", False), "2b")
        image = await cluster.until(lambda image: image.topics["t"].partitions[0].leader_epoch == 2, 2)
        state = image.topics["t"].partitions[0]
        assert (state.leader, state.isr, dict(state.incarnations)) == (1, (1, 2), {1: "1a", 2: "2b"})

    run(tmp_path, body)


@proves("G3")
def test_a_zombie_controller_wakes_up_and_changes_nothing(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2, 3):
            await cluster.add(number)
        await cluster.let_pass(1.5 * LEASE_SECONDS)
        await cluster.create([led(0, 3, (1, 2, 3), (3, 1, 2))])
        zombie = cluster.peers.pop(1)
        zombie.gate.open.clear()
        await cluster.peers.pop(3).kill()
        while not zombie.gate.held:  # its decision about broker 3 is on its way
            await cluster.let_pass(0.5)
            zombie.controller.tick()
        assert zombie.controller.election.term is not None
        await zombie.membership.stop_renewing()
        image = await cluster.until(lambda image: leaders(image) == [2], 2 * LEASE_SECONDS)
        before = image.topics["t"].partitions[0]
        zombie.gate.answers.clear()
        zombie.gate.open.set()
        await cluster.turns()
        await cluster.let_pass(2)
        assert zombie.gate.answers == [False], "what was under way is fenced, and it tries nothing more"
        assert zombie.controller.election.term is None
        assert cluster.peers[2].view.image.topics["t"].partitions[0] == before
        await zombie.close()

    run(tmp_path, body)


def test_a_new_controller_waits_a_lease_time_for_brokers_that_it_never_saw(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.create([led(0, 2, (1, 2), (2, 1))])
        await cluster.add(1)
        await cluster.let_pass(LEASE_SECONDS - 1)
        assert leaders(cluster.peers[1].view.image) == [2]
        image = await cluster.until(lambda image: leaders(image) == [1], 2)
        assert image.topics["t"].partitions[0].isr == (1,)

    run(tmp_path, body)


@proves("G14")
def test_a_broker_that_leaves_hands_over_at_once(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2):
            await cluster.add(number)
        await cluster.create([led(0, 1, (1, 2), (1, 2)), led(1, 1, (1,), (1,))])
        await cluster.peers[1].membership.leave()
        image = await cluster.until(lambda image: leaders(image) == [2, 1], 1)
        assert image.topics["t"].partitions[0].isr == (2,)
        await cluster.peers.pop(1).close()
        await cluster.until(lambda image: leaders(image) == [2, NO_LEADER], 1)

    run(tmp_path, body)


def test_a_conflict_holds_up_only_the_partition_that_it_is_about(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2):
            await cluster.add(number)
        await cluster.let_pass(1.5 * LEASE_SECONDS)
        await cluster.create([led(n, 2, (1, 2), (2, 1)) for n in range(5)])
        controller = cluster.peers[1]
        controller.gate.open.clear()
        await cluster.peers.pop(2).kill()
        while not controller.gate.held:
            await cluster.let_pass(0.5)
        other = replace(led(3, 2, (2,), (2, 1)), leader_epoch=7)
        await cluster.coordination.put(keys.partition_key(PREFIX, "t", 3), encode_partition(TOPIC_ID, other))
        controller.gate.answers.clear()
        controller.gate.open.set()
        image = await cluster.until(lambda image: leaders(image) == [1, 1, 1, NO_LEADER, 1], 2)
        assert controller.gate.answers == [False, True, True, True, False, True, True]
        assert image.topics["t"].partitions[3].leader_epoch == 7

    run(tmp_path, body)


@proves("J7")
def test_a_topic_whose_creator_died_is_removed_after_a_while(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.add(1)
        topic = Topic("half", TOPIC_ID, (), state=CREATING)
        await cluster.coordination.put(keys.topic_key(PREFIX, "half"), encode_topic(topic, 5))
        await cluster.let_pass(UNFINISHED_SECONDS / 2)
        assert "half" in cluster.peers[1].view.image.unfinished
        await cluster.until(lambda image: not image.unfinished, UNFINISHED_SECONDS)

    run(tmp_path, body)


@proves("G3")
def test_a_candidate_whose_turn_came_while_it_did_not_stand_claims_when_it_stands_again(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        first, second = await cluster.add(1), await cluster.add(2)
        second.membership._deadline = float("-inf")
        del cluster.peers[1]
        await first.close()
        await cluster.turns()
        assert not second.membership.standing
        image = await cluster.until(lambda image: image.controls.controller is not None, 1)
        assert image.controls.controller is not None
        assert image.controls.controller.broker == 1
        await cluster.until(lambda image: getattr(image.controls.controller, "broker", 0) == 2, LEASE_SECONDS)

    run(tmp_path, body)


@proves("G14")
def test_a_topic_whose_settings_cannot_be_read_holds_up_no_other(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        for number in (1, 2):
            await cluster.add(number)
        await cluster.create([led(0, 1, (1, 2), (1, 2))], "a bad one")
        await cluster.create([led(0, 1, (1, 2), (1, 2))])

        def rules(topic: Topic) -> Rules:
            if topic.name != "t":
                raise InvalidConfig("durability is 'none'")
            return Rules()

        cluster.rules = rules
        await cluster.let_pass(1.5 * LEASE_SECONDS)
        await cluster.peers.pop(1).kill()
        image = await cluster.until(lambda image: leaders(image) == [2], LEASE_SECONDS + 2)
        assert image.topics["a bad one"].partitions[0].leader == 1
        cluster.rules = lambda _: Rules()
        await cluster.create([led(0, 1, (1, 2), (1, 2))], "a bad one")
        await cluster.until(lambda image: image.topics["a bad one"].partitions[0].leader == 2, 2)

    run(tmp_path, body)
