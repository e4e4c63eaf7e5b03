"""Bytes that flip on the platters of two machines while brokers run there.

A flip hits a batch that is synced, in what its CRC covers. The page cache has it as it was, until it is dropped: at
once, when the machine loses its power, or at the end. No record is hit on both machines, nor where no other has it yet,
so that another replica has it whole at all times: where nobody else has a damaged record, a partition waits for an
operator. A broker trusts what it wrote itself, so it need not notice before its next start; but nobody accepts a batch
whose CRC is wrong.
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
from headrace.storage import verify
from headrace.storage.log import TopicPartition
from headrace.storage.report import DumpedBatch

DECAYS_MAX: Final = 4
WORN: Final = 2
"""Machines."""
RESTART_SECONDS: Final = 2.0
DROPPED_SHARE: Final = 0.5
"""Of flips, those after which the page cache goes at once."""


class Hit(NamedTuple):
    machine: Machine
    where: TopicPartition
    first: int
    next: int


class Decay:
    def __init__(self, seed: int, machines: Sequence[Machine], history: History) -> None:
        self._random = random.Random(f"{seed} decay of bytes")
        self._machines = machines
        self._history = history
        self._worn = self._random.sample(list(machines), WORN)
        self._hits: list[Hit] = []

    def strike(self) -> str | None:
        """Answers what was hit, None if there was nothing."""
        machine = self._random.choice(self._worn)
        if len(self._hits) >= DECAYS_MAX or machine.participant is None:
            return None
        found = [each for each in _batches(machine) if not self._is_hit_elsewhere(machine, each)]
        if not found:
            return None
        batch = self._random.choice(found)
        header = batch.header
        if all(_lacks(each, batch) for each in self._machines if each is not machine):
            return None
        position = batch.position + self._random.randrange(ATTRIBUTES_AT, header.size_bytes)
        machine.disk.decay(batch.path, position, 1 << self._random.randrange(8))
        self._hits.append(Hit(machine, batch.topic_partition, header.base_offset, header.next_offset))
        self._history.damaged(batch.topic_partition, header.base_offset)
        dropped = self._random.random() < DROPPED_SHARE
        if dropped:
            machine.disk.drop_caches()
        what = "seen" if dropped else "cached"
        return f"{machine.name} {what} {batch.topic_partition} {header.base_offset} {batch.path} at {position}"

    async def restart(self) -> None:
        """At the end no page cache has anything, and those that were hit are started one after the other: the first
        mends itself while the second, which may lead it, does not know of its own damage yet."""
        hit = [machine for machine in self._worn if any(hit.machine is machine for hit in self._hits)]
        for machine in hit:
            machine.disk.drop_caches()
        for machine in hit:
            machine.kill()
            await asyncio.sleep(RESTART_SECONDS)

    def _is_hit_elsewhere(self, machine: Machine, batch: DumpedBatch) -> bool:
        header = batch.header
        return any(
            hit.machine is not machine
            and hit.where == batch.topic_partition
            and header.base_offset < hit.next
            and hit.first < header.next_offset
            for hit in self._hits
        )


def _lacks(machine: Machine, batch: DumpedBatch) -> bool:
    """Whether the broker there is known not to have come as far."""
    if machine.participant is None:
        return False
    where = batch.topic_partition
    found = machine.participant.partitions.find_replica(where.topic, where.partition)
    return found is None or found.log.written_offset <= batch.header.base_offset


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
