"""Random histories of a log of each layout compared with a model: appends, truncations, deletions, stops, kills, losses
of power. After a loss of power no log is a mixture of what it held before a truncation and after it."""

from __future__ import annotations

import random

import pytest

from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import DAMAGED
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.offline import verify
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, read_all, sim_harness

STEPS = 80
SEEDS = {PARTITIONED: 25, SHARED: 10}


class Model:
    """What a log must hold. A loss of power leaves a prefix of that, no shorter than what is durable; or, while a
    truncation is not synced, a prefix of what the log held before it: never some of both."""

    def __init__(self, layout: str, durability: str, chance: random.Random) -> None:
        self.chance = chance
        self.durability = durability
        self.harness: Harness = sim_harness(layout)
        self.harness.file_bytes = chance.choice((1024, 4096, 1 << 20))
        self.log: Log = self.harness.log(
            durability=durability, segment_bytes=1024, index_interval_bytes=chance.choice((1, 150, 4096)), flush_ms=50
        )
        self.now: list[bytes] = []
        self.before: list[tuple[int, list[bytes]]] = []
        """Where the log began and what it held, before each truncation that may not be synced."""
        self.start = 0
        self.count = 0
        self.sequence = 0
        self.epoch = 0

    def append(self) -> None:
        for _ in range(self.chance.randrange(1, 5)):
            values = [
                b"%d" % (self.count + i) + b"." * self.chance.randrange(80) for i in range(self.chance.randrange(1, 4))
            ]
            view = batch(*values, producer=(1, self.epoch, self.sequence))
            assert self.log.producers.check(read_header(view)) is None
            assert append(self.log, view, self.epoch) == len(self.now)
            self.sequence += len(values)
            self.count += len(values)
            self.now += values
        assert not self.harness.write()

    def settle(self) -> None:
        self.harness.settle()
        self.before.clear()
        if self.durability == "disk":
            assert self.log.durable_offset == len(self.now)

    def pass_time(self) -> None:
        self.harness.advance(self.chance.choice((0.01, 0.1, 61)))
        self.before.clear()

    def truncate(self) -> None:
        offset = self.chance.randrange(self.start, len(self.now) + 1)
        self.before.append((self.start, list(self.now)))
        self.log.truncate(offset)
        assert offset - 3 <= self.log.end_offset <= offset
        del self.now[self.log.end_offset :]
        self.start = min(self.start, self.log.end_offset)
        self.new_epoch()

    def new_epoch(self) -> None:
        """A producer that lost something comes back with a higher epoch."""
        self.epoch += 1
        self.sequence = 0

    def delete_before(self) -> None:
        offset = self.chance.randrange(self.start, len(self.now) + 1)
        self.log.delete_before(offset)
        self.start = offset
        self.settle()

    def stop(self) -> None:
        self.before.clear()
        self.log = self.harness.reopen()
        assert self.harness.store is not None
        assert self.harness.store.was_clean
        assert self.log.durable_offset == len(self.now)

    def kill(self) -> None:
        self.log = self.harness.kill()

    def lose_power(self) -> None:
        durable = self.log.durable_offset
        self.log = self.harness.kill(seed=self.chance.randrange(1 << 30))
        assert self.log.end_offset >= durable
        found = self.records()
        assert all(found[offset] == self.now[offset] for offset in found if offset < durable)
        start, end = self.log.start_offset, self.log.end_offset
        held = [
            values[:end]
            for first, values in ((self.start, self.now), *self.before)
            if start <= first and end <= len(values) and all(values[at] == value for at, value in found.items())
        ]
        assert held, f"a mixture: {found}"
        assert not self.damaged()
        self.now, self.start = held[0], start
        self.before.clear()
        self.new_epoch()

    def damaged(self) -> bool:
        if isinstance(self.log, PartitionedLog):
            return any(segment.damage for segment in self.log.segments)
        assert isinstance(self.log, SharedLog)
        return any(entry.size == DAMAGED for entry in self.log.queue.entries(self.log.start_offset))

    def records(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for _, view in read_all(self.log, max_bytes=self.chance.choice((1, 300, 100_000))):
            for record in kernel.records(view):
                assert record.value is not None
                found[record.offset] = record.value
        return {offset: value for offset, value in found.items() if offset >= self.log.start_offset}

    def compare(self) -> None:
        assert (self.log.start_offset, self.log.end_offset) == (self.start, len(self.now))
        assert self.log.written_offset == len(self.now)
        assert self.records() == {offset: self.now[offset] for offset in range(self.start, len(self.now))}
        assert self.log.offline is None


@proves("J6", "L4")
@pytest.mark.parametrize("durability", ["memory", "os", "disk"])
@pytest.mark.parametrize(("layout", "number"), [(layout, n) for layout, count in SEEDS.items() for n in range(count)])
def test_a_log_is_what_its_model_says(layout: str, durability: str, number: int, seed: int) -> None:
    model = Model(layout, durability, random.Random(seed))
    steps = [model.append] * 6 + [model.settle] * 4 + [model.pass_time] * 2
    steps += [model.truncate, model.delete_before, model.stop, model.kill, model.lose_power]
    for _ in range(STEPS):
        model.chance.choice(steps)()
        model.compare()
    model.stop()
    model.compare()
    assert isinstance(model.harness.disk, VirtualDisk)
    problems = [str(p) for report in verify.verify(model.harness.disk, "/data") for p in report.problems]
    assert problems == [], problems
