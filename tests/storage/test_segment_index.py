"""The indexes of a segment: found in pages of their files, and made again when the disk has lost them."""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from pathlib import Path

import pytest

from headrace.storage.segments.index import OffsetIndex, TimeIndex
from headrace.storage.segments.log import PartitionedLog
from headrace.system.disk import SystemDisk
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, values

SMALL = {"segment_bytes": 100_000, "index_interval_bytes": 1}
PATH = "/i.index"


def filled(count: int) -> tuple[VirtualDisk, OffsetIndex, list[tuple[int, int]]]:
    disk = VirtualDisk(VirtualClock())
    index, entries = OffsetIndex(disk, PATH, 1 << 20), [(3 * nth + 2, 70 * nth + 70) for nth in range(count)]
    for entry in entries:
        index.append(*entry)
    return disk, index, entries


def before(entries: list[tuple[int, int]], asked: int, part: int) -> tuple[int, int]:
    at = bisect_right([entry[part] for entry in entries], asked)
    return entries[at - 1] if at else (0, 0)


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("closed", [True, False])
def test_every_entry_is_found_wherever_its_page_lies(count: int, closed: bool) -> None:
    disk, index, entries = filled(count)
    if closed:
        index.cut(1 << 30)
        index = OffsetIndex(disk, PATH, 1 << 20, -1)
        assert index.load(1 << 30)
    assert index.count == count
    asked = {n for at in (0, 1, 510, 511, 512, 513, count - 1, count) for n in range(3 * at, 3 * at + 6)}
    for offset in sorted(asked):
        assert index.at_or_before(offset) == before(entries, offset, 0)
    for position in (0, 69, 70, 71, 70 * 512, 70 * 513, 70 * count, 70 * count + 1):
        assert index.at_or_below_position(position) == before(entries, position, 1)
        assert index.entries_below(position) == sum(at < position for _, at in entries)
    assert [index.entry(at) for at in range(count)] == entries


def test_entries_taken_back_are_written_anew_from_there(seed: int) -> None:
    """Over the borders of pages too, and while some of them are kept in memory."""
    draw, disk = random.Random(seed), VirtualDisk(VirtualClock())
    index, times = OffsetIndex(disk, PATH, 1 << 20), TimeIndex(disk, "/i.timeindex", 1 << 20)
    entries: list[tuple[int, int]] = []
    last = 0
    for _ in range(60):
        for _ in range(draw.randrange(400)):
            last += draw.randrange(1, 4)
            entries.append((last, 9 * last))
            index.append(*entries[-1])
            times.append(1000 + last, last)
        for asked in draw.sample(range(last + 2), min(20, last + 2)):
            assert index.at_or_before(asked) == before(entries, asked, 0)
            assert times.entries_upto(asked) == bisect_right([offset for offset, _ in entries], asked)
        if draw.random() < 0.2:
            index.cut(7)
            times.cut(7)
            assert index.at_or_before(last) == before(entries, last, 0)
        del entries[draw.randrange(len(entries) // 2, len(entries) + 1) :]
        index.count = times.count = len(entries)
        assert index.at_or_before(last) == before(entries, last, 0)
        last = entries[-1][0] if entries else 0
    index.cut(7)
    again = OffsetIndex(disk, PATH, 1 << 20, -1)
    assert again.load(7)
    assert [again.entry(at) for at in range(again.count)] == entries


def two_segments(harness: Harness) -> PartitionedLog:
    log = harness.log(**SMALL)
    assert isinstance(log, PartitionedLog)
    for nth in range(2000):
        append(log, batch(b"%d" % nth, timestamp_ms=1_750_000_000_000 + nth))
    harness.write()
    harness.settle()
    assert len(log.segments) >= 2
    assert log.segments[0].index.count > 1024
    return log


@proves("G8")
@pytest.mark.parametrize("ending", ["index", "timeindex"])
def test_a_file_that_is_cut_short_under_its_reader_costs_an_index_and_not_the_process(
    real: Harness, ending: str
) -> None:
    """Mapped into memory, it would have ended the process with SIGBUS."""
    log = two_segments(real)
    first = log.segments[0]
    first.release()
    assert first.locate(first.base_offset + 3) > 0
    assert log.offset_for_time(1_750_000_000_000) is not None
    os.truncate(f"{first.stem}.{ending}", 0)
    assert log.offset_for_time(1_750_000_000_900) is not None
    assert first.locate(first.next_offset - 3) > 0
    assert values(log) == [b"%d" % nth for nth in range(2000)]
    assert os.stat(f"{first.stem}.index").st_size == (first.index.count + 1) * 8


@proves("G8")
def test_a_sector_of_an_index_that_cannot_be_read_costs_the_index_and_no_record(sim: Harness) -> None:
    log = two_segments(sim)
    assert isinstance(sim.disk, VirtualDisk)
    first = log.segments[0]
    damaged: list[int] = []
    log.on_damage = damaged.append
    first.release()
    sim.disk.go_bad(first.index.path, 0)
    for offset in (first.base_offset + 5, first.next_offset - 3):
        assert log.read(offset, 1, log.written_offset).count
    assert values(log) == [b"%d" % nth for nth in range(2000)]
    assert damaged == []


def test_the_pages_of_a_real_file_are_read_as_they_were_written(tmp_path: Path) -> None:
    index = OffsetIndex(SystemDisk(), str(tmp_path / "i.index"), 1 << 20)
    for nth in range(3000):
        index.append(nth + 1, 10 * nth)
    assert index.at_or_before(700) == (700, 6990)
    index.cut(7)
    assert os.stat(tmp_path / "i.index").st_size == 3001 * 8
    assert index.at_or_before(700) == (700, 6990)
