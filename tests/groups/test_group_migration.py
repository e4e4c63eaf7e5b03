"""Groups that change between the classic and the consumer protocol while they have members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groups.consumers import Consumer, ConsumerScene, settle, subscription
from groups.scene import GROUP, LIMITS, Scene, Waiter
from headrace.errors import ErrorCode
from headrace.groups.consumer_protocol import decode_assignment, encode_assignment
from headrace.groups.group import Group
from headrace.groups.limits import ConsumerLimits
from headrace.groups.messages import JoinReply, Leaver
from proving import proves


class Classic:
    """A consumer of the classic protocol: eager, or cooperative."""

    def __init__(self, scene: ConsumerScene, *, eager: bool = True, instance: str | None = None) -> None:
        self.scene = scene
        self.eager = eager
        self.instance = instance
        self.owned: dict[str, set[int]] = {}
        self.joined: JoinReply | None = None
        self.asked: Waiter[JoinReply] | None = None
        """The request to join that it waits for: who asked again without an id would be another member."""

    @property
    def member_id(self) -> str:
        return "" if self.joined is None else self.joined.member_id

    def protocols(self) -> tuple[tuple[str, bytes], ...]:
        return (("range", subscription("t", owned={} if self.eager else self.owned)),)

    def join(self) -> int:
        if self.eager:
            self.owned = {}
        waiter = self.scene.join(self.member_id, self.instance, protocols=self.protocols())
        self.scene.turn()
        if not waiter.answered:
            self.asked = waiter
            return ErrorCode.REBALANCE_IN_PROGRESS
        if waiter.reply.error_code == ErrorCode.NONE:
            self.joined = waiter.reply
        return waiter.reply.error_code

    def sync(self) -> int:
        """Its part of the assignment; the leader of a classic group deals out the partitions."""
        assert self.joined is not None
        given: dict[str, bytes] = {}
        if self.joined.leader == self.member_id:
            names = [member.member_id for member in self.joined.members]
            for place, name in enumerate(names):
                part = frozenset(n for n in range(4) if n % len(names) == place)
                given[name] = encode_assignment({"t": part} if part else {}, 1)
        waiter = self.scene.sync(self.joined, given, self.instance)
        self.scene.turn()
        if waiter.answered and waiter.reply.error_code == ErrorCode.NONE:
            self.owned = {topic: set(indexes) for topic, indexes in decode_assignment(waiter.reply.assignment).items()}
        return waiter.reply.error_code if waiter.answered else ErrorCode.REBALANCE_IN_PROGRESS

    def beat(self) -> int:
        """A heartbeat, and what follows if it says that the group rebalances."""
        assert self.joined is not None
        code = self.scene.beat(self.joined, self.instance)
        again = (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.ILLEGAL_GENERATION)
        if code in again and self.join() == ErrorCode.NONE:
            self.sync()
        return code

    @property
    def partitions(self) -> list[tuple[str, int]]:
        return sorted((topic, index) for topic, indexes in self.owned.items() for index in indexes)


def classic_group(scene: ConsumerScene, *, eager: bool = True, count: int = 1) -> list[Classic]:
    members = [Classic(scene, eager=eager) for _ in range(count)]
    waiters = []
    for member in members:
        waiters.append(scene.join(protocols=member.protocols()))
        for earlier, _ in zip(members, waiters[:-1], strict=False):
            waiters[members.index(earlier)] = scene.join(earlier.member_id, protocols=earlier.protocols())
        for one, waiter in zip(members, waiters, strict=False):
            one.joined = waiter.reply
    for member in sorted(members, key=lambda one: one.joined is not None and one.joined.leader != one.member_id):
        member.sync()
    assert scene.state() == "Stable"
    return members


def rounds(*members: Classic | Consumer, count: int = 8) -> None:
    for _ in range(count):
        for member in members:
            member.beat()
            owned = [place for one in members for place in one.partitions]
            assert len(owned) == len(set(owned)), f"a partition has two owners: {owned}"


def scene_with_topic(policy: str = "bidirectional") -> ConsumerScene:
    scene = ConsumerScene(limits=replace(LIMITS, consumer=ConsumerLimits(migration_policy=policy)))
    scene.topic("t", 4)
    return scene


@proves("N1")
@pytest.mark.parametrize("eager", [True, False])
def test_a_classic_group_is_upgraded_and_taken_back_member_by_member(eager: bool) -> None:
    scene = scene_with_topic()
    first, second = classic_group(scene, eager=eager, count=2)
    assert sorted(first.partitions + second.partitions) == [("t", n) for n in range(4)]
    third = scene.member("t")
    assert scene.described().group_state != "Empty"
    assert [member.is_classic for member in scene.described().members] == [True, True, False]
    rounds(first, second, third)
    assert sorted(len(one.partitions) for one in (first, second, third)) == [1, 1, 2]
    assert scene.described().group_state == "Stable"
    reply = scene.coordinator.leave(GROUP, [Leaver(first.member_id)])
    assert reply.members[0].error_code == ErrorCode.NONE
    rounds(second, third)
    assert len(second.partitions) == len(third.partitions) == 2
    generation = scene.described().group_epoch
    assert third.leave().error_code == ErrorCode.NONE
    assert scene.coordinator.describe(GROUP).group_type == "classic"
    rounds(second)
    assert second.partitions == [("t", n) for n in range(4)]
    assert second.joined is not None
    assert second.joined.generation_id > generation
    scene.take_over()
    assert scene.state() == "Stable"
    assert scene.described().error_code == ErrorCode.GROUP_ID_NOT_FOUND


@proves("N1")
def test_a_mixed_group_outlives_its_coordinator() -> None:
    scene = scene_with_topic()
    (first,) = classic_group(scene)
    other = scene.member("t")
    rounds(first, other)
    before = scene.described()
    scene.take_over()
    after = scene.described()
    assert sorted(after.members, key=repr) == sorted(before.members, key=repr)
    assert (after.group_epoch, after.assignment_epoch) == (before.group_epoch, before.assignment_epoch)
    rounds(first, other)
    assert len(first.partitions) == len(other.partitions) == 2


def test_a_classic_member_that_falls_silent_in_a_mixed_group_is_removed() -> None:
    scene = scene_with_topic()
    (first,) = classic_group(scene)
    other = scene.member("t")
    rounds(first, other)
    for _ in range(3):
        scene.advance(5)
        other.beat()
    assert len(other.partitions) == 4
    assert first.beat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_classic_member_that_is_told_to_join_and_does_not_is_removed() -> None:
    scene = scene_with_topic()
    (first,) = classic_group(scene)
    other = scene.member("t")
    assert first.joined is not None
    for _ in range(7):
        scene.advance(5)
        scene.beat(first.joined)
        other.beat()
    assert len(other.partitions) == 4


def test_the_last_consumer_that_dies_takes_the_group_back() -> None:
    scene = scene_with_topic()
    (first,) = classic_group(scene)
    other = scene.member("t")
    rounds(first, other)
    for _ in range(12):
        scene.advance(4)
        first.beat()
    assert scene.coordinator.describe(GROUP).group_type == "classic"
    assert len(first.partitions) == 4


def test_an_empty_group_takes_the_protocol_of_who_comes_whatever_the_policy() -> None:
    scene = scene_with_topic("disabled")
    (first,) = classic_group(scene)
    scene.coordinator.leave(GROUP, [Leaver(first.member_id)])
    one = scene.member("t")
    assert len(one.partitions) == 4
    assert scene.described().group_state == "Stable"
    one.leave()
    (second,) = classic_group(scene)
    assert len(second.partitions) == 4
    scene.take_over()
    assert scene.coordinator.describe(GROUP).group_type == "classic"


@pytest.mark.parametrize("policy", ["disabled", "downgrade"])
def test_a_policy_keeps_a_classic_group_classic(policy: str) -> None:
    scene = scene_with_topic(policy)
    (first,) = classic_group(scene)
    assert Consumer(scene, ("t",)).beat() == ErrorCode.GROUP_ID_NOT_FOUND
    assert first.beat() == ErrorCode.NONE


@pytest.mark.parametrize("policy", ["upgrade"])
def test_a_policy_keeps_a_group_that_was_upgraded(policy: str) -> None:
    scene = scene_with_topic(policy)
    (first,) = classic_group(scene)
    other = scene.member("t")
    rounds(first, other)
    other.leave()
    rounds(first)
    assert scene.described().error_code == ErrorCode.NONE
    assert len(first.partitions) == 4


def test_a_group_that_rebalances_is_upgraded_too() -> None:
    scene = scene_with_topic()
    first, second = classic_group(scene, count=2)
    waiting = scene.join(first.member_id, protocols=(("range", subscription("t", "u")),))
    assert not waiting.answered
    other = scene.member("t")
    assert waiting.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert first.join() == ErrorCode.NONE
    first.sync()
    rounds(first, second, other)
    assert sorted(len(one.partitions) for one in (first, second, other)) == [1, 1, 2]


def test_a_static_member_goes_over_in_place() -> None:
    scene = scene_with_topic()
    first = Classic(scene, instance="i")
    assert first.join() == ErrorCode.NONE
    first.sync()
    other = scene.member("t", instance="i")
    assert len(other.partitions) == 4
    assert len(scene.described().members) == 1
    assert first.beat() == ErrorCode.FENCED_INSTANCE_ID
    back = Classic(scene, instance="i")
    assert back.join() == ErrorCode.REBALANCE_IN_PROGRESS, "the group goes back to the classic protocol by that"
    assert back.join() == ErrorCode.NONE
    back.sync()
    rounds(back)
    assert scene.coordinator.describe(GROUP).group_type == "classic"
    assert len(back.partitions) == 4


def test_classic_members_hear_what_is_wrong() -> None:
    scene = scene_with_topic()
    other = scene.member("t")
    first = Classic(scene)
    first.join()
    first.sync()
    assert first.joined is not None
    joined = first.joined
    assert scene.beat(replace(joined, generation_id=99)) == ErrorCode.ILLEGAL_GENERATION
    assert scene.beat(replace(joined, member_id=other.member_id)) == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.join(kind="connect").reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    foreign = scene.join(protocols=(("sticky", subscription("t")),)).reply
    assert foreign.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    unreadable = scene.join(protocols=(("range", b"\xff"),)).reply
    assert unreadable.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    ids = scene.join(known=True, protocols=first.protocols()).reply
    assert ids.error_code == ErrorCode.MEMBER_ID_REQUIRED
    assert scene.join(protocols=first.protocols(), session_ms=10**9).reply.error_code == 26
    wrong = replace(joined, protocol_name="sticky")
    assert scene.sync(wrong).reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    left = scene.coordinator.leave(GROUP, [Leaver(other.member_id), Leaver("nobody")])
    assert [one.error_code for one in left.members] == [ErrorCode.UNKNOWN_MEMBER_ID] * 2


def test_members_whose_bytes_cannot_be_read_are_not_brought_over() -> None:
    scene = scene_with_topic()
    joined = scene.join(protocols=(("range", b"\xff"),)).reply
    scene.sync(joined, {joined.member_id: b""})
    assert Consumer(scene, ("t",)).beat() == ErrorCode.GROUP_ID_NOT_FOUND
    assert scene.beat(joined) == ErrorCode.NONE


def test_what_is_taken_back_and_cannot_be_written_is_told() -> None:
    scene = scene_with_topic()
    (first,) = classic_group(scene)
    other = scene.member("t")
    rounds(first, other)
    scene.held = True
    leaving = scene.heartbeat(replace(other.request(), member_epoch=-1))
    assert not leaving.answered
    scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS)
    assert leaving.reply.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    scene.held = False
    scene.acknowledge()
    rounds(first)
    assert len(first.partitions) == 4
    scene.take_over()
    assert isinstance(Scene.group(scene), Group)
    settle(scene.member("t"))
