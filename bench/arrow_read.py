"""Topics into Arrow: `python bench/arrow_read.py` from the clone's root.

First the kernel alone: record sets in memory decoded into the default columns, CRC checked, on one core, by records in
a batch. Then, from one Headrace broker on the same machine and taking turns in one run: `headrace.arrow.read`,
confluent-kafka's `consume()` with the records only counted, and the same made into Arrow columns, which is what the
first one gives. Medians over the rounds, and ratios within the run; processor time is the client's, all threads.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition
from contestants import CONTESTANTS, HOST, start
from report import machine, table
from run import say

import headrace.arrow
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.records import arrow_decoder, batch, kernel
from headrace.records.arrow import Decoder

VALUE_BYTES: Final = 100
PER_BATCH: Final = (10, 100, 1_000, 8_000)
KERNEL_ROWS: Final = 200_000
KERNEL_ROUNDS: Final = 15
WRITE_ROWS: Final = 100_000
CONSUME_MAX: Final = 10_000
CONSUME_TIMEOUT_S: Final = 30
NOW_MS: Final = 1_700_000_000_000


def record_set(per_batch: int, key: bytes | None) -> bytes:
    """KERNEL_ROWS records of one partition, as a broker would send them."""
    value = os.urandom(VALUE_BYTES)
    built = kernel.build([(NOW_MS + nth, key, value, []) for nth in range(per_batch)])
    out = bytearray()
    for base_offset in range(0, KERNEL_ROWS, per_batch):
        batch.stamp(built, base_offset, 0)
        out += built
    return bytes(out)


def decode_rates() -> list[dict[str, Any]]:
    """Million records a second of processor time."""
    found = []
    for per_batch in PER_BATCH:
        for key in (None, b"12345678"):
            records, decoder = record_set(per_batch, key), Decoder("bench", 0)
            taken = []
            for _ in range(KERNEL_ROUNDS):
                began = time.process_time()
                rows = sum(len(each) for each in decoder.decode(records))
                taken.append(rows / (time.process_time() - began) / 1e6)
            found.append({
                "per_batch": per_batch, "key_bytes": 0 if key is None else len(key),
                "median_million_per_s": statistics.median(taken), "best_million_per_s": max(taken),
            })  # fmt: skip
    return found


def fill(bootstrap: str, topic: str, rows: int, partitions: int) -> None:
    with Cluster(bootstrap) as cluster:
        operations.create_topic(cluster, topic, partitions=partitions)
    values = os.urandom(VALUE_BYTES * WRITE_ROWS)
    chunk = pa.RecordBatch.from_pydict({
        "key": pa.array([b"%08d" % nth for nth in range(WRITE_ROWS)], pa.binary()),
        "value": pa.array([values[nth * VALUE_BYTES : (nth + 1) * VALUE_BYTES] for nth in range(WRITE_ROWS)]),
    })  # fmt: skip
    written = headrace.arrow.write(topic, (chunk for _ in range(rows // WRITE_ROWS)), bootstrap=bootstrap)
    assert written == rows


def read_arrow(bootstrap: str, topic: str, rows: int, partitions: int) -> int:
    return sum(len(each) for each in headrace.arrow.read(topic, bootstrap=bootstrap))


def consume(bootstrap: str, topic: str, rows: int, partitions: int) -> int:
    return sum(len(messages) for messages in consumed(bootstrap, topic, rows, partitions))


def consume_into_arrow(bootstrap: str, topic: str, rows: int, partitions: int) -> int:
    """The default columns, from lists: the quickest way that the client's interface allows."""
    count = 0
    for messages in consumed(bootstrap, topic, rows, partitions):
        built = pa.RecordBatch.from_pydict({
            "key": pa.array([each.key() for each in messages], pa.binary()),
            "value": pa.array([each.value() for each in messages], pa.binary()),
            "topic": pa.array([each.topic() for each in messages], pa.string()),
            "partition": pa.array([each.partition() for each in messages], pa.int32()),
            "offset": pa.array([each.offset() for each in messages], pa.int64()),
            "timestamp": pa.array([each.timestamp()[1] * 1000 for each in messages], pa.timestamp("us", "UTC")),
            "timestampType": pa.array([each.timestamp()[0] - 1 for each in messages], pa.int32()),
        })  # fmt: skip
        count += len(built)
    return count


def consumed(bootstrap: str, topic: str, rows: int, partitions: int) -> Any:
    consumer = Consumer({
        "bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False,
        "fetch.message.max.bytes": 8 << 20, "queued.max.messages.kbytes": 1 << 20, "check.crcs": True,
    })  # fmt: skip
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    while rows > 0:
        messages = consumer.consume(min(CONSUME_MAX, rows), CONSUME_TIMEOUT_S)
        if not messages:
            raise RuntimeError(f"nothing came for {CONSUME_TIMEOUT_S} s, and {rows} records were still to come")
        rows -= len(messages)
        yield messages
    consumer.close()


Way = Callable[[str, str, int, int], int]
WAYS: Final[dict[str, Way]] = {
    "headrace.arrow.read": read_arrow,
    "confluent-kafka consume, counted": consume,
    "confluent-kafka consume, into Arrow": consume_into_arrow,
}


def read_rates(rows: int, partitions: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians by way of reading; the ways take turns, the first round only warms up."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        broker = start(CONTESTANTS["headrace"], Path(folder) / "headrace")
        try:
            bootstrap = f"{HOST}:{broker.port}"
            say(f"writing {rows:,} records of {VALUE_BYTES} B")
            fill(bootstrap, "bench", rows, partitions)
            for nth in range(rounds + 1):
                for name, way in WAYS.items():
                    began, cpu, of_broker = time.monotonic(), time.process_time(), broker.cpu_seconds()
                    assert way(bootstrap, "bench", rows, partitions) == rows
                    figures = (time.monotonic() - began, time.process_time() - cpu, broker.cpu_seconds() - of_broker)
                    say(f"round {nth}: {name}: {rows / figures[0] / 1e6:.2f} million rows/s")
                    if nth:
                        taken[name].append(figures)
        finally:
            broker.stop()
    million = rows / 1e6
    return {
        name: {
            "rows_per_s": statistics.median(rows / wall for wall, _, _ in figures),
            "client_cpu_s_per_million": statistics.median(cpu / million for _, cpu, _ in figures),
            "broker_cpu_s_per_million": statistics.median(cpu / million for _, _, cpu in figures),
        }
        for name, figures in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="records in the topic")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args()
    if not arrow_decoder.compiled:
        sys.exit("the kernel is not compiled here: run `pip install -e .` with Cython and a C compiler")
    rows = max(1, given.rows // WRITE_ROWS) * WRITE_ROWS
    decoded = decode_rates()
    print(f"Decoding alone, {VALUE_BYTES} B values, CRC checked, one core\n")
    kernel_lines = [
        [str(each["per_batch"]), str(each["key_bytes"]), *(f"{each[n]:.1f}" for n in list(each)[2:])]
        for each in decoded
    ]
    print(table(["records a batch", "key bytes", "million/s, median", "best"], kernel_lines))
    read = read_rates(rows, given.partitions, given.rounds)
    print(f"\nFrom a broker: {rows:,} records of {VALUE_BYTES} B in {given.partitions} partitions\n")
    first = read["headrace.arrow.read"]
    lines = [
        [
            name,
            f"{each['rows_per_s']:,.0f}",
            f"{each['client_cpu_s_per_million']:.3f}",
            f"{each['broker_cpu_s_per_million']:.3f}",
            f"{first['rows_per_s'] / each['rows_per_s']:.1f}",
            f"{each['client_cpu_s_per_million'] / first['client_cpu_s_per_million']:.1f}",
        ]
        for name, each in read.items()
    ]
    head = ["", "rows/s", "client CPU s/million", "broker CPU s/million", "times slower", "times the CPU"]
    print(table(head, lines))
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "decode": decoded, "read": read}, indent=1) + "\n")


if __name__ == "__main__":
    main()
