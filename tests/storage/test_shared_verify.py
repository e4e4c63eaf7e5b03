"""A flipped byte anywhere in a folder of the shared layout is found and named offline."""

from __future__ import annotations

import random

import pytest

from headrace.errors import DataFolderError
from headrace.records import kernel
from headrace.storage import folder
from headrace.storage.commitlog import checkpoint
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.queuefile import ENTRY_BYTES, HEAD_BYTES
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.log import TopicPartition
from headrace.storage.offline import verify
from headrace.storage.offline.report import CommitFileReport, DumpedBatch, PartitionReport, Problem
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.folders import contents, copied, fill, fill_at_random, stop
from storage.harness import Harness, append, batch, sim_harness


@pytest.fixture
def stopped(shared: Harness) -> Harness:
    fill(shared)
    stop(shared)
    return shared


@pytest.fixture
def small(shared: Harness) -> Harness:
    """Two files; a partition with two epochs, and one with gaps."""
    shared.file_bytes = 600
    log, sparse = shared.log(), shared.log(TopicPartition("sparse", 0))
    for n in range(3):
        append(log, batch(b"v", producer=(9, 0, n)), epoch=n // 2)
        copied(sparse, n * 3 + 1, b"s")
        shared.write()
    stop(shared)
    return shared


def disk_of(harness: Harness) -> VirtualDisk:
    assert isinstance(harness.disk, VirtualDisk)
    return harness.disk


def problems(harness: Harness) -> list[Problem]:
    found = list(verify.inspect_folder(harness.disk, "/data").problems)
    return found + [problem for report in verify.reports(harness.disk, "/data") for problem in report.problems]


def commit_files(harness: Harness) -> list[str]:
    return [f"/data/@commitlog/{name}" for name in sorted(harness.disk.list("/data/@commitlog"))]


def everything(disk: VirtualDisk, path: str = "/data") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in disk.list(path):
        try:
            found |= everything(disk, f"{path}/{name}")
        except NotADirectoryError:
            file = disk.open(f"{path}/{name}")
            found[file.path] = file.pread(file.size(), 0)
    return found


def test_a_whole_folder_has_no_problems_is_told_as_it_is_and_stays_as_it_is(stopped: Harness) -> None:
    disk = disk_of(stopped)
    before = everything(disk)
    assert verify.inspect_folder(disk, "/data").layout == folder.SHARED
    found = list(verify.reports(disk, "/data"))
    assert not problems(stopped)
    files = [report for report in found if isinstance(report, CommitFileReport)]
    assert [report.path for report in files] == commit_files(stopped)
    assert [report.size_bytes for report in files] == [disk.size(report.path) for report in files]
    dumped = [each for each in verify.dump(disk, "/data") if isinstance(each, DumpedBatch)]
    assert everything(disk) == before
    stopped.open()
    for report in found:
        if not isinstance(report, PartitionReport):
            continue
        log = stopped.log(report.topic_partition)
        batches = contents(log)
        assert (report.start_offset, report.end_offset) == (log.start_offset, log.end_offset)
        assert (report.topic_id, report.batches) == (log.topic_id, len(batches))
        assert report.records == sum(len(kernel.records(view)) for _, view in batches)
        own = [each.header for each in dumped if each.topic_partition == report.topic_partition]
        assert own == [header for header, _ in batches]


@pytest.mark.parametrize("stopping", ["clean", "kill", "crash"])
def test_a_folder_is_read_as_the_next_start_finds_it(stopping: str, seed: int) -> None:
    chance = random.Random(seed)
    harness = sim_harness(folder.SHARED)
    fill_at_random(harness, chance)
    assert harness.store is not None
    if stopping == "clean":
        harness.store.close()
    else:
        harness.store.abandon()
    if stopping == "crash":
        disk_of(harness).crash(seed)
    whole = [each for each in verify.reports(harness.disk, "/data") if isinstance(each, PartitionReport)]
    dumped = [each for each in verify.dump(harness.disk, "/data") if isinstance(each, DumpedBatch)]
    harness.open()
    for report in whole:
        log = harness.log(report.topic_partition)
        assert (report.start_offset, report.end_offset) == (log.start_offset, log.end_offset), report.topic_partition
        own = [each.header for each in dumped if each.topic_partition == report.topic_partition]
        assert own == [header for header, _ in contents(log)]
        assert report.batches == len(own)
        if stopping != "crash":
            assert not report.problems


@proves("J6")
@pytest.mark.thorough
def test_a_flipped_bit_at_every_byte_of_the_commit_log_is_found_and_named(small: Harness) -> None:
    disk, chance = disk_of(small), random.Random(1)
    unwanted = _epochs_of_unwanted_batches(small)
    for path in commit_files(small):
        for position in range(disk.size(path)):
            mask = 1 << chance.randrange(8)
            disk.flip(path, position, mask)
            found = [problem for problem in problems(small) if problem.path == path]
            disk.flip(path, position, mask)
            if (path, position) in unwanted:
                continue
            assert found, f"flip at {position} of {path} is not found"
            assert found[0].position is None or found[0].position <= position
    assert not problems(small)


def test_flipped_bits_in_what_a_log_has_been_through_are_found(stopped: Harness, seed: int) -> None:
    disk, chance = disk_of(stopped), random.Random(seed)
    unwanted = _epochs_of_unwanted_batches(stopped)
    for _ in range(40):
        path = chance.choice(commit_files(stopped))
        position, mask = chance.randrange(disk.size(path)), 1 << chance.randrange(8)
        disk.flip(path, position, mask)
        assert (path, position) in unwanted or problems(stopped), f"flip at {position} of {path}"
        disk.flip(path, position, mask)


def _epochs_of_unwanted_batches(harness: Harness) -> set[tuple[str, int]]:
    """Nothing covers the epoch of a batch that was cut or deleted; nothing depends on it either."""
    wanted = {
        (each.path, each.position) for each in verify.dump(harness.disk, "/data") if isinstance(each, DumpedBatch)
    }
    places: set[tuple[str, int]] = set()
    for path in commit_files(harness):
        data = harness.disk.open(path).pread(1 << 20, 0)
        for position in range(len(data) - 61):
            is_batch = data[position + 16] == 2 and data[position : position + 5] == bytes(5)
            if is_batch and (path, position) not in wanted:
                places |= {(path, position + byte) for byte in range(12, 16)}
    return places


def test_a_flipped_bit_beside_the_commit_log_is_found(small: Harness) -> None:
    disk, chance = disk_of(small), random.Random(2)
    points = checkpoint.read(disk, "/data")
    assert points is not None
    for path in everything(disk):
        size = disk.size(path)
        if "/@commitlog/" in path or path.endswith(("@lock", "/layout")):
            continue
        if path.endswith(".queue"):
            point = next(each for each in points.logs.values() if f"/{each.topic}-{each.partition}/" in path)
            if f"{point.queue_first:020d}" in path:
                size = HEAD_BYTES + point.queue_count * ENTRY_BYTES
        for position in range(size):
            mask = 1 << chance.randrange(8)
            disk.flip(path, position, mask)
            found = {problem.path for problem in problems(small)}
            assert found & {path, "/data/@checkpoint"}, f"flip at {position} of {path}"
            disk.flip(path, position, mask)


def test_damage_is_named_with_file_byte_partition_and_offset(shared: Harness) -> None:
    log, other = shared.log(), shared.log(TopicPartition("other", 0))
    for n in range(5):
        append(log, batch(b"value %d" % n))
        append(other, batch(b"other %d" % n))
        shared.write()
    stop(shared)
    dumped = [each for each in verify.dump(shared.disk, "/data") if isinstance(each, DumpedBatch)]
    third = next(each for each in dumped if str(each.topic_partition) == "orders-0" and each.header.base_offset == 3)
    disk_of(shared).flip(third.path, third.position + 70)
    found = problems(shared)
    assert (found[0].path, found[0].position, found[0].offset) == (third.path, third.position, 3)
    assert "orders-0" in found[0].what
    assert not any("other-0" in str(problem) for problem in found)
    lines = [str(each) for each in verify.dump(shared.disk, "/data") if isinstance(each, Problem)]
    assert any(f"{third.path} at byte {third.position}, offset 3: " in line for line in lines)


def test_a_log_that_never_held_anything_is_no_problem(shared: Harness) -> None:
    """A checkpoint may know of a log before the commit log does; after a kill nothing there tells of it at all."""
    shared.log()
    shared.advance(61)
    assert problems(shared) == []
    shared.kill()
    assert problems(shared) == []
    stop(shared)
    assert problems(shared) == []


def test_a_removed_commit_file_is_missed(stopped: Harness) -> None:
    disk_of(stopped).remove(commit_files(stopped)[-2])
    assert any("missing" in problem.what for problem in problems(stopped))


def test_a_torn_tail_is_told(shared: Harness) -> None:
    log = shared.log()
    append(log, batch(b"x" * 500))
    shared.write()
    assert shared.store is not None
    shared.store.abandon()
    path = commit_files(shared)[0]
    shared.disk.open(path, writable=True).truncate(shared.disk.size(path) - 100)
    (problem,) = problems(shared)
    assert problem.path == path
    assert "the next start may cut the log here" in problem.what


def test_a_layout_that_is_not_known_is_refused(stopped: Harness) -> None:
    for position in range(len(folder.SHARED)):
        disk_of(stopped).flip("/data/layout", position)
        with pytest.raises(DataFolderError, match="a conversion was interrupted"):
            verify.inspect_folder(stopped.disk, "/data")
        disk_of(stopped).flip("/data/layout", position)


def test_the_missing_end_of_a_file_before_another_is_told_as_a_start_sees_it(shared: Harness) -> None:
    shared.file_bytes = 1000
    log, disk = shared.log(durability="os"), disk_of(shared)
    shared.advance(61)
    ends = [0]
    while len(commit_files(shared)) < 2:
        append(log, batch(b"v" * 50))
        shared.write()
        ends.append(disk.size(commit_files(shared)[0]))
    assert shared.store is not None
    shared.store.abandon()
    before = disk.size(commit_files(shared)[0])
    disk.open(commit_files(shared)[0], writable=True).truncate(max(end for end in ends if end < before))
    told = problems(shared)
    assert any("end of the file is missing" in problem.what for problem in told), told
    shared.open()
    assert len(commit_files(shared)) == 1


@pytest.mark.parametrize("job", ["rewriting", "compaction"])
def test_a_clean_stop_during_maintenance_leaves_a_whole_folder(job: str) -> None:
    for pause in range(1, 200):
        shared = sim_harness(folder.SHARED)
        shared.file_bytes = 3000
        log = shared.log(cleanup_policy="compact", segment_bytes=1024, index_interval_bytes=100)
        other = shared.log(TopicPartition("other", 0))
        for n in range(60):
            append(log if n % 4 else other, batch(b"v%d" % n + b"x" * 60, key=b"k%d" % (n % 5)))
            assert not shared.write()
            shared.settle()
        log.delete_before(10)
        shared.settle()
        store = shared.store
        assert isinstance(store, SharedStore)
        assert isinstance(log, SharedLog)
        steps = store.rewriter.steps(0) if job == "rewriting" else store._compact(log)
        disk_of(shared).hold_syncs()
        waits = [next(steps, False) for _ in range(pause)]
        steps.close()
        disk_of(shared).release_syncs()
        store.close()
        assert not problems(shared), pause
        if False in waits or waits[-1] is not None:
            return
    raise AssertionError("it never waited for a sync")


def test_a_truncation_during_rewriting_leaves_a_whole_folder(shared: Harness) -> None:
    shared.file_bytes = 3000
    log, other = shared.log(), shared.log(TopicPartition("other", 0))
    for n in range(60):
        append(log if n % 4 else other, batch(b"v%d" % n + b"x" * 60))
        assert not shared.write()
        shared.settle()
    log.delete_before(10)
    store = shared.store
    assert isinstance(store, SharedStore)
    steps = store.rewriter.steps(0)
    while next(steps) is None:
        pass
    other.truncate(12)
    for _ in steps:
        shared.settle()
    store.close()
    assert not problems(shared)
