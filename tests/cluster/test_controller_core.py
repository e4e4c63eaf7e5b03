"""The controller's decisions as cases: an image, and what must become of the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from headrace.cluster import keys
from headrace.cluster.controller_core import MOVES_MAX, Context, Decision, Rules, decide, in_transactions
from headrace.cluster.controller_state import PREFERRED, RESIGN, UNCLEAN, Controls, Order, ReplicaEnd
from headrace.cluster.image import LEAVING, NO_LEADER, Broker, Image, Lost, PartitionState, Previous, Topic
from headrace.placement.drains import plan_drains
from headrace.placement.plans import ReplicaMove
from headrace.ports.coordination import Compare, Delete, Put
from proving import proves

PREFIX = "/headrace/c/"
TOPIC_ID = b"t" * 16
FENCE = (Compare(PREFIX + "controller", "mod_revision", "=", 77),)


def broker(number: int, run: int = 1, *, clean: bool = False, boot: str = "b", state: str = "live") -> Broker:
    """The `run`-th process of a broker: incarnation 1a, 1b, ...; the one before it ran under boot b."""
    previous = Previous(drawn(number, run - 1), "b", clean) if run > 1 else None
    return Broker(number, {}, drawn(number, run), 5, boot=boot, previous=previous, state=state, revision=100 + number)


def having_lost(registered: Broker, partition: int) -> Broker:
    assert registered.previous is not None
    return replace(registered, previous=replace(registered.previous, lost=frozenset({(TOPIC_ID, partition)})))


def having_begun(registered: Broker, revision: int) -> Broker:
    assert registered.previous is not None
    return replace(registered, previous=replace(registered.previous, began=revision))


def drawn(number: int, run: int = 1) -> str:
    return f"{number}{'_abcdef'[run]}"


def led(
    leader: int, epoch: int, isr: Sequence[int], replicas: Sequence[int] = (1, 2, 3), **others: object
) -> PartitionState:
    state = PartitionState(0, leader, epoch, tuple(isr), tuple(replicas), 50)
    return replace(state, incarnations={member: drawn(member) for member in isr}, **others)  # type: ignore[arg-type]


def end(number: int, last_epoch: int, offset: int, run: int = 2, watermark: int = 0) -> ReplicaEnd:
    return ReplicaEnd(TOPIC_ID, drawn(number, run), last_epoch, 0, offset, watermark)


@dataclass(frozen=True)
class Case:
    before: PartitionState
    brokers: Sequence[Broker]
    leader: int
    epoch: int
    isr: Sequence[int]
    rules: Rules = field(default_factory=Rules)
    awaited: frozenset[int] = frozenset()
    ends: Mapping[int, ReplicaEnd] = field(default_factory=dict)
    order: str = ""
    resigns: int = 1
    overdue: bool = False
    relies_on: frozenset[int] = frozenset()


def image_of(
    states: Sequence[PartitionState],
    brokers: Sequence[Broker],
    ends: Mapping[int, ReplicaEnd] | None = None,
    order: str = "",
    draining: frozenset[int] = frozenset(),
    resigns: int = 1,
) -> Image:
    topic = Topic("t", TOPIC_ID, tuple(states))
    controls = Controls(
        ends={("t", 0): ends} if ends else {},
        orders={("t", 0): Order(order, 9, broker=resigns)} if order else {},
        draining=draining,
    )
    return Image(
        PREFIX,
        brokers={each.id: each for each in brokers},
        topics={"t": topic},
        topics_by_id={TOPIC_ID: topic},
        controls=controls,
    )


def decided(case: Case) -> Decision | None:
    context = Context(8, lambda number: number not in case.awaited, lambda _: case.rules, lambda _: case.overdue)
    decisions = decide(image_of([case.before], case.brokers, case.ends, case.order, resigns=case.resigns), context)
    assert len(decisions) <= 1
    return decisions[0] if decisions else None


ONE, TWO, THREE = broker(1), broker(2), broker(3)
CASES = {
    "all is well": Case(led(1, 4, (1, 2, 3)), [ONE, TWO, THREE], 1, 4, (1, 2, 3)),
    "the leader is gone: the next in the assignment leads": Case(
        led(1, 4, (3, 1, 2)), [TWO, THREE], 2, 5, (3, 2), relies_on=frozenset({1, 2})
    ),
    "a follower is gone: the epoch stays": Case(led(1, 4, (1, 2, 3)), [ONE, TWO], 1, 4, (1, 2)),
    "a follower out of the set is gone": Case(led(1, 4, (1, 2)), [ONE, TWO], 1, 4, (1, 2)),
    "a leader that is only late is waited for": Case(
        led(1, 4, (1, 2)), [TWO, THREE], 1, 4, (1, 2), awaited=frozenset({1})
    ),
    "a follower that is only late stays": Case(
        led(1, 4, (1, 2)), [ONE, THREE], 1, 4, (1, 2), awaited=frozenset({2})
    ),
    "the last member is gone and stays the last (KIP-966)": Case(
        led(1, 4, (1,)), [TWO, THREE], NO_LEADER, 4, (1,)
    ),
    "both members are gone at once: both stay": Case(led(1, 4, (1, 2)), [THREE], NO_LEADER, 4, (1, 2)),
    "the last member is back as it was": Case(
        led(NO_LEADER, 4, (1,)), [ONE, TWO, THREE], 1, 5, (1,), relies_on=frozenset({1})
    ),
    "one of two last members is back": Case(led(NO_LEADER, 4, (1, 2)), [TWO, THREE], 2, 5, (2,)),
    "a leader came back after a clean stop, alone: a new epoch": Case(
        led(1, 4, (1,)), [broker(1, 2, clean=True, boot="c"), TWO], 1, 5, (1,), relies_on=frozenset({1})
    ),
    "a leader came back, and so did the others: a new epoch": Case(
        led(1, 4, (1, 2)), [broker(1, 2), broker(2, 2)], 1, 5, (1, 2), relies_on=frozenset({1, 2})
    ),
    "a leader came back to one that was there all the time: that one leads": Case(
        led(1, 4, (1, 2)), [broker(1, 2, clean=True, boot="c"), TWO], 2, 5, (1, 2), relies_on=frozenset({1, 2})
    ),
    "the leader is gone: one that was there all the time goes before one that returned": Case(
        led(3, 4, (1, 2, 3)), [broker(1, 2), TWO], 2, 5, (1, 2), relies_on=frozenset({1, 2, 3})
    ),
    "not carried over: it says that it holds less": Case(
        led(1, 4, (1, 2)), [having_lost(broker(1, 2, clean=True), 0), broker(2, 2)], 2, 5, (2,)
    ),
    "carried over: it holds less of another partition": Case(
        led(1, 4, (1, 2)), [having_lost(broker(1, 2, clean=True), 1), broker(2, 2)], 1, 5, (1, 2)
    ),
    "a follower came back after a clean stop: the same epoch": Case(
        led(1, 4, (1, 2)), [ONE, broker(2, 2, clean=True, boot="c")], 1, 4, (1, 2), relies_on=frozenset({1, 2})
    ),
    "carried over because the topic counts what is synced": Case(
        led(1, 4, (1, 2)), [broker(1, 2, boot="c"), broker(2, 2)], 1, 5, (1, 2), rules=Rules("disk")
    ),
    "carried over because the page cache is still there": Case(
        led(1, 4, (1, 2)), [broker(1, 2), broker(2, 2)], 1, 5, (1, 2)
    ),
    "not carried over: it ran before the topic came to count only what is synced, and the kernel was booted": Case(
        led(1, 4, (1, 2)), [broker(1, 2, boot="c"), TWO], 2, 5, (2,), rules=Rules("disk", durability_altered_at=50)
    ),
    "carried over: it began after the topic had come to count only what is synced": Case(
        led(1, 4, (1, 2)), [having_begun(broker(1, 2, boot="c"), 50), broker(2, 2)], 1, 5, (1, 2),
        rules=Rules("disk", durability_altered_at=50),
    ),
    "carried over: it ran before the topic came to count only what is synced, and the kernel has run on": Case(
        led(1, 4, (1, 2)), [having_begun(broker(1, 2), 49), broker(2, 2)], 1, 5, (1, 2),
        rules=Rules("disk", durability_altered_at=50),
    ),
    "not carried over: the kernel was booted (a leader that lost its page cache)": Case(
        led(1, 4, (1, 2)), [broker(1, 2, boot="c"), TWO], 2, 5, (2,)
    ),
    "not carried over: durability memory": Case(
        led(1, 4, (1, 2)), [broker(1, 2), TWO], 2, 5, (2,), rules=Rules("memory")
    ),
    "not carried over: a boot that is not known equals no other": Case(
        led(1, 4, (1, 2)), [replace(broker(1, 2, boot=""), previous=Previous("1a", "", False)), TWO], 2, 5, (2,)
    ),
    "a stale registration: two processes ago (KIP-903)": Case(
        led(1, 4, (1, 2)), [ONE, broker(2, 3, clean=True)], 1, 4, (1,)
    ),
    "a stale registration: a folder that was nobody": Case(
        led(1, 4, (1, 2)), [ONE, replace(broker(2, 2), previous=None)], 1, 4, (1,)
    ),
    "the last member lost something: it stays, without a leader": Case(
        led(1, 4, (1,)), [broker(1, 2, boot="c"), TWO, THREE], NO_LEADER, 4, (1,)
    ),
    "one lost something, the other is away: the other is waited for": Case(
        led(1, 4, (1, 2)), [broker(1, 2, boot="c"), THREE], NO_LEADER, 4, (2,)
    ),
    "the leader leaves: another leads, and the set is without it": Case(
        led(1, 4, (1, 2, 3)), [broker(1, state=LEAVING), TWO, THREE], 2, 5, (2, 3)
    ),
    "a follower leaves": Case(led(1, 4, (1, 2)), [ONE, broker(2, state=LEAVING)], 1, 4, (1,)),
    "the last one leaves: it leads until it is gone": Case(
        led(1, 4, (1,)), [broker(1, state=LEAVING), TWO], 1, 4, (1,)
    ),
    "all leave": Case(
        led(1, 4, (1, 2)), [broker(1, state=LEAVING), broker(2, state=LEAVING)], 1, 4, (1, 2)
    ),
    "without a leader, one report is missing": Case(
        led(NO_LEADER, 4, (1,)), [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)],
        NO_LEADER, 4, (1,), ends={1: end(1, 4, 90), 2: end(2, 4, 99)},
    ),
    "without a leader, all reports are there: the greatest epoch, then the greatest end": Case(
        led(NO_LEADER, 4, (1,)), [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)],
        3, 5, (3,), ends={1: end(1, 3, 900), 2: end(2, 4, 90), 3: end(3, 4, 99)}, relies_on=frozenset({3}),
    ),
    "without a leader, two hold the same: the one that knows of the last deletion": Case(
        led(NO_LEADER, 4, (1,)), [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)],
        3, 5, (3,), ends={1: end(1, 4, 90), 2: end(2, 4, 99), 3: replace(end(3, 4, 99), start=30)},
    ),
    "a report of an earlier process is no report": Case(
        led(NO_LEADER, 4, (1,)), [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)],
        NO_LEADER, 4, (1,), ends={1: end(1, 4, 90), 2: end(2, 4, 99), 3: end(3, 4, 99, run=1)},
    ),
    "a report of another topic of that name is no report": Case(
        led(NO_LEADER, 4, (1,), (1,)), [broker(1, 2, boot="c")],
        NO_LEADER, 4, (1,), ends={1: replace(end(1, 4, 90), topic_id=b"o" * 16)},
    ),
    "a report of one that is gone is no report": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        NO_LEADER, 4, (1,), ends={1: end(1, 4, 90, run=1), 2: end(2, 4, 90), 3: end(3, 4, 99)},
    ),
    "a valid member that is back comes before all reports": Case(
        led(NO_LEADER, 4, (1,)), [ONE, broker(2, 2), broker(3, 2)],
        1, 5, (1,), ends={1: end(1, 4, 50, run=1), 2: end(2, 4, 99), 3: end(3, 4, 99)},
    ),
    "unclean by the topic's setting: those alive are enough": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        3, 5, (3,), rules=Rules(unclean=True), ends={2: end(2, 4, 90), 3: end(3, 4, 99)},
    ),
    "unclean by the operator's order": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        3, 5, (3,), order=UNCLEAN, ends={2: end(2, 4, 90), 3: end(3, 4, 99)},
    ),
    "unclean waits for all that are alive": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        NO_LEADER, 4, (1,), order=UNCLEAN, ends={2: end(2, 4, 90)},
    ),
    "unclean does not wait for ever for one that is alive and says nothing": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        2, 5, (2,), order=UNCLEAN, ends={2: end(2, 4, 90)}, overdue=True,
    ),
    "unclean elects nobody of whom nothing is known": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2)], NO_LEADER, 4, (1,), rules=Rules(unclean=True), overdue=True,
    ),
    "unclean elects nobody where nobody is": Case(
        led(NO_LEADER, 4, (1,)), [broker(4)], NO_LEADER, 4, (1,), order=UNCLEAN,
    ),
    "unclean takes the best of those that have said": Case(
        led(NO_LEADER, 4, (1,)), [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)],
        3, 5, (3,), rules=Rules(unclean=True), ends={2: end(2, 4, 90), 3: end(3, 4, 91)}, overdue=True,
    ),
    "however long, nobody is elected unless it may cost something": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        NO_LEADER, 4, (1,), ends={2: end(2, 4, 90)}, overdue=True,
    ),
    "unclean waits for who may only be late": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)], NO_LEADER, 4, (1,),
        rules=Rules(unclean=True), ends={2: end(2, 4, 90), 3: end(3, 4, 99)}, awaited=frozenset({1}),
    ),
    "nobody else is elected without setting or order": Case(
        led(NO_LEADER, 4, (1,)), [broker(2, 2), broker(3, 2)],
        NO_LEADER, 4, (1,), ends={2: end(2, 4, 90), 3: end(3, 4, 99)},
    ),
    "a log that is ahead of coordination's epoch is not led in an old one": Case(
        led(NO_LEADER, 4, (1,), (1,)), [broker(1, 2, boot="c")], 1, 10, (1,), ends={1: end(1, 9, 90)},
    ),
    "preferred leader by order": Case(led(2, 4, (1, 2)), [ONE, TWO], 1, 5, (1, 2), order=PREFERRED),
    "a preferred leader that is not in sync is not elected": Case(
        led(2, 4, (2,)), [ONE, TWO], 2, 4, (2,), order=PREFERRED
    ),
    "a preferred leader that leaves is not elected": Case(
        led(2, 4, (1, 2)), [broker(1, state=LEAVING), TWO], 2, 4, (2,), order=PREFERRED
    ),
    "a preferred leader that is only late is not elected": Case(
        led(2, 4, (1, 2)), [TWO], 2, 4, (1, 2), order=PREFERRED, awaited=frozenset({1})
    ),
    "a preferred leader that leads already goes on": Case(
        led(1, 4, (1, 2)), [ONE, TWO], 1, 4, (1, 2), order=PREFERRED
    ),
    "a preferred leader is not elected during a move, which may take it away": Case(
        led(2, 4, (1, 2), (1, 2, 3), target=(2, 3), adding=(3,)), [ONE, TWO, THREE], 2, 4, (1, 2), order=PREFERRED
    ),
    "a leader resigns: another leads, and the set is without it": Case(
        led(1, 4, (1, 2, 3)), [ONE, TWO, THREE], 2, 5, (2, 3), order=RESIGN
    ),
    "a leader resigns: the next behind it leads, not the first": Case(
        led(2, 4, (1, 2, 3)), [ONE, TWO, THREE], 3, 5, (1, 3), order=RESIGN, resigns=2
    ),
    "the last in the assignment resigns: the first leads": Case(
        led(3, 4, (1, 2, 3)), [ONE, TWO, THREE], 1, 5, (1, 2), order=RESIGN, resigns=3
    ),
    "a leader resigns, and the next behind it is not in sync": Case(
        led(2, 4, (1, 2)), [ONE, TWO, THREE], 1, 5, (1,), order=RESIGN, resigns=2
    ),
    "a leader resigns and nobody else is in sync": Case(led(1, 4, (1,)), [ONE, TWO, THREE], 1, 4, (1,), order=RESIGN),
    "a leader resigned that leads no more": Case(led(2, 4, (1, 2)), [ONE, TWO], 2, 4, (1, 2), order=RESIGN),
    "a leader resigned and is gone: nobody leads": Case(
        led(1, 4, (1,)), [TWO, THREE], NO_LEADER, 4, (1,), order=RESIGN
    ),
    "a leader resigned and has lost something since: nobody leads": Case(
        led(1, 4, (1,)), [broker(1, 2, boot="c"), TWO], NO_LEADER, 4, (1,), order=RESIGN
    ),
    "a leader resigned and is gone: one that is about to leave leads": Case(
        led(1, 4, (1, 2)), [broker(2, state=LEAVING), THREE], 2, 5, (2,), order=RESIGN
    ),
    "moved: the target is in sync, its first replica leads": Case(
        led(1, 4, (1, 2, 3), (1, 2, 3), target=(2, 3), adding=(3,)), [ONE, TWO, THREE], 2, 5, (2, 3)
    ),
    "moved: the target is not in sync yet": Case(
        led(1, 4, (1, 2), (1, 2, 3), target=(2, 3), adding=(3,)), [ONE, TWO, THREE], 1, 4, (1, 2)
    ),
    "written before incarnations were: the reports decide": Case(
        replace(led(1, 4, (1,), (1,)), incarnations={}), [ONE], NO_LEADER, 4, (1,)
    ),
}  # fmt: skip


@proves("G14", "G15")
@pytest.mark.parametrize("name", CASES)
def test_a_partition_becomes(name: str) -> None:
    case = CASES[name]
    decision = decided(case)
    after = case.before if decision is None else decision.after
    assert (after.leader, after.leader_epoch, after.isr) == (case.leader, case.epoch, tuple(case.isr))
    present = {each.id: each.incarnation for each in case.brokers}
    if after.leader != NO_LEADER and after.leader not in case.awaited:
        assert after.incarnations[after.leader] == present[after.leader]
    if decision is not None:
        assert after.controller == 8
        assert case.relies_on <= decision.relies_on
        again = image_of([replace(after, controller=case.before.controller)], case.brokers)
        context = Context(8, lambda number: number not in case.awaited, lambda _: case.rules)
        assert decide(again, context) == [], "a decision carried out leaves nothing to decide"


def test_a_decision_that_changes_nothing_is_none() -> None:
    assert decided(CASES["all is well"]) is None
    assert decided(CASES["a leader that is only late is waited for"]) is None


@proves("G14")
def test_what_an_election_outside_the_set_lost_is_in_the_key() -> None:
    returned = [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)]
    complete = {1: end(1, 4, 90, watermark=97), 2: end(2, 4, 95, watermark=91), 3: end(3, 3, 99)}
    decision = decided(Case(led(NO_LEADER, 4, (1,)), returned, 2, 5, (2,), ends=complete))
    assert decision is not None
    assert decision.after.lost == Lost(5, 95, 97)
    nothing = {1: end(1, 4, 90), 2: end(2, 4, 95, watermark=95), 3: end(3, 3, 99)}
    decision = decided(Case(led(NO_LEADER, 4, (1,)), returned, 2, 5, (2,), ends=nothing))
    assert decision is not None
    assert decision.after.lost is None
    away = {2: end(2, 4, 95)}
    decision = decided(Case(led(NO_LEADER, 4, (1,)), [broker(2, 2)], 2, 5, (2,), order=UNCLEAN, ends=away))
    assert decision is not None
    assert decision.after.lost == Lost(5, 95, -1)


@proves("G14")
@pytest.mark.parametrize(
    ("doubted", "lost"), [((1, 2), Lost(5, 95, -1)), ((1, 2, 3), Lost(5, 95, -1)), ((1,), None), ((1, 3), None)]
)
def test_members_that_have_all_cut_their_logs_may_have_lost_what_nobody_knows_of(
    doubted: tuple[int, ...], lost: Lost | None
) -> None:
    """After a kill no watermark tells what they had acknowledged."""
    returned = [broker(number, 2, boot="c") for number in (1, 2, 3)]
    brokers = [having_lost(each, 0) if each.id in doubted else each for each in returned]
    ends = {1: end(1, 4, 90), 2: end(2, 4, 95), 3: end(3, 3, 99)}
    decision = decided(Case(led(NO_LEADER, 4, (1, 2)), brokers, 2, 5, (2,), ends=ends))
    assert decision is not None
    assert decision.after.lost == lost


@proves("G14")
def test_members_that_know_of_no_run_before_may_have_lost_what_nobody_knows_of() -> None:
    """Their disks are new, or say nothing."""
    brokers = [replace(broker(1, 2), previous=None), having_lost(broker(2, 2), 0), broker(3, 2, boot="c")]
    ends = {1: end(1, -1, 0), 2: end(2, 4, 95), 3: end(3, 3, 99)}
    for members, lost in (((1, 2), Lost(5, 95, -1)), ((1,), Lost(5, 95, -1)), ((1, 3), None)):
        decision = decided(Case(led(NO_LEADER, 4, members), brokers, 2, 5, (2,), ends=ends))
        assert decision is not None
        assert decision.after.lost == lost, members


@proves("F6")
def test_who_is_elected_by_reports_hears_of_a_deletion_that_it_missed() -> None:
    """Replica 1 was alone in the set when a deletion below 30 was answered; 2 holds a tail that nobody committed."""
    brokers = [broker(1, 2, boot="c"), broker(2, 2), broker(3, 2)]
    deleted = replace(end(1, 4, 90), start=30)
    ahead = replace(end(2, 4, 95), start=20)
    unled = led(NO_LEADER, 4, (1,), least_start=25)

    def least_start(first: ReplicaEnd, brokers: Sequence[Broker] = brokers) -> int:
        ends = {1: first, 2: ahead, 3: end(3, 3, 99)}
        decision = decided(Case(unled, brokers, 2, 5, (2,), ends=ends))
        assert decision is not None
        assert decision.after.leader == 2
        return decision.after.least_start

    assert least_start(deleted) == 30
    assert least_start(replace(deleted, start=20)) == 0, "it knows all deletions itself"
    assert least_start(replace(deleted, last_epoch=3)) == 0, "another history"
    assert least_start(deleted, [having_lost(brokers[0], 0), *brokers[1:]]) == 0, "its front may only be lost"


def test_reports_and_orders_are_cleared_when_they_have_served() -> None:
    served = decided(CASES["unclean by the operator's order"])
    assert served is not None
    assert served.clears == (keys.ends_prefix(PREFIX, "t", 0), keys.order_key(PREFIX, "t", 0))
    waiting = decided(CASES["unclean waits for all that are alive"])
    assert waiting is None
    refused = decided(CASES["a preferred leader that is not in sync is not elected"])
    assert refused is not None
    assert (refused.after.leader, refused.clears) == (2, (keys.order_key(PREFIX, "t", 0),))
    nobody = decided(Case(led(NO_LEADER, 4, (1,)), [TWO], NO_LEADER, 4, (1,), order=PREFERRED))
    assert nobody is not None
    assert (nobody.after.leader, nobody.clears) == (NO_LEADER, (keys.order_key(PREFIX, "t", 0),))
    late = decided(Case(led(1, 4, (1, 2)), [ONE, TWO], 1, 4, (1, 2), ends={2: end(2, 4, 90, run=1)}))
    assert late is not None
    assert (late.after.leader, late.clears) == (1, (keys.ends_prefix(PREFIX, "t", 0),))


def test_nothing_is_decided_for_a_partition_without_its_key_or_a_topic_without_its_settings() -> None:
    missing = PartitionState(0, NO_LEADER, 0, (), ())
    assert decide(image_of([missing], [ONE], order=PREFERRED), Context(8, lambda _: True, lambda _: Rules())) == []
    assert decide(image_of([led(1, 4, (1, 2))], [TWO]), Context(8, lambda _: True, lambda _: None)) == []


def test_a_decision_tells_what_changes() -> None:
    elected = decided(Case(led(1, 4, (1, 2)), [TWO], 2, 5, (2,)))
    assert str(elected) == "t-0: leader 1 in epoch 4, now 2 in 5; in sync [1, 2], now [2]"
    moving = led(2, 4, (2, 3), (1, 2, 3), target=(2, 3), adding=(3,))
    assert str(decided(Case(moving, [TWO, THREE], 2, 5, (2, 3)))) == (
        "t-0: leader 2 in epoch 4, now 2 in 5; in sync [2, 3], now [2, 3]; replicas [1, 2, 3], now [2, 3]"
    )


@proves("L3")
def test_replicas_of_a_draining_broker_begin_to_move() -> None:
    four = [ONE, TWO, THREE, broker(4)]
    image = image_of([led(1, 4, (1, 2, 3))], four, draining=frozenset({1}))
    plan = plan_drains(image)
    context = Context(8, lambda _: True, lambda _: Rules(), moves=plan)
    (decision,) = decide(image, context)
    assert set(decision.after.target) == {2, 3, 4}
    assert set(decision.after.replicas) == {1, 2, 3, 4}
    assert (decision.after.leader, decision.after.isr, decision.relies_on) == (1, (1, 2, 3), frozenset({4}))
    nowhere = image_of([led(1, 4, (1, 2, 3))], [ONE, TWO, THREE], draining=frozenset({1}))
    assert plan_drains(nowhere) == ()
    assert decide(nowhere, context) == [], "broker 4, which the plan was made with, is gone"
    elsewhere = image_of([led(1, 4, (1, 2, 3), (1, 3, 2))], four, draining=frozenset({1}))
    assert decide(elsewhere, context) == [], "the partition is not where the plan saw it"


def test_only_so_many_planned_moves_are_under_way_and_none_is_begun_twice() -> None:
    states = [replace(led(1, 4, (1, 2)), index=index) for index in range(MOVES_MAX + 5)]
    states[:2] = [replace(state, replicas=(1, 2, 3), target=(2, 3), adding=(3,)) for state in states[:2]]
    four = [ONE, TWO, THREE, broker(4)]
    moves = [ReplicaMove("t", state.index, (1, 2, 3), (2, 3, 4)) for state in states[2:]]
    image = image_of(states, four)
    begun = decide(image, Context(8, lambda _: True, lambda _: Rules(), moves=[*moves[:3], *moves]))
    assert [decision.before.index for decision in begun] == list(range(2, MOVES_MAX))
    full = [replace(state, replicas=(1, 2, 3), target=(2, 3), adding=(3,)) for state in states[:MOVES_MAX]]
    image = image_of([*full, *states[MOVES_MAX:]], four)
    assert decide(image, Context(8, lambda _: True, lambda _: Rules(), moves=moves)) == []


def test_all_partitions_go_back_to_their_preferred_leaders() -> None:
    states = [replace(led(2, 4, (1, 2)), index=0), replace(led(1, 4, (1, 2)), index=1)]
    decisions = decide(image_of(states, [ONE, TWO]), Context(8, lambda _: True, lambda _: Rules(), prefer=True))
    assert [(each.before.index, each.after.leader, each.after.leader_epoch) for each in decisions] == [(0, 1, 5)]


@proves("G14")
def test_many_partitions_go_in_transactions_of_sixty_that_compare_all_they_rely_on() -> None:
    states = [replace(led(1, 4, (1, 2)), index=index, revision=1000 + index) for index in range(3333)]
    image = image_of(states, [TWO, THREE])
    decisions = decide(image, Context(8, lambda _: True, lambda _: Rules()))
    batches = list(in_transactions(image, decisions, FENCE))
    assert len(batches) == 56
    assert sum(len(batch.decisions) for batch in batches) == 3333
    step = batches[0].step
    assert len(step.actions) == 60
    assert step.compares == (
        *FENCE,
        *(Compare(keys.partition_key(PREFIX, "t", n), "mod_revision", "=", 1000 + n) for n in range(60)),
        Compare(keys.broker_key(PREFIX, 1), "mod_revision", "=", 0),
        Compare(keys.broker_key(PREFIX, 2), "mod_revision", "=", 102),
    )
    assert all(isinstance(action, Put) for action in step.actions)
    singles = list(in_transactions(image, batches[0].decisions, FENCE, most=1))
    assert [len(single.step.actions) for single in singles] == [1] * 60


def test_a_transaction_stays_within_what_coordination_takes() -> None:
    brokers = [broker(number) for number in range(1, 200)]
    states = [
        replace(led(number, 4, (number, number + 1), (number, number + 1)), index=nth)
        for nth, number in enumerate(range(1, 199))
    ]
    image = image_of(states, brokers[1::2])
    for batch in in_transactions(image, decide(image, Context(8, lambda _: True, lambda _: Rules())), FENCE):
        assert len(batch.step.compares) <= 128
        assert len(batch.step.actions) <= 128
    served = decided(CASES["unclean by the operator's order"])
    assert served is not None
    (batch,) = in_transactions(image, [served], FENCE)
    assert batch.step.actions[1:] == (
        Delete(keys.ends_prefix(PREFIX, "t", 0), prefix=True),
        Delete(keys.order_key(PREFIX, "t", 0)),
    )


@pytest.mark.parametrize(("fences", "fit"), [(4, 31), (5, 30)])
def test_a_transaction_is_filled_with_compares_to_the_last_one(fences: int, fit: int) -> None:
    """Four for each decision: its key, and three brokers."""
    state = led(1, 4, (1, 2))
    topic = Topic("t", TOPIC_ID, (state,))
    decisions = [Decision(topic, state, state, frozenset(range(3 * nth, 3 * nth + 3))) for nth in range(40)]
    first, *_ = in_transactions(image_of([state], []), decisions, FENCE * fences)
    assert (len(first.decisions), len(first.step.compares)) == (fit, fences + 4 * fit)


def test_a_transaction_is_filled_with_actions_to_the_last_one() -> None:
    """Two for each decision: its key, and the order that it has carried out."""
    state = led(1, 4, (1, 2))
    decision = Decision(Topic("t", TOPIC_ID, (state,)), state, state, frozenset(), ("order",))
    batches = list(in_transactions(image_of([state], []), [decision] * 70, FENCE, most=100))
    assert [len(batch.step.actions) for batch in batches] == [128, 12]


def test_only_what_changed_since_a_settled_image_is_looked_at() -> None:
    late = led(1, 4, (1, 2))
    image = image_of([late], [TWO])
    looked: list[str] = []

    def rules(topic: Topic) -> Rules:
        looked.append(topic.name)
        return Rules()

    context = Context(8, lambda _: False, rules)
    assert decide(image, context) == []
    assert looked == ["t"]
    assert decide(image, context, image) == []
    assert looked == ["t"]
    assert decide(replace(image, topics={"t": replace(image.topics["t"])}), context, image) == []
    assert decide(replace(image, brokers={2: TWO}), context, image) == []
    assert looked == ["t"] * 3
    for controls in (
        replace(image.controls, ends={("t", 0): {2: end(2, 4, 90, run=1)}}),
        replace(image.controls, orders={("u", 0): Order(PREFERRED, 9)}),
        replace(image.controls, draining=frozenset({2})),
    ):
        decide(replace(image, controls=controls), context, image)
    assert looked == ["t"] * 6


def test_of_a_steady_partition_not_even_the_settings_are_read() -> None:
    def rules(_: Topic) -> Rules:
        raise AssertionError("read")

    assert decide(image_of([led(1, 4, (1, 2))], [ONE, TWO]), Context(8, lambda _: True, rules)) == []
