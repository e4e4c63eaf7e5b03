"""A topic that is deleted and made again under its name has nothing to do with the one before."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress

import pytest

from headrace.errors import HeadraceError, UnknownPartition
from headrace.settings.values import LogSettings
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, settings, sim_harness, values

NEW_ID = b"\x07" * 16
QUICK: dict[str, object] = {"segment_ms": 5000, "flush_ms": 300, "file_delete_delay_ms": 1000}


def fill(harness: Harness, log: Log, count: int) -> list[bytes]:
    written = [b"%d" % i for i in range(count)]
    for value in written:
        append(log, batch(value, key=value))
        assert not harness.write()
    return written


def delete_and_create(harness: Harness, chosen: LogSettings) -> PartitionedLog:
    assert harness.store is not None
    harness.store.delete(TOPIC)
    harness.expected[TOPIC] = (NEW_ID, chosen)
    created = harness.store.create(TOPIC, NEW_ID, chosen)
    assert isinstance(created, PartitionedLog)
    return created


@proves("J6", "G8")
@pytest.mark.parametrize("durability", ["os", "disk", "memory"])
@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_a_deleted_log_never_touches_the_files_of_its_successor(
    harness: Harness, durability: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = QUICK | {"durability": durability, "cleanup_policy": policy, "min_cleanable_dirty_ratio": 0}
    old = harness.log(TOPIC, **chosen)
    fill(harness, old, 50)
    harness.clock.advance(2)
    new = delete_and_create(harness, settings(**chosen))
    right = fill(harness, new, 120)
    for _ in range(12):
        harness.advance(0.5)
    for change in (lambda: old.delete_before(40), lambda: old.truncate(3), lambda: old.read(0, 100, 50)):
        with pytest.raises(HeadraceError):
            change()
    assert values(new) == right
    log = harness.kill()
    assert (log.topic_id, log.end_offset) == (NEW_ID, 120)
    assert values(log) == right
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_topic_deleted_while_its_sync_runs_is_not_heard_of_again(
    sim: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    old = sim.log(TOPIC, durability="disk")
    sim.disk.hold_syncs()  # type: ignore[attr-defined]
    fill(sim, old, 3)
    delete_and_create(sim, settings())
    sim.disk.fail_sync(f"{sim.data}/orders/orders-0/{0:020d}.log")  # type: ignore[attr-defined]
    sim.disk.release_syncs()  # type: ignore[attr-defined]
    sim.settle()
    assert sim.events == []
    assert isinstance(old.offline, UnknownPartition)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("start_offset", [0, 60])
def test_an_empty_segment_that_begins_inside_the_log_does_not_win(
    harness: Harness, synced: bool, start_offset: int
) -> None:
    log = harness.log(TOPIC, durability="disk" if synced else "memory")
    right = fill(harness, log, 120)
    harness.settle()
    log.delete_before(start_offset)
    harness.advance(61 if synced else 0)
    assert isinstance(log, PartitionedLog)
    harness.disk.open(f"{log.folder}/{50:020d}.log", create=True, writable=True).close()
    log = harness.kill()
    assert (log.start_offset, log.end_offset) == (start_offset, 120)
    assert values(log) == right[start_offset:]
    assert append(log, batch()) == 120


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_log_that_could_not_be_created_is_created_in_the_same_folder(layout: str) -> None:
    """Whichever call fails, and however often: nothing is set aside."""
    for nth in range(1, 40):
        harness = sim_harness(layout)
        harness.open()
        disk, left = harness.disk, 0
        assert isinstance(disk, VirtualDisk)

        def trouble(call: str, path: str) -> int:
            nonlocal left
            left -= 1
            return errno.EIO if left == 0 else 0

        disk.trouble = trouble
        failed = 0
        for _ in range(3):
            left = nth
            try:
                harness.log()
            except OSError:
                failed += 1
        disk.trouble = None
        fill(harness, harness.log(), 3)
        assert [name for name in disk.list("/data/orders") if ".stray-" in name] == []
        assert values(harness.kill()) == [b"0", b"1", b"2"]
        if not failed:
            return
    raise AssertionError("every call of a creation fails it")


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("removable", [True, False])
def test_a_log_that_could_not_be_created_leaves_no_folder(layout: str, removable: bool) -> None:
    """It goes at once, whichever call fails, or if that fails too when nobody wants the log any more."""
    for nth in range(1, 40):
        harness = sim_harness(layout)
        harness.open()
        disk, store, left = harness.disk, harness.store, nth
        assert isinstance(disk, VirtualDisk)
        assert store is not None

        def trouble(call: str, path: str) -> int:
            nonlocal left
            left -= 1
            sick = left == 0 or (call == "remove folder" and not removable)
            return errno.ENOSPC if sick else 0

        disk.trouble = trouble
        try:
            harness.log()
        except OSError:
            if not removable:
                with suppress(OSError):
                    store.delete(TOPIC)
                disk.trouble = None
                store.delete(TOPIC)
            assert not disk.exists("/data/orders/orders-0")
            assert store.get(TOPIC) is None
        if left > 0:
            return
    raise AssertionError("every call of a creation fails it")


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_log_that_could_not_be_deleted_is_there_as_before(layout: str) -> None:
    harness = sim_harness(layout)
    log, disk, store = harness.log(), harness.disk, harness.store
    assert isinstance(disk, VirtualDisk)
    assert store is not None
    written = fill(harness, log, 3)
    disk.trouble = lambda call, path: errno.ENOSPC if call == "rename" else 0
    for let_go in (store.delete, store.set_aside):
        with pytest.raises(OSError, match="No space left"):
            let_go(TOPIC)
        assert store.get(TOPIC) is log
        assert log.offline is None
    disk.trouble = None
    assert values(log) == written
    assert append(log, batch(b"3")) == 3
    assert not harness.write()
    store.delete(TOPIC)
    assert store.get(TOPIC) is None
    assert not disk.exists("/data/orders/orders-0")
