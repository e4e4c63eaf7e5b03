"""A log that is truncated while it is compacted keeps what is below the cut."""

from __future__ import annotations

import itertools

import pytest

from headrace.storage.cleaner import Steps
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.segments import compaction
from headrace.storage.segments.log import PartitionedLog
from storage.harness import Harness, append, batch, sim_harness, values

KEYS = 10


def begin(layout: str) -> tuple[Harness, Steps]:
    """A log with each key four times, and its compaction."""
    harness = sim_harness(layout)
    harness.file_bytes = 1 << 20
    log = harness.log(cleanup_policy="compact", segment_bytes=1024, index_interval_bytes=100)
    for n in range(4 * KEYS):
        append(log, batch(b"%d" % n + b"x" * 60, key=b"k%d" % (n % KEYS)), epoch=1)
        assert not harness.write()
        harness.settle()
    if isinstance(log, SharedLog):
        assert isinstance(harness.store, SharedStore)
        return harness, harness.store._compact(log)
    assert isinstance(log, PartitionedLog)
    return harness, compaction.steps(log, harness.disk, harness.clock.wall_ms())


def go(harness: Harness, steps: Steps, most: int) -> bool:
    """Some steps; whether that was all."""
    for _ in range(most):
        ready = next(steps, False)
        if ready is False:
            return True
        while callable(ready) and not ready():
            harness.settle()
    return False


def lose_queues(harness: Harness) -> None:
    for name in harness.disk.list("/data/orders/orders-0"):
        if name.endswith(".queue"):
            harness.disk.remove(f"/data/orders/orders-0/{name}")


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.thorough
def test_each_key_below_the_cut_stays_wherever_the_compaction_was(layout: str) -> None:
    wanted = [b"%d" % n + b"x" * 60 for n in range(KEYS)]
    for pause in range(200):
        harness, steps = begin(layout)
        if go(harness, steps, pause):
            assert pause > 30
            return
        log = harness.log()
        if values(log)[:KEYS] != wanted:
            return  # the new runs are in place: what follows is a truncation after a compaction
        log.truncate(KEYS)
        assert go(harness, steps, 1000)
        harness.settle()
        assert values(log) == wanted, pause
        if layout == SHARED:
            assert isinstance(harness.store, SharedStore)
            harness.store.abandon()
            lose_queues(harness)
            harness.open()
            assert values(harness.log()) == wanted, pause


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_cut_among_segments_that_compaction_left_empty(layout: str, restarts: bool) -> None:
    for last, first in itertools.product(range(2 * KEYS, 4 * KEYS + 1, 5), range(1, 4 * KEYS, 2)):
        harness, steps = begin(layout)
        log = harness.log()
        assert go(harness, steps, 1000)
        harness.settle()
        kept = [value for value in values(log) if value and int(value.partition(b"x")[0]) < min(first, last)]
        log.truncate(last)  # the segment that is written to is empty, and so are those before it
        log.truncate(first)
        assert log.end_offset <= min(first, last)
        for n in range(KEYS):
            append(log, batch(b"new%d" % n, key=b"n%d" % n), epoch=2)
            assert not harness.write()
        harness.settle()
        wanted = [*kept, *(b"new%d" % n for n in range(KEYS))]
        assert values(log) == wanted, (last, first)
        if restarts:
            assert harness.store is not None
            harness.store.abandon()
            harness.open()
            assert values(harness.log()) == wanted, (last, first)


def test_what_was_appended_after_the_cut_is_not_replaced_by_what_was_before_it() -> None:
    for pause in range(20, 200):
        harness, steps = begin(SHARED)
        if go(harness, steps, pause) or len(values(harness.log())) < 4 * KEYS:
            return
        log = harness.log()
        log.truncate(KEYS)
        for n in range(4 * KEYS):
            append(log, batch(b"new%d" % n, key=b"n%d" % n), epoch=2)
        assert not harness.write()
        before = values(log)
        assert go(harness, steps, 1000)
        harness.settle()
        assert values(log) == before, pause
        assert isinstance(harness.store, SharedStore)
        harness.store.abandon()
        lose_queues(harness)
        harness.open()
        assert values(harness.log()) == before, pause
