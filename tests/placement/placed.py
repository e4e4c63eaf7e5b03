"""Images of clusters with a given placement, for tests of what is planned from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from headrace.cluster.controller_state import Controls
from headrace.cluster.image import NO_LEADER, Broker, Endpoint, Image, PartitionState, Topic
from headrace.placement.plans import Reassignment

Placement = Mapping[str, Sequence[Sequence[int]]]


def image_of(
    brokers: Iterable[int],
    topics: Placement,
    *,
    racks: Mapping[int, str] | None = None,
    hosts: Mapping[int, str] | None = None,
    ring: Collection[str] = (),
    draining: Collection[int] = (),
) -> Image:
    """Replicas on brokers that are not among `brokers` are down: they neither lead nor are in sync, unless they are
    the only ones.
    """
    registered = {
        broker: Broker(
            broker,
            {"inside": Endpoint((hosts or {}).get(broker, "one-host"), 9092)},
            f"i{broker}",
            0,
            (racks or {}).get(broker, ""),
        )
        for broker in brokers
    }
    placed = {
        name: Topic(
            name,
            name.encode().ljust(16, b"\0"),
            tuple(_state(index, tuple(replicas), registered) for index, replicas in enumerate(partitions)),
            {"placement": "ring"} if name in ring else {},
        )
        for name, partitions in topics.items()
    }
    return Image("/headrace/c/", brokers=registered, topics=placed, controls=Controls(draining=frozenset(draining)))


def _state(index: int, replicas: tuple[int, ...], live: Collection[int]) -> PartitionState:
    isr = tuple(broker for broker in replicas if broker in live)
    return PartitionState(index, isr[0] if isr else NO_LEADER, 0, isr or replicas[:1], replicas)


def carried_out(image: Image, plan: Reassignment) -> Image:
    """The image when every move of the plan has ended."""
    topics = dict(image.topics)
    for move in plan.moves:
        topic = topics[move.topic]
        states = list(topic.partitions)
        states[move.partition] = _state(move.partition, move.after, image.brokers)
        topics[move.topic] = replace(topic, partitions=tuple(states))
    return replace(image, topics=topics)


def replicas_in(image: Image) -> dict[str, list[tuple[int, ...]]]:
    return {name: [state.replicas for state in topic.partitions] for name, topic in image.topics.items()}
