"""KIP-345: a member with an instance id keeps its place while it restarts."""

from __future__ import annotations

from groups.scene import GROUP, REBALANCE_MS, SESSION_MS, Scene
from headrace.errors import ErrorCode
from headrace.groups.messages import Leaver

SESSION_SECONDS = SESSION_MS / 1000


def test_a_restarted_follower_gets_its_assignment_without_a_rebalance() -> None:
    scene = Scene()
    leader, follower = scene.stable(2, static=True)
    back = scene.join(instance="i1").reply
    assert back.member_id != follower.member_id
    assert (back.error_code, back.generation_id, back.members) == (ErrorCode.NONE, follower.generation_id, ())
    assert scene.state() == "Stable"
    assert scene.sync(back, instance="i1").reply.assignment == b"1"
    assert scene.beat(leader, "i0") == ErrorCode.NONE


def test_the_id_before_the_restart_is_fenced() -> None:
    scene = Scene()
    _leader, follower = scene.stable(2, static=True)
    scene.join(instance="i1")
    assert scene.beat(follower, "i1") == ErrorCode.FENCED_INSTANCE_ID
    assert scene.sync(follower, instance="i1").reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    assert scene.join(follower.member_id, "i1").reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    reply = scene.coordinator.leave(GROUP, [Leaver(follower.member_id, "i1")])
    assert reply.members[0].error_code == ErrorCode.FENCED_INSTANCE_ID


def test_requests_that_wait_under_the_old_id_are_fenced() -> None:
    scene = Scene()
    leader, follower = scene.stable(2, static=True)
    waits = scene.join(follower.member_id, "i1", protocols=(("range", b"new"),))
    assert scene.state() == "PreparingRebalance"
    back = scene.join(instance="i1")
    assert waits.reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    led = scene.join(leader.member_id, "i0").reply
    sync = scene.sync(back.reply, instance="i1")
    again = scene.join(instance="i1")
    assert sync.reply.error_code == ErrorCode.FENCED_INSTANCE_ID
    assert scene.beat(led, "i0") == ErrorCode.REBALANCE_IN_PROGRESS
    scene.join(leader.member_id, "i0")
    assert again.reply.error_code == ErrorCode.NONE


def test_a_restarted_leader_that_cannot_skip_the_assignment_is_not_told_that_it_leads() -> None:
    scene = Scene()
    leader, _follower = scene.stable(2, static=True)
    back = scene.join(instance="i0").reply
    assert back.leader == leader.member_id != back.member_id
    assert back.members == ()
    assert scene.sync(back, instance="i0").reply.assignment == b"0"


def test_a_restarted_leader_that_can_skip_the_assignment_keeps_it() -> None:
    """KIP-814"""
    scene = Scene()
    _leader, follower = scene.stable(2, static=True)
    back = scene.join(instance="i0", skips=True).reply
    assert (back.leader, back.skip_assignment) == (back.member_id, True)
    assert {member.member_id for member in back.members} == {back.member_id, follower.member_id}
    other = scene.join(instance="i1", skips=True).reply
    assert (other.leader, other.skip_assignment, other.members) == (back.member_id, False, ())


def test_the_new_id_is_stored_before_it_is_told() -> None:
    scene = Scene()
    scene.stable(2, static=True)
    scene.held = True
    waits = scene.join(instance="i1")
    assert not waits.answered
    scene.acknowledge()
    scene.held = False
    scene.take_over()
    assert scene.beat(waits.reply, "i1") == ErrorCode.NONE
    assert scene.sync(waits.reply, instance="i1").reply.assignment == b"1"


def test_a_restart_with_a_changed_choice_of_protocols_rebalances() -> None:
    scene = Scene()
    first = scene.join(instance="i0", protocols=(("x", b""), ("y", b""))).reply
    scene.sync(first, {first.member_id: b"0"}, "i0")
    back = scene.join(instance="i0", protocols=(("y", b""), ("x", b""))).reply
    assert (back.generation_id, back.protocol_name) == (first.generation_id + 1, "y")


def test_a_static_member_that_does_not_join_again_keeps_its_place_until_its_session_ends() -> None:
    scene = Scene()
    leader, follower = scene.stable(2, static=True)
    waits = scene.join(leader.member_id, "i0", rebalance_ms=2000)
    scene.join(follower.member_id, "i1", rebalance_ms=2000)
    joined = waits.reply
    assert scene.sync(joined, {}, "i0").reply.error_code == ErrorCode.NONE
    waits = scene.join(leader.member_id, "i0", rebalance_ms=2000)
    scene.advance(2)
    assert {member.group_instance_id for member in waits.reply.members} == {"i0", "i1"}
    scene.sync(waits.reply, {}, "i0")
    for _ in range(3):
        assert scene.beat(waits.reply, "i0") == ErrorCode.NONE
        scene.advance(SESSION_SECONDS / 3)
    assert scene.coordinator.describe(GROUP).members[0].group_instance_id == "i0"
    assert len(scene.coordinator.describe(GROUP).members) == 1


def test_a_leader_that_does_not_join_again_keeps_its_place_and_does_not_lead() -> None:
    scene = Scene()
    leader, follower = scene.stable(2, static=True)
    waits = scene.join(follower.member_id, "i1", protocols=(("range", b"changed"),), rebalance_ms=2000)
    scene.group().roster.members[leader.member_id].rebalance_timeout_ms = 2000
    newcomer = scene.join(rebalance_ms=2000)
    for _ in range(4):
        scene.advance(SESSION_SECONDS - 1)
        if waits.answered:
            break
        assert scene.beat(leader, "i0") == ErrorCode.REBALANCE_IN_PROGRESS
    assert waits.reply.leader == newcomer.reply.leader == follower.member_id
    assert leader.member_id in {member.member_id for member in waits.reply.members}


def test_a_member_that_restarts_before_it_asked_for_its_assignment_stays() -> None:
    scene = Scene()
    leader, follower = scene.stable(2, static=True)
    waits = scene.join(leader.member_id, "i0", protocols=(("range", b"changed"),))
    scene.join(follower.member_id, "i1")
    scene.sync(waits.reply, {follower.member_id: b"its own"}, "i0")
    scene.advance(SESSION_SECONDS - 1)
    assert scene.beat(waits.reply, "i0") == ErrorCode.NONE
    back = scene.join(instance="i1").reply
    scene.advance(SESSION_SECONDS - 1)
    for _ in range(REBALANCE_MS // SESSION_MS * 2):
        assert (scene.beat(waits.reply, "i0"), scene.beat(back, "i1")) == (ErrorCode.NONE, ErrorCode.NONE)
        scene.advance(SESSION_SECONDS - 1)


def test_static_members_that_all_restart_at_once_do_not_end_the_group() -> None:
    scene = Scene()
    joined = [scene.join(instance=f"i{n}", rebalance_ms=2000) for n in range(1)]
    scene.sync(joined[0].reply, {}, "i0")
    dynamic = scene.join(rebalance_ms=2000)
    scene.coordinator.leave(GROUP, [Leaver(scene.group().roster.joined()[0].member_id)])
    assert dynamic.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    scene.advance(5)
    assert scene.state() == "PreparingRebalance"
    assert scene.join(instance="i0").reply.error_code == ErrorCode.NONE


def test_static_members_leave_by_instance_id() -> None:
    scene = Scene()
    leader, _follower = scene.stable(2, static=True)
    reply = scene.coordinator.leave(GROUP, [Leaver("", "i1"), Leaver("", "none")])
    assert [one.error_code for one in reply.members] == [ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID]
    assert scene.join(leader.member_id, "i0").reply.error_code == ErrorCode.NONE


def test_an_instance_id_that_is_not_known_is_a_new_member() -> None:
    scene = Scene()
    scene.stable(1, static=True)
    assert scene.join("somebody", "i9").reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    waits = scene.join(instance="i9", known=True)
    scene.advance(REBALANCE_MS / 1000)
    assert waits.reply.error_code == ErrorCode.NONE
    assert waits.reply.member_id.startswith("i9-")
