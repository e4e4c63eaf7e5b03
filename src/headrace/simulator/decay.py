"""Bytes that flip on the platters of two machines while brokers run there.

A flip hits a batch that is synced, in what its CRC covers. The page cache has it as it was, until it is dropped: at
once, when the machine loses its power, or at the end. No record is hit on both machines, nor where no other has it yet,
so that another replica has it whole at all times: where nobody else has a damaged record, a partition waits for an
operator. Above the checkpoint a start takes damage for a torn write and cuts all from there on, so all of that counts
as hit: two machines that are both cut lack what was hit on neither. A broker trusts what it wrote itself, so it need
not notice before its next start; but nobody accepts a batch whose CRC is wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.errors import HeadraceError
from headrace.records.batch import ATTRIBUTES_AT
from headrace.simulator.history import History
from headrace.simulator.machine import DATA, PERHAPS_TORN_BYTES, Machine
from headrace.simulator.registers import NEVER
from headrace.storage import shortfall, verify
from headrace.storage.folder import SHARED, layout_of
from headrace.storage.log import TopicPartition
from headrace.storage.report import DumpedBatch

DECAYS_MAX: Final = 4
WORN: Final = 2
"""Machines."""
RESTART_SECONDS: Final = 2.0
DROPPED_SHARE: Final = 0.5
"""Of flips, those after which the page cache goes at once."""


class Loss(NamedTuple):
    """What a machine may lack at its next start, because a byte of it is wrong."""

    where: TopicPartition
    first: int
    next: int
    others: bool = False
    """Whether it may lack anything of all other partitions too."""

    def meets(self, other: Loss) -> bool:
        """Whether both may lack the same record."""
        if self.where != other.where:
            return self.others or other.others
        return self.first < other.next and other.first < self.next


def loss_of(where: TopicPartition, first: int, next_offset: int, safe_to: int, layout: str) -> Loss:
    """By a flip in a batch of a log that is safe up to an offset, as the checkpoint tells."""
    if next_offset <= safe_to:
        return Loss(where, first, next_offset)
    return Loss(where, first, NEVER, others=layout == SHARED)


class Decay:
    def __init__(self, seed: int, machines: Sequence[Machine], history: History) -> None:
        self._random = random.Random(f"{seed} decay of bytes")
        self._machines = machines
        self._history = history
        self._worn = self._random.sample(list(machines), WORN)
        self._hits: list[tuple[Machine, Loss]] = []

    def strike(self) -> str | None:
        """Answers what was hit, None if there was nothing."""
        machine = self._random.choice(self._worn)
        if len(self._hits) >= DECAYS_MAX or machine.participant is None:
            return None
        found = [each for each in _losses(machine) if not self._is_hit_elsewhere(machine, each[1])]
        if not found:
            return None
        batch, loss = self._random.choice(found)
        header = batch.header
        if all(_lacks(each, batch) for each in self._machines if each is not machine):
            return None
        position = batch.position + self._random.randrange(ATTRIBUTES_AT, header.size_bytes)
        machine.disk.decay(batch.path, position, 1 << self._random.randrange(8))
        self._hits.append((machine, loss))
        self._history.damaged(batch.topic_partition, header.base_offset)
        dropped = self._random.random() < DROPPED_SHARE
        if dropped:
            machine.disk.drop_caches()
        what = "seen" if dropped else "cached"
        return f"{machine.name} {what} {batch.topic_partition} {header.base_offset} {batch.path} at {position}"

    async def restart(self) -> None:
        """At the end no page cache has anything, and those that were hit are started one after the other: the first
        mends itself while the second, which may lead it, does not know of its own damage yet."""
        hit = [machine for machine in self._worn if any(each is machine for each, _ in self._hits)]
        for machine in hit:
            machine.disk.drop_caches()
        for machine in hit:
            machine.kill()
            await asyncio.sleep(RESTART_SECONDS)

    def _is_hit_elsewhere(self, machine: Machine, loss: Loss) -> bool:
        return any(each is not machine and known.meets(loss) for each, known in self._hits)


def _lacks(machine: Machine, batch: DumpedBatch) -> bool:
    """Whether the broker there is known not to have come as far."""
    if machine.participant is None:
        return False
    where = batch.topic_partition
    found = machine.participant.partitions.find_replica(where.topic, where.partition)
    return found is None or found.log.written_offset <= batch.header.base_offset


def _losses(machine: Machine) -> list[tuple[DumpedBatch, Loss]]:
    """Batches that can be hit, and what may be lost by that."""
    assert machine.participant is not None
    layout = layout_of(machine.disk, DATA)
    held = shortfall.held(machine.disk, DATA) or {}
    logs = machine.participant.store.logs()
    safe_to = {log.topic_partition: held.get(shortfall.key_of(log), shortfall.NOTHING).end_offset for log in logs}
    found = []
    for batch in _batches(machine):
        where, header = batch.topic_partition, batch.header
        loss = loss_of(where, header.base_offset, header.next_offset, safe_to.get(where, 0), layout)
        found.append((batch, loss))
    return found


def _batches(machine: Machine) -> list[DumpedBatch]:
    """Those that are synced, and followed by so much that is that nobody takes damage for a torn write."""
    safe = machine.safe_bytes(PERHAPS_TORN_BYTES)
    found = []
    try:
        for each in verify.dump(machine.disk, DATA):
            if isinstance(each, DumpedBatch) and each.position + each.header.size_bytes <= safe.get(each.path, 0):
                found.append(each)
    except HeadraceError:
        pass  # what is written right now may look wrong
    return found
