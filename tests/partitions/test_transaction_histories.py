"""Random histories of interleaved transactions over several partitions against a model: what readers of committed and
of all records see, the last stable offset and the lists of aborted transactions. With stops, kills, losses of power,
markers that come late or again, epochs that rise, truncations above the watermark, deletions; on both layouts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from chosen_layout import new_store
from headrace.errors import HeadraceError, OffsetNotAvailable, TransactionUnverified
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL
from headrace.settings.values import LogSettings, log_settings
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from partitions.committed_reader import read
from partitions.led import BROKER, DATA, topic_id
from proving import proves

OTHER = 2
PARTITIONS = 3
PRODUCERS = 5
STEPS = 150
SEEDS = 8
PLAIN = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a model; a marker has no value. `committed` is what a marker says."""

    offset: int
    producer_id: int
    value: bytes | None = None
    committed: bool = False
    number: int = -1
    epoch: int = -1

    @property
    def is_marker(self) -> bool:
        return self.value is None


@dataclass(slots=True)
class Model:
    """What one partition holds: all batches from offset 0 on, each of one record."""

    log: list[Batch] = field(default_factory=list)
    start: int = 0
    watermark: int = 0

    def transactions(self, from_offset: int = 0) -> list[tuple[Batch, Batch | None]]:
        """The first batch of each, and its marker if it has one."""
        opened: dict[int, Batch] = {}
        found: list[tuple[Batch, Batch | None]] = []
        for batch in self.log[from_offset:]:
            if batch.is_marker:
                first = opened.pop(batch.producer_id, None)
                if first is not None:
                    found.append((first, batch))
            elif batch.producer_id != PLAIN:
                opened.setdefault(batch.producer_id, batch)
        return found + [(first, None) for first in opened.values()]

    def stable(self, from_offset: int = 0) -> int:
        undecided = [
            first.offset
            for first, marker in self.transactions(from_offset)
            if marker is None or marker.offset >= self.watermark
        ]
        return max(self.start, min([self.watermark, *undecided]))

    def committed(self, stable: int) -> list[bytes]:
        decided = {
            batch.offset: marker.committed
            for first, marker in self.transactions()
            if marker is not None
            for batch in self.log[first.offset : marker.offset]
            if batch.producer_id == first.producer_id
        }
        return [
            batch.value
            for batch in self.log[self.start : stable]
            if batch.value is not None and (batch.producer_id == PLAIN or decided[batch.offset])
        ]

    def aborted(self, from_offset: int, to_offset: int) -> set[tuple[int, int]]:
        """Those of which records lie between the offsets."""
        return {
            (first.producer_id, first.offset)
            for first, marker in self.transactions()
            if marker is not None and not marker.committed
            if any(
                from_offset <= batch.offset < to_offset and batch.producer_id == first.producer_id
                for batch in self.log[first.offset : marker.offset]
            )
        }

    def all_values(self) -> list[bytes]:
        return [batch.value for batch in self.log[self.start : self.watermark] if batch.value is not None]

    def open_of(self, producer_id: int) -> Batch | None:
        opened = {first.producer_id: first for first, marker in self.transactions() if marker is None}
        return opened.get(producer_id)

    def last_number(self, producer_id: int, from_offset: int = 0) -> int:
        markers = (each for each in self.log[from_offset:] if each.is_marker and each.producer_id == producer_id)
        return max((each.number for each in markers), default=-1)


class World:
    """One broker that leads some partitions; another one's positions are drawn, and so is how far markers got."""

    def __init__(self, layout: str, chance: random.Random) -> None:
        self.layout = layout
        self.chance = chance
        self.clock = VirtualClock()
        self.disk = VirtualDisk(self.clock)
        self.models = {TopicPartition("t", index): Model() for index in range(PARTITIONS)}
        self.epochs = [0] * PRODUCERS
        """Of each producer; some have one per transaction, the others keep theirs."""
        self.sequences: dict[tuple[TopicPartition, int, int], int] = {}
        self.numbers = [0] * PRODUCERS
        self.verdicts: dict[tuple[int, int], bool] = {}
        self.leader_epoch = 0
        self.count = 0
        self.settings: LogSettings = log_settings(
            {}, {"segment.bytes": "1024", "index.interval.bytes": "150", "durability": "disk"}
        )
        self.open()

    def open(self) -> None:
        self.store = new_store(self.disk, self.clock, DATA, self.layout)
        expected = {where: (topic_id("t"), self.settings) for where in self.models} if self.leader_epoch else {}
        self.store.open(expected)
        self.clock.run_soon()
        watermarks = {(topic_id("t"), where.partition): model.watermark for where, model in self.models.items()}
        self.partitions = Partitions(self.store, self.clock, BROKER, watermarks=watermarks)
        self.lead()

    def log(self, where: TopicPartition) -> Log:
        found = self.store.get(where)
        return found if found is not None else self.store.create(where, topic_id("t"), self.settings)

    def lead(self) -> None:
        self.leader_epoch += 1
        self.led: dict[TopicPartition, Partition] = {}
        for where in self.models:
            isr = {BROKER: "", OTHER: "b"}
            partition = self.partitions.lead(self.log(where), self.leader_epoch, isr, (BROKER, OTHER))
            assert partition.core is not None
            self.led[where] = partition
            follower = partition.core.subscribed(OTHER, "b", 0, 0.0)
            follower.start = 0

    def where(self) -> TopicPartition:
        return self.chance.choice(list(self.models))

    # What happens.

    def write_plain(self) -> None:
        where = self.where()
        self.count += 1
        self._append(where, PLAIN, memoryview(kernel.build([(1, b"k", b"%d" % self.count, [])])))

    def write(self) -> None:
        where, producer_id = self.where(), self.chance.randrange(PRODUCERS)
        epoch = self.epochs[producer_id]
        self.count += 1
        sequence = self.sequences.get((where, producer_id, epoch), 0)
        batch = kernel.build(
            [(1, b"k", b"%d" % self.count, [])],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        partition, opened = self.led[where], self.models[where].open_of(producer_id) is not None
        if not opened:
            with pytest.raises(TransactionUnverified):
                partition.append(memoryview(batch), -1)
            assert partition.verified(partition.verification(producer_id, epoch))
        self._append(where, producer_id, memoryview(batch))
        self.sequences[where, producer_id, epoch] = sequence + 1

    def _append(self, where: TopicPartition, producer_id: int, view: memoryview) -> None:
        partition, model = self.led[where], self.models[where]
        offset, _, _ = partition.append(view, -1)
        assert offset == len(model.log)
        epoch = -1 if producer_id == PLAIN else self.epochs[producer_id]
        model.log.append(Batch(offset, producer_id, b"%d" % self.count, epoch=epoch))
        self.end_turn(partition)

    def end_turn(self, partition: Partition) -> None:
        failures: dict[TopicPartition, HeadraceError] = {}
        self.partitions.touch(partition)
        self.partitions.at_turn_end(failures.update)
        self.partitions.end_turn()
        assert not failures

    def end_transaction(self) -> None:
        """In every partition at once, as the coordinator does that has stored its decision; some markers get lost on
        the way and come later."""
        producer_id = self.chance.randrange(PRODUCERS)
        number = self.numbers[producer_id]
        self.numbers[producer_id] += 1
        committed = self.verdicts[producer_id, number] = self.chance.random() < 0.6
        if producer_id % 2:
            self.epochs[producer_id] += 1
        for where in self.models:
            self._mark(where, producer_id, number, committed)

    def _mark(self, where: TopicPartition, producer_id: int, number: int, committed: bool) -> None:
        partition, model = self.led[where], self.models[where]
        repeated = number <= model.last_number(producer_id)
        end = len(model.log)
        version = 2 if producer_id % 2 else 1
        offset, position, _ = partition.append_marker(
            producer_id,
            self.epochs[producer_id],
            0,
            committed=committed,
            number=number,
            transaction_version=version if not repeated else 0,
        )
        self.end_turn(partition)
        if repeated:
            assert partition.log.end_offset == end
            assert position <= end
        else:
            opened = model.open_of(producer_id)
            if committed and version == 2 and opened is not None and opened.epoch < self.epochs[producer_id] - 1:
                # The records that it commits are lost, and so is the marker of those that are there: these are aborted.
                model.log.append(Batch(end, producer_id, None, False, -1))
                end += 1
            assert offset == end
            model.log.append(Batch(offset, producer_id, None, committed, number))

    def repeat_marker(self) -> None:
        """One that came before, or the last one where a truncation has cut it."""
        if self.verdicts:
            producer_id, number = self.chance.choice(list(self.verdicts))
            where = self.where()
            if number <= self.models[where].last_number(producer_id, self.models[where].start):
                self._mark(where, producer_id, number, self.verdicts[producer_id, number])

    def replicate(self) -> None:
        where = self.where()
        partition, model = self.led[where], self.models[where]
        core = partition.core
        assert core is not None
        model.watermark = position = self.chance.randint(model.watermark, len(model.log))
        end = partition.log.end_offset
        core.position_reported(core.followers[OTHER], position, position, position, end, 0.0, start=model.start)
        self.partitions.settle(partition)
        self.clock.run_soon()
        core.position_reported(core.followers[OTHER], position, position, position, end, 0.0, start=model.start)
        self.partitions.settle(partition)
        assert partition.high_watermark == position

    def fail_over(self) -> None:
        """Another broker led for a while: what lies above the watermark may be cut."""
        self.leader_epoch += 1
        for where, model in self.models.items():
            log = self.log(where)
            partition = self.partitions.follow(log, self.leader_epoch, OTHER)
            if self.chance.random() < 0.7:
                del model.log[self.chance.randint(model.watermark, len(model.log)) :]
                log.truncate(len(model.log))
                partition.truncated()
            assert model.stable() <= self.stable_offset(partition) <= model.stable(model.start)
        self.lead()
        self.end_all()

    def end_all(self) -> None:
        """The coordinator sends markers until they are answered below the watermark; producers that have lost batches
        come back with a higher epoch, and their transactions are aborted first."""
        for producer_id in range(PRODUCERS):
            last = self.numbers[producer_id] - 1
            for where, model in self.models.items():
                if last > model.last_number(producer_id):
                    self._mark(where, producer_id, last, self.verdicts[producer_id, last])
            self.numbers[producer_id] += 1
            self.epochs[producer_id] += 1
            self.verdicts[producer_id, last + 1] = False
            for where in self.models:
                self._mark(where, producer_id, last + 1, committed=False)

    def delete(self) -> None:
        where = self.where()
        model = self.models[where]
        model.start = self.chance.randint(model.start, model.watermark)
        partition, core = self.led[where], self.led[where].core
        assert core is not None
        self.partitions.delete_before(partition, model.start)
        follower, at = core.followers[OTHER], model.watermark
        core.position_reported(follower, at, at, at, partition.log.end_offset, 0.0, start=model.start)
        self.partitions.settle(partition)
        self.clock.run_soon()
        assert partition.log.start_offset == model.start

    def pass_time(self) -> None:
        self.clock.advance(self.chance.choice((0.1, 1, 61)))
        self.store.tick()
        self.clock.run_soon()

    def stop(self) -> None:
        assert self.store.close()
        self.open()

    def kill(self) -> None:
        self.store.abandon()
        self.forget_watermarks()
        self.open()

    def forget_watermarks(self) -> None:
        """They are written every few seconds only: after a crash they may be lower. What was decided is not, then."""
        if self.chance.random() < 0.5:
            for model in self.models.values():
                model.watermark = self.chance.randint(model.start, model.watermark)

    def lose_power(self) -> None:
        """The disk has what was synced; the watermark never was above that."""
        self.clock.run_soon()
        durable = {where: self.log(where).durable_offset for where in self.models}
        self.store.abandon()
        self.disk.crash(self.chance.randrange(1 << 30))
        self.forget_watermarks()
        self.open()
        for where, model in self.models.items():
            log = self.log(where)
            assert log.end_offset >= durable[where]
            del model.log[log.end_offset :]
        self.end_all()

    # What must be true.

    def compare(self) -> None:
        for where, model in self.models.items():
            partition = self.led[where]
            assert partition.log.end_offset == len(model.log)
            assert partition.high_watermark == model.watermark
            stable = self.stable_offset(partition)
            # Of a transaction that began before the start a loss of power may leave only the records behind it.
            assert model.stable() <= stable <= model.stable(model.start)
            assert read(partition, model.start, committed=True) == model.committed(stable)
            assert read(partition, model.start, committed=False) == model.all_values()
            self._compare_aborted(partition, model, stable)

    def stable_offset(self, partition: Partition) -> int:
        """Once it is known."""
        for _ in range(1000):
            try:
                return partition.last_stable_offset
            except OffsetNotAvailable:
                self.clock.run_soon()
        raise AssertionError("producers are not loaded")

    def _compare_aborted(self, partition: Partition, model: Model, stable: int) -> None:
        first = self.chance.randint(model.start, stable)
        last = self.chance.randint(first, stable)
        found = set(partition.log.aborted(first, last))
        known = model.aborted(first, last)
        if not model.start:
            assert known <= found
            assert found <= model.aborted(0, len(model.log))
        else:  # where the start was raised, one may be known from its first record that is left
            assert {producer_id for producer_id, _ in known} <= {producer_id for producer_id, _ in found}


@proves("T1", "T2")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("number", range(SEEDS))
def test_transactions_are_what_their_model_says(layout: str, number: int, seed: int) -> None:
    world = World(layout, random.Random(seed))
    steps = [world.write] * 8 + [world.write_plain] * 2 + [world.end_transaction] * 3 + [world.replicate] * 4
    steps += [world.repeat_marker] * 2 + [world.pass_time, world.delete, world.stop, world.kill, world.fail_over]
    steps += [world.lose_power]
    for _ in range(STEPS):
        world.chance.choice(steps)()
        world.compare()
