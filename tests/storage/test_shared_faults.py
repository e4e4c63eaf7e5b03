"""Faults of the disk and bad moments in the shared layout: what was acknowledged stays, and nothing else is claimed."""

from __future__ import annotations

import pytest

from headrace.sim.disk import SimDisk
from headrace.storage.log import Log
from headrace.storage.shared.store import SharedStore
from storage.harness import Harness, append, batch, values


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


def sim_disk(harness: Harness) -> SimDisk:
    assert isinstance(harness.disk, SimDisk)
    return harness.disk


def put(harness: Harness, log: Log, *each: bytes) -> None:
    for value in each:
        append(log, batch(value))
        assert not harness.write()
        harness.settle()


@pytest.mark.parametrize("seed", range(8))
def test_a_file_that_cannot_be_begun_leaves_the_old_one_active_and_nothing_acknowledged_is_lost(
    shared: Harness, seed: int
) -> None:
    shared.file_bytes = 2000
    log, commit_log = shared.log(retention_ms=-1, durability="disk"), store_of(shared).commit_log
    put(shared, log, b"x" * 100)
    shared.advance(61)
    while commit_log.room > 300:
        put(shared, log, b"x" * 100)
    before = commit_log.number, commit_log.end, dict(commit_log.sizes), shared.disk.list(commit_log.folder)
    sim_disk(shared).fail_open(commit_log.folder)
    append(log, batch(b"x" * 200))
    assert shared.write()
    assert (commit_log.number, commit_log.end, commit_log.sizes, shared.disk.list(commit_log.folder)) == before
    put(shared, log, *[b"y" * 100] * 3)
    safe, kept = log.durable_offset, values(log)
    assert safe == log.written_offset
    assert commit_log.number > before[0]
    assert values(shared.kill(seed=seed)) == kept


def test_a_first_file_whose_folder_cannot_be_opened_is_not_begun(shared: Harness) -> None:
    log = shared.log(durability="disk")
    sim_disk(shared).fail_open(store_of(shared).commit_log.folder)
    append(log, batch(b"refused"))
    assert shared.write()
    put(shared, log, b"kept")
    assert log.durable_offset == 1
    assert values(shared.kill(seed=1)) == [b"kept"]
