"""A file in the middle of a log has lost its end, or all: no read goes on behind it as if nothing had been there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import CorruptBatch
from headrace.ports.disk import Disk
from headrace.records.batch import batches
from headrace.storage.commitlog.frames import MAGIC
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.scan import walk
from headrace.storage.segments import compaction
from headrace.storage.segments.log import PartitionedLog
from proving import proves
from storage.harness import Harness, append, batch, content, sim_harness

COUNT = 40


def shorten(disk: Disk, path: str) -> None:
    file = disk.open(path, writable=True)
    file.truncate(file.size() // 2)
    file.close()


def cut_between_batches(disk: Disk, path: str) -> None:
    file = disk.open(path, writable=True)
    content = file.pread(file.size(), 0)
    half = content.find(MAGIC, len(content) // 2)
    if half < 0:
        half = next(at for at, _ in walk(file, 0, len(content)) if at > len(content) // 2)
    file.truncate(half)
    file.close()


def empty(disk: Disk, path: str) -> None:
    file = disk.open(path, writable=True)
    file.truncate(0)
    file.close()


def remove(disk: Disk, path: str) -> None:
    disk.remove(path)


def filled(layout: str) -> Harness:
    harness = sim_harness(layout)
    harness.file_bytes = 2048
    log = harness.log(segment_bytes=1024, index_interval_bytes=100)
    for n in range(COUNT):
        append(log, batch(b"%d" % n * 20), epoch=n // 10)
        assert not harness.write()
    harness.settle()
    return harness


def stop(harness: Harness, how: str) -> None:
    if how != "killed above the checkpoint":
        harness.advance(61)
    assert harness.store is not None
    if how == "stopped":
        harness.store.close()
    else:
        harness.store.abandon()


def start(harness: Harness, *, same_boot: bool = True) -> Log:
    harness.store = harness.new_store()
    harness.store.open(harness.expected, same_boot=same_boot)
    harness.commit()
    return harness.log()


def dense(log: Log, read: Callable[[int], bytes]) -> int:
    """Read on and on; answers at which offset damage was told, and every batch before it was there."""
    offset = log.start_offset
    try:
        while offset < log.end_offset:
            found = list(batches(memoryview(read(offset))))
            assert found, f"no progress at {offset}"
            for header, _ in found:
                assert header.base_offset == offset
                offset = header.next_offset
    except CorruptBatch:
        return offset
    return log.end_offset


@proves("F7")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("how", ["stopped", "killed", "killed above the checkpoint"])
@pytest.mark.parametrize("lose", [shorten, cut_between_batches, empty, remove])
def test_what_a_file_has_lost_is_told_and_not_passed_over(
    lose: Callable[[Disk, str], None], how: str, layout: str
) -> None:
    harness = filled(layout)
    stop(harness, how)
    folder = "/data/@commitlog" if layout == SHARED else "/data/orders/orders-0"
    names = sorted(name for name in harness.disk.list(folder) if name.endswith(".log"))
    assert len(names) > 2
    lose(harness.disk, f"{folder}/{names[1]}")
    log = start(harness)
    whole = dense(log, lambda offset: content(log.read(offset, 1 << 20, log.written_offset, warm=True)))
    assert 0 < whole < COUNT
    seen = -1
    try:
        for header, _ in log.headers(0):
            assert header.base_offset == seen + 1
            seen = header.base_offset
    except CorruptBatch:
        assert seen == whole - 1
    else:
        pytest.fail(f"headers end with {seen}, and nothing was told")


@pytest.mark.parametrize("same_boot", [True, False])
@pytest.mark.parametrize("how", ["stopped", "killed", "killed above the checkpoint"])
@pytest.mark.parametrize("lose", [shorten, cut_between_batches, empty])
def test_what_a_compacted_segment_has_lost_is_not_taken_for_what_compaction_left_out(
    lose: Callable[[Disk, str], None], how: str, same_boot: bool
) -> None:
    harness = sim_harness(PARTITIONED)
    log = harness.log(cleanup_policy="compact", segment_bytes=1024, index_interval_bytes=100)
    assert isinstance(log, PartitionedLog)
    for n in range(COUNT):  # of every second key only the last is kept
        append(log, batch(b"%d" % n * 20, key=b"%d" % (n if n % 2 else 0)), epoch=1)
        assert not harness.write()
    harness.settle()
    for ready in compaction.steps(log, harness.disk, harness.clock.wall_ms()):
        while callable(ready) and not ready():
            harness.settle()
    stop(harness, how)
    lost = log.segments[1]
    assert lost.cleaned
    lose(harness.disk, lost.path)
    log = start(harness, same_boot=same_boot)
    if how == "killed above the checkpoint" and not same_boot:  # nothing tells that it was synced
        assert lost.base_offset <= log.end_offset < lost.next_offset
        return
    assert log.end_offset == COUNT
    seen = -1

    def read_all() -> None:
        nonlocal seen
        while seen < COUNT - 1:
            for header, _ in batches(memoryview(content(log.read(seen + 1, 1 << 20, COUNT, warm=True)))):
                seen = header.next_offset - 1

    with pytest.raises(CorruptBatch):
        read_all()
    assert seen < lost.next_offset
    last, _ = list(batches(memoryview(content(log.read(lost.next_offset, 1 << 20, COUNT, warm=True)))))[-1]
    assert last.next_offset == COUNT


@pytest.mark.parametrize("above", [True, False])
def test_damage_across_a_cut_does_not_bring_back_what_was_cut(above: bool) -> None:
    """The bytes behind a cut are still in their file when the process is killed; a bad stretch reaches into them."""
    harness = filled(PARTITIONED)
    if not above:
        harness.advance(61)
    log = harness.log()
    assert isinstance(log, PartitionedLog)
    segment = log.segments[1]
    cut = segment.base_offset + 3
    before, behind = segment.locate(cut - 1), segment.locate(cut + 1)
    log.truncate(cut)
    stop(harness, "killed above the checkpoint")
    file = harness.disk.open(segment.path, writable=True)
    file.pwritev([b"\xff" * (behind - before)], before)
    file.close()
    log = start(harness)
    assert log.end_offset <= cut
    assert dense(log, lambda offset: content(log.read(offset, 1 << 20, log.written_offset, warm=True))) == cut - 1
