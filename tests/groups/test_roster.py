"""Who is in a group, and for how long a round waits: one decision at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.coordinators.alarms import NEVER
from headrace.errors import ErrorCode
from headrace.groups.group import RebalanceDelay
from headrace.groups.limits import GroupLimits
from headrace.groups.member import Member
from headrace.groups.messages import JoinRequest
from headrace.groups.roster import Roster

LIMITS = GroupLimits(1000, 60_000, max_size=2)
REQUEST = JoinRequest("", None, "c", "/h", 10_000, 30_000, "consumer", (("range", b""),))


def roster(*names: str, static: bool = False) -> Roster:
    made = Roster()
    made.protocol_type = "consumer"
    for name in names:
        made.add(Member(name, f"i-{name}" if static else None, "c", "/h", 30_000, 10_000, REQUEST.protocols))
    return made


def test_the_leader_stays_until_it_goes_itself() -> None:
    made = roster("a", "b", "c")
    made.remove(made.members["b"])
    assert made.leader == "a"
    made.remove(made.members["a"])
    assert made.leader == "c"
    made.remove(made.members["c"])
    assert made.leader is None


@pytest.mark.parametrize(("leader", "elected"), [("a", "a"), ("b", "b"), ("c", "a"), ("gone", "a"), (None, "a")])
def test_a_leader_that_has_joined_stays_and_else_the_first_who_has_leads(leader: str | None, elected: str) -> None:
    made = roster("a", "b", "c")
    made.leader = leader
    for name in ("a", "b"):
        made.members[name].join_ticket = object()
    made.elect(made.joined())
    assert made.leader == elected


def test_the_earliest_deadline_is_that_of_a_session_or_of_an_id_given_out() -> None:
    made = roster("a", "b", "c")
    assert made.earliest_deadline() == NEVER
    for deadline, name in enumerate(made.members):
        made.members[name].deadline = deadline + 5.0
    assert made.earliest_deadline() == 5.0
    made.members["a"].join_ticket = object()
    assert made.earliest_deadline() == 6.0, "who waits for an answer has none"
    made.pending.update(x=9.0, y=4.0)
    assert made.earliest_deadline() == 4.0


@pytest.mark.parametrize(
    ("session_ms", "code"),
    [
        (999, ErrorCode.INVALID_SESSION_TIMEOUT),
        (1000, ErrorCode.NONE),
        (60_000, ErrorCode.NONE),
        (60_001, ErrorCode.INVALID_SESSION_TIMEOUT),
    ],
)
def test_sessions_are_as_long_as_the_limits_say(session_ms: int, code: int) -> None:
    assert roster().admission_fault(replace(REQUEST, session_timeout_ms=session_ms), LIMITS) == code


@pytest.mark.parametrize("wrong", [{"protocol_type": ""}, {"protocols": ()}, {"protocol_type": "", "protocols": ()}])
def test_a_first_member_says_what_it_speaks(wrong: dict[str, object]) -> None:
    assert roster().admission_fault(REQUEST, LIMITS) == ErrorCode.NONE
    assert roster().admission_fault(replace(REQUEST, **wrong), LIMITS) == ErrorCode.INCONSISTENT_GROUP_PROTOCOL  # type: ignore[arg-type]


def test_a_full_group_takes_in_whoever_has_a_place_already() -> None:
    made = roster("a", static=True)
    made.pending["b"] = NEVER
    codes = [
        made.admission_fault(replace(REQUEST, member_id=member_id, group_instance_id=instance_id), LIMITS)
        for member_id, instance_id in (("", None), ("x", None), ("a", None), ("b", None), ("", "i-a"), ("", "i-x"))
    ]
    full = ErrorCode.GROUP_MAX_SIZE_REACHED
    assert codes == [full, full, ErrorCode.NONE, ErrorCode.NONE, ErrorCode.NONE, full]
    made.pending.clear()
    assert made.admission_fault(REQUEST, LIMITS) == ErrorCode.NONE


def test_a_first_round_waits_on_while_members_come_and_time_is_left() -> None:
    patience = RebalanceDelay()
    patience.begin_first_round(0.0, 5000, 3000)
    assert patience.deadline == 3.0
    assert not patience.renew(3.0), "nobody came"
    patience.grew = True
    assert patience.renew(3.0)
    assert (patience.deadline, patience.grew) == (5.0, False)
    patience.grew = True
    assert not patience.renew(5.0), "no time is left"


def test_a_later_round_ends_when_its_time_is_over() -> None:
    patience = RebalanceDelay()
    patience.begin_first_round(0.0, 5000, 3000)
    patience.end()
    assert patience.deadline == NEVER
    patience.begin(10.0, 4000)
    patience.grew = True
    assert patience.deadline == 14.0
    assert not patience.renew(14.0)
