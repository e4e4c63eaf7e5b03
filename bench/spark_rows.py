"""Rows a second into Spark: `python bench/spark_rows.py` from the clone's root.

One Headrace broker (and Apache Kafka where Maven answers) on the same cores as Spark, topics with the same rows, the
same rows as Parquet. For each size and master one driver (bench/spark_contest.py) lets all contestants take turns in
one session and gives rows a second and processor time; this program prints the medians and the ratios.

Spark's own Kafka connector comes from Maven into the git-ignored `.work/spark-kafka`. Where that fails it is named as
missing and the run goes on.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import processes
import pyarrow as pa
import pyarrow.parquet as pq
from contestants import CACHE, CONTESTANTS, HOST, MAVEN_TIMEOUT_S, Missing, Running, start
from report import machine, table
from run import say

from headrace import arrow
from headrace.client import admin
from headrace.client.cluster import Cluster
from headrace.client.produce import Outgoing, Produced, produce
from headrace.records import arrow as rows_of

ROWS: Final = {100: 4_000_000, 1024: 1_000_000}
BATCH_BYTES: Final = 100_000
PARTITIONS: Final = 4
KEY_COUNT: Final = 10_000
ROUND: Final = 64
WORKER_TIMEOUT_S: Final = 1800
# The connector of the newest Spark whose parts are all to be had; its token provider is missing for later ones.
CONNECTOR: Final = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.12.1"),
)


def connector_jars() -> list[str]:
    """The jars of Spark's Kafka connector, brought on the first call."""
    folder = CACHE / "spark-kafka"
    jars = folder / "lib"
    if len(list(jars.glob("*.jar"))) < len(CONNECTOR):
        maven = shutil.which("mvn")
        if maven is None:
            raise Missing("there is no program mvn: apt-get install maven")
        folder.mkdir(parents=True, exist_ok=True)
        alone = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
        dependencies = "".join(
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
            f"{alone}</dependency>"
            for group, artifact, version in CONNECTOR
        )
        (folder / "pom.xml").write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
            "<groupId>bench</groupId><artifactId>connector</artifactId><version>1</version><packaging>pom</packaging>"
            f"<dependencies>{dependencies}</dependencies></project>\n"
        )
        command = (maven, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={jars}")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=MAVEN_TIMEOUT_S)
        if done.returncode != 0:
            raise Missing(f"Maven did not bring Spark's Kafka connector: {done.stdout.strip()[-300:]}")
    return [str(jar) for jar in sorted(jars.glob("*.jar"))]


def template(size_bytes: int, rows: int, seed: int) -> pa.RecordBatch:
    """Rows with short keys and values that do not compress to nothing."""
    draw = np.random.default_rng(seed)
    keys = pa.array([b"key-%05d" % n for n in draw.integers(0, KEY_COUNT, rows)], type=pa.binary())
    data = draw.integers(32, 127, size_bytes * rows, dtype=np.uint8)
    offsets = np.arange(0, size_bytes * (rows + 1), size_bytes, dtype=np.int32)
    values = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])


def fill(bootstrap: str, topic: str, size_bytes: int, rows: int) -> None:
    """The topic with `rows` rows in batches of about BATCH_BYTES, spread over PARTITIONS."""
    per_batch = max(1, BATCH_BYTES // size_bytes)
    now_ms = int(time.time() * 1000)  # older records would go by retention in mid-run
    with Cluster(bootstrap) as cluster:
        admin.create_topic(cluster, topic, partitions=PARTITIONS)
        cluster.topic(topic, expected=True)
        batches = [bytes(rows_of.build(template(size_bytes, per_batch, n), now_ms=now_ms)) for n in range(16)]
        sent = 0
        while sent < rows:
            outgoing = []
            for nth in range(min(ROUND, -(-(rows - sent) // per_batch))):
                outgoing.append(Outgoing(topic, nth % PARTITIONS, bytearray(batches[nth % len(batches)])))
            for result in produce(cluster, outgoing):
                if not isinstance(result, Produced):
                    raise result
            sent += len(outgoing) * per_batch


def write_parquet(bootstrap: str, topic: str, folder: Path) -> int:
    """The same rows as files that Spark can scan, one a partition. Answers how many."""
    folder.mkdir(parents=True)
    rows = 0
    for partition in range(PARTITIONS):
        read = arrow.read(topic, bootstrap=bootstrap, partitions=[partition])
        with pq.ParquetWriter(folder / f"part-{partition}.parquet", read.schema) as writer:
            for batch in read:
                writer.write_batch(batch, row_group_size=200_000)
                rows += len(batch)
    return rows


def contest(folder: Path, setup: dict[str, Any], brokers: Sequence[Running]) -> list[dict[str, Any]]:
    """One driver with one master; its rows, with the brokers' processor time added."""
    setup = {**setup, "broker_pids": {broker.recipe.name: broker.process.pid for broker in brokers}}
    given, answer = folder / "setup.json", folder / "figures.json"
    given.write_text(json.dumps(setup))
    worker = Path(__file__).with_name("spark_contest.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(given), str(answer)],
        stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False, timeout=WORKER_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"the driver failed:\n{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(answer.read_text())
    return found


def show(figures: list[dict[str, Any]]) -> str:
    lines = []
    for row in figures:
        beside = {
            other["contestant"]: other["rows_per_s"]
            for other in figures
            if (other["size_bytes"], other["master"]) == (row["size_bytes"], row["master"])
        }
        scan = beside.get("parquet scan")
        lines.append(
            {
                "value": f"{row['size_bytes']} B",
                "master": row["master"],
                "contestant": row["contestant"],
                "Mrows/s": f"{row['rows_per_s'] / 1e6:.2f}",
                "x parquet scan": f"{row['rows_per_s'] / scan:.2f}" if scan else "-",
                "CPU-s/Mrow": f"{row['cpu_s_per_million']:.2f}",
                "of it the broker's": f"{row['broker_cpu_s_per_million']:.2f}",
                "others' CPU %": f"{row['others_cpu_percent']:.0f}",
            }
        )
    return table(list(lines[0]), [list(line.values()) for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100,1024", help="value sizes in bytes")
    parser.add_argument("--masters", default="local[1],local[2]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows, for a quick look")
    parser.add_argument("--only", help="contestants by name, comma separated")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="spark-rows-"))
    running: list[Running] = []
    figures: list[dict[str, Any]] = []
    missing: list[str] = []
    jars: list[str] = []
    try:
        running.append(start(CONTESTANTS["headrace"], folder / "headrace"))
        try:
            jars = connector_jars()
            running.append(start(CONTESTANTS["kafka"], folder / "kafka"))
        except Missing as reason:
            missing.append(f"Spark's Kafka connector or Kafka: {reason}")
        for size_bytes in map(int, asked.sizes.split(",")):
            topic, parquet = f"rows-{size_bytes}", folder / f"parquet-{size_bytes}"
            wanted = int(ROWS.get(size_bytes, 1_000_000) * asked.share)
            for broker in running:
                fill(f"{HOST}:{broker.port}", topic, size_bytes, wanted)
            rows = write_parquet(f"{HOST}:{running[0].port}", topic, parquet)
            say(f"{rows} rows of {size_bytes} B in {len(running)} brokers and as Parquet")
            for master in asked.masters.split(","):
                setup = {
                    "master": master,
                    "size_bytes": size_bytes,
                    "topic": topic,
                    "rows": rows,
                    "parquet": str(parquet),
                    "folder": str(folder),
                    "rounds": asked.rounds,
                    "only": asked.only.split(",") if asked.only else [],
                    "jars": jars,
                    "bootstraps": {broker.recipe.name: f"{HOST}:{broker.port}" for broker in running},
                }
                say(f"{size_bytes} B, {master}")
                figures += contest(folder, setup, running)
        print(" | ".join(f"{key}: {value}" for key, value in machine().items()))
        print(show(figures))
        for absence in missing:
            print(f"missing: {absence}")
        if asked.json:
            asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    finally:
        for broker in running:
            processes.stop(broker.process)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
