"""What a failed sync left in the page cache alone is written again by the next start, before it counts as durable."""

from __future__ import annotations

import pytest

from headrace.errors import StorageFailed
from headrace.storage.log import TopicPartition
from headrace.storage.rewritten import MARKER
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, sim_harness, values

FOLDERS = {"partitioned": "/data/orders/orders-0", "shared": "/data/@commitlog"}


def with_failed_sync(layout: str) -> tuple[Harness, VirtualDisk]:
    """Two records, of which the second could not be synced."""
    harness = sim_harness(layout)
    assert isinstance(harness.disk, VirtualDisk)
    log = harness.log(durability="disk")
    for value in (b"first", b"second"):
        append(log, batch(value))
        harness.write()
        if value == b"second":
            harness.disk.fail_sync(f"{FOLDERS[layout]}/{0:020d}.log")
        harness.settle()
    assert isinstance(log.offline, StorageFailed)
    assert harness.disk.exists(f"{FOLDERS[layout]}/{MARKER}")
    return harness, harness.disk


@proves("L4")
@pytest.mark.parametrize("layout", FOLDERS)
@pytest.mark.parametrize("seed", range(5))
def test_what_was_read_from_the_page_cache_survives_a_later_loss_of_power(layout: str, seed: int) -> None:
    harness, disk = with_failed_sync(layout)
    log = harness.kill()
    assert values(log) == [b"first", b"second"]
    assert not disk.exists(f"{FOLDERS[layout]}/{MARKER}")
    append(log, batch(b"third"))
    harness.write()
    harness.settle()
    assert log.durable_offset == 3
    assert values(harness.kill(seed)) == [b"first", b"second", b"third"]


@pytest.mark.parametrize("layout", FOLDERS)
@pytest.mark.parametrize("seed", range(5))
def test_after_a_loss_of_power_what_was_synced_is_there(layout: str, seed: int) -> None:
    harness, _ = with_failed_sync(layout)
    log = harness.kill(seed)
    assert values(log) == [b"first"]
    append(log, batch(b"next"))
    harness.write()
    harness.settle()
    assert values(harness.kill(seed)) == [b"first", b"next"]


@proves("L4")
@pytest.mark.parametrize("layout", FOLDERS)
@pytest.mark.parametrize("seed", range(5))
def test_a_broker_killed_before_it_hears_that_its_sync_failed_takes_nothing_for_safe(layout: str, seed: int) -> None:
    harness = sim_harness(layout)
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    log = harness.log(durability="disk")
    append(log, batch(b"first"))
    harness.write()
    harness.settle()
    append(log, batch(b"second"))
    disk.fail_sync(f"{FOLDERS[layout]}/{0:020d}.log")
    disk.answer_no_sync()
    harness.write()
    harness.clock.advance(1.0)
    assert log.offline is None
    assert log.durable_offset == 1, "it is killed without having heard"
    assert harness.store is not None
    harness.store.abandon()
    disk.release()
    harness.open()
    log = harness.log()
    assert values(log) == [b"first", b"second"]
    append(log, batch(b"third"))
    harness.write()
    harness.settle()
    assert log.durable_offset == 3
    assert values(harness.kill(seed)) == [b"first", b"second", b"third"]


@proves("L4")
@pytest.mark.parametrize("layout", FOLDERS)
@pytest.mark.parametrize("seed", range(3))
def test_a_clean_stop_that_has_not_heard_of_a_failed_sync_is_none(layout: str, seed: int) -> None:
    """A sync under way fails, and those that the stop asks for say nothing of it."""
    harness = sim_harness(layout)
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    log = harness.log(durability="disk")
    append(log, batch(b"first"))
    disk.fail_sync(f"{FOLDERS[layout]}/{0:020d}.log")
    disk.answer_no_sync()
    harness.write()
    harness.clock.advance(1.0)
    assert harness.store is not None
    assert not harness.store.close()
    assert isinstance(log.offline, StorageFailed)
    harness.open()
    log = harness.log()
    assert not harness.store.was_clean
    assert not disk.exists(f"{FOLDERS[layout]}/{MARKER}")
    assert values(log) == [b"first"]
    assert values(harness.kill(seed)) == [b"first"]


@pytest.mark.parametrize("layout", FOLDERS)
@pytest.mark.parametrize("clean", [True, False])
def test_no_start_leaves_a_mark_behind(layout: str, clean: bool) -> None:
    harness = sim_harness(layout)
    append(harness.log(), batch(b"first"))
    harness.log(TopicPartition("empty", 0))
    harness.write()
    harness.settle()
    folders = ["/data", "/data/orders", "/data/orders/orders-0", "/data/empty/empty-0"]
    folders += ["/data/@commitlog"] if layout == "shared" else []
    for folder in folders:
        harness.disk.open(f"{folder}/{MARKER}", create=True, writable=True).close()
    log = harness.reopen() if clean else harness.kill()
    assert values(log) == [b"first"]
    assert [folder for folder in folders if harness.disk.exists(f"{folder}/{MARKER}")] == []
