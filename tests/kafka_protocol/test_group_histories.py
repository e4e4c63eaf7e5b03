"""Commits to a coordinator whose partition moves between brokers that are killed, lose power, fail to read and have
wrong bytes on their disks: what was acknowledged is there at every coordinator that answers.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from chosen_layout import log_path
from headrace.cluster.image import Image, PartitionState, Topic
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators import state_partitions
from headrace.coordinators.state_log import StateLog
from headrace.coordinators.state_partitions import StatePartitions
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.messages import CommitRequest, OffsetToCommit, PartitionResult
from headrace.groups.offsets import OFFSETS
from headrace.ports.disk import read_whole
from headrace.storage.log import TICK_SECONDS, TopicPartition
from headrace.virtual.disk import VirtualFile
from kafka_protocol.test_group_loading import LIMITS
from proving import proves
from replication import scene as replicas
from replication.scene import Broker, Scene

TOPIC_ID = b"the topic's id.."
STATE = PartitionState(0, 1, 0, (1, 2, 3), (1, 2, 3))
IMAGE = Image("/headrace/c/", topics={name: Topic(name, TOPIC_ID, (STATE,)) for name in (OFFSETS_TOPIC, "t")})
SETTINGS = {
    "durability": "disk",
    "min_insync_replicas": 2,
    "cleanup_policy": "compact",
    "segment_bytes": 1024,
    "min_cleanable_dirty_ratio": 0.0,
}
STEPS = 60
GROUPS = 3
FAILED_READS_PART = 0.3


@dataclass(slots=True)
class Coordinating:
    """What a broker has for groups, beside its partitions."""

    groups: GroupCoordinator
    followed: StatePartitions


class GroupScene(Scene):
    """Brokers that coordinate; the test is also the controller to which a leader resigns."""

    def start(self, number: int) -> Broker:
        broker = super().start(number)
        if not hasattr(self, "coordinating"):
            self.coordinating: dict[int, Coordinating] = {}
        append = StateLog(broker.partitions, OFFSETS_TOPIC).append
        groups = GroupCoordinator(broker.clock, append, 1, lambda: "id", LIMITS, lambda name: IMAGE.topics[name].id)
        made = Coordinating(groups, StatePartitions(OFFSETS, broker.partitions, groups, broker.disk, lambda: IMAGE))
        self.coordinating[number] = made

        def tick() -> None:
            made.followed.follow()
            broker.clock.call_later(TICK_SECONDS, tick)

        tick()
        return broker

    def tell(self, number: int, index: int = 0) -> None:
        super().tell(number, index)
        self.coordinating[number].followed.follow()

    def members(self) -> list[int]:
        """Those of the in-sync set that are alive."""
        runs = self.keys[0].isr
        return [number for number, broker in self.alive.items() if runs.get(number) == broker.incarnation]

    def leader(self) -> Broker | None:
        return self.alive.get(self.keys[0].leader)

    def look(self) -> None:
        """A leader that is gone, damaged or unable is followed by another member. If none is left, a member that comes
        back is carried over: with durability `disk` it holds what it had."""
        leader, members = self.leader(), self.members()
        if leader is not None and leader.number in members:
            partition = leader.partitions.find(OFFSETS_TOPIC, 0)
            unfit = partition is None or partition in leader.partitions.damaged or partition in leader.partitions.unable
            if not unfit:
                return
            members.remove(leader.number)
        elif not members:
            members = [number for number in self.keys[0].isr if number in self.alive]
        if members:
            self.elect(members[0], members)


class History:
    """What one seed does, and what was acknowledged."""

    def __init__(self, seed: int, layout: str) -> None:
        self.random = random.Random(seed)
        self.scene = GroupScene(seed=seed, layout=layout, topic=dict(SETTINGS))
        self.acknowledged: dict[str, int] = {}
        self.number = 0
        self.scene.elect(1, (1, 2, 3))

    def run(self) -> None:
        for _ in range(STEPS):
            drawn = self.random.random()
            if drawn < 0.6:
                self.commit()
            elif drawn < 0.7:
                self.kill()
            elif drawn < 0.8:
                self.return_one()
            elif drawn < 0.85:
                self.move()
            elif drawn < 0.88:
                self.damage()
            self.scene.run(self.random.choice((0.001, 0.01, 0.1, 1.0)))
            self.scene.look()
            self.check()
        self.come_to_rest()
        assert self.check(), "nobody answers"

    def commit(self) -> None:
        """To the leader, or to somebody who may think that it leads."""
        self.number += 1
        group, offset = f"g{self.random.randrange(GROUPS)}", self.number
        broker = self.scene.leader()
        if broker is None or self.random.random() < 0.1:
            broker = self.random.choice(list(self.scene.alive.values()))

        def reply(results: tuple[PartitionResult, ...]) -> None:
            if all(result.error_code == ErrorCode.NONE for result in results):
                self.acknowledged[group] = max(self.acknowledged.get(group, 0), offset)

        request = CommitRequest((OffsetToCommit("t", 0, offset, 0, f"commit-{offset:05d}", IMAGE.topics["t"].id),))
        self.scene.coordinating[broker.number].groups.commit(group, request, reply)

    def kill(self) -> None:
        if len(self.scene.alive) == 3:
            power = self.random.choice((None, self.random.randrange(1000)))
            self.scene.kill(self.random.choice(list(self.scene.alive)), power=power)
            self.scene.look()

    def return_one(self) -> None:
        for number in (1, 2, 3):
            if number not in self.scene.alive:
                self.scene.start(number)
                self.scene.tell(number)
                return

    def move(self) -> None:
        members = self.scene.members()
        if members:
            self.scene.elect(self.random.choice(members), members)

    def damage(self) -> None:
        """A broker stops in order, and leads after its return, with a wrong byte in a commit. One at a time: nobody
        could mend what is wrong everywhere."""
        scene = self.scene
        if len(scene.members()) < 3 or not self.acknowledged:
            return
        scene.run(1)
        number = self.random.choice(scene.members())
        scene.alive[number].store.close()
        scene.kill(number)
        marker = b"commit-%05d" % self.random.choice(list(self.acknowledged.values()))
        folder = log_path(replicas.DATA, TopicPartition(OFFSETS_TOPIC, 0), scene.layout).rpartition("/")[0]
        disk = scene.disks[number]
        for path in [f"{folder}/{name}" for name in disk.list(folder) if name.endswith(".log")]:
            found = read_whole(disk, path).rfind(marker)
            if found >= 0:
                disk.flip(path, found)
        broker, key = scene.start(number), scene.keys[0]
        key.isr, key.revision = {**key.isr, number: broker.incarnation}, key.revision + 1
        scene.elect(number, scene.members())
        self.come_to_rest()

    def come_to_rest(self) -> None:
        scene = self.scene
        while len(scene.alive) < 3:
            self.return_one()

        def is_well() -> bool:
            scene.look()
            leader = scene.leader()
            if leader is None or len(scene.members()) < 3:
                return False
            if any(broker.partitions.damaged for broker in scene.alive.values()):
                return False
            return self.answer(leader.number, "g0")[0] == ErrorCode.NONE

        scene.until("a coordinator that answers, and three sound replicas", is_well, 120)

    def answer(self, number: int, group: str) -> tuple[int, int]:
        reply = self.scene.coordinating[number].groups.fetch_offsets(group, [("t", 0)])
        return reply.error_code, reply.offsets[0].committed_offset if reply.offsets else -1

    def check(self) -> bool:
        """Whether the coordinator answers; if so, nothing older than what was acknowledged."""
        leader = self.scene.leader()
        if leader is None:
            return False
        for group, least in self.acknowledged.items():
            code, offset = self.answer(leader.number, group)
            if code != ErrorCode.NONE:
                return False
            assert offset >= least, f"{group}: {least} was acknowledged, broker {leader.number} answers {offset}"
        return True


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[random.Random], None]:
    """Some steps of loads cannot read, or cannot open, what they want."""
    monkeypatch.setattr(replicas, "TOPIC", OFFSETS_TOPIC)
    number = 0
    read, step = VirtualFile.pread, state_partitions._Load._step

    def pread(file: VirtualFile, count: int, position: int) -> bytes:
        if number and file.path.endswith(".log"):
            raise OSError(number, os.strerror(number), file.path)
        return read(file, count, position)

    def draw(drawn: random.Random) -> None:
        def one_step(load: state_partitions._Load, work: Callable[[], None]) -> None:
            nonlocal number
            if drawn.random() < FAILED_READS_PART:
                number = drawn.choice((errno.EMFILE, errno.ENOMEM, errno.EIO))
            try:
                step(load, work)
            finally:
                number = 0

        monkeypatch.setattr(state_partitions._Load, "_step", one_step)
        monkeypatch.setattr(VirtualFile, "pread", pread)

    return draw


@proves("G16")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_acknowledged_is_there_whoever_coordinates(
    seed: int, layout: str, failing_reads: Callable[[random.Random], None]
) -> None:
    failing_reads(random.Random(seed))
    History(seed, layout).run()
