"""Share groups (KIP-932): members, what they are assigned, and the states of their share partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from groups.consumers import topic_id
from groups.scene import GROUP, LIMITS, Waiter
from groups.sharers import ShareScene
from headrace.errors import ErrorCode
from headrace.groups.assignors import Partition
from headrace.groups.consumer_messages import ConsumerHeartbeat, ConsumerReply
from headrace.groups.limits import ShareLimits
from headrace.groups.messages import (
    CommitRequest,
    JoinReply,
    JoinRequest,
    Leaver,
    OffsetToCommit,
    SyncReply,
    SyncRequest,
)
from headrace.groups.share_group import INITIALIZE_SECONDS, INITIALIZING_MAX, ShareGroup
from headrace.queues.messages import NO_OFFSET, SharePartitionKey
from headrace.records.isolation import Isolation

T = topic_id("t")


@pytest.fixture
def scene() -> ShareScene:
    scene = ShareScene()
    scene.topic("t", 3)
    return scene


def key(partition: int, topic: bytes = T, group: str = GROUP) -> SharePartitionKey:
    return SharePartitionKey(group, topic, partition)


# Members


def test_who_joins_is_told_everything_at_once(scene: ShareScene) -> None:
    member = scene.sharer("t")
    assert (member.reply.error_code, member.reply.heartbeat_interval_ms) == (0, 5000)
    assert member.epoch > 0
    assert member.partitions == [("t", 0), ("t", 1), ("t", 2)]
    assert member.beat() == 0
    assert member.reply.assignment is None, "nothing has changed"


def test_partitions_are_spread_and_shared_by_more_members_than_partitions(scene: ShareScene) -> None:
    members = [scene.sharer("t") for _ in range(3)]
    for _ in range(2):
        assert [member.beat() for member in members] == [0, 0, 0]
    assert sorted(member.partitions[0][1] for member in members) == [0, 1, 2]
    more = [scene.sharer("t") for _ in range(4)]
    for member in (*members, *more):
        assert member.beat() == 0
        assert len(member.partitions) == 1
    counts = [sum(member.partitions == [("t", n)] for member in (*members, *more)) for n in range(3)]
    assert sorted(counts) == [2, 2, 3]


def test_a_member_is_told_its_new_assignment_without_giving_up_anything_first(scene: ShareScene) -> None:
    first = scene.sharer("t")
    second = scene.sharer("t")
    assert second.partitions, "it waits for nobody"
    assert first.beat() == 0
    assert len(first.partitions) + len(second.partitions) == 3


def test_who_leaves_or_is_silent_is_followed_by_the_others(scene: ShareScene) -> None:
    first, second = scene.sharer("t"), scene.sharer("t")
    assert second.leave() == 0
    first.beat()
    assert len(first.partitions) == 3
    third = scene.sharer("t")
    for _ in range(10):
        scene.advance(5)
        assert first.beat() == 0
    assert len(first.partitions) == 3
    assert third.beat() == ErrorCode.UNKNOWN_MEMBER_ID
    assert second.leave() == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_may_repeat_the_epoch_before_its_own_and_no_other(scene: ShareScene) -> None:
    member = scene.sharer("t")
    before = member.epoch
    scene.sharer("t")
    assert member.beat() == 0
    assert member.epoch > before
    now, member.epoch = member.epoch, before
    assert member.beat() == 0
    assert member.reply.assignment == member.assigned, "it may have missed it"
    member.epoch = now + 7
    assert member.beat() == ErrorCode.FENCED_MEMBER_EPOCH
    member.epoch = before - 1 or -7
    assert member.beat() == ErrorCode.FENCED_MEMBER_EPOCH


def test_a_group_has_a_largest_size() -> None:
    scene = ShareScene(replace(LIMITS, share=ShareLimits(max_size=2)))
    scene.topic("t", 1)
    assert [scene.sharer("t").reply.error_code for _ in range(3)] == [0, 0, ErrorCode.GROUP_MAX_SIZE_REACHED]


def test_a_group_has_settings_of_its_own(scene: ShareScene) -> None:
    scene.own_settings = {
        "share.session.timeout.ms": "7000",
        "share.heartbeat.interval.ms": "700",
        "share.record.lock.duration.ms": "1",
        "share.auto.offset.reset": "earliest",
        "share.isolation.level": "read_committed",
    }
    member = scene.sharer("t")
    assert member.reply.heartbeat_interval_ms == 700
    scene.advance(7.1)
    assert member.beat() == ErrorCode.UNKNOWN_MEMBER_ID
    config = scene.coordinator.share_config(GROUP)
    assert (config.isolation, config.auto_offset_reset, config.lock_ms) == (Isolation.COMMITTED, "earliest", 1000)
    assert scene.coordinator.share_config("other").delivery_count_limit == 5


def test_topics_that_come_grow_and_go_change_the_assignment(scene: ShareScene) -> None:
    member = scene.sharer("t", "u")
    assert len(member.partitions) == 3
    scene.topic("u", 1)
    member.beat()
    assert ("u", 0) in member.partitions
    scene.topic("t", 5)
    member.beat()
    assert len(member.partitions) == 6
    scene.delete("t")
    member.beat()
    assert member.partitions == [("u", 0)]


def test_a_new_coordinator_goes_on_with_the_members_and_asks_for_nothing_again(scene: ShareScene) -> None:
    first, second = scene.sharer("t"), scene.sharer("t")
    first.beat()
    asked = len(scene.states.asked)
    scene.take_over()
    scene.turn()
    assert (first.beat(), second.beat()) == (0, 0)
    assert first.reply.assignment is None
    assert len(first.partitions) + len(second.partitions) == 3
    assert len(scene.states.asked) == asked
    described = scene.coordinator.share.describe(GROUP)
    assert (described.group_state, described.assignor, len(described.members)) == ("Stable", "simple", 2)


# States of share partitions


def test_a_partition_is_in_the_log_before_it_is_initialized_and_assigned_after_it() -> None:
    scene = ShareScene()
    scene.topic("t", 2)
    scene.held = scene.states.held = True
    member = scene.sharer("t")
    assert member.reply.error_code == -1
    assert scene.states.asked == []
    scene.acknowledge()
    assert scene.states.asked == ["initialize 0", "initialize 1"]
    assert scene.share_group().initializing == {(T, 0), (T, 1)}
    scene.states.answer()
    waiter = member.send()
    scene.held = False
    scene.acknowledge()
    scene.turn()
    assert member.hear(waiter) == 0
    assert scene.share_group().initialized == {(T, 0), (T, 1)}
    assert scene.states.states == {key(n): (0, NO_OFFSET) for n in range(2)}
    assert len(member.partitions) == 2


def test_who_joins_does_not_wait_for_ever_for_states(scene: ShareScene) -> None:
    scene.states.refuses = ErrorCode.COORDINATOR_NOT_AVAILABLE
    member = scene.sharer("t")
    assert member.reply.error_code == -1, "it waits"
    waiter = member.send()
    scene.advance(INITIALIZE_SECONDS + 0.1)
    assert member.hear(waiter) == 0
    assert member.partitions == []
    tries = len(scene.states.asked)
    scene.states.refuses = ErrorCode.NONE
    scene.advance(1)
    assert len(scene.states.asked) > tries
    assert member.beat() == 0
    assert len(member.partitions) == 3


def test_initializations_under_way_are_bounded() -> None:
    scene = ShareScene()
    scene.topic("t", INITIALIZING_MAX + 10)
    scene.states.held = True
    member = scene.sharer("t")
    assert len(scene.states.asked) == INITIALIZING_MAX
    scene.states.answer()
    scene.turn()
    assert member.beat() == 0
    assert len(scene.states.states) == len(member.partitions) == INITIALIZING_MAX + 10


def test_all_partitions_are_not_looked_through_with_each_initialization(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = ShareGroup._subscribed

    def counted(group: ShareGroup) -> Iterator[Partition]:
        nonlocal looks
        looks += 1
        return real(group)

    monkeypatch.setattr(ShareGroup, "_subscribed", counted)
    scene = ShareScene()
    scene.topic("t", 4 * INITIALIZING_MAX)
    scene.states.held = True
    member = scene.sharer("t")
    while scene.states.waiting:
        answers, scene.states.waiting = scene.states.waiting, []
        for answer in answers:
            answer()
        scene.turn()
    assert member.beat() == 0
    assert len(member.partitions) == 4 * INITIALIZING_MAX
    assert looks < INITIALIZING_MAX


@pytest.mark.parametrize("is_initialized", [False, True])
def test_a_new_coordinator_initializes_what_may_not_be(is_initialized: bool) -> None:
    scene = ShareScene()
    scene.topic("t", 1)
    scene.states.held = True
    member = scene.sharer("t")
    scene.coordinator.close()
    if is_initialized:
        scene.states.answer()
    scene.states = replace(scene.states, held=False, waiting=[])
    scene.states.states |= {key(0): (7, 42)} if is_initialized else {}
    scene.take_over()
    scene.turn()
    member.beat()
    assert member.beat() == 0
    assert member.partitions == [("t", 0)]
    assert scene.states.states[key(0)] == ((7, 42) if is_initialized else (0, NO_OFFSET)), "what was there stays"


def test_a_partition_of_a_deleted_topic_is_forgotten(scene: ShareScene) -> None:
    member = scene.sharer("t")
    scene.delete("t")
    scene.coordinator.drop_topics({T})
    scene.turn()
    assert scene.share_group().states() == []
    scene.topic("t", 1, given_id=b"another topic's ")
    member.beat()
    assert scene.share_group().states() == [(b"another topic's ", 0)]


# From outside


def test_starts_are_set_in_a_group_without_members_and_last(scene: ShareScene) -> None:
    member = scene.sharer("t")
    assert scene.set_starts({(T, 1): 5}) == (ErrorCode.NON_EMPTY_GROUP, {})
    member.leave()
    assert scene.set_starts({(T, 1): 5}) == (0, {(T, 1): 0})
    first = scene.states.states[key(1)]
    assert first[1] == 5
    assert scene.set_starts({(T, 1): 3}) == (0, {(T, 1): 0})
    second = scene.states.states[key(1)]
    assert second[1] == 3
    assert second[0] > first[0] > 0, "each replaces what was there"
    again = scene.sharer("t")
    assert len(again.partitions) == 3
    assert scene.states.states[key(1)] == second
    found: Waiter[Any] = Waiter()
    scene.coordinator.share.starts(GROUP, None, lambda code, starts: found((code, starts)))
    code, starts = found.reply
    assert code == 0
    assert {place[1]: summary.start_offset for place, (_, summary) in starts.items()} == {0: -1, 1: 3, 2: -1}


def test_starts_are_set_in_a_group_that_is_made_for_it(scene: ShareScene) -> None:
    assert scene.set_starts({(T, 0): 9}, group="new") == (0, {(T, 0): 0})
    scene.take_over()
    assert scene.coordinator.share.describe("new").group_state == "Empty"
    member = scene.sharer("t", group="new")
    assert len(member.partitions) == 3
    assert scene.states.states[key(0, group="new")][1] == 9


def test_a_start_that_may_have_been_set_is_asked_about_again(scene: ShareScene) -> None:
    scene.sharer("t").leave()
    scene.states.refuses = ErrorCode.REQUEST_TIMED_OUT
    assert scene.set_starts({(T, 0): 5}) == (0, {(T, 0): ErrorCode.REQUEST_TIMED_OUT})
    scene.states.refuses = ErrorCode.NONE
    scene.states.states[key(0)] = 99, 5  # it was
    member = scene.sharer("t")
    assert len(member.partitions) == 3
    assert scene.states.states[key(0)] == (99, 5)


def test_nobody_joins_while_starts_are_set(scene: ShareScene) -> None:
    scene.sharer("t").leave()
    scene.states.held = True
    waiter: Waiter[Any] = Waiter()
    scene.coordinator.share.set_starts(GROUP, {(T, 0): 5}, lambda code, codes: waiter((code, codes)))
    scene.turn()
    assert scene.sharer("t").reply.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert scene.delete_group().reply == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert scene.delete_starts(T)[0] == ErrorCode.COORDINATOR_NOT_AVAILABLE
    scene.states.answer()
    scene.turn()
    assert waiter.reply == (0, {(T, 0): 0})
    assert scene.sharer("t").reply.error_code == 0


def test_states_of_topics_are_deleted_from_outside(scene: ShareScene) -> None:
    scene.topic("u", 1)
    member = scene.sharer("t", "u")
    assert scene.delete_starts(T) == (ErrorCode.NON_EMPTY_GROUP, {})
    member.leave()
    assert scene.delete_starts(T) == (0, {(T, n): 0 for n in range(3)})
    assert list(scene.states.states) == [key(0, topic_id("u"))]
    assert scene.delete_starts(T) == (0, {})
    assert scene.delete_starts(T, group="none") == (ErrorCode.GROUP_ID_NOT_FOUND, {})
    assert len(scene.sharer("t", "u").partitions) == 4


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_group_is_deleted_with_its_states(scene: ShareScene, takes_over: bool) -> None:
    member = scene.sharer("t")
    assert scene.delete_group().reply == ErrorCode.NON_EMPTY_GROUP
    member.leave()
    scene.states.refuses = ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert scene.delete_group().reply == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert len(scene.states.states) == 3
    scene.states.refuses = ErrorCode.NONE
    if takes_over:
        scene.take_over()
    assert scene.delete_group().reply == 0
    assert scene.states.states == {}
    assert scene.coordinator.list_groups().groups == ()
    scene.take_over()
    assert scene.coordinator.list_groups().groups == ()


def test_a_group_whose_states_are_half_deleted_initializes_them_again(scene: ShareScene) -> None:
    scene.sharer("t").leave()
    scene.states.held = True
    waiter = scene.delete_group()
    *answered, lost = scene.states.waiting
    for answer in answered:
        answer()
    scene.states = replace(scene.states, held=False, waiting=[], states=dict(scene.states.states))
    scene.take_over()
    lost()
    assert waiter.reply == ErrorCode.NOT_COORDINATOR
    assert len(scene.states.states) == 1
    member = scene.sharer("t")
    assert len(member.partitions) == len(scene.states.states) == 3


def test_an_empty_share_group_does_not_expire(scene: ShareScene) -> None:
    scene.sharer("t").leave()
    scene.advance(30 * 86_400)
    assert [group.group_state for group in scene.coordinator.list_groups().groups] == ["Empty"]


# Groups of other kinds


def joining(scene: ShareScene, group: str) -> JoinReply:
    waiter: Waiter[JoinReply] = Waiter()
    request = JoinRequest("", None, "c", "h", 10_000, 30_000, "consumer", (("range", b"\0\0\0\0\0\0"),))
    scene.coordinator.join(group, request, waiter)
    scene.turn()
    return waiter.reply


def test_a_share_group_is_no_other_kind_of_group(scene: ShareScene) -> None:
    member = scene.sharer("t")
    coordinator = scene.coordinator
    assert joining(scene, GROUP).error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    waiter: Waiter[SyncReply] = Waiter()
    coordinator.sync(GROUP, SyncRequest(member.member_id, 1), waiter)
    assert waiter.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert coordinator.heartbeat(GROUP, member.member_id, 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert coordinator.leave(GROUP, [Leaver(member.member_id)]).members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
    beat: Waiter[ConsumerReply] = Waiter()
    coordinator.consumer_heartbeat(GROUP, ConsumerHeartbeat("m", 0, topics=("t",), owned={}), beat)
    assert beat.reply.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    committed: Waiter[Any] = Waiter()
    coordinator.commit(GROUP, CommitRequest((OffsetToCommit("t", 0, 1),)), committed)
    assert committed.reply[0].error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert coordinator.fetch_offsets(GROUP, None).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    deleted: Waiter[Any] = Waiter()
    coordinator.delete_offsets(GROUP, [("t", 0)], deleted)
    assert deleted.reply.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert coordinator.describe_consumer(GROUP).error_code == ErrorCode.GROUP_ID_NOT_FOUND
    (listed,) = coordinator.list_groups(types=["Share"]).groups
    assert (listed.group_type, listed.protocol_type, listed.group_state) == ("share", "share", "Stable")
    assert coordinator.list_groups(types=["consumer", "classic"]).groups == ()


@pytest.mark.parametrize("kind", ["classic", "consumer"])
def test_a_group_of_another_kind_is_no_share_group(scene: ShareScene, kind: str) -> None:
    if kind == "consumer":
        scene.member("t")
    else:
        assert joining(scene, GROUP).error_code == 0
    assert scene.sharer("t").reply.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert scene.set_starts({(T, 0): 1})[0] == ErrorCode.GROUP_ID_NOT_FOUND
    assert scene.coordinator.share.describe(GROUP).error_code == ErrorCode.GROUP_ID_NOT_FOUND


def test_a_member_of_no_group_is_to_join(scene: ShareScene) -> None:
    member = scene.sharer("t", group="x" * 300)
    assert member.reply.error_code == ErrorCode.INVALID_GROUP_ID
    member.group, member.epoch = "none", 3
    assert member.beat() == ErrorCode.UNKNOWN_MEMBER_ID
