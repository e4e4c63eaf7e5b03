"""Rows a second into Spark: `python bench/spark_rows.py --json FIGURES --markdown TABLE` from the clone's root.

One Headrace broker (and Apache Kafka where Maven answers) on the same cores as Spark, topics with the same rows, the
same rows as Parquet. For each size and master one driver (bench/spark_contest.py) lets all contestants take turns in
one session. Keys are of ten thousand; values are random and none comes twice, so that Parquet has to read them all and
cannot keep them as a dictionary. Its files are as Spark writes them: Snappy, row groups of about 128 MB.

Every size has three sets of rows: `all` is measured, `warm` a tenth of it for the compiler of the JVM, and `few` shows
what a query costs before it reads: planning, processes, connections. All figures are with `load()`.

Spark's own Kafka connector comes from Maven into the git-ignored `.work/spark-kafka`. Where that fails it is named as
missing and the run goes on.
"""

import argparse
import compileall
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import processes
import pyarrow as pa
import pyarrow.parquet as pq
from contestants import CACHE, CONTESTANTS, HOST, MAVEN_TIMEOUT_S, Missing, Running, start
from report import machine, table
from run import say

import headrace
from headrace import arrow
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import list_offsets
from headrace.client.admin.produce import Produced, produce
from headrace.client.fetch_requests import LATEST
from headrace.client.producer.request import Outgoing
from headrace.records import arrow as rows_of

ROWS: Final = {100: 10_000_000, 1024: 2_000_000}
WARM_SHARE: Final = 0.1
FEW_ROWS: Final = 4_000
BATCH_BYTES: Final = 100_000
PARTITIONS: Final = 4
KEY_COUNT: Final = 10_000
ROUND: Final = 64
ROW_GROUP_BYTES: Final = 128 << 20
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


def random_rows(draw: np.random.Generator, size_bytes: int, rows: int) -> pa.RecordBatch:
    """Rows with short keys and values of random printable characters."""
    keys = pa.array([b"key-%05d" % n for n in draw.integers(0, KEY_COUNT, rows)], type=pa.binary())
    data = (np.frombuffer(draw.bytes(size_bytes * rows), np.uint8) & 63) + np.uint8(48)
    offsets = np.arange(0, size_bytes * (rows + 1), size_bytes, dtype=np.int32)
    values = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])


def fill(bootstraps: Sequence[str], topic: str, size_bytes: int, rows: int) -> None:
    """The topic with `rows` rows in batches of about BATCH_BYTES, spread over PARTITIONS, the same at every broker."""
    per_batch = max(1, min(rows // PARTITIONS, BATCH_BYTES // size_bytes))
    draw = np.random.default_rng(size_bytes)
    now_ms = int(time.time() * 1000)  # older records would go by retention in mid-run
    clusters = [Cluster(bootstrap) for bootstrap in bootstraps]
    try:
        for cluster in clusters:
            operations.create_topic(cluster, topic, partitions=PARTITIONS)
            cluster.topic(topic, expected=True)
        sent = 0
        while sent < rows:
            count = min(ROUND, -(-(rows - sent) // per_batch))
            batches = [rows_of.build(random_rows(draw, size_bytes, per_batch), now_ms=now_ms) for _ in range(count)]
            for cluster in clusters:
                outgoing = [Outgoing(topic, nth % PARTITIONS, bytearray(each)) for nth, each in enumerate(batches)]
                for result in produce(cluster, outgoing):
                    if not isinstance(result, Produced):
                        raise result
            sent += count * per_batch
    finally:
        for cluster in clusters:
            cluster.close()


def write_parquet(bootstrap: str, topic: str, size_bytes: int, folder: Path) -> int:
    """The same rows as files that Spark can scan, one a partition. Answers how many."""
    folder.mkdir(parents=True)
    rows = 0
    for partition in range(PARTITIONS):
        read = arrow.read(topic, bootstrap=bootstrap, partitions=[partition])
        with pq.ParquetWriter(folder / f"part-{partition}.parquet", read.schema) as writer:
            for group in row_groups(read, ROW_GROUP_BYTES // size_bytes):
                writer.write_table(group, row_group_size=len(group))
                rows += len(group)
    return rows


def row_groups(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= rows:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def prepare(folder: Path, size_bytes: int, share: float, bootstraps: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Topics and files of one size."""
    wanted = int(ROWS.get(size_bytes, 1_000_000) * share)
    sets = {}
    for name, rows in (("few", FEW_ROWS), ("warm", int(wanted * WARM_SHARE)), ("all", wanted)):
        topic, parquet = f"{name}-{size_bytes}", folder / f"parquet-{name}-{size_bytes}"
        fill(bootstraps, topic, size_bytes, rows)
        stored = write_parquet(bootstraps[0], topic, size_bytes, parquet)
        for bootstrap in bootstraps:
            with Cluster(bootstrap) as cluster:
                ends = list_offsets(cluster, topic, dict.fromkeys(range(PARTITIONS), LATEST))
            if sum(end.offset for end in ends.values()) != stored:
                raise SystemExit(f"{bootstrap} has not the {stored} rows of {topic}")
        sets[name] = {"topic": topic, "parquet": str(parquet), "rows": stored}
    say(f"{sets['all']['rows']} rows of {size_bytes} B in {len(bootstraps)} brokers and as Parquet")
    return sets


def contest(folder: Path, setup: dict[str, Any]) -> list[dict[str, Any]]:
    """One driver with one master: its figures."""
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
            other["contestant"]: other
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
                "x Parquet scan": f"{row['rows_per_s'] / scan['rows_per_s']:.2f}" if scan else "-",
                "before reading s": f"{row['fixed_s']:.2f}",
                "Mrows/s after that": f"{row['steady_rows_per_s'] / 1e6:.2f}",
                "CPU-s/Mrow": f"{row['cpu_s_per_million']:.2f}",
                "JVM": f"{row['jvm_cpu_s_per_million']:.2f}",
                "Python": f"{row['python_cpu_s_per_million']:.2f}",
                "broker": f"{row['broker_cpu_s_per_million']:.2f}",
                "others' CPU %": f"{row['others_cpu_percent']:.0f}",
                "rounds": str(row["rounds"]),
            }
        )
    return table(list(lines[0]), [list(line.values()) for line in lines])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100,1024", help="value sizes in bytes")
    parser.add_argument("--masters", default="local[2],local[1]")
    parser.add_argument("--rounds", type=int, default=3, help="of the quick contestants; the slow ones have one")
    parser.add_argument("--within-s", type=float, default=900.0, help="no further round is begun once it would be over")
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows, for a quick look")
    parser.add_argument("--only", help="contestants by name, semicolons between")
    parser.add_argument("--conf", action="append", default=[], help="a setting of Spark, name=value; repeat")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--markdown", type=Path, help="write the table here too")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # brokers are stopped then too
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="spark-rows-"))
    running: list[Running] = []
    figures: list[dict[str, Any]] = []
    told = [" | ".join(f"{key}: {value}" for key, value in machine().items())]
    # As an install does: processes of Spark that start in mid-run are not to compile what they import.
    compileall.compile_dir(str(Path(headrace.__file__).parent), quiet=2)
    jars: list[str] = []
    try:
        running.append(start(CONTESTANTS["headrace"], folder / "headrace"))
        try:
            if not asked.only or "connector" in asked.only:
                jars = connector_jars()
                running.append(start(CONTESTANTS["kafka"], folder / "kafka"))
        except Missing as reason:
            told.append(f"missing: Spark's Kafka connector or Kafka: {reason}")
        bootstraps = {broker.recipe.name: f"{HOST}:{broker.port}" for broker in running}
        sizes, masters = [int(size) for size in asked.sizes.split(",")], asked.masters.split(",")
        sets = {size: prepare(folder, size, asked.share, list(bootstraps.values())) for size in sizes}
        turns = [(size, master) for size in sizes for master in masters]
        for nth, (size, master) in enumerate(turns):
            left_s = max(0.0, began + asked.within_s - time.monotonic())
            say(f"{size} B, {master}, {left_s:.0f} s left")
            setup = {
                "master": master,
                "size_bytes": size,
                "sets": sets[size],
                "folder": str(folder),
                "rounds": asked.rounds,
                # Small rows are five times as many.
                "within_s": left_s * (5 if size < 1000 else 2) / sum(5 if s < 1000 else 2 for s, _ in turns[nth:]),
                "only": asked.only.split(";") if asked.only else [],
                "conf": dict(pair.split("=", 1) for pair in asked.conf),
                "jars": jars,
                "bootstraps": bootstraps,
                "broker_pids": {broker.recipe.name: broker.process.pid for broker in running},
            }
            figures += contest(folder, setup)
            if asked.json:
                asked.json.write_text(json.dumps(figures, indent=1) + "\n")
        told.append(f"the run took {time.monotonic() - began:.0f} s")
        text = "\n\n".join(("\n".join(told), show(figures)))
        print(text)
        if asked.markdown:
            asked.markdown.write_text(text + "\n")
    finally:
        for broker in running:
            processes.stop(broker.process)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
