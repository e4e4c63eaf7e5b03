"""What the controller decides, without I/O: from an image, the partitions that must change and how.

Rules, in this order, for each partition:
- members that are gone, that may have lost something, or that are about to leave drop out of the in-sync set, but never
  the last one; a member that returned with all it held is carried over to its new incarnation;
- the leader stays while it is a valid member. Otherwise the first valid member in the order of the assignment leads, in
  a new epoch; if there is none, nobody does. One that returned leads only if all valid members have: those that were
  there all the time hold for certain what they held;
- without any valid member: when all replicas have reported what they hold, the one with the greatest (last epoch, end)
  leads, of several one that has lost nothing, and of those the one with the highest start: it was told, and may not
  fall. An operator's order, or the topic's setting, lets those that are alive be enough, and when they had their time
  to say what they hold, those that have said it. What was lost is in the key, and that something may be if no member
  can tell how much it held, because it has cut its log or knows of no run before;
- a move whose target is in sync ends; an order for the preferred leader is carried out, and so is a leader's wish to
  resign if another member can lead: the next behind it in the assignment leads, because two that are damaged would keep
  the partition from one that is whole; planned moves begin: away from draining brokers, and of internal topics to more
  replicas.

A decision holds only for the image that it was made on: `in_transactions` makes each write compare the revision of the
partition's key, the registrations that it relies on and the fence of the controller's term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Action, Step, unchanged
from headrace.cluster.controller_state import PREFERRED, RESIGN, UNCLEAN, Order, ReplicaEnd
from headrace.cluster.eligibility import Eligibility, judge
from headrace.cluster.image import LIVE, NO_LEADER, Broker, Image, Lost, PartitionState, Topic, encode_partition
from headrace.placement.drains import holds
from headrace.placement.moves import begin_move, can_finish_move, finish_move, lead, live_members
from headrace.placement.plans import ReplicaMove, Where
from headrace.placement.spread import open_sites
from headrace.ports.coordination import ACTIONS_MAX, Compare, Delete, Put

PARTITIONS_A_STEP: Final = 60
MOVES_MAX: Final = 100
"""Partitions that move at the same time because the controller has planned it."""
UNKNOWN_END: Final = -1
"""End of what was lost, when replicas that are away may hold more, or nobody knows how much members have cut."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a topic's settings say about elections."""

    durability: str = "os"
    unclean: bool = False
    durability_altered_at: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    epoch: int
    """Of the controller that decides."""
    is_gone: Callable[[int], bool]
    """Whether a broker that is not registered counts as gone."""
    rules: Callable[[Topic], Rules | None]
    """None: nothing can be decided for the topic."""
    is_overdue: Callable[[Where], bool] = lambda _: False
    """Whether replicas that are alive have had their time to report what they hold of a partition."""
    prefer: bool = False
    """Every partition goes back to its preferred leader where that one is able."""
    moves: Sequence[ReplicaMove] = ()
    """What is planned to empty draining brokers and to let internal topics grow; a move that does not fit the image is
    left out."""


@dataclass(frozen=True, slots=True)
class Decision:
    topic: Topic
    before: PartitionState
    after: PartitionState
    relies_on: frozenset[int]
    """Brokers whose registration, or absence, must still be as it was seen."""
    clears: tuple[str, ...] = ()
    """Keys below which everything is deleted with it."""

    def __str__(self) -> str:
        old, new = self.before, self.after
        parts = []
        if (old.leader, old.leader_epoch) != (new.leader, new.leader_epoch):
            parts.append(f"leader {old.leader} in epoch {old.leader_epoch}, now {new.leader} in {new.leader_epoch}")
        parts.append(f"in sync {list(old.isr)}, now {list(new.isr)}")
        if old.replicas != new.replicas:
            parts.append(f"replicas {list(old.replicas)}, now {list(new.replicas)}")
        return f"{self.topic.name}-{old.index}: {'; '.join(parts)}"


def decide(image: Image, context: Context, since: Image | None = None) -> list[Decision]:
    """Every partition that must change. `since` is an image on which nothing was left to decide in the same context."""
    decisions = []
    brokers, ends, orders = image.brokers, image.controls.ends, image.controls.orders
    for topic in _concerned(image, since):
        for state in topic.partitions:
            where = topic.name, state.index
            if state.is_missing:
                continue
            if context.prefer or where in ends or where in orders or not _is_steady(state, brokers):
                decision = _decide(image, topic, state, context)
                if decision is not None:
                    decisions.append(decision)
    decided = {(decision.topic.name, decision.before.index) for decision in decisions}
    for decision in _planned(image, context):
        if (decision.topic.name, decision.before.index) not in decided:
            decisions.append(decision)
    return decisions


def _is_steady(state: PartitionState, brokers: Mapping[int, Broker]) -> bool:
    """Led by a member, all members as they were, and no move under way: what most partitions are most of the time."""
    if state.leader == NO_LEADER or state.target:
        return False
    for member in state.isr:
        broker = brokers.get(member)
        if broker is None or broker.incarnation != state.incarnations.get(member) or broker.state != LIVE:
            return False
    return True


def _concerned(image: Image, since: Image | None) -> Iterable[Topic]:
    if (
        since is None
        or since.brokers is not image.brokers
        or since.controls.ends is not image.controls.ends
        or since.controls.orders is not image.controls.orders
        or since.controls.draining != image.controls.draining
    ):
        return image.topics.values()
    return [topic for name, topic in image.topics.items() if since.topics.get(name) is not topic]


def _decide(image: Image, topic: Topic, state: PartitionState, context: Context) -> Decision | None:
    rules = context.rules(topic)
    if rules is None:
        return None
    judged = judge(topic.id, state, image.brokers, rules.durability, context.is_gone, rules.durability_altered_at)
    where = topic.name, state.index
    order = image.controls.orders.get(where)
    successors = state.replicas
    if order is not None and order.kind == RESIGN and order.broker == state.leader and order.broker in judged.present:
        judged = replace(judged, leaving=judged.leaving | {order.broker})
        successors = _from_behind(order.broker, state.replicas)
    after = _led(state, judged, successors)
    clears: list[str] = []
    if after.leader == NO_LEADER and not judged.present:
        reports = _reports(image, topic, state)
        if rules.unclean or _asks(order, UNCLEAN):
            # Whoever may still come is waited for; who is there and has not said yet, for a while.
            needed = set(judged.awaited)
            if not context.is_overdue(where):
                needed.update(broker for broker in state.replicas if broker in image.brokers)
        else:
            needed = set(state.replicas)
        if reports and needed <= set(reports):
            doubted = {broker for broker in reports if _has_lost(image.brokers[broker], topic, state)}
            unheard = {broker for broker in reports if image.brokers[broker].previous is None}
            after = _elected(state, reports, doubted, untold=set(state.isr) <= doubted | unheard)
    if after.leader != NO_LEADER:
        if can_finish_move(after):
            after = _same_members(finish_move(after, judged.staying))
        if context.prefer or _asks(order, PREFERRED):
            after = _preferred(after, judged)
        if where in image.controls.ends:
            clears.append(keys.ends_prefix(image.prefix, *where))
    if order is not None and (after.leader != NO_LEADER or order.kind != UNCLEAN):
        clears.append(keys.order_key(image.prefix, *where))
    if after == state and not clears:
        return None
    dropped = {broker for broker in judged.gone if broker not in after.isr}
    leader = {after.leader} if after.leader != state.leader or judged.returned else set()
    relied = (dropped | leader | (judged.returned & set(after.isr))) - {NO_LEADER}
    return Decision(topic, state, replace(after, controller=context.epoch), frozenset(relied), tuple(clears))


def _asks(order: Order | None, kind: str) -> bool:
    return order is not None and order.kind == kind


def _from_behind(broker: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """The same round, begun behind the broker."""
    place = replicas.index(broker) + 1 if broker in replicas else 0
    return replicas[place:] + replicas[:place]


def _led(state: PartitionState, judged: Eligibility, successors: Sequence[int]) -> PartitionState:
    """The set without those that are no valid members, and the leader that it then has."""
    members = judged.members(state)
    leader, epoch = state.leader, state.leader_epoch
    able = judged.staying or judged.leaving
    able = (able - judged.returned) or able
    if leader in able:
        epoch += leader in judged.returned
    elif leader not in judged.awaited:
        leader = next((broker for broker in successors if broker in able and broker in members), NO_LEADER)
        epoch += leader != NO_LEADER
    return replace(state, leader=leader, leader_epoch=epoch, isr=tuple(members), incarnations=members)


def _reports(image: Image, topic: Topic, state: PartitionState) -> dict[int, ReplicaEnd]:
    """What the replicas that are alive say they hold, each by its present incarnation."""
    said = image.controls.ends.get((topic.name, state.index), {})
    return {
        broker: said[broker]
        for broker in state.replicas
        if broker in said
        and broker in image.brokers
        and said[broker].incarnation == image.brokers[broker].incarnation
        and said[broker].topic_id == topic.id
    }


def _has_lost(broker: Broker, topic: Topic, state: PartitionState) -> bool:
    return broker.previous is not None and (topic.id, state.index) in broker.previous.lost


def _elected(
    state: PartitionState, reports: Mapping[int, ReplicaEnd], doubted: Set[int], *, untold: bool
) -> PartitionState:
    """Led by the replica that holds most; if others hold as much by one that has lost nothing before its end, and knows
    the last deletion. One that holds more may have missed a deletion that was answered: it hears of it by the key.
    `untold`: no member can tell how much it held."""

    def merit(broker: int) -> tuple[tuple[int, int], bool, int]:
        return _held(reports.get(broker)), broker not in doubted, reports[broker].start if broker in reports else 0

    best = max(state.replicas, key=merit)
    chosen = reports[best]
    epoch = max(state.leader_epoch, *(report.last_epoch for report in reports.values())) + 1
    known = max(report.watermark for report in reports.values())
    lost = state.lost
    if len(reports) < len(state.replicas) or untold:
        lost = Lost(epoch, chosen.end, UNKNOWN_END)
    elif known > chosen.end:
        lost = Lost(epoch, chosen.end, known)
    return replace(
        state,
        leader=best,
        leader_epoch=epoch,
        isr=(best,),
        incarnations={best: chosen.incarnation},
        lost=lost,
        least_start=_least_start(chosen, [report for broker, report in reports.items() if broker not in doubted]),
    )


def _least_start(chosen: ReplicaEnd, reports: Iterable[ReplicaEnd]) -> int:
    """Where others begin whose logs are of the same history, if that is behind where the chosen one begins; else 0. Of
    another last epoch the offsets may be other records, and a log that has lost its front may only seem to begin there.
    """
    start = max((report.start for report in reports if report.last_epoch == chosen.last_epoch), default=0)
    return start if start > chosen.start else 0


def _held(report: ReplicaEnd | None) -> tuple[int, int]:
    return (report.last_epoch, report.end) if report is not None else (UNKNOWN_END, UNKNOWN_END)


def _preferred(state: PartitionState, judged: Eligibility) -> PartitionState:
    first = state.replicas[0]
    able = not state.target and first in state.isr and first in judged.staying
    return lead(state, first) if able else state


def _same_members(state: PartitionState) -> PartitionState:
    return replace(state, incarnations={broker: state.incarnations.get(broker, "") for broker in state.isr})


def _planned(image: Image, context: Context) -> Iterator[Decision]:
    """The planned moves, as many as may be under way at a time."""
    if not context.moves:
        return
    left = MOVES_MAX - sum(bool(state.target) for topic in image.topics.values() for state in topic.partitions)
    able = {site.broker for site in open_sites(image)}
    begun: set[Where] = set()
    for move in context.moves:
        where = move.topic, move.partition
        if left <= 0:
            return
        if where in begun or not holds(image, move) or not able.issuperset(move.added):
            continue
        topic = image.topics[move.topic]
        state = topic.partitions[move.partition]
        if not state.target:
            left -= 1
            begun.add(where)
            after = _same_members(begin_move(state, move.after, live_members(state, image.brokers)))
            after = replace(after, controller=context.epoch)
            yield Decision(topic, state, after, frozenset(move.added))


@dataclass(frozen=True, slots=True)
class Batch:
    """One transaction, and the decisions in it."""

    step: Step
    decisions: tuple[Decision, ...]


def in_transactions(
    image: Image, decisions: Sequence[Decision], fence: tuple[Compare, ...], most: int = PARTITIONS_A_STEP
) -> Iterator[Batch]:
    """As few transactions as their bounds allow; after a conflict, `most` of 1 lets the others through."""
    held: list[Decision] = []
    relied: frozenset[int] = frozenset()
    actions = 0
    for decision in decisions:
        all_relied, more = relied | decision.relies_on, 1 + len(decision.clears)
        compares = len(fence) + len(held) + 1 + len(all_relied)
        if held and (len(held) == most or compares > ACTIONS_MAX or actions + more > ACTIONS_MAX):
            yield _batch(image, held, fence)
            held, actions, all_relied = [], 0, decision.relies_on
        held.append(decision)
        relied, actions = all_relied, actions + more
    if held:
        yield _batch(image, held, fence)


def _batch(image: Image, decisions: Sequence[Decision], fence: tuple[Compare, ...]) -> Batch:
    compares = list(fence)
    actions: list[Action] = []
    for decision in decisions:
        key = keys.partition_key(image.prefix, decision.topic.name, decision.before.index)
        compares.append(unchanged(key, decision.before.revision))
        actions.append(Put(key, encode_partition(decision.topic.id, decision.after)))
        actions.extend(Delete(below, prefix=below.endswith("/")) for below in decision.clears)
    for number in sorted({broker for decision in decisions for broker in decision.relies_on}):
        broker = image.brokers.get(number)
        compares.append(unchanged(keys.broker_key(image.prefix, number), 0 if broker is None else broker.revision))
    return Batch(Step(tuple(compares), tuple(actions)), tuple(decisions))
