"""Faults of the disk and bad moments in the shared layout: what was acknowledged stays, and nothing else is claimed."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import CorruptBatch, HeadraceError, StorageFailed
from headrace.ports.disk import read_whole
from headrace.records import kernel
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.keys.builder import KeyIndexes
from headrace.storage.keys.query import KeyQueryResult, Wanted
from headrace.storage.log import Log, TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, TOPIC_ID, Harness, append, batch, content, values


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


def sim_disk(harness: Harness) -> VirtualDisk:
    assert isinstance(harness.disk, VirtualDisk)
    return harness.disk


def put(harness: Harness, log: Log, *each: bytes) -> None:
    for value in each:
        append(log, batch(value))
        assert not harness.write()
        harness.settle()


@pytest.mark.parametrize("seed", range(8))
def test_a_file_that_cannot_be_begun_leaves_the_old_one_active_and_nothing_acknowledged_is_lost(
    shared: Harness, seed: int
) -> None:
    shared.file_bytes = 2000
    log, commit_log = shared.log(retention_ms=-1, durability="disk"), store_of(shared).commit_log
    put(shared, log, b"x" * 100)
    shared.advance(61)
    while commit_log.room > 300:
        put(shared, log, b"x" * 100)
    before = commit_log.number, commit_log.end, dict(commit_log.sizes), shared.disk.list(commit_log.folder)
    sim_disk(shared).fail_open(commit_log.folder)
    append(log, batch(b"x" * 200))
    assert shared.write()
    assert (commit_log.number, commit_log.end, commit_log.sizes, shared.disk.list(commit_log.folder)) == before
    put(shared, log, *[b"y" * 100] * 3)
    safe, kept = log.durable_offset, values(log)
    assert safe == log.written_offset
    assert commit_log.number > before[0]
    assert values(shared.kill(seed=seed)) == kept


def test_a_first_file_whose_folder_cannot_be_opened_is_not_begun(shared: Harness) -> None:
    log = shared.log(durability="disk")
    sim_disk(shared).fail_open(store_of(shared).commit_log.folder)
    append(log, batch(b"refused"))
    assert shared.write()
    put(shared, log, b"kept")
    assert log.durable_offset == 1
    assert values(shared.kill(seed=1)) == [b"kept"]


def checkpoint_of(harness: Harness) -> bytes:
    return read_whole(harness.disk, "/data/@checkpoint")


@pytest.mark.parametrize("seed", range(4))
def test_no_checkpoint_claims_bytes_whose_sync_failed(shared: Harness, seed: int) -> None:
    log = shared.log(durability="disk")
    put(shared, log, *[b"safe%d" % n for n in range(5)])
    before = checkpoint_of(shared)
    sim_disk(shared).fail_sync(store_of(shared).commit_log.path(0))
    append(log, batch(b"not acknowledged"))
    shared.write()
    shared.settle()
    assert isinstance(log.offline, StorageFailed)
    heard: list[HeadraceError | None] = []
    store_of(shared)._checkpoints.soon(heard.append)
    for _ in range(3):
        shared.advance(61)
    assert checkpoint_of(shared) == before
    assert isinstance(heard[0], StorageFailed)
    assert values(shared.kill(seed=seed))[:5] == [b"safe%d" % n for n in range(5)]


def test_a_checkpoint_under_way_does_not_count_when_another_sync_fails(shared: Harness) -> None:
    log, disk = shared.log(durability="disk"), sim_disk(shared)
    put(shared, log, b"safe")
    before = checkpoint_of(shared)
    disk.hold_syncs()
    store_of(shared)._checkpoints.soon()
    shared.clock.run_soon()
    store_of(shared)._failed(OSError(errno.EIO, "Input/output error", store_of(shared).commit_log.path(0)))
    disk.release_syncs()
    shared.settle()
    assert checkpoint_of(shared) == before
    assert shared.log(TopicPartition("new", 0)).offline is log.offline


def test_a_start_whose_sync_fails_writes_no_checkpoint(shared: Harness) -> None:
    log = shared.log(durability="os")
    put(shared, log, b"written")
    store_of(shared).abandon()
    before = checkpoint_of(shared)
    sim_disk(shared).fail_sync(store_of(shared).commit_log.path(0))
    shared.open()
    shared.advance(61)
    assert isinstance(shared.log().offline, StorageFailed)
    assert checkpoint_of(shared) == before


def test_no_checkpoint_speaks_for_a_log_whose_queue_broke_off(shared: Harness) -> None:
    log, other = shared.log(), shared.log(TopicPartition("other", 0))
    put(shared, log, b"v")
    shared.advance(61)
    before = checkpoint_of(shared)
    assert isinstance(log, SharedLog)
    log.go_offline(StorageFailed("its queue is half written"))
    put(shared, other, b"w")
    shared.advance(61)
    assert checkpoint_of(shared) == before
    assert values(shared.reopen()) == [b"v"]
    assert values(shared.log(TopicPartition("other", 0))) == [b"w"]


def test_a_file_without_its_head_is_told_all_bounds_at_the_next_start(shared: Harness) -> None:
    shared.file_bytes, shared.rewrite_share = 3000, 0.0
    gone, other = shared.log(TopicPartition("gone", 0), file_delete_delay_ms=0), shared.log(file_delete_delay_ms=0)
    put(shared, gone, *[b"x" * 100] * 8)
    put(shared, other, *[b"x" * 100] * 4)
    commit_log = store_of(shared).commit_log
    while commit_log.number == 0 or commit_log.room > 600:
        put(shared, gone, b"x" * 100)
    end = gone.written_offset
    gone.delete_before(end)
    shared.advance(61)
    store_of(shared).abandon()
    # Killed between the creation of the next file and its first write.
    shared.disk.open(commit_log.path(commit_log.number + 1), create=True, writable=True)
    shared.open()
    put(shared, shared.log(), b"x")
    for _ in range(5):
        shared.advance(61)
    store_of(shared).close()
    folder = "/data/gone/gone-0"
    for name in shared.disk.list(folder):
        if name.endswith(".queue"):
            shared.disk.remove(f"{folder}/{name}")
    shared.disk.remove("/data/@checkpoint")
    shared.open()
    found = shared.log(TopicPartition("gone", 0))
    assert (found.start_offset, found.written_offset) == (end, end)


def test_a_start_without_metadata_keeps_the_commit_log_and_says_how_to_have_it_again(
    shared: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    shared.file_bytes = 3000
    log = shared.log(file_delete_delay_ms=0)
    put(shared, log, *[b"x%d" % n + b"x" * 100 for n in range(40)])
    kept, commit_files = values(log), set(shared.disk.list("/data/@commitlog"))
    store_of(shared).close()
    expected, shared.expected = shared.expected, {}
    for _ in range(2):  # one start sets the folder aside, the other finds it so
        caplog.clear()
        shared.open()
        for _ in range(4):
            shared.advance(61)
        put(shared, shared.log(TopicPartition("new", 0), file_delete_delay_ms=0), *[b"y" * 100] * 40)
        for _ in range(4):
            shared.advance(61)
        store_of(shared).close()
        assert commit_files <= set(shared.disk.list("/data/@commitlog"))
        told = [each.message for each in caplog.records if "no commit file" in each.message]
        assert len(told) == 1
        assert "/data/orders/orders-0.stray-0" in told[0]
    shared.disk.rename("/data/orders/orders-0.stray-0", "/data/orders/orders-0")
    shared.disk.remove("/data/@checkpoint")
    shared.expected |= expected
    shared.open()
    assert values(shared.log()) == kept


def test_commit_files_go_again_when_the_last_folder_that_is_set_aside_is_deleted(shared: Harness) -> None:
    shared.file_bytes = 3000
    put(shared, shared.log(file_delete_delay_ms=0), *[b"x" * 100] * 40)
    put(shared, shared.log(TopicPartition("a.stray-1", 0), file_delete_delay_ms=0), b"this name sets nothing aside")
    commit_files = set(shared.disk.list("/data/@commitlog"))
    store_of(shared).close()
    del shared.expected[TOPIC]
    store = shared.open()
    for _ in range(4):
        shared.advance(61)
    assert commit_files <= set(shared.disk.list("/data/@commitlog"))
    store.delete_left("orders", b"another".ljust(16))
    assert shared.disk.list("/data/orders") == ["orders-0.stray-0"]
    store.delete_left("orders", TOPIC_ID)
    for _ in range(4):
        shared.advance(61)
    assert shared.disk.list("/data/orders") == []
    assert commit_files - set(shared.disk.list("/data/@commitlog"))


OTHER = TopicPartition("payments", 0)


def old_life(harness: Harness) -> tuple[Log, Log]:
    """A log with epochs 0 to 5, and another partition's."""
    harness.file_bytes = 1 << 20
    log, other = harness.log(durability="os"), harness.log(OTHER, durability="os")
    for n in range(6):
        append(log, batch(b"old%d" % n, producer=(7, 0, n)), epoch=n)
    assert not harness.write()
    return log, other


def go_on(harness: Harness, log: Log, other: Log) -> None:
    """What a leader wrote in an earlier epoch than the last of the old life; and another partition in the same turn."""
    append(log, batch(b"new"), epoch=3)
    append(other, batch(b"other"))
    assert not harness.write()


def check_new_life(harness: Harness) -> None:
    log = harness.kill()
    assert values(harness.log(OTHER)) == [b"other"]
    assert (log.start_offset, log.end_offset, values(log)) == (100, 101, [b"new"])
    assert list(log.epoch_starts()) == [(3, 100)]
    assert isinstance(log, SharedLog)
    log.producers.load()
    assert not log.producers.states


@proves("J6", "L5")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_log_created_again_may_begin_anew_in_an_earlier_epoch(shared: Harness, checkpointed: bool) -> None:
    _, other = old_life(shared)
    if checkpointed:
        shared.advance(61)
    store_of(shared).delete(TOPIC)
    del shared.expected[TOPIC]
    log = shared.log(durability="os")
    log.restart_at(100)
    go_on(shared, log, other)
    check_new_life(shared)


@proves("J6", "L5")
@pytest.mark.parametrize("rolls", [False, True])
def test_a_log_that_begins_anew_without_room_says_so_when_there_is_some(shared: Harness, rolls: bool) -> None:
    log, other = old_life(shared)
    shared.settle()
    shared.advance(61)
    commit_log = store_of(shared).commit_log
    sim_disk(shared).fail_write(commit_log.path(0), errno.ENOSPC)
    log.restart_at(100)
    if rolls:
        commit_log.file_bytes = commit_log.end
    go_on(shared, log, other)
    assert commit_log.number == int(rolls)
    check_new_life(shared)


@proves("J6", "L5")
def test_a_batch_that_cannot_be_true_is_damage_of_its_own_partition_alone(
    shared: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    log, other = old_life(shared)
    go_on(shared, log, other)
    append(log, batch(b"after"), epoch=6)
    assert not shared.write()
    log = shared.kill()
    assert values(shared.log(OTHER)) == [b"other"]
    assert "orders-0: offsets 6 to 6 are missing" in caplog.text
    assert "leader epoch falls from 5 to 3" in caplog.text
    assert log.end_offset == 8
    with pytest.raises(CorruptBatch):
        log.read(6, 1 << 20, 8)
    assert kernel.records(content(log.read(7, 1 << 20, 8)))[0].value == b"after"


def tombstone(key: bytes) -> memoryview:
    return memoryview(kernel.build([(1_750_000_000_000, key, None, [])]))


def test_compaction_leaves_the_last_run_so_that_the_end_can_be_read(shared: Harness) -> None:
    shared.file_bytes = 2000
    log = shared.log(
        cleanup_policy="compact",
        segment_bytes=1024,
        segment_ms=1000,
        min_cleanable_dirty_ratio=0.01,
        delete_retention_ms=0,
        file_delete_delay_ms=0,
    )
    for n in range(40):
        append(log, batch(b"v", key=b"k%d" % (n % 10)) if n < 30 else tombstone(b"k%d" % (n % 10)))
        assert not shared.write()
        shared.settle()
    other = shared.log(TopicPartition("other", 0))
    for _ in range(15):
        put(shared, other, b"x" * 200)
        shared.advance(2000)
        for _ in range(20):
            shared.clock.advance(0.02)
            shared.settle()
    left = list(log.headers(log.start_offset))
    assert len(left) < 10
    assert left[-1][0].next_offset == log.written_offset
    assert log.read(35, 1 << 20, log.written_offset).count


def test_a_key_index_comes_to_the_end_of_a_log_that_ends_in_nothing(shared: Harness) -> None:
    log = shared.log(cleanup_policy="compact", key_index="true")
    assert isinstance(log, SharedLog)
    for n in range(10):
        append(log, batch(b"v%d" % n, key=b"k%d" % n))
        shared.write()
    shared.settle()
    store = store_of(shared)
    store.replacer.replace(log, 5, 10, [])
    shared.settle()
    for nothing_left in (False, True):
        if nothing_left:
            store.replacer.replace(log, 0, 10, [])
            shared.settle()
        keys = KeyIndexes(store, shared.disk, shared.clock, shared.data)
        answers: list[object] = []
        keys.query(log.topic_partition, Wanted(b"k1"), log.written_offset, answers.append)
        for _ in range(500):
            if answers:
                break
            shared.clock.advance(0.01)
            shared.settle()
        assert isinstance(answers[0], KeyQueryResult)
        assert answers[0].records == (0 if nothing_left else 1)
