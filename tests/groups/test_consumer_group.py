"""The consumer protocol (KIP-848): members, epochs, assignments, faults, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groups.consumers import Consumer, ConsumerScene, settle, topic_id
from groups.scene import GROUP, LIMITS
from headrace.errors import ErrorCode
from headrace.groups import topic_catalog, topic_patterns
from headrace.groups.consumer_messages import JOINING, ConsumerHeartbeat
from headrace.groups.consumer_records import MemberState, RecordKind, decode_key
from headrace.groups.limits import ConsumerLimits
from headrace.groups.messages import CommitRequest, OffsetToCommit
from proving import proves

HALF = {topic_id("t"): frozenset((0, 1))}


def scene_of(*topics: str, partitions: int = 4, limits: ConsumerLimits | None = None) -> ConsumerScene:
    scene = ConsumerScene(limits=replace(LIMITS, consumer=limits) if limits else LIMITS)
    for topic in topics:
        scene.topic(topic, partitions)
    return scene


def state(scene: ConsumerScene) -> str:
    return scene.described().group_state


# Joining


@proves("N1")
def test_the_first_member_gets_everything_with_its_first_heartbeat() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    assert one.epoch == 1
    assert one.partitions == [("t", 0), ("t", 1), ("t", 2), ("t", 3)]
    assert state(scene) == "Stable"


@proves("N1")
def test_a_partition_is_given_up_before_another_member_has_it() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    two = scene.member("t")
    assert two.epoch == 2
    assert two.partitions == []
    assert state(scene) == "Reconciling"
    before = one.epoch
    waiter = one.send()
    scene.turn()
    assert waiter.reply.member_epoch == before
    assert waiter.reply.assignment == HALF
    assert two.beat() == ErrorCode.NONE
    assert two.partitions == [], "the first has not said yet that it gave them up"
    one.hear()
    one.beat()
    assert one.epoch == 2
    two.beat()
    assert two.partitions == [("t", 2), ("t", 3)]
    assert state(scene) == "Stable"


def test_an_id_is_made_for_who_has_none() -> None:
    scene = scene_of("t")
    request = ConsumerHeartbeat("", JOINING, None, None, 1000, ("t",), None, None, {})
    waiter = scene.heartbeat(request)
    scene.turn()
    assert waiter.reply.member_id
    assert [member.member_id for member in scene.described().members] == [waiter.reply.member_id]


def test_a_heartbeat_that_changes_nothing_is_answered_at_once_and_writes_nothing() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t")
    settle(one, two)
    written = len(scene.log[0])
    waiter = one.send()
    assert waiter.reply.assignment is None
    assert waiter.reply.heartbeat_interval_ms == 5000
    assert len(scene.log[0]) == written


@proves("N1")
def test_members_that_come_in_one_turn_are_assigned_once() -> None:
    scene = scene_of("t", partitions=100)
    many = [Consumer(scene, ("t",), name=f"m{n:03}") for n in range(50)]
    waiters = [one.send() for one in many]
    assert not any(waiter.answered for waiter in waiters)
    scene.turn()
    for one in many:
        one.hear()
    assert [len(one.partitions) for one in many] == [2] * 50
    assert scene.described().group_epoch == 50
    epochs = [key for key, _ in scene.log[0] if (found := decode_key(key)) and found.kind is RecordKind.TARGET_EPOCH]
    assert len(epochs) == 1


def test_a_member_that_waits_for_a_target_may_leave() -> None:
    scene = scene_of("t", partitions=5000)
    scene.member("t")
    late = Consumer(scene, ("t",))
    joining = late.send()
    scene.turn()
    assert not joining.answered, "a large group computes its target after a pause"
    gone = scene.heartbeat(ConsumerHeartbeat(late.member_id, -1))
    scene.turn()
    assert gone.reply.error_code == ErrorCode.NONE
    scene.advance(1)
    assert joining.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


# Leaving


@proves("N1")
def test_what_a_member_leaves_behind_goes_to_the_others() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t")
    settle(one, two)
    assert two.leave().member_epoch == -1
    one.beat()
    assert len(one.partitions) == 4
    one.leave()
    assert state(scene) == "Empty"
    assert one.beat() == ErrorCode.NONE
    assert len(one.partitions) == 4


@proves("N1")
def test_a_silent_member_is_removed() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t")
    settle(one, two)
    for _ in range(10):
        scene.advance(5)
        one.beat()
    assert len(one.partitions) == 4
    assert two.beat() == ErrorCode.UNKNOWN_MEMBER_ID
    settle(one, two)
    assert len(two.partitions) == 2


def test_a_group_has_its_own_timeouts_within_the_brokers() -> None:
    limits = ConsumerLimits(min_session_timeout_ms=2000, max_heartbeat_interval_ms=9000)
    scene = scene_of("t", limits=limits)
    scene.own_settings = {"consumer.session.timeout.ms": "7000", "consumer.heartbeat.interval.ms": "10000"}
    one = Consumer(scene, ("t",))
    waiter = one.send()
    scene.turn()
    assert waiter.reply.heartbeat_interval_ms == 9000
    one.hear()
    scene.advance(6.9)
    assert one.beat() == ErrorCode.NONE
    scene.own_settings = {"consumer.session.timeout.ms": "1"}
    one.beat()
    scene.advance(1.9)
    assert one.beat() == ErrorCode.NONE
    scene.advance(2.1)
    assert one.beat() == ErrorCode.UNKNOWN_MEMBER_ID


@proves("N1")
def test_a_member_that_does_not_revoke_in_time_is_removed() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    two = scene.member("t")
    keeping = ConsumerHeartbeat(one.member_id, one.epoch, owned=one.owned)
    waiter = scene.heartbeat(keeping)
    scene.turn()
    assert waiter.reply.assignment == HALF
    for _ in range(7):
        scene.advance(5)
        scene.heartbeat(keeping)
        two.beat()
    assert len(two.partitions) == 4
    assert one.beat() == ErrorCode.UNKNOWN_MEMBER_ID


# Faults


@proves("N1")
def test_epochs_that_a_member_does_not_have_are_fenced() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t")
    settle(one, two)
    scene.member("t")
    for epoch in (one.epoch + 1, one.epoch + 5):
        fenced = scene.heartbeat(ConsumerHeartbeat(one.member_id, epoch, owned={})).reply
        assert fenced.error_code == ErrorCode.FENCED_MEMBER_EPOCH
        assert fenced.error_message
    unknown = scene.heartbeat(ConsumerHeartbeat("nobody", 1, owned={})).reply
    assert unknown.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.heartbeat(ConsumerHeartbeat("nobody", -1)).reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    elsewhere = scene.heartbeat(ConsumerHeartbeat("nobody", 1), "no-such-group").reply
    assert elsewhere.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_member_whose_answer_was_lost_goes_on_with_its_old_epoch() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    before, owned = one.epoch, one.owned
    scene.topic("u", 2)
    one.topics, one.is_whole = ("t", "u"), True
    one.send()  # its answer is lost
    scene.turn()
    again = ConsumerHeartbeat(one.member_id, before, owned=owned, topics=("t", "u"), rebalance_timeout_ms=1000)
    waiter = scene.heartbeat(again)
    scene.turn()
    reply = waiter.reply
    assert (reply.error_code, reply.member_epoch) == (ErrorCode.NONE, before + 1)
    assert reply.assignment is not None
    assert len(reply.assignment) == 2
    more = replace(again, owned={**owned, topic_id("x"): frozenset((1,))})
    assert scene.heartbeat(more).reply.error_code == ErrorCode.FENCED_MEMBER_EPOCH


def test_a_fenced_member_joins_again_under_its_id() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t")
    settle(one, two)
    one.epoch += 7
    assert one.beat() == ErrorCode.FENCED_MEMBER_EPOCH
    assert one.beat() == ErrorCode.NONE
    assert len(one.partitions) == 2


def test_faults_of_a_request_are_told() -> None:
    scene = scene_of("t", limits=ConsumerLimits(max_size=2, assignors=("range",)))
    bad = Consumer(scene, ("t",), assignor="uniform")
    assert bad.send().reply.error_code == ErrorCode.UNSUPPORTED_ASSIGNOR
    worse = Consumer(scene, (), pattern="(")
    refused = worse.send().reply
    assert refused.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
    assert "regular expression" in (refused.error_message or "")
    assert not scene.coordinator.list_groups().groups, "nothing is left of them"
    scene.member("t")
    scene.member("t")
    assert Consumer(scene, ("t",)).send().reply.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED


def test_a_group_of_another_protocol_is_not_found() -> None:
    scene = scene_of("t")
    joined = scene.join(kind="connect").reply
    scene.sync(joined, {joined.member_id: b""})
    assert Consumer(scene, ("t",)).send().reply.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert scene.described().error_code == ErrorCode.GROUP_ID_NOT_FOUND


# Static members


@proves("N1")
def test_a_static_member_that_rests_gets_its_partitions_back() -> None:
    scene = scene_of("t")
    one, two = scene.member("t", instance="a"), scene.member("t", instance="b")
    settle(one, two)
    had, epoch = two.partitions, scene.described().group_epoch
    assert two.rest().member_epoch == -2
    one.beat()
    assert len(one.partitions) == 2, "they are kept for it"
    back = scene.member("t", instance="b", name="back")
    assert back.partitions == had
    assert scene.described().group_epoch == epoch, "nobody else has to move"
    assert two.beat() == ErrorCode.UNRELEASED_INSTANCE_ID
    old = ConsumerHeartbeat(two.member_id, 2, "b")
    assert scene.heartbeat(old).reply.error_code == ErrorCode.FENCED_INSTANCE_ID


def test_an_instance_that_has_not_left_is_not_replaced() -> None:
    scene = scene_of("t")
    scene.member("t", instance="a")
    other = Consumer(scene, ("t",), instance="a")
    assert other.send().reply.error_code == ErrorCode.UNRELEASED_INSTANCE_ID
    scene.advance(46)
    assert other.beat() == ErrorCode.NONE


def test_a_static_member_that_does_not_come_back_is_removed() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t", instance="b")
    settle(one, two)
    two.rest()
    for _ in range(10):
        scene.advance(5)
        one.beat()
    assert len(one.partitions) == 4


def test_a_static_member_that_leaves_for_good_is_gone() -> None:
    scene = scene_of("t")
    one, two = scene.member("t"), scene.member("t", instance="b")
    settle(one, two)
    two.leave()
    one.beat()
    assert len(one.partitions) == 4


# Topics


@proves("N1")
def test_topics_that_come_grow_and_go_are_assigned_anew() -> None:
    scene = scene_of("t", partitions=1)
    one = scene.member("t", "later")
    assert one.partitions == [("t", 0)]
    scene.topic("later", 2)
    one.beat()
    assert one.partitions == [("later", 0), ("later", 1), ("t", 0)]
    scene.topic("t", 3)
    one.beat()
    assert len(one.partitions) == 5
    scene.delete("later")
    one.beat()
    assert one.partitions == [("t", 0), ("t", 1), ("t", 2)]
    epoch = scene.described().group_epoch
    scene.topic("unread", 3)
    assert scene.described().group_epoch == epoch


def test_a_topic_made_anew_is_another_one() -> None:
    scene = scene_of("t", partitions=1)
    one = scene.member("t")
    scene.topic("t", 1, given_id=b"second".ljust(16, b"\0"))
    settle(one)
    assert one.partitions == [("second", 0)]


@proves("N1")
def test_a_pattern_follows_the_topics() -> None:
    scene = scene_of("logs-a", "other", partitions=1)
    scene.topic("__internal", 1)
    one = scene.member(pattern="logs-.*|__.*")
    assert one.partitions == [("logs-a", 0)]
    scene.topic("logs-b", 1)
    one.beat()
    assert one.partitions == [("logs-a", 0), ("logs-b", 0)]
    scene.delete("logs-a")
    one.beat()
    assert one.partitions == [("logs-b", 0)]
    one.topics, one.pattern, one.is_whole = ("other",), "", True
    settle(one)
    assert one.partitions == [("other", 0)]
    described = scene.described().members[0]
    assert (described.topics, described.pattern) == (("other",), None)


def test_a_pattern_that_takes_too_long_later_stands_for_nothing_and_that_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scene_of("logs-a", "logs-b", partitions=1)
    one = scene.member(pattern="logs-.*")
    assert one.partitions == [("logs-a", 0), ("logs-b", 0)]
    catalog = scene.coordinator.catalog
    monkeypatch.setattr(topic_catalog, "PATTERNS_MAX", 1)
    catalog.matching("other")  # what the first one stands for is not kept any more
    monkeypatch.setattr(topic_patterns, "LOOKED_AT_MAX", 0)
    for name in ("logs-c", "logs-d"):
        scene.topic(name, 1)
        one.beat()
    settle(one)
    assert one.partitions == []
    told = [each.getMessage() for each in caplog.records if "stands for no topic" in each.getMessage()]
    assert len(told) == 1
    assert "'logs-.*' takes too long" in told[0]


def test_a_pattern_and_topics_together() -> None:
    scene = scene_of("a", "b", "c", partitions=1)
    one = scene.member("a", pattern="b|x")
    assert one.partitions == [("a", 0)], "as clients expect of Kafka, what is named comes first"
    settle(one)
    assert one.partitions == [("a", 0), ("b", 0)]
    two = scene.member("a", pattern="b|x")
    settle(one, two)
    assert sorted(one.partitions + two.partitions) == [("a", 0), ("b", 0)], "one that is known already"


@proves("N1")
def test_members_are_assigned_what_is_in_their_rack_and_a_restart_moves_nothing() -> None:
    scene = ConsumerScene()
    scene.brokers("r0", "r1")
    scene.topic("t", 4, brokers=2)
    one, two = scene.member("t", rack="r1"), scene.member("t", rack="r0")
    settle(one, two)
    assert one.partitions == [("t", 1), ("t", 3)]
    assert two.partitions == [("t", 0), ("t", 2)]
    epoch = scene.described().group_epoch
    scene.brokers("r0")
    assert scene.described().group_epoch == epoch


@pytest.mark.parametrize(("votes", "chosen"), [((None, None), "uniform"), (("range", None), "range")])
def test_the_assignor_is_the_one_most_members_ask_for(votes: tuple[str | None, ...], chosen: str) -> None:
    scene = scene_of("t")
    settle(*[scene.member("t", assignor=vote) for vote in votes])
    assert scene.described().assignor == chosen


# Offsets


def commit(scene: ConsumerScene, member: Consumer | None, epoch: int = -1, **other: bool) -> int:
    offsets = (OffsetToCommit("t", 0, 5, topic_id=scene.topic_id("t")),)
    request = CommitRequest(offsets, member.member_id if member else "", epoch, **other)  # type: ignore[arg-type]
    replies: list[int] = []
    scene.coordinator.commit(GROUP, request, lambda results: replies.append(results[0].error_code))
    return replies[0]


@proves("N1")
def test_a_member_commits_and_fetches_in_its_epoch() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    assert commit(scene, one, one.epoch) == ErrorCode.NONE
    assert commit(scene, one, one.epoch + 1) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit(scene, one, one.epoch - 1) == ErrorCode.STALE_MEMBER_EPOCH
    assert commit(scene, None) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(scene, one, one.epoch, has_member_epoch=False) == ErrorCode.UNSUPPORTED_VERSION

    def fetch(member_id: str | None, epoch: int) -> int:
        return scene.coordinator.fetch_offsets(GROUP, None, member_id=member_id, member_epoch=epoch).error_code

    assert fetch(None, -1) == ErrorCode.NONE
    assert fetch(one.member_id, one.epoch) == ErrorCode.NONE
    assert fetch(one.member_id, one.epoch - 1) == ErrorCode.STALE_MEMBER_EPOCH
    assert fetch("nobody", 1) == ErrorCode.UNKNOWN_MEMBER_ID
    one.leave()
    assert commit(scene, None) == ErrorCode.NONE
    assert scene.committed() == {("t", 0): 5}


def test_offsets_in_use_are_not_deleted_nor_expire() -> None:
    scene = scene_of("t")
    scene.coordinator.limits = replace(LIMITS, retention_ms=10_000, expiry_check_ms=1000)
    one = scene.member("t")
    commit(scene, one, one.epoch)
    codes: list[int] = []
    scene.coordinator.delete_offsets(GROUP, [("t", 0)], lambda reply: codes.append(reply.partitions[0].error_code))
    assert codes == [ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC]
    scene.coordinator._schedule_expiry()
    for _ in range(10):
        scene.advance(5)
        one.beat()
    assert scene.committed() == {("t", 0): 5}


@proves("N1")
def test_an_empty_groups_offsets_expire_from_when_it_became_empty() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    commit(scene, one, one.epoch)
    one.leave()
    left = scene.clock.now()
    scene.advance(LIMITS.retention_ms / 1000 - 1000)
    scene.take_over()
    assert scene.committed() == {("t", 0): 5}
    assert state(scene) == "Empty"
    scene.advance(left + LIMITS.retention_ms / 1000 + 2 * LIMITS.expiry_check_ms / 1000 - scene.clock.now())
    assert scene.committed() == {}
    assert not scene.coordinator.list_groups().groups
    scene.take_over()
    assert not scene.coordinator.list_groups().groups, "its tombstones are in the log"


# Describing, deleting


def test_groups_are_listed_and_described_by_type() -> None:
    scene = scene_of("t")
    one = scene.member("t", instance="i", rack="r")
    two = scene.member(pattern="t")
    listed = scene.coordinator.list_groups(types=["Consumer"]).groups
    assert [(group.group_id, group.group_state, group.group_type) for group in listed] == [
        (GROUP, "Reconciling", "consumer")
    ]
    assert not scene.coordinator.list_groups(types=["classic"]).groups
    assert scene.coordinator.describe(GROUP).group_type == "consumer"
    assert scene.coordinator.states() == {"Reconciling": 1}
    described = scene.described()
    assert (described.group_epoch, described.assignment_epoch, described.assignor) == (2, 2, "uniform")
    first, second = described.members
    assert (first.instance_id, first.rack, first.topics, first.is_classic) == ("i", "r", ("t",), False)
    assert first.assigned == {topic_id("t"): {0, 1, 2, 3}}
    assert first.target == {topic_id("t"): {0, 1}}
    assert second.pattern == "t"
    settle(one, two)
    assert scene.described().group_state == "Stable"


def test_only_an_empty_group_is_deleted() -> None:
    scene = scene_of("t")
    one = scene.member("t", pattern="t")
    codes: list[int] = []
    scene.coordinator.delete(GROUP, codes.append)
    one.leave()
    scene.coordinator.delete(GROUP, codes.append)
    scene.coordinator.delete(GROUP, codes.append)
    assert codes == [ErrorCode.NON_EMPTY_GROUP, ErrorCode.NONE, ErrorCode.GROUP_ID_NOT_FOUND]
    kept = dict(scene.log[0])
    assert not [key for key, value in kept.items() if value is not None]


# The log


@proves("N1")
def test_another_coordinator_goes_on_where_this_one_was() -> None:
    scene = scene_of("t", "u")
    one, two = scene.member("t", instance="a"), scene.member("u", pattern="t", assignor="range", rack="r")
    two.beat()
    before = scene.described()
    scene.take_over()
    assert scene.described() == replace(before, assignor="")
    settle(one, two)
    assert state(scene) == "Stable"
    assert one.places | two.places == {(topic_id(name), n) for name in "tu" for n in range(4)}


def test_topics_that_changed_meanwhile_are_seen_at_the_load() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    epoch = scene.described().group_epoch
    before = scene.image
    scene.coordinator.close()
    scene.image = ConsumerScene().image
    wider = ConsumerScene()
    wider.topic("t", 6)
    scene.image = wider.image
    scene.take_over()
    assert scene.described().group_epoch == epoch + 1
    one.beat()
    assert len(one.partitions) == 6
    assert before is not scene.image


@proves("N1")
@pytest.mark.parametrize("code", [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.REQUEST_TIMED_OUT])
def test_what_could_not_be_written_is_told_and_written_later(code: int) -> None:
    scene = scene_of("t")
    scene.held = True
    one = Consumer(scene, ("t",))
    waiter = one.send()
    scene.turn()
    assert not waiter.answered
    scene.acknowledge(code)
    assert one.hear() == ErrorCode.COORDINATOR_NOT_AVAILABLE
    again = one.send()
    scene.turn()
    scene.advance(1)
    assert not again.answered
    scene.held = False
    scene.acknowledge()
    assert one.hear() == ErrorCode.NONE
    assert len(one.partitions) == 4
    scene.take_over()
    assert one.beat() == ErrorCode.NONE
    assert scene.described().members[0].assigned == one.owned


def test_a_coordinator_that_resigns_sends_everyone_on() -> None:
    scene = scene_of("t")
    scene.held = True
    one, two = Consumer(scene, ("t",)), Consumer(scene, ("t",))
    first = one.send()
    scene.turn()
    second = two.send()
    scene.coordinator.resign(0)
    assert first.reply.error_code == second.reply.error_code == ErrorCode.NOT_COORDINATOR
    scene.turn()
    scene.acknowledge()


def test_members_of_a_state_that_is_under_way_go_on_after_a_load() -> None:
    scene = scene_of("t")
    one = scene.member("t")
    two = scene.member("t")
    one.send()
    scene.turn()
    assert scene.consumers().members[one.member_id].current.state is MemberState.UNREVOKED_PARTITIONS
    scene.take_over()
    scene.advance(31)
    two.beat()
    assert len(two.partitions) == 4, "it had its time to revoke, and did not"
