"""The partitioned layout: the contract of logs, and what only a log of segments has."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.errors import DataFolderError, HeadraceError, StorageFailed, StorageFull
from headrace.ports.disk import File
from headrace.records.batch import read_header
from headrace.settings.values import LogSettings
from headrace.storage.log import TopicPartition
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.segment import OpenSegments
from headrace.storage.segments.store import PartitionedStore
from headrace.system.disk import SystemDisk
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, TOPIC_ID, Harness, append, batch, read_all, real_harness, settings, values
from storage.log_contract import SMALL, LogContract
from storage.small_disk import small_disk


class TestPartitionedLog(LogContract):
    pass


def partitioned(harness: Harness, **overrides: object) -> PartitionedLog:
    log = harness.log(**overrides)
    assert isinstance(log, PartitionedLog)
    return log


def fill(harness: Harness, log: PartitionedLog, count: int, value: bytes = b"x" * 30) -> None:
    for _ in range(count):
        append(log, batch(value))
        assert not harness.write()


def names(harness: Harness) -> set[str]:
    return set(harness.disk.list(f"{harness.data}/orders/orders-0"))


class TestSegments:
    @proves("G8", "G12")
    def test_files_are_named_by_their_first_offset_in_folders_of_topic_and_partition(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL)
        fill(harness, log, 50)
        assert len(log.segments) > 2
        for segment in log.segments:
            assert f"{segment.base_offset:020d}.log" in names(harness)
            assert harness.disk.size(segment.path) == segment.written <= 2000
        for segment in log.segments[:-1]:
            assert {f"{segment.base_offset:020d}.index", f"{segment.base_offset:020d}.timeindex"} <= names(harness)

    @proves("G8")
    def test_the_active_index_has_its_room_in_advance_and_a_closed_one_is_cut(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL)
        fill(harness, log, 25)
        closed, active = log.segments[0], log.active
        assert harness.disk.size(closed.index.path) == (closed.index.count + 1) * 8
        assert active.index.count
        assert harness.disk.size(active.index.path) == 4096

    @proves("J6")
    def test_a_segment_is_closed_when_it_is_old(self, harness: Harness) -> None:
        log = partitioned(harness, segment_ms=5000)
        fill(harness, log, 1)
        harness.advance(4.9)
        assert len(log.segments) == 1
        harness.advance(0.2)
        assert [segment.base_offset for segment in log.segments] == [0, 1]
        harness.advance(60)
        assert len(log.segments) == 2, "an empty segment is not closed"

    def test_jitter_closes_segments_of_the_same_age_at_different_times(self, harness: Harness) -> None:
        def logs() -> list[PartitionedLog]:
            found = [harness.log(TopicPartition("t", n), segment_ms=5000, segment_jitter_ms=4000) for n in range(20)]
            return [log for log in found if isinstance(log, PartitionedLog)]

        for log in logs():
            fill(harness, log, 1)
        due = [log.rolls_at_ms for log in logs()]
        assert len(set(due)) > 10
        began_ms = harness.clock.wall_ms()
        assert all(began_ms + 1000 < at_ms <= began_ms + 5000 for at_ms in due)
        harness.advance(3)
        rolled = [len(log.segments) == 2 for log in logs()]
        assert rolled == [at_ms <= began_ms + 3000 for at_ms in due]
        assert any(rolled)
        assert not all(rolled)
        harness.reopen()
        again = [log.rolls_at_ms for log in logs()]
        assert [at_ms for at_ms, gone in zip(again, rolled, strict=True) if not gone] == [
            at_ms for at_ms, gone in zip(due, rolled, strict=True) if not gone
        ]

    def test_a_preallocated_segment_has_its_room_and_gives_back_the_rest(self, harness: Harness) -> None:
        log = partitioned(harness, preallocate="true", segment_bytes=1 << 20)
        fill(harness, log, 3)
        assert log.active.file.size() == log.size_bytes
        if isinstance(harness.disk, SystemDisk):
            blocks = os.stat(log.active.path).st_blocks * 512
            assert blocks >= 1 << 20
            log.roll()
            assert os.stat(log.segments[0].path).st_blocks * 512 < 1 << 17
        harness.kill()
        log = partitioned(harness)
        fill(harness, log, 3)
        assert len(values(log)) == 6

    def test_without_room_for_a_preallocated_segment_its_batch_is_refused(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim, preallocate="true", segment_bytes=1 << 20)
        sim.disk.capacity_bytes = 1 << 19
        with pytest.raises(StorageFull):
            append(log, batch())
        sim.disk.capacity_bytes = 1 << 22
        fill(sim, log, 1)
        assert len(values(log)) == 1

    def test_age_counts_over_a_restart(self, harness: Harness) -> None:
        fill(harness, partitioned(harness, segment_ms=5000), 1)
        harness.advance(3)
        harness.reopen()
        harness.advance(2.1)
        assert len(partitioned(harness).segments) == 2

    def test_a_full_index_ends_its_segment(self, harness: Harness) -> None:
        log = partitioned(harness, segment_index_bytes=64, index_interval_bytes=1)
        fill(harness, log, 30)
        assert [segment.base_offset for segment in log.segments] == [0, 9, 18, 27]
        assert len(values(log)) == 30

    def test_relative_offsets_stay_below_two_to_the_31(self, harness: Harness) -> None:
        log = partitioned(harness)
        for base in (0, 2**31 - 2, 2**31 - 1, 2**31 + 5):
            view = batch()
            view[0:8] = base.to_bytes(8, "big")
            view[12:16] = bytes(4)
            log.append_copied(view)
            harness.write()
        assert [segment.base_offset for segment in log.segments] == [0, 1, 2**31]
        assert [header.base_offset for header, _ in read_all(log)] == [0, 2**31 - 2, 2**31 - 1, 2**31 + 5]

    def test_only_so_many_segments_are_open_and_all_can_be_read(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL)
        opened = OpenSegments(3)
        log._services.open_segments = opened
        fill(harness, log, 200)
        assert len(log.segments) > 8
        assert len(opened) <= 3
        assert len(values(log)) == 200
        assert len(opened) <= 3

    @proves("G9")
    def test_a_slice_outlives_the_segment_that_it_came_from(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL, file_delete_delay_ms=0)
        fill(harness, log, 100)
        result = log.read(0, 500, 100)
        right = b"".join(part.file.pread(part.count, part.position) for part in result.slices)
        log.delete_before(99)
        harness.advance(1)
        assert not [name for name in names(harness) if name.startswith(f"{0:020d}")]
        assert b"".join(part.file.pread(part.count, part.position) for part in result.slices) == right

    def test_logs_that_nobody_touches_open_no_files(self, real: Harness) -> None:
        for n in range(50):
            log = real.log(TopicPartition("many", n))
            append(log, batch())
        real.write()
        assert real.store is not None
        real.store.close()
        before = len(list(Path("/proc/self/fd").iterdir()))
        real.open()
        assert real.store.was_clean
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1

    def test_a_search_for_a_time_leaves_no_files_open_of_segments_that_it_passes(self, real: Harness) -> None:
        log = partitioned(real, **SMALL)
        fill(real, log, 60, b"x" * 600)
        assert len(log.segments) > 15
        assert real.store is not None
        real.store.close()
        real.open()
        log = partitioned(real)
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert log.offset_for_time(1 << 62) is None
        assert log.greatest_timestamp() is not None
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3


class TestRetention:
    @proves("J6")
    def test_segments_go_when_they_are_too_old(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL, retention_ms=10_000)
        now_ms = harness.clock.wall_ms()
        for i in range(60):
            append(log, batch(b"x" * 30, timestamp_ms=now_ms + i * 200))
            harness.write()
        harness.advance(16)
        kept = [header.max_timestamp_ms for header, _ in read_all(log)]
        assert 0 < len(kept) < 60
        assert log.start_offset == log.segments[0].base_offset > 0
        assert all(segment.load_greatest_ms() >= now_ms + 6000 for segment in log.segments)

    def test_an_active_segment_that_is_too_old_is_closed_first(self, harness: Harness) -> None:
        log = partitioned(harness, retention_ms=10_000)
        append(log, batch(timestamp_ms=harness.clock.wall_ms()))
        harness.write()
        harness.advance(12)
        assert (log.start_offset, log.end_offset, log.size_bytes) == (1, 1, 0)

    def test_records_without_a_timestamp_are_as_old_as_their_file(self, sim: Harness) -> None:
        log = partitioned(sim, **SMALL, retention_ms=10_000)
        for _ in range(60):
            append(log, batch(b"x" * 30, timestamp_ms=-1))
            sim.write()
        assert {header.max_timestamp_ms for header, _ in read_all(log)} == {-1}
        sim.advance(9)
        assert (log.start_offset, len(values(log))) == (0, 60)
        log = partitioned_again(sim)
        sim.advance(0.9)
        assert log.start_offset == 0
        sim.advance(1.2)
        assert log.start_offset == 60

    @proves("J6")
    def test_the_oldest_segments_go_when_there_is_too_much(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL, retention_bytes=5000, retention_ms=-1)
        fill(harness, log, 300)
        harness.advance(2)
        assert 3000 < log.size_bytes <= 7000
        assert [header.base_offset for header, _ in read_all(log)] == list(range(log.start_offset, 300))

    def test_nothing_is_deleted_without_the_policy(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL, retention_bytes=0, retention_ms=0, cleanup_policy="compact")
        fill(harness, log, 100)
        end = log.end_offset
        harness.advance(2)
        assert (log.start_offset, log.end_offset) == (0, end)

    def test_deleted_files_stay_for_their_delay(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL, file_delete_delay_ms=60_000)
        fill(harness, log, 100)
        log.delete_before(90)
        assert [name for name in names(harness) if name.endswith(".deleted")]
        harness.advance(59)
        assert [name for name in names(harness) if name.endswith(".deleted")]
        harness.advance(2)
        assert not [name for name in names(harness) if name.endswith(".deleted")]


class TestFullDisk:
    def test_a_refused_write_leaves_the_log_as_it_was_and_writing_resumes(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim, **SMALL)
        append(log, batch(b"a", producer=(5, 0, 0)), epoch=1)
        sim.write()
        before = (log.end_offset, log.size_bytes, log.last_epoch(), values(log))
        sim.disk.capacity_bytes -= sim.disk.free_bytes("/") - 50
        for sequence in (1, 2):
            append(log, batch(b"x" * 90, producer=(5, 0, sequence)), epoch=2)
        ((failed, error),) = sim.write()
        assert failed is log
        assert isinstance(error, StorageFull)
        assert "free some space" in str(error)
        assert (log.end_offset, log.size_bytes, log.last_epoch(), values(log)) == before
        assert sim.disk.size(log.active.path) == log.active.written
        view = batch(b"b", producer=(5, 0, 1))
        assert log.producers.check(read_header(view)) is None, "the sequence was given back"
        sim.disk.capacity_bytes += 100_000
        assert append(log, view, epoch=2) == 1
        assert not sim.write()
        assert values(sim.kill()) == [b"a", b"b"]

    def test_other_logs_are_written_when_one_is_refused(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log, other = partitioned(sim), sim.log(TopicPartition("other", 0))
        append(log, batch())
        append(other, batch())
        sim.write()
        sim.disk.fail_write(log.active.path, errno.ENOSPC)
        append(log, batch(b"lost"))
        append(other, batch(b"kept"))
        assert [failed for failed, _ in sim.write()] == [log]
        assert (log.end_offset, other.end_offset, other.written_offset) == (1, 2, 2)

    @pytest.mark.thorough
    @pytest.mark.parametrize("spare", range(0, 3000, 97))
    def test_whatever_room_is_left_a_rolling_log_stays_whole(self, sim: Harness, spare: int) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim, segment_bytes=1024, index_interval_bytes=100)
        for i in range(10):
            append(log, batch(b"%d" % i, producer=(1, 0, i)))
        sim.write()
        sim.disk.capacity_bytes -= sim.disk.free_bytes("/") - spare
        right = values(log)
        sequence = 10
        for turn in range(40):
            if turn == 20:
                sim.disk.capacity_bytes += 1 << 20
            staged = []
            for n in range(3):
                try:
                    append(log, batch(b"%d" % (sequence + n), producer=(1, 0, sequence + n)))
                except StorageFull:
                    break
                staged.append(b"%d" % (sequence + n))
            failures = sim.write()
            if not failures:
                right += staged
                sequence += len(staged)
            assert values(log) == right[: log.written_offset]
            sequence = log.end_offset
            right = values(log)
        assert len(right) > 30
        assert right == [b"%d" % i for i in range(len(right))]
        assert values(sim.kill()) == right

    def test_reads_go_on_and_writing_resumes_on_a_real_full_disk(self, tmp_path: Path) -> None:
        with small_disk(tmp_path) as folder:
            for harness in real_harness(f"{folder}/data"):
                log = partitioned(harness, segment_bytes=1 << 20)
                error: HeadraceError | None = None
                for _ in range(400):
                    append(log, batch(b"x" * 20_000))
                    failures = harness.write()
                    if failures:
                        error = failures[0][1]
                        break
                assert isinstance(error, StorageFull)
                full_at = log.end_offset
                assert len(values(log)) == full_at > 100
                log.delete_before(full_at - 10)
                harness.advance(61)
                fill(harness, log, 5)
                assert log.end_offset == full_at + 5


class TestFailures:
    @proves("L4")
    def test_a_failed_sync_is_not_retried_and_takes_its_log_offline(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim, durability="disk")
        append(log, batch())
        sim.write()
        sim.settle()
        append(log, batch())
        sim.write()
        sim.disk.fail_sync(log.active.path)
        sim.settle()
        assert isinstance(log.offline, StorageFailed)
        assert (log.durable_offset, sim.events[-1]) == (1, (TOPIC, 1))
        with pytest.raises(StorageFailed, match="offline"):
            append(log, batch())
        syncs = sim.disk.syncs
        sim.advance(10)
        assert sim.disk.syncs == syncs
        assert len(values(log)) == 2, "it can still be read"

    @proves("L4")
    @pytest.mark.parametrize("logs", [3, 30])
    def test_a_failed_sync_takes_only_its_own_log_offline(self, sim: Harness, logs: int) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        opened = [sim.log(TopicPartition("orders", n), durability="disk") for n in range(logs)]
        for log in opened:
            append(log, batch())
        sim.write()
        sim.disk.fail_sync(f"{sim.data}/orders/orders-1/{0:020d}.log")
        sim.settle()
        assert [n for n, log in enumerate(opened) if log.offline is not None] == [1]
        assert [log.durable_offset for log in opened] == [1, 0, *[1] * (logs - 2)]
        for log in opened[2:]:
            append(log, batch())
        sim.write()
        sim.disk.fail_sync(f"{sim.data}/orders/orders-2/{0:020d}.log")
        assert sim.store is not None
        sim.store.close()
        assert [n for n, log in enumerate(opened) if log.offline is not None] == [1, 2]

    @pytest.mark.parametrize("end", [0, 4])
    def test_what_a_cut_has_removed_before_it_failed_is_not_read(self, sim: Harness, end: int) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim)
        fill(sim, log, 6)
        sim.disk.fail_open(f"{log.folder}/{end:020}.log", errno.EIO)
        with pytest.raises(StorageFailed, match="offline"):
            log.truncate(end)
        for offset in range(end, 6):
            with pytest.raises(StorageFailed, match="offline"):
                log.read(offset, 1, 6)
        assert [log.read(offset, 1, 6).slices != () for offset in range(end)] == [True] * end

    def test_a_write_error_takes_its_log_offline_and_a_restart_brings_it_back(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim)
        fill(sim, log, 3)
        sim.disk.fail_write(log.active.path, errno.EIO)
        append(log, batch())
        ((_, error),) = sim.write()
        assert isinstance(error, StorageFailed)
        assert log.offline is error
        log = partitioned_again(sim)
        assert (log.end_offset, log.offline) == (3, None)
        fill(sim, log, 1)


def partitioned_after_kill(harness: Harness) -> PartitionedLog:
    log = harness.kill()
    assert isinstance(log, PartitionedLog)
    return log


def partitioned_again(harness: Harness) -> PartitionedLog:
    log = harness.reopen()
    assert isinstance(log, PartitionedLog)
    return log


class TestGroupCommit:
    @proves("L4")
    def test_one_sync_serves_all_that_came_while_the_last_one_ran(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        logs = [sim.log(TopicPartition("t", n), durability="disk") for n in range(20)]
        for log in logs:
            append(log, batch())
        sim.write()
        sim.settle()
        took: list[float] = []
        assert sim.store is not None
        sim.store.on_sync(took.append)
        sim.disk.hold_syncs()
        before = sim.disk.syncs
        append(logs[0], batch())
        sim.write()
        for log in logs:
            append(log, batch())
            append(log, batch())
            sim.write()
        sim.disk.release_syncs()
        sim.settle()
        assert sim.disk.syncs == before + 2
        assert len(took) == 2
        assert [log.durable_offset for log in logs] == [4] + [3] * 19

    def test_a_commit_of_an_open_segment_opens_no_file(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        log = harness.log(durability="disk")
        append(log, batch())
        harness.write()
        harness.settle()
        opened: list[str] = []
        open_file = harness.disk.open

        def noted(path: str, *, create: bool = False, writable: bool = False) -> File:
            opened.append(path)
            return open_file(path, create=create, writable=writable)

        monkeypatch.setattr(harness.disk, "open", noted)
        for _ in range(5):
            append(log, batch())
            harness.write()
            harness.settle()
        assert (log.durable_offset, opened) == (6, [])

    def test_durable_is_what_was_written_when_the_sync_was_asked_for(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = sim.log(durability="disk")
        sim.disk.hold_syncs()
        append(log, batch())
        sim.write()
        append(log, batch())
        sim.write()
        sim.disk.release_syncs()
        sim.settle()
        assert [durable for _, durable in sim.events] == [1, 2]

    def test_a_truncation_during_a_sync_does_not_make_later_records_look_durable(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = sim.log(durability="disk")
        for _ in range(3):
            append(log, batch())
        sim.disk.hold_syncs()
        sim.write()
        log.truncate(1)
        append(log, batch(b"new"))
        append(log, batch(b"new"))
        sim.write()
        sim.disk.release_syncs()
        sim.clock.run_soon()
        assert all(durable <= 1 or sim.disk.syncs >= 2 for _, durable in sim.events)
        assert log.durable_offset == 3


class TestFolder:
    def test_a_second_broker_on_the_folder_is_told_who_has_it(self, real: Harness) -> None:
        real.log()
        with pytest.raises(DataFolderError, match=r"is in use by the broker with process id \d+: stop it, or choose"):
            PartitionedStore(SystemDisk(), real.clock, real.data)

    def test_a_folder_that_cannot_be_made_is_said(self, real: Harness, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataFolderError, match="cannot be used"):
            PartitionedStore(SystemDisk(), real.clock, str(tmp_path / "file" / "data"))

    def test_folders_of_other_or_unknown_topics_are_set_aside(self, harness: Harness) -> None:
        partitions = [TopicPartition("a", 0), TopicPartition("b", 0), TopicPartition("c", 0)]
        for topic_partition in partitions:
            append(harness.log(topic_partition), batch(b"old"))
        harness.write()
        assert harness.store is not None
        harness.store.close()
        chosen: LogSettings = settings()
        store = PartitionedStore(harness.disk, harness.clock, harness.data)
        strays = store.open({partitions[0]: (TOPIC_ID, chosen), partitions[1]: (b"\x01" * 16, chosen)})
        assert [(stray.path.rpartition("/")[2], stray.reason.split()[0]) for stray in strays] == [
            ("b-0.stray-0", "it"),
            ("c-0.stray-0", "no"),
        ]
        ends = {str(log.topic_partition): log.end_offset for log in store.logs()}
        assert ends == {"a-0": 1, "b-0": 0}
        store.close()

    def test_a_damaged_checkpoint_costs_only_time(self, sim: Harness, caplog: pytest.LogCaptureFixture) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim, **SMALL)
        fill(sim, log, 60)
        assert sim.store is not None
        sim.store.close()
        sim.disk.flip("/data/@checkpoint", 20)
        sim.open()
        assert not sim.store.was_clean
        assert len(values(sim.log())) == 60
        assert "@checkpoint is damaged" in caplog.text

    def test_a_clean_stop_is_recognised_and_a_grown_file_is_not(self, sim: Harness) -> None:
        log = partitioned(sim)
        fill(sim, log, 3)
        sim.reopen()
        assert sim.store is not None
        assert sim.store.was_clean
        sim.store.close()
        sim.disk.open(log.active.path, writable=True).pwritev([b"junk"], log.active.written)
        sim.open()
        assert not sim.store.was_clean
        assert sim.log().end_offset == 3
        assert sim.disk.size(log.active.path) == log.active.written

    def test_a_store_that_was_never_opened_leaves_the_checkpoint_alone(self, sim: Harness) -> None:
        fill(sim, partitioned(sim), 2)
        assert sim.store is not None
        sim.store.close()
        PartitionedStore(sim.disk, sim.clock, sim.data).close()
        sim.open()
        assert sim.store.was_clean


class TestRecovery:
    @proves("J6")
    @pytest.mark.parametrize("cut", range(1, 211, 13))
    def test_a_torn_tail_is_cut_and_said(self, sim: Harness, cut: int, caplog: pytest.LogCaptureFixture) -> None:
        log = partitioned(sim)
        fill(sim, log, 6)
        size = log.active.written
        sim.disk.open(log.active.path, writable=True).truncate(size - cut)
        log = partitioned_after_kill(sim)
        batch_bytes = size // 6
        whole = (size - cut) // batch_bytes
        assert log.end_offset == len(values(log)) == whole
        if (size - cut) % batch_bytes:
            assert f"is cut at byte {whole * batch_bytes}, offset {whole}" in caplog.text
        assert append(log, batch()) == whole

    def test_lost_indexes_are_rebuilt(self, harness: Harness) -> None:
        log = partitioned(harness, **SMALL)
        fill(harness, log, 60)
        right, first = read_all(log), log.segments[0]
        entries = [first.index.entry(i) for i in range(first.index.count)]
        assert harness.store is not None
        harness.store.close()
        for name in names(harness):
            if name.endswith(("index", ".snapshot")):
                harness.disk.remove(f"{log.folder}/{name}")
        harness.open()
        again = partitioned(harness)
        assert read_all(again) == right
        again.segments[0].load_indexes()
        assert [again.segments[0].index.entry(i) for i in range(again.segments[0].index.count)] == entries

    def test_a_hole_above_the_recovery_point_ends_the_log_there(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        log = partitioned(sim, **SMALL)
        fill(sim, log, 60)
        sim.disk.flip(log.segments[0].path, 500)
        torn = 500 // (log.segments[0].written // log.segments[0].next_offset)
        log2 = sim.kill()
        assert log2.end_offset == len(values(log2)) == torn
        assert append(log2, batch()) == torn

    def test_an_interrupted_topic_creation_is_taken_up_again(self, sim: Harness) -> None:
        partitioned(sim)
        log = sim.kill(seed=1)
        assert append(log, batch()) == 0


def test_an_active_segment_that_was_let_go_of_is_opened_again_by_the_next_append(sim: Harness) -> None:
    log = partitioned(sim)
    for nth in range(3):
        append(log, batch(b"%d" % nth, timestamp_ms=1_750_000_000_000 + nth))
        sim.write()
        log.active.release()
        assert log.active.append_file is None
    assert values(log) == [b"0", b"1", b"2"]
    assert log.active.greatest_ms == 1_750_000_000_002
    log.active.index.count = log.active.times.count = -1
    log.active.release()
    append(log, batch(b"3", timestamp_ms=1_750_000_000_001))
    sim.write()
    assert log.active.index.count >= 0
    assert values(log) == [b"0", b"1", b"2", b"3"]
