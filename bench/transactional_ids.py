"""What many transactional ids cost a coordinator: `python bench/transactional_ids.py --ids 1000000 --open 10000`.

Batches as a coordinator writes them are read back into one, as after a start or a failover, without the disk. Prints
the bytes of its log, the processor time that the load takes, and the longest turn of it, the memory that it comes to,
and how long it takes to open an id that is there, and to list what is open.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

from report import table

from headrace.coordinators.record_fields import Record
from headrace.records import kernel
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.transactions.descriptions import ListFilter
from headrace.transactions.limits import TransactionLimits
from headrace.transactions.messages import InitReply, InitRequest, ListedTransaction, Owner
from headrace.transactions.records import encode, encode_key
from headrace.transactions.transaction import State, Transaction
from headrace.virtual.clock import VirtualClock

BATCH_RECORDS = 1000
NOW_MS = 1_700_000_000_000


def rss_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def record(number: int, open_count: int) -> Record:
    is_open = number < open_count
    kept = Transaction(
        10_000_000 + number,
        number % 100,
        State.ONGOING if is_open else State.COMPLETE_COMMIT,
        60_000,
        NOW_MS,
        NOW_MS,
        frozenset({("orders", number % 64), ("payments", number % 16)}) if is_open else frozenset(),
        number % 1000,
        2,
        10_000_000 + number,
        max(0, number % 100 - 1),
        owner=Owner(f"client-{number % 500}", "10.0.12.34"),
    )
    return encode_key(f"orders-service-{number:08d}"), encode(kept)


def written(ids: int, open_count: int) -> list[bytearray]:
    batches = []
    for first in range(0, ids, BATCH_RECORDS):
        records = [record(number, open_count) for number in range(first, min(ids, first + BATCH_RECORDS))]
        batches.append(kernel.build_with_header([(NOW_MS, key, value, ()) for key, value in records])[0])
    return batches


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--open", type=int, default=10_000, help="so many of them have an open transaction")
    options = parser.parse_args()
    batches = written(options.ids, options.open)
    before_mb = rss_mb()
    clock = VirtualClock()
    coordinator = TransactionCoordinator(
        clock,
        lambda _partition, _epoch, _records, done: done(0),
        1,
        lambda done: done(1),
        lambda _request, _wanted, _done: None,
        TransactionLimits(ids_max=options.ids * 2),
    )
    loading = coordinator.lead(0, 1)

    def load(batch: bytearray) -> None:
        found = kernel.records(memoryview(batch))
        loading.replay((bytes(one.key), one.value) for one in found if one.key is not None)

    turns = [seconds(partial(load, batch)) for batch in batches]
    opening_s = seconds(loading.ready)
    later_s = seconds(lambda: clock.advance(0.001))
    after_mb = rss_mb()
    replies: list[InitReply] = []
    last = f"orders-service-{options.ids - 1:08d}"

    def init_often() -> None:
        for _ in range(1000):
            coordinator.init(last, InitRequest(60_000), replies.append)

    init_s = seconds(init_often)
    assert all(reply.error_code == 0 for reply in replies)
    wanted = ListFilter(frozenset({"Ongoing"}))

    def list_open() -> list[ListedTransaction]:
        slices = coordinator.list_transactions(wanted)
        return [] if isinstance(slices, int) else [one for part in slices for one in part]

    rows = [
        ["transactional ids", f"{options.ids:,}, {options.open:,} of them with an open transaction"],
        ["log", f"{sum(map(len, batches)) / 1e6:.0f} MB"],
        ["load", f"{sum(turns) + opening_s + later_s:.2f} s"],
        [
            "longest turn of it",
            f"{max(*turns, opening_s) * 1000:.0f} ms ({BATCH_RECORDS:,} records, or the opening of 500)",
        ],
        ["memory", f"{after_mb - before_mb:.0f} MB, {(after_mb - before_mb) * 1e6 / options.ids:.0f} B an id"],
        ["open an id", f"{init_s * 1000:.0f} µs"],
        ["list what is open", f"{seconds(list_open) * 1000:.0f} ms"],
    ]
    print(table(["", "figure"], rows))


if __name__ == "__main__":
    main()
