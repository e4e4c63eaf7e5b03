"""Queues of several files: one that is missing is missed, what is written anew is written beside first, what is counted
and deleted together is what would be one by one."""

from __future__ import annotations

import errno
import random

import pytest

from headrace.errors import CorruptBatch
from headrace.storage.commitlog import retention
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import QueueFile, Replacement
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import SHARED
from headrace.storage.offline import commitlog_verify
from headrace.storage.offline.report import PartitionReport
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, settings, sim_harness, values

FOLDER = "/data/orders/orders-0"
RECORDS = 60
NOW_MS = 1_750_000_000_000


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Harness:
    for module in ("queue", "queuefile"):
        monkeypatch.setattr(f"headrace.storage.commitlog.{module}.ENTRIES_MAX", 5)
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
            wrong = [each for each in commitlog_verify.reports(sim.disk, sim.data) if isinstance(each, PartitionReport)]
            missing = FOLDER if lost[0] == 0 else f"{FOLDER}/{names[lost[0]]}"
            assert [problem.path for problem in wrong[0].problems] == [missing]
        assert len(list(commitlog_verify.dump(sim.disk, sim.data))) == RECORDS
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
        assert isinstance(sim.disk, VirtualDisk)
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


def kept_by_walking(log: SharedLog, now_ms: int, runs_max: int) -> tuple[int, int]:
    """Where a log should start after retention, and how many bytes are held for the archive: one run after another."""
    settings, start, held = log.settings, log.start_offset, 0
    surplus = log.size_bytes - settings.retention_bytes if settings.retention_bytes >= 0 else -1
    for entry in list(log.queue.entries(start))[:runs_max]:
        size = entry.size if entry.has_batches else 0
        is_old = settings.retention_ms >= 0 and entry.greatest_ms < now_ms - settings.retention_ms
        if not is_old and not (surplus >= size and entry.next_offset < log.written_offset):
            break
        surplus -= size
        if entry.next_offset <= log.deletable_below():
            start = entry.next_offset
        else:
            held += size
    return start, held


@proves("L5", "J6")
class TestRetention:
    @pytest.mark.parametrize("number", range(40))
    def test_it_deletes_what_walking_over_all_runs_would(
        self, sim: Harness, seed: int, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chance = random.Random(seed)
        runs_max = chance.choice((3, 7, 1000))
        monkeypatch.setattr(retention, "RUNS_MAX", runs_max)
        sim.log(retention_ms=-1, file_delete_delay_ms=0)
        log = shared_log(sim)
        for nth in range(RECORDS):
            append(log, batch(b"." * chance.randrange(100), timestamp_ms=NOW_MS + nth * 10 + chance.randrange(100)))
            assert not sim.write()
        if chance.random() < 0.7:
            first_offset = chance.randrange(RECORDS - 5)
            log.replaced([thinned(sim, log, first_offset, chance.randrange(first_offset + 1, RECORDS))])
        if chance.random() < 0.3:
            log.replaced([Replacement(7, 9, store_of(sim).replacer.write(log, 7, 9, []))])
        for _ in range(6):
            log.settings = settings(
                retention_ms=chance.choice((-1, chance.randrange(RECORDS * 10))),
                retention_bytes=chance.choice((-1, chance.randrange(log.size_bytes + 1))),
                retention_archived=str(chance.random() < 0.5).lower(),
            )
            sim.archived[log.topic_partition] = chance.randrange(RECORDS + 1)
            now_ms = NOW_MS + chance.randrange(RECORDS * 10)
            start, held = kept_by_walking(log, now_ms, runs_max)
            retention.apply(log, now_ms, sim.disk, store_of(sim).commit_log)
            assert (log.start_offset, log.held_bytes) == (start, held)
            counted = log.queue.size_bytes, dict(log.queue.live)
            log.queue.count_anew()
            assert (log.queue.size_bytes, log.queue.live) == counted
            if log.queue.is_empty:
                break

    def test_it_does_not_look_at_runs_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sim = sim_harness(SHARED)
        log = fill(sim)
        log.settings = settings(retention_ms=0, retention_bytes=10)
        looked_at: list[int] = []
        raw = QueueFile.raw

        def watched(file: QueueFile, at: int) -> tuple[int, int, int, int, int]:
            looked_at.append(at)
            return raw(file, at)

        monkeypatch.setattr(QueueFile, "raw", watched)
        retention.apply(log, NOW_MS - 1000, sim.disk, store_of(sim).commit_log)
        assert log.start_offset == RECORDS - 1
        assert len(looked_at) < 10
