from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from groups.scene import GROUP, LIMITS, SESSION_MS, TOPIC_ID, Scene, Waiter
from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import partition_of
from headrace.errors import CorruptBatch, ErrorCode
from headrace.groups.descriptions import Lag
from headrace.groups.group import Moment
from headrace.groups.limits import limits_from
from headrace.groups.messages import (
    CommitRequest,
    FetchedOffset,
    JoinReply,
    Leaver,
    ListedGroup,
    OffsetDeleteReply,
    OffsetToCommit,
    PartitionResult,
)
from headrace.groups.records import OffsetAndMetadata, OffsetKey, encode_offset, encode_offset_key
from headrace.settings.values import load
from headrace.virtual.clock import VirtualClock
from proving import proves

RETENTION_SECONDS = LIMITS.retention_ms / 1000
CHECK_SECONDS = LIMITS.expiry_check_ms / 1000


def subscription(*topics: str) -> bytes:
    return struct.pack(">hi", 0, len(topics)) + b"".join(struct.pack(">h", len(t)) + t.encode() for t in topics)


def subscribed_member(scene: Scene, *topics: str) -> JoinReply:
    joined = scene.join(protocols=(("range", subscription(*topics)),)).reply
    scene.sync(joined, {joined.member_id: b"a"})
    return joined


# Commits


def test_a_commit_is_answered_and_seen_when_the_log_has_it() -> None:
    scene = Scene(held=True)
    waits = scene.commit({("t", 0): 5}, metadata="why")
    assert not waits.answered
    assert scene.committed() == {}
    scene.acknowledge()
    assert waits.reply == (PartitionResult("t", 0, ErrorCode.NONE),)
    reply = scene.coordinator.fetch_offsets(GROUP, [("t", 0), ("t", 1), ("u", 0)])
    assert reply.offsets == (FetchedOffset("t", 0, 5, 0, "why"), FetchedOffset("t", 1), FetchedOffset("u", 0))


@pytest.mark.parametrize(
    ("failed", "told"),
    [
        (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.NOT_COORDINATOR),
        (ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NOT_COORDINATOR),
        (ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (ErrorCode.REQUEST_TIMED_OUT, ErrorCode.COORDINATOR_NOT_AVAILABLE),
    ],
)
def test_a_commit_that_cannot_be_stored_is_told_and_not_seen(failed: int, told: int) -> None:
    scene = Scene(held=True)
    waits = scene.commit({("t", 0): 5})
    scene.acknowledge(failed)
    assert waits.reply[0].error_code == told
    assert scene.committed() == {}


def test_members_commit_in_their_generation() -> None:
    scene = Scene()
    first, second = scene.stable(2)
    assert scene.commit({("t", 0): 1}, first).reply[0].error_code == ErrorCode.NONE
    stranger, old = replace(first, member_id="nobody"), replace(first, generation_id=1)
    assert scene.commit({("t", 0): 2}, stranger).reply[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.commit({("t", 0): 2}, old).reply[0].error_code == ErrorCode.ILLEGAL_GENERATION
    assert scene.commit({("t", 0): 2}).reply[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
    waits = scene.join(first.member_id)
    assert scene.commit({("t", 0): 3}, second).reply[0].error_code == ErrorCode.NONE
    scene.join(second.member_id)
    assert scene.commit({("t", 0): 4}, waits.reply).reply[0].error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.committed() == {("t", 0): 3}
    for generation in (first.generation_id, 0):
        member = replace(first, generation_id=generation)
        assert scene.commit({("t", 0): 4}, member, group_id="none").reply[0].error_code == ErrorCode.ILLEGAL_GENERATION


@pytest.mark.parametrize("generation_id", [0, 1])
def test_a_member_of_an_earlier_generation_commits_nothing_to_a_group_that_is_empty(generation_id: int) -> None:
    """What it has not read on for long would take back what others committed since."""
    scene = Scene()
    (joined,) = scene.stable(1)
    scene.commit({("t", 0): 9}, joined)
    scene.coordinator.leave(GROUP, [Leaver(joined.member_id)])
    (refused,) = scene.commit({("t", 0): 5}, replace(joined, generation_id=generation_id)).reply
    assert refused.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.committed() == {("t", 0): 9}
    (taken,) = scene.commit({("t", 0): 7}).reply
    assert taken.error_code == ErrorCode.NONE


def test_nobody_leaves_a_group_that_has_ended_here() -> None:
    scene = Scene()
    (joined,) = scene.stable(1)
    group = scene.group()
    moment = Moment(scene.clock.now(), scene.clock.wall_ms())
    group.remove(ErrorCode.NOT_COORDINATOR, moment)
    reply, actions = group.leave([Leaver(joined.member_id)], moment)
    assert (reply.error_code, reply.members, actions) == (ErrorCode.COORDINATOR_NOT_AVAILABLE, (), ())


def test_a_fenced_instance_cannot_commit() -> None:
    scene = Scene()
    _leader, follower = scene.stable(2, static=True)
    scene.join(instance="i1")
    waiter: Waiter[tuple[PartitionResult, ...]] = Waiter()
    request = CommitRequest((OffsetToCommit("t", 0, 1),), follower.member_id, follower.generation_id, "i1")
    scene.coordinator.commit(GROUP, request, waiter)
    assert waiter.reply[0].error_code == ErrorCode.FENCED_INSTANCE_ID


def test_a_commit_keeps_the_session_alive() -> None:
    scene = Scene()
    member = scene.stable(1)[0]
    for offset in range(5):
        scene.advance(0.9 * SESSION_MS / 1000)
        assert scene.commit({("t", 0): offset}, member).reply[0].error_code == ErrorCode.NONE
    assert scene.beat(member) == ErrorCode.NONE


def test_metadata_above_the_limit_is_refused_for_its_partition_alone() -> None:
    scene = Scene(limits=replace(LIMITS, metadata_max_bytes=4))
    waiter: Waiter[tuple[PartitionResult, ...]] = Waiter()
    offsets = tuple(OffsetToCommit("t", n, 7, 0, text) for n, text in enumerate(["four", "fünf", "over it"]))
    scene.coordinator.commit(GROUP, CommitRequest(offsets), waiter)
    too_large = ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert [one.error_code for one in waiter.reply] == [ErrorCode.NONE, too_large, too_large]
    assert scene.committed() == {("t", 0): 7}
    assert [one.error_code for one in scene.commit({("t", 0): 8, ("t", 1): 8}, metadata="large").reply] == [
        too_large
    ] * 2
    assert scene.committed() == {("t", 0): 7}


def test_a_commit_on_its_way_brings_back_a_group_that_was_forgotten_meanwhile() -> None:
    """A join that is refused leaves nothing behind of a group that was never used; the commit has used it."""
    scene = Scene(held=True)
    waits = scene.commit({("t", 0): 5})
    assert scene.join(session_ms=1).reply.error_code == ErrorCode.INVALID_SESSION_TIMEOUT
    assert scene.coordinator.list_groups().groups == ()
    scene.acknowledge()
    assert waits.reply[0].error_code == ErrorCode.NONE
    there = (ListedGroup(GROUP, "", "Empty"),)
    assert scene.coordinator.list_groups().groups == there
    assert scene.join(session_ms=1).reply.error_code == ErrorCode.INVALID_SESSION_TIMEOUT
    assert scene.coordinator.list_groups().groups == there


# Loading and leadership


def test_groups_of_other_partitions_are_somebody_elses() -> None:
    scene = Scene(partitions=4)
    scene.coordinator.resign(partition_of(GROUP, 4))
    assert scene.join().reply.error_code == ErrorCode.NOT_COORDINATOR
    assert scene.coordinator.heartbeat(GROUP, "m", 1) == ErrorCode.NOT_COORDINATOR
    assert scene.commit({("t", 0): 1}).reply[0].error_code == ErrorCode.NOT_COORDINATOR
    assert scene.coordinator.fetch_offsets(GROUP, None).error_code == ErrorCode.NOT_COORDINATOR
    assert scene.coordinator.describe(GROUP).error_code == ErrorCode.NOT_COORDINATOR
    assert scene.coordinator.leave(GROUP, [Leaver("m")]).error_code == ErrorCode.NOT_COORDINATOR
    codes: list[int] = []
    scene.coordinator.delete(GROUP, codes.append)
    assert codes == [ErrorCode.NOT_COORDINATOR]


def test_before_the_offsets_topic_is_there_nobody_is_coordinator() -> None:
    scene = Scene(partitions=0)
    assert scene.join().reply.error_code == ErrorCode.NOT_COORDINATOR


def test_while_a_partition_loads_its_groups_say_so() -> None:
    scene = Scene()
    scene.commit({("t", 0): 5})
    loading = scene.coordinator.lead(0, 0)
    assert scene.join().reply.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.coordinator.fetch_offsets(GROUP, None).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert scene.coordinator.list_groups().error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    scene.coordinator.lead(1, 0).ready()
    assert scene.coordinator.list_groups().error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    loading.replay(scene.log[0])
    loading.ready()
    assert scene.committed() == {("t", 0): 5}
    assert scene.coordinator.list_groups().error_code == ErrorCode.NONE


def test_a_load_that_was_overtaken_has_no_effect() -> None:
    scene = Scene()
    scene.commit({("t", 0): 5})
    overtaken = scene.coordinator.lead(0, 0)
    current = scene.coordinator.lead(0, 0)
    assert not overtaken.wanted
    overtaken.replay(scene.log[0])
    overtaken.ready()
    assert scene.join().reply.error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    current.ready()
    assert scene.committed() == {}


def test_those_who_wait_hear_when_leadership_is_lost() -> None:
    scene = Scene()
    scene.stable(2)
    joins = scene.join()
    scene.coordinator.resign(0)
    assert joins.reply.error_code == ErrorCode.NOT_COORDINATOR
    scene.advance(1000)


def test_those_who_wait_hear_when_the_partition_is_led_in_another_epoch() -> None:
    scene = Scene()
    scene.stable(2)
    joins = scene.join()
    scene.coordinator.lead(0, 1)
    assert joins.reply.error_code == ErrorCode.NOT_COORDINATOR


def test_a_commit_acknowledged_after_leadership_was_lost_is_answered() -> None:
    scene = Scene(held=True)
    waits = scene.commit({("t", 0): 5})
    scene.coordinator.resign(0)
    scene.acknowledge()
    assert waits.answered


@proves("R4")
def test_members_and_offsets_go_on_under_the_next_coordinator() -> None:
    scene = Scene()
    members = scene.stable(3)
    scene.commit({("t", n): n for n in range(3)}, members[0])
    before = scene.coordinator.describe(GROUP)
    scene.take_over()
    assert scene.coordinator.describe(GROUP) == before
    assert scene.committed() == {("t", n): n for n in range(3)}
    for number, member in enumerate(members):
        assert scene.beat(member) == ErrorCode.NONE
        assert scene.sync(member).reply.assignment == b"%d" % number
    scene.advance(SESSION_MS / 1000)
    assert scene.state() == "Empty"


@proves("R4")
def test_members_that_do_not_come_to_the_next_coordinator_are_removed_after_their_session() -> None:
    scene = Scene()
    scene.stable(1)
    scene.take_over()
    scene.advance(SESSION_MS / 1000 - 0.1)
    assert scene.state() == "Stable"
    scene.advance(0.2)
    assert scene.state() == "Empty"


def test_an_emptied_group_is_empty_under_the_next_coordinator() -> None:
    scene = Scene()
    member = scene.stable(1)[0]
    scene.coordinator.leave(GROUP, [Leaver(member.member_id)])
    scene.take_over()
    assert scene.state() == "Empty"
    assert scene.join().reply.generation_id == 3


def test_records_of_an_unknown_kind_are_passed_over() -> None:
    scene = Scene()
    scene.commit({("t", 0): 5})
    scene.log[0][:0] = [(b"\0\x09", b"new kind")]
    scene.take_over()
    assert scene.committed() == {("t", 0): 5}


@pytest.mark.parametrize("record", [(b"", None), (b"\0\1\0\x05", b""), (b"\0\2\0\1g", b"\0\x63")])
def test_a_record_that_cannot_be_read_is_not_passed_over(record: Record) -> None:
    """It may be the last word on an offset: groups that were opened without it would answer an older one."""
    scene = Scene()
    loading = scene.coordinator.lead(0, 1)
    with pytest.raises(CorruptBatch):
        loading.replay([record])
    assert scene.coordinator.fetch_offsets(GROUP, None).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


# Groups as a whole


def test_groups_are_listed_and_described() -> None:
    scene = Scene(partitions=5)
    scene.stable(2)
    scene.commit({("t", 0): 1}, group_id="simple")
    scene.join(group_id="forming")
    listed = {(one.group_id, one.protocol_type, one.group_state) for one in scene.coordinator.list_groups().groups}
    assert listed == {
        ("g", "consumer", "Stable"),
        ("simple", "", "Empty"),
        ("forming", "consumer", "CompletingRebalance"),
    }
    assert [one.group_id for one in scene.coordinator.list_groups(["stable"]).groups] == ["g"]
    assert scene.coordinator.list_groups(types=["consumer"]).groups == ()
    assert len(scene.coordinator.list_groups(types=["Classic"]).groups) == 3
    assert scene.coordinator.states() == {"Stable": 1, "Empty": 1, "CompletingRebalance": 1}
    described = scene.coordinator.describe(GROUP)
    assert (described.group_state, described.protocol_type, described.protocol_data) == ("Stable", "consumer", "range")
    assert [(one.client_id, one.member_metadata, one.member_assignment) for one in described.members] == [
        ("c0", b"m", b"0"),
        ("c1", b"m", b"1"),
    ]
    forming = scene.coordinator.describe("forming")
    assert (forming.protocol_data, forming.members[0].member_metadata) == ("", b"")
    assert scene.coordinator.describe("none").group_state == "Dead"


def test_only_empty_groups_are_deleted_and_then_for_good() -> None:
    scene = Scene()
    member = scene.stable(1)[0]
    scene.commit({("t", n): 1 for n in range(2500)}, member)
    codes: list[int] = []
    scene.coordinator.delete(GROUP, codes.append)
    scene.coordinator.leave(GROUP, [Leaver(member.member_id)])
    scene.coordinator.delete(GROUP, codes.append)
    scene.coordinator.delete(GROUP, codes.append)
    assert codes == [ErrorCode.NON_EMPTY_GROUP, ErrorCode.NONE, ErrorCode.GROUP_ID_NOT_FOUND]
    scene.take_over()
    assert scene.coordinator.list_groups().groups == ()
    assert scene.committed() == {}


def test_a_group_on_its_way_out_takes_nobody_in_and_comes_back_if_the_log_refuses() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    scene.held = True
    codes: list[int] = []
    scene.coordinator.delete(GROUP, codes.append)
    assert scene.join().reply.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert scene.commit({("t", 0): 2}).reply[0].error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    scene.coordinator.delete(GROUP, codes.append)
    deleted: Waiter[OffsetDeleteReply] = Waiter()
    scene.coordinator.delete_offsets(GROUP, [("t", 0)], deleted)
    assert (codes, deleted.reply.error_code) == ([ErrorCode.GROUP_ID_NOT_FOUND], ErrorCode.GROUP_ID_NOT_FOUND)
    scene.acknowledge(ErrorCode.NOT_ENOUGH_REPLICAS)
    assert codes[1:] == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert scene.state() == "Empty"
    assert scene.committed() == {("t", 0): 1}


def test_a_commit_on_its_way_when_its_group_is_deleted_is_as_the_log_says() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    scene.held = True
    late = scene.commit({("t", 1): 1})
    scene.coordinator.delete(GROUP, lambda code: None)
    scene.acknowledge()
    assert late.reply[0].error_code == ErrorCode.NONE
    before = scene.committed()
    scene.take_over()
    assert scene.committed() == before


def test_a_group_that_somebody_is_about_to_join_is_not_deleted() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    assert scene.join(known=True).reply.error_code == ErrorCode.MEMBER_ID_REQUIRED
    codes: list[int] = []
    scene.coordinator.delete(GROUP, codes.append)
    assert codes == [ErrorCode.NON_EMPTY_GROUP]


def test_of_a_group_that_never_had_members_only_offsets_are_removed() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    before = len(scene.log[0])
    scene.coordinator.delete(GROUP, lambda code: None)
    assert scene.log[0][before:] == [(encode_offset_key(OffsetKey(GROUP, "t", 0)), None)]


def test_offsets_are_deleted_unless_their_topic_is_subscribed() -> None:
    scene = Scene()
    member = subscribed_member(scene, "used")
    scene.commit({("used", 0): 1, ("left", 0): 1, ("left", 1): 1}, member)
    waiter: Waiter[OffsetDeleteReply] = Waiter()
    scene.coordinator.delete_offsets(GROUP, [("used", 0), ("left", 0), ("none", 0)], waiter)
    assert [one.error_code for one in waiter.reply.partitions] == [
        ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        ErrorCode.NONE,
        ErrorCode.NONE,
    ]
    assert scene.committed() == {("used", 0): 1, ("left", 1): 1}
    assert scene.log[0][-1] == (encode_offset_key(OffsetKey(GROUP, "left", 0)), None), (
        "and nothing of what is not there"
    )
    scene.take_over()
    assert scene.committed() == {("used", 0): 1, ("left", 1): 1}


def test_offsets_of_groups_that_are_not_consumers_are_deleted_only_when_empty() -> None:
    scene = Scene()
    joined = scene.join(kind="connect").reply
    scene.sync(joined, {})
    replies: list[OffsetDeleteReply] = []
    scene.coordinator.delete_offsets(GROUP, [("t", 0)], replies.append)
    scene.coordinator.delete_offsets("none", [("t", 0)], replies.append)
    assert [reply.error_code for reply in replies] == [ErrorCode.NON_EMPTY_GROUP, ErrorCode.GROUP_ID_NOT_FOUND]
    scene.commit({("t", 0): 1}, joined)
    scene.coordinator.leave(GROUP, [Leaver(joined.member_id)])
    scene.coordinator.delete_offsets(GROUP, [("t", 0)], replies.append)
    assert replies[-1].error_code == ErrorCode.NONE
    assert scene.committed() == {}


def test_offsets_of_a_group_that_somebody_is_about_to_join_are_not_deleted() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    scene.join(known=True)
    waits = scene.join()
    (member_id,) = scene.group().roster.members
    scene.coordinator.leave(GROUP, [Leaver(member_id)])
    assert waits.answered
    assert scene.state() == "PreparingRebalance"
    waiter: Waiter[OffsetDeleteReply] = Waiter()
    scene.coordinator.delete_offsets(GROUP, [("t", 0)], waiter)
    assert waiter.reply.error_code == ErrorCode.NON_EMPTY_GROUP


def test_offsets_belong_to_the_topic_that_they_were_committed_to() -> None:
    """Also when another coordinator has taken over, and when nobody coordinated while the topic was made anew."""
    scene = Scene()
    scene.commit({("t", 0): 1, ("u", 0): 2}, retention_ms=LIMITS.retention_ms)
    scene.topics["t"] = b"made anew......."
    assert scene.committed() == {("u", 0): 2}
    scene.take_over()
    assert scene.committed() == {("u", 0): 2}
    assert scene.coordinator.fetch_offsets(GROUP, [("t", 0)]).offsets == (FetchedOffset("t", 0),)
    assert scene.coordinator.committed_offset(GROUP, "t", 0) is None
    assert [lag.topic for lag in scene.coordinator.lags(lambda *_: 9)] == ["u"]
    scene.commit({("t", 0): 3})
    scene.take_over()
    assert scene.committed() == {("t", 0): 3, ("u", 0): 2}


def test_a_topic_that_is_missing_for_a_while_keeps_its_offsets() -> None:
    """Its key may have been lost, and come back. Nothing counts as archived meanwhile."""
    scene = Scene()
    scene.commit({("t", 0): 1})
    scene.topics["t"] = None
    scene.take_over()
    assert scene.committed() == {}, "a list names only what there is"
    assert scene.coordinator.fetch_offsets(GROUP, [("t", 0)]).offsets[0].committed_offset == 1
    assert scene.coordinator.committed_offset(GROUP, "t", 0) is None
    del scene.topics["t"]
    assert scene.committed() == {("t", 0): 1}


def test_offsets_that_were_written_without_an_id_get_that_of_the_topic_at_the_next_load() -> None:
    scene = Scene()
    old = OffsetAndMetadata(7, 1, "m", scene.clock.wall_ms())
    key = encode_offset_key(OffsetKey(GROUP, "t", 0))
    missing = encode_offset_key(OffsetKey(GROUP, "missing", 0))
    scene.log[0] = [(key, encode_offset(old)), (missing, encode_offset(old))]
    scene.topics["missing"] = None
    scene.take_over()
    assert scene.log[0][2:] == [(key, encode_offset(replace(old, topic_id=TOPIC_ID)))]
    assert scene.committed() == {("t", 0): 7}
    scene.topics = {"t": b"made anew......."}
    scene.take_over()
    assert scene.committed() == {("missing", 0): 7}


def test_offsets_of_an_earlier_topic_expire_though_the_group_reads_the_new_one() -> None:
    scene = Scene(limits=replace(LIMITS, retention_ms=3_600_000))
    member = subscribed_member(scene, "t")
    scene.commit({("t", 0): 1, ("t", 1): 1}, member)
    scene.topics["t"] = b"made anew......."
    scene.commit({("t", 0): 2}, member)
    for _ in range(2 * 3600 // 5):
        scene.advance(5)
        assert scene.beat(member) == ErrorCode.NONE
    assert scene.committed() == {("t", 0): 2}
    assert list(scene.coordinator._shards[0].offsets.of(GROUP)) == [("t", 0)]


def test_lag_is_the_distance_from_the_commit_to_the_end() -> None:
    scene = Scene()
    scene.commit({("t", 0): 5, ("t", 1): 9, ("gone", 0): 1})
    ends = {("t", 0): 12, ("t", 1): 8}
    lags = list(scene.coordinator.lags(lambda topic, partition: ends.get((topic, partition))))
    assert lags == [Lag(GROUP, "t", 0, 5, 7), Lag(GROUP, "t", 1, 9, 0)]


# Expiry


def test_offsets_of_a_group_without_members_expire_after_their_commit() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    scene.advance(RETENTION_SECONDS / 2)
    scene.commit({("t", 1): 1})
    scene.advance(RETENTION_SECONDS / 2 + CHECK_SECONDS)
    assert scene.committed() == {("t", 1): 1}
    assert scene.log[0][-1] == (encode_offset_key(OffsetKey(GROUP, "t", 0)), None)
    scene.advance(RETENTION_SECONDS)
    assert scene.coordinator.list_groups().groups == ()
    scene.take_over()
    assert scene.coordinator.list_groups().groups == ()


def test_offsets_of_an_emptied_group_expire_after_it_became_empty() -> None:
    scene = Scene()
    member = scene.stable(1)[0]
    scene.commit({("t", 0): 1}, member)
    for _ in range(int(2 * RETENTION_SECONDS * 1000 / SESSION_MS / 100)):
        scene.advance(SESSION_MS / 2000)
        assert scene.beat(member) == ErrorCode.NONE
    scene.coordinator.leave(GROUP, [Leaver(member.member_id)])
    scene.take_over()
    scene.advance(RETENTION_SECONDS - 1)
    assert scene.committed() == {("t", 0): 1}
    scene.advance(1 + CHECK_SECONDS)
    assert scene.committed() == {}
    assert scene.state() == "Dead"
    scene.take_over()
    assert scene.coordinator.list_groups().groups == ()


def test_offsets_in_use_do_not_expire_and_those_left_behind_do() -> None:
    scene = Scene(limits=replace(LIMITS, retention_ms=3_600_000))
    member = subscribed_member(scene, "used")
    scene.commit({("used", 0): 1, ("left", 0): 1}, member)
    for _ in range(2 * 3600 // 5):
        scene.advance(5)
        assert scene.beat(member) == ErrorCode.NONE
    assert scene.committed() == {("used", 0): 1}


def test_a_group_without_offsets_stays_while_it_has_members() -> None:
    scene = Scene(limits=replace(LIMITS, expiry_check_ms=5000))
    (member,) = scene.stable(1)
    scene.advance(6)
    assert scene.beat(member) == ErrorCode.NONE


def test_a_group_without_offsets_stays_while_somebody_is_about_to_join_it() -> None:
    scene = Scene(limits=replace(LIMITS, expiry_check_ms=5000))
    given = scene.join(known=True).reply
    assert given.error_code == ErrorCode.MEMBER_ID_REQUIRED
    scene.advance(6)
    assert scene.join(given.member_id).reply.error_code == ErrorCode.NONE


def test_a_group_that_is_on_its_way_out_does_not_expire_too() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1}, retention_ms=1000)
    scene.held = True
    scene.coordinator.delete(GROUP, lambda code: None)
    scene.advance(CHECK_SECONDS)
    assert len(scene.on_the_way) == 1


def test_a_client_may_say_how_long_its_offsets_are_kept() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1}, retention_ms=1000)
    scene.commit({("t", 1): 1})
    scene.commit({("t", 2): 1}, retention_ms=0)
    scene.advance(CHECK_SECONDS)
    assert scene.committed() == {("t", 1): 1}


def test_a_commit_that_is_on_its_way_does_not_expire_with_the_one_that_it_replaces() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1, ("t", 1): 1})
    scene.advance(RETENTION_SECONDS - 1)
    scene.held = True
    late = scene.commit({("t", 0): 2})
    scene.advance(1 + CHECK_SECONDS)
    assert not late.answered
    scene.held = False
    scene.acknowledge()
    assert [result.error_code for result in late.reply] == [ErrorCode.NONE]
    assert scene.committed() == {("t", 0): 2}
    scene.take_over()
    assert scene.committed() == {("t", 0): 2}


def test_a_group_does_not_expire_under_a_commit_that_is_on_its_way() -> None:
    scene = Scene()
    scene.commit({("t", 0): 1})
    scene.advance(RETENTION_SECONDS - 1)
    scene.held = True
    late = scene.commit({("t", 1): 2})
    scene.advance(1 + CHECK_SECONDS)
    scene.held = False
    scene.acknowledge()
    assert [result.error_code for result in late.reply] == [ErrorCode.NONE]
    assert scene.committed() == {("t", 1): 2}
    scene.take_over()
    assert scene.committed() == {("t", 1): 2}


def test_a_group_that_is_deleted_takes_along_what_was_on_its_way() -> None:
    scene = Scene(held=True)
    scene.commit({("t", 0): 1})
    scene.acknowledge()
    scene.commit({("t", 1): 1})
    codes: list[int] = []
    scene.coordinator.delete(GROUP, codes.append)
    scene.acknowledge()
    assert codes == [ErrorCode.NONE]
    scene.held = False
    scene.take_over()
    assert scene.committed() == {}


class SteppingClock(VirtualClock):
    """A wall clock that somebody sets."""

    set_by_ms = 0

    def wall_ms(self) -> int:
        return super().wall_ms() + self.set_by_ms


@pytest.mark.parametrize("direction", [1, -1])
def test_a_wall_clock_that_is_set_wrong_for_a_while_makes_no_commit_old(direction: int) -> None:
    clock = SteppingClock()
    scene = Scene(clock=clock)
    member = scene.stable(1)[0]
    scene.commit({("t", 0): 1}, member)
    scene.coordinator.leave(GROUP, [Leaver(member.member_id)])
    scene.commit({("t", 0): 1}, group_id="simple")
    clock.set_by_ms = 10 * direction * LIMITS.retention_ms
    scene.commit({("t", 1): 1}, group_id="simple")
    scene.commit({("t", 1): 1})
    scene.advance(2 * CHECK_SECONDS)
    clock.set_by_ms = 0
    scene.advance(2 * CHECK_SECONDS)
    assert scene.committed() == scene.committed("simple") == {("t", 0): 1, ("t", 1): 1}


def test_expiry_goes_through_many_groups_in_slices() -> None:
    scene = Scene(limits=replace(LIMITS, expiry_check_ms=LIMITS.retention_ms), partitions=3)
    for number in range(1200):
        scene.commit({("t", 0): 1}, group_id=f"g{number}")
    scene.advance(RETENTION_SECONDS)
    assert scene.coordinator.list_groups().groups == ()


def test_a_closed_coordinator_leaves_no_timer_with_work() -> None:
    scene = Scene()
    scene.stable(3)
    scene.coordinator.close()
    assert len(scene.coordinator._alarms) == 0


def test_limits_come_from_the_settings() -> None:
    settings = load(environment={"HEADRACE_GROUP_MAX_SIZE": "7", "HEADRACE_OFFSETS_RETENTION_MS": "8"})
    limits = limits_from(settings)
    assert (limits.group.max_size, limits.retention_ms, limits.groups_max) == (7, 8, 100_000)
    assert limits.group.initial_rebalance_delay_ms == 3000, "as Kafka has it"


@pytest.mark.parametrize(("gone", "code"), [(False, ErrorCode.NONE), (True, ErrorCode.NOT_COORDINATOR)])
def test_what_has_nothing_to_append_is_answered_at_once(gone: bool, code: int) -> None:
    scene = Scene(held=True)
    shard = scene.coordinator._shards[0]
    if gone:
        scene.coordinator.resign(0)
    heard: list[int] = []
    scene.coordinator._append(shard, [(b"k", None)] if gone else [], heard.append)
    assert heard == [code]
    assert scene.on_the_way == []
