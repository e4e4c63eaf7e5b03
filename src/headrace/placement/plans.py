"""Which replicas should be elsewhere: plans for evening out the cluster, emptying a broker, moving one partition. Pure.

A plan only says where replicas should be. Each of its moves is begun by a `target` in the partition's key and ends when
the target holds the data (cluster.moves), so a plan can be shown, carried out in parts, left and made again. A plan
starts from where moves under way will end; made again on its own result it is empty.

A broker that is down is no reason to move anything: it returns with its data. The partitions that it holds stay as
they are until it is back, or until it is drained, which works for a broker that is gone for good.

With thousands of partitions a plan takes a while to compute: not on a broker's loop, the image can go to a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.cluster.image import Image, Topic
from headrace.errors import InvalidAssignment, InvalidReplication, InvalidRequest, UnknownPartition
from headrace.placement.balance import Counts, Shift, even_out
from headrace.placement.moves import goal
from headrace.placement.ring import Ring
from headrace.placement.spread import RING, SPREAD, Site, open_sites, placement_of, shared

Where = tuple[str, int]
"""Topic and partition."""
Sizes = Mapping[Where, int]
"""Bytes of the partitions, as far as they are known."""


@dataclass(frozen=True, slots=True)
class ReplicaMove:
    topic: str
    partition: int
    before: tuple[int, ...]
    """Where the replicas are, or will be when a move under way has ended; the preferred leader first."""
    after: tuple[int, ...]
    size_bytes: int | None = None
    """Of one replica; None if it is not known."""

    @property
    def added(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.after if broker not in self.before)

    @property
    def removed(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.before if broker not in self.after)


@dataclass(frozen=True, slots=True)
class Summary:
    partitions: int
    replicas: int
    """Copies to be made."""
    leaders: int
    """Partitions that get another preferred leader."""
    copied_bytes: int | None
    """None if the size of a partition that moves is not known."""


@dataclass(frozen=True, slots=True)
class Reassignment:
    moves: tuple[ReplicaMove, ...] = ()

    def summary(self) -> Summary:
        copies = [(len(move.added), move.size_bytes) for move in self.moves if move.added]
        known = [count * size for count, size in copies if size is not None]
        return Summary(
            partitions=len(self.moves),
            replicas=sum(count for count, _ in copies),
            leaders=sum(move.before[0] != move.after[0] for move in self.moves),
            copied_bytes=sum(known) if len(known) == len(copies) else None,
        )


def rebalance(image: Image, *, default: str = SPREAD, sizes: Sizes | None = None) -> Reassignment:
    """Every broker with as many replicas, and as many leaderships, as the others, in each topic and in all, with few
    moves. Topics on the ring go where the ring says. `default` is the placement of topics that name none.
    """
    draft = _Draft(image, default, image.controls.draining)
    spread = [where for where in draft.movable if not draft.to_ring(where)]
    draft.count_replicas(())
    for where in spread:
        draft.evacuate(where)
    spread = [where for where in spread if not draft.on_ring[where[0]]]
    draft.count_replicas(spread)
    while draft.set_apart(spread) or draft.even_replicas():
        pass
    draft.even_leaders(spread)
    return _reassignment(image, draft.goals, sizes)


def drain(
    image: Image, broker: int, *, default: str = SPREAD, sizes: Sizes | None = None, at_most: int | None = None
) -> Reassignment:
    """Everything that the broker holds to others, and nothing else. The broker may be down. `at_most` is for who
    carries it out in parts: so many partitions, which takes that much less time to plan.
    """
    held = [where for where, replicas in _goals(image).items() if broker in replicas][:at_most]
    if not held and broker not in image.brokers:
        raise InvalidRequest(
            f"there is no broker {broker}, and nothing is kept on one; live are {sorted(image.brokers)}"
        )
    if not held:
        return Reassignment()
    draft = _Draft(image, default, image.controls.draining | {broker})
    led = [where for where in held if draft.goals[where][0] == broker and not draft.on_ring[where[0]]]
    draft.away = frozenset({broker})
    draft.count_replicas(())
    for where in held:
        if draft.to_ring(where) or draft.evacuate(where):
            continue
        name, partition = where
        raise InvalidReplication(
            f"broker {broker} cannot be drained: partition {partition} of topic {name!r} has "
            f"{len(draft.goals[where])} replicas, and only brokers {sorted(draft.sites)} can take them: add a broker"
        )
    draft.even_replicas()
    draft.even_leaders(led)
    return _reassignment(image, draft.goals, sizes)


def move(
    image: Image, topic: str, partition: int, replicas: Sequence[int], *, sizes: Sizes | None = None
) -> Reassignment:
    """One partition to these brokers, as the operator says."""
    state = image.partition(topic, partition)
    if state is None:
        raise UnknownPartition(f"there is no partition {partition} of a topic {topic!r}")
    if not replicas or len(set(replicas)) != len(replicas):
        raise InvalidAssignment(f"a partition needs brokers that differ, at least one: {list(replicas)}")
    able = {site.broker for site in open_sites(image)} | set(state.replicas)
    unable = [broker for broker in replicas if broker not in able]
    if unable:
        raise InvalidAssignment(
            f"broker {unable[0]} takes no replicas: it is not live, or it is leaving or draining; {sorted(able)} do"
        )
    return _reassignment(image, {(topic, partition): replicas}, sizes)


def _goals(image: Image) -> dict[Where, tuple[int, ...]]:
    return {
        (name, state.index): goal(state)
        for name, topic in sorted(image.topics.items())
        for state in topic.partitions
        if not state.is_missing
    }


def _reassignment(image: Image, goals: Mapping[Where, Sequence[int]], sizes: Sizes | None) -> Reassignment:
    known = sizes or {}
    present = ((where, goal(image.topics[where[0]].partitions[where[1]])) for where in goals)
    return Reassignment(
        tuple(
            ReplicaMove(*where, before, tuple(goals[where]), known.get(where))
            for where, before in present
            if before != tuple(goals[where])
        )
    )


@dataclass(slots=True)
class _Draft:
    """A plan in the making: where every partition's replicas should be."""

    image: Image
    default: str
    away: frozenset[int]
    """Brokers to be emptied."""
    goals: dict[Where, list[int]] = field(init=False)
    sites: dict[int, Site] = field(init=False)
    """The brokers that replicas can go to."""
    on_ring: dict[str, bool] = field(init=False)
    movable: list[Where] = field(init=False)
    """The partitions without a replica on a broker that is down."""
    _ring: Ring = field(init=False)
    _counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        image = self.image
        self.goals = {where: list(replicas) for where, replicas in _goals(image).items()}
        self.sites = {site.broker: site for site in open_sites(image) if site.broker not in self.away}
        self.on_ring = {name: self._is_on_ring(topic) for name, topic in image.topics.items()}
        there = set(image.brokers) | self.away
        self.movable = [where for where, replicas in self.goals.items() if there.issuperset(replicas)]
        self._ring = Ring(tuple(self.sites.values()))
        self._counts = Counts(self.sites)

    def _is_on_ring(self, topic: Topic) -> bool:
        return placement_of(topic, self.default) == RING

    def to_ring(self, where: Where) -> bool:
        """Whether the partition now is where the ring says; not if it is not on it, or cannot be there."""
        name, partition = where
        replicas = self.goals[where]
        others_there = all(broker in self.sites or broker in self.away for broker in replicas)
        if not self.on_ring[name] or not others_there or len(replicas) > len(self.sites):
            return False
        self.goals[where] = list(self._ring.replicas_of(name, partition, len(replicas)))
        return True

    def evacuate(self, where: Where) -> bool:
        """Whether nothing of the partition is left on the brokers to be emptied. Each replica's place is taken by the
        broker that shares least with the others, of these by the emptiest.
        """
        replicas = self.goals[where]
        for slot, broker in enumerate(replicas):
            if broker not in self.away:
                continue
            others = [site for site in self.sites.values() if site.broker not in replicas]
            if not others:
                return False
            replicas[slot] = min(others, key=lambda site: self._cost(where, slot, site.broker)).broker
            self._counts.add(*where, replicas[slot])
        return True

    def _cost(self, where: Where, slot: int, broker: int) -> tuple[tuple[int, int], tuple[int, int], int]:
        return self._shared(where, slot, broker), self._counts.load(where[0], broker), broker

    def _shared(self, where: Where, slot: int, broker: int) -> tuple[int, int]:
        """What the partition's replicas would share with this broker in that place."""
        replicas = [*self.goals[where]]
        replicas[slot] = broker
        return self._shared_by(replicas)

    def _shared_by(self, replicas: Sequence[int]) -> tuple[int, int]:
        return shared([self.sites.get(broker, Site(broker)) for broker in replicas])

    def count_replicas(self, free: Collection[Where]) -> None:
        """Anew, after changes; those of the `free` partitions may be evened out."""
        self._counts = Counts(self.sites)
        freed = set(free)
        for where, replicas in self.goals.items():
            for broker in replicas:
                if broker in self.sites:
                    self._counts.add(*where, broker, free=where in freed)

    def even_replicas(self) -> bool:
        """Of the free partitions, and what has been evacuated since they were counted."""
        return even_out(self._counts, self._may_hold, self._take_replica)

    def set_apart(self, partitions: Collection[Where]) -> bool:
        """Replace replicas that share a rack or a host where another broker would share less."""
        replaced = [where for where in partitions if self._set_apart(where)]
        return bool(replaced)

    def _set_apart(self, where: Where) -> bool:
        replicas = self.goals[where]
        present = self._shared_by(replicas)
        if present <= self._least_shared(len(replicas)):
            return False
        choices = [
            (self._cost(where, slot, broker), slot)
            for slot, own in enumerate(replicas)
            if own in self.sites
            for broker in self.sites
            if broker not in replicas
        ]
        (least, _, broker), slot = min(choices, default=((present, (0, 0), 0), 0))
        if least >= present:
            return False
        shift = Shift(*where, replicas[slot], broker)
        self._counts.take(shift)
        self._take_replica(shift)
        return True

    def _least_shared(self, replicas: int) -> tuple[int, int]:
        racks = {site.rack or site.broker for site in self.sites.values()}
        hosts = {site.host or site.broker for site in self.sites.values()}
        return max(0, replicas - len(racks)), max(0, replicas - len(hosts))

    def _may_hold(self, shift: Shift) -> bool:
        replicas = self.goals[shift.topic, shift.partition]
        if shift.destination in replicas:
            return False
        where = shift.topic, shift.partition
        return self._shared(where, replicas.index(shift.source), shift.destination) <= self._shared_by(replicas)

    def _take_replica(self, shift: Shift) -> None:
        replicas = self.goals[shift.topic, shift.partition]
        replicas[replicas.index(shift.source)] = shift.destination

    def even_leaders(self, free: Collection[Where]) -> None:
        """Put another replica first where that evens out who is preferred to lead. It costs no data."""
        counts = Counts(self.sites)
        freed = set(free)
        for where, replicas in self.goals.items():
            if replicas[0] in self.sites:
                counts.add(*where, replicas[0], free=where in freed)
        even_out(counts, self._may_lead, self._take_lead)

    def _may_lead(self, shift: Shift) -> bool:
        return shift.destination in self.goals[shift.topic, shift.partition]

    def _take_lead(self, shift: Shift) -> None:
        replicas = self.goals[shift.topic, shift.partition]
        replicas.remove(shift.destination)
        replicas.insert(0, shift.destination)
