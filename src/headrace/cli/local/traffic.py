"""A producer and a reader per partition that go on whatever happens to the brokers, and keep the partition's account.

The producer is idempotent and waits for acks=-1: a batch is sent again, the same bytes, until it is acknowledged, and
the next one is made after that. Each has a thread and a connection of its own, so a partition without a leader does not
hold up the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from headrace.cli.local.account import Account
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.fetch import Position, fetch
from headrace.client.admin.produce import Produced, init_producer_id, produce
from headrace.client.fetch_requests import FetchLimits
from headrace.client.producer.request import Outgoing
from headrace.errors import HeadraceError
from headrace.records import kernel

BATCH_INTERVAL_S: Final = 0.02
PRODUCE_TIMEOUT_MS: Final = 5000
CLIENT_TIMEOUT_MS: Final = 5000
PAUSE_MAX_MS: Final = 200
FETCH_WAIT_MS: Final = 200
FINISH_WITHIN_S: Final = 90.0
VALUE_BYTES: Final = 100

_SEQUENCE_MASK: Final = 0x7FFFFFFF


def connect(bootstrap: str) -> Cluster:
    retry = Retry(within_ms=CLIENT_TIMEOUT_MS, pause_max_ms=PAUSE_MAX_MS)
    return Cluster(bootstrap, timeout_ms=CLIENT_TIMEOUT_MS, retry=retry)


class PartitionTraffic:
    def __init__(self, bootstrap: str, topic: str, partition: int, rate: float) -> None:
        self.account = Account()
        self.failures: list[str] = []
        self.longest_wait_s = 0.0
        """From the first send of a batch to its acknowledgement."""
        self._bootstrap = bootstrap
        self._topic = topic
        self._partition = partition
        self._batch_records = max(1, round(rate * BATCH_INTERVAL_S))
        self._interval_s = self._batch_records / rate
        self._stop_sending = threading.Event()
        self._stop_reading = threading.Event()
        self._give_up_at = float("inf")
        self._sender = threading.Thread(target=self._guard, args=(self._send,), daemon=True)
        self._reader = threading.Thread(target=self._guard, args=(self._read,), daemon=True)

    def start(self) -> None:
        self._sender.start()
        self._reader.start()

    def stop_sending(self) -> None:
        """Make no more batches; the one on its way is waited for, up to a limit."""
        self._give_up_at = time.monotonic() + FINISH_WITHIN_S
        self._stop_sending.set()

    @property
    def finished(self) -> bool:
        """Nothing is on its way, and everything acknowledged was read, or never will be."""
        if self._sender.is_alive():
            return False
        return self.account.all_read or not self._reader.is_alive() or time.monotonic() > self._give_up_at

    def close(self) -> None:
        self._stop_sending.set()
        self._stop_reading.set()
        self._sender.join()
        self._reader.join()

    def _guard(self, work: Callable[[Cluster], None]) -> None:
        try:
            with connect(self._bootstrap) as cluster:
                cluster.reach()
                work(cluster)
        except HeadraceError as error:
            self.failures.append(str(error))

    def _send(self, cluster: Cluster) -> None:
        identity = init_producer_id(cluster)
        next_at = time.monotonic()
        while not self._stop_sending.wait(max(0.0, next_at - time.monotonic())):
            first, count = self.account.sent, self._batch_records
            now_ms = time.time_ns() // 1_000_000
            values = [b"%d" % number for number in range(first, first + count)]
            batch = kernel.build(
                [(now_ms, None, value.ljust(VALUE_BYTES, b" "), ()) for value in values],
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                base_sequence=first & _SEQUENCE_MASK,
            )
            self.account.sent += count
            began = time.monotonic()
            done = self._deliver(cluster, Outgoing(self._topic, self._partition, batch))
            if done is None:
                return
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)
            self.account.was_acknowledged(first, count, None if done.base_offset < 0 else done.base_offset)
            # After an outage it goes on at its rate; what was not sent meanwhile is not made up for.
            next_at = max(next_at + self._interval_s, began)

    def _deliver(self, cluster: Cluster, outgoing: Outgoing) -> Produced | None:
        while True:
            (result,) = produce(cluster, [outgoing], timeout_ms=PRODUCE_TIMEOUT_MS)
            if isinstance(result, Produced):
                return result
            if not result.mapping.retriable or time.monotonic() > self._give_up_at:
                self.failures.append(str(result))
                return None

    def _read(self, cluster: Cluster) -> None:
        offset = 0
        limits = FetchLimits(max_wait_ms=FETCH_WAIT_MS)
        while not self._stop_reading.is_set():
            try:
                (fetched,) = fetch(cluster, [Position(self._topic, self._partition, offset)], limits)
            except HeadraceError as error:
                if not error.mapping.retriable:
                    raise
                continue
            for header, batch in fetched.whole_batches():
                for record in kernel.records(batch):
                    if record.offset >= offset:
                        self.account.was_read(record.offset, int(record.value or b"-1"))
                offset = header.next_offset
