"""Every source, sink and pipeline on a real Spark cluster: a standalone master and two workers with two executors each.

Driver and executors have the wheel and what it needs, nothing of this tree. One driver runs all of it (see
standalone_driver.py); the tests look at what it found and wrote.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import headrace.arrow
from brokers import DIES_WITH_PARENT, Broker
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import list_transactions
from proving import proves
from spark import wheel_python
from spark.standalone import LOOPBACK, SETTINGS, SPARK, START_DEADLINE_S, Standalone

SOURCE = Path(__file__).parent.parent.parent / "src"
DRIVER = Path(__file__).parent / "standalone_driver.py"
RECORDS = 3600
PARTITIONS = 3
TARGETS = ("copy", "batch", "again", "history")
# A task that is killed with its executor has failed as any other.
FOUR_EXECUTORS = {**SETTINGS, "spark.cores.max": "4", "spark.task.maxFailures": "30"}
DRIVER_DEADLINE_S = 600.0
pytestmark = pytest.mark.timeout(START_DEADLINE_S + DRIVER_DEADLINE_S)
Start = Callable[[Path], Sequence[str | Path]]
"""The command of a driver, by the file of its request."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cluster = Standalone(tmp_path_factory.mktemp("standalone"))
    yield cluster.address
    cluster.stop()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_python.make(tmp_path_factory.mktemp("wheel"))


@dataclass(frozen=True, slots=True)
class Toured:
    """`sent` are the rows of the topic before anything was deleted; `found` is what the driver says."""

    broker: Broker
    topic: str
    folder: Path
    sent: list[dict[str, Any]]
    found: dict[str, Any]

    def places(self) -> list[list[int]]:
        return [[row["partition"], row["offset"], row["digest"]] for row in self.sent]

    def records(self) -> list[tuple[bytes, bytes]]:
        return sorted((row["key"], row["value"]) for row in self.sent)

    def written(self, target: str) -> list[tuple[bytes, bytes]]:
        """What readers of committed records see of a topic that was written to."""
        rows = headrace.arrow.read(f"{self.topic}-{target}", bootstrap=self.broker.bootstrap, columns=["key", "value"])
        return sorted((row["key"], row["value"]) for row in rows.read_all().to_pylist())

    def left_open(self) -> list[str]:
        with Cluster(self.broker.bootstrap) as cluster:
            return [each.transactional_id for each in list_transactions(cluster, states=["Ongoing"])]


def tour(
    master: str, broker: Broker, folder: Path, start: Start, environment: dict[str, str], kills: int, batches: int
) -> Toured:
    topic, traces, ledger = f"standalone-{uuid.uuid4().hex[:6]}", str(folder / "traces"), str(folder / "ledger")
    with Cluster(broker.bootstrap) as cluster:
        for target in TARGETS:
            operations.create_topic(cluster, f"{topic}-{target}", partitions=PARTITIONS)
    load = ["load", topic, "--records", str(RECORDS), "--partitions", str(PARTITIONS), "--ledger", ledger]
    command(sys.executable, *load, "--traces", traces, "--bootstrap", broker.bootstrap)
    columns = ("partition", "offset", "digest", "key", "value")
    sent = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=columns).read_all().to_pylist()
    request = {
        "master": master, "settings": FOUR_EXECUTORS, "bootstrap": broker.bootstrap, "topic": topic,
        "records": RECORDS, "data": str(broker.data), "ledger": ledger, "traces": traces, "folder": str(folder),
        "archive": str(folder / "archive"), "kills": kills, "batches": batches,
    }  # fmt: skip
    (folder / "request").write_text(json.dumps(request))
    print(run(start(folder / "request"), folder, environment))
    return Toured(broker, topic, folder, sent, json.loads((folder / "result").read_text()))


def run(given: Sequence[str | Path], folder: Path, environment: dict[str, str]) -> str:
    known = {name: value for name, value in LOOPBACK.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    ran = subprocess.run(
        [*DIES_WITH_PARENT, *given],
        env={**known, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DRIVER_DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


def command(python: str | Path, *arguments: str) -> str:
    return subprocess.run(
        [python, "-m", "headrace.cli.main", *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(scope="module")
def toured(master: str, python: Path, shared_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Toured:
    def start(request: Path) -> Sequence[str | Path]:
        return [python, DRIVER, request]

    return tour(master, shared_broker, tmp_path_factory.mktemp("tour"), start, {}, kills=2, batches=2)


def check_executors(toured: Toured, home: Path) -> None:
    """All four have read; whatever runs the package has it from there."""
    executors: dict[str, set[str]] = defaultdict(set)
    for *_, executor, worker, package in toured.found["topic"]:
        executors[worker].add(executor)
        assert home in Path(package).parents
    assert {worker: len(each) for worker, each in executors.items()} == {"one": 2, "two": 2}
    assert home in Path(toured.found["package"]).parents


@proves("S1", "S9")
def test_executors_that_have_only_the_wheel_read_a_topic(toured: Toured, python: Path) -> None:
    check_executors(toured, python.parent.parent)
    assert sorted(row[:3] for row in toured.found["topic"]) == sorted(toured.places())


@proves("S9", "S11")
def test_executors_read_a_data_folder(toured: Toured) -> None:
    assert sorted(toured.found["data_folder"]) == sorted(toured.places())


@proves("S1", "S9")
def test_a_read_outlives_an_executor(toured: Toured) -> None:
    found = toured.found["topic_while_an_executor_is_killed"]
    assert len(found["victims"]) == 1
    assert sorted(found["rows"]) == sorted(toured.places())


@proves("S2", "S3", "S9")
def test_a_stream_from_topic_to_topic_is_exactly_once_whichever_executors_are_killed(toured: Toured) -> None:
    assert len(set(toured.found["stream_to_topic_while_executors_are_killed"]["victims"])) == 2
    assert toured.written("copy") == toured.records()
    assert toured.left_open() == []


@proves("S3", "S9")
def test_a_frame_goes_to_a_topic(toured: Toured) -> None:
    assert toured.written("batch") == toured.records()


@proves("S4", "S6", "S9")
def test_an_archive_is_made_and_audited(toured: Toured) -> None:
    assert toured.found["archived"]["records"] == RECORDS
    audited = toured.found["audited"]
    assert audited["ok"], audited
    assert audited["acknowledged_records"] == RECORDS
    assert {store["store"].split(" ")[0] for store in audited["stores"]} == {"topics", "data", "archive"}


@proves("S7", "S9")
def test_an_archive_is_compacted_and_indexed(toured: Toured) -> None:
    merged, indexed = toured.found["compacted"], toured.found["indexed"]
    assert merged["files_merged"] > merged["files_written"] > 0
    assert indexed["records_indexed"] == RECORDS
    latest = DeltaTable(str(toured.folder / "archive" / "latest")).to_pyarrow_table(columns=["key"])
    assert sorted(latest["key"].to_pylist()) == sorted({row["key"] for row in toured.sent})


@proves("S8", "S9")
def test_traces_are_reported(toured: Toured) -> None:
    (total,) = toured.found["reported"]["total"]
    assert total["records"] == RECORDS
    assert (toured.folder / "report" / "report.html").exists()


@proves("S9", "S10")
def test_a_job_writes_a_topic_and_a_table(toured: Toured) -> None:
    orders = sorted(json.loads(row["value"])["order"] for row in toured.sent)
    assert sorted(json.loads(value)["order"] for _, value in toured.written("job")) == orders
    table = DeltaTable(str(toured.folder / "orders")).to_pyarrow_table(columns=["order"])
    assert sorted(table["order"].to_pylist()) == orders


@proves("S5", "S9")
def test_an_archive_is_replayed(toured: Toured) -> None:
    assert toured.found["replayed"]["records"] == RECORDS
    assert toured.written("again") == toured.records()


@proves("S9", "S12")
def test_a_statement_and_a_stream_have_the_whole_history(toured: Toured) -> None:
    found = toured.found["whole_history"]
    assert found["left"] < RECORDS
    assert (found["count"], found["distinct"]) == (RECORDS, RECORDS)
    assert toured.written("history") == toured.records()


@proves("S9", "S10")
def test_a_command_is_the_same_with_a_master(toured: Toured, master: str, python: Path) -> None:
    settings = [part for item in FOUR_EXECUTORS.items() for part in ("--spark-conf", "=".join(item))]
    where = ["--bootstrap", toured.broker.bootstrap, "--archive", str(toured.folder / "archive")]
    statement = f"select count(distinct `order`) as orders from archive.`{toured.topic}`"
    told = run(
        [python, "-m", "headrace.cli.main", "sql", "--master", master, *settings, *where, "--json", statement],
        toured.folder,
        {},
    )
    assert json.loads(told) == {"orders": len({json.loads(row["value"])["order"] for row in toured.sent})}


@proves("S9")
@pytest.mark.long
def test_executors_get_the_package_as_an_archive(master: str, shared_broker: Broker, tmp_path: Path) -> None:
    archive = tmp_path / "headrace.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(SOURCE.rglob("*.py")):
            file.write(path, path.relative_to(SOURCE))
    # A Python that has what the package needs, but not the package: links to it are not followed without `site`.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{SPARK.parent}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    submit = str(shutil.which("spark-submit", path=str(SPARK / "bin")))
    environment = {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_HOME": str(SPARK)}

    def start(request: Path) -> Sequence[str | Path]:
        return [submit, "--master", master, "--py-files", archive, DRIVER, request]

    toured = tour(master, shared_broker, tmp_path, start, environment, kills=1, batches=2)
    assert all(archive.name in row[-1] for row in toured.found["topic"])
    assert sorted(row[:3] for row in toured.found["topic"]) == sorted(toured.places())
    assert toured.written("copy") == toured.records()


@proves("S3", "S9")
@pytest.mark.long
def test_a_stream_is_exactly_once_over_many_killed_executors(
    master: str, python: Path, shared_broker: Broker, tmp_path: Path, proof_report: Callable[..., None]
) -> None:
    def start(request: Path) -> Sequence[str | Path]:
        return [python, DRIVER, request]

    toured = tour(master, shared_broker, tmp_path, start, {}, kills=20, batches=12)
    killed = toured.found["stream_to_topic_while_executors_are_killed"]["victims"]
    assert len(set(killed)) == 20
    assert toured.written("copy") == toured.records()
    assert toured.left_open() == []
    proof_report(executors_killed=len(killed), rows=RECORDS, lost=0, duplicated=0, left_open=0)
