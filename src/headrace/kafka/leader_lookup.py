"""Where a partition is led, as the image says, and what a client hears that asked the wrong broker.

A partition that the cluster has and this broker does not lead is NOT_LEADER_OR_FOLLOWER, with the leader where the
version of the answer has room for it (KIP-951); one that the cluster does not have is UNKNOWN_TOPIC_OR_PARTITION.
A topic with `follower.reads` names a replica that is alive to its readers while it has no leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.cluster.image import NO_LEADER, Image, PartitionState, Topic
from headrace.errors import ErrorCode, HeadraceError, NotLeader, UnknownPartition
from headrace.kafka.services import Services
from headrace.partitions.partition import Partition

FOLLOWER_READS: Final = "follower.reads"

Leader = tuple[int, int]
"""(broker, leader epoch)"""
NodeEndpoint = tuple[int, str, int, str | None]
"""(broker, host, port, rack)"""


def led_partition(services: Services, topic: str, index: int) -> Partition:
    """The partition, which this broker leads."""
    partition = services.partitions.find(topic, index)
    if partition is None:
        raise not_led(services.view.image, topic, index)
    return partition


def led_or_stand_in(services: Services, topic: str, index: int) -> Partition:
    """As `led_partition`; without a leader, the replica here, if the topic lets followers stand in."""
    partition = services.partitions.find(topic, index)
    if partition is not None:
        return partition
    state = services.view.image.partition(topic, index)
    stand_in = readable(services, topic, index) if state is not None and state.leader == NO_LEADER else None
    if stand_in is None:
        raise not_led(services.view.image, topic, index)
    return stand_in


def not_led(image: Image, topic: str, index: int) -> HeadraceError:
    """Why this broker does not serve the partition as its leader."""
    state = image.partition(topic, index)
    if state is None and _is_missing(image, topic, index):
        return NotLeader(f"the key of {topic}-{index} is missing in coordination: it is served when that is back")
    if state is None:
        return UnknownPartition(f"there is no partition {topic}-{index}")
    if state.leader == NO_LEADER:
        return NotLeader(f"{topic}-{index} has no leader now; try again")
    return NotLeader(f"{topic}-{index} is led by broker {state.leader}; ask there")


def not_led_code(image: Image, topic: str | None, index: int) -> int:
    """As `not_led`, the code alone."""
    known = topic is not None and (image.partition(topic, index) is not None or _is_missing(image, topic, index))
    return ErrorCode.NOT_LEADER_OR_FOLLOWER if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _is_missing(image: Image, topic: str, index: int) -> bool:
    """Whether the partition belongs to its topic, and nothing more is known of it now."""
    found = image.topics.get(topic)
    return found is not None and index in found.missing


def leader_elsewhere(services: Services, topic: str | None, index: int) -> Leader | None:
    """The live leader of the partition, unless that is this broker itself, which then is not ready for it."""
    image = services.view.image
    state = image.partition(topic, index) if topic is not None else None
    if state is None or state.leader == services.broker_id or state.leader not in image.brokers:
        return None
    return state.leader, state.leader_epoch


def endpoints(image: Image, listener: str, brokers: Iterable[int]) -> list[NodeEndpoint]:
    """How clients of that listener reach the brokers."""
    found: list[NodeEndpoint] = []
    for broker in sorted(set(brokers)):
        known = image.brokers.get(broker)
        end = known.listeners.get(listener) if known is not None else None
        if known is not None and end is not None:
            found.append((broker, end.host, end.port, known.rack or None))
    return found


def advertised_leader(services: Services, topic: Topic, state: PartitionState, listener: str) -> int:
    """The broker that clients of the listener are sent to, NO_LEADER while there is none."""
    brokers = services.view.image.brokers
    leader = state.leader
    if leader in brokers:
        return leader if listener in brokers[leader].listeners else NO_LEADER
    if leader == NO_LEADER and follower_reads(services, topic):
        return next(
            (one for one in stand_ins(state) if one in brokers and listener in brokers[one].listeners), NO_LEADER
        )
    return NO_LEADER


def stand_ins(state: PartitionState) -> list[int]:
    """The replicas in the order in which readers are sent to them: members of the in-sync set know the most."""
    return sorted(state.replicas, key=lambda broker: broker not in state.isr)


def follower_reads(services: Services, topic: Topic) -> bool:
    """Whether followers serve the topic's readers while it has no leader."""
    given = topic.overrides.get(FOLLOWER_READS)
    return given.lower() == "true" if given is not None else services.effective_settings()["log.follower.reads"]


def readable(services: Services, topic: str, index: int) -> Partition | None:
    """The replica here from which consumers may read below its watermark, led here or not.

    While the partition has a leader any replica will do (KIP-392); without one the topic has to allow it.
    """
    partition = services.partitions.find_replica(topic, index)
    if partition is None or partition.leading:
        return partition
    known = services.view.image.topics.get(topic)
    if known is None or index >= len(known.partitions):
        return None
    if known.partitions[index].leader != NO_LEADER or follower_reads(services, known):
        return partition
    return None


def preferred_replica(services: Services, partition: Partition, offset: int, rack: str) -> int | None:
    """The follower that a consumer in this rack should read from instead of this leader, if there is one (KIP-392).

    It is in the in-sync set and holds everything below the offset, so it has, or will be told in a moment, a watermark
    at which the consumer can go on.
    """
    core, brokers = partition.core, services.view.image.brokers
    if core is None or rack == services.settings["rack"] or offset > partition.high_watermark:
        return None
    best, furthest = None, -1
    for broker, follower in core.followers.items():
        if not core.is_in_sync(broker, follower.incarnation) or offset > follower.written:
            continue
        known = brokers.get(broker)
        if known is not None and known.rack == rack and follower.written > furthest:
            best, furthest = broker, follower.written
    return best
