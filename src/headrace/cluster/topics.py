"""Topic tasks: create, delete, enlarge, as plans on the image and as transactions on coordination.

A topic with at most STEP_PARTITIONS partitions appears in one transaction. A larger one first claims its name with
the state "creating", writes its partitions in parts, and turns "live" at the end; `finish_interrupted` removes what a
crash left half made. Deletion is always one transaction, so there is no half-deleted topic; it leaves the key
`deleted/<topic id>`, and only that makes brokers delete logs (cluster.deletions). Enlarging raises the count last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Changes, Plan, Step, unchanged
from headrace.cluster.image import (
    CREATING,
    Deletion,
    Image,
    PartitionState,
    Topic,
    encode_deletion,
    encode_partition,
    encode_topic,
)
from headrace.cluster.names import (
    COORDINATORS_TOPICS,
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    check_no_collision,
    check_not_reserved,
)
from headrace.cluster.view import ClusterView
from headrace.errors import (
    InvalidAssignment,
    InvalidPartitions,
    InvalidReplication,
    InvalidRequest,
    PolicyViolation,
    TopicExists,
    UnknownPartition,
)
from headrace.placement.balance import Counts
from headrace.placement.internal_topics import INTERNAL_REPLICAS
from headrace.placement.moves import goal
from headrace.placement.ring import Ring
from headrace.placement.spread import RING, SPREAD, open_sites, placement_of, spread
from headrace.ports.coordination import Delete, Put
from headrace.settings.topic_name import check_topic_name
from headrace.settings.values import TOPIC_BY_NAME, BrokerSettings, check_topic_overrides, plain_texts

STEP_PARTITIONS: Final = 100
"""Partitions written in one transaction."""
TOPIC_PARTITIONS_MAX: Final = 10_000
DEFAULT: Final = -1
"""A count that the broker chooses."""
OFFSETS_OVERRIDES: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(100 << 20),
    "max.message.bytes": str(32 << 20),
}
TRANSACTIONS_OVERRIDES: Final = OFFSETS_OVERRIDES
SHARE_STATE_OVERRIDES: Final = OFFSETS_OVERRIDES

Assignments = Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class TopicLimits:
    """What the operator's settings say about new topics."""

    num_partitions: int = 1
    replication_factor: int = 1
    partitions_max: int = 10_000
    """Most partitions per live broker."""
    placement: str = SPREAD
    """Of topics that name none."""


def limits_from(settings: BrokerSettings) -> TopicLimits:
    return TopicLimits(
        settings["num.partitions"],
        settings["default.replication.factor"],
        settings["partitions.max"],
        settings["log.placement"],
    )


@dataclass(frozen=True, slots=True)
class CreateTopic:
    name: str
    partitions: int = DEFAULT
    replication_factor: int = DEFAULT
    overrides: Mapping[str, str] = field(default_factory=dict)
    assignments: Assignments = field(default_factory=dict)
    internal: bool = False
    """Made by the broker itself: a reserved name is allowed."""


@dataclass(frozen=True, slots=True)
class EnlargeTopic:
    name: str
    partitions: int
    """The new total."""
    assignments: Sequence[Sequence[int]] | None = None
    """Replicas of each added partition."""
    internal: bool = False


def draft_topic(image: Image, request: CreateTopic, limits: TopicLimits, topic_id: bytes) -> Topic:
    """The topic as it would be created, or the error that refuses it."""
    check_topic_name(request.name)
    if not request.internal:
        check_not_reserved(request.name)
    if request.name in image.topics:
        raise TopicExists(f"topic {request.name!r} is there already")
    if request.name in image.unfinished:
        raise TopicExists(f"topic {request.name!r} is being created")
    if request.name in image.keyless:
        raise TopicExists(
            f"topic {request.name!r} has lost its key {keys.topic_key(image.prefix, request.name)}, and those of its "
            "partitions are there: restore that key, or delete the topic first"
        )
    check_no_collision(request.name, image.topics)
    check_topic_overrides(request.overrides)
    replicas = _replicas_of_new(image, request, limits)
    _check_room(image, len(replicas), limits)
    partitions = tuple(_fresh(image, index, brokers) for index, brokers in enumerate(replicas))
    return Topic(request.name, topic_id, partitions, plain_texts(request.overrides, TOPIC_BY_NAME), request.internal)


def plan_create(image: Image, request: CreateTopic, limits: TopicLimits, topic_id: bytes) -> Plan:
    topic = draft_topic(image, request, limits, topic_id)
    key = keys.topic_key(image.prefix, topic.name)
    count = len(topic.partitions)
    live = Put(key, encode_topic(topic, count))
    puts = _partition_puts(image.prefix, topic, topic.partitions)
    if count <= STEP_PARTITIONS:
        return Plan((Step((unchanged(key, 0),), (live, *puts)),))
    claim = Put(key, encode_topic(replace(topic, state=CREATING), count))
    parts = [Step((), tuple(part)) for part in _parts(puts)]
    return Plan((Step((unchanged(key, 0),), (claim,)), *parts, Step((), (live,))), claim=key)


def plan_delete(image: Image, name: str, now_ms: int, topic_id: bytes = b"", *, internal: bool = False) -> Plan:
    """`topic_id`: if it is given, no other topic of that name is deleted."""
    if not internal:
        check_not_reserved(name)
    topic = image.keyless.get(name) or _known(image, name)
    if topic_id and topic.id != topic_id:
        raise UnknownPartition(f"the topic {name!r} with the id {topic_id.hex()} is gone; another has its name")
    brokers = {broker for state in topic.partitions for broker in state.replicas}
    if topic.missing or name in image.keyless:  # nobody can tell who holds what has no key
        brokers |= set(image.brokers)
    told = encode_deletion(Deletion(name, tuple(sorted(brokers)), now_ms))
    return _removal(image, topic, Put(keys.deleted_key(image.prefix, topic.id), told))


def plan_enlarge(image: Image, request: EnlargeTopic, limits: TopicLimits) -> Plan:
    if not request.internal:
        check_not_reserved(request.name)
    topic = _known(image, request.name)
    present = len(topic.partitions)
    if request.partitions <= present:
        raise InvalidPartitions(
            f"topic {topic.name!r} has {present} partitions: the new total must be larger, not {request.partitions}"
        )
    if request.partitions > TOPIC_PARTITIONS_MAX:
        raise InvalidPartitions(
            f"{request.partitions} partitions asked for; a topic has at most {TOPIC_PARTITIONS_MAX}"
        )
    _check_room(image, request.partitions - present, limits)
    fresh = [
        _fresh(image, present + n, brokers)
        for n, brokers in enumerate(_replicas_of_added(image, topic, request, limits))
    ]
    key = keys.topic_key(image.prefix, topic.name)
    same = (unchanged(key, topic.revision),)
    *earlier, last = _parts(_partition_puts(image.prefix, topic, fresh))
    raised = Put(key, encode_topic(topic, request.partitions))
    return Plan((*(Step(same, tuple(part)) for part in earlier), Step(same, (*last, raised))))


def plan_remove_unfinished(image: Image, name: str) -> Plan:
    topic = image.unfinished.get(name)
    return Plan(()) if topic is None else _removal(image, topic)


def _known(image: Image, name: str) -> Topic:
    topic = image.topics.get(name)
    if topic is None:
        raise UnknownPartition(f"there is no topic {name!r}")
    return topic


def _removal(image: Image, topic: Topic, *told: Put) -> Plan:
    key = keys.topic_key(image.prefix, topic.name)
    below = [Delete(prefix, prefix=True) for prefix in keys.prefixes_of(image.prefix, topic.name)]
    return Plan((Step((unchanged(key, topic.revision),), (Delete(key), *below, *told)),))


def _replicas_of_new(image: Image, request: CreateTopic, limits: TopicLimits) -> tuple[tuple[int, ...], ...]:
    if request.assignments:
        if request.partitions != DEFAULT or request.replication_factor != DEFAULT:
            raise InvalidRequest("a topic is created with counts or with assignments, not with both")
        if sorted(request.assignments) != list(range(len(request.assignments))):
            raise InvalidAssignment("assignments must name every partition from 0 on, without a gap")
        ordered = [tuple(request.assignments[index]) for index in range(len(request.assignments))]
        return _checked(image, ordered, len(ordered[0]))
    partitions = limits.num_partitions if request.partitions == DEFAULT else request.partitions
    replicas = limits.replication_factor if request.replication_factor == DEFAULT else request.replication_factor
    if not 1 <= partitions <= TOPIC_PARTITIONS_MAX:
        raise InvalidPartitions(f"{partitions} partitions asked for; a topic has 1 to {TOPIC_PARTITIONS_MAX}")
    if replicas < 1:
        raise InvalidReplication(f"{replicas} replicas asked for; a partition has at least 1")
    placement = request.overrides.get("placement", limits.placement)
    return _placed(image, request.name, range(partitions), replicas, placement)


def _replicas_of_added(
    image: Image, topic: Topic, request: EnlargeTopic, limits: TopicLimits
) -> tuple[tuple[int, ...], ...]:
    added = request.partitions - len(topic.partitions)
    replicas = max(len(state.replicas) for state in topic.partitions)
    if request.assignments is not None:
        if len(request.assignments) != added:
            raise InvalidAssignment(f"{added} partitions are added, and {len(request.assignments)} have an assignment")
        return _checked(image, [tuple(brokers) for brokers in request.assignments], replicas)
    numbers = range(len(topic.partitions), request.partitions)
    return _placed(image, topic.name, numbers, replicas, placement_of(topic, limits.placement))


def _placed(image: Image, topic: str, numbers: range, replicas: int, placement: str) -> tuple[tuple[int, ...], ...]:
    sites = open_sites(image)
    if placement == RING:
        ring = Ring(sites)
        return tuple(ring.replicas_of(topic, number, replicas) for number in numbers)
    counts = Counts([site.broker for site in sites])
    for name, other in image.topics.items():
        counts.add_fixed(name, [broker for state in other.partitions for broker in goal(state)])
    return spread(len(numbers), replicas, sites, image.partition_count(), counts, topic)


def _checked(image: Image, assignments: Sequence[tuple[int, ...]], replicas: int) -> tuple[tuple[int, ...], ...]:
    for brokers in assignments:
        if not brokers or len(brokers) != replicas:
            raise InvalidAssignment(f"every partition needs the same number of replicas, at least one: {list(brokers)}")
        if len(set(brokers)) != len(brokers):
            raise InvalidAssignment(f"a broker holds one replica of a partition: {list(brokers)}")
        unknown = [broker for broker in brokers if broker not in image.brokers]
        if unknown:
            raise InvalidAssignment(f"no live broker has the number {unknown[0]}; live are {sorted(image.brokers)}")
    return tuple(assignments)


def _check_room(image: Image, added: int, limits: TopicLimits) -> None:
    most = limits.partitions_max * len(image.brokers)
    if image.partition_count() + added > most:
        raise PolicyViolation(
            f"{added} more partitions would pass the limit of {most} "
            f"(setting partitions.max, {limits.partitions_max} a broker): delete topics or raise it"
        )


def _fresh(image: Image, index: int, replicas: tuple[int, ...]) -> PartitionState:
    incarnations = {broker: image.brokers[broker].incarnation for broker in replicas}
    return PartitionState(index, replicas[0], 0, replicas, replicas, incarnations=incarnations)


def _partition_puts(prefix: str, topic: Topic, partitions: Iterable[PartitionState]) -> list[Put]:
    return [
        Put(keys.partition_key(prefix, topic.name, state.index), encode_partition(topic.id, state))
        for state in partitions
    ]


def _parts(puts: Sequence[Put]) -> list[Sequence[Put]]:
    return [puts[first : first + STEP_PARTITIONS] for first in range(0, len(puts), STEP_PARTITIONS)]


class Topics:
    """Carries topic tasks out. What was answered is in `view.image` of this node; `validate_only` changes nothing."""

    def __init__(
        self,
        changes: Changes,
        limits: Callable[[], TopicLimits],
        draw_id: Callable[[], bytes],
        wall_ms: Callable[[], int],
    ) -> None:
        self._changes = changes
        self._limits = limits
        self.draw_id = draw_id
        self._wall_ms = wall_ms

    async def create(self, request: CreateTopic, *, validate_only: bool = False) -> Topic:
        topic_id = self.draw_id()
        if validate_only:
            return draft_topic(self._changes.view.image, request, self._limits(), topic_id)
        image = await self._changes.run(lambda image: plan_create(image, request, self._limits(), topic_id))
        return _known(image, request.name)

    async def delete(self, name: str) -> None:
        """The topic that has the name now: one that is made in its place meanwhile stays."""
        image = self._changes.view.image
        topic = image.keyless.get(name) or image.topics.get(name)
        topic_id = b"" if topic is None else topic.id
        await self._changes.run(lambda image: plan_delete(image, name, self._wall_ms(), topic_id))

    async def enlarge(self, request: EnlargeTopic, *, validate_only: bool = False) -> None:
        if validate_only:
            plan_enlarge(self._changes.view.image, request, self._limits())
        else:
            await self._changes.run(lambda image: plan_enlarge(image, request, self._limits()))

    async def finish_interrupted(self) -> None:
        """Remove topics whose creation a crash cut short: nobody was told that they exist. Run before topics are
        served.
        """
        for name in self._changes.view.image.unfinished:
            await self._changes.run(partial(plan_remove_unfinished, name=name))


class TopicCreation:
    """Creation of topics that somebody named and that are not there: one task per name, however many ask."""

    def __init__(self, view: ClusterView, topics: Topics, settings: Callable[[], BrokerSettings]) -> None:
        self._view = view
        self._topics = topics
        self._settings = settings
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, name: str) -> Topic:
        """The topic of that name; created with the defaults if it may be."""
        found = self._view.image.topics.get(name)
        if found is not None:
            return found
        if name in COORDINATORS_TOPICS:
            request = self._internal(name)
        elif not self._settings()["auto.create.topics.enable"]:
            raise UnknownPartition(f"there is no topic {name!r}, and auto.create.topics.enable is off")
        else:
            request = CreateTopic(name)
        return await self.create(request)

    async def create(self, request: CreateTopic) -> Topic:
        """The topic of that name; created so, whatever auto.create.topics.enable says, unless it is there."""
        name = request.name
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._create_once(request))
            self._under_way[name] = task
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        await asyncio.shield(task)
        found = self._view.image.topics.get(name)
        if found is None:
            raise UnknownPartition(f"there is no topic {name!r}")
        return found

    def _internal(self, name: str) -> CreateTopic:
        """Where nobody says how many replicas, it begins with the brokers there are and grows
        (placement.internal_topics)."""
        settings = self._settings()
        there = max(1, len(open_sites(self._view.image)))
        replicas = settings["offsets.topic.replication.factor"] or min(INTERNAL_REPLICAS, there)
        if name == OFFSETS_TOPIC:
            return CreateTopic(name, settings["offsets.topic.partitions"], replicas, OFFSETS_OVERRIDES, internal=True)
        if name == SHARE_STATE_TOPIC:
            return CreateTopic(
                name,
                settings["share.coordinator.state.topic.num.partitions"],
                settings["share.coordinator.state.topic.replication.factor"] or replicas,
                SHARE_STATE_OVERRIDES,
                internal=True,
            )
        return CreateTopic(
            name,
            settings["transaction.state.log.num.partitions"],
            settings["transaction.state.log.replication.factor"] or replicas,
            TRANSACTIONS_OVERRIDES,
            internal=True,
        )

    async def _create_once(self, request: CreateTopic) -> None:
        try:
            await self._topics.create(request)
        except TopicExists:
            await self._view.wait_for(lambda image: request.name in image.topics, 5.0)
