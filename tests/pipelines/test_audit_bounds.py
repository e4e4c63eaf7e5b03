"""Audit at the bound of what its driver looks at one by one: what is there to be found is found on both sides of it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.arrow.ledger import SCHEMA
from headrace.pipelines import accounting, audit
from headrace.pipelines.judgement import Bound
from headrace.pipelines.stores import Store
from headrace.pipelines.summary import Progress, Summary
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
STORE_TYPE = "topic string, partition int, offset long, timestamp timestamp, timestampType int, digest long"
Claim = tuple[str, int, int, int | None, int]
"""Producer, sequence, partition, offset, digest."""
Copy = tuple[int, int, int]
"""Partition, offset, digest."""


class Scene:
    """A ledger and a store of the topic `t`, as plain lists."""

    def __init__(self, spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spark = spark
        self._ledger = folder / "ledger"
        self._ledger.mkdir()
        self._monkeypatch = monkeypatch

    def audit(
        self, claims: Sequence[Claim], copies: Sequence[Copy], bounds: Sequence[Bound] = (), most: int = 1000
    ) -> Summary:
        """With so many leftovers at most for the driver."""
        names = ("producer", "sequence", "topic", "partition", "offset", "timestamp", "digest")
        rows = [(*claim[:2], "t", *claim[2:4], AT, claim[4]) for claim in claims]
        table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], SCHEMA)
        pq.write_table(table, self._ledger / "a.parquet")
        kept = self._spark.createDataFrame([("t", *copy[:2], AT, 0, copy[2]) for copy in copies], STORE_TYPE)
        self._monkeypatch.setattr(audit, "_stores", lambda *_: [Store("store", kept, lambda: bounds)])
        self._monkeypatch.setattr(audit, "COLLECTED_MAX", most)
        return audit.run(self._spark, audit.AuditOptions((str(self._ledger),)), Progress())


@pytest.fixture
def scene(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(spark, tmp_path, monkeypatch)


def sent(count: int, partition: int = 0) -> list[Claim]:
    return [("p", 1000 * partition + n, partition, n, 1000 * (partition + 1) + n) for n in range(count)]


def kept(claims: Sequence[Claim]) -> list[Copy]:
    return [(partition, offset or 0, digest) for _, _, partition, offset, digest in claims]


@proves("S6")
def test_a_record_without_an_offset_is_lost_when_nothing_more_can_come(scene: Scene) -> None:
    claims = [*sent(4), ("p", 4, 0, None, 77)]
    lost = scene.audit(claims, kept(sent(4)), [Bound("t", 0, next_offset=4, complete=True)])
    assert (lost.ok, lost.facts["verdict"]) == (False, "1 findings")
    deleted = scene.audit(claims, kept(sent(4))[2:], [Bound("t", 0, first_offset=2)])
    assert (deleted.ok, deleted.facts["verdict"]) == (True, "clean, 1 records without an offset perhaps deleted")
    (row,) = deleted.tables[0].rows
    assert (row["found"], row["deleted"], row["perhaps_deleted"]) == (2, 2, 1)


@proves("S6")
def test_losses_are_not_crowded_out_by_duplicates(scene: Scene) -> None:
    claims = sent(100)
    copies = [*kept(claims)[:90], *kept(claims)[:70]]
    copies[85] = (0, 85, 7)
    summary = scene.audit(claims, copies, most=20)
    (producer,), (store,) = (table.rows for table in summary.tables[:2])
    assert (producer["lost"], producer["corrupted"], producer["found"]) == (10, 1, None)
    assert (producer["duplicated"], store["not_told_apart"], store["faults"]) == (8, 62, 81)
    assert summary.facts["verdict"] == "81 findings"


@proves("S6")
def test_a_ledger_with_more_contradictions_than_are_looked_at_says_so(scene: Scene) -> None:
    claims: list[Claim] = [("p", n, 0, 99 - n, 1000 + n) for n in range(100)]
    summary = scene.audit(claims, kept(claims), most=20)
    assert summary.facts["verdict"] == "99 findings"
    (ledger, store) = summary.tables[1].rows
    assert (ledger["store"], ledger["records"], ledger["not_told_apart"], ledger["faults"]) == ("ledger", 100, 79, 99)
    assert (store["faults"], [row["found"] for row in summary.tables[0].rows]) == (0, [None, 100])


@proves("S6")
def test_of_claims_that_are_all_alike_one_is_enough(spark: SparkSession) -> None:
    types = "producer string, sequence long, topic string, partition int, offset long, digest long"
    ledger = spark.createDataFrame([("p", n, "t", 0, n, 7) for n in range(50)] + [("q", 0, "t", 1, 0, 8)], types)
    types = "topic string, partition int, offset long, digest long, claims int, copies int"
    leftovers = spark.createDataFrame([("t", 0, 90, 7, 0, 1), ("t", 0, 12, 7, 1, 0)], types)
    claims = {(row["producer"], row["sequence"]) for row in accounting.touched(ledger, leftovers).collect()}
    assert claims == {("p", 0), ("p", 12)}


@proves("S6")
def test_superseded_records_leave_room_for_faults(scene: Scene) -> None:
    claims = [*sent(200), *sent(20, partition=1)]
    copies = kept(claims)[180:-1]
    bounds = [Bound("t", 0, compacted=True), Bound("t", 1)]
    clean = scene.audit(claims, [*copies, (1, 19, 2019)], bounds, most=50)
    assert (clean.ok, clean.tables[0].rows[0]["deleted"]) == (True, 180)
    # Another record where one was superseded, a superseded one elsewhere, one twice, and the last of the other
    # partition is not there.
    copies += [(0, 7, 7), (0, 300, 1009), (1, 0, 2000)]
    looked_at, all_of_them = (scene.audit(claims, copies, bounds, most).tables for most in (50, 1000))
    assert looked_at == all_of_them
    counts = dict(looked_at[0].rows[0])
    assert {name: counts[name] for name in ("lost", "duplicated", "out_of_order", "corrupted", "deleted")} == {
        "lost": 1, "duplicated": 1, "out_of_order": 1, "corrupted": 1, "deleted": 178,
    }  # fmt: skip
