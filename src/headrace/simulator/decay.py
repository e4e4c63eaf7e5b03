"""Bytes that flip on the platters of two machines while brokers run there.

A flip hits a batch that is synced, in what its CRC covers. The page cache has it as it was, until it is dropped: at
once, when the machine loses its power, or at the end. No record is hit on both machines, nor where no other has it yet,
so that another replica has it whole at all times: where nobody else has a damaged record, a partition waits for an
operator. After a loss of power a start takes damage above the checkpoint for a torn write and cuts all from there on:
two machines that are both cut lack what was hit on neither. So where any machine may lose its power at any time, either
all that may be cut counts as hit, or a machine that is hit loses only its process. A broker trusts what it wrote
itself, so it need not notice before its next start; but nobody accepts a batch whose CRC is wrong.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from headrace.errors import HeadraceError
from headrace.records.batch import ATTRIBUTES_AT
from headrace.simulator.harm import ANY
from headrace.simulator.history import History
from headrace.simulator.machine import DATA, PERHAPS_TORN_BYTES, Machine
from headrace.simulator.registers import NEVER
from headrace.storage import shortfall
from headrace.storage.folder import SHARED, layout_of
from headrace.storage.log import TopicPartition
from headrace.storage.offline import verify
from headrace.storage.offline.report import DumpedBatch

DECAYS_MAX: Final = 4
WORN: Final = 2
"""Machines."""
RESTART_SECONDS: Final = 2.0
DROPPED_SHARE: Final = 0.5
"""Of flips, those after which the page cache goes at once."""

CUTS_SHARE: Final = 0.5
"""Of the runs in which any machine may lose its power."""

Content = tuple[TopicPartition, int, int, int]
"""What tells batches apart: with its offset its epoch and CRC."""


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
    """By a flip in a batch of a log that is safe up to an offset; all behind that may be cut."""
    if next_offset <= safe_to:
        return Loss(where, first, next_offset)
    return Loss(where, first, NEVER, others=layout == SHARED)


class Decay:
    def __init__(self, seed: int, machines: Sequence[Machine], history: History, regime: str) -> None:
        self._random = random.Random(f"{seed} decay of bytes")
        self._machines = machines
        self._history = history
        self._cuts = regime == ANY and random.Random(f"{seed} decay without power").random() < CUTS_SHARE
        """Whether what may be cut counts as hit."""
        self._spares = regime == ANY and not self._cuts
        self._worn = self._random.sample(list(machines), WORN)
        self._hits: list[tuple[Machine, Loss]] = []

    def keeps_power(self, machine: Machine) -> bool:
        """Whether the machine must not lose its power any more."""
        return self._spares and any(each is machine for each, _ in self._hits)

    def strike(self) -> str | None:
        """Answers what was hit, None if there was nothing."""
        machine = self._random.choice(self._worn)
        if len(self._hits) >= DECAYS_MAX or machine.participant is None:
            return None
        found = [each for each in self._losses(machine) if not self._is_hit_elsewhere(machine, each[1])]
        if not found:
            return None
        batch, loss = self._random.choice(found)
        header = batch.header
        others = [each for each in self._machines if each is not machine]
        if _content(batch) not in _contents(others):
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

    def _losses(self, machine: Machine) -> list[tuple[DumpedBatch, Loss]]:
        """Batches that can be hit, and what may be lost by that."""
        safe_to = _safe_to(machine) if self._cuts else {}
        layout = layout_of(machine.disk, DATA)
        found = []
        # Followed by so much that is synced that nobody takes damage for a torn write.
        for batch in synced_batches(machine, PERHAPS_TORN_BYTES):
            where, header = batch.topic_partition, batch.header
            safe = safe_to.get(where, 0) if self._cuts else NEVER
            loss = loss_of(where, header.base_offset, header.next_offset, safe, layout)
            found.append((batch, loss))
        return found

    def _is_hit_elsewhere(self, machine: Machine, loss: Loss) -> bool:
        return any(each is not machine and known.meets(loss) for each, known in self._hits)


def alone_in(machine: Machine, others: Sequence[Machine]) -> dict[str, list[range]]:
    """By file, the bytes of batches that no other machine has safe, with the heads of their frames: what is damaged
    there nobody could mend."""
    elsewhere = _contents(others)
    by_path: dict[str, list[DumpedBatch]] = {}
    for batch in synced_batches(machine):
        by_path.setdefault(batch.path, []).append(batch)
    found: dict[str, list[range]] = {}
    for path, batches in by_path.items():
        end, head = 0, range(0)
        for batch in sorted(batches, key=lambda each: each.position):
            if batch.position > end:
                head = range(end, batch.position)
            end = batch.position + batch.header.size_bytes
            if _content(batch) not in elsewhere:
                found.setdefault(path, []).extend((head, range(batch.position, end)))
    return found


def batch_at(batches: Iterable[DumpedBatch], path: str, position: int) -> DumpedBatch | None:
    """The one that is damaged if that byte of its file is: it is in the batch, or in the head of its frame."""
    there = [each for each in batches if each.path == path and position < each.position + each.header.size_bytes]
    return min(there, key=lambda each: each.position, default=None)


def _safe_to(machine: Machine) -> dict[TopicPartition, int]:
    """How far each log is safe by the checkpoint."""
    assert machine.participant is not None
    held = shortfall.held(machine.disk, DATA) or {}
    logs = machine.participant.store.logs()
    return {log.topic_partition: held.get(shortfall.key_of(log), shortfall.NOTHING).end_offset for log in logs}


def _contents(machines: Sequence[Machine]) -> set[Content]:
    """Of all batches that are safe on one of the machines."""
    return {_content(batch) for machine in machines for batch in synced_batches(machine)}


def _content(batch: DumpedBatch) -> Content:
    header = batch.header
    return batch.topic_partition, header.base_offset, header.leader_epoch, header.crc


def synced_batches(machine: Machine, spared_bytes: int = 0) -> list[DumpedBatch]:
    """Those that are whole and synced, but for the last bytes of each log."""
    safe = machine.safe_bytes(spared_bytes)
    found = []
    try:
        for each in verify.dump(machine.disk, DATA):
            if isinstance(each, DumpedBatch) and each.position + each.header.size_bytes <= safe.get(each.path, 0):
                found.append(each)
    except HeadraceError:
        pass  # what is written right now may look wrong
    return found
