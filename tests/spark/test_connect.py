"""Spark Connect: a server of its own, and a client that has neither Java nor anything else of Spark's server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace.arrow
from brokers import DIES_WITH_PARENT, Broker, free_port, wait_for
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import list_transactions
from headrace.errors import OperatorError
from headrace.spark import session
from proving import proves
from spark import process_tree
from spark.confluent_rows import create_topic, numbered, send
from spark.standalone import LOOPBACK, SETTINGS, SPARK, START_DEADLINE_S

CLIENT = Path(__file__).parent / "connect_client.py"
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
CLIENT_DEADLINE_S = 300.0
RECORDS = 600
pytestmark = pytest.mark.timeout(START_DEADLINE_S + CLIENT_DEADLINE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. It has the package, because its Python has."""
    folder, port = tmp_path_factory.mktemp("connect"), free_port()
    chosen = {
        **session.SETTINGS,
        **{name: value for name, value in SETTINGS.items() if name.startswith("spark.driver") or "shuffle" in name},
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    settings = [part for name, value in chosen.items() for part in ("--conf", f"{name}={value}")]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*DIES_WITH_PARENT, SPARK / "bin" / "spark-submit", "--class", SERVER, "--master", "local[2]", *settings],
            env={**LOOPBACK, "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "512m"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def started() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        return "Spark Connect server started" in log.read_text()

    try:
        wait_for("the Connect server to start", started, START_DEADLINE_S)
        yield f"sc://127.0.0.1:{port}"
    finally:
        below = process_tree.below(process.pid)
        process.terminate()
        process.wait()
        process_tree.kill(below)


def values(broker: Broker, topic: str) -> list[bytes]:
    found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=["value"]).read_all()
    return sorted(found["value"].to_pylist())


@proves("S1", "S2", "S3")
def test_a_client_without_java_reads_and_writes_topics(server: str, broker: Broker, tmp_path: Path) -> None:
    topic = create_topic(broker, partitions=3)
    for target in ("batch", "stream"):
        create_topic(broker, partitions=2, name=f"{topic}-{target}")
    send(broker, topic, numbered(RECORDS))
    known = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    program, *options = DIES_WITH_PARENT  # found here: the client has an empty PATH
    ran = subprocess.run(
        [str(shutil.which(program)), *options, sys.executable, CLIENT, server, broker.bootstrap, topic, tmp_path],
        env={**known, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=CLIENT_DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads((tmp_path / "result").read_text())
    assert len({tuple(row) for row in found["rows"]}) == len(found["rows"]) == RECORDS
    sent = sorted(record["value"] for record in numbered(RECORDS))
    assert values(broker, f"{topic}-batch") == values(broker, f"{topic}-stream") == sent
    with Cluster(broker.bootstrap) as cluster:
        assert [each for each in list_transactions(cluster, states=["Ongoing"]) if topic in each.transactional_id] == []


def test_a_server_that_is_not_there_is_told_soon(tmp_path: Path) -> None:
    """PySpark itself tries for minutes, without a word."""
    with pytest.raises(
        OperatorError, match=r"nobody listens at sc://127\.0\.0\.1:9 \(.*; is a Spark Connect server there"
    ):
        session.start("client", "sc://127.0.0.1:9")
