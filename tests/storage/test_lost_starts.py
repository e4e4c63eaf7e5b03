"""Where a log begins stands in the checkpoint. A start without one still knows what was deleted inside a segment."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import HeadraceError
from headrace.ports.disk import File
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, sim_harness, values

LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
CHECKPOINT = "/data/@checkpoint"
FOLDER = "/data/orders/orders-0"
RECORDS = 30


def filled(layout: str, **settings: object) -> tuple[Harness, Log]:
    sim = sim_harness(layout)
    log = sim.log(durability="disk", **settings)
    write(sim, log, RECORDS)
    return sim, log


def write(sim: Harness, log: Log, count: int) -> None:
    for _ in range(count):
        append(log, batch(b"%d" % log.end_offset))
        assert not sim.write()
    sim.settle()


def lose_checkpoint(sim: Harness, how: str) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    if how == "flipped":
        sim.disk.flip(CHECKPOINT, 20)
    else:
        sim.disk.remove(CHECKPOINT)


@proves("J6")
@LAYOUTS
@pytest.mark.parametrize("segment_bytes", [1 << 20, 1024])
@pytest.mark.parametrize("starts", [(7,), (7, 19), (RECORDS,)])
@pytest.mark.parametrize("how", ["lost", "flipped"])
@pytest.mark.parametrize("end", ["stopped", "killed", "power"])
def test_deleted_records_do_not_come_back_without_a_checkpoint(
    layout: str, segment_bytes: int, starts: tuple[int, ...], how: str, end: str
) -> None:
    sim, log = filled(layout, segment_bytes=segment_bytes, index_interval_bytes=100)
    for start in starts:
        log.delete_before(start)
        sim.settle()
    assert sim.store is not None
    if end == "stopped":
        assert sim.store.close()
    else:
        sim.store.abandon()
    if end == "power":
        assert isinstance(sim.disk, VirtualDisk)
        sim.disk.crash(5)
    lose_checkpoint(sim, how)
    sim.open()
    log = sim.log()
    assert (log.start_offset, log.end_offset) == (starts[-1], RECORDS)
    assert values(log) == [b"%d" % n for n in range(starts[-1], RECORDS)]


@LAYOUTS
@pytest.mark.parametrize("again", [0, 3])
def test_a_log_that_began_anew_forgets_where_it_began(layout: str, again: int) -> None:
    """A start that is too high would have all replicas delete."""
    sim, log = filled(layout)
    log.delete_before(7)
    sim.settle()
    log.restart_at(again)
    sim.settle()
    write(sim, log, 20)
    assert sim.store is not None
    sim.store.abandon()
    lose_checkpoint(sim, "lost")
    sim.open()
    log = sim.log()
    assert (log.start_offset, log.end_offset) == (again, again + 20)


def markers(sim: Harness) -> list[str]:
    return [name for name in sim.disk.list(FOLDER) if name.endswith(".start")]


def test_a_start_that_is_a_segments_needs_no_marker() -> None:
    sim, log = filled(PARTITIONED, segment_bytes=1024, index_interval_bytes=100)
    second = sorted(int(name[:20]) for name in sim.disk.list(FOLDER) if name.endswith(".log"))[1]
    log.delete_before(second)
    assert markers(sim) == []
    for start in (second + 1, second + 3):
        log.delete_before(start)
        assert markers(sim) == [f"{start:020d}.start"]


def test_what_the_checkpoint_says_counts_if_it_can_be_read() -> None:
    sim, log = filled(PARTITIONED)
    log.delete_before(7)
    sim.settle()
    assert sim.store is not None
    assert sim.store.close()
    sim.disk.open(f"{FOLDER}/{20:020d}.start", create=True, writable=True).close()
    sim.open()
    assert sim.log().start_offset == 7
    assert markers(sim) == [f"{7:020d}.start"]


def test_a_marker_that_cannot_be_written_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sim, log = filled(PARTITIONED)
    opened = sim.disk.open

    def refuse(path: str, **options: bool) -> File:
        if path.endswith(".start"):
            raise OSError(errno.EMFILE, "too many open files", path)
        return opened(path, **options)

    monkeypatch.setattr(sim.disk, "open", refuse)
    told: list[HeadraceError | None] = []
    log.delete_before(7, told.append)
    sim.settle()
    assert "only the checkpoint says where it begins" in caplog.text
    assert (log.start_offset, log.safe_start_offset, told) == (7, 7, [None])
