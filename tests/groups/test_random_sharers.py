"""Share groups under drawn histories: members that come, go and are silent, topics that grow, appends and share
coordinators that fail or are late, starts set and groups deleted from outside, and coordinators that take over."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from groups.consumers import topic_id
from groups.scene import GROUP, Waiter
from groups.sharers import Sharer, ShareScene
from headrace.errors import ErrorCode
from headrace.groups.assignors import Partition
from headrace.groups.consumer_messages import JOINING, ConsumerReply

STEPS = 120
MEMBERS = 5
TOPICS = ("t", "u")


@dataclass(slots=True)
class History:
    chance: random.Random
    scene: ShareScene = field(default_factory=ShareScene)
    members: list[Sharer] = field(default_factory=list)
    waiting: dict[Sharer, Waiter[ConsumerReply]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOPICS, 1))
    errands: list[Waiter[tuple[int, object]]] = field(default_factory=list)

    def run(self) -> None:
        for name, count in self.sizes.items():
            self.scene.topic(name, count)
        for number in range(MEMBERS):
            wanted = tuple(self.chance.sample(TOPICS, self.chance.randint(1, 2)))
            self.members.append(Sharer(self.scene, wanted, f"m{number}", GROUP))
        acts = [self.beat] * 3 + [self.wait] * 2 + [self.leave, self.grow, self.fail, self.mend, self.take_over]
        acts += [self.set_starts, self.delete_starts, self.delete_group]
        for _ in range(STEPS):
            self.chance.choice(acts)()
            if self.chance.random() < 0.7:
                self.scene.turn()
            self.hear()
            self.check()
        self.come_to_rest()

    def member(self) -> Sharer:
        return self.chance.choice(self.members)

    def beat(self) -> None:
        member = self.member()
        if member not in self.waiting:
            if member.epoch == JOINING:
                member.topics = member.topics or TOPICS[:1]
            self.waiting[member] = member.send()

    def leave(self) -> None:
        member = self.member()
        if member not in self.waiting and member.epoch != JOINING:
            member.send(-1)
            member.epoch = JOINING

    def hear(self) -> None:
        for member, waiter in list(self.waiting.items()):
            if waiter.answered:
                del self.waiting[member]
                if member.hear(waiter) in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_MEMBER_EPOCH):
                    member.epoch, member.assigned = JOINING, {}

    def wait(self) -> None:
        self.scene.advance(self.chance.choice((0.1, 0.6, 4, 20)))

    def grow(self) -> None:
        name = self.chance.choice(TOPICS)
        self.sizes[name] += 1
        self.scene.topic(name, self.sizes[name])

    def fail(self) -> None:
        what = self.chance.randrange(3)
        if what == 0:
            self.scene.held = True
        elif what == 1:
            self.scene.states.held = True
        else:
            self.scene.states.refuses = ErrorCode.COORDINATOR_NOT_AVAILABLE

    def mend(self) -> None:
        self.scene.states.refuses = ErrorCode.NONE
        self.scene.held = False
        self.scene.acknowledge(self.chance.choice((ErrorCode.NONE, ErrorCode.COORDINATOR_NOT_AVAILABLE)))
        self.scene.states.answer()

    def take_over(self) -> None:
        """What the former coordinator has asked for takes effect, or not; nobody hears of it there."""
        self.scene.acknowledge(self.chance.choice((ErrorCode.NONE, ErrorCode.NOT_COORDINATOR)))
        late = self.scene.states.waiting
        self.scene.states.waiting = []
        self.scene.take_over()
        for answer in late:
            if self.chance.random() < 0.5:
                answer()

    def errand(self) -> Waiter[tuple[int, object]]:
        waiter: Waiter[tuple[int, object]] = Waiter()
        self.errands.append(waiter)
        return waiter

    def set_starts(self) -> None:
        waiter = self.errand()
        starts = {(topic_id("t"), 0): self.chance.randint(0, 9)}
        self.scene.coordinator.share.set_starts(GROUP, starts, lambda code, codes: waiter((code, codes)))

    def delete_starts(self) -> None:
        waiter = self.errand()
        topics = [topic_id(self.chance.choice(TOPICS))]
        self.scene.coordinator.share.delete_starts(GROUP, topics, lambda code, codes: waiter((code, codes)))

    def delete_group(self) -> None:
        waiter = self.errand()
        self.scene.coordinator.delete(GROUP, lambda code: waiter((code, None)))

    def places(self) -> set[Partition]:
        return {(topic_id(name), index) for name, count in self.sizes.items() for index in range(count)}

    def check(self) -> None:
        """Nobody is told a partition that the group has not initialized, and every state that is kept is known."""
        groups = self.scene.coordinator._shards[0].groups
        if GROUP not in groups or groups[GROUP].is_dead:
            return
        group = self.scene.share_group()
        assert not group.initialized & group.initializing
        for target in group.target.values():
            assert {(topic, index) for topic, indexes in target.items() for index in indexes} <= self.places()
        kept = {(key.topic_id, key.partition) for key in self.scene.states.states}
        assert kept <= set(group.states()), "a state that nobody would delete"

    def come_to_rest(self) -> None:
        self.mend()
        self.scene.acknowledge()
        for _ in range(12):
            for member in self.members:
                if member not in self.waiting:
                    member.topics = (member.topics or TOPICS) if member.epoch == JOINING else None
                    self.waiting[member] = member.send()
            self.scene.advance(2)
            self.hear()
        group = self.scene.share_group()
        assert sorted(group.members) == sorted(member.member_id for member in self.members)
        assert group.initializing.isdisjoint(group._subscribed()), "nobody asks for the others any more"
        wanted = {name for member in group.members.values() for name in member.subscription.topics}
        given = {place for member in self.members for place in member.partitions}
        assert given == {(name, index) for name in wanted for index in range(self.sizes[name])}
        assert all(member.partitions for member in self.members)
        for member in self.members:
            member.leave()
        deleted = self.scene.delete_group()
        assert deleted.reply == ErrorCode.NONE
        assert self.scene.states.states == {}
        assert self.scene.coordinator.list_groups().groups == ()


@pytest.mark.parametrize("round_", range(40))
def test_share_groups_lose_no_partition_and_leave_no_state_behind(seed: int, round_: int) -> None:
    History(random.Random(f"{seed} {round_}")).run()


def test_a_late_initialization_replaces_nothing(seed: int) -> None:
    scene = ShareScene()
    scene.topic("t", 1)
    scene.states.held = True
    member = scene.sharer("t")
    (late,) = scene.states.waiting
    scene.states = replace(scene.states, held=False, waiting=[])
    scene.take_over()
    scene.turn()
    waiter = member.send()
    scene.turn()
    assert member.hear(waiter) in (ErrorCode.NONE, ErrorCode.UNKNOWN_MEMBER_ID)
    member.leave()
    assert scene.set_starts({(topic_id("t"), 0): seed % 1000})[0] == ErrorCode.NONE
    kept = dict(scene.states.states)
    late()
    assert scene.states.states == kept
