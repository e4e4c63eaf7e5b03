"""What each record kernel costs: `python bench/record_kernels.py [TREE ...]` prints ns of processor time a record.

Records of 100 bytes with a key of 8, a thousand a batch, in memory, CRCs included. With several checkouts they take
turns, each turn in a process of its own; figures are medians over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import table

HERE = Path(__file__).resolve().parent.parent
RECORDS = 1000
REPEATS = 30
NOW_MS = 1_700_000_000_000
VALUE = bytes(range(100))
TOPIC = "orders"
PARTITIONS = 16


class Owner:
    """A producer's side of a router: batches that are full go nowhere."""

    def __init__(self) -> None:
        from headrace.records import router

        self.lock = threading.Lock()
        self.quota = router.Quota(1 << 40, 1 << 40)
        owner: Any = self
        self.made = router.Router(owner, self.lock, self.quota, -1)

    def find(self, topic: str, _partition: int) -> None:
        from headrace.records import router

        self.made.topics[topic] = router.TopicSlots(
            topic, [router.PartitionSlot(topic, nth) for nth in range(PARTITIONS)]
        )

    def roll_batch(self, slot: Any, _batch: Any) -> None:
        from headrace.records import builder

        owner: Any = self
        slot.batch = builder.OpenBatch(builder.SentBatch(slot.topic, slot.partition, owner), 0, 1 << 20)


def errands() -> dict[str, Callable[[], object]]:
    """What is done to a thousand records, by the kernel that does it."""
    import pyarrow as pa

    from headrace.records import arrow, builder, consumer_records, kernel, key_hashes

    new = [(NOW_MS + nth, b"%08d" % nth, VALUE, ()) for nth in range(RECORDS)]
    built = bytes(kernel.build(new))
    keys = [key for _, key, _, _ in new]
    rows = pa.RecordBatch.from_pydict({"key": pa.array(keys, pa.binary()), "value": pa.array([VALUE] * RECORDS)})
    decoder = arrow.Decoder(TOPIC, 0)
    owner: Any = Owner()

    def index() -> None:
        made = key_hashes.KeyTable(0, NOW_MS)
        made.attach(memoryview(bytearray(4 * 2048)).cast("I"), memoryview(bytearray(20 * RECORDS)).cast("I"))
        made.add(built)
        made.detach()

    def open_batch() -> None:
        batch = builder.OpenBatch(builder.SentBatch(TOPIC, 0, owner), 0, 1 << 20)
        for at_ms, key, value, headers in new:
            batch.append(at_ms, key, value, headers)
        batch.seal()

    def send() -> None:
        for key in keys:
            owner.made.send_async(TOPIC, VALUE, key=key)

    return {
        "kernel: decode": lambda: kernel.columns(built),
        "kernel: build": lambda: kernel.build(new),
        "key_hashes: index": index,
        "builder: append and seal": open_batch,
        "router: send by key": send,
        "consumer_records: receive": lambda: consumer_records.receive(built, TOPIC, 0, 0, RECORDS, []),
        "arrow_decoder: decode": lambda: list(decoder.decode(built)),
        "arrow_encoder: build": lambda: arrow.Builder(rows, now_ms=NOW_MS).build(0, RECORDS),
        "arrow_encoder: partitions": lambda: arrow.partitions_of(rows["key"], PARTITIONS),
    }


def turn() -> dict[str, float]:
    """Nanoseconds a record, the best of many."""
    taken = {}
    for name, errand in errands().items():
        best = float("inf")
        for _ in range(REPEATS):
            began = time.process_time_ns()
            errand()
            best = min(best, (time.process_time_ns() - began) / RECORDS)
        taken[name] = best
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="tree", help="checkouts; this one by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.turn:
        print(json.dumps(turn()))
        return
    trees = given.trees or [HERE]
    taken: dict[str, list[list[float]]] = {}
    for _ in range(given.rounds):
        for nth, tree in enumerate(trees):
            environment = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
            ran = subprocess.run([sys.executable, __file__, "--turn"], env=environment, capture_output=True, check=True)
            for name, figure in json.loads(ran.stdout).items():
                taken.setdefault(name, [[] for _ in trees])[nth].append(figure)
    rows = [[name, *(f"{statistics.median(each):.1f}" for each in figures)] for name, figures in taken.items()]
    print(table(["ns a record", *(str(tree) for tree in trees)], rows))


if __name__ == "__main__":
    main()
