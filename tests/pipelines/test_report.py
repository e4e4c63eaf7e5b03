"""Report: the figures are numpy's, and the plots are pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.arrow.traces import SCHEMA, open_traces
from headrace.errors import OperatorError
from headrace.pipelines.report import ReportOptions, run
from headrace.pipelines.summary import Progress
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST_US = 1_800_000_000_000_000
BATCHES = 4_000


def known_traces(seed: int) -> dict[str, Any]:
    """Two producers on two topics over about eight seconds; a batch in fifty fails."""
    chance = np.random.default_rng(seed)
    sent = np.sort(chance.integers(0, 8_000_000, BATCHES))
    sent[0] = 0
    return {
        "producer": np.array(["one", "two"])[chance.integers(2, size=BATCHES)],
        "topic": np.array(["clicks", "orders"])[chance.integers(2, size=BATCHES)],
        "partition": chance.integers(4, size=BATCHES).astype(np.int32),
        "sent_at": FIRST_US + sent,
        "acknowledged_at": FIRST_US + sent + chance.lognormal(8.0, 1.0, BATCHES).astype(np.int64) + 50,
        "records": chance.integers(1, 40, BATCHES),
        "bytes": chance.integers(100, 4_000, BATCHES),
        "error": np.array([None, "refused"])[(chance.random(BATCHES) < 0.02).astype(int)],
    }


def expected(columns: dict[str, Any], chosen: Any) -> dict[str, float]:
    good = chosen & np.array([error is None for error in columns["error"]])
    took_ms = (columns["acknowledged_at"] - columns["sent_at"])[good] / 1000
    per_record = np.repeat(took_ms, columns["records"][good])
    seconds = (columns["acknowledged_at"][chosen].max() - columns["sent_at"][chosen].min()) / 1e6
    at = np.percentile(per_record, [50, 99, 99.9])
    return {
        "records": len(per_record),
        "seconds": seconds,
        "tps": len(per_record) / seconds,
        "mb_per_s": columns["bytes"][good].sum() / seconds / 1e6,
        "mean_ms": per_record.mean(),
        "tp50_ms": at[0],
        "tp99_ms": at[1],
        "tp999_ms": at[2],
        "errors": columns["records"][chosen & ~good].sum(),
    }


@proves("S8")
def test_the_figures_are_those_of_numpy_and_the_plots_are_pictures(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    columns = known_traces(seed)
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in SCHEMA]
    with open_traces(tmp_path / "traces", "known") as traces:
        traces.add(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
    (tmp_path / "traces" / "killed-000000.parquet.tmp").write_bytes(b"not whole")
    out = tmp_path / "out"
    summary = run(spark, ReportOptions((str(tmp_path / "traces"),), str(out), bucket_s=1.0), Progress())

    total, topics, producers = summary.tables
    assert dict(total.rows[0]) == pytest.approx(expected(columns, np.full(BATCHES, True)), abs=0.002)
    for table, column in ((topics, "topic"), (producers, "producer")):
        assert [row[column] for row in table.rows] == sorted(set(columns[column]))
        for row in table.rows:
            figures = {name: value for name, value in row.items() if name != column}
            assert figures == pytest.approx(expected(columns, columns[column] == row[column]), abs=0.002)
    check_over_time(columns, json.loads((out / "figures.json").read_text())["over_time"])
    check_pages(out)


def check_over_time(columns: dict[str, Any], points: list[dict[str, Any]]) -> None:
    good = np.array([error is None for error in columns["error"]])
    bucket = (columns["acknowledged_at"] - FIRST_US) // 1_000_000
    assert [point["at_s"] for point in points] == list(range(len(points)))
    for number, point in enumerate(points[:-1]):
        here = good & (bucket == number)
        took_ms = np.repeat((columns["acknowledged_at"] - columns["sent_at"])[here] / 1000, columns["records"][here])
        assert point["tps"] == columns["records"][here].sum()
        assert point["tp99_ms"] == pytest.approx(np.percentile(took_ms, 99), abs=0.002)


def check_pages(out: Path) -> None:
    from matplotlib.image import imread

    for name in ("rate.png", "latency.png", "distribution.png"):
        picture = imread(out / name)
        assert picture.shape[0] > 200
        assert picture.shape[1] > 500
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10, f"{name} shows nothing"
        assert f"({name})" in (out / "report.md").read_text()
        assert f"src='{name}'" in (out / "report.html").read_text()


def test_a_folder_without_traces_is_told(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="has no traces"):
        run(spark, ReportOptions((str(tmp_path),), str(tmp_path / "out")), Progress())
