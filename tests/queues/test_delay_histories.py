"""Delayed records under drawn faults: leaders that go and come with or without what they wrote last, processes that end
with or without writing down what they know, files of the timer that are lost or torn, a follower that lags, retention,
a clock that is set back and forth. Judged by the log alone: every record that is held there and was not recalled is
delivered behind it, once, and not before its time by the clock of that moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from headrace.errors import TooLate
from headrace.queues import delay_index
from headrace.records import delayed, kernel
from headrace.records.delayed import HeldBatch
from headrace.storage.folder import PARTITIONED, SHARED
from partitions.led import DATA
from proving import proves
from queues.delay_scene import TOPIC, DelayScene, record

HISTORIES = 25
STEPS = 120
FAR_MS = 50_000


class World:
    def __init__(self, random: Random, layout: str) -> None:
        self.random = random
        retention = {"retention_bytes": 3000, "segment_bytes": 1500} if random.random() < 0.5 else {}
        self.scene = DelayScene(layout, replicas=2, **retention)
        self.number = 0
        self.recalled: set[int] = set()
        self.asked: set[int] = set()
        self.held: dict[int, int] = {}
        """Due times of all records that were ever held below the watermark, by handle."""
        self.delivered: Counter[int] = Counter()
        self.early: list[tuple[int, int, int]] = []
        self.read_to = 0

    def run(self) -> None:
        often: list[Callable[[], None]] = [self.produce, self.produce, self.follow, self.advance, self.recall]
        rare: list[Callable[[], None]] = [self.step, self.fail_over, self.kill, self.harm, self.retire]
        for _ in range(STEPS):
            self.random.choice(often if self.random.random() < 0.85 else rare)()
        self.settle()

    def produce(self) -> None:
        new = []
        for _ in range(self.random.randint(1, 4)):
            self.number += 1
            value = b"%d" % self.number
            drawn = self.random.random()
            if drawn < 0.3:
                new.append(record(value))
            elif drawn < 0.8:
                new.append(record(value, after=self.random.choice((0, 1, 100, 3000, FAR_MS))))
            else:
                new.append(record(value, at=self.scene.now_ms + self.random.randint(-1000, 5000)))
        self.scene.produce(*new, codec=self.random.choice((0, 3)))
        if self.random.random() < 0.6:
            self.follow()

    def follow(self) -> None:
        partition = self.scene.partition
        ends = [end for end in self.ends() if end > partition.high_watermark]
        if ends:
            self.scene.follow(self.random.choice(ends))
        self.look()

    def ends(self) -> list[int]:
        return [header.next_offset for header, _ in self.scene.batches()]

    def advance(self) -> None:
        self.scene.advance(self.random.choice((0.001, 0.05, 0.5, 3.0)))

    def step(self) -> None:
        self.scene.clock.stepped_ms += self.random.choice((-20_000, -1000, 1000, 20_000))

    def recall(self) -> None:
        waiting = [handle for handle in self.held if not self.delivered[handle] and handle not in self.asked]
        if not waiting:
            return
        handle = self.random.choice(waiting)
        heard = self.scene.recall(handle)
        if not heard and self.random.random() < 0.7:
            self.scene.follow()
            self.look()
        if heard == [None]:
            self.recalled.add(handle)
        elif heard and isinstance(heard[0], TooLate):
            return
        self.asked.add(handle)

    def fail_over(self) -> None:
        """What is not below the watermark may be lost."""
        partition = self.scene.partition
        ends = [end for end in self.ends() if end >= partition.high_watermark]
        self.scene.lead_again(self.random.choice(ends) if ends and self.random.random() < 0.7 else None)

    def kill(self) -> None:
        self.scene.kill(clean=self.random.random() < 0.5)

    def harm(self) -> None:
        """While nobody runs, a file of the timer is lost, torn or wrong."""
        disk, folder = self.scene.disk, f"{DATA}/{TOPIC}/{TOPIC}-0"
        self.scene.delays.close()
        names = [name for name in disk.list(folder) if "delays" in name]
        if names:
            path = f"{folder}/{self.random.choice(names)}"
            size = disk.size(path)
            if self.random.random() < 0.5 or not size:
                disk.remove(path)
            else:
                disk.flip(path, self.random.randrange(size))
        self.scene.kill()

    def retire(self) -> None:
        """Retention looks at the log; perhaps what waits is carried, and it looks again."""
        scene = self.scene
        for _ in range(self.random.randint(1, 4)):
            self.look()
            scene.advance(0.2)
            scene.store.tick()
            if self.random.random() < 0.7:
                scene.follow()

    def look(self) -> None:
        """Read what is below the watermark on, before retention takes it."""
        watermark = self.scene.partition.high_watermark
        for header, view in self.scene.batches():
            if header.base_offset < self.read_to or header.next_offset > watermark:
                continue
            self.read_to = header.next_offset
            if header.is_control:
                found = delayed.read_control(view, header)
                if isinstance(found, HeldBatch) and found.carried is None:
                    self.held |= {handle: due_ms for due_ms, handle, _ in found.entries()}
            elif header.attributes & delayed.DELIVERED:
                for (due_ms, handle, _), each in zip(
                    delayed.delivered_entries(view), kernel.records(view), strict=True
                ):
                    self.delivered[handle] += 1
                    if each.timestamp_ms < due_ms:
                        self.early.append((handle, due_ms, each.timestamp_ms))

    def settle(self) -> None:
        self.scene.clock.stepped_ms += 2 * FAR_MS
        for _ in range(60):
            self.scene.follow()
            self.scene.advance(0.3)
            self.look()

    def judge(self) -> None:
        twice = {handle: count for handle, count in self.delivered.items() if count > 1}
        assert not twice
        assert not self.early
        assert not self.recalled & self.delivered.keys()
        assert self.delivered.keys() <= self.held.keys()
        lost = self.held.keys() - self.delivered.keys() - self.asked
        assert not lost
        assert len(self.scene.delays) == 0


@proves("R12", "Q2")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_every_delayed_record_is_delivered_once_and_not_early(
    layout: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(HISTORIES):
        random = Random(seed + number)
        few = random.choice((4, 16, delay_index.ENTRIES_MAX))
        monkeypatch.setattr(delay_index.DelayIndex.__init__, "__defaults__", (0, few))
        print(f"history {number}, {few} entries in memory")
        world = World(random, layout)
        world.run()
        world.judge()
