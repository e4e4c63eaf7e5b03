"""What runs out and comes back (room, descriptors, memory) makes a log refuse for a while, and never ends it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

import pytest

from headrace.errors import HeadraceError, StorageFailed, StorageFull
from headrace.records.batch import read_header
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.segment import NOT_READ
from headrace.virtual.disk import VirtualDisk
from storage.harness import Harness, append, batch, sim_harness, values

SHORT = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]


def stopped(sim: Harness, **overrides: object) -> tuple[VirtualDisk, PartitionedLog]:
    """A log with three batches, opened anew, no file of it open yet."""
    for sequence in range(3):
        append(sim.log(**overrides), batch(b"%d" % sequence, producer=(7, 0, sequence)))
    sim.write()
    log = sim.reopen()
    assert isinstance(log, PartitionedLog)
    assert isinstance(sim.disk, VirtualDisk)
    return sim.disk, log


@pytest.mark.parametrize("number", SHORT)
def test_an_append_that_cannot_open_its_segment_is_refused_and_the_next_one_taken(sim: Harness, number: int) -> None:
    disk, log = stopped(sim)
    disk.fail_open(log.active.path, number)
    with pytest.raises(StorageFailed, match="writing goes on"):
        append(log, batch(b"3"))
    sim.write()
    assert log.offline is None
    append(log, batch(b"3"))
    assert not sim.write()
    assert values(sim.kill()) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("number", SHORT)
def test_a_segment_that_cannot_be_begun_is_begun_later(sim: Harness, number: int) -> None:
    disk, log = stopped(sim, segment_bytes=1024)
    disk.fail_open(f"{log.folder}/{4:020d}.log", number)
    append(log, batch(b"3"))
    with pytest.raises(StorageFailed, match="writing goes on"):
        append(log, batch(b"x" * 900))
    assert [type(error) for _, error in sim.write()] in ([], [StorageFailed])
    assert log.offline is None
    append(log, batch(b"x" * 900))
    assert not sim.write()
    assert values(sim.kill())[-1] == b"x" * 900


@pytest.mark.parametrize("number", SHORT)
def test_a_sync_that_cannot_open_its_files_is_tried_again(sim: Harness, number: int) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log(durability="disk")
    assert isinstance(log, PartitionedLog)
    sim.settle()
    sim.disk.fail_open(log.folder, number)
    append(log, batch(b"0"))
    assert not sim.write()
    sim.clock.run_soon()
    assert (log.offline, log.durable_offset) == (None, 0)
    sim.advance(1)
    assert (log.offline, log.durable_offset) == (None, 1)
    assert values(sim.kill(seed=3)) == [b"0"]


def test_a_producer_whose_state_cannot_be_read_hears_it_and_may_try_again(sim: Harness) -> None:
    disk, log = stopped(sim)
    header = read_header(batch(producer=(7, 0, 3)))
    disk.fail_open(f"{log.folder}/{3:020d}.snapshot", errno.EMFILE)
    with pytest.raises(HeadraceError, match="snapshot: Too many open files"):
        log.producers.check(header)
    assert log.offline is None
    assert log.producers.check(header) is None


def test_a_search_by_time_that_cannot_read_says_so(sim: Harness) -> None:
    disk, log = stopped(sim)
    searches: list[Callable[[], object]] = [lambda: log.offset_for_time(5), log.greatest_timestamp]
    for search in searches:
        log.active.release()
        log.active.index.count = -1
        log.active.greatest_ms = NOT_READ
        disk.fail_open(log.active.index.path, errno.EMFILE)
        with pytest.raises(StorageFailed, match="Too many open files"):
            search()


def test_a_full_disk_is_said_when_it_begins_and_when_it_ends(sim: Harness, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log()
    append(log, batch())
    sim.write()
    for _ in range(2):
        caplog.clear()
        capacity = sim.disk.capacity_bytes
        sim.disk.capacity_bytes -= sim.disk.free_bytes("/") - 5
        for _ in range(10):
            append(log, batch())
            assert [type(error) for _, error in sim.write()] == [StorageFull]
        assert [record.message.count("no room to write") for record in caplog.records] == [1]
        sim.disk.capacity_bytes = capacity
        for _ in range(10):
            append(log, batch())
            assert not sim.write()
        assert [record.message for record in caplog.records][1:] == ["orders-0: can be written again"]


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_batch_for_which_those_before_it_cannot_be_written_leaves_nothing_of_its_buffer_behind(layout: str) -> None:
    """The error is kept for the rest of the turn; the receive buffer of the request must not be."""
    sim = sim_harness(layout)
    sim.file_bytes = 2048
    assert isinstance(sim.disk, VirtualDisk)
    log = sim.log(segment_bytes=1024)
    append(log, batch(b"first"))
    assert not sim.write()
    append(log, batch(b"x" * 900))
    sim.disk.capacity_bytes -= sim.disk.free_bytes("/") - 5
    received = bytearray(batch(b"y" * 1200))
    with suppress(StorageFull):
        log.append(memoryview(received), read_header(received), 0)
        pytest.fail("it was taken")
    received.clear()


def test_epochs_that_cannot_be_opened_refuse_a_batch_and_no_more(sim: Harness) -> None:
    """They are read at the first batch after a start."""
    append(sim.log(), batch(b"first"))
    assert not sim.write()
    log = sim.reopen()
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.trouble = lambda _call, path: errno.EMFILE if path.endswith("leader-epochs") else 0
    with pytest.raises(HeadraceError, match="Too many open files"):
        append(log, batch(b"refused"))
    sim.disk.trouble = None
    sim.write()
    assert append(log, batch(b"second")) == 1
    assert not sim.write()
    assert values(log) == [b"first", b"second"]
