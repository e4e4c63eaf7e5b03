"""What a transaction costs our own producer: `python bench/client_transactions.py` from the clone's root.

The same records in four ways, by producers that take turns in one process, on one broker of default settings:

    committed     in portions, each a transaction: the program goes on when the commit is answered
    behind        the same with `wait=False`: the program fills the next one while one is committed
    flushed       in the same portions without transactions, each flushed: the same batches, and the program goes on
                  when all of them are acknowledged. This is what a commit is to be measured by: both tell the program,
                  after each portion, that it can be relied on
    free          without transactions or portions, one flush at the end: what it costs to be told so often

A commit is one more round trip than a flush, after the one that the flush waits for; a program that waits for each
cannot overlap the two, as only what is acknowledged may be committed. What a transaction costs the broker beside (its
record at the coordinator, a marker for each partition) is done while the program fills the next one's batches, as far
as there is a processor for it. Figures are medians over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from report import machine, table

from headrace import Admin, Producer
from headrace.testing import TemporaryBroker

PARTITIONS = 4
SIZES = {1_000: 60, 10_000: 20, 100_000: 3}
"""Records of a portion, and how many portions a round has."""
TOPIC = "portions"
WARM = 1_000, 20


def committed(producer: Producer, value: bytes, size: int, portions: int) -> None:
    for _ in range(portions):
        with producer.transaction() as transaction:
            send = transaction.send
            for _ in range(size):
                send(TOPIC, value)


def behind(producer: Producer, value: bytes, size: int, portions: int) -> None:
    for _ in range(portions):
        with producer.transaction(wait=False) as transaction:
            send = transaction.send
            for _ in range(size):
                send(TOPIC, value)
    transaction.wait()


def flushed(producer: Producer, value: bytes, size: int, portions: int) -> None:
    send = producer.send_async
    for _ in range(portions):
        for _ in range(size):
            send(TOPIC, value)
        producer.flush()


def free(producer: Producer, value: bytes, size: int, portions: int) -> None:
    flushed(producer, value, size * portions, 1)


Load = Callable[[Producer, bytes, int, int], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=100, help="of a record's value")
    given = parser.parse_args()
    value, heading = b"x" * given.bytes, "; ".join(f"{key}: {found}" for key, found in machine().items())
    rows = []
    with TemporaryBroker() as broker:
        with Admin(broker.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS)
        with (
            Producer(broker.bootstrap) as plain,
            Producer(broker.bootstrap, transactional_id="bench") as transactional,
            Producer(broker.bootstrap, transactional_id="bench, behind") as pipelined,
        ):
            ways: list[tuple[Load, Producer]] = [
                *((free, plain), (flushed, plain)),
                *((committed, transactional), (behind, pipelined)),
            ]
            for way, producer in ways:
                way(producer, value, *WARM)
            for size, portions in SIZES.items():
                taken: dict[Load, list[float]] = {way: [] for way, _ in ways}
                for nth in range(given.rounds):
                    for way, producer in ways if nth % 2 == 0 else reversed(ways):
                        began = time.perf_counter()
                        way(producer, value, size, portions)
                        taken[way].append((time.perf_counter() - began) / portions)
                seconds = [statistics.median(taken[way]) for way, _ in ways]
                free_s, flushed_s, committed_s, behind_s = seconds
                rates = [f"{size / each:,.0f}" for each in seconds]
                ratios = [f"{of / by:.2f}" for by in (committed_s, behind_s) for of in (flushed_s, free_s)]
                rows.append([f"{size:,}", *rates, *ratios, f"{(committed_s - flushed_s) * 1000:.2f}"])
    print(heading)
    print(f"{PARTITIONS} partitions, values of {given.bytes} bytes, medians of {given.rounds} rounds\n")
    head = ["records", "free/s", "flushed/s", "committed/s", "behind/s"]
    head += [f"{way}/{of}" for way in ("committed", "behind") for of in ("flushed", "free")] + ["more ms each"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
