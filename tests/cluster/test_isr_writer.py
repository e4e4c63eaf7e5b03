"""The driver of in-sync sets on real partitions and a real key, with coordination that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from chosen_layout import new_store
from headrace.cluster import keys
from headrace.cluster.controller_state import Doubt, encode_doubt
from headrace.cluster.image import (
    LEAVING,
    LIVE,
    Broker,
    Endpoint,
    Image,
    PartitionState,
    Topic,
    encode_broker,
    encode_partition,
    encode_topic,
)
from headrace.cluster.isr_writer import IsrWriter
from headrace.cluster.membership import ClusterAccess, Membership
from headrace.cluster.view import ClusterView
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.partitions.leader_core import IsrChange
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.coordination import Compare, Delete, OutcomeUnknown, Put, TransactionResult
from headrace.settings.values import log_settings
from headrace.storage.log import TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves

PREFIX = "/headrace/c/"
TOPIC_ID = b"t" * 16
Fate = Literal["answered", "lost on the way there", "answer lost", "late"]


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


class Fateful:
    """Coordination of which the next transactions have the fates in `fates`; the rest are answered."""

    def __init__(self, coordination: EmbeddedCoordination) -> None:
        self._coordination = coordination
        self.fates: list[Fate] = []
        self.late: list[Callable[[], Coroutine[Any, Any, TransactionResult]]] = []
        self.sizes: list[int] = []
        self.before_next: Callable[[], Coroutine[Any, Any, object]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordination, name)

    async def transact(self, compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
        fate = self.fates.pop(0) if self.fates else "answered"
        before, self.before_next = self.before_next, None
        if before is not None:
            await before()
        self.sizes.append(len(actions))
        if fate == "late":
            self.late.append(lambda: self._coordination.transact(compares, actions))
        elif fate != "lost on the way there":
            result = await self._coordination.transact(compares, actions)
            if fate == "answered":
                return result
        raise OutcomeUnknown("no answer")


class Leader:
    """Broker 1, which leads partitions of t that brokers 2 and 3 follow."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self.coordination = EmbeddedCoordination(str(folder / "metadata.sqlite"), self.clock)
        self.fateful = Fateful(self.coordination)
        self.view = ClusterView(self.coordination, PREFIX, self.clock, unexpected)
        self.membership = Membership(self.coordination, PREFIX, self.clock, Broker(1, {}, "1a", 5), unexpected)
        disk = VirtualDisk(self.clock)
        disk.make_folder("/data")
        self.store = new_store(disk, self.clock, "/data")
        self.store.open({})
        self.partitions = Partitions(self.store, self.clock, 1, "1a")
        self.held = False
        self.following = True
        """Whether the image tells the leader at once; else only answers do."""
        self.failures: list[BaseException | None] = []
        access = ClusterAccess(
            self.fateful, self.view, self.membership, self.clock, self.failures.append, lambda: self.held
        )
        self.isr_writer = IsrWriter(access, self.partitions)

    async def start(self, count: int) -> list[Partition]:
        await self.view.start()
        await self.membership.start()
        for number in (2, 3):
            await self.register(number, "a")
        isr = {1: "1a", 2: "2a"}
        topic = Topic("t", TOPIC_ID, ())
        await self.coordination.put(keys.topic_key(PREFIX, "t"), encode_topic(topic, count))
        for index in range(count):
            state = PartitionState(index, 1, 4, (1, 2), (1, 2, 3), incarnations=isr)
            await self.coordination.put(keys.partition_key(PREFIX, "t", index), encode_partition(TOPIC_ID, state))
        await self.turns()
        self.view.listen(self._follow)
        self.isr_writer.start()
        led = []
        for state in self.view.image.topics["t"].partitions:
            log = self.store.create(TopicPartition("t", state.index), TOPIC_ID, log_settings({}, {}))
            led.append(self.partitions.lead(log, 4, state.incarnations, state.replicas, state.revision))
        return led

    def _follow(self, _old: Image, new: Image) -> None:
        for state in new.topics["t"].partitions:
            partition = self.partitions.find("t", state.index)
            if partition is not None and state.leader == 1 and self.following:
                self.partitions.confirmed(partition, state.incarnations, state.revision)

    async def register(self, number: int, run: str, state: str = LIVE) -> int:
        broker = Broker(number, {"inside": Endpoint("127.0.0.1", 9000 + number)}, f"{number}{run}", 5, state=state)
        return await self.coordination.put(keys.broker_key(PREFIX, number), encode_broker(broker))

    def want(self, partition: Partition, *isr: str) -> None:
        """A new set, as the leader's core proposes it."""
        core = partition.core
        assert core is not None
        wanted = {int(member[0]): member for member in isr}
        added = tuple(broker for broker in wanted if core.isr.get(broker) != wanted[broker])
        change = IsrChange(wanted, added, tuple(broker for broker in core.isr if broker not in wanted), "")
        self.partitions.proposed(partition, change)
        self.isr_writer.want(partition, change)

    async def put(self, leader: int, epoch: int, *isr: str, index: int = 0, topic_id: bytes = TOPIC_ID) -> None:
        """Somebody else writes the partition's key."""
        drawn = {int(member[0]): member for member in isr}
        state = PartitionState(index, leader, epoch, tuple(drawn), (1, 2, 3), incarnations=drawn)
        await self.coordination.put(keys.partition_key(PREFIX, "t", index), encode_partition(topic_id, state))

    async def turns(self, count: int = 40) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    async def let_pass(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.clock.advance(0.1)
            await self.turns()

    def key(self, index: int = 0) -> dict[int, str]:
        return dict(self.view.image.topics["t"].partitions[index].incarnations)

    async def close(self) -> None:
        await self.isr_writer.close()
        await self.membership.close()
        await self.view.close()
        await self.coordination.close()
        assert self.failures == []


def run(folder: Path, body: Callable[[Leader, list[Partition]], Coroutine[Any, Any, None]], count: int = 1) -> None:
    async def within() -> None:
        leader = Leader(folder)
        led = await leader.start(count)
        await body(leader, led)
        await leader.close()

    asyncio.run(asyncio.wait_for(within(), 60))


def sets_of(partition: Partition) -> tuple[dict[int, str], object]:
    assert partition.core is not None
    return dict(partition.core.isr), partition.core.proposed_isr


@proves("G16")
def test_changes_of_many_partitions_go_together(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        for partition in led:
            leader.want(partition, "1a", "2a", "3a")
            assert sets_of(partition)[1] == {1: "1a", 2: "2a", 3: "3a"}
        await leader.turns()
        assert all(sets_of(partition) == ({1: "1a", 2: "2a", 3: "3a"}, None) for partition in led)
        assert all(leader.key(index) == {1: "1a", 2: "2a", 3: "3a"} for index in range(len(led)))
        assert leader.fateful.sizes == [60, 40]

    run(tmp_path, body, count=100)


@proves("G16")
def test_a_change_that_was_made_and_whose_answer_was_lost_is_found_out(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.fates = ["answer lost"]
        leader.want(led[0], "1a")
        await leader.let_pass(1)
        assert leader.key() == {1: "1a"}
        assert sets_of(led[0]) == ({1: "1a"}, None)
        assert leader.fateful.sizes == [1], "the view has shown it"

    run(tmp_path, body)


@proves("G16")
def test_a_change_that_never_arrived_is_sent_again(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.fates = ["lost on the way there", "lost on the way there"]
        leader.want(led[0], "1a")
        await leader.turns()
        assert sets_of(led[0]) == ({1: "1a", 2: "2a"}, {1: "1a"}), "both sets count until it is known"
        await leader.let_pass(1)
        assert sets_of(led[0]) == ({1: "1a"}, None)
        assert leader.fateful.sizes == [1, 1, 1]

    run(tmp_path, body)


@proves("G16")
def test_a_change_that_is_made_late_cannot_undo_a_later_one(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.fates = ["late"]
        leader.want(led[0], "1a")
        await leader.let_pass(1)
        assert sets_of(led[0]) == ({1: "1a"}, None)
        leader.want(led[0], "1a", "2a", "3a")
        await leader.let_pass(1)
        assert not (await leader.fateful.late[0]()).succeeded
        await leader.turns()
        assert leader.key() == sets_of(led[0])[0] == {1: "1a", 2: "2a", 3: "3a"}

    run(tmp_path, body)


@proves("G16")
def test_a_broker_that_was_restarted_meanwhile_is_not_taken_in(tmp_path: Path) -> None:
    """KIP-903: what its earlier process had told brings the new one into no set."""

    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.before_next = lambda: leader.register(3, "b")
        leader.want(led[0], "1a", "2a", "3a")
        await leader.turns()
        assert leader.key() == {1: "1a", 2: "2a"}
        assert sets_of(led[0]) == ({1: "1a", 2: "2a"}, None)
        leader.want(led[0], "1a", "2a", "3a")  # asked again, with the view up to date: refused at once
        assert sets_of(led[0]) == ({1: "1a", 2: "2a"}, None)
        assert len(leader.fateful.sizes) == 1

    run(tmp_path, body)


def test_a_conflict_refuses_only_what_it_is_about(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.before_next = lambda: leader.put(2, 5, "2a", index=1)
        for partition in led:
            leader.want(partition, "1a", "2a", "3a")
        await leader.turns()
        assert [leader.key(index) for index in range(3)] == [
            {1: "1a", 2: "2a", 3: "3a"}, {2: "2a"}, {1: "1a", 2: "2a", 3: "3a"},
        ]  # fmt: skip
        assert leader.fateful.sizes == [3, 1, 1, 1]

    run(tmp_path, body, count=3)


def test_without_a_lease_that_holds_for_certain_nothing_is_claimed(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        await leader.membership.stop_renewing()
        await leader.let_pass(20)
        leader.want(led[0], "1a")
        await leader.let_pass(1)
        assert leader.fateful.sizes == []
        assert sets_of(led[0]) == ({1: "1a", 2: "2a"}, None)

    run(tmp_path, body)


BOTH = {1: "1a", 2: "2a"}
ALL = {1: "1a", 2: "2a", 3: "3a"}


@proves("G16")
def test_a_lease_that_ends_while_a_change_is_open_stops_the_sending(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.fates = ["lost on the way there"] * 200
        leader.want(led[0], "1a")
        await leader.membership.stop_renewing()
        await leader.let_pass(12)
        sent = len(leader.fateful.sizes)
        await leader.let_pass(3)
        assert len(leader.fateful.sizes) == sent
        assert sets_of(led[0]) == (BOTH, {1: "1a"}), "nobody knows: both count"

    run(tmp_path, body)


def test_while_changes_are_held_none_is_proposed_and_none_is_sent(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.fateful.fates = ["lost on the way there"]
        leader.want(led[0], "1a")
        await leader.turns()
        leader.held = True
        leader.want(led[1], "1a")
        assert sets_of(led[1]) == (BOTH, None)
        await leader.let_pass(2)
        assert (leader.fateful.sizes, sets_of(led[0])) == ([1], (BOTH, {1: "1a"}))
        leader.held = False
        await leader.let_pass(1)
        assert (leader.fateful.sizes, sets_of(led[0])) == ([1, 1], ({1: "1a"}, None))

    run(tmp_path, body, count=2)


@proves("G14")
@pytest.mark.parametrize("doubter", [1, 2, 3])
def test_no_set_changes_while_a_replica_doubts_the_metadata_though_the_view_is_behind(
    tmp_path: Path, doubter: int
) -> None:
    """A restored copy may have a leader lead again that others have replaced: alone in its set it would acknowledge."""

    async def body(leader: Leader, led: list[Partition]) -> None:
        doubt = encode_doubt(Doubt(doubter, 0, 16, 11, 5))
        leader.fateful.before_next = lambda: leader.coordination.put(keys.doubt_key(PREFIX, doubter), doubt)
        for partition in led:
            leader.want(partition, "1a")
        await leader.turns()
        assert [sets_of(partition) for partition in led] == [(BOTH, None)] * 2
        assert (leader.key(0), leader.key(1)) == (BOTH, BOTH)

    run(tmp_path, body, count=2)


def test_a_doubt_that_was_answered_holds_up_no_change(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        await leader.coordination.put(keys.lineage_key(PREFIX), keys.encode({"number": 1, "id": "ab"}))
        await leader.coordination.put(keys.doubt_key(PREFIX, 2), encode_doubt(Doubt(2, 0, 16, 11, 5)))
        await leader.turns()
        leader.want(led[0], "1a")
        await leader.turns()
        assert sets_of(led[0]) == ({1: "1a"}, None)

    run(tmp_path, body)


def test_changes_of_partitions_on_many_brokers_go_in_as_many_transactions_as_their_compares_need(
    tmp_path: Path,
) -> None:
    """Each compares its key and what it relies on: that no replica doubts the metadata."""

    async def body(leader: Leader, _: list[Partition]) -> None:
        sent: list[int] = []
        real = leader.fateful.transact

        async def counted(compares: Sequence[Compare], actions: Sequence[Put | Delete]) -> TransactionResult:
            sent.append(len(compares))
            return await real(compares, actions)

        leader.fateful.transact = counted  # type: ignore[method-assign]
        isr = {1: "1a", 2: "2a"}
        for index in range(80):
            replicas = (1, 2, 100 + 2 * index, 101 + 2 * index)
            state = PartitionState(index, 1, 4, (1, 2), replicas, incarnations=isr)
            await leader.coordination.put(keys.partition_key(PREFIX, "t", index), encode_partition(TOPIC_ID, state))
        await leader.turns(400)
        for index in range(80):
            leader.want(leader.partitions.get("t", index), "1a")
        await leader.turns(400)
        assert all(leader.key(index) == {1: "1a"} for index in range(80))
        assert (leader.fateful.sizes, sent) == ([41, 39], [125, 119])

    run(tmp_path, body, count=80)


def test_an_answer_tells_the_leader_though_the_view_is_behind(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.following = False
        leader.want(led[0], "1a", "2a", "3a")
        await leader.turns()
        assert sets_of(led[0]) == (ALL, None)

    run(tmp_path, body)


@proves("G16")
def test_a_change_that_a_newer_key_has_overtaken_is_settled_by_that_key_alone(tmp_path: Path) -> None:
    """Refused, the leader would go on with the set that it had, which holds no more."""

    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.following = False
        leader.fateful.before_next = lambda: leader.put(1, 4, "1a")
        leader.want(led[0], "1a", "2a", "3a")
        await leader.turns()
        assert sets_of(led[0]) == (BOTH, ALL)
        state = leader.view.image.topics["t"].partitions[0]
        leader.partitions.confirmed(led[0], state.incarnations, state.revision)
        assert sets_of(led[0]) == ({1: "1a"}, None)

    run(tmp_path, body)


async def newer_key(leader: Leader) -> None:
    leader.following = False
    await leader.put(1, 4, "1a")


async def newer_epoch(leader: Leader) -> None:
    await leader.put(1, 5, "1a", "2a")


async def topic_made_anew(leader: Leader) -> None:
    await leader.coordination.put(keys.topic_key(PREFIX, "t"), encode_topic(Topic("t", b"u" * 16, ()), 1))
    await leader.put(1, 4, "1a", "2a", topic_id=b"u" * 16)


async def key_lost(leader: Leader) -> None:
    await leader.coordination.delete(keys.partition_key(PREFIX, "t", 0))


@proves("G16")
@pytest.mark.parametrize("happens", [newer_key, newer_epoch, topic_made_anew, key_lost])
@pytest.mark.parametrize("open_before", [False, True])
def test_nothing_is_written_over_a_key_that_the_set_was_not_read_from(
    tmp_path: Path, happens: Callable[[Leader], Coroutine[Any, Any, None]], open_before: bool
) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        if open_before:
            leader.fateful.fates = ["lost on the way there"]
            leader.want(led[0], "1a", "2a", "3a")
            await leader.turns()
        await happens(leader)
        await leader.turns()
        if not open_before:
            leader.want(led[0], "1a", "2a", "3a")
            assert sets_of(led[0])[1] is None
        await leader.let_pass(1)
        assert len(leader.fateful.sizes) == open_before
        assert leader.key() != ALL

    run(tmp_path, body)


def test_a_partition_that_is_led_no_more_wants_nothing(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        leader.partitions.follow(led[0].log, 5, 2)
        leader.isr_writer.want(led[0], IsrChange(ALL, (3,), (), ""))
        await leader.turns()
        assert leader.fateful.sizes == []

    run(tmp_path, body)


@pytest.mark.parametrize("member", ["4a", "3a"])
def test_a_broker_that_is_not_there_or_about_to_leave_is_not_taken_in(tmp_path: Path, member: str) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        await leader.register(3, "a", LEAVING)
        await leader.turns()
        leader.want(led[0], "1a", "2a", member)
        assert sets_of(led[0]) == (BOTH, None)
        await leader.turns()
        assert leader.fateful.sizes == []

    run(tmp_path, body)


def test_an_error_that_nobody_expected_is_told_and_after_the_close_nothing_is_sent(tmp_path: Path) -> None:
    async def body(leader: Leader, led: list[Partition]) -> None:
        wrong = ValueError("wrong")

        async def fails() -> None:
            raise wrong

        leader.fateful.before_next = fails
        leader.want(led[0], "1a")
        await leader.turns()
        assert leader.failures == [wrong]
        leader.failures.clear()
        leader.isr_writer.start()
        await leader.turns()
        await leader.isr_writer.close()
        leader.want(led[1], "1a")
        await leader.turns()
        assert leader.fateful.sizes == []

    run(tmp_path, body, count=2)
