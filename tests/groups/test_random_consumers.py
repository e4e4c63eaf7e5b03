"""Many members of both protocols that join, beat, leave, die and come back, while topics change and the log is slow or
fails, and another coordinator takes over.

Judged after every step: no partition has two owners among the members that the group knows. At the end, when all live
members beat on, the group is stable, every partition has one owner, and the next coordinator has the same group.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from groups.consumers import Consumer, ConsumerScene
from groups.scene import GROUP, LIMITS
from groups.test_group_migration import Classic
from headrace.errors import ErrorCode
from headrace.groups.consumer_group import ConsumerGroup
from headrace.groups.limits import ConsumerLimits
from proving import proves

STEPS = 400
MEMBERS = 8
FAULTS = [ErrorCode.NONE] * 6 + [ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.REQUEST_TIMED_OUT]


class Crowd:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        limits = ConsumerLimits(session_timeout_ms=10_000, max_size=MEMBERS)
        self.scene = ConsumerScene(limits=replace(LIMITS, consumer=limits))
        self.scene.topic("t", 5)
        self.scene.held = self.random.random() < 0.7
        self.alive: list[Consumer] = []
        self.names = iter(range(10_000))

    def step(self) -> None:
        action = self.random.choices(
            [self.come, self.beat, self.go, self.die, self.rest, self.acknowledge, self.pass_time, self.change_topics,
             self.take_over, self.subscribe],
            [3, 14, 0.7, 0.5, 0.5, 8 if self.scene.held else 0, 3, 0.7, 0.2, 0.5],
        )[0]  # fmt: skip
        action()
        if self.random.random() < 0.7:
            self.scene.turn()
        for member in self.alive:
            member.hear()
        self.check()

    def come(self) -> None:
        if len(self.alive) < MEMBERS:
            number = next(self.names)
            taken = {member.instance for member in self.alive}
            instance = f"i{number % 4}" if self.random.random() < 0.3 and f"i{number % 4}" not in taken else None
            pattern = "t|u" if self.random.random() < 0.3 else None
            topics = () if pattern else ("t",) if self.random.random() < 0.7 else ("t", "u")
            member = Consumer(self.scene, topics, name=f"m{number}", instance=instance, pattern=pattern)
            self.alive.append(member)
            member.send()

    def beat(self) -> None:
        idle = [member for member in self.alive if member.waiting is None]
        if idle:
            self.random.choice(idle).send()

    def leaver(self) -> Consumer | None:
        if not self.alive:
            return None
        gone = self.random.choice(self.alive)
        self.alive.remove(gone)
        return gone

    def go(self) -> None:
        gone = self.leaver()
        if gone is not None:
            self.scene.heartbeat(replace(gone.request(), member_epoch=-1))

    def rest(self) -> None:
        gone = self.leaver()
        if gone is not None and gone.instance is not None:
            self.scene.heartbeat(replace(gone.request(), member_epoch=-2))

    def die(self) -> None:
        self.leaver()

    def subscribe(self) -> None:
        if self.alive:
            member = self.random.choice(self.alive)
            member.topics, member.pattern, member.is_whole = ("u", "t"), "", True

    def acknowledge(self) -> None:
        self.scene.acknowledge(self.random.choice(FAULTS))

    def pass_time(self) -> None:
        self.scene.advance(self.random.choice([0.01, 0.3, 1, 2]))

    def change_topics(self) -> None:
        if "u" in self.scene.image.topics and self.random.random() < 0.4:
            self.scene.delete("u")
        else:
            name = self.random.choice("tu")
            count = len(self.scene.image.topics[name].partitions) if name in self.scene.image.topics else 0
            self.scene.topic(name, min(count + 2, 12))

    def take_over(self) -> None:
        self.scene.acknowledge(self.random.choice([ErrorCode.NONE, ErrorCode.NOT_COORDINATOR]))
        self.scene.take_over()

    def check(self) -> None:
        owners: dict[tuple[str, int], Consumer] = {}
        known = self.known()
        for member in self.alive:
            current = known.get(member.member_id)
            if current is None or member.epoch not in current:
                continue  # fenced with its next heartbeat
            for place in member.partitions:
                assert place not in owners, f"{place} is owned by {owners[place].member_id} and {member.member_id}"
                owners[place] = member

    def known(self) -> dict[str, set[int]]:
        """Epochs that each member may have."""
        group = self.scene.coordinator._shards[0].groups.get(GROUP)
        if not isinstance(group, ConsumerGroup):
            return {}
        current = {member_id: member.current for member_id, member in group.members.items()}
        return {name: {found.epoch, found.previous_epoch} for name, found in current.items()}

    def settle(self) -> None:
        self.scene.held = False
        self.scene.acknowledge()
        for _ in range(40):
            for member in self.alive:
                if member.hear() is None and member.waiting is not None:
                    member.is_whole = True  # who gives up an answer asks for all of it
                member.send()
                self.scene.turn()
                self.scene.advance(0.3)
                member.hear()
                self.check()


@proves("N1")
@pytest.mark.parametrize("number", range(6))
def test_members_come_and_go_and_no_partition_has_two_owners(seed: int, number: int) -> None:
    crowd = Crowd(seed + number)
    for _ in range(STEPS):
        crowd.step()
    crowd.settle()
    if not crowd.alive:
        return
    described = crowd.scene.described()
    assert described.group_state == "Stable"
    assert {member.member_id for member in described.members} == {member.member_id for member in crowd.alive}
    owned = sorted(place for member in crowd.alive for place in member.partitions)
    wanted = {
        (name, index)
        for name in {name for member in crowd.alive for name in (*member.topics, *("tu" if member.pattern else ""))}
        if name in crowd.scene.image.topics
        for index in range(len(crowd.scene.image.topics[name].partitions))
    }
    assert owned == sorted(wanted)
    before = crowd.scene.described()
    crowd.scene.take_over()
    after = crowd.scene.described()
    assert sorted(after.members, key=repr) == sorted(before.members, key=repr)
    assert after.group_epoch == before.group_epoch


@proves("N1")
@pytest.mark.parametrize("number", range(4))
def test_a_mixed_group_comes_to_rest_however_its_members_come_and_go(seed: int, number: int) -> None:
    draw = random.Random(seed + number)
    scene = ConsumerScene(limits=replace(LIMITS, consumer=ConsumerLimits(session_timeout_ms=10_000)))
    scene.topic("t", 4)
    new: list[Consumer] = []
    old: list[Classic] = []
    for _ in range(40):
        match draw.choice(["new", "old", "old", "leave", "beats"]):
            case "new" if len(new) < 3:
                new.append(scene.member("t"))
            case "old" if len(old) < 3:
                old.append(Classic(scene, eager=draw.random() < 0.5))
                if old[-1].join() == ErrorCode.NONE:
                    old[-1].sync()
            case "leave" if new:
                new.pop(draw.randrange(len(new))).leave()
            case _:
                pass
        for _ in range(draw.randrange(4)):
            beats(new, old)
    for _ in range(20):
        scene.advance(0.5)
        beats(new, old)
    members: list[Consumer | Classic] = [*new, *(one for one in old if one.joined is not None)]
    owned = sorted(place for member in members for place in member.partitions)
    assert owned == ([("t", n) for n in range(4)] if members else [])
    assert scene.coordinator.describe(GROUP).group_state == ("Stable" if members else "Dead" if not old else "Empty")


def beats(new: list[Consumer], old: list[Classic]) -> None:
    """Of all: those of the classic protocol join together, as in a rebalance they have to."""
    for consumer in new:
        consumer.beat()
    waiting = []
    for classic in old:
        if classic.joined is None or classic.scene.beat(classic.joined) != ErrorCode.NONE:
            waiting.append(classic)
    answers = []
    for classic in waiting:
        if classic.eager:
            classic.owned = {}
        if classic.asked is None or classic.joined is not None:
            classic.asked = classic.scene.join(classic.member_id, protocols=classic.protocols())
        answers.append(classic.asked)
        classic.scene.turn()
    for classic, answer in zip(waiting, answers, strict=True):
        if answer.answered and answer.reply.error_code == ErrorCode.NONE:
            classic.joined = answer.reply
        elif answer.answered and answer.reply.error_code == ErrorCode.UNKNOWN_MEMBER_ID:
            classic.joined, classic.owned = None, {}
        if answer.answered:
            classic.asked = None
    for classic in sorted(waiting, key=lambda one: one.joined is None or one.joined.leader != one.member_id):
        if classic.joined is not None:
            classic.sync()
