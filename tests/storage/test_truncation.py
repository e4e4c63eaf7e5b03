"""A truncation and what is appended behind it, over a loss of power: what was before or what is after, never both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from headrace.errors import HeadraceError, StorageFull
from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage.commitlog.queuefile import QUEUE
from headrace.storage.epochs import ENTRY as EPOCH_ENTRY
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import EpochEnd, Log
from headrace.storage.offline import verify
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, read_all, sim_harness, values

SMALL = {"segment_bytes": 1024, "index_interval_bytes": 100, "durability": "disk"}
BOTH = [PARTITIONED, SHARED]
FOLDER = "/data/orders/orders-0"


def filled(layout: str, count: int = 40) -> Harness:
    """Everything is synced, and the checkpoint says so."""
    harness = sim_harness(layout)
    log = harness.log(**SMALL)
    for n in range(count):
        append(log, batch(b"old %d" % n + b"." * (n % 7) * 20, producer=(5, 0, n)), epoch=n // 10)
        assert not harness.write()
    harness.settle()
    harness.advance(61)
    assert log.durable_offset == count
    return harness


def is_damaged(harness: Harness) -> bool:
    log = harness.log()
    return isinstance(log, PartitionedLog) and any(segment.damage for segment in log.segments)


@proves("F13")
@pytest.mark.thorough
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("cut", [1, 13, 17, 33, 39])
def test_a_loss_of_power_leaves_what_was_before_a_truncation_or_what_is_after_it(layout: str, cut: int) -> None:
    old = values(filled(layout).log())
    for seed in range(16):
        harness = filled(layout)
        log, new = harness.log(), old[:cut]
        log.truncate(cut)
        for n in range(seed % 12):
            append(log, batch(b"new %d" % n, producer=(5, 1, n)), epoch=9)
            new.append(b"new %d" % n)
            harness.write()
            if n == seed % 5:
                harness.clock.run_soon()
        durable = log.durable_offset
        log = harness.kill(seed=seed)
        found = values(log)
        assert not is_damaged(harness), (cut, seed)
        assert found in (old[: len(found)], new[: len(found)]), (cut, seed, found)
        assert len(found) >= min(durable, cut), (cut, seed)
        assert durable <= cut or found[:durable] == new[:durable], (cut, seed)
        append(log, batch(b"next"), epoch=20)
        harness.write()
        harness.settle()
        assert values(harness.reopen()) == [*found, b"next"]
        assert [str(p) for report in verify.reports(harness.disk, "/data") for p in report.problems] == []


@proves("F13")
@pytest.mark.parametrize("layout", BOTH)
def test_a_truncation_is_durable_when_its_log_was_synced(layout: str) -> None:
    for seed in range(20):
        harness = filled(layout)
        harness.log().truncate(17)
        harness.settle()
        log = harness.kill(seed=seed)
        assert (log.end_offset, log.epoch_starts()[-1]) == (17, (1, 10)), seed


@pytest.mark.parametrize("layout", BOTH)
def test_a_loss_of_power_after_a_new_beginning_leaves_the_old_log_or_the_new_one(layout: str) -> None:
    old = values(filled(layout).log())
    for start in (3, 40, 1000):
        for seed in range(12):
            harness = filled(layout)
            log = harness.log()
            log.restart_at(start)
            assert (log.last_epoch(), log.epoch_end(9)) == (-1, None)
            for n in range(seed % 6):
                append(log, batch(b"new %d" % n), epoch=1)
                harness.write()
            log = harness.kill(seed=seed)
            assert not is_damaged(harness)
            found = [(r.offset, r.value) for _, view in read_all(log) for r in kernel.records(view)]
            is_old = found == list(enumerate(old))[: len(found)]
            assert is_old or found == [(start + n, b"new %d" % n) for n in range(len(found))], (start, seed)


def started_anew(harness: Harness) -> Iterator[Log]:
    """The log as it is, after a stop, after a kill, and built from its batches alone after a stop and after a kill."""
    yield harness.log()
    yield harness.reopen()
    yield harness.kill()
    derived = EPOCHS_FILE if harness.layout == PARTITIONED else QUEUE
    for is_clean in (True, False):
        assert harness.store is not None
        if is_clean:
            harness.store.close()
        else:
            harness.store.abandon()
        for name in harness.disk.list(FOLDER):
            if name.endswith(derived):
                harness.disk.remove(f"{FOLDER}/{name}")
        harness.open()
        yield harness.log()


@proves("F13", "L5")
@pytest.mark.parametrize("layout", BOTH)
def test_a_log_that_is_cut_where_it_starts_inside_a_batch_knows_no_epoch_of_before(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log(**SMALL)
    append(log, batch(b"0", b"1"), epoch=0)
    append(log, batch(b"2"), epoch=2)
    harness.write()
    log.delete_before(1)
    log.truncate(1)
    for log in started_anew(harness):
        assert (log.start_offset, log.end_offset, log.last_epoch()) == (1, 1, -1)
        assert [log.epoch_end(epoch) for epoch in range(4)] == [None] * 4
    append(log, batch(b"new", b"newer"), epoch=4)
    harness.write()
    for log in started_anew(harness):
        assert log.epoch_starts() == [(4, 1)]
        assert [log.epoch_end(epoch) for epoch in range(6)] == [None] * 4 + [EpochEnd(4, 3)] * 2


@proves("F13", "L5")
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("start", [9, 10, 11, 20, 25, 40])
def test_epochs_of_which_something_is_held_end_where_they_did_however_a_log_starts(layout: str, start: int) -> None:
    """Of an epoch that ended before, a log may know nothing more, but never that it reaches above the start."""
    harness = filled(layout)
    harness.log().delete_before(start)
    harness.settle()
    harness.advance(61)
    first = start // 10
    for log in started_anew(harness):
        ends = [log.epoch_end(epoch) for epoch in range(5)]
        assert ends[first:] == [EpochEnd(epoch, 10 * epoch + 10) for epoch in range(first, 4)] + [ends[3]]
        assert all(end is None or end.end_offset == start for end in ends[:first])


@proves("F13", "J6")
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("entry", range(5))
def test_a_lost_or_damaged_epochs_file_is_made_again_and_costs_no_batch(
    layout: str, is_clean: bool, entry: int
) -> None:
    """The file has four entries; with the fifth number it is lost as a whole."""
    harness = filled(layout)
    right, starts = values(harness.log()), list(harness.log().epoch_starts())
    assert starts == [(0, 0), (1, 10), (2, 20), (3, 30)]
    assert harness.store is not None
    assert isinstance(harness.disk, VirtualDisk)
    if is_clean:
        harness.store.close()
    else:
        harness.store.abandon()
    path = f"{FOLDER}/{EPOCHS_FILE}"
    if entry < len(starts):
        harness.disk.flip(path, entry * EPOCH_ENTRY.size + 3)
    else:
        harness.disk.remove(path)
    harness.open()
    for start_again in (harness.log, harness.kill, harness.reopen):
        log = start_again()
        assert values(log) == right
        assert log.epoch_starts() == starts
        assert log.epoch_end(1) == EpochEnd(1, 20)


@proves("F13")
@pytest.mark.parametrize("layout", BOTH)
def test_what_a_start_makes_of_a_new_beginning_lasts_over_the_next_loss_of_power(layout: str) -> None:
    for seed in range(40):
        harness = filled(layout, 12)
        harness.log().restart_at(100)
        log = harness.kill(seed=seed)
        found = (log.start_offset, log.end_offset, list(log.epoch_starts()))
        log = harness.kill(seed=seed + 1000)
        assert (log.start_offset, log.end_offset, list(log.epoch_starts())) == found, seed


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("clean", [True, False])
def test_everything_beside_the_batches_is_cut_with_them(layout: str, clean: bool) -> None:
    harness = filled(layout)
    log = harness.log()
    log.truncate(15)
    for n in range(3):
        append(log, batch(b"new %d" % n, timestamp_ms=1_600_000_000_000, producer=(5, 1, n)), epoch=7)
    harness.write()
    for _ in range(2):
        assert log.epoch_starts() == [(0, 0), (1, 10), (7, 15)]
        assert log.epoch_end(3) == EpochEnd(1, 15)
        assert log.producers.check(read_header(batch(producer=(5, 1, 2)))) == 17
        assert log.producers.check(read_header(batch(producer=(5, 1, 3)))) is None
        found = log.greatest_timestamp()
        assert found is not None
        assert found.offset < 15
        log = harness.reopen() if clean else harness.kill()


def test_markers_go_once_a_checkpoint_speaks_of_the_truncation() -> None:
    harness = filled(PARTITIONED)
    log = harness.log()
    assert isinstance(log, PartitionedLog)
    for offset in (30, 20, 10):
        log.truncate(offset)
    assert sum(name.endswith(".cut") for name in harness.disk.list(log.folder)) == 3
    harness.settle()
    harness.settle()
    assert not any(name.endswith(".cut") for name in harness.disk.list(log.folder))
    assert len(values(harness.kill(seed=1))) == 10


def test_a_full_disk_refuses_a_truncation_and_changes_nothing() -> None:
    harness = filled(PARTITIONED)
    log, before = harness.log(), values(harness.log())
    assert isinstance(harness.disk, VirtualDisk)
    assert isinstance(log, PartitionedLog)
    harness.disk.fail_open(f"{log.folder}/{17:020d}.1.cut", 28)
    with pytest.raises(StorageFull):
        log.truncate(17)
    assert values(log) == before
    log.truncate(17)
    assert values(log) == before[:17]


def test_a_time_index_of_before_is_not_believed() -> None:
    harness = sim_harness(PARTITIONED)
    log = harness.log(segment_bytes=100_000, index_interval_bytes=100)
    for n in range(10):
        append(log, batch(b"%d" % n, timestamp_ms=1000 + n))
        harness.write()
    log = harness.reopen()
    assert isinstance(log, PartitionedLog)
    path = log.active.times.path
    whole = _read(harness, path)
    for n in range(10):
        append(log, batch(b"%d" % n, timestamp_ms=2000 + n))
        harness.write()
    harness.reopen()
    assert harness.store is not None
    harness.store.close()
    file = harness.disk.open(path, writable=True)
    file.truncate(0)
    file.pwritev([whole], 0)
    harness.open()
    found = harness.log().greatest_timestamp()
    assert found is not None
    assert found.timestamp_ms == 2009


def _read(harness: Harness, path: str) -> bytes:
    file = harness.disk.open(path)
    return file.pread(file.size(), 0)


def test_a_marker_of_which_the_checkpoint_speaks_says_nothing_any_more() -> None:
    harness = filled(PARTITIONED)
    log = harness.log()
    log.truncate(20)
    for n in range(30):
        append(log, batch(b"new %d" % n), epoch=9)
        assert not harness.write()
    harness.settle()
    harness.advance(61)
    right = values(log)
    marker = f"{FOLDER}/{20:020d}.1.cut"
    harness.disk.open(marker, create=True, writable=True).close()
    assert harness.store is not None
    harness.store.abandon()
    harness.open()
    assert values(harness.log()) == right
    assert not harness.disk.exists(marker)


@proves("F13", "J6")
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("beginnings", [(3,), (3, 5), (50, 3)])
def test_a_start_that_was_called_safe_after_a_new_beginning_outlasts_a_loss_of_power(
    layout: str, beginnings: tuple[int, ...]
) -> None:
    """The checkpoint that holds it may be written before the new beginning is on disk."""
    for seed in range(12):
        harness = filled(layout, 12)
        assert isinstance(harness.disk, VirtualDisk)
        harness.disk.serve(harness.clock, partial(random.Random(seed).uniform, 0.01, 0.2))
        log, kept = harness.log(), list[HeadraceError | None]()
        for beginning in beginnings:
            log.restart_at(beginning)
        for n in range(10):
            append(log, batch(b"new %d" % n), epoch=9)
        harness.write()
        log.delete_before(7, kept.append)
        for _ in range(300):
            if kept:
                break
            harness.advance(0.01)
        assert (kept, log.safe_start_offset) == ([None], 7), seed
        assert harness.kill(seed=seed).start_offset == 7, seed


def test_who_waits_for_a_start_hears_that_the_new_beginning_before_it_failed() -> None:
    harness = filled(PARTITIONED, 12)
    assert isinstance(harness.disk, VirtualDisk)
    log, kept = harness.log(), list[HeadraceError | None]()
    log.restart_at(3)
    for n in range(10):
        append(log, batch(b"new %d" % n), epoch=9)
    harness.write()
    harness.disk.fail_sync(FOLDER)
    log.delete_before(7, kept.append)
    harness.settle()
    assert log.offline is not None
    assert (kept, log.safe_start_offset) == ([log.offline], 0)
