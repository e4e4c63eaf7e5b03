"""Compaction compared with a model: the latest value of each key, at its offset."""

from __future__ import annotations

import errno
import random

import pytest

from headrace.errors import DuplicateSequence
from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage.cleaner import DirtyLogs
from headrace.storage.commitlog import compaction as shared_compaction
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, TopicPartition
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, read_all, settings

COMPACTED = {
    "cleanup_policy": "compact",
    "segment_bytes": 1500,
    "index_interval_bytes": 200,
    "min_cleanable_dirty_ratio": 0.0,
}


def records(log: Log) -> dict[int, tuple[bytes | None, bytes | None]]:
    return {r.offset: (r.key, r.value) for _, view in read_all(log) for r in kernel.records(view)}


def compact(harness: Harness, rounds: int = 200) -> None:
    """Let time pass until nothing is left to compact."""
    assert harness.store is not None
    harness.advance(1.1)
    for _ in range(rounds):
        if not harness.store.compacting:
            return
        harness.clock.advance(0.05)
        harness.settle()
    raise AssertionError("compaction does not end")


def put(harness: Harness, log: Log, key: bytes, value: bytes | None) -> int:
    built = kernel.build([(1_750_000_000_000, key, value, [])])
    offset = append(log, memoryview(built))
    harness.write()
    return offset


def active_base_of(harness: Harness, log: Log) -> int:
    """Compaction leaves everything from this offset on alone."""
    if isinstance(log, SharedLog):
        assert isinstance(harness.store, SharedStore)
        return shared_compaction.cleanable_to(log, harness.disk, harness.store.commit_log, harness.clock.wall_ms())
    assert isinstance(log, PartitionedLog)
    return log.active.base_offset


def check(log: Log, before: dict[int, tuple[bytes | None, bytes | None]], active_base: int) -> None:
    """What is left below the active part is the latest of each key there, or was overwritten in the active one."""
    after = records(log)
    latest = {key: offset for offset, (key, _) in sorted(before.items()) if offset < active_base}
    assert set(after) == set(latest.values()) | {offset for offset in before if offset >= active_base}
    assert all(before[offset] == after[offset] for offset in after)


class CompactionContract:
    """What compaction means in every layout."""

    @proves("J6")
    @pytest.mark.thorough
    @pytest.mark.parametrize("seed", range(5))
    def test_only_the_latest_record_of_each_key_stays_at_its_offset(self, harness: Harness, seed: int) -> None:
        chance = random.Random(seed)
        log = harness.log(**COMPACTED)
        for round_ in range(3):
            for i in range(150):
                put(harness, log, b"key%d" % chance.randrange(20), b"%d-%d" % (round_, i))
            before, active_base = records(log), active_base_of(harness, log)
            size = log.size_bytes
            compact(harness)
            check(log, before, active_base)
            assert log.size_bytes < size
            log = harness.reopen() if chance.random() < 0.5 else harness.kill()
            check(log, before, active_base)

    def test_every_offset_can_still_be_asked_for(self, harness: Harness) -> None:
        log = harness.log(**COMPACTED)
        for i in range(200):
            put(harness, log, b"key%d" % (i % 7), b"%d" % i)
        compact(harness)
        left = sorted(records(log))
        for offset in range(200):
            first = kernel.records(read_from(log, offset))[-1].offset
            assert first == next(o for o in left if o >= offset)

    def test_tombstones_go_after_their_time_and_not_before(self, harness: Harness) -> None:
        log = harness.log(**COMPACTED, delete_retention_ms=60_000)
        put(harness, log, b"gone", b"x" * 100)
        tombstone = put(harness, log, b"gone", None)

        def fill() -> None:
            for i in range(40):
                put(harness, log, b"other", b"%d" % i)

        fill()
        compact(harness)
        assert records(log)[tombstone] == (b"gone", None)
        harness.advance(30)
        fill()
        compact(harness)
        assert tombstone in records(log)
        harness.advance(31)
        fill()
        compact(harness)
        assert tombstone not in records(log)
        assert b"gone" not in {key for key, _ in records(log).values()}

    def test_the_last_sequences_of_a_producer_are_kept_without_their_records(self, harness: Harness) -> None:
        """It may have heard of none of them, and ask for each again."""
        log = harness.log(**COMPACTED)
        for sequence in range(8):
            append(log, batch(b"v", key=b"k", producer=(7, 0, sequence)))
        for i in range(60):
            put(harness, log, b"k", b"%d" % i)
        compact(harness)
        kept = [(h.base_offset, h.record_count, h.base_sequence) for h, _ in read_all(log) if h.producer_id == 7]
        assert kept == [(sequence, 0, sequence) for sequence in range(3, 8)]
        assert isinstance(log, SharedLog | PartitionedLog)
        log.producers.forget()
        for name in harness.disk.list(log.folder):
            if name.endswith(".snapshot"):
                harness.disk.remove(f"{log.folder}/{name}")
        for sequence in range(3, 8):
            assert log.producers.check(read_header(batch(producer=(7, 0, sequence)))) == sequence
        with pytest.raises(DuplicateSequence):
            log.producers.check(read_header(batch(producer=(7, 0, 2))))

    def test_records_that_are_too_young_are_left_alone(self, harness: Harness) -> None:
        log = harness.log(**COMPACTED, min_compaction_lag_ms=10_000)
        now_ms = harness.clock.wall_ms()
        for i in range(60):
            append(log, batch(b"%d" % i, key=b"k", timestamp_ms=now_ms))
            harness.write()
        compact(harness)
        assert len(records(log)) == 60
        harness.advance(10)
        compact(harness)
        assert len(records(log)) < 60

    def test_old_dirt_is_compacted_even_if_there_is_little(self, harness: Harness) -> None:
        lag = COMPACTED | {"min_cleanable_dirty_ratio": 1.0, "max_compaction_lag_ms": 5000}
        log = harness.log(**lag)
        now_ms = harness.clock.wall_ms()
        for i in range(3):
            append(log, batch(b"%d" % i, key=b"k", timestamp_ms=now_ms))
            harness.write()
        harness.advance(2)
        assert len(records(log)) == 3
        harness.advance(4)
        compact(harness)
        assert sorted(records(log)) == [2]

    @pytest.mark.parametrize("seed", range(40))
    def test_a_crash_at_any_point_leaves_the_old_or_the_new(self, sim: Harness, seed: int) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        chance = random.Random(seed)
        log = sim.log(**COMPACTED, durability="disk")
        for i in range(120):
            put(sim, log, b"key%d" % chance.randrange(6), b"%d" % i)
        sim.settle()
        before, active_base = records(log), active_base_of(sim, log)
        sim.advance(1.1)
        for _ in range(chance.randrange(30)):
            sim.clock.advance(0.013)
        log = sim.kill(seed)
        after = records(log)
        assert all(before[offset] == after[offset] for offset in after)
        latest = {key: offset for offset, (key, _) in sorted(before.items())}
        assert set(latest.values()) <= set(after)
        compact(sim)
        check(log, before, active_base)

    def test_a_log_that_was_written_is_looked_at_within_seconds(self, sim: Harness) -> None:
        sim.retention_check_ms = 3_600_000
        log = sim.log(**COMPACTED)
        for i in range(60):
            put(sim, log, b"key%d" % (i % 4), b"%d" % i)
        before, active_base = records(log), active_base_of(sim, log)
        sim.advance(14.9)
        assert records(log) == before
        sim.advance(0.2)
        compact(sim)
        check(log, before, active_base)

    def test_what_is_too_old_is_compacted_without_another_write(self, sim: Harness) -> None:
        """librdkafka's case 0077, which sets these limits and waits for half a minute."""
        sim.retention_check_ms = 3_600_000
        limits = {"segment_ms": 500, "min_cleanable_dirty_ratio": 0.01, "max_compaction_lag_ms": 100}
        log = sim.log(cleanup_policy="compact", segment_bytes=1 << 20, **limits)
        for i in range(20):
            put(sim, log, b"key%d" % (i % 4), b"%d" % i)
        for _ in range(300):
            sim.advance(0.1)
        assert sorted(records(log)) == [16, 17, 18, 19]

    def test_idle_logs_are_not_looked_at(self, sim: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        sim.retention_check_ms = 3_600_000
        logs = [sim.log(TopicPartition("t", n), cleanup_policy="compact", segment_ms=1000) for n in range(100)]
        for log in logs:
            put(sim, log, b"key", b"value")
        looked: list[Log] = []
        monkeypatch.setattr(DirtyLogs, "look", lambda _, log: looked.append(log))
        for _ in range(60):
            sim.advance(1)
        assert set(looked) == set(logs)
        looked.clear()
        for _ in range(60):
            sim.advance(1)
        assert not looked
        put(sim, logs[7], b"key", b"value")
        for _ in range(16):
            sim.advance(1)
        assert looked == [logs[7]]

    def test_a_topic_that_becomes_compacted_is_looked_at(self, sim: Harness) -> None:
        sim.retention_check_ms = 3_600_000
        log = sim.log(**COMPACTED | {"cleanup_policy": "delete", "retention_ms": -1})
        for i in range(60):
            put(sim, log, b"key%d" % (i % 4), b"%d" % i)
        log.settings = settings(**COMPACTED)
        assert sim.store is not None
        sim.store.settings_changed(log.topic_partition)
        before, active_base = records(log), active_base_of(sim, log)
        sim.advance(15.1)
        compact(sim)
        check(log, before, active_base)

    def test_what_a_start_finds_is_looked_at(self, sim: Harness) -> None:
        sim.retention_check_ms = 3_600_000
        log = sim.log(**COMPACTED)
        for i in range(60):
            put(sim, log, b"key%d" % (i % 4), b"%d" % i)
        before, active_base = records(log), active_base_of(sim, log)
        log = sim.reopen()
        sim.advance(15.1)
        compact(sim)
        check(log, before, active_base)


class TestPartitioned(CompactionContract):
    layout = PARTITIONED


class TestShared(CompactionContract):
    layout = SHARED


def test_small_neighbours_become_one_segment(harness: Harness) -> None:
    log = harness.log(**COMPACTED)
    assert isinstance(log, PartitionedLog)
    for _ in range(3):
        for i in range(150):
            put(harness, log, b"key%d" % (i % 5), b"%d" % i)
        compact(harness)
    rolled = 450 * 72 // 1500
    assert len(log.segments) <= rolled // 2


def read_from(log: Log, offset: int) -> bytes:
    result = log.read(offset, 1, log.written_offset)
    return b"".join(part.file.pread(part.count, part.position) for part in result.slices)


def test_a_damaged_log_is_not_compacted(sim: Harness, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log(**COMPACTED)
    for i in range(60):
        put(sim, log, b"k", b"%d" % i)
    sim.disk.flip(f"/data/orders/orders-0/{0:020d}.log", 300)
    compact(sim)
    assert "orders-0 is not compacted" in caplog.text
    assert log.size_bytes > 60 * 60


@pytest.mark.parametrize("failing", ["open", "write", "sync", "full"])
def test_a_compaction_that_fails_leaves_its_log_whole_and_the_others_are_compacted(sim: Harness, failing: str) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log(**COMPACTED, durability="memory")
    other = sim.log(TopicPartition("other", 0), **COMPACTED)
    assert isinstance(log, PartitionedLog)
    assert isinstance(other, PartitionedLog)
    for i in range(60):
        for each in (log, other):
            put(sim, each, b"key%d" % (i % 4), b"%d" % i)
    before, active_base = records(log), log.active.base_offset
    second = log.segments[1]
    second.release()
    if failing == "open":
        sim.disk.fail_open(second.path, errno.EIO)
    elif failing == "sync":
        sim.disk.fail_sync(second.path + ".cleaned", errno.EIO)
    else:
        sim.disk.fail_write(second.path + ".cleaned", errno.EIO if failing == "write" else errno.ENOSPC)
    compact(sim)
    assert (log.cleaned_to, log.offline) == (0, None)
    after = records(log)
    assert set(after) >= {offset for offset in before if offset >= second.base_offset}
    assert all(before[offset] == after[offset] for offset in after)
    assert not [name for name in sim.disk.list(log.folder) if name.endswith((".cleaned", ".swap"))]
    assert other.cleaned_to == other.active.base_offset
    compact(sim)
    check(log, before, active_base)
    assert log.cleaned_to == active_base


def test_a_swap_that_fails_halfway_takes_the_log_offline_and_the_next_start_finishes_it(sim: Harness) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log(**COMPACTED)
    assert isinstance(log, PartitionedLog)
    for i in range(60):
        put(sim, log, b"key%d" % (i % 4), b"%d" % i)
    before, active_base = records(log), log.active.base_offset
    sim.disk.fail_open(f"{log.folder}/{0:020d}.sum.swap", errno.EIO)
    compact(sim)
    assert log.offline is not None
    log = sim.kill()
    assert isinstance(log, PartitionedLog)
    compact(sim)
    check(log, before, active_base)
