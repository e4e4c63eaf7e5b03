from __future__ import annotations

from dataclasses import replace

import pytest

from groups.scene import GROUP, LIMITS, REBALANCE_MS, SESSION_MS, Scene
from headrace.errors import ErrorCode
from headrace.groups.group import TRANSITIONS, Cause, State
from headrace.groups.limits import GroupLimits
from headrace.groups.messages import JoinedMember, Leaver, SyncReply

SESSION_SECONDS = SESSION_MS / 1000
REBALANCE_SECONDS = REBALANCE_MS / 1000


def test_every_state_has_its_row_and_all_but_dead_can_be_removed() -> None:
    assert set(TRANSITIONS) == set(State)
    assert [state for state in State if Cause.REMOVED not in TRANSITIONS[state]] == [State.DEAD]


def test_a_group_forms_in_four_steps() -> None:
    scene = Scene()
    joined = scene.join(client="app").reply
    assert joined.member_id == "app-1"
    assert (joined.error_code, joined.generation_id, joined.leader) == (ErrorCode.NONE, 1, "app-1")
    assert (joined.protocol_type, joined.protocol_name) == ("consumer", "range")
    assert joined.members == (JoinedMember("app-1", None, b"m"),)
    assert scene.state() == "CompletingRebalance"
    assert scene.sync(joined, {"app-1": b"all"}).reply == SyncReply(ErrorCode.NONE, "consumer", "range", b"all")
    assert scene.state() == "Stable"
    assert scene.beat(joined) == ErrorCode.NONE


def test_the_assignment_is_stored_before_anyone_hears_it() -> None:
    scene = Scene()
    first = scene.join().reply
    second_waits = scene.join()
    first = scene.join(first.member_id).reply
    second = second_waits.reply
    scene.held = True
    follower = scene.sync(second)
    leader = scene.sync(first, {first.member_id: b"a", second.member_id: b"b"})
    assert not follower.answered
    assert not leader.answered
    scene.acknowledge()
    assert (leader.reply.assignment, follower.reply.assignment) == (b"a", b"b")


def test_an_assignment_that_cannot_be_stored_is_told_and_made_again() -> None:
    scene = Scene()
    joined = scene.join().reply
    scene.held = True
    sync = scene.sync(joined, {joined.member_id: b"a"})
    scene.acknowledge(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert sync.reply.error_code == ErrorCode.NOT_COORDINATOR
    assert scene.state() == "PreparingRebalance"
    assert scene.join(joined.member_id).reply.generation_id == 2


def test_an_assignment_stored_too_late_is_not_given_out() -> None:
    scene = Scene()
    joined = scene.join().reply
    scene.held = True
    sync = scene.sync(joined, {joined.member_id: b"old"})
    other = scene.join()
    assert sync.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    again = scene.join(joined.member_id).reply
    assert other.reply.generation_id == again.generation_id == 2
    scene.acknowledge()
    assert scene.state() == "CompletingRebalance"
    assert not scene.sync(other.reply).answered


def test_a_second_member_makes_the_first_join_again() -> None:
    scene = Scene()
    first = scene.stable(1)[0]
    newcomer = scene.join(client="new")
    assert scene.state() == "PreparingRebalance"
    assert scene.beat(first) == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.sync(first).reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert not newcomer.answered
    again = scene.join(first.member_id).reply
    assert newcomer.reply.generation_id == again.generation_id == 2
    assert [member.member_id for member in again.members] == [first.member_id, newcomer.reply.member_id]
    assert newcomer.reply.members == ()
    assert scene.beat(first) == ErrorCode.ILLEGAL_GENERATION


def test_a_member_gets_its_id_before_it_is_one() -> None:
    """KIP-394"""
    scene = Scene()
    refused = scene.join(known=True, client="c").reply
    assert (refused.error_code, refused.member_id) == (ErrorCode.MEMBER_ID_REQUIRED, "c-1")
    assert scene.group().roster.members == {}
    stranger = scene.join("c-1", "an instance", known=True).reply
    assert stranger.error_code == ErrorCode.UNKNOWN_MEMBER_ID, "the id was given to nobody with an instance id"
    (left,) = scene.coordinator.leave(GROUP, [Leaver("c-1", "an instance")]).members
    assert left.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    joined = scene.join("c-1", known=True).reply
    assert (joined.error_code, joined.member_id, joined.generation_id) == (ErrorCode.NONE, "c-1", 1)


def test_a_rebalance_waits_for_those_who_got_an_id_and_only_so_long() -> None:
    """KIP-394"""
    scene = Scene()
    first = scene.stable(1)[0]
    scene.join(known=True)
    scene.join(known=True)
    assert scene.state() == "Stable"
    early = scene.join("c-2", known=True)
    again = scene.join(first.member_id)
    assert not early.answered
    scene.advance(SESSION_SECONDS)
    assert early.reply.generation_id == again.reply.generation_id == 2
    assert scene.join("c-3", known=True).reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_group_of_which_only_ids_were_given_out_leaves_nothing() -> None:
    scene = Scene()
    scene.join(known=True)
    scene.advance(SESSION_SECONDS)
    assert scene.state() == "Dead"
    assert scene.coordinator.list_groups().groups == ()
    assert scene.log == {}


def test_a_silent_member_is_removed_after_its_session() -> None:
    """KIP-62"""
    scene = Scene()
    first, second = scene.stable(2)
    scene.advance(SESSION_SECONDS - 1)
    assert scene.beat(first) == ErrorCode.NONE
    scene.advance(1)
    assert scene.beat(second) == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.beat(first) == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.join(first.member_id).reply.members == (JoinedMember(first.member_id, None, b"m"),)


def test_a_member_that_waits_for_others_is_not_silent() -> None:
    """KIP-62: the rebalance timeout is another one than the session's."""
    scene = Scene()
    first, _second = scene.stable(2)
    waits = scene.join(first.member_id, protocols=(("range", b"changed"),))
    scene.advance(SESSION_SECONDS - 1)
    assert not waits.answered
    scene.advance(1)
    assert waits.reply.generation_id == 3
    assert len(waits.reply.members) == 1


def test_members_that_do_not_join_again_in_time_are_removed() -> None:
    """KIP-62"""
    scene = Scene()
    first, second = scene.stable(2)
    waits = scene.join(first.member_id, protocols=(("range", b"changed"),))
    for _ in range(6):
        scene.advance(REBALANCE_SECONDS / 6)
        if not waits.answered:
            assert scene.beat(second) == ErrorCode.REBALANCE_IN_PROGRESS
    assert [member.member_id for member in waits.reply.members] == [first.member_id]
    assert scene.beat(second) == ErrorCode.UNKNOWN_MEMBER_ID


def test_members_that_never_ask_for_their_assignment_are_removed() -> None:
    scene = Scene()
    first = scene.join().reply
    second_waits = scene.join()
    first = scene.join(first.member_id).reply
    second = second_waits.reply
    waits = scene.sync(second)
    for _ in range(6):
        assert scene.beat(first) == ErrorCode.NONE
        scene.advance(REBALANCE_SECONDS / 6)
    assert waits.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.beat(first) == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.join(second.member_id).reply.leader == second.member_id


def test_an_assignment_is_waited_for_no_longer_than_a_rebalance_however_long_sessions_are() -> None:
    scene = Scene()
    joined = scene.join(session_ms=60_000, rebalance_ms=5000).reply
    scene.advance(4)
    assert scene.beat(joined) == ErrorCode.NONE
    scene.advance(2)
    assert scene.beat(joined) == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_join_repeated_by_a_member_keeps_its_session_alive() -> None:
    scene = Scene()
    joined = scene.join().reply
    for _ in range(2):
        scene.advance(SESSION_SECONDS - 1)
        assert scene.join(joined.member_id).reply.generation_id == 1
    scene.advance(SESSION_SECONDS - 1)
    assert scene.beat(joined) == ErrorCode.NONE


def test_a_new_member_that_nobody_answers_is_removed_in_the_end() -> None:
    scene = Scene(limits=replace(LIMITS, group=GroupLimits(1000, 2_000_000, 50, 0)))
    first = scene.join(session_ms=1_000_000, rebalance_ms=1_000_000).reply
    scene.sync(first, {})
    newcomer = scene.join(client="new", session_ms=1_000_000)
    scene.advance(299)
    assert not newcomer.answered
    scene.advance(2)
    assert newcomer.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_first_rebalance_waits_for_more_members() -> None:
    """KIP-134"""
    scene = Scene(limits=replace(LIMITS, group=GroupLimits(1000, 60_000, 50, initial_rebalance_delay_ms=3000)))
    waits = [scene.join(client="a")]
    scene.advance(2)
    waits.append(scene.join(client="b"))
    scene.advance(2)
    assert not any(waiter.answered for waiter in waits)
    scene.advance(2)
    assert {waiter.reply.generation_id for waiter in waits} == {1}
    assert len(waits[0].reply.members) == 2


def test_only_the_first_rebalance_waits_for_more_members() -> None:
    """KIP-134"""
    scene = Scene(limits=replace(LIMITS, group=GroupLimits(1000, 60_000, 50, initial_rebalance_delay_ms=3000)))
    first = scene.join()
    scene.advance(3)
    second = scene.join()
    assert scene.join(first.reply.member_id).reply.generation_id == 2
    assert second.reply.generation_id == 2


def test_a_first_rebalance_never_waits_longer_than_the_rebalance_timeout() -> None:
    """KIP-134"""
    scene = Scene(limits=replace(LIMITS, group=GroupLimits(1000, 60_000, 50, initial_rebalance_delay_ms=3000)))
    waits = []
    for _ in range(8):
        waits.append(scene.join(rebalance_ms=10_000))
        scene.advance(1.25)
    assert all(waiter.reply.generation_id == 1 for waiter in waits)


def test_the_protocol_with_most_votes_among_the_common_ones_wins() -> None:
    scene = Scene()
    a, b, c = b"a", b"b", b"c"
    first = scene.join(protocols=(("x", a), ("y", a), ("z", a))).reply
    second = scene.join(protocols=(("z", b), ("y", b)))
    again = scene.join(first.member_id, protocols=(("x", a), ("y", a), ("z", a)))
    assert (again.reply.protocol_name, second.reply.protocol_name) == ("y", "y")
    third = scene.join(protocols=(("z", c), ("x", c), ("y", c)))
    scene.join(first.member_id, protocols=(("x", a), ("y", a), ("z", a)))
    scene.join(second.reply.member_id, protocols=(("z", b), ("y", b)))
    assert third.reply.protocol_name == "z"


@pytest.mark.parametrize(
    ("protocols", "kind"),
    [((("other", b""),), "consumer"), ((("range", b""),), "connect"), ((), "consumer"), ((("range", b""),), "")],
)
def test_members_without_a_common_protocol_are_refused(protocols: tuple[tuple[str, bytes], ...], kind: str) -> None:
    scene = Scene()
    members = scene.stable(1)
    assert scene.join(protocols=protocols, kind=kind).reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert scene.beat(members[0]) == ErrorCode.NONE


@pytest.mark.parametrize("session_ms", [999, 60_001, 0, -1])
def test_session_timeouts_out_of_bounds_are_refused(session_ms: int) -> None:
    scene = Scene()
    assert scene.join(session_ms=session_ms).reply.error_code == ErrorCode.INVALID_SESSION_TIMEOUT
    assert scene.state() == "Dead"


def test_a_full_group_takes_nobody_in_but_keeps_its_members() -> None:
    scene = Scene(limits=replace(LIMITS, group=GroupLimits(1000, 60_000, 2, 0)))
    first, second = scene.stable(2)
    assert scene.join().reply.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert scene.join(known=True).reply.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    waits = scene.join(first.member_id)
    scene.join(second.member_id)
    assert waits.reply.error_code == ErrorCode.NONE


def test_a_broker_takes_so_many_groups() -> None:
    scene = Scene(limits=replace(LIMITS, groups_max=2))
    assert scene.join(group_id="a").reply.error_code == ErrorCode.NONE
    assert scene.commit({("t", 0): 1}, group_id="b").reply[0].error_code == ErrorCode.NONE
    assert scene.join(group_id="c").reply.error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert scene.commit({("t", 0): 1}, group_id="c").reply[0].error_code == ErrorCode.GROUP_MAX_SIZE_REACHED


@pytest.mark.parametrize("name", ["", "x" * 256, "__headrace"])
def test_group_names_against_the_rule_are_refused(name: str) -> None:
    scene = Scene()
    assert scene.join(group_id=name).reply.error_code == ErrorCode.INVALID_GROUP_ID
    assert scene.commit({("t", 0): 1}, group_id=name).reply[0].error_code == ErrorCode.INVALID_GROUP_ID


def test_a_join_repeated_by_a_member_that_missed_the_answer_changes_nothing() -> None:
    scene = Scene()
    leader, follower = scene.stable(2)
    repeated = scene.join(follower.member_id).reply
    assert (repeated.error_code, repeated.generation_id) == (ErrorCode.NONE, follower.generation_id)
    assert scene.state() == "Stable"
    waits = scene.join(leader.member_id)
    assert scene.state() == "PreparingRebalance"
    first_try = scene.join(follower.member_id, protocols=(("range", b"new"),)).reply
    assert waits.reply.generation_id == first_try.generation_id == 3
    assert scene.join(follower.member_id, protocols=(("range", b"new"),)).reply == first_try
    assert scene.join(leader.member_id).reply == waits.reply
    assert scene.state() == "CompletingRebalance"


def test_a_join_sent_twice_answers_the_first_one_too() -> None:
    scene = Scene()
    first, _second = scene.stable(2)
    lost = scene.join(first.member_id)
    kept = scene.join(first.member_id)
    assert lost.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert not kept.answered


def test_a_sync_sent_twice_answers_the_first_one_too() -> None:
    scene = Scene()
    leader, follower = scene.stable(2)
    waits = scene.join(leader.member_id)
    again = scene.join(follower.member_id).reply
    lost = scene.sync(again)
    kept = scene.sync(again)
    assert lost.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    scene.sync(waits.reply, {again.member_id: b"x"})
    assert kept.reply.assignment == b"x"


def test_an_assignment_that_the_leader_sends_twice_is_stored_once_as_it_is_told() -> None:
    scene = Scene()
    joined = scene.join().reply
    scene.held = True
    lost = scene.sync(joined, {joined.member_id: b"a"})
    kept = scene.sync(joined, {joined.member_id: b"b"})
    assert len(scene.on_the_way) == 1
    scene.acknowledge()
    assert lost.reply.error_code == ErrorCode.REBALANCE_IN_PROGRESS
    assert kept.reply.assignment == b"a"
    scene.take_over()
    assert scene.sync(joined).reply.assignment == b"a"


def test_a_session_begins_anew_with_each_answer_that_a_member_had_to_wait_for() -> None:
    """It could not be heard of while it waited, and is not to be removed for that."""
    scene = Scene()
    first, second = scene.stable(2)
    waits = scene.join(first.member_id, protocols=(("range", b"changed"),))
    for _ in range(4):
        scene.advance(SESSION_SECONDS / 2)
        assert scene.beat(second) == ErrorCode.REBALANCE_IN_PROGRESS
    second = scene.join(second.member_id).reply
    first = waits.reply
    assert first.leader == first.member_id
    scene.advance(SESSION_SECONDS - 1)
    assert scene.beat(first) == ErrorCode.NONE, "joined"
    scene.held = True
    synced = scene.sync(second)
    scene.sync(first, {second.member_id: b"x"})
    scene.advance(2 * SESSION_SECONDS)
    scene.acknowledge()
    assert synced.reply.assignment == b"x"
    scene.advance(SESSION_SECONDS - 1)
    assert (scene.beat(first), scene.beat(second)) == (ErrorCode.NONE, ErrorCode.NONE), "assigned"
    scene.advance(SESSION_SECONDS - 1)
    assert (scene.beat(first), scene.sync(second).reply.error_code) == (ErrorCode.NONE, ErrorCode.NONE)
    scene.advance(SESSION_SECONDS - 1)
    assert scene.beat(second) == ErrorCode.NONE, "asked for its assignment again"


def test_members_leave_and_the_rest_join_again() -> None:
    scene = Scene()
    first, second = scene.stable(2)
    reply = scene.coordinator.leave(GROUP, [Leaver(second.member_id), Leaver("nobody")])
    assert reply.error_code == ErrorCode.NONE
    assert [one.error_code for one in reply.members] == [ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID]
    assert scene.beat(first) == ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.join(first.member_id).reply.generation_id == 3


def test_a_group_whose_last_member_left_is_empty_and_can_form_again() -> None:
    scene = Scene()
    only = scene.stable(1)[0]
    scene.coordinator.leave(GROUP, [Leaver(only.member_id)])
    assert scene.state() == "Empty"
    assert scene.join(kind="connect", protocols=(("new", b""),)).reply.generation_id == 3


def test_one_with_an_id_but_no_membership_can_leave() -> None:
    scene = Scene()
    scene.stable(1)
    member_id = scene.join(known=True).reply.member_id
    assert scene.coordinator.leave(GROUP, [Leaver(member_id)]).members[0].error_code == ErrorCode.NONE
    assert scene.state() == "Stable"


def test_a_sync_of_another_protocol_is_refused() -> None:
    scene = Scene()
    joined = scene.join().reply
    for wrong in (replace(joined, protocol_name="x"), replace(joined, protocol_type="x")):
        assert scene.sync(wrong).reply.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL


def test_strangers_are_told_so() -> None:
    scene = Scene()
    joined = scene.stable(1)[0]
    stranger = replace(joined, member_id="nobody")
    old = replace(joined, generation_id=0)
    assert scene.join("nobody").reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.join("nobody", group_id="none").reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.sync(stranger).reply.error_code == scene.beat(stranger) == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.sync(old).reply.error_code == scene.beat(old) == ErrorCode.ILLEGAL_GENERATION
    assert scene.sync(joined, group_id="none").reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.coordinator.heartbeat("none", joined.member_id, 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.coordinator.leave("none", [Leaver("a")]).members[0].error_code == ErrorCode.UNKNOWN_MEMBER_ID
