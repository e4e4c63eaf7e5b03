"""Producers, group members and a watcher of watermarks that live through everything, and the account of what they saw.

Value n of a producer in a partition is `producer-n`; as a code it is one number, so that millions fit into arrays.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Producer

from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.fetch import Fetched, Position, fetch, list_offsets
from headrace.client.fetch_requests import LATEST, FetchLimits
from headrace.errors import CorruptBatch, HeadraceError
from headrace.records import batch, kernel

DEADLINE_S: Final = 120.0
BACKOFF_MS: Final = 50
QUEUE_RECORDS: Final = 4000
TURN_S: Final = 0.02
NOT_SEEN: Final = -1
FAILURES_KEPT: Final = 20

# Errors that tell of records which a broker should not have sent, or has not any more.
DAMAGE: Final = (
    KafkaError._BAD_MSG,
    KafkaError._BAD_COMPRESSION,
    KafkaError._LOG_TRUNCATION,
    KafkaError.INVALID_MSG,
    KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError._AUTO_OFFSET_RESET,
)
_PRODUCER_SHIFT: Final = 40

CLIENT: Final = {
    "reconnect.backoff.ms": BACKOFF_MS,
    "reconnect.backoff.max.ms": 4 * BACKOFF_MS,
    "retry.backoff.ms": BACKOFF_MS,
    "retry.backoff.max.ms": 4 * BACKOFF_MS,
    "topic.metadata.refresh.interval.ms": 2000,
    "socket.timeout.ms": 5000,
    "socket.connection.setup.timeout.ms": 3000,
    "log_level": 0,
}


def code_of(value: bytes) -> int:
    producer, _, number = value.partition(b"-")
    return int(producer) << _PRODUCER_SHIFT | int(number)


def told(code: int) -> str:
    return f"{code >> _PRODUCER_SHIFT}-{code & (1 << _PRODUCER_SHIFT) - 1}"


class Failures:
    """The first ones, in order; safe from any thread."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.count = 0
        self._lock = threading.Lock()

    def add(self, what: str) -> None:
        with self._lock:
            self.count += 1
            if len(self.found) < FAILURES_KEPT:
                self.found.append(what)

    def told(self) -> str:
        return "\n".join([f"{self.count} failures:", *self.found, ""])


class ChaosProducer:
    """Idempotent, acks=-1, at a steady rate to all partitions; the client sends again what was not acknowledged."""

    def __init__(
        self, bootstrap: str, topic: str, partitions: int, number: int, rate: float, failures: Failures
    ) -> None:
        self.number = number
        self.sent = [0] * partitions
        self.offsets = [array("q") for _ in range(partitions)]
        """Of every acknowledged record, by its number."""
        self.longest_gap_s = 0.0
        """Without any acknowledgement."""
        self._acknowledged_at = time.monotonic()
        self._topic = topic
        self._each_turn = max(1, round(rate * TURN_S))
        self._failures = failures
        self._stopping = threading.Event()
        self._producer = Producer(
            {
                **CLIENT,
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "batch.num.messages": 100,
                "queue.buffering.max.messages": QUEUE_RECORDS,
                "request.timeout.ms": 5000,
                "message.timeout.ms": 3_600_000,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def acknowledged(self) -> int:
        return sum(map(len, self.offsets))

    def _run(self) -> None:
        partition = 0
        while not self._stopping.wait(TURN_S):
            for _ in range(self._each_turn):
                try:
                    value = b"%d-%d" % (self.number, self.sent[partition])
                    self._producer.produce(self._topic, value, partition=partition, on_delivery=self._delivered)
                except BufferError:
                    break
                self.sent[partition] += 1
                partition = (partition + 1) % len(self.sent)
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self._acknowledged_at)
        self._acknowledged_at = now
        if error is not None:
            self._failures.add(f"{message.value()!r} was not delivered: {error}")
            return
        offsets_of = self.offsets[message.partition()]
        number = code_of(message.value()) & (1 << _PRODUCER_SHIFT) - 1
        if number != len(offsets_of):
            self._failures.add(f"{message.value()!r} was acknowledged after {len(offsets_of)} others")
        offsets_of.append(message.offset())

    def finish(self) -> None:
        """Stop sending and wait for everything on its way."""
        self._stopping.set()
        self._thread.join()
        left = self._producer.flush(DEADLINE_S)
        if left:
            self._failures.add(f"producer {self.number}: {left} records were never answered")
        del self._producer  # It would go on looking for brokers when these, and their network, are gone.

    def abandon(self) -> None:
        self._stopping.set()
        self._thread.join()
        if hasattr(self, "_producer"):
            self._producer.purge()
            del self._producer


class Seen:
    """What group members were given: a code for every offset. A record that changes was seen before it was safe."""

    def __init__(self, partitions: int, failures: Failures) -> None:
        self.codes = [array("q") for _ in range(partitions)]
        self.again = 0
        """Records given a second time, after a rebalance."""
        self._failures = failures
        self._lock = threading.Lock()

    def add(self, partition: int, offset: int, code: int) -> None:
        with self._lock:
            codes = self.codes[partition]
            while len(codes) <= offset:
                codes.append(NOT_SEEN)
            if codes[offset] not in (NOT_SEEN, code):
                self._failures.add(f"offset {partition}:{offset} was {told(codes[offset])}, then {told(code)}")
            self.again += codes[offset] == code
            codes[offset] = code


class GroupMember:
    """A consumer of the group. From its assignment on, the offsets of a partition follow one another."""

    def __init__(self, bootstrap: str, topic: str, seen: Seen, failures: Failures) -> None:
        self._seen = seen
        self._failures = failures
        self._next: dict[int, int] = {}
        self._rebalanced = False
        self._stopping = threading.Event()
        self._consumer = Consumer(
            {
                **CLIENT,
                "bootstrap.servers": bootstrap,
                "group.id": "chaos",
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 500,
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 1000,
                "fetch.wait.max.ms": 200,
                "check.crcs": True,
            }
        )
        self._consumer.subscribe([topic], on_assign=self._forget, on_revoke=self._forget, on_lost=self._forget)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _forget(self, consumer: Any, partitions: Any) -> None:
        self._rebalanced = True

    def _run(self) -> None:
        while not self._stopping.is_set():
            for message in self._consumer.consume(500, 0.2):
                error = message.error()
                if error is not None:
                    if error.fatal() or error.code() in DAMAGE:
                        self._failures.add(f"a group member: {error}")
                    continue
                partition, offset = message.partition() or 0, message.offset() or 0
                if offset != self._next.get(partition, offset) and not self._rebalanced:
                    self._failures.add(f"after {partition}:{self._next[partition] - 1} a member was given {offset}")
                self._next[partition] = offset + 1
                self._seen.add(partition, offset, code_of(message.value() or b""))
            if self._rebalanced:
                # It came within the call: what the call brought may be from before it.
                self._rebalanced = False
                self._next.clear()
        self._consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def connect(bootstrap: str) -> Cluster:
    return Cluster(bootstrap, timeout_ms=3000, retry=Retry(within_ms=3000, pause_max_ms=200))


class WatermarkWatcher:
    """Asks for the end of every partition, again and again: no answer may be below an earlier one of the same epoch or
    an older one. A leader that was replaced and does not know it yet is not asked (KIP-320).
    """

    def __init__(self, bootstrap: str, topic: str, partitions: int, failures: Failures) -> None:
        self.answers = 0
        self._bootstrap = bootstrap
        self._topic = topic
        self._highest = [0] * partitions
        self._epochs = [-1] * partitions
        self._failures = failures
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with connect(self._bootstrap) as cluster:
            while not self._stopping.wait(0.05):
                for partition in range(len(self._highest)):
                    self._ask(cluster, partition)

    def _ask(self, cluster: Cluster, partition: int) -> None:
        try:
            found = list_offsets(cluster, self._topic, {partition: LATEST})[partition].offset
            epoch = cluster.partition(self._topic, partition).leader_epoch
        except HeadraceError:
            return
        if epoch < self._epochs[partition]:
            cluster.forget()
            return
        self._epochs[partition] = epoch
        self.answers += 1
        if found < self._highest[partition]:
            self._failures.add(f"the end of {partition} went from {self._highest[partition]} back to {found}")
        self._highest[partition] = max(found, self._highest[partition])

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


class RawReader:
    """Follows one partition by itself, batch by batch: no offset may be left out, and no byte be damaged."""

    def __init__(self, bootstrap: str, topic: str, partition: int, seen: Seen, failures: Failures) -> None:
        self.next_offset = 0
        self._bootstrap = bootstrap
        self._place = topic, partition
        self._seen = seen
        self._failures = failures
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        limits = FetchLimits(max_wait_ms=200)
        with connect(self._bootstrap) as cluster:
            while not self._stopping.is_set():
                try:
                    position = Position(*self._place, self.next_offset)
                    (found,) = fetch(cluster, [position], limits)
                    self._take(found)
                except HeadraceError as error:
                    if isinstance(error, CorruptBatch) or not error.mapping.retriable:
                        self._failures.add(f"reading {self._place} at {self.next_offset}: {error}")
                        return

    def _take(self, found: Fetched) -> None:
        for header, data in found.whole_batches():
            batch.check(data)
            if header.base_offset > self.next_offset:
                self._failures.add(f"{self._place}: asked for {self.next_offset}, was given {header.base_offset}")
            for record in kernel.records(data):
                self._seen.add(self._place[1], record.offset, code_of(record.value or b""))
            self.next_offset = header.next_offset

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def read_all(bootstrap: str, topic: str, partition: int) -> array[int]:
    """The codes of a partition from offset 0 to its end; offsets have no gaps."""
    codes = array("q")
    with connect(bootstrap) as cluster:
        end = list_offsets(cluster, topic, {partition: LATEST})[partition].offset
        while len(codes) < end:
            (found,) = fetch(cluster, [Position(topic, partition, len(codes))])
            for _, data in found.whole_batches():
                for record in kernel.records(data):
                    if record.offset >= len(codes):
                        assert record.offset == len(codes), f"{partition}: no offset {len(codes)}"
                        codes.append(code_of(record.value or b""))
    return codes


def differences(codes: array[int], acknowledged: list[array[int]]) -> Iterator[str]:
    """What a partition's log does not have as its producers were told: every record once, in order, at its offset."""
    following = [0] * len(acknowledged)
    for offset, code in enumerate(codes):
        producer, number = code >> _PRODUCER_SHIFT, code & (1 << _PRODUCER_SHIFT) - 1
        due, following[producer] = following[producer], max(following[producer], number + 1)
        if number > due:
            yield f"{producer}-{due} to {producer}-{number - 1} are lost, or come after {told(code)} at {offset}"
        elif number < due:
            yield f"{told(code)} at {offset} is there twice, or out of order"
        known = acknowledged[producer]
        if number < len(known) and known[number] != offset:
            yield f"{told(code)} was acknowledged at {known[number]} and is at {offset}"
    for producer, known in enumerate(acknowledged):
        if following[producer] < len(known):
            yield f"the last {len(known) - following[producer]} acknowledged records of {producer} are lost"


class ChaosLoad:
    """Everything that runs while faults are injected."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, producers: int, rate: float) -> None:
        self.failures = Failures()
        self.topic = topic
        self.seen = Seen(partitions, self.failures)
        self._bootstrap = bootstrap
        self._partitions = partitions
        each = rate / producers
        self.producers = [
            ChaosProducer(bootstrap, topic, partitions, number, each, self.failures) for number in range(producers)
        ]
        self.members = [GroupMember(bootstrap, topic, self.seen, self.failures) for _ in range(2)]
        self.read_raw = Seen(partitions, self.failures)
        self.readers = [
            RawReader(bootstrap, topic, partition, self.read_raw, self.failures) for partition in range(partitions)
        ]
        self.watcher = WatermarkWatcher(bootstrap, topic, partitions, self.failures)

    @property
    def acknowledged(self) -> int:
        return sum(producer.acknowledged for producer in self.producers)

    def abandon(self) -> None:
        for producer in self.producers:
            producer.abandon()
        self._stop_readers()

    def finish(self, wait_for: Callable[..., Any]) -> dict[str, Any]:
        """With all brokers back: wait for everything on its way, then hold what was acknowledged and seen against
        what is there.
        """
        for producer in self.producers:
            producer.finish()
        logs = [read_all(self._bootstrap, self.topic, partition) for partition in range(self._partitions)]
        for partition, codes in enumerate(logs):
            for difference in differences(codes, [producer.offsets[partition] for producer in self.producers]):
                self.failures.add(f"partition {partition}: {difference}")
        if not self.failures.count:
            wait_for("readers at the end", lambda: self._all_seen(logs), DEADLINE_S)
        self._stop_readers()
        for who, seen in (("group members have", self.seen), ("a reader has", self.read_raw)):
            for partition, codes in enumerate(logs):
                if seen.codes[partition] != codes:
                    self.failures.add(f"partition {partition}: {who} seen other records than there are")
        return {
            "records_acknowledged": self.acknowledged,
            "records_in_the_log": sum(map(len, logs)),
            "records_seen_again_after_rebalances": self.seen.again,
            "watermark_answers": self.watcher.answers,
            "longest_time_without_an_acknowledgement_s": round(max(p.longest_gap_s for p in self.producers), 1),
        }

    def _stop_readers(self) -> None:
        for member in self.members:
            member.stop()
        for reader in self.readers:
            reader.stop()
        self.watcher.stop()

    def _all_seen(self, logs: list[array[int]]) -> bool:
        return all(
            len(codes) >= len(log) and NOT_SEEN not in codes
            for seen in (self.seen, self.read_raw)
            for codes, log in zip(seen.codes, logs, strict=True)
        )
