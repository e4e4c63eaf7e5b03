"""Random histories of a log compared with a model: appends, truncations, deletions, stops, kills, losses of power."""

from __future__ import annotations

import random

import pytest

from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.sim.disk import SimDisk
from headrace.storage import verify
from headrace.storage.log import Log
from proving import proves
from storage.harness import Harness, append, batch, read_all, sim_harness

STEPS = 80
SEEDS = 25


class Model:
    """What a log must hold. Above `durable`, a loss of power may bring back anything that ever stood at an offset."""

    def __init__(self, durability: str, chance: random.Random) -> None:
        self.chance = chance
        self.durability = durability
        self.harness: Harness = sim_harness()
        self.log: Log = self.harness.log(
            durability=durability, segment_bytes=1024, index_interval_bytes=chance.choice((1, 150, 4096)), flush_ms=50
        )
        self.now: list[bytes] = []
        self.ever: dict[int, set[bytes]] = {}
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
            for value in values:
                self.ever.setdefault(len(self.now), set()).add(value)
                self.now.append(value)
        assert not self.harness.write()

    def settle(self) -> None:
        self.harness.settle()
        if self.durability == "disk":
            assert self.log.durable_offset == len(self.now)

    def pass_time(self) -> None:
        self.harness.advance(self.chance.choice((0.01, 0.1, 61)))

    def truncate(self) -> None:
        offset = self.chance.randrange(self.start, len(self.now) + 1)
        self.log.truncate(offset)
        assert offset - 3 <= self.log.end_offset <= offset
        del self.now[self.log.end_offset :]
        self.start = min(self.start, self.log.end_offset)
        self.new_epoch()
        self.harness.settle()

    def new_epoch(self) -> None:
        """A producer that lost something comes back with a higher epoch."""
        self.epoch += 1
        self.sequence = 0

    def delete_before(self) -> None:
        offset = self.chance.randrange(self.start, len(self.now) + 1)
        self.log.delete_before(offset)
        self.start = offset
        self.harness.settle()

    def stop(self) -> None:
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
        assert self.log.start_offset <= self.start
        found = self.records()
        assert all(found[offset] == self.now[offset] for offset in found if offset < durable)
        assert all(value in self.ever[offset] for offset, value in found.items())
        del self.now[durable:]
        self.start = self.log.start_offset
        for offset in range(len(self.now), self.log.end_offset):
            self.now.append(found[offset] if offset >= self.start else b"deleted")
        self.new_epoch()

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
@pytest.mark.parametrize("number", range(SEEDS))
def test_a_log_is_what_its_model_says(durability: str, number: int, seed: int) -> None:
    model = Model(durability, random.Random(seed))
    steps = [model.append] * 6 + [model.settle] * 4 + [model.pass_time] * 2
    steps += [model.truncate, model.delete_before, model.stop, model.kill, model.lose_power]
    for _ in range(STEPS):
        model.chance.choice(steps)()
        model.compare()
    model.stop()
    model.compare()
    assert isinstance(model.harness.disk, SimDisk)
    problems = [str(p) for report in verify.verify(model.harness.disk, "/data") for p in report.problems]
    assert problems == [], problems
