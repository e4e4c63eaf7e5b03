"""A batch's CRC does not cover its base offset. In a log with gaps any later one could be right, but for what a segment
has room for."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptBatch
from headrace.records.batch import read_header
from headrace.storage.log import Log
from headrace.storage.offline.verify import verify
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, batch, sim_harness

OFFSETS = [3 * nth for nth in range(8)]
DAMAGED = OFFSETS[4]


def with_gaps() -> tuple[Harness, Log]:
    sim = sim_harness()
    log = sim.log(durability="disk")
    for offset in OFFSETS:
        copied = bytearray(batch(b"%d" % offset))
        copied[:8], copied[12:16] = offset.to_bytes(8, "big"), bytes(4)
        log.append_copied(memoryview(copied))
        sim.write()
        sim.settle()
    return sim, log


@proves("J6")
@pytest.mark.parametrize("byte", [0, 1, 3])
@pytest.mark.parametrize("told", [True, False])
def test_an_offset_that_no_segment_has_room_for_is_damage_and_the_broker_starts(byte: int, told: bool) -> None:
    """`told`: a checkpoint speaks of it."""
    sim, log = with_gaps()
    if told:
        sim.advance(61)
    piece = log.read(DAMAGED, 1, log.written_offset).slices[0]
    assert read_header(memoryview(piece.read())).base_offset == DAMAGED
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.flip(piece.file.path, piece.position + byte, 0x40)
    log = sim.kill()
    assert log.offline is None
    if told:
        assert log.end_offset == OFFSETS[-1] + 1
        with pytest.raises(CorruptBatch):
            log.read(DAMAGED, 1, log.written_offset, warm=True)
    else:
        assert log.end_offset == OFFSETS[3] + 1, "what follows may be a torn write"
    assert log.read(OFFSETS[3], 1, log.written_offset, warm=True).count
    assert sim.store is not None
    sim.store.close()
    assert told == any(
        "at the latest" in problem.what for report in verify(sim.disk, sim.data) for problem in report.problems
    )
