"""The watermark: the least position over the in-sync set, which never falls and waits for enough replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.partitions.leader_core import (
    NEVER_REACHED,
    REFUSED_PAUSE_SECONDS,
    STRIKES_TO_LEAVE,
    STRIKES_TO_STAY_OUT,
    FollowerState,
    IsrChange,
    LagLimits,
    LeaderCore,
)
from proving import proves

LEADER = 1
REPLICAS = (1, 2, 3)
RUN = {1: "a", 2: "b", 3: "c"}


def set_of(*brokers: int) -> dict[int, str]:
    return {broker: RUN[broker] for broker in brokers}


class Group:
    """A leader's core with its followers at the other end."""

    def __init__(self, *isr: int, least: int = 1, watermark: int = 0, epoch_start: int = 0) -> None:
        self.core = LeaderCore(LEADER, 0, epoch_start, watermark, set_of(*isr), least, replicas=REPLICAS)
        self.followers: dict[int, FollowerState] = {}
        self.now = 0.0
        self.revision = 0
        self.heard_at: dict[int, float] = {}
        for broker in REPLICAS[1:]:
            self.subscribe(broker, watermark)

    def subscribe(self, broker: int, from_offset: int = 0, run: str = "") -> None:
        self.followers[broker] = self.core.subscribed(broker, run or RUN[broker], from_offset, self.now)

    def moved(self, broker: int, position: int) -> bool:
        if broker == LEADER:
            return self.core.moved(position)
        self.heard_at[broker] = self.now
        follower = self.followers[broker]
        position = max(position, follower.written)
        return self.core.position_reported(follower, position, position, position, self.core.position, self.now)

    def confirm(self, *brokers: int) -> bool:
        self.revision += 1
        return self.core.confirmed(set_of(*brokers), self.revision)

    def wanted(self, limits: LagLimits | None = None) -> IsrChange | None:
        return self.core.judge_isr(self.now, self.core.position, self.heard_at, limits or LagLimits())


Step = tuple[str, int, int] | tuple[str, frozenset[int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("moved"), st.sampled_from(REPLICAS), st.integers(0, 50)),
        st.tuples(
            st.sampled_from(["propose", "confirm", "refuse"]),
            st.frozensets(st.sampled_from((2, 3))).map(lambda some: some | {LEADER}),
        ),
    ),
    max_size=40,
)


@proves("G2", "G11")
@settings(deadline=None)
@given(steps, st.integers(1, 3))
def test_the_watermark_is_what_every_replica_in_sync_holds_and_never_falls(course: list[Step], least: int) -> None:
    group = Group(*REPLICAS, least=least)
    core = group.core
    held = dict.fromkeys(REPLICAS, 0)
    sets = [frozenset(REPLICAS)]
    for broker in REPLICAS:
        group.moved(broker, 0)
    for step in course:
        before = core.high_watermark
        if len(step) == 3:
            held[step[1]] = max(held[step[1]], step[2])
            rose = group.moved(step[1], step[2])
        elif step[0] == "confirm":
            sets = [step[1]]
            rose = group.confirm(*step[1])
        elif step[0] == "refuse":
            sets = sets[:1]
            rose = core.refused(group.now)
        else:
            if len(sets) == 2:
                continue
            sets = [sets[0], step[1]]
            core.proposed(IsrChange(set_of(*step[1]), (), (), ""))
            rose = False
        both = sets[0].union(*sets)
        enough = len(sets[0].intersection(*sets)) >= least
        assert core.has_min_isr == enough
        assert core.high_watermark >= before
        assert rose == (core.high_watermark > before)
        if rose:
            assert core.high_watermark == min(held[replica] for replica in both)
            assert enough
        elif enough:
            assert min(held[replica] for replica in both) <= core.high_watermark


def test_a_leader_alone_commits_what_it_has_written() -> None:
    core = LeaderCore(LEADER, 3, 10, 10, set_of(LEADER))
    assert core.moved(15)
    assert core.high_watermark == 15
    assert not core.moved(15)
    assert not core.moved(12)
    assert core.position == 15
    assert core.high_watermark == 15


def test_a_replica_that_leaves_the_set_no_longer_holds_the_watermark_back() -> None:
    group = Group(*REPLICAS)
    group.moved(LEADER, 10)
    group.moved(2, 8)
    assert group.core.high_watermark == 0
    assert group.confirm(1, 2)
    assert group.core.high_watermark == 8


def test_a_replica_that_joins_without_a_position_holds_the_watermark_and_does_not_lower_it() -> None:
    group = Group(LEADER)
    group.moved(LEADER, 10)
    assert not group.confirm(1, 2)
    group.moved(LEADER, 20)
    assert group.core.high_watermark == 10
    assert group.moved(2, 15)
    assert group.core.high_watermark == 15


@proves("G5")
def test_the_watermark_stands_still_while_the_set_is_too_small() -> None:
    group = Group(1, 2, least=2)
    core = group.core
    group.moved(LEADER, 10)
    group.moved(2, 10)
    group.confirm(LEADER)
    assert not core.has_min_isr
    assert not group.moved(LEADER, 20)
    assert core.high_watermark == 10
    group.confirm(1, 2)
    assert group.moved(2, 20)
    assert core.high_watermark == 20


def test_a_minimum_of_0_is_a_majority_of_the_replicas() -> None:
    core = Group(1, 2, least=0).core
    assert (core.min_isr, core.has_min_isr) == (2, True)
    core.replicas_changed((1, 2, 3, 4))
    assert (core.min_isr, core.has_min_isr) == (3, False)
    core.min_isr_changed(1)
    assert core.has_min_isr


def test_replicas_that_a_move_is_only_adding_do_not_raise_the_majority() -> None:
    core = Group(1, 2, least=0).core
    core.replicas_changed((1, 2, 3, 4), adding=(4,))
    assert (core.min_isr, core.has_min_isr) == (2, True)
    core.replicas_changed((1, 2, 4))
    assert (core.min_isr, core.has_min_isr) == (2, True)
    alone = LeaderCore(LEADER, 0, 0, 0, set_of(1), 0, replicas=(1, 2, 3), adding=(2, 3))
    assert (alone.min_isr, alone.has_min_isr) == (1, True)


def test_what_was_only_written_counts_no_more_once_the_topic_asks_for_the_disk() -> None:
    group = Group(1, 2)
    assert not group.moved(1, 100)
    group.core.durability_changed(flush_required=True, position=10)
    group.core.position_reported(group.followers[2], 100, 100, 100, 100, 1.0)
    assert group.core.high_watermark == 10
    assert group.core.moved(100)
    assert group.core.high_watermark == 100


def test_positions_of_another_incarnation_count_for_nothing() -> None:
    """KIP-903: a broker that came back is not the one that was in the set."""
    group = Group(1, 2)
    group.moved(LEADER, 10)
    group.moved(2, 5)
    assert group.core.high_watermark == 5
    group.subscribe(2, 5, run="another")
    assert not group.moved(2, 10)
    assert group.core.high_watermark == 5
    change = group.wanted()
    assert change is not None
    assert (change.isr, change.added, change.removed) == ({1: "a", 2: "another"}, (2,), ())


def test_while_a_change_is_not_answered_both_sets_count() -> None:
    group = Group(*REPLICAS)
    for broker in REPLICAS:
        group.moved(broker, 10)
    group.core.proposed(IsrChange(set_of(1, 2), (), (3,), "3 was silent"))
    group.moved(LEADER, 20)
    group.moved(2, 20)
    assert group.core.high_watermark == 10
    assert group.wanted() is None
    assert group.confirm(1, 2)
    assert group.core.high_watermark == 20


def test_a_member_that_is_proposed_counts_before_it_is_confirmed() -> None:
    group = Group(1, 2)
    for broker in REPLICAS:
        group.moved(broker, 10)
    change = group.wanted()
    assert change is not None
    assert (change.added, change.removed) == ((3,), ())
    group.core.proposed(change)
    group.moved(LEADER, 20)
    group.moved(2, 20)
    assert group.core.high_watermark == 10
    assert group.core.refused(group.now)
    assert group.core.high_watermark == 20
    assert group.wanted() is None
    group.now += 2
    group.moved(3, 20)
    assert group.wanted() is not None


def test_an_older_revision_of_the_set_says_nothing() -> None:
    group = Group(*REPLICAS)
    group.core.confirmed(set_of(1, 2), 7)
    group.core.confirmed(set_of(1, 2, 3), 6)
    assert group.core.isr == set_of(1, 2)


def test_the_same_revision_of_the_set_does_not_settle_what_was_proposed_on_it() -> None:
    group = Group(*REPLICAS)
    group.core.confirmed(set_of(1, 2), 7)
    group.core.proposed(IsrChange(set_of(1, 2, 3), (3,), (), ""))
    assert not group.core.confirmed(set_of(1, 2), 7)
    assert group.core.proposed_isr == set_of(1, 2, 3)


def test_a_leader_that_is_not_in_the_set_commits_nothing() -> None:
    group = Group(*REPLICAS)
    group.core.confirmed(set_of(2, 3), 7)
    for broker in REPLICAS:
        assert not group.moved(broker, 10)
    group.core.proposed(IsrChange(set_of(1, 2, 3), (1,), (), ""))
    for broker in REPLICAS:
        assert not group.moved(broker, 20), "it may still be out of the set"


def test_a_follower_joins_at_or_beyond_the_watermark_and_the_start_of_the_epoch() -> None:
    group = Group(1, 2, watermark=5, epoch_start=10)
    group.moved(3, 9)
    assert group.wanted() is None
    group.moved(3, 10)
    change = group.wanted()
    assert change is not None
    assert (change.isr, change.reason) == (set_of(1, 2, 3), "3 has caught up")
    group.moved(LEADER, 20)
    group.moved(2, 20)
    assert group.core.high_watermark == 20
    assert group.wanted() is None


def test_a_broker_that_holds_no_replica_never_joins() -> None:
    group = Group(1, 2)
    group.core.replicas_changed((1, 2))
    group.moved(3, 10)
    assert group.wanted() is None
    group.subscribe(3, 10)
    group.moved(3, 10)
    assert group.wanted() is None


def test_who_is_no_replica_any_more_is_forgotten_unless_it_is_in_sync() -> None:
    group = Group(1, 2)
    group.core.replicas_changed((1,))
    assert list(group.core.followers) == [2]
    group.moved(LEADER, 10)
    assert group.core.high_watermark == 0
    assert group.moved(2, 10)


@proves("G10")
def test_a_follower_that_is_silent_or_behind_for_too_long_leaves() -> None:
    group = Group(*REPLICAS)
    for now in (0.0, 5.0, 9.0):
        group.now = now
        group.moved(LEADER, 10 + int(now))
        group.moved(2, 10 + int(now))
        group.heard_at[3] = now
        assert group.wanted() is None
    group.now = group.heard_at[3] = 10.5
    change = group.wanted()
    assert change is not None
    assert (change.removed, change.isr) == ((3,), set_of(1, 2))
    assert "3 was behind for 10.5 s" in change.reason
    group.now = group.heard_at[3] = 19.5
    change = group.wanted()
    assert change is not None
    assert change.removed == (2, 3)
    assert "2 was not heard from in 10.5 s" in change.reason


def test_a_follower_that_only_begins_again_and_again_has_not_caught_up() -> None:
    """It cannot write, or its link breaks each time: to tell an old position once more is no progress."""
    group = Group(*REPLICAS)
    for broker in REPLICAS:
        group.moved(broker, 50)
    left: IsrChange | None = None
    while left is None and group.now < 30:
        group.now += 2.0
        for broker in (LEADER, 3):
            group.moved(broker, 100)
        group.core.unsubscribed(2, group.followers[2])
        group.subscribe(2, 50)
        group.moved(2, 50)
        left = group.wanted()
    assert left is not None
    assert left.removed == (2,)
    assert group.now == 12.0


def test_a_follower_whose_link_breaks_often_but_who_goes_on_stays() -> None:
    group = Group(*REPLICAS)
    for nth in range(20):
        group.now = 2.0 * nth
        group.moved(LEADER, 10 * nth + 10)
        group.moved(3, 10 * nth + 10)
        group.core.unsubscribed(2, group.followers[2])
        group.subscribe(2, 10 * nth)
        group.moved(2, 10 * nth)
        assert group.wanted() is None


def test_a_follower_that_keeps_up_at_a_distance_stays() -> None:
    """Under load it never holds all that the leader has at this moment, but soon what the leader had just now."""
    group = Group(*REPLICAS)
    for nth in range(100):
        group.now = nth
        group.moved(LEADER, 10 * nth + 10)
        group.moved(2, 10 * nth)
        group.moved(3, 10 * nth)
        assert group.wanted() is None


@proves("G10")
def test_the_rule_of_quick_rounds_takes_several_slow_ones_to_leave_and_many_quick_ones_to_return() -> None:
    limits = LagLimits(10.0, 0.25)
    group = Group(1, 2)

    def judged(rounds: int, seconds_behind: float) -> list[bool]:
        """Whether a change is wanted, once a second; so long before, the follower held all that there was."""
        found = []
        for _ in range(rounds):
            group.now += 1.0 - seconds_behind
            group.moved(2, 0)
            end = 10 if seconds_behind else 0
            group.now += seconds_behind
            found.append(group.core.judge_isr(group.now, end, group.heard_at, limits) is not None)
        return found

    assert judged(9, 0.25) == [False] * 9, "so much is quick enough"
    assert judged(3, 0.5) == [False, False, True]
    group.confirm(LEADER)
    quick = STRIKES_TO_STAY_OUT - STRIKES_TO_LEAVE
    assert judged(quick, 0.0) == [False] * quick
    assert group.wanted(limits) is None, "judged again within the second, nothing has changed"
    assert judged(1, 0.5) == [False], "a slow round while it stays out costs one quick one"
    assert judged(1, 0.0) == [True]


def test_a_quick_round_takes_one_slow_one_away() -> None:
    limits = LagLimits(10.0, 0.25)
    group = Group(1, 2)
    for nth in range(1, 41):
        group.now = float(nth)
        group.moved(LEADER, 10 * nth)
        if nth % 2:
            group.moved(2, 10 * nth)
        assert group.wanted(limits) is None, nth


@proves("G10")
def test_one_slow_round_counts_once_however_often_the_set_is_judged() -> None:
    """The set is judged at each position of a follower that catches up, which may come every millisecond."""
    limits = LagLimits(10.0, 0.25)
    group = Group(1, 2)
    group.moved(2, 0)
    group.moved(LEADER, 10)
    for nth in range(500):
        group.now = 1.0 + nth / 1000
        assert group.wanted(limits) is None
    group.moved(2, 10)
    for nth in range(500):
        group.now = 10.0 + nth / 1000
        assert group.wanted(limits) is None
    assert group.followers[2].strikes == 0


def test_a_member_that_begins_again_below_the_watermark_leaves_at_once() -> None:
    group = Group(*REPLICAS)
    for broker in REPLICAS:
        group.moved(broker, 10)
    group.subscribe(3, 4)
    change = group.wanted()
    assert change is not None
    assert change.removed == (3,)
    assert "what may be committed (watermark 10)" in change.reason
    group.moved(3, 9)
    assert group.wanted() == change, "it still lacks something"
    group.moved(3, 10)
    assert group.wanted() is None


def test_only_one_change_is_under_way() -> None:
    group = Group(*REPLICAS)
    group.core.proposed(IsrChange(set_of(1, 2), (), (3,), ""))
    with pytest.raises(AssertionError, match="one change at a time"):
        group.core.proposed(IsrChange(set_of(1), (), (2, 3), ""))


@proves("G10")
def test_a_follower_that_went_silent_does_not_come_back_by_what_it_told_before() -> None:
    group = Group(*REPLICAS)
    for broker in REPLICAS:
        group.moved(broker, 10)
    group.now = 10.5
    group.moved(3, 10)
    change = group.wanted()
    assert change is not None
    assert change.removed == (2,)
    group.confirm(1, 3)
    group.now = group.heard_at[3] = 30.0
    group.moved(3, 10)
    assert group.wanted() is None
    group.moved(2, 10)
    change = group.wanted()
    assert change is not None
    assert change.added == (2,)


def test_who_may_be_in_sync_is_a_member_or_proposed_in_this_incarnation() -> None:
    core = Group(1, 2).core
    assert core.may_be_in_sync(2, "b")
    assert not core.may_be_in_sync(2, "another")
    assert not core.may_be_in_sync(3, "c")
    core.proposed(IsrChange(set_of(1, 3), (3,), (2,), ""))
    assert core.may_be_in_sync(2, "b")
    assert core.may_be_in_sync(3, "c")
    assert not core.may_be_in_sync(3, "another")


def test_a_broker_may_be_carried_over_as_long_as_one_of_the_sets_has_it_in_some_incarnation() -> None:
    core = Group(1, 2).core
    assert core.may_be_carried_over(2)
    assert not core.may_be_carried_over(3)
    core.proposed(IsrChange(set_of(1, 3), (3,), (2,), ""))
    assert core.may_be_carried_over(2)
    assert core.may_be_carried_over(3)
    assert not core.may_be_carried_over(4)


def test_another_incarnation_begins_with_nothing_of_the_earlier_one() -> None:
    group = Group(1, 2)
    group.moved(2, 0)
    group.followers[2].strikes = 7
    group.now = 5.0
    group.subscribe(2, 0)
    again = group.followers[2]
    assert (again.strikes, again.caught_up_at, again.leader_end_at_report) == (7, 0.0, 0)
    assert again.rounds_judged_at == 0.0, "who subscribes all the time is judged all the same"
    group.subscribe(2, 0, run="another")
    another = group.followers[2]
    assert (another.strikes, another.caught_up_at, another.leader_end_at_report) == (0, 5.0, NEVER_REACHED)


@proves("G11")
def test_what_may_be_committed_is_what_the_epoch_began_with_until_the_watermark_is_beyond() -> None:
    core = Group(1, 2, watermark=5, epoch_start=10).core
    assert (core.committed_before(mends=True), core.committed_before(mends=False)) == (10, 5)
    core = Group(1, 2, watermark=20, epoch_start=10).core
    assert (core.committed_before(mends=True), core.committed_before(mends=False)) == (20, 20)


def test_what_a_follower_told_before_it_subscribed_again_counts_no_more() -> None:
    """Its machine may have lost what only its page cache had."""
    group = Group(1, 2)
    group.moved(2, 10)
    group.subscribe(2, 4)
    again = group.followers[2]
    assert (again.received, again.written, again.flushed) == (-1, -1, -1)
    assert not group.moved(LEADER, 10)
    group.core.position_reported(again, 4, 4, 4, 10, group.now)
    assert group.core.high_watermark == 4


def test_the_end_of_an_earlier_link_does_not_end_the_present_one() -> None:
    group = Group(1, 2)
    earlier = group.followers[3]
    group.subscribe(3)
    group.core.unsubscribed(3, earlier)
    assert group.core.followers[3] is group.followers[3]
    group.core.unsubscribed(3, group.followers[3])
    assert list(group.core.followers) == [2]


def test_a_follower_whose_link_ends_before_it_is_a_member_holds_the_watermark_until_it_is_back() -> None:
    group = Group(1, 2)
    for broker in REPLICAS:
        group.moved(broker, 10)
    group.core.proposed(IsrChange(set_of(1, 2, 3), (3,), (), ""))
    group.moved(3, 20)
    group.core.unsubscribed(3, group.followers[3])
    assert not group.moved(LEADER, 20)
    assert not group.moved(2, 20)
    group.subscribe(3, 20)
    assert group.moved(3, 20)


def test_a_follower_that_has_everything_is_not_behind_however_long_nothing_comes() -> None:
    group = Group(*REPLICAS)
    for broker in REPLICAS:
        group.moved(broker, 10)
    group.now = 30.0
    group.heard_at = {2: 30.0, 3: 30.0}
    assert group.wanted() is None


def test_a_follower_is_behind_since_it_last_had_everything() -> None:
    group = Group(1, 2)
    group.moved(LEADER, 10)
    group.moved(2, 0)
    group.now = 9.0
    group.moved(2, 10)
    group.moved(LEADER, 20)
    group.now = group.heard_at[2] = 12.0
    assert group.wanted() is None


def test_a_follower_may_be_silent_for_just_so_long() -> None:
    group = Group(1, 2)
    for broker in REPLICAS:
        group.moved(broker, 10)
    group.now = 10.0
    change = group.wanted()
    assert change is not None
    assert (change.added, change.removed) == ((3,), ())


def test_a_member_that_never_subscribes_leaves_though_its_link_speaks() -> None:
    core = LeaderCore(LEADER, 0, 0, 0, set_of(1, 2), replicas=REPLICAS)
    assert core.judge_isr(10.0, 0, {2: 10.0}, LagLimits()) is None
    change = core.judge_isr(10.5, 0, {2: 10.5}, LagLimits())
    assert change is not None
    assert (change.removed, change.reason) == ((2,), "2 was behind for 10.5 s")


def test_nothing_is_wanted_while_a_change_is_open_nor_for_a_while_after_it_was_refused() -> None:
    group = Group(*REPLICAS)
    group.now = 10.5
    group.moved(2, 0)
    change = group.wanted()
    assert change is not None
    assert change.removed == (3,)
    group.core.proposed(change)
    assert group.wanted() is None
    group.core.refused(group.now)
    assert group.wanted() is None
    group.now += REFUSED_PAUSE_SECONDS
    assert group.wanted() == replace(change, reason="3 was not heard from in 11.5 s")
