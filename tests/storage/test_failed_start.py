"""A start that fails, or gives up, claims nothing of the folder: the next one finds what the run before had left."""

from __future__ import annotations

import errno

import pytest

from headrace.ports.disk import read_whole
from headrace.storage import checkpoint as points
from headrace.storage import folder
from headrace.storage.commitlog import checkpoint as shared_points
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log, Phase, TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, sim_harness, values

LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
RECORDS = [b"%d" % n for n in range(20)]
DELETED = 7


def filled(layout: str) -> Harness:
    """Synced records, the first of them deleted."""
    harness = sim_harness(layout)
    log = harness.log(durability="disk")
    for value in RECORDS:
        append(log, batch(value))
        harness.write()
    harness.settle()
    log.delete_before(DELETED)
    harness.settle()
    assert log.durable_offset == len(RECORDS)
    return harness


def stop(harness: Harness, *, clean: bool) -> VirtualDisk:
    assert harness.store is not None
    if clean:
        assert harness.store.close()
    else:
        harness.store.abandon()
    assert isinstance(harness.disk, VirtualDisk)
    harness.disk.release()
    return harness.disk


def fail_to_open(harness: Harness) -> None:
    with pytest.raises(OSError, match="/data/orders"):
        harness.open()
    harness.settle()  # nothing that the opening has asked for is done afterwards
    assert harness.store is not None
    assert harness.store.phase is Phase.CLOSED
    assert not harness.store.close()
    assert isinstance(harness.disk, VirtualDisk)
    harness.disk.release()


def has_all(log: Log) -> bool:
    return (log.start_offset, log.end_offset, values(log)) == (DELETED, len(RECORDS), RECORDS[DELETED:])


@proves("F7")
@LAYOUTS
@pytest.mark.parametrize("clean", [True, False], ids=["after a stop", "after a kill"])
@pytest.mark.parametrize("ending", [".log", ".queue", "partition", "leader-epochs"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ENOSPC])
def test_a_start_that_cannot_open_one_file_costs_no_record_and_brings_none_back(
    layout: str, clean: bool, ending: str, number: int
) -> None:
    harness = filled(layout)
    disk = stop(harness, clean=clean)
    inside = f"{harness.data}/orders/orders-0"
    found = [name for name in disk.list(inside) if name.endswith(ending)]
    if not found:
        pytest.skip("the layout has no such file")
    before = read_whole(disk, f"{harness.data}/{points.FILE_NAME}")
    disk.fail_open(f"{inside}/{found[0]}", number)
    unread = clean and layout == PARTITIONED and ending != "partition"
    if unread or (ending, number) == (".queue", errno.EIO):
        harness.open()  # it is not read after a clean stop, or is built anew
        disk.mend()
        assert has_all(harness.log())
        return
    fail_to_open(harness)
    assert read_whole(disk, f"{harness.data}/{points.FILE_NAME}") == before
    disk.mend()
    harness.open()
    assert has_all(harness.log())


@LAYOUTS
def test_a_checkpoint_wished_for_by_an_opening_that_fails_is_not_written(layout: str) -> None:
    """One log is open and asks for a checkpoint, the other cannot be opened."""
    harness = filled(layout)
    disk = stop(harness, clean=False)

    def refuse() -> None:
        assert harness.store is not None
        opened = harness.store.get(TOPIC)
        assert opened is not None
        opened.restart_at(1000)
        raise OSError(errno.ENOSPC, "No space left on device", "/data/orders")

    before = read_whole(disk, f"{harness.data}/{points.FILE_NAME}")
    harness.store = harness.new_store()
    with pytest.raises(OSError, match="No space"):
        harness.store.open(harness.expected, refuse)
    harness.settle()
    assert read_whole(disk, f"{harness.data}/{points.FILE_NAME}") == before


@LAYOUTS
def test_whoever_judges_the_logs_finds_them_open_and_the_checkpoint_as_it_was(layout: str) -> None:
    harness = filled(layout)
    disk = stop(harness, clean=True)
    store = harness.store = harness.new_store()
    path = f"{harness.data}/{points.FILE_NAME}"
    before = read_whole(disk, path)
    seen: list[tuple[bytes, bool]] = []

    def judge() -> None:
        opened = store.get(TOPIC)
        assert opened is not None
        seen.append((read_whole(disk, path), has_all(opened)))

    store.open(harness.expected, judge)
    assert seen == [(before, True)]
    assert read_whole(disk, path) != before


@LAYOUTS
def test_a_store_that_was_only_locked_writes_nothing(layout: str) -> None:
    harness = filled(layout)
    stop(harness, clean=True)
    locked = harness.new_store()
    assert locked.phase is Phase.LOCKED
    assert not locked.close()
    harness.open()
    assert has_all(harness.log())


@proves("F7")
@LAYOUTS
@pytest.mark.parametrize("clean", [True, False])
def test_a_log_that_the_checkpoint_has_forgotten_is_read_in_full(layout: str, clean: bool) -> None:
    harness = sim_harness(layout)
    first = harness.log()
    append(first, batch(b"of another log"))
    harness.write()
    harness.settle()
    log = harness.log(TopicPartition("late", 3))  # its folder says where it begins in the commit log
    for value in RECORDS:
        append(log, batch(value))
        harness.write()
    harness.settle()
    disk = stop(harness, clean=clean)
    path = f"{harness.data}/{points.FILE_NAME}"
    if layout == SHARED:
        found = shared_points.read(disk, harness.data)
        assert found is not None
        content = shared_points.encode(found.clean, found.position, ())
    else:
        content = points.encode(())
    file = disk.open(path, writable=True)
    file.truncate(0)
    file.pwritev([content], 0)
    harness.open()
    assert values(harness.log()) == [b"of another log"]
    assert values(harness.log(TopicPartition("late", 3))) == RECORDS


def test_a_log_made_after_the_checkpoint_is_read_from_where_it_begins() -> None:
    harness = sim_harness(SHARED)
    log = harness.log(durability="disk")
    append(log, batch(b"before"))
    harness.write()
    harness.settle()
    where = TopicPartition("late", 0)
    late = harness.log(where, durability="disk")
    append(late, batch(b"after"))
    harness.write()
    harness.settle()
    disk = stop(harness, clean=False)
    begins = folder.begins_at(disk, f"{harness.data}/late/late-0")
    assert 0 < begins < disk.size(f"{harness.data}/@commitlog/{0:020d}.log")
    harness.open()
    assert (values(harness.log()), values(harness.log(where))) == ([b"before"], [b"after"])


@LAYOUTS
def test_a_stop_that_could_not_write_its_checkpoint_does_not_call_itself_clean(layout: str) -> None:
    harness = filled(layout)
    assert harness.store is not None
    assert isinstance(harness.disk, VirtualDisk)
    harness.disk.fail_write(f"{harness.data}/{points.FILE_NAME}.tmp", errno.ENOSPC)
    assert not harness.store.close()
    harness.disk.release()
    harness.open()
    assert has_all(harness.log())
