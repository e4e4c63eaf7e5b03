"""A coordinator whose partition moves between brokers that are killed, lose power, fail to read and have wrong bytes on
their disks; what was acknowledged is there at every coordinator that answers.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from typing import Generic, TypeVar

import pytest

from chosen_layout import log_path
from headrace.cluster.image import Image, PartitionState, Topic
from headrace.coordinators import state_partitions
from headrace.coordinators.state_partitions import Coordinator, StatePartitions, StateTopic
from headrace.ports.disk import read_whole
from headrace.storage.log import TICK_SECONDS, TopicPartition
from headrace.virtual.disk import VirtualFile
from replication import scene as replicas
from replication.scene import Broker, Scene

TOPIC_ID = b"the topic's id.."
STATE = PartitionState(0, 1, 0, (1, 2, 3), (1, 2, 3))
SETTINGS = {
    "durability": "disk",
    "min_insync_replicas": 2,
    "cleanup_policy": "compact",
    "segment_bytes": 1024,
    "min_cleanable_dirty_ratio": 0.0,
}
STEPS = 60
FAILED_READS_PART = 0.3


def image_of(*names: str) -> Image:
    return Image("/headrace/c/", topics={name: Topic(name, TOPIC_ID, (STATE,)) for name in (*names, "t")})


C = TypeVar("C", bound=Coordinator)


class CoordinatorScene(Scene, Generic[C]):
    """Brokers that coordinate; the test is also the controller to which a leader resigns."""

    state_topic: StateTopic

    def coordinator(self, broker: Broker) -> C:
        """Of what the state topic holds."""
        raise NotImplementedError

    def start(self, number: int) -> Broker:
        broker = super().start(number)
        if not hasattr(self, "coordinators"):
            self.coordinators: dict[int, C] = {}
            self.followed: dict[int, StatePartitions] = {}
        made = self.coordinators[number] = self.coordinator(broker)
        image = image_of(self.state_topic.name)
        followed = StatePartitions(self.state_topic, broker.partitions, made, broker.disk, lambda: image)
        self.followed[number] = followed

        def tick() -> None:
            followed.follow()
            broker.clock.call_later(TICK_SECONDS, tick)

        tick()
        return broker

    def tell(self, number: int, index: int = 0) -> None:
        super().tell(number, index)
        self.followed[number].follow()

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
            partition = leader.partitions.find(self.state_topic.name, 0)
            unfit = partition is None or partition in leader.partitions.damaged or partition in leader.partitions.unable
            if not unfit:
                return
            members.remove(leader.number)
        elif not members:
            members = [number for number in self.keys[0].isr if number in self.alive]
        if members:
            self.elect(members[0], members)


class History(Generic[C]):
    """What one seed does, and what was acknowledged."""

    def __init__(self, seed: int, scene: CoordinatorScene[C]) -> None:
        self.random = random.Random(seed)
        self.scene = scene
        self.number = 0
        self.scene.elect(1, (1, 2, 3))

    def commit(self) -> None:
        """Ask for something to be kept."""
        raise NotImplementedError

    def marker(self) -> bytes | None:
        """Bytes of a record that was acknowledged; None while there is none."""
        raise NotImplementedError

    def answers(self, number: int) -> bool:
        raise NotImplementedError

    def check(self) -> bool:
        """Whether the coordinator answers; if so, nothing older than what was acknowledged."""
        raise NotImplementedError

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

    def asked(self) -> C:
        """The leader, or somebody who may think that it leads."""
        broker = self.scene.leader()
        if broker is None or self.random.random() < 0.1:
            broker = self.random.choice(list(self.scene.alive.values()))
        return self.scene.coordinators[broker.number]

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
        marker = self.marker()
        if len(scene.members()) < 3 or marker is None:
            return
        scene.run(1)
        number = self.random.choice(scene.members())
        scene.alive[number].store.close()
        scene.kill(number)
        folder = log_path(replicas.DATA, TopicPartition(scene.state_topic.name, 0), scene.layout).rpartition("/")[0]
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
            return self.answers(leader.number)

        scene.until("a coordinator that answers, and three sound replicas", is_well, 120)


def fail_reads(patched: pytest.MonkeyPatch, drawn: random.Random) -> None:
    """Some steps of loads cannot read, or cannot open, what they want."""
    number = 0
    read, step = VirtualFile.pread, state_partitions._Load._step

    def pread(file: VirtualFile, count: int, position: int) -> bytes:
        if number and file.path.endswith(".log"):
            raise OSError(number, os.strerror(number), file.path)
        return read(file, count, position)

    def one_step(load: state_partitions._Load, work: Callable[[], None]) -> None:
        nonlocal number
        if drawn.random() < FAILED_READS_PART:
            number = drawn.choice((errno.EMFILE, errno.ENOMEM, errno.EIO))
        try:
            step(load, work)
        finally:
            number = 0

    patched.setattr(state_partitions._Load, "_step", one_step)
    patched.setattr(VirtualFile, "pread", pread)
