"""Members of share groups, on the scene of the consumer protocol, with states of share partitions in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from groups.consumers import ConsumerScene
from groups.scene import GROUP, Waiter
from headrace.errors import ErrorCode
from headrace.groups.assignors import Assignment, Partition, partitions_of
from headrace.groups.consumer_messages import JOINING, LEAVING, ConsumerReply, ShareHeartbeat
from headrace.groups.share_group import ShareGroup
from headrace.queues.messages import (
    NO_OFFSET,
    Persister,
    ReadDone,
    SharePartitionKey,
    ShareState,
    ShareSummary,
    SummaryDone,
)

Codes = dict[Partition, int]


@dataclass(slots=True)
class KeptStates:
    """A share coordinator that is asked for nothing but starts. Answers come at once, or with `held` when `answer` lets
    them; `refuses` is what it says of everything."""

    states: dict[SharePartitionKey, tuple[int, int]] = field(default_factory=dict)
    """(state epoch, start offset)"""
    held: bool = False
    refuses: int = ErrorCode.NONE
    asked: list[str] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def _do(self, what: str, act: Callable[[], int], done: Callable[[int], None]) -> None:
        self.asked.append(what)

        def answer() -> None:
            done(self.refuses or act())

        if self.held:
            self.waiting.append(answer)
        else:
            answer()

    def answer(self) -> None:
        self.held = False
        while self.waiting:
            self.waiting.pop(0)()

    def initialize(
        self, key: SharePartitionKey, state_epoch: int, start_offset: int, done: Callable[[int], None]
    ) -> None:
        def act() -> int:
            epoch, _ = self.states.get(key, (-1, NO_OFFSET))
            if state_epoch > epoch:
                self.states[key] = state_epoch, start_offset
            return ErrorCode.FENCED_STATE_EPOCH if state_epoch < epoch else ErrorCode.NONE

        self._do(f"initialize {key.partition}", act, done)

    def delete(self, key: SharePartitionKey, done: Callable[[int], None]) -> None:
        def act() -> int:
            self.states.pop(key, None)
            return ErrorCode.NONE

        self._do(f"delete {key.partition}", act, done)

    def summary(self, key: SharePartitionKey, _leader_epoch: int, done: SummaryDone) -> None:
        epoch, start_offset = self.states.get(key, (0, NO_OFFSET))
        found = ShareSummary(epoch, 0, start_offset, 0)
        self._do(f"summary {key.partition}", lambda: 0, lambda code: done(code, None if code else found))

    def read(self, _key: SharePartitionKey, _leader_epoch: int, _done: ReadDone) -> None:
        raise AssertionError("the coordinator of a group acquires nothing")

    def write(self, _key: SharePartitionKey, _state: ShareState, _done: Callable[[int], None]) -> None:
        raise AssertionError("the coordinator of a group acknowledges nothing")


@dataclass(slots=True)
class ShareScene(ConsumerScene):
    states: KeptStates = field(default_factory=KeptStates)

    def persister(self) -> Persister | None:
        return self.states

    def share_group(self, group_id: str = GROUP) -> ShareGroup:
        group = next(s.groups[group_id] for s in self.coordinator._shards.values() if group_id in s.groups)
        assert isinstance(group, ShareGroup)
        return group

    def sharer(self, *topics: str, name: str = "", group: str = GROUP) -> Sharer:
        sharer = Sharer(self, topics, name, group)
        sharer.beat()
        return sharer

    def set_starts(self, starts: dict[Partition, int], group: str = GROUP) -> tuple[int, Codes]:
        waiter: Waiter[tuple[int, Codes]] = Waiter()
        self.coordinator.share.set_starts(group, starts, lambda code, codes: waiter((code, dict(codes))))
        self.turn()
        return waiter.reply

    def delete_starts(self, *topics: bytes, group: str = GROUP) -> tuple[int, Codes]:
        waiter: Waiter[tuple[int, Codes]] = Waiter()
        self.coordinator.share.delete_starts(group, topics, lambda code, codes: waiter((code, dict(codes))))
        self.turn()
        return waiter.reply

    def delete_group(self, group: str = GROUP) -> Waiter[int]:
        waiter: Waiter[int] = Waiter()
        self.coordinator.delete(group, waiter)
        self.turn()
        return waiter


class Sharer:
    """A member of a share group."""

    def __init__(self, scene: ShareScene, topics: tuple[str, ...], name: str, group: str) -> None:
        self.scene = scene
        self.topics: tuple[str, ...] | None = topics
        self.member_id = name or scene.ids()
        self.group = group
        self.epoch = JOINING
        self.assigned: Assignment = {}
        self.reply = ConsumerReply(-1)

    @property
    def partitions(self) -> list[tuple[str, int]]:
        return sorted((topic.rstrip(b"\0").decode(), index) for topic, index in partitions_of(self.assigned))

    def send(self, epoch: int | None = None) -> Waiter[ConsumerReply]:
        waiter: Waiter[ConsumerReply] = Waiter()
        request = ShareHeartbeat(
            self.member_id,
            self.epoch if epoch is None else epoch,
            topics=self.topics,
            client_id="client",
            client_host="/127.0.0.1",
        )
        self.scene.coordinator.share.heartbeat(self.group, request, waiter)
        return waiter

    def beat(self) -> int:
        """One heartbeat, and its answer if it comes in this turn; else -1."""
        waiter = self.send()
        self.scene.turn()
        return self.hear(waiter) if waiter.answered else -1

    def hear(self, waiter: Waiter[ConsumerReply]) -> int:
        self.reply = waiter.reply
        if self.reply.error_code == ErrorCode.NONE:
            self.topics, self.epoch = None, self.reply.member_epoch
            if self.reply.assignment is not None:
                self.assigned = self.reply.assignment
        return self.reply.error_code

    def leave(self) -> int:
        waiter = self.send(LEAVING)
        self.scene.turn()
        return waiter.reply.error_code
