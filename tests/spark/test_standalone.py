"""One run on a real Spark cluster: a standalone master and two workers on loopback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from brokers import DIES_WITH_PARENT, Broker
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.produce import produce
from headrace.client.producer.request import Outgoing
from headrace.records import kernel
from headrace.records.arrow import digest
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from proving import proves
from spark.standalone import LOOPBACK, SPARK, START_DEADLINE_S, Standalone

SOURCE = Path(__file__).parent.parent.parent / "src"
DRIVER = Path(__file__).parent / "standalone_driver.py"
TOPIC = "standalone"
PARTITIONS = 3
DRIVER_DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(START_DEADLINE_S + DRIVER_DEADLINE_S)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cluster = Standalone(tmp_path_factory.mktemp("standalone"))
    yield cluster.address
    cluster.stop()


@pytest.fixture
def sent(broker: Broker) -> Iterator[list[list[int]]]:
    """Partition, offset and digest of every record of the topic."""
    known: list[list[int]] = []
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(
            cluster, TOPIC, partitions=PARTITIONS, configs={"segment.bytes": "60000", "retention.ms": "-1"}
        )
        for partition in range(PARTITIONS):
            for n in range(10):
                records: list[NewRecord] = [(1000 + i, b"%d" % i, b"value %d %d" % (n, i), []) for i in range(100)]
                produce(cluster, [Outgoing(TOPIC, partition, kernel.build(records, n % len(Codec)))])
                known += [[partition, n * 100 + i, digest(r[1], r[2], [])] for i, r in enumerate(records)]
    yield sorted(known)
    with Cluster(broker.bootstrap) as cluster:
        operations.delete_topic(cluster, TOPIC)


def run_driver(command: Sequence[str], broker: Broker, result: Path, environment: dict[str, str]) -> dict[str, Any]:
    ran = subprocess.run(
        [*DIES_WITH_PARENT, *command, broker.bootstrap, TOPIC, str(broker.data), str(result)],
        env={**LOOPBACK, **environment},
        cwd=result.parent,
        capture_output=True,
        text=True,
        timeout=DRIVER_DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def check(found: dict[str, Any], sent: list[list[int]]) -> None:
    assert found["tasks"] >= 8
    assert sorted(row[:3] for row in found["topic"]) == sent
    assert len({row[3] for row in found["topic"]}) == 2, "both executors read some"
    assert sorted(found["folder"]) == sent
    assert found["victim"] in {row[3] for row in found["topic"]}
    assert sorted(found["killed"]) == sent


@proves("S1", "S11")
def test_two_executors_read_a_topic_and_one_may_be_killed(
    master: str, broker: Broker, sent: list[list[int]], tmp_path: Path
) -> None:
    command = [sys.executable, str(DRIVER), master]
    check(run_driver(command, broker, tmp_path / "result", {"PYSPARK_PYTHON": sys.executable}), sent)


@proves("S9")
@pytest.mark.long
def test_executors_get_the_package_as_an_archive(
    master: str, broker: Broker, sent: list[list[int]], tmp_path: Path
) -> None:
    archive = tmp_path / "headrace.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(SOURCE.rglob("*.py")):
            file.write(path, path.relative_to(SOURCE))
    # A Python that has what the package needs, but not the package: links to it are not followed without `site`.
    python = tmp_path / "python"
    packages = SPARK.parent
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    submit = shutil.which("spark-submit", path=str(SPARK / "bin"))
    command = [str(submit), "--master", master, "--py-files", str(archive), str(DRIVER), master]
    environment = {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_HOME": str(SPARK)}
    found = run_driver(command, broker, tmp_path / "result", environment)
    check(found, sent)
    assert all(archive.name in row[4] for row in found["topic"])
