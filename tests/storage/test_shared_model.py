"""Random histories of many partitions, told to both layouts and to a model: all answer the same.

Where a loss of power takes what was not synced, each layout may keep another part of it; each is compared with what
must survive, and then both go on from there.

Starts are raised by `delete_before` alone, to the same offset in both. Retention by age and size is off: it removes
whole segments in one layout and whole runs in the other, so that starts differ; test_shared_retention has it for the
shared layout, test_partitioned for the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import EpochEnd, Log, TimedOffset, TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import append, batch, read_all, sim_harness

FOUND = (1674608521,)
"""A batch was cut, written anew and moved; then its queue was lost."""
STEPS = 60
SEEDS = 5
LONG_SEEDS = 300
BEGIN_MS = 1_750_000_000_000
PLACES = [TopicPartition(topic, n) for topic in ("orders", "payments") for n in range(3)]


class Partition:
    """What one partition must hold."""

    def __init__(self, durability: str) -> None:
        self.durability = durability
        self.batches: list[tuple[int, int, int, list[bytes]]] = []
        """Base offset, epoch, timestamp and values of each."""
        self.start = 0
        self.end = 0
        self.epoch = 0
        self.sequence = 0
        self.ever: dict[int, set[bytes]] = {}

    def records(self) -> dict[int, tuple[bytes, int]]:
        return {
            base + nth: (value, ms + nth)
            for base, _, ms, values in self.batches
            for nth, value in enumerate(values)
            if self.start <= base + nth < self.end
        }

    def truncate(self, end: int) -> None:
        # A batch that spans the end goes whole: a log that is cut where it starts, inside a batch, has lost that too.
        self.batches = [each for each in self.batches if each[0] + len(each[3]) <= end]
        self.end = end
        self.start = min(self.start, end)
        self.new_epoch()

    def new_epoch(self) -> None:
        self.epoch += 1
        self.sequence = 0

    def first_epoch(self) -> int:
        """Of the first batch that is there; of earlier ones more may be known than the batches tell."""
        return next(epoch for base, epoch, _, values in self.batches if base + len(values) > self.start)

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        starts: dict[int, int] = {}
        for base, of, _, _ in self.batches:
            starts.setdefault(of, base)
        found = max((of for of in starts if of <= epoch), default=None)
        if found is None:
            return None
        end = min((base for of, base in starts.items() if of > found), default=self.end)
        return EpochEnd(found, end) if end >= self.start else None

    def offset_for_time(self, timestamp_ms: int) -> TimedOffset | None:
        found = ((offset, ms) for offset, (_, ms) in sorted(self.records().items()) if ms >= timestamp_ms)
        return next((TimedOffset(offset, ms) for offset, ms in found), None)


class World:
    """Both layouts and the model."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.both = [sim_harness(PARTITIONED), sim_harness(SHARED)]
        self.both[1].file_bytes = chance.choice((1024, 4096, 1 << 20))
        self.model: dict[TopicPartition, Partition] = {}
        self.count = 0
        for place in PLACES:
            durability = chance.choice(("disk", "os", "memory"))
            interval = chance.choice((1, 150, 4096))
            self.model[place] = Partition(durability)
            for harness in self.both:
                harness.log(
                    place,
                    durability=durability,
                    index_interval_bytes=interval,
                    segment_bytes=1024,
                    flush_ms=50,
                    retention_ms=-1,
                    file_delete_delay_ms=chance.choice((0, 5000)),
                )

    def logs(self, place: TopicPartition) -> list[Log]:
        return [harness.log(place) for harness in self.both]

    # Steps.

    def append(self) -> None:
        for place in self.chance.sample(PLACES, self.chance.randrange(1, 5)):
            for _ in range(self.chance.randrange(1, 4)):
                self._append(place)
        for harness in self.both:
            assert not harness.write()

    def _append(self, place: TopicPartition) -> None:
        part = self.model[place]
        self.count += 1
        values = [
            b"%d.%d" % (self.count, nth) + b"." * self.chance.randrange(60)
            for nth in range(self.chance.randrange(1, 4))
        ]
        timestamp_ms = BEGIN_MS + self.count * 10 + self.chance.randrange(-100, 100)
        for log in self.logs(place):
            view = batch(*values, timestamp_ms=timestamp_ms, producer=(1, part.epoch, part.sequence))
            assert log.producers.check(read_header(view)) is None
            assert append(log, view, part.epoch) == part.end
        part.batches.append((part.end, part.epoch, timestamp_ms, values))
        for nth, value in enumerate(values):
            part.ever.setdefault(part.end + nth, set()).add(value)
        part.sequence += len(values)
        part.end += len(values)

    def settle(self) -> None:
        for harness in self.both:
            harness.settle()
        for place, part in self.model.items():
            if part.durability == "disk":
                assert [log.durable_offset for log in self.logs(place)] == [part.end] * 2

    def pass_time(self) -> None:
        seconds = self.chance.choice((0.01, 0.1, 2, 61))
        for harness in self.both:
            harness.advance(seconds)

    def truncate(self) -> None:
        place = self.chance.choice(PLACES)
        part = self.model[place]
        offset = self.chance.randrange(part.start, part.end + 1)
        for log in self.logs(place):
            log.truncate(offset)
        ends = {log.end_offset for log in self.logs(place)}
        assert len(ends) == 1
        end = ends.pop()
        assert offset - 3 <= end <= offset
        part.truncate(end)

    def delete_before(self) -> None:
        place = self.chance.choice(PLACES)
        part = self.model[place]
        part.start = self.chance.randrange(part.start, part.end + 1)
        for log, harness in zip(self.logs(place), self.both, strict=True):
            log.delete_before(part.start)
            harness.settle()

    def move(self) -> None:
        """Move what one partition holds in some offsets to the end of the commit log."""
        store = self.both[1].store
        assert isinstance(store, SharedStore)
        place = self.chance.choice(PLACES)
        log = store.get(place)
        part = self.model[place]
        assert isinstance(log, SharedLog)
        inside = [each for each in part.batches if each[0] >= part.start]
        if not inside:
            return
        first = self.chance.randrange(len(inside))
        last = self.chance.randrange(first, len(inside))
        from_offset, to_offset = inside[first][0], inside[last][0] + len(inside[last][3])
        moved = [
            piece.file.pread(piece.count, piece.position)
            for header, piece in log.headers(from_offset)
            if header.base_offset < to_offset
        ]
        store.replacer.replace(log, from_offset, to_offset, moved)
        if self.chance.random() < 0.7:
            self.both[1].settle()

    def stop(self) -> None:
        for harness in self.both:
            harness.reopen()
            assert harness.store is not None
            assert harness.store.was_clean

    def kill(self) -> None:
        for harness in self.both:
            harness.kill()

    def lose_queues(self) -> None:
        harness = self.both[1]
        assert isinstance(harness.store, SharedStore)
        if self.chance.random() < 0.5:
            harness.store.close()
        else:
            harness.store.abandon()
        for place in self.chance.sample(PLACES, self.chance.randrange(1, len(PLACES) + 1)):
            folder = f"{harness.data}/{place.topic}/{place}"
            names = sorted(name for name in harness.disk.list(folder) if name.endswith(".queue"))
            lost = (
                names
                if self.chance.random() < 0.5
                else self.chance.sample(names, self.chance.randrange(len(names) + 1))
            )
            for name in lost:
                harness.disk.remove(f"{folder}/{name}")
        if self.chance.random() < 0.3:
            harness.disk.remove(f"{harness.data}/@checkpoint")
        harness.open()

    def lose_power(self) -> None:
        """Each layout must have kept what was durable; then both are cut to what the other has too."""
        durable = {place: [log.durable_offset for log in self.logs(place)] for place in PLACES}
        seed = self.chance.randrange(1 << 30)
        for harness in self.both:
            harness.kill(seed=seed)
        for place, part in self.model.items():
            right = part.records()
            for log, safe in zip(self.logs(place), durable[place], strict=True):
                assert log.end_offset >= safe, (place, log)
                found = self.records(log)
                assert all(
                    found[offset][0] == right[offset][0] for offset in found if offset < safe and offset in right
                )
                assert all(found[offset][0] in part.ever[offset] for offset in found)
            self._agree(place, min(durable[place]))

    def _agree(self, place: TopicPartition, safe: int) -> None:
        """Go on with what both have for sure."""
        part = self.model[place]
        for log in self.logs(place):
            if log.start_offset > safe or log.end_offset < safe:
                safe = max(safe, part.end)
        ends = []
        for log in self.logs(place):
            if log.start_offset <= safe <= log.end_offset:
                log.truncate(safe)
            ends.append(log.end_offset)
        end = max(ends)
        for log in self.logs(place):
            if log.end_offset != end or log.start_offset > end:
                log.restart_at(end)
        start = max([part.start, *(log.start_offset for log in self.logs(place))])
        if any(log.start_offset == log.end_offset for log in self.logs(place)):
            start = end
        for log, harness in zip(self.logs(place), self.both, strict=True):
            log.delete_before(min(start, log.end_offset))
            harness.settle()
        part.truncate(end)
        part.start = min(start, end)
        if part.start == part.end:
            part.batches = []

    # Comparing.

    def records(self, log: Log) -> dict[int, tuple[bytes, int]]:
        found: dict[int, tuple[bytes, int]] = {}
        for _, view in read_all(log, max_bytes=self.chance.choice((1, 300, 100_000))):
            for record in kernel.records(view):
                assert record.value is not None
                found[record.offset] = record.value, record.timestamp_ms
        return {offset: value for offset, value in found.items() if offset >= log.start_offset}

    def compare(self) -> None:
        for place, part in self.model.items():
            right = part.records()
            asked_epoch = self.chance.randrange(part.epoch + 2)
            asked_ms = BEGIN_MS + self.chance.randrange(-100, self.count * 10 + 200)
            for log in self.logs(place):
                assert (log.start_offset, log.end_offset, log.written_offset) == (part.start, part.end, part.end), log
                assert log.offline is None
                assert self.records(log) == right, log
                if right and asked_epoch >= part.first_epoch():
                    assert log.epoch_end(asked_epoch) == part.epoch_end(asked_epoch), (log, asked_epoch)
                assert log.offset_for_time(asked_ms) == part.offset_for_time(asked_ms), log
        self._compare_sizes()

    def _compare_sizes(self) -> None:
        store = self.both[1].store
        assert isinstance(store, SharedStore)
        for log in store.logs():
            entries = [each for each in log.queue.entries(log.start_offset) if each.has_batches]
            assert log.size_bytes == sum(each.size for each in entries)
            assert log.queue.live.keys() <= store.commit_log.sizes.keys()


def run(seed: int, steps: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if seed % 2:  # queues of many files
            for module in ("queue", "queuefile"):
                patched.setattr(f"headrace.storage.commitlog.{module}.ENTRIES_MAX", 5)
        _run(seed, steps)


def _run(seed: int, steps: int) -> None:
    world = World(random.Random(seed))
    choices = [world.append] * 8 + [world.settle] * 4 + [world.pass_time] * 2 + [world.move] * 2
    choices += [world.truncate, world.delete_before, world.stop, world.kill, world.lose_queues, world.lose_power]
    for _ in range(steps):
        world.chance.choice(choices)()
        world.compare()
    world.stop()
    world.compare()
    for harness in world.both:
        assert isinstance(harness.disk, VirtualDisk)
        assert harness.store is not None
        harness.store.close()


@proves("L5", "J6", "L4")
@pytest.mark.parametrize("number", range(SEEDS))
@pytest.mark.thorough
def test_both_layouts_answer_the_same(number: int, seed: int) -> None:
    run(seed, STEPS)


@pytest.mark.parametrize("found", FOUND)
def test_histories_that_have_found_something(found: int) -> None:
    run(found, STEPS)


@proves("L5", "J6", "L4")
@pytest.mark.long
def test_both_layouts_answer_the_same_over_many_histories(seed: int, proof_report: Callable[..., None]) -> None:
    for number in range(LONG_SEEDS):
        print(f"history {number}: run({seed + number}, {STEPS})")
        run(seed + number, STEPS)
    proof_report(histories=LONG_SEEDS, steps_each=STEPS, partitions=len(PLACES))
