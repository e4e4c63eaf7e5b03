"""Queues of several files: one that is missing is missed, and what is written anew is written beside first."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import CorruptBatch
from headrace.sim.disk import SimDisk
from headrace.storage.folder import SHARED
from headrace.storage.report import PartitionReport
from headrace.storage.shared import verify
from headrace.storage.shared.log import SharedLog
from headrace.storage.shared.splicing import Replacement
from headrace.storage.shared.store import SharedStore
from proving import proves
from storage.harness import Harness, append, batch, sim_harness, values

FOLDER = "/data/orders/orders-0"
RECORDS = 60


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Harness:
    for module in ("queue", "queuefile"):
        monkeypatch.setattr(f"headrace.storage.shared.{module}.ENTRIES_MAX", 5)
    harness = sim_harness(SHARED)
    harness.file_bytes = 2000
    return harness


def fill(harness: Harness, **overrides: object) -> SharedLog:
    log = harness.log(**({"file_delete_delay_ms": 0, "retention_ms": -1} | overrides))
    assert isinstance(log, SharedLog)
    for number in range(RECORDS):
        append(log, batch(b"%d" % number + b"." * 60))
        assert not harness.write()
        harness.settle()
    return log


def shared_log(harness: Harness) -> SharedLog:
    log = harness.log()
    assert isinstance(log, SharedLog)
    return log


def queue_files(harness: Harness) -> list[str]:
    return sorted(name for name in harness.disk.list(FOLDER) if name.endswith(".queue"))


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


@proves("L5", "J6")
class TestMissing:
    @pytest.mark.parametrize("clean", [True, False])
    @pytest.mark.parametrize("lost", [[0], [3], [10], [0, 4, 5]])
    def test_a_missing_file_costs_time_and_no_record(
        self, sim: Harness, caplog: pytest.LogCaptureFixture, clean: bool, lost: list[int]
    ) -> None:
        right = values(fill(sim))
        sim.advance(61)
        sim.settle()
        names = queue_files(sim)
        assert len(names) == 12
        store_of(sim).close() if clean else store_of(sim).abandon()
        for nth in lost:
            sim.disk.remove(f"{FOLDER}/{names[nth]}")
        if clean:
            wrong = [each for each in verify.reports(sim.disk, sim.data) if isinstance(each, PartitionReport)]
            missing = FOLDER if lost[0] == 0 else f"{FOLDER}/{names[lost[0]]}"
            assert [problem.path for problem in wrong[0].problems] == [missing]
        assert len(list(verify.dump(sim.disk, sim.data))) == RECORDS
        sim.open()
        assert "built from the commit log" in caplog.text
        assert values(sim.log()) == right
        for _ in range(20):
            sim.advance(5)
        assert values(sim.log()) == right
        assert queue_files(sim) == names

    def test_files_that_went_with_deleted_records_are_not_missed(
        self, sim: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = fill(sim)
        sim.advance(61)
        sim.settle()
        right = values(log)[22:]
        log.delete_before(22)
        store_of(sim).abandon()
        sim.open()
        assert values(sim.log()) == right
        assert "built from the commit log" not in caplog.text

    def test_the_chain_holds_after_truncations(self, sim: Harness, caplog: pytest.LogCaptureFixture) -> None:
        log = fill(sim)
        for end in (40, 35, 12):
            log.truncate(end)
            for number in range(7):
                append(log, batch(b"%d again" % number))
                assert not sim.write()
            sim.settle()
            right = values(log)
            sim.reopen()
            log = shared_log(sim)
            assert values(log) == right
        assert "built from the commit log" not in caplog.text


def thinned(harness: Harness, log: SharedLog, first_offset: int, next_offset: int) -> Replacement:
    """A synced frame with every second batch of a range."""
    inside = [piece for header, piece in log.headers(first_offset) if header.base_offset < next_offset]
    kept = [piece.file.pread(piece.count, piece.position) for piece in inside[::2]]
    runs = store_of(harness).replacer.write(log, first_offset, next_offset, kept)
    harness.disk.sync_now(store_of(harness).commit_log.unsynced())
    return Replacement(first_offset, next_offset, runs)


@proves("L5", "J6")
class TestWritingAnew:
    @pytest.mark.parametrize("room", [0, 150, 300, 450])
    def test_a_full_disk_leaves_the_queue_as_it_was(
        self, sim: Harness, caplog: pytest.LogCaptureFixture, room: int
    ) -> None:
        log = fill(sim)
        before, names = values(log), sorted(sim.disk.list(FOLDER))
        replacement = thinned(sim, log, 12, 38)
        assert isinstance(sim.disk, SimDisk)
        sim.disk.capacity_bytes -= sim.disk.free_bytes("/") - room
        with pytest.raises(OSError, match="No space") as failed:
            log.replaced([replacement])
        assert failed.value.errno == errno.ENOSPC
        assert log.offline is None
        assert values(log) == before
        assert sorted(sim.disk.list(FOLDER)) == names
        sim.disk.capacity_bytes += 1 << 20
        log.replaced([replacement])
        after = before[:12] + before[12:38:2] + before[38:]
        assert values(log) == after
        sim.reopen()
        assert values(sim.log()) == after
        assert "built from the commit log" not in caplog.text

    @pytest.mark.parametrize("first_offset", [0, 3, 5, 41, 52])
    @pytest.mark.parametrize("count", [1, 8, 17, 60])
    @pytest.mark.parametrize("start_offset", [0, 3, 44])
    def test_what_was_written_anew_is_found(
        self, sim: Harness, caplog: pytest.LogCaptureFixture, first_offset: int, count: int, start_offset: int
    ) -> None:
        log = fill(sim)
        before, next_offset = values(log), min(RECORDS - 1, first_offset + count)
        replacement = thinned(sim, log, first_offset, next_offset)
        log.delete_before(start_offset)
        log.replaced([replacement])
        kept = [n for n in range(RECORDS) if not first_offset <= n < next_offset or (n - first_offset) % 2 == 0]
        right = [before[n] for n in kept if n >= start_offset]
        for _ in range(2):
            assert [value for value in values(sim.log()) if value in right] == right
            log = shared_log(sim)
            counted = log.queue.size_bytes, dict(log.queue.live)
            log.queue.count_anew()
            assert (log.queue.size_bytes, log.queue.live) == counted
            append(log, batch(b"more"))
            right.append(b"more")
            assert not sim.write()
            sim.reopen()
        assert "built from the commit log" not in caplog.text


@proves("L5")
class TestDamaged:
    def test_a_commit_file_with_nothing_but_damage_stays(self, sim: Harness) -> None:
        right = values(fill(sim))
        number = 2
        path = store_of(sim).commit_log.path(number)
        store_of(sim).close()
        size = sim.disk.open(path).size()
        sim.disk.open(path, writable=True).pwritev([b"\xff" * (size - 200)], 200)
        for _ in range(2):
            for name in queue_files(sim):
                sim.disk.remove(f"{FOLDER}/{name}")
            sim.open()
            for _ in range(5):
                sim.advance(61)
                sim.settle()
            log = shared_log(sim)
            damaged = [entry for entry in log.queue.entries(0) if not entry.has_batches]
            assert {entry.number for entry in damaged} == {number}
            assert number in store_of(sim).commit_log.sizes
            with pytest.raises(CorruptBatch):
                log.read(damaged[0].offset, 1000, RECORDS)
            counted = log.queue.size_bytes, dict(log.queue.live)
            log.queue.count_anew()
            assert (log.queue.size_bytes, log.queue.live) == counted
            store_of(sim).abandon()
        sim.open()
        log = shared_log(sim)
        log.delete_before(damaged[-1].next_offset)
        assert values(log) == right[damaged[-1].next_offset :]
        assert number not in log.queue.live
