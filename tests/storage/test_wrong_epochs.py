"""A batch's CRC does not cover its epoch. One that changed on disk is damage of that batch, and no epoch of the log."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptBatch
from headrace.records.batch import batches
from headrace.sim.disk import SimDisk
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, Tail
from proving import proves
from storage.harness import Harness, append, batch, content, sim_harness

LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
EPOCH_AT = 12
BATCHES = 8
STARTS = [(2, 0), (3, 4)]


def filled(layout: str, batches_a_write: int) -> tuple[Harness, Log]:
    """Nothing of it is in a checkpoint."""
    sim = sim_harness(layout)
    sim.file_bytes = 1 << 20
    log = sim.log(durability="disk")
    for n in range(BATCHES):
        append(log, batch(b"%d" % n), epoch=2 if n < 4 else 3)
        if (n + 1) % batches_a_write == 0:
            assert not sim.write()
            sim.settle()
    assert log.durable_offset == BATCHES
    return sim, log


def flip_epoch(sim: Harness, log: Log, offset: int, byte: int, mask: int) -> None:
    piece = log.read(offset, 1, log.written_offset, warm=True).slices[0]
    assert isinstance(sim.disk, SimDisk)
    sim.disk.flip(piece.file.path, piece.position + EPOCH_AT + byte, mask)


def open_again(sim: Harness, same_boot: bool) -> Log:
    assert sim.store is not None
    sim.store.abandon()
    sim.store = sim.new_store()
    sim.store.open(sim.expected, same_boot=same_boot)
    sim.commit()
    return sim.log()


def sound_offsets(log: Log) -> list[int]:
    found = []
    for offset in range(log.start_offset, log.end_offset):
        try:
            piece = log.read(offset, 1, log.written_offset, warm=True)
        except CorruptBatch:
            continue
        found += [header.base_offset for header, _ in batches(memoryview(content(piece)))]
    return sorted(set(found))


@proves("J6")
@LAYOUTS
@pytest.mark.parametrize("batches_a_write", [1, 4, 8])
@pytest.mark.parametrize(
    ("byte", "mask"), [(1, 4), (3, 1), (0, 0x80)], ids=["far above", "the other epoch", "negative"]
)
@pytest.mark.parametrize("offset", [0, 2, 4, BATCHES - 1])
def test_a_wrong_epoch_is_damage_of_its_own_batch(
    layout: str, batches_a_write: int, byte: int, mask: int, offset: int
) -> None:
    sim, log = filled(layout, batches_a_write)
    flip_epoch(sim, log, offset, byte, mask)
    log = open_again(sim, same_boot=True)
    assert [entry for entry in STARTS if entry[1] < offset] == [
        entry for entry in log.epoch_starts() if entry[1] < offset
    ]
    assert log.last_epoch() <= 3
    others = [n for n in range(BATCHES) if n != offset]
    if layout == PARTITIONED:  # above the recovery point it looks like a torn write
        others = others[:offset]
        assert (log.end_offset, log.tail) == (offset, Tail.HOLED if offset < BATCHES - 1 else Tail.TORN)
    assert sound_offsets(log) == others
    log = open_again(sim, same_boot=True)
    assert (log.last_epoch() <= 3, sound_offsets(log)) == (True, others)


@LAYOUTS
@pytest.mark.parametrize("number", range(20))
def test_epochs_that_a_loss_of_power_took_from_their_file_are_in_the_log(layout: str, number: int) -> None:
    sim, _ = filled(layout, 1)
    log = sim.kill(number)
    assert (sound_offsets(log), log.epoch_starts()) == (list(range(BATCHES)), STARTS)
