"""A coordinator as in `scene`, with topics and members of the consumer protocol that act one heartbeat at a time."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from groups.scene import GROUP, Scene, Waiter
from headrace.cluster.image import Broker, Image, PartitionState, Topic
from headrace.errors import ErrorCode
from headrace.groups.assignors import Assignment, Partition, partitions_of
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.consumer_messages import (
    JOINING,
    LEAVING,
    LEAVING_STATIC,
    ConsumerHeartbeat,
    ConsumerReply,
    DescribedConsumerGroup,
)
from headrace.groups.coordinator import GroupCoordinator
from headrace.queues.messages import Persister

REBALANCE_MS = 30_000


def topic_id(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def subscription(*topics: str, owned: dict[str, set[int]] | None = None) -> bytes:
    """A classic consumer's, of version 1."""
    parts = [struct.pack(">hi", 1, len(topics))]
    parts += [struct.pack(">h", len(topic)) + topic.encode() for topic in topics]
    parts.append(struct.pack(">ii", -1, len(owned or {})))
    for name, indexes in (owned or {}).items():
        parts.append(struct.pack(">h", len(name)) + name.encode())
        parts.append(struct.pack(f">i{len(indexes)}i", len(indexes), *indexes))
    return b"".join(parts)


@dataclass(slots=True)
class ConsumerScene(Scene):
    image: Image = field(default_factory=lambda: Image("/"))
    own_settings: dict[str, str] = field(default_factory=dict)

    def _coordinator(self) -> GroupCoordinator:
        coordinator = GroupCoordinator(
            self.clock,
            self.append,
            self.partitions,
            self.ids,
            self.limits,
            self.topic_id,
            group_settings=lambda _g: self.own_settings,
            persister=self.persister(),
        )
        coordinator.catalog.follow(Image("/"), self.image)
        return coordinator

    def persister(self) -> Persister | None:
        """Who keeps the states of share partitions."""
        return None

    def change(self, image: Image) -> None:
        before, self.image = self.image, image
        self.coordinator.topics_changed(self.coordinator.catalog.follow(before, image))
        self.turn()

    def topic(self, name: str, partitions: int, *, brokers: int = 0, given_id: bytes = b"") -> None:
        """Make it, or give it more partitions. Partition n is on broker n modulo the brokers."""
        states = tuple(
            PartitionState(n, 0, 0, (), (n % brokers,) if brokers else (0,)) for n in range(partitions)
        )  # fmt: skip
        topic = Topic(name, given_id or topic_id(name), states, internal=name.startswith("__"))
        self.change(_with_topics(self.image, {**self.image.topics, name: topic}))

    def delete(self, name: str) -> None:
        self.change(_with_topics(self.image, {n: topic for n, topic in self.image.topics.items() if n != name}))

    def brokers(self, *racks: str) -> None:
        found = {number: Broker(number, {}, "i", 0, rack) for number, rack in enumerate(racks)}
        topics = self.image.topics
        self.change(Image("/", version=self.image.version + 1, brokers=found, topics=topics))

    def turn(self) -> None:
        """The end of the turn: what waits for it goes on."""
        self.clock.run_soon()

    def consumers(self, group_id: str = GROUP) -> ConsumerGroup:
        group = next(s.groups[group_id] for s in self.coordinator._shards.values() if group_id in s.groups)
        assert isinstance(group, ConsumerGroup)
        return group

    def heartbeat(self, request: ConsumerHeartbeat, group_id: str = GROUP) -> Waiter[ConsumerReply]:
        waiter: Waiter[ConsumerReply] = Waiter()
        self.coordinator.consumer_heartbeat(group_id, request, waiter)
        return waiter

    def described(self, group_id: str = GROUP) -> DescribedConsumerGroup:
        return self.coordinator.describe_consumer(group_id)

    def member(self, *topics: str, **told: Any) -> Consumer:
        consumer = Consumer(self, topics, **told)
        consumer.beat()
        return consumer


def _with_topics(image: Image, topics: dict[str, Topic]) -> Image:
    by_id = {topic.id: topic for topic in topics.values()}
    return Image("/", version=image.version + 1, brokers=image.brokers, topics=topics, topics_by_id=by_id)


class Consumer:
    """A member that behaves: it gives up at once what it is not assigned any more, and says so in its next beat."""

    def __init__(
        self,
        scene: ConsumerScene,
        topics: tuple[str, ...] = (),
        *,
        name: str = "",
        instance: str | None = None,
        pattern: str | None = None,
        assignor: str | None = None,
        rack: str | None = None,
        group: str = GROUP,
    ) -> None:
        self.scene = scene
        self.topics = topics
        self.instance = instance
        self.pattern = pattern
        self.assignor = assignor
        self.rack = rack
        self.group = group
        self.member_id = name or scene.ids()
        self.epoch = JOINING
        self.owned: Assignment = {}
        self.waiting: Waiter[ConsumerReply] | None = None
        self.is_whole = True
        self._asked = (topics, pattern)
        """What it wanted when it sent its last heartbeat: that is what an answer is to."""

    @property
    def partitions(self) -> list[tuple[str, int]]:
        """What it owns, by name."""
        return sorted((topic.rstrip(b"\0").decode(), index) for topic, index in partitions_of(self.owned))

    @property
    def places(self) -> set[Partition]:
        return set(partitions_of(self.owned))

    def request(self) -> ConsumerHeartbeat:
        if not self.is_whole:
            return ConsumerHeartbeat(self.member_id, self.epoch, self.instance, owned=self.owned)
        return ConsumerHeartbeat(
            self.member_id,
            self.epoch,
            self.instance,
            self.rack,
            REBALANCE_MS,
            self.topics,
            self.pattern,
            self.assignor,
            self.owned,
            "client",
            "/127.0.0.1",
        )

    def send(self) -> Waiter[ConsumerReply]:
        self._asked = (self.topics, self.pattern)
        self.waiting = self.scene.heartbeat(self.request(), self.group)
        return self.waiting

    def hear(self) -> int | None:
        """Take the answer, if there is one; its code."""
        if self.waiting is None or not self.waiting.answered:
            return None
        reply, self.waiting = self.waiting.reply, None
        self.take(reply)
        return reply.error_code

    def take(self, reply: ConsumerReply) -> None:
        if reply.error_code in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
            self.epoch, self.owned, self.is_whole = JOINING, {}, True
        elif reply.error_code != ErrorCode.NONE:
            self.is_whole = True
        else:
            self.is_whole = self._asked != (self.topics, self.pattern)
            self.epoch = reply.member_epoch
            if reply.assignment is not None:
                self.owned = reply.assignment

    def beat(self) -> int:
        """One heartbeat and its answer, at the end of the turn."""
        self.send()
        self.scene.turn()
        code = self.hear()
        assert code is not None, "not answered"
        return code

    def leave(self, epoch: int = LEAVING) -> ConsumerReply:
        waiter = self.scene.heartbeat(ConsumerHeartbeat(self.member_id, epoch, self.instance), self.group)
        self.scene.turn()
        self.epoch, self.owned, self.is_whole = JOINING, {}, True
        return waiter.reply

    def rest(self) -> ConsumerReply:
        """Leave as a static member that will be back."""
        return self.leave(LEAVING_STATIC)


def settle(*consumers: Consumer, rounds: int = 6) -> None:
    """Heartbeats of all until the group is stable."""
    for _ in range(rounds):
        for consumer in consumers:
            consumer.beat()
