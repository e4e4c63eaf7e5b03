"""Random histories of a follower's log: copied batches with gaps, truncations, new beginnings, stops, losses of power.

After each the log holds the leader's batches byte for byte.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from headrace.errors import CorruptBatch
from headrace.ports.disk import read_whole
from headrace.records.batch import read_header
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.offline import verify
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.folders import contents
from storage.harness import content, read_all, sim_harness
from storage.log_contract import placed

STEPS = 60
SEEDS = 8


class Follower:
    def __init__(self, layout: str, chance: random.Random) -> None:
        self.chance = chance
        self.harness = sim_harness(layout)
        self.log: Log = self.harness.log(
            durability=chance.choice(("disk", "os")), segment_bytes=1024, index_interval_bytes=chance.choice((1, 150))
        )
        self.now: list[bytes] = []
        self.before: list[list[bytes]] = []
        """What the log held before each truncation that may not be synced."""
        self.count = self.epoch = 0

    def copy(self) -> None:
        end, data = self.log.end_offset, b""
        for _ in range(self.chance.randrange(1, 6)):
            self.count += 1
            end += self.chance.choice((0, 0, 1, 9))
            view = placed(end, b"%d" % self.count + b"." * self.chance.randrange(90), b"", epoch=self.epoch)
            self.now.append(bytes(view))
            data += view
            end += 2
        assert self.log.append_copied(memoryview(data)) == end
        assert not self.harness.write()

    def settle(self) -> None:
        self.harness.settle()
        self.before.clear()

    def pass_time(self) -> None:
        self.harness.advance(self.chance.choice((0.1, 61)))
        self.before.clear()

    def truncate(self) -> None:
        offset = self.chance.randrange(self.log.start_offset, self.log.end_offset + 1)
        self.before.append(self.now)
        self.log.truncate(offset)
        self.now = [view for view in self.now if read_header(view).next_offset <= offset]
        self.epoch += 1

    def begin_anew(self) -> None:
        self.before.append(self.now)
        self.log.restart_at(self.chance.choice((0, self.log.end_offset, self.log.end_offset + 100)))
        self.now = []
        self.epoch = self.chance.choice((0, self.epoch + 1))

    def stop(self) -> None:
        self.log = self.harness.reopen()
        self.before.clear()
        problems = [str(p) for report in verify.reports(self.harness.disk, "/data") for p in report.problems]
        assert problems == [], problems

    def kill(self) -> None:
        self.log = self.harness.kill()

    def lose_power(self) -> None:
        durable = self.log.durable_offset
        self.log = self.harness.kill(seed=self.chance.randrange(1 << 30))
        found = [view for _, view in contents(self.log)]
        assert found in [each[: len(found)] for each in (self.now, *self.before)]
        safe = [view for view in self.now if read_header(view).next_offset <= durable]
        assert self.before or found[: len(safe)] == safe
        if isinstance(self.log, PartitionedLog):
            assert not any(segment.damage for segment in self.log.segments)
        self.now = found
        self.before.clear()
        self.epoch = max(self.epoch, self.log.last_epoch()) + 1

    def compare(self) -> None:
        assert [view for _, view in contents(self.log)] == self.now
        assert self.log.offline is None
        if self.now:
            offset = self.chance.randrange(self.log.start_offset, read_header(self.now[-1]).next_offset)
            due = next(view for view in self.now if read_header(view).last_offset >= offset)
            found = content(self.log.read(offset, self.chance.choice((1, 5000)), self.log.end_offset))
            assert found[: len(due)] == due
            self.compare_epochs()

    def compare_epochs(self) -> None:
        """Nobody has told where they began: at the first batch that is left, or in the gap before it."""
        starts = dict(self.log.epoch_starts())
        assert list(starts.items()) == sorted(starts.items(), key=lambda entry: entry[::-1])
        end = last = -1
        for header in map(read_header, self.now):
            if header.leader_epoch != last:
                last = header.leader_epoch
                assert end <= starts[last] <= header.base_offset
            end = header.next_offset
            assert max(epoch for epoch, start in starts.items() if start <= header.base_offset) == last


@proves("F7", "F13", "J6")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("number", range(SEEDS))
def test_a_follower_holds_the_leaders_batches_byte_for_byte(layout: str, number: int, seed: int) -> None:
    follower = Follower(layout, random.Random(seed))
    steps = [follower.copy] * 6 + [follower.settle] * 3 + [follower.pass_time] * 2 + [follower.truncate] * 2
    steps += [follower.begin_anew, follower.stop, follower.kill, follower.lose_power]
    for _ in range(STEPS):
        follower.chance.choice(steps)()
        follower.compare()
    follower.stop()
    follower.compare()


@proves("J1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("how", ["kill", "stop", "index"])
@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_a_wrong_bit_in_an_offset_behind_a_gap_keeps_no_store_from_opening(
    layout: str, how: str, byte: int, nth: int
) -> None:
    """A CRC does not cover it, and where offsets have gaps, any higher one could follow."""
    harness = sim_harness(layout)
    log = harness.log(durability="disk")
    offsets = (10, 15, 20, 29)
    log.append_copied(memoryview(b"".join(placed(offset, b"%d" % offset, b"", epoch=0) for offset in offsets)))
    assert not harness.write()
    harness.advance(1)
    assert harness.store is not None
    if how == "kill":
        harness.store.abandon()
    else:
        harness.store.close()
    folder, disk = "/data/@commitlog" if layout == SHARED else "/data/orders/orders-0", harness.disk
    assert isinstance(disk, VirtualDisk)
    for name in disk.list(folder):
        if name.endswith(".log") and (at := read_whole(disk, f"{folder}/{name}").find(placed_at(offsets[nth]))) >= 0:
            disk.flip(f"{folder}/{name}", at + byte)
    if how == "index":
        for name in [name for name in disk.list("/data/orders/orders-0") if name.endswith(("index", ".queue"))]:
            disk.remove(f"/data/orders/orders-0/{name}")
    harness.open()
    log = harness.log()
    assert log.end_offset <= 31
    with suppress(CorruptBatch):
        assert [header.base_offset for header, _ in read_all(log)] == list(offsets[:nth])


def placed_at(offset: int) -> bytes:
    """How a batch of that offset begins."""
    return bytes(placed(offset, b"%d" % offset, b"", epoch=0))[:12]


@proves("J1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_copied_batch_that_is_damaged_is_refused_with_all_that_came_with_it(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    data = bytearray().join((placed(0, b"whole", b""), placed(2, b"damaged", b"")))
    data[-1] ^= 0x01
    with pytest.raises(CorruptBatch, match="what was copied behind offset 1"):
        log.append_copied(memoryview(data))
    assert log.end_offset == 0
    data[-1] ^= 0x01
    assert log.append_copied(memoryview(data)) == 4
