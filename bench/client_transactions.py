"""What a transaction costs our own producer: `python bench/client_transactions.py` from the clone's root.

Portions of records by one producer with a transactional id, each a transaction, and by one without, each flushed; they
take turns in one process, on one broker of default settings. Figures are medians over the rounds. What a transaction
takes longer is its end: the coordinator writes it down, and a marker into each partition.
"""

import argparse
import statistics
import time

from headrace import Admin, Producer
from headrace.testing import TemporaryBroker

PARTITIONS = 4
VALUE = b"x" * 100
SIZES = {1_000: 60, 10_000: 20, 100_000: 3}
"""Records of a portion, and how many portions a round has."""
TOPIC = "portions"


def in_transactions(producer: Producer, size: int, portions: int) -> float:
    began = time.perf_counter()
    for _ in range(portions):
        with producer.transaction() as transaction:
            send = transaction.send
            for _ in range(size):
                send(TOPIC, VALUE)
    return time.perf_counter() - began


def flushed(producer: Producer, size: int, portions: int) -> float:
    began = time.perf_counter()
    for _ in range(portions):
        send = producer.send_async
        for _ in range(size):
            send(TOPIC, VALUE)
        producer.flush()
    return time.perf_counter() - began


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rounds", type=int, default=7)
    rounds = given.parse_args().rounds
    with TemporaryBroker() as broker:
        with Admin(broker.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS)
        with (
            Producer(broker.bootstrap) as plain,
            Producer(broker.bootstrap, transactional_id="bench") as transactional,
        ):
            flushed(plain, 1_000, 5)
            in_transactions(transactional, 1_000, 5)
            print(f"{'records':>8}  {'flushed/s':>12}  {'committed/s':>12}  {'ratio':>6}  {'more ms each':>12}")
            for size, portions in SIZES.items():
                without, within = [], []
                for _ in range(rounds):
                    without.append(flushed(plain, size, portions) / portions)
                    within.append(in_transactions(transactional, size, portions) / portions)
                plain_s, transaction_s = statistics.median(without), statistics.median(within)
                print(
                    f"{size:>8,}  {size / plain_s:>12,.0f}  {size / transaction_s:>12,.0f}  "
                    f"{plain_s / transaction_s:>6.2f}  {(transaction_s - plain_s) * 1000:>12.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
