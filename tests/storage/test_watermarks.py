"""The file of high watermarks: what it gives back after stops, crashes and damage."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from headrace.ports.disk import read_whole
from headrace.storage.watermarks import FILE_NAME, Watermark, Watermarks, decode, encode
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

ORDERS, PAYMENTS = bytes(range(16)), bytes(16)
PATH = f"/data/{FILE_NAME}"


class Broker:
    """A data folder, and what its partitions have come to."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.disk = VirtualDisk(self.clock)
        self.disk.make_folder("/data")
        self.disk.sync_folder("/")
        self.now: list[Watermark] = []
        self.file = self.open()

    def open(self) -> Watermarks:
        self.file = Watermarks(self.disk, self.clock, "/data", lambda: self.now, interval_ms=5000)
        self.file.open()
        return self.file

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.file.tick()
        self.clock.run_soon()


def test_a_clean_stop_keeps_every_watermark() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 17), (ORDERS, 1, 0), (PAYMENTS, 0, 1 << 40)]
    broker.file.close()
    broker.disk.crash(1)
    assert broker.open().read() == {(ORDERS, 0): 17, (ORDERS, 1): 0, (PAYMENTS, 0): 1 << 40}


def test_a_start_that_gets_no_further_leaves_the_file_as_it_is() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 17)]
    broker.file.close()
    failed = Watermarks(broker.disk, broker.clock, "/data", list, interval_ms=5000)
    broker.clock.advance(5)
    failed.tick()
    broker.clock.run_soon()
    failed.close()
    assert broker.open().read() == {(ORDERS, 0): 17}


def test_a_topic_made_anew_under_the_same_name_inherits_nothing() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 17)]
    broker.file.close()
    assert (PAYMENTS, 0) not in broker.open().read()


def test_they_are_written_every_few_seconds_if_one_has_moved() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 5)]
    broker.advance(4.9)
    assert not broker.disk.exists(PATH)
    broker.advance(0.1)
    assert broker.open().read() == {(ORDERS, 0): 5}
    broker.advance(5)
    syncs = broker.disk.syncs
    broker.advance(5)
    assert broker.disk.syncs == syncs, "nothing has moved"
    broker.now = [(ORDERS, 0, 6)]
    broker.advance(5)
    assert broker.disk.syncs == syncs + 1


@pytest.mark.parametrize("seed", range(40))
def test_a_loss_of_power_leaves_one_that_was_true(seed: int) -> None:
    broker = Broker()
    for offset in range(1, seed % 5 + 2):
        broker.now = [(ORDERS, 0, offset), (PAYMENTS, 3, 2 * offset)]
        broker.advance(5)
    broker.now = [(ORDERS, 0, 9), (PAYMENTS, 3, 18)]
    broker.clock.advance(5)
    broker.file.tick()
    broker.disk.crash(seed)
    found = broker.open().read()
    if found:
        offset = found[ORDERS, 0]
        assert found == {(ORDERS, 0): offset, (PAYMENTS, 3): 2 * offset}


def test_a_damaged_file_says_nothing() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 17)]
    broker.file.close()
    for position in range(len(read_whole(broker.disk, PATH))):
        broker.disk.flip(PATH, position)
        assert broker.open().read() in ({}, {(ORDERS, 0): 17}), position
        broker.disk.flip(PATH, position)
    assert broker.open().read() == {(ORDERS, 0): 17}


@pytest.mark.parametrize(
    "body", [b"", b"00000000\n", b"zz\n{}\n", encode([])[:-3], encode([(ORDERS, 0, 1)]).replace(b"1", b"2")]
)
def test_what_was_never_written_by_a_broker_says_nothing(body: bytes) -> None:
    assert decode(body) is None


def test_a_full_disk_leaves_the_old_ones_and_it_is_tried_again() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 1)]
    broker.advance(5)
    broker.now = [(ORDERS, 0, 2)]
    broker.disk.fail_write(PATH + ".tmp", errno.ENOSPC)
    broker.advance(5)
    assert broker.open().read() == {(ORDERS, 0): 1}
    broker.advance(5)
    assert broker.open().read() == {(ORDERS, 0): 2}


def test_a_sync_that_comes_back_after_the_stop_changes_nothing() -> None:
    broker = Broker()
    broker.now = [(ORDERS, 0, 1)]
    broker.disk.hold_syncs()
    broker.advance(5)
    broker.now = [(ORDERS, 0, 2)]
    broker.file.close()
    broker.disk.release_syncs()
    broker.clock.run_soon()
    assert broker.open().read() == {(ORDERS, 0): 2}


def test_two_thousand_partitions_take_a_small_file(tmp_path: Path) -> None:
    content = encode([(ORDERS, partition, partition << 20) for partition in range(2000)])
    assert len(content) < 2000 * 64
    assert len(decode(content) or {}) == 2000
