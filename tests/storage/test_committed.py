"""Nothing at or above the committed offset is compacted, deleted by retention or taken into the key index."""

from __future__ import annotations

import pytest

from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from proving import proves
from storage.harness import Harness, append, batch, read_all, sim_harness

KEYS, ROUNDS = 10, 9
COMPACTED = {"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0.0}
TOO_OLD = {"retention_ms": 1000}
SMALL = {"segment_bytes": 1024, "index_interval_bytes": 100}
BOTH = [PARTITIONED, SHARED]


def filled(layout: str, **overrides: object) -> tuple[Harness, Log]:
    """A log with each key several times, of which nobody says that any is committed."""
    harness = sim_harness(layout)
    harness.commits = False
    log = harness.log(**SMALL, **overrides)
    for n in range(KEYS * ROUNDS):
        append(log, batch(b"%d" % n + b"." * 50, key=b"k%d" % (n % KEYS), timestamp_ms=harness.clock.wall_ms()))
        assert not harness.write()
    harness.advance(5)
    return harness, log


def check(harness: Harness) -> None:
    """Let some retention checks and the compactions that they begin pass."""
    assert harness.store is not None
    for _ in range(4):
        harness.advance(1.1)
        for _ in range(300):
            if not harness.store.compacting:
                break
            harness.clock.advance(0.05)
            harness.settle()


def offsets(log: Log) -> list[int]:
    return [record.offset for _, view in read_all(log) for record in kernel.records(view)]


@proves("F13")
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("overrides", [COMPACTED, TOO_OLD], ids=["compact", "delete"])
def test_while_nobody_says_what_is_committed_everything_stays(layout: str, overrides: dict[str, object]) -> None:
    harness, log = filled(layout, **overrides)
    check(harness)
    assert offsets(log) == list(range(KEYS * ROUNDS))


@proves("F13")
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("committed", [25, 47, 60])
def test_no_key_is_lost_by_a_truncation_to_the_watermark_after_a_compaction(layout: str, committed: int) -> None:
    harness, log = filled(layout, **COMPACTED)
    log.committed_offset = committed
    check(harness)
    found = offsets(log)
    assert len(found) < KEYS * ROUNDS, "nothing was compacted"
    assert [offset for offset in found if offset >= committed] == list(range(committed, KEYS * ROUNDS))
    log.truncate(committed)
    latest = {offset % KEYS: offset for offset in range(committed)}
    assert set(latest.values()) <= set(offsets(log))


@proves("F13")
@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("ahead", [[(0, 3)], [(0, 3 + n) for n in range(5)], [(1, 0)]], ids=["one", "five", "epoch"])
def test_a_producers_last_committed_batch_stays_while_what_it_wrote_since_is_not(
    layout: str, ahead: list[tuple[int, int]]
) -> None:
    harness = sim_harness(layout)
    harness.commits = False
    log = harness.log(**SMALL, **COMPACTED)
    written = [(0, sequence) for sequence in range(3)] + [None] * 60 + ahead
    for each in written:
        append(log, batch(b"." * 50, key=b"k", producer=(-1, -1, -1) if each is None else (7, *each)))
        assert not harness.write()
    log.committed_offset = committed = len(written) - len(ahead)
    check(harness)
    assert len(offsets(log)) < len(written) // 2, "little was compacted"
    log.truncate(committed)
    sequences = [header.base_sequence for header, _ in read_all(log) if header.producer_id == 7]
    assert sequences[-1:] == [2]
    assert log.producers.check(read_header(batch(producer=(7, 0, 2)))) == 2
    assert log.producers.check(read_header(batch(producer=(7, 0, 3)))) is None


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("committed", range(20, 40))
def test_the_end_of_a_log_can_be_read_where_nothing_before_it_has_a_key(layout: str, committed: int) -> None:
    """A topic may have been made a compacted one."""
    harness = sim_harness(layout)
    harness.commits = False
    log = harness.log(**SMALL, **COMPACTED)
    for _ in range(60):
        append(log, batch(b"." * 50))
        assert not harness.write()
    log.committed_offset = committed
    check(harness)
    log.truncate(committed)
    found = read_all(log)
    assert len(found) < 20, "little was compacted"
    assert found[-1][0].next_offset == committed


@proves("F13")
@pytest.mark.parametrize("layout", BOTH)
def test_retention_stops_at_the_watermark(layout: str) -> None:
    harness, log = filled(layout, **TOO_OLD)
    log.committed_offset = 47
    check(harness)
    assert 0 < log.start_offset <= 47
    assert set(range(47, KEYS * ROUNDS)) <= set(offsets(log))
    log.committed_offset = log.end_offset
    check(harness)
    assert log.start_offset == log.end_offset
