"""With `retention.archived`, retention and compaction remove only what lies below the archived offset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.records import kernel
from headrace.storage.segments.log import PartitionedLog
from proving import proves
from storage.harness import TOPIC, Harness, append, batch, read_all, settings, values

RECORDS = 90
SMALL = {"segment_bytes": 1024, "index_interval_bytes": 200, "retention_archived": "true"}
TOO_OLD = {**SMALL, "retention_ms": 1000}
TOO_MUCH = {**SMALL, "retention_ms": -1, "retention_bytes": 0}
COMPACTED = {**SMALL, "cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0.0}


def filled(harness: Harness, **overrides: object) -> PartitionedLog:
    """A log of many small segments, all of them older than a second."""
    log = harness.log(**overrides)
    assert isinstance(log, PartitionedLog)
    for n in range(RECORDS):
        append(log, batch(b"%d" % n, key=b"key%d" % (n % 3), timestamp_ms=harness.clock.wall_ms()))
        harness.write()
    harness.advance(2.5)
    return log


def again(harness: Harness, *, clean: bool) -> PartitionedLog:
    log = harness.reopen() if clean else harness.kill()
    assert isinstance(log, PartitionedLog)
    return log


def check(harness: Harness, rounds: int = 200) -> None:
    """Let a retention check and the compactions that it begins pass."""
    assert harness.store is not None
    harness.advance(1.1)
    for _ in range(rounds):
        if not harness.store.compacting:
            return
        harness.clock.advance(0.05)
        harness.settle()
    raise AssertionError("compaction does not end")


def offsets(log: PartitionedLog) -> list[int]:
    return [record.offset for _, view in read_all(log) for record in kernel.records(view)]


@proves("S4")
@pytest.mark.parametrize("overrides", [TOO_OLD, TOO_MUCH], ids=["time", "size"])
def test_retention_deletes_exactly_the_segments_that_are_archived_whole(
    harness: Harness, overrides: dict[str, object]
) -> None:
    log = filled(harness, **overrides)
    bases = list(log.segments.bases)
    assert len(bases) > 4
    assert (log.start_offset, offsets(log)) == (0, list(range(RECORDS)))
    harness.archived[TOPIC] = bases[2] - 1
    check(harness)
    assert log.start_offset == bases[1], "the segment that is archived but for its last record stays"
    harness.archived[TOPIC] = bases[2]
    check(harness)
    assert log.start_offset == bases[2]
    assert offsets(log) == list(range(bases[2], RECORDS))


@proves("S4")
@pytest.mark.parametrize("clean", [True, False], ids=["stop", "kill"])
def test_what_is_not_archived_stays_over_a_restart_also_while_nobody_can_tell(harness: Harness, clean: bool) -> None:
    log = filled(harness, **TOO_OLD)
    boundary = log.segments.bases[3]
    harness.archived[TOPIC] = boundary
    check(harness)
    harness.archived.clear()
    log = again(harness, clean=clean)
    check(harness)
    assert offsets(log) == list(range(boundary, RECORDS))
    harness.archived[TOPIC] = RECORDS
    check(harness)
    assert (log.start_offset, offsets(log)) == (RECORDS, []), "the active segment goes too, once it is archived"


def test_bytes_that_only_the_archive_holds_back_are_counted(harness: Harness) -> None:
    log = filled(harness, **TOO_OLD)
    assert log.held_bytes == log.size_bytes - log.active.written > 0
    harness.archived[TOPIC] = log.segments.bases[2]
    check(harness)
    assert log.held_bytes == log.size_bytes - log.active.written > 0
    log.settings = replace(log.settings, retention_ms=-1)
    check(harness)
    assert log.held_bytes == 0


@proves("S4")
def test_an_archive_that_is_set_back_holds_retention_from_there_on(harness: Harness) -> None:
    log = filled(harness, **TOO_OLD)
    bases = list(log.segments.bases)
    harness.archived[TOPIC] = bases[2]
    check(harness)
    harness.archived[TOPIC] = bases[1]
    check(harness)
    assert log.start_offset == bases[2]
    assert offsets(log) == list(range(bases[2], RECORDS))


@pytest.mark.parametrize("archived", [RECORDS + 1, -1])
def test_an_offset_that_the_log_never_had_says_nothing_of_it(harness: Harness, archived: int) -> None:
    log = filled(harness, **TOO_OLD)
    harness.archived[TOPIC] = archived
    check(harness)
    assert offsets(log) == list(range(RECORDS))


@proves("S4")
def test_the_setting_takes_effect_while_running(harness: Harness) -> None:
    log = filled(harness, **{**TOO_OLD, "retention_archived": "false", "retention_ms": 60_000})
    log.settings = settings(**TOO_OLD)
    check(harness)
    assert log.start_offset == 0
    log.settings = replace(log.settings, retention_archived=False)
    check(harness)
    assert log.start_offset == RECORDS


def test_whoever_deletes_by_hand_is_not_held_back(harness: Harness) -> None:
    log = filled(harness, **TOO_OLD)
    log.delete_before(30)
    check(harness)
    assert log.start_offset == 30
    assert values(log)[-1] == b"%d" % (RECORDS - 1)


@proves("S4")
def test_compaction_leaves_every_record_that_is_not_archived(harness: Harness) -> None:
    log = filled(harness, **COMPACTED)
    assert offsets(log) == list(range(RECORDS))
    boundary = log.segments.bases[3]
    harness.archived[TOPIC] = boundary + 1
    check(harness)
    assert offsets(log) == list(range(boundary - 3, RECORDS)), "the latest of three keys, and all that is not archived"
    harness.archived[TOPIC] = RECORDS
    check(harness)
    assert len(offsets(log)) < 3 + RECORDS - log.active.base_offset + 1
    assert offsets(again(harness, clean=False))[-1] == RECORDS - 1


@proves("S4")
def test_a_compaction_under_way_stops_when_the_archive_is_set_back(harness: Harness) -> None:
    log = filled(harness, **COMPACTED)
    harness.archived[TOPIC] = RECORDS
    harness.advance(1.1)
    assert harness.store is not None
    assert harness.store.compacting
    harness.archived.clear()
    check(harness)
    assert offsets(log) == list(range(RECORDS))
    assert offsets(again(harness, clean=True)) == list(range(RECORDS))
