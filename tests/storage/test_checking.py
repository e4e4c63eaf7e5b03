"""Old data is checked before it is served: once, so much in a turn, and only when it is in the page cache."""

from __future__ import annotations

import re

import pytest

from headrace.errors import CorruptBatch
from headrace.records.batch import batches
from headrace.storage import checked_bytes
from headrace.storage.checked_bytes import CheckBudget, CheckedBytes
from headrace.storage.log import Log, ReadResult, TopicPartition
from headrace.storage.page_cache import are_warm
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, content, read_all

BATCHES = 100
TURN = 30
OTHER = TopicPartition("orders", 1)


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_bytes, "TURN_BATCHES", TURN)


def old(harness: Harness, **overrides: object) -> Log:
    """A log that this process did not write."""
    for where in (TOPIC, OTHER):
        log = harness.log(where, **overrides)
        for n in range(BATCHES):
            append(log, batch(b"%03d" % n), epoch=n // 40)
            harness.write()
    return harness.reopen()


def read(log: Log, offset: int = 0, *, warm: bool = False) -> ReadResult:
    return log.read(offset, 1 << 20, log.written_offset, warm=warm)


def offsets(found: ReadResult) -> list[int]:
    return [header.base_offset for header, _ in batches(memoryview(content(found)))]


@proves("J6", "G4")
@pytest.mark.parametrize("segment_bytes", [1 << 20, 2048], ids=["one segment", "many"])
def test_all_logs_together_check_so_much_in_a_turn(harness: Harness, segment_bytes: int) -> None:
    log = old(harness, segment_bytes=segment_bytes)
    other = harness.log(OTHER)
    assert offsets(read(log)) == list(range(TURN))
    assert offsets(read(other)) == [0], "who comes when the turn is spent still gets on"
    assert offsets(read(log)) == list(range(TURN))
    for turn in range(2, 5):
        harness.settle()
        found = read(log)
        assert offsets(found) == list(range(min(BATCHES, turn * TURN)))
        assert (found.unchecked is None) == (turn * TURN >= BATCHES)
    assert len(read_all(other)) == BATCHES


def test_what_was_checked_is_not_checked_again(sim: Harness) -> None:
    log = old(sim)
    while read(log).unchecked is not None:
        sim.settle()
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.flip(f"{sim.data}/orders/orders-0/{0:020d}.log", log.size_bytes // 2)
    assert read(log).count == log.size_bytes


@proves("J6")
def test_damage_that_a_later_turn_finds_is_not_served(sim: Harness) -> None:
    log = old(sim)
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.flip(f"{sim.data}/orders/orders-0/{0:020d}.log", log.size_bytes // BATCHES * 70 + 65)
    for _ in range(10):
        found = read(log)
        sim.settle()
    assert (offsets(found), found.unchecked) == (list(range(70)), None)
    with pytest.raises(CorruptBatch, match="CRC"):
        read(log, 70)
    sim.settle()
    assert offsets(read(log, 71))[0] == 71


@proves("J6")
@pytest.mark.parametrize(("byte", "mask"), [(23, 0x80), (26, 0x01)], ids=["negative", "smaller"])
@pytest.mark.parametrize("segment_bytes", [1 << 20, 1024], ids=["the log's last", "a segment's last"])
def test_a_batch_that_claims_fewer_offsets_than_it_has_is_no_gap(
    sim: Harness, byte: int, mask: int, segment_bytes: int
) -> None:
    log = sim.log(segment_bytes=segment_bytes)
    for _ in range(24):
        append(log, batch(b"one", b"two"))
        sim.write()
    log = sim.reopen()
    assert isinstance(log, PartitionedLog)
    segment = log.segments[0]
    last = next(at for at, header in segment.headers(0, 0) if header.next_offset == segment.next_offset)
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.flip(segment.path, last + byte, mask)
    for offset in (segment.next_offset - 2, segment.next_offset - 1):
        with pytest.raises(CorruptBatch, match=re.escape(segment.path)):
            read(log, offset)


@proves("G4")
def test_bytes_outside_the_page_cache_are_read_ahead_before_they_are_checked(sim: Harness) -> None:
    log = old(sim)
    path = f"{sim.data}/orders/orders-0/{0:020d}.log"
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.evict(path)
    found = read(log)
    assert (found.slices, found.count) == ((), 0)
    assert found.unchecked is not None
    assert (found.unchecked.position, found.unchecked.count) == (0, log.size_bytes)
    assert offsets(read(log, warm=True)) == list(range(TURN)), "whoever has read ahead does not ask for ever"
    calls: list[bool] = []
    assert not are_warm(sim.disk, [found.unchecked], lambda: calls.append(True))
    assert calls == []
    sim.settle()
    assert calls == [True]
    assert are_warm(sim.disk, [found.unchecked], lambda: calls.append(False))
    assert offsets(read(log)) == list(range(2 * TURN))


def test_ranges_grow_together_and_know_which_offset_is_due(sim: Harness) -> None:
    ranges = CheckedBytes()
    ranges.own_from = 1000
    ranges.add(0, 100, 5)
    ranges.add(200, 300, 15)
    assert (ranges.reached(50), ranges.reached(100), ranges.reached(250)) == ((100, 5), None, (300, 15))
    assert not ranges.covers(0, 250)
    ranges.add(100, 200, 10)
    assert ranges.reached(0) == (300, 15)
    assert ranges.covers(20, 300)
    assert not ranges.covers(20, 301)
    assert ranges.covers(1000, 2000)


def test_a_budget_is_renewed_by_the_next_turn(sim: Harness) -> None:
    budget = CheckBudget(sim.clock)
    budget.spend(1, TURN)
    assert budget.spent
    sim.clock.run_soon()
    assert not budget.spent
    budget.spend(checked_bytes.TURN_BYTES, 1)
    assert budget.spent
    sim.clock.run_soon()
    assert not budget.spent
