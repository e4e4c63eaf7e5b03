"""The shared layout over time: files roll and go, each topic keeps what its settings say, disks fill."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import DataFolderError, HeadraceError, StorageFailed, StorageFull
from headrace.ports.disk import Buffer, File
from headrace.records.batch import read_header
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition
from headrace.storage.segments.store import PartitionedStore
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, content, read_all, real_harness, values
from storage.small_disk import small_disk

LONG, SHORT, OTHER = TopicPartition("long", 0), TopicPartition("short", 0), TopicPartition("other", 0)
QUICK: dict[str, object] = {"file_delete_delay_ms": 0, "index_interval_bytes": 200}


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


def shared_log(harness: Harness, place: TopicPartition = TOPIC, **overrides: object) -> SharedLog:
    log = harness.log(place, **overrides)
    assert isinstance(log, SharedLog)
    return log


def commit_files(harness: Harness) -> list[str]:
    return sorted(name for name in harness.disk.list(f"{harness.data}/@commitlog") if name.endswith(".log"))


def fill(harness: Harness, *logs: SharedLog, count: int, size: int = 60, timestamp_ms: int | None = None) -> None:
    for nth in range(count):
        for log in logs:
            now_ms = harness.clock.wall_ms() if timestamp_ms is None else timestamp_ms
            append(log, batch(b"%d" % nth + b"." * size, timestamp_ms=now_ms))
        assert not harness.write()


class TestFiles:
    layout = SHARED

    @proves("L5")
    def test_a_file_ends_before_it_would_be_too_large_and_none_spans_a_frame(self, harness: Harness) -> None:
        logs = [shared_log(harness, TopicPartition("t", n)) for n in range(5)]
        fill(harness, *logs, count=60)
        sizes = store_of(harness).commit_log.sizes
        assert len(sizes) > 5
        assert all(size <= harness.file_bytes for size in sizes.values())
        assert [name[:20] for name in commit_files(harness)] == [f"{number << 32:020d}" for number in sorted(sizes)]
        assert [len(read_all(log)) for log in logs] == [60] * 5

    def test_a_turn_larger_than_a_file_is_written_in_pieces(self, harness: Harness) -> None:
        log = shared_log(harness)
        for nth in range(200):
            append(log, batch(b"%d" % nth))
        assert not harness.write()
        append(log, batch(b"x" * 3 * harness.file_bytes))
        append(log, batch(b"y"))
        assert not harness.write()
        found = values(log)
        assert found[:200] == [b"%d" % nth for nth in range(200)]
        assert values(harness.kill()) == found
        assert len(commit_files(harness)) > 4

    @proves("L5")
    def test_all_logs_of_a_turn_are_written_at_once_and_synced_at_once(
        self, shared: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared.file_bytes = 1 << 20
        logs = [shared_log(shared, TopicPartition("t", n), durability="disk") for n in range(256)]
        fill(shared, *logs, count=1)
        shared.settle()
        assert isinstance(shared.disk, VirtualDisk)
        writes: list[int] = []
        file = store_of(shared).commit_log.active
        write = file.pwritev

        def counted(parts: Sequence[Buffer], position: int) -> int:
            writes.append(len(parts))
            return write(parts, position)

        monkeypatch.setattr(file, "pwritev", counted)
        syncs, files = shared.disk.syncs, shared.disk.synced_files
        for log in logs:
            append(log, batch(b"a"))
            append(log, batch(b"b"))
        assert not shared.write()
        shared.settle()
        assert writes == [3 * 256]
        assert (shared.disk.syncs - syncs, shared.disk.synced_files - files) == (1, 1)
        assert [log.durable_offset for log in logs] == [3] * 256

    def test_neighbours_are_joined_into_one_slice(self, harness: Harness) -> None:
        harness.file_bytes = 1 << 20
        log = shared_log(harness, index_interval_bytes=100)
        for _ in range(50):
            append(log, batch(b"x" * 50))
        harness.write()
        assert len(list(log.queue.entries(0))) > 20
        assert len(log.read(0, 1 << 20, 50).slices) == 1

    def test_batches_with_gaps_between_their_offsets_keep_them(self, harness: Harness) -> None:
        log = shared_log(harness, index_interval_bytes=100)
        bases = [5, 6, 9, 20, 21, 22, 1 << 33, (1 << 33) + 7]
        for nth, base in enumerate(bases):
            view = batch(b"%d" % nth, timestamp_ms=1_750_000_000_000 + nth)
            view[0:8] = base.to_bytes(8, "big")
            view[12:16] = bytes(4)
            log.append_copied(view)
            if nth % 3 == 2:
                harness.write()
        harness.write()
        for found in (log, harness.reopen(), harness.kill()):
            assert [header.base_offset for header, _ in read_all(found)] == bases
            assert read_header(content(found.read(10, 1, found.end_offset))).base_offset == 20
            assert found.offset_for_time(1_750_000_000_004) is not None
        harness.disk.remove(f"{harness.data}/orders/orders-0/{0:020d}.queue")
        again = harness.kill()
        assert [header.base_offset for header, _ in read_all(again)] == bases

    def test_a_folder_of_the_other_layout_is_refused(self, harness: Harness) -> None:
        fill(harness, shared_log(harness), count=1)
        store_of(harness).close()
        with pytest.raises(DataFolderError, match=r"has the layout 'shared'.*headrace log convert --to partitioned"):
            PartitionedStore(harness.disk, harness.clock, harness.data)
        harness.open()
        assert len(values(harness.log())) == 1


class TestRetention:
    layout = SHARED

    @proves("L5")
    def test_each_topic_keeps_its_own_time(self, harness: Harness) -> None:
        long = shared_log(harness, LONG, **QUICK, retention_ms=3_600_000)
        short = shared_log(harness, SHORT, **QUICK, retention_ms=10_000)
        for _ in range(30):
            fill(harness, long, short, count=2)
            harness.advance(1)
        assert (long.start_offset, len(values(long))) == (0, 60)
        assert 35 <= short.start_offset <= 41
        assert [header.base_offset for header, _ in read_all(short)][-1] == 59
        assert short.size_bytes < long.size_bytes / 2
        for _ in range(2):
            again = harness.kill()
            assert again is not short
            assert (harness.log(LONG).start_offset, harness.log(SHORT).start_offset) == (0, short.start_offset)

    @proves("L5")
    def test_each_topic_keeps_its_own_size(self, harness: Harness) -> None:
        large = shared_log(harness, LONG, **QUICK, retention_ms=-1)
        small = shared_log(harness, SHORT, **QUICK, retention_ms=-1, retention_bytes=2000)
        fill(harness, large, small, count=150)
        harness.advance(2)
        assert 2000 <= small.size_bytes <= 2500
        assert large.start_offset == 0
        assert [header.base_offset for header, _ in read_all(small)] == list(range(small.start_offset, 150))

    def test_records_without_a_timestamp_are_as_old_as_their_file(self, shared: Harness) -> None:
        log = shared_log(shared, TOPIC, **QUICK, retention_ms=10_000)
        fill(shared, log, count=10, timestamp_ms=-1)
        shared.advance(9)
        assert log.start_offset == 0
        shared.advance(2)
        assert (log.start_offset, log.size_bytes) == (10, 0)

    def test_nothing_is_deleted_without_the_policy_or_before_it_is_archived(self, shared: Harness) -> None:
        kept = shared_log(shared, LONG, **QUICK, retention_ms=0, cleanup_policy="compact")
        held = shared_log(shared, SHORT, **QUICK, retention_ms=0, retention_archived="true")
        fill(shared, kept, held, count=20, timestamp_ms=1000)
        shared.archived[SHORT] = 7
        shared.advance(2)
        assert (kept.start_offset, held.start_offset) == (0, 7)
        assert held.held_bytes == held.size_bytes

    @proves("L5")
    def test_a_file_goes_when_nobody_wants_anything_in_it(self, harness: Harness) -> None:
        harness.rewrite_share = 0.0
        logs = [shared_log(harness, TopicPartition("t", n), **QUICK) for n in range(3)]
        fill(harness, *logs, count=100)
        before = commit_files(harness)
        for log in logs[:2]:
            log.delete_before(95)
        for _ in range(8):
            harness.advance(1)
        assert commit_files(harness) == before
        logs[2].delete_before(50)
        for _ in range(8):
            harness.advance(1)
        left = commit_files(harness)
        assert 0 < len(left) < len(before)
        assert left == before[-len(left) :]
        live = store_of(harness).live_bytes()
        assert sum(live.values()) == sum(log.size_bytes for log in logs)
        assert all(live[number] for number in sorted(live)[:-1])
        for _ in range(2):
            harness.kill()
            found = [harness.log(log.topic_partition) for log in logs]
            assert [log.start_offset for log in found] == [95, 95, 50]
            assert [len(values(log)) for log in found] == [5, 5, 50]
            harness.disk.remove(f"{harness.data}/@checkpoint")

    def test_a_file_stays_for_its_delay_and_a_slice_outlives_it(self, harness: Harness) -> None:
        log = shared_log(harness, file_delete_delay_ms=60_000)
        fill(harness, log, count=100)
        found = log.read(0, 1000, 100)
        right, before = content(found), commit_files(harness)
        log.delete_before(100)
        for _ in range(8):
            harness.advance(1)
        folder = f"{harness.data}/@commitlog"
        assert len(commit_files(harness)) == 1
        assert len(harness.disk.list(folder)) == len(before)
        harness.advance(60)
        assert len(harness.disk.list(folder)) == 1
        assert content(found) == right

    @proves("L5")
    def test_truncating_one_partition_leaves_the_others_and_outlives_the_queues(self, harness: Harness) -> None:
        logs = [shared_log(harness, TopicPartition("t", n), **QUICK) for n in range(4)]
        fill(harness, *logs, count=80)
        logs[1].truncate(31)
        logs[2].restart_at(7)
        logs[3].delete_before(44)
        right = [values(log) for log in logs]
        assert [len(found) for found in right] == [80, 31, 0, 36]
        bounds = [(log.start_offset, log.end_offset) for log in logs]
        store_of(harness).abandon()
        for log in logs:
            for name in harness.disk.list(log.folder):
                if name.endswith(".queue"):
                    harness.disk.remove(f"{log.folder}/{name}")
        harness.open()
        found = [harness.log(log.topic_partition) for log in logs]
        assert [values(log) for log in found] == right
        assert [(log.start_offset, log.end_offset) for log in found] == bounds
        assert append(found[1], batch(b"new")) == 31

    @proves("L5")
    def test_a_removed_file_takes_no_bounds_with_it(self, shared: Harness) -> None:
        """The frame that told of a truncation goes with its file, the truncated bytes are still there."""
        shared.rewrite_share = 0.0
        held, cut, busy = (shared_log(shared, place, **QUICK) for place in (LONG, SHORT, OTHER))
        fill(shared, held, cut, count=10)
        fill(shared, busy, count=60)
        cut.truncate(3)
        fill(shared, busy, count=60)
        busy.delete_before(115)
        for _ in range(8):
            shared.advance(1)
        numbers = sorted(store_of(shared).commit_log.sizes)
        assert numbers[0] == 0
        assert numbers[1] > 2, "files in the middle are gone"
        store_of(shared).abandon()
        shared.disk.remove(f"{shared.data}/@checkpoint")
        shared.open()
        assert [(log.start_offset, log.end_offset) for log in map(shared.log, (LONG, SHORT, OTHER))] == [
            (0, 10),
            (0, 3),
            (115, 120),
        ]
        assert [len(values(shared.log(place))) for place in (LONG, SHORT, OTHER)] == [10, 3, 5]


class TestShortage:
    def test_a_refused_write_leaves_every_log_as_it_was_and_writing_resumes(self, shared: Harness) -> None:
        assert isinstance(shared.disk, VirtualDisk)
        log, other = shared_log(shared), shared_log(shared, OTHER)
        append(log, batch(b"a", producer=(5, 0, 0)), epoch=1)
        append(other, batch(b"o"))
        shared.write()
        before = (log.end_offset, log.size_bytes, log.last_epoch(), values(log), values(other))
        capacity = shared.disk.capacity_bytes
        shared.disk.capacity_bytes -= shared.disk.free_bytes("/") - 50
        for sequence in (1, 2):
            append(log, batch(b"x" * 90, producer=(5, 0, sequence)), epoch=2)
        append(other, batch(b"x" * 90))
        failures = shared.write()
        assert {failed for failed, _ in failures} == {log, other}
        assert all(isinstance(error, StorageFull) and "free some space" in str(error) for _, error in failures)
        assert (log.end_offset, log.size_bytes, log.last_epoch(), values(log), values(other)) == before
        commit_log = store_of(shared).commit_log
        assert shared.disk.size(commit_log.path(commit_log.number)) == commit_log.sizes[commit_log.number]
        view = batch(b"b", producer=(5, 0, 1))
        assert log.producers.check(read_header(view)) is None, "the sequence was given back"
        shared.disk.capacity_bytes = capacity
        assert append(log, view, epoch=2) == 1
        assert not shared.write()
        assert values(shared.kill()) == [b"a", b"b"]

    @pytest.mark.thorough
    @pytest.mark.parametrize("spare", range(0, 6000, 197))
    def test_whatever_room_is_left_the_logs_stay_whole(self, shared: Harness, spare: int) -> None:
        assert isinstance(shared.disk, VirtualDisk)
        shared.file_bytes = 1024
        logs = [shared_log(shared, TopicPartition("t", n), index_interval_bytes=100) for n in range(3)]
        fill(shared, *logs, count=10)
        right = {log.topic_partition: values(log) for log in logs}
        shared.disk.capacity_bytes -= shared.disk.free_bytes("/") - spare
        for turn in range(40):
            if turn == 20:
                shared.disk.capacity_bytes += 1 << 20
            for log in logs:
                try:
                    append(log, batch(b"turn %d" % turn, producer=(1, 0, log.end_offset)))
                except StorageFull:
                    continue
            failed = {log for log, _ in shared.write()}
            for log in logs:
                if log not in failed and log.written_offset > len(right[log.topic_partition]):
                    right[log.topic_partition].append(b"turn %d" % turn)
                assert values(log) == right[log.topic_partition]
        assert all(len(found) >= 30 for found in right.values())
        shared.kill()
        assert {log.topic_partition: values(shared.log(log.topic_partition)) for log in logs} == right

    def test_deleting_makes_room_again_on_a_real_full_disk(self, tmp_path: Path) -> None:
        with small_disk(tmp_path) as folder:
            for harness in real_harness(f"{folder}/data", SHARED):
                harness.file_bytes = 1 << 19
                log = shared_log(harness, TOPIC, **QUICK)
                error: HeadraceError | None = None
                for _ in range(400):
                    append(log, batch(b"x" * 20_000))
                    failures = harness.write()
                    harness.settle()
                    if failures:
                        error = failures[0][1]
                        break
                assert isinstance(error, StorageFull)
                full_at = log.end_offset
                assert len(values(log)) == full_at > 100
                log.delete_before(full_at - 10)
                for _ in range(5):
                    harness.advance(1)
                fill(harness, log, count=5)
                assert log.end_offset == full_at + 5

    @proves("L4")
    @pytest.mark.parametrize("durable", ["disk", "os"])
    def test_a_failed_sync_is_not_retried_and_takes_every_log_offline(self, shared: Harness, durable: str) -> None:
        assert isinstance(shared.disk, VirtualDisk)
        log, other = shared_log(shared, durability=durable, flush_ms=100), shared_log(shared, OTHER)
        append(log, batch())
        append(other, batch())
        shared.write()
        shared.advance(1)
        append(log, batch())
        shared.write()
        shared.disk.fail_sync(store_of(shared).commit_log.path(0))
        shared.advance(1)
        for each in (log, other):
            assert isinstance(each.offline, StorageFailed)
            with pytest.raises(StorageFailed, match="offline"):
                append(each, batch())
            assert each.topic_partition in [where for where, _ in shared.events]
            assert values(each), "it can still be read"
        assert log.durable_offset == 1
        syncs = shared.disk.syncs
        shared.advance(10)
        assert shared.disk.syncs <= syncs + 1
        assert len(values(shared.reopen())) >= 1

    def test_a_write_error_takes_the_logs_offline_and_a_restart_brings_them_back(self, shared: Harness) -> None:
        assert isinstance(shared.disk, VirtualDisk)
        log, other = shared_log(shared), shared_log(shared, OTHER)
        fill(shared, log, other, count=3)
        shared.disk.fail_write(store_of(shared).commit_log.path(0), errno.EIO)
        append(log, batch())
        ((_, error),) = shared.write()
        assert isinstance(error, StorageFailed)
        assert (log.offline, other.offline) == (error, error)
        again = shared.reopen()
        assert (again.end_offset, again.offline) == (3, None)
        fill(shared, shared_log(shared), count=1)

    @pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
    def test_a_queue_file_that_cannot_be_begun_refuses_its_log_alone(self, shared: Harness, number: int) -> None:
        assert isinstance(shared.disk, VirtualDisk)
        log, other = shared_log(shared), shared_log(shared, OTHER)
        shared.disk.fail_open(f"{log.folder}/{0:020d}.queue", number)
        append(log, batch(b"lost"))
        append(other, batch(b"kept"))
        assert [failed for failed, _ in shared.write()] == [log]
        assert (log.end_offset, log.offline, values(other)) == (0, None, [b"kept"])
        append(log, batch(b"again"))
        assert not shared.write()
        assert values(shared.kill()) == [b"again"]


def test_a_commit_opens_no_file(shared: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    log = shared_log(shared, durability="disk")
    fill(shared, log, count=1)
    shared.settle()
    opened: list[str] = []
    open_file = shared.disk.open

    def noted(path: str, *, create: bool = False, writable: bool = False) -> File:
        opened.append(path)
        return open_file(path, create=create, writable=writable)

    monkeypatch.setattr(shared.disk, "open", noted)
    for _ in range(5):
        fill(shared, log, count=1)
        shared.settle()
    assert (log.durable_offset, opened) == (6, [])


def test_a_partitioned_folder_is_refused_too(sim: Harness) -> None:
    append(sim.log(), batch())
    sim.write()
    assert sim.store is not None
    sim.store.close()
    with pytest.raises(DataFolderError, match=rf"has the layout '{PARTITIONED}'.*--to shared"):
        SharedStore(sim.disk, sim.clock, sim.data)
