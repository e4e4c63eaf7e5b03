"""Assignors: who of a group's members gets which partitions. Pure.

`range` gives each member of a topic a run of its partitions, members in the order of their instance ids or ids, so
that topics of as many partitions and the same members are co-partitioned. `uniform` gives all members as many as it
can, and leaves with a member what it has unless balance or a rack takes it away.

Where racks are known, of members and of replicas, a partition goes to a member in a rack that has a replica, as far as
that costs no balance. A member whose partitions are all out of its rack may be given others in exchange: each such
exchange puts more partitions right than it moves away, so the same members and topics lead to the same assignment.

How `uniform` works: topics with the same subscribers make a *pool*, so a group whose members all subscribe to the same
has one. A pool's partitions are poured over what its members hold of other pools, like water on a floor with steps:
that is the quota of each. Pools that share members are poured in turn until none changes any more, which ends, because
each turn that changes something makes the sum of the squares of all loads smaller. Members then keep what they hold
up to their quota, and the rest is handed out. A thousand members and ten thousand partitions take some tens of
milliseconds.

`simple` is for share groups (KIP-932), where several members may have one partition: `uniform`, and who has got nothing
by it shares the partition that has the fewest members. So every partition has a member, and every member a partition.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

Assignment = Mapping[bytes, frozenset[int]]
"""Partitions by topic id; no topic has none."""
Partition = tuple[bytes, int]
NOTHING: Final[Assignment] = {}

ROUNDS_MAX: Final = 100
"""Of pouring pools that share members; what is left after them is out of balance, and still an assignment."""


@dataclass(frozen=True, slots=True)
class AssignedTopic:
    """A topic as assignors see it."""

    topic_id: bytes
    partitions: int
    racks: tuple[frozenset[str], ...] = ()
    """Of the replicas of each partition; empty where none is known."""

    def racks_of(self, partition: int) -> frozenset[str]:
        return self.racks[partition] if self.racks else frozenset()


@dataclass(frozen=True, slots=True)
class Subscriber:
    member_id: str
    topics: frozenset[bytes]
    """Ids of those that it subscribes to and that there are."""
    instance_id: str | None = None
    rack: str | None = None
    target: Assignment = field(default_factory=dict)
    """What it was assigned last."""

    @property
    def order(self) -> tuple[bool, str]:
        """Static members first, in an order that outlives their restarts."""
        return self.instance_id is None, self.instance_id or self.member_id


Topics = Mapping[bytes, AssignedTopic]
Assignor = Callable[[Topics, Sequence[Subscriber]], dict[str, Assignment]]


def partitions_of(assignment: Assignment) -> Iterable[Partition]:
    return ((topic, index) for topic, indexes in assignment.items() for index in indexes)


def count_of(assignment: Assignment) -> int:
    return sum(map(len, assignment.values()))


def by_topic(partitions: Iterable[Partition]) -> Assignment:
    found: defaultdict[bytes, set[int]] = defaultdict(set)
    for topic, index in partitions:
        found[topic].add(index)
    return {topic: frozenset(indexes) for topic, indexes in found.items()}


@dataclass(slots=True)
class _Pool:
    """Topics with the same subscribers, who are numbers in the list of all."""

    members: list[int]
    topics: list[AssignedTopic]
    held: dict[int, list[Partition]] = field(default_factory=dict)
    quota: dict[int, int] = field(default_factory=dict)
    """How many partitions of the pool each member gets."""
    free: list[Partition] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(topic.partitions for topic in self.topics)


def _pools(topics: Topics, members: Sequence[Subscriber]) -> list[_Pool]:
    classes: defaultdict[frozenset[bytes], list[int]] = defaultdict(list)
    for number, member in enumerate(members):
        classes[member.topics].append(number)
    subscribed: defaultdict[bytes, list[int]] = defaultdict(list)
    numbers = list(classes.values())
    for place, topic_ids in enumerate(classes):
        for topic_id in topic_ids:
            subscribed[topic_id].append(place)
    pools: dict[tuple[int, ...], _Pool] = {}
    for topic_id in sorted(subscribed.keys() & topics.keys()):
        key = tuple(subscribed[topic_id])
        if key not in pools:
            pools[key] = _Pool(sorted(number for place in key for number in numbers[place]), [])
        pools[key].topics.append(topics[topic_id])
    return list(pools.values())


# range


def assign_range(topics: Topics, subscribers: Sequence[Subscriber]) -> dict[str, Assignment]:
    members = sorted(subscribers, key=lambda one: one.order)
    given: list[dict[bytes, frozenset[int]]] = [{} for _ in members]
    for pool in _pools(topics, members):
        sizes: defaultdict[int, list[AssignedTopic]] = defaultdict(list)
        for topic in pool.topics:
            sizes[topic.partitions].append(topic)
        for count, copartitioned in sizes.items():
            runs = _runs(count, pool.members, members, copartitioned)
            for number, indexes in runs.items():
                for topic in copartitioned:
                    given[number][topic.topic_id] = frozenset(indexes)
    return {member.member_id: given[number] for number, member in enumerate(members)}


def _runs(
    count: int, numbers: Sequence[int], members: Sequence[Subscriber], copartitioned: Sequence[AssignedTopic]
) -> dict[int, list[int]]:
    """Which of the partitions of each topic each member gets: those in its rack first, then the next ones."""
    least, more = divmod(count, len(numbers))
    room = {number: least + (place < more) for place, number in enumerate(numbers)}
    runs: dict[int, list[int]] = {number: [] for number in numbers if room[number]}
    left = list(range(count))
    by_rack: defaultdict[str, list[int]] = defaultdict(list)
    for number in runs:
        by_rack[members[number].rack or ""].append(number)
    if any(topic.racks for topic in copartitioned) and by_rack.keys() - {""}:
        left = []
        for index in range(count):
            racks = frozenset.intersection(*(topic.racks_of(index) for topic in copartitioned))
            near = (number for rack in racks - {""} for number in by_rack.get(rack, ()) if room[number])
            found = min(near, default=None)
            if found is None:
                left.append(index)
            else:
                room[found] -= 1
                runs[found].append(index)
    rest = iter(left)
    for number, indexes in runs.items():
        indexes += [next(rest) for _ in range(room[number])]
    return runs


# uniform


def assign_uniform(topics: Topics, subscribers: Sequence[Subscriber]) -> dict[str, Assignment]:
    members = sorted(subscribers, key=lambda one: one.order)
    pools = _pools(topics, members)
    _take_held(pools, members)
    _pour(pools, len(members))
    given: list[list[Partition]] = [[] for _ in members]
    for pool in pools:
        _hand_out(pool, members, topics)
        for number, held in pool.held.items():
            given[number] += held
    return {member.member_id: by_topic(given[number]) for number, member in enumerate(members)}


def _take_held(pools: Sequence[_Pool], members: Sequence[Subscriber]) -> None:
    """What members have and may keep; the rest of each pool is free."""
    for pool in pools:
        pool.held = {number: [] for number in pool.members}
        counts = {topic.topic_id: topic.partitions for topic in pool.topics}
        taken: set[Partition] = set()
        for number, held in pool.held.items():
            for topic_id, indexes in members[number].target.items():
                for index in indexes:
                    place = topic_id, index
                    if index < counts.get(topic_id, 0) and place not in taken:
                        taken.add(place)
                        held.append(place)
        every = ((topic.topic_id, index) for topic in pool.topics for index in range(topic.partitions))
        pool.free = [place for place in every if place not in taken]


def _pour(pools: Sequence[_Pool], members: int) -> None:
    loads = [0] * members
    for pool in pools:
        pool.quota = {number: len(held) for number, held in pool.held.items()}
        for number, count in pool.quota.items():
            loads[number] += count
    changed = list(pools)
    for _ in range(ROUNDS_MAX):
        if not changed:
            return
        changed = [pool for pool in pools if _pour_one(pool, loads)] if len(pools) > 1 else _poured(changed[0], loads)


def _poured(pool: _Pool, loads: list[int]) -> list[_Pool]:
    _pour_one(pool, loads)
    return []


def _pour_one(pool: _Pool, loads: list[int]) -> bool:
    """Set the quotas of one pool by what its members have of others; false if they were right."""
    floors = {number: loads[number] - pool.quota[number] for number in pool.members}
    level, over = _level(list(floors.values()), pool.size)
    quota = {number: max(0, level - floor) for number, floor in floors.items()}
    may_have_more = [number for number, floor in floors.items() if floor <= level]
    may_have_more.sort(key=lambda number: (quota[number] - pool.quota[number], -len(pool.held[number])))
    for number in may_have_more[:over]:
        quota[number] += 1
    if quota == pool.quota:
        return False
    for number in pool.members:
        loads[number] = floors[number] + quota[number]
    pool.quota = quota
    return True


def _level(floors: Sequence[int], amount: int) -> tuple[int, int]:
    """How high the amount stands when it is poured over these floors, and how much of it is above that."""
    low, high = min(floors), min(floors) + amount
    while low < high:
        middle = (low + high + 1) // 2
        if sum(middle - floor for floor in floors if floor < middle) <= amount:
            low = middle
        else:
            high = middle - 1
    return low, amount - sum(low - floor for floor in floors if floor < low)


def _hand_out(pool: _Pool, members: Sequence[Subscriber], topics: Topics) -> None:
    racks = {members[number].rack for number in pool.members} - {None}
    near = bool(racks) and any(topic.racks for topic in pool.topics)
    free, former = pool.free, dict[Partition, int]()
    for number, held in pool.held.items():
        held.sort()
        if near:
            strangers = [place for place in held if _is_elsewhere(place, members[number].rack, racks, topics)]
            former.update((place, number) for place in strangers)
            held[:] = [place for place in held if place not in former]
            free += strangers
        free += held[pool.quota[number] :]
        del held[pool.quota[number] :]
    room = {number: pool.quota[number] - len(held) for number, held in pool.held.items()}
    free.sort()
    if near:
        free = _hand_out_near(pool, members, topics, room, free)
        free = _give_back(pool, former, room, free)
    waiting = [number for number, count in room.items() if count]
    while free:
        for number in waiting[: len(free)]:
            pool.held[number].append(free.pop())
            room[number] -= 1
        waiting = [number for number in waiting if room[number]]


def _is_elsewhere(place: Partition, rack: str | None, racks: set[str | None], topics: Topics) -> bool:
    """Whether another member might be nearer to the partition."""
    found = topics[place[0]].racks_of(place[1])
    return rack not in found and not racks.isdisjoint(found)


def _hand_out_near(
    pool: _Pool, members: Sequence[Subscriber], topics: Topics, room: dict[int, int], free: Sequence[Partition]
) -> list[Partition]:
    """Give partitions to members in a rack of theirs, those with the most room first; the rest."""
    by_rack: defaultdict[str, list[int]] = defaultdict(list)
    for number in sorted((number for number in room if room[number]), key=lambda one: room[one]):
        by_rack[members[number].rack or ""].append(number)
    left = []
    for place in free:
        for rack in sorted(topics[place[0]].racks_of(place[1])):
            near = by_rack.get(rack)
            if near:
                number = near[-1]
                pool.held[number].append(place)
                room[number] -= 1
                if not room[number]:
                    near.pop()
                break
        else:
            left.append(place)
    return left


def _give_back(
    pool: _Pool, former: Mapping[Partition, int], room: dict[int, int], free: Sequence[Partition]
) -> list[Partition]:
    left = []
    for place in free:
        number = former.get(place)
        if number is not None and room[number]:
            pool.held[number].append(place)
            room[number] -= 1
        else:
            left.append(place)
    return left


# simple


def assign_simple(topics: Topics, subscribers: Sequence[Subscriber], ready: Assignment) -> dict[str, Assignment]:
    """Of the partitions of these topics, only those that are ready are given to anybody."""
    target: dict[str, Assignment] = {}
    for member_id, assignment in assign_uniform(topics, subscribers).items():
        found = {topic: indexes & ready.get(topic, frozenset()) for topic, indexes in assignment.items()}
        target[member_id] = {topic: indexes for topic, indexes in found.items() if indexes}
    members = Counter(place for assignment in target.values() for place in partitions_of(assignment))
    classes: defaultdict[frozenset[bytes], list[Subscriber]] = defaultdict(list)
    for member in sorted(subscribers, key=lambda one: one.order):
        classes[member.topics].append(member)
    for topic_ids, alike in classes.items():
        places = [place for topic in sorted(topic_ids & ready.keys()) for place in partitions_of({topic: ready[topic]})]
        idle = [member for member in alike if not target[member.member_id]]
        if places and idle:
            _share(places, len(alike), idle, members, target)
    return target


def _share(
    places: Sequence[Partition],
    count: int,
    idle: Sequence[Subscriber],
    members: Counter[Partition],
    target: dict[str, Assignment],
) -> None:
    """Give each of the idle, who are some of `count` members that subscribe to the same, one of these partitions: the
    one that it had, as far as that is in balance, else the one with the fewest members."""
    allowed, known = set(places), []
    least, more = divmod(count, len(places))
    for member in idle:
        before = next((place for place in partitions_of(member.target) if place in allowed), None)
        if before is not None and members[before] < least + (more > 0):
            more -= members[before] == least
            members[before] += 1
            target[member.member_id] = by_topic([before])
        else:
            known.append(member)
    fewest = [(members[place], place) for place in places]
    heapq.heapify(fewest)
    for member in known:
        _, place = fewest[0]
        members[place] += 1
        heapq.heapreplace(fewest, (members[place], place))
        target[member.member_id] = by_topic([place])


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_range}
"""By the names that members of the consumer protocol ask for; the first is taken where nobody does."""
