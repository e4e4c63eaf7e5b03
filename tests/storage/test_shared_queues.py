"""Queues of several files: one that is missing is missed, and what is written anew is written beside first."""

from __future__ import annotations

import pytest

from headrace.storage.folder import SHARED
from headrace.storage.report import PartitionReport
from headrace.storage.shared import verify
from headrace.storage.shared.log import SharedLog
from headrace.storage.shared.store import SharedStore
from proving import proves
from storage.harness import Harness, append, batch, sim_harness, values

FOLDER = "/data/orders/orders-0"
RECORDS = 60


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Harness:
    for module in ("queue", "queuefile"):
        monkeypatch.setattr(f"headrace.storage.shared.{module}.ENTRIES_MAX", 5)
    harness = sim_harness(SHARED)
    harness.file_bytes = 2000
    return harness


def fill(harness: Harness, **overrides: object) -> SharedLog:
    log = harness.log(**({"file_delete_delay_ms": 0, "retention_ms": -1} | overrides))
    assert isinstance(log, SharedLog)
    for number in range(RECORDS):
        append(log, batch(b"%d" % number + b"." * 60))
        assert not harness.write()
        harness.settle()
    return log


def queue_files(harness: Harness) -> list[str]:
    return sorted(name for name in harness.disk.list(FOLDER) if name.endswith(".queue"))


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


@proves("L5", "J6")
class TestMissing:
    @pytest.mark.parametrize("clean", [True, False])
    @pytest.mark.parametrize("lost", [[0], [3], [10], [0, 4, 5]])
    def test_a_missing_file_costs_time_and_no_record(
        self, sim: Harness, caplog: pytest.LogCaptureFixture, clean: bool, lost: list[int]
    ) -> None:
        right = values(fill(sim))
        sim.advance(61)
        sim.settle()
        names = queue_files(sim)
        assert len(names) == 12
        store_of(sim).close() if clean else store_of(sim).abandon()
        for nth in lost:
            sim.disk.remove(f"{FOLDER}/{names[nth]}")
        if clean:
            wrong = [each for each in verify.reports(sim.disk, sim.data) if isinstance(each, PartitionReport)]
            missing = FOLDER if lost[0] == 0 else f"{FOLDER}/{names[lost[0]]}"
            assert [problem.path for problem in wrong[0].problems] == [missing]
        assert len(list(verify.dump(sim.disk, sim.data))) == RECORDS
        sim.open()
        assert "built from the commit log" in caplog.text
        assert values(sim.log()) == right
        for _ in range(20):
            sim.advance(5)
        assert values(sim.log()) == right
        assert queue_files(sim) == names

    def test_files_that_went_with_deleted_records_are_not_missed(
        self, sim: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        log = fill(sim)
        sim.advance(61)
        sim.settle()
        right = values(log)[22:]
        log.delete_before(22)
        store_of(sim).abandon()
        sim.open()
        assert values(sim.log()) == right
        assert "built from the commit log" not in caplog.text

    def test_the_chain_holds_after_truncations(self, sim: Harness, caplog: pytest.LogCaptureFixture) -> None:
        log = fill(sim)
        for end in (40, 35, 12):
            log.truncate(end)
            for number in range(7):
                append(log, batch(b"%d again" % number))
                assert not sim.write()
            sim.settle()
            right = values(log)
            sim.reopen()
            found = sim.log()
            assert isinstance(found, SharedLog)
            log = found
            assert values(log) == right
        assert "built from the commit log" not in caplog.text
