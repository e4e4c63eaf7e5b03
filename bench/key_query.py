"""The key index of a broker: what it costs to build beside the append, and what a query by key takes.

    python bench/key_query.py --records 10000000 --keys 1000000

One broker, two topics that get the same record batches in turns of one run: one without an index, one with. Then
queries of keys drawn evenly, each answer compared with the number of records that the key has; the same while records
are appended; and the index made again from the log after its files were removed. Prints a line of JSON per step.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import processes

from headrace.client.admin import operations, query
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.produce import Produced, produce
from headrace.client.producer.request import Outgoing
from headrace.records import kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord

PLAIN: Final = "plain"
KEYED: Final = "keyed"
BATCH_RECORDS: Final = 500
ROUND_BATCHES: Final = 64
POOL_RECORDS: Final = 1_000_000
READY_S: Final = 60.0
CATCH_UP_S: Final = 600.0
START_MS: Final = 1_750_000_000_000


class Serving:
    """A broker on a folder."""

    def __init__(self, folder: Path, layout: str | None) -> None:
        program = str(Path(sys.executable).parent / "headrace")
        command = [program, "serve", "--data", str(folder), "--listen", "127.0.0.1:0", "--set", "http.listen=off"]
        command += ["--set", f"log.layout={layout}"] if layout else []
        with (folder.parent / "broker.stderr").open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line.startswith("ready "):
            raise SystemExit(f"the broker did not start: {(folder.parent / 'broker.stderr').read_text()[-2000:]}")
        self.bootstrap = dict(part.split("=", 1) for part in line.split()[1:])["kafka"]

    def stop(self) -> None:
        processes.stop(self.process)


class Pool:
    """Ready-made batches per partition, and how often each key is in them."""

    def __init__(self, options: argparse.Namespace) -> None:
        draw = random.Random(1)
        self.keys: collections.Counter[int] = collections.Counter()
        self.batches: list[tuple[int, bytearray]] = []
        waiting: list[list[NewRecord]] = [[] for _ in range(options.partitions)]
        for nth in range(min(POOL_RECORDS, options.records)):
            number = draw.randrange(options.keys)
            self.keys[number] += 1
            records = waiting[number % options.partitions]
            records.append((START_MS + nth, key(number), draw.randbytes(options.value_bytes), ()))
            if len(records) == BATCH_RECORDS:
                self._take(number % options.partitions, records, options.codec)
                waiting[number % options.partitions] = []
        for partition, records in enumerate(waiting):
            if records:
                self._take(partition, records, options.codec)

    def _take(self, partition: int, records: list[NewRecord], codec: str) -> None:
        self.batches.append((partition, kernel.build(records, Codec[codec.upper()])))


def key(number: int) -> bytes:
    return b"key-%08d" % number


def append(cluster: Cluster, topic: str, pool: Pool) -> float:
    """All of the pool once; the seconds that took."""
    began = time.perf_counter()
    for at in range(0, len(pool.batches), ROUND_BATCHES):
        outgoing = [Outgoing(topic, partition, batch) for partition, batch in pool.batches[at : at + ROUND_BATCHES]]
        answers = produce(cluster, outgoing, acks=1)
        assert all(isinstance(answer, Produced) for answer in answers), answers
    return time.perf_counter() - began


def behind(cluster: Cluster) -> int:
    return sum(position.behind for position in query.index_positions(cluster, cluster.topic(KEYED)))


def await_caught_up(cluster: Cluster) -> float:
    began = time.perf_counter()
    while behind(cluster):
        if time.perf_counter() - began > CATCH_UP_S:
            raise SystemExit("the index does not catch up")
        time.sleep(0.01)
    return time.perf_counter() - began


def build(cluster: Cluster, pid: int, pool: Pool, rounds: int) -> dict[str, Any]:
    """Plain and keyed in turns; how fast each was appended, how far the index was behind, and the broker's processor
    time, which says more than the rates where other programs run beside."""
    plain_s = keyed_s = caught_up_s = plain_cpu_s = keyed_cpu_s = 0.0
    most_behind = 0
    for _ in range(rounds):
        before = processes.cpu_seconds(pid)
        plain_s += append(cluster, PLAIN, pool)
        between = processes.cpu_seconds(pid)
        keyed_s += append(cluster, KEYED, pool)
        most_behind = max(most_behind, behind(cluster))
        caught_up_s += await_caught_up(cluster)
        plain_cpu_s += between - before
        keyed_cpu_s += processes.cpu_seconds(pid) - between
    count = rounds * sum(pool.keys.values())
    return {
        "records": count,
        "append_without_index_per_s": round(count / plain_s),
        "append_with_index_per_s": round(count / keyed_s),
        "index_kept_up_with_per_s": round(count / (keyed_s + caught_up_s)),
        "most_behind_after_a_million": most_behind,
        "cpu_us_per_record_without_index": round(plain_cpu_s / count * 1e6, 3),
        "cpu_us_per_record_with_index": round(keyed_cpu_s / count * 1e6, 3),
    }


def ask(
    cluster: Cluster, pid: int, pool: Pool, rounds: int, options: argparse.Namespace, queries: int, *, exact: bool
) -> dict[str, Any]:
    draw = random.Random(2)
    took: list[float] = []
    found_in_all = 0
    cpu_s = processes.cpu_seconds(pid)
    for _ in range(queries):
        number = draw.randrange(options.keys)
        began = time.perf_counter()
        found = list(query.find(cluster, query.RecordQuery(KEYED, key(number))))
        took.append(time.perf_counter() - began)
        expected = rounds * pool.keys[number]
        assert len(found) == expected if exact else len(found) >= expected, (number, len(found), expected)
        assert all(record.key == key(number) for _, record in found)
        found_in_all += len(found)
    took.sort()
    cpu_s = processes.cpu_seconds(pid) - cpu_s
    return {
        "queries": len(took),
        "records_a_query": round(found_in_all / len(took), 2),
        "p50_ms": round(took[len(took) // 2] * 1000, 3),
        "p99_ms": round(took[len(took) * 99 // 100] * 1000, 3),
        "max_ms": round(took[-1] * 1000, 3),
        "broker_cpu_ms_a_query": round(cpu_s / len(took) * 1000, 3),
    }


def ask_beside_appends(broker: Serving, pool: Pool, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """Queries while another connection appends to the same topic without a pause."""
    stop = threading.Event()
    appended = 0
    pid = broker.process.pid

    def appending() -> None:
        nonlocal appended
        with Cluster(broker.bootstrap) as cluster:
            while not stop.is_set():
                append(cluster, KEYED, pool)
                appended += 1

    thread = threading.Thread(target=appending)
    began = time.perf_counter()
    thread.start()
    with Cluster(broker.bootstrap) as cluster:
        figures = ask(cluster, pid, pool, rounds, options, max(100, options.queries // 10), exact=False)
        stop.set()
        thread.join()
    rate = appended * sum(pool.keys.values()) / (time.perf_counter() - began)
    return {**figures, "appended_beside_per_s": round(rate)}


def index_bytes(folder: Path) -> dict[str, int]:
    files = [path.stat() for path in folder.rglob("*.keys")]
    return {"used": sum(stat.st_size for stat in files), "on_disk": sum(stat.st_blocks * 512 for stat in files)}


def show(step: str, **figures: Any) -> None:
    print(json.dumps({"step": step, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/key_query.py", description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--codec", default="none", choices=[codec.name.lower() for codec in Codec])
    parser.add_argument("--layout", choices=("partitioned", "shared"))
    options = parser.parse_args()
    pool = Pool(options)
    rounds = max(1, options.records // sum(pool.keys.values()))
    folder = Path(tempfile.mkdtemp(prefix="headrace-keys-"))
    broker = Serving(folder / "data", options.layout)
    try:
        with Cluster(broker.bootstrap) as cluster:
            pid = broker.process.pid
            for topic, indexed in ((PLAIN, "false"), (KEYED, "true")):
                operations.create_topic(cluster, topic, partitions=options.partitions, configs={"key.index": indexed})
            built = build(cluster, broker.process.pid, pool, rounds)
            show("build", **built)
            sizes = index_bytes(folder)
            show(
                "size",
                **{f"{name}_bytes_per_record": round(size / built["records"], 2) for name, size in sizes.items()},
            )
            show("query", **ask(cluster, pid, pool, rounds, options, options.queries, exact=True))
        broker.stop()
        for path in folder.rglob("*.keys"):
            path.unlink()
        broker = Serving(folder / "data", options.layout)
        with Cluster(broker.bootstrap) as cluster:
            pid = broker.process.pid
            seconds = await_caught_up(cluster)
            show("rebuild", seconds=round(seconds, 2), records_per_s=round(built["records"] / seconds))
            show("query after rebuild", **ask(cluster, pid, pool, rounds, options, options.queries, exact=True))
        show("query beside appends", **ask_beside_appends(broker, pool, rounds, options))
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
