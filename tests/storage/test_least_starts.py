"""Where leader epochs began, when nothing but the batches that are left can tell, and when a write fails."""

from __future__ import annotations

import errno
import random

import pytest

from chosen_layout import log_path
from headrace.ports.disk import Disk
from headrace.storage.epochs import ENTRY, read_entries, reconciled
from headrace.storage.epochs import FILE_NAME as EPOCHS_FILE
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.offline.convert import ConversionOptions, convert
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, read_all, sim_harness
from storage.log_contract import SMALL, least_starts, placed

FOLDER = "/data/orders/orders-0"
TRUE_STARTS = [(0, 0), (1, 50), (2, 100), (3, 150)]
LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])


def compacted(layout: str) -> tuple[Harness, Log]:
    """Compaction has taken the first batches of epochs, the last ones before them, and whole files."""
    sim = sim_harness(layout)
    log = sim.log(cleanup_policy="compact", min_cleanable_dirty_ratio="0.0", segment_ms=1000, **SMALL)
    for nth in range(200):
        key = b"k%d" % nth if nth in (3, 130, 170) else b"hot"
        append(log, batch(b"%d" % nth, key=key), epoch=nth // 50)
        if nth % 5 == 0:
            sim.write()
    sim.write()
    sim.settle()
    for _ in range(20):
        sim.advance(30)
    assert len(read_all(log)) < 60
    assert log.epoch_starts() == TRUE_STARTS
    return sim, log


def lose(disk: Disk, *endings: str) -> None:
    for name in disk.list(FOLDER):
        if name.endswith(endings):
            disk.remove(f"{FOLDER}/{name}")


@proves("F7")
@LAYOUTS
@pytest.mark.parametrize("lost", [(EPOCHS_FILE,), (EPOCHS_FILE, ".queue", ".index", ".timeindex")])
@pytest.mark.parametrize("is_clean", [True, False])
def test_epochs_that_only_the_batches_tell_begin_no_later_than_they_did(
    layout: str, lost: tuple[str, ...], is_clean: bool
) -> None:
    sim, log = compacted(layout)
    headers = [header for header, _ in read_all(log)]
    assert sim.store is not None
    if is_clean:
        sim.store.close()
    else:
        sim.store.abandon()
    lose(sim.disk, *lost)
    sim.open()
    log = sim.log()
    true, found = dict(TRUE_STARTS), dict(log.epoch_starts())
    assert found == dict(least_starts(headers))
    assert all(start <= true[epoch] for epoch, start in found.items())
    assert [header for header, _ in read_all(log)] == headers


@LAYOUTS
@pytest.mark.parametrize("number", range(10))
def test_no_compaction_lets_an_epoch_begin_later_than_it_did(layout: str, number: int) -> None:
    chance, sim, count, length = random.Random(number), sim_harness(layout), 0, 17
    log = sim.log(cleanup_policy="compact", min_cleanable_dirty_ratio="0.0", segment_ms=1000, **SMALL)
    for _ in range(chance.randrange(1, 5)):
        for _ in range(chance.randrange(20, 150)):
            append(log, batch(b"", key=b"%d" % chance.randrange(chance.choice((2, 30)))), epoch=count // length)
            count += 1
            if chance.random() < 0.3:
                sim.write()
        sim.write()
        sim.settle()
        for _ in range(10):
            sim.advance(30)
    headers = [header for header, _ in read_all(log)]
    assert sim.store is not None
    sim.store.close()
    lose(sim.disk, EPOCHS_FILE, ".queue")
    sim.open()
    found = dict(sim.log().epoch_starts())
    assert all(start <= length * epoch for epoch, start in found.items())
    assert found | dict(least_starts(headers)) == found


@LAYOUTS
def test_compaction_stops_kills_and_cuts_leave_the_starts_as_they_were(layout: str) -> None:
    sim, log = compacted(layout)
    for again in (sim.reopen, lambda: sim.kill(1), sim.kill):
        log = again()
        assert log.epoch_starts() == TRUE_STARTS
    log.truncate(170)
    sim.settle()
    kept = [entry for entry in TRUE_STARTS if entry[1] < log.end_offset]
    for again in (sim.log, sim.reopen, lambda: sim.kill(1)):
        assert again().epoch_starts() == kept


def test_a_cut_that_a_loss_of_power_takes_back_leaves_starts_that_rise() -> None:
    """The file of epochs knows of the cut, the commit log does not, and batches of epochs before it were deleted."""
    sim = sim_harness(SHARED)
    log = sim.log(durability="disk")
    for epoch in (1, 2, 7):
        append(log, batch(b"a", b"b", b"c"), epoch)
        sim.write()
    sim.settle()
    log.delete_before(6)
    sim.reopen()
    epochs = f"{FOLDER}/{EPOCHS_FILE}"
    file = sim.disk.open(epochs, writable=True)
    file.truncate(2 * ENTRY.size)
    file.close()
    starts = sim.kill().epoch_starts()
    assert [epoch for epoch, _ in starts] == [1, 2, 7]
    assert starts == sorted(starts, key=lambda entry: entry[1])
    assert read_entries(sim.disk, epochs) == (starts, "")


@LAYOUTS
def test_a_folder_that_is_converted_keeps_the_starts(layout: str) -> None:
    sim, _ = compacted(layout)
    assert sim.store is not None
    sim.store.close()
    sim.layout = SHARED if layout == PARTITIONED else PARTITIONED
    convert(sim.disk, sim.clock, sim.data, ConversionOptions(sim.layout, commit_file_bytes=4096))
    sim.open()
    assert sim.log().epoch_starts() == TRUE_STARTS


@LAYOUTS
def test_epochs_that_came_with_a_write_that_fails_are_forgotten(layout: str) -> None:
    sim = sim_harness(layout)
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log()
    log.append_copied(placed(1, b"a"), [(0, 0)])
    assert not sim.write()
    sim.disk.fail_write(log_path("/data", TOPIC, layout), errno.ENOSPC)
    log.append_copied(placed(9, b"c", epoch=2), [(1, 3), (2, 5)])
    assert sim.write()
    assert log.epoch_starts() == [(0, 0)]
    log.append_copied(placed(9, b"c", epoch=2), [(1, 3), (2, 5)])
    assert not sim.write()
    assert sim.reopen().epoch_starts() == [(0, 0), (1, 3), (2, 5)]


@pytest.mark.parametrize(
    ("told", "seen", "found"),
    [
        ([(0, 0), (1, 8)], [(0, 0, 0), (1, 8, 8)], [(0, 0), (1, 8)]),
        ([(0, 0), (1, 8), (2, 20)], [(2, 0, 34)], [(0, 0), (1, 8), (2, 20)]),
        ([(0, 0), (1, 8), (2, 20)], [(2, 9, 34)], [(2, 9)]),  # of batches that were cut
        ([(0, 0), (1, 40)], [(0, 0, 0), (1, 8, 34)], [(0, 0), (1, 8)]),
        ([(0, 0), (1, 8), (2, 20)], [(1, 3, 9)], [(1, 3)]),
        ([(0, 3), (1, 8), (2, 20)], [(1, 3, 9)], [(0, 3), (1, 8)]),
        ([], [(0, 0, 0), (3, 5, 9)], [(0, 0), (3, 5)]),
        ([(0, 0), (2, 5)], [(0, 0, 0), (1, 5, 5)], [(0, 0), (1, 5)]),
        # Of batches that were deleted:
        ([(0, 0), (1, 8)], [(0, 0, 0), (1, 0, 8), (4, 0, 12)], [(0, 0), (1, 8), (4, 8)]),
    ],
)
def test_what_the_file_tells_counts_where_it_fits_what_the_log_does(
    told: list[tuple[int, int]], seen: list[tuple[int, int, int]], found: list[tuple[int, int]]
) -> None:
    assert reconciled(told, seen) == found
