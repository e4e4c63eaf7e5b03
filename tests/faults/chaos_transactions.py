"""Transactional producers, a copier and readers of what is committed, that live through everything, and their account.

A transaction of a producer has one record in each partition, `producer-number`: it is seen in all of them or in none.
The copier reads what is committed and writes it to another topic, with its offsets in the same transaction: everything
is there once.

Producers and readers are librdkafka's. The copier is not: when the coordinator of its group goes from Metadata,
librdkafka's `send_offsets_to_transaction` waits for a thread that it has ended itself, beyond every timeout, with
whatever brokers (its issues 5511 and 5456).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

import headrace
from faults.chaos_load import CLIENT, DAMAGE, DEADLINE_S, Failures, connect
from headrace.client.admin.fetch import list_offsets
from headrace.client.fetch_requests import LATEST
from headrace.errors import HeadraceError

TRANSACTION_TIMEOUT_MS: Final = 15_000
CALL_S: Final = 20.0
PAUSE_S: Final = 0.02
ABORTED_EACH: Final = 5
"""Of so many transactions of a producer one is aborted."""
COPIED_MAX: Final = 200

Name = tuple[int, int]
"""Number of a producer, and of its transaction."""


def name_of(value: bytes) -> Name:
    producer, _, number = value.partition(b"-")
    return int(producer), int(number)


def faults_of(
    partitions: int,
    seen: list[list[Name]],
    copies: list[list[Name]],
    committed: set[Name],
    aborted: set[Name],
) -> Iterator[str]:
    """What was told and what readers of the topic and of its copy saw in each partition cannot both be true. What is
    in neither set is one or the other."""
    counts: Counter[Name] = Counter()
    for partition, names in enumerate(seen):
        for name, count in Counter(names).items():
            counts[name] += 1
            if count > 1:
                yield f"{name} is {count} times in partition {partition}"
        if Counter(names) != Counter(copies[partition]):
            lost, surplus = Counter(names) - Counter(copies[partition]), Counter(copies[partition]) - Counter(names)
            yield f"partition {partition} is not copied as it is: lost {list(lost)[:5]}, too many {list(surplus)[:5]}"
    for name, count in counts.items():
        if count != partitions:
            yield f"{name} is in {count} of {partitions} partitions"
        if name in aborted:
            yield f"{name} was aborted, and is read"
    for name in committed - counts.keys():
        yield f"{name} was committed, and is nowhere"


class TransactionalProducer:
    """One transactional id; started anew when its client says that it cannot go on."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, number: int, failures: Failures) -> None:
        self.committed: set[Name] = set()
        self.aborted: set[Name] = set()
        self.starts = 0
        self._bootstrap = bootstrap
        self._topic = topic
        self._partitions = partitions
        self._number = number
        self._failures = failures
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            producer = started(self._bootstrap, f"chaos-{self._number}", self._stopping)
            self.starts += 1
            try:
                while producer is not None and not self._stopping.wait(PAUSE_S):
                    number += 1
                    self._transact(producer, (self._number, number))
            except KafkaException as raised:
                if not is_over(raised):
                    self._failures.add(f"transactional producer {self._number}: {raised}")

    def _transact(self, producer: Producer, name: Name) -> None:
        producer.begin_transaction()
        value = b"%d-%d" % name
        try:
            for partition in range(self._partitions):
                producer.produce(self._topic, value, partition=partition)
            if name[1] % ABORTED_EACH == 0:
                producer.flush(CALL_S)
                again(lambda: producer.abort_transaction(CALL_S))
                self.aborted.add(name)
            else:
                again(lambda: producer.commit_transaction(CALL_S))
                self.committed.add(name)
        except KafkaException as raised:
            if not raised.args[0].txn_requires_abort():
                raise
            again(lambda: producer.abort_transaction(CALL_S))
            self.aborted.add(name)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        if self._thread.is_alive():
            self._failures.add(f"transactional producer {self._number} does not come to its end")


def started(bootstrap: str, transactional_id: str, stopping: threading.Event) -> Producer | None:
    """A producer that has its id and epoch; None if nobody wants it any more."""
    producer = Producer(
        {
            **CLIENT,
            "bootstrap.servers": bootstrap,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "message.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "linger.ms": 2,
        }
    )
    while not stopping.is_set():
        try:
            producer.init_transactions(CALL_S)
        except KafkaException as raised:
            if not raised.args[0].retriable():
                raise
        else:
            return producer
    return None


def again(call: Callable[[], object]) -> None:
    """Until it is done, or the client says that it will not be."""
    for _ in range(int(DEADLINE_S / CALL_S)):
        try:
            call()
        except KafkaException as raised:
            if not raised.args[0].retriable():
                raise
        else:
            return
    raise AssertionError(f"a transaction does not end within {DEADLINE_S:g} s")


def is_over(raised: KafkaException) -> bool:
    """Whether the program goes on with a new client: its transaction took too long, or it is fenced."""
    error = raised.args[0]
    return bool(error.fatal() or error.txn_requires_abort() or error.retriable())


def committed_consumer(bootstrap: str, **more: Any) -> Consumer:
    return Consumer(
        {
            **CLIENT,
            "bootstrap.servers": bootstrap,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 1000,
            "check.crcs": True,
            **more,
        }
    )


class Copier:
    """Copies every record of a topic to another, once, whatever happens to it: this project's client."""

    def __init__(self, bootstrap: str, topic: str, copy: str, failures: Failures) -> None:
        self.starts = 0
        self._bootstrap = bootstrap
        self._topics = topic, copy
        self._failures = failures
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.starts += 1
            try:
                self._live()
            except HeadraceError:
                # What fails ends this life of the program: the next begins from what is committed.
                self._stopping.wait(PAUSE_S)
            except BaseException as raised:
                self._failures.add(f"copier: {raised!r}")
                raise

    def _live(self) -> None:
        with (
            headrace.Consumer(
                self._topics[0],
                bootstrap=self._bootstrap,
                group="copiers",
                commit_interval_ms=0,
                max_wait_ms=100,
                session_timeout_ms=10_000,
            ) as consumer,
            headrace.Producer(
                self._bootstrap,
                transactional_id="copier",
                transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
                delivery_timeout_ms=TRANSACTION_TIMEOUT_MS,
            ) as producer,
        ):
            while not self._stopping.is_set():
                found = consumer.poll(200, COPIED_MAX)
                if found:
                    with producer.transaction(wait=False) as transaction:
                        for record in found:
                            transaction.send(self._topics[1], record.value, partition=record.partition)
                        transaction.send_offsets(consumer)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        if self._thread.is_alive():
            self._failures.add("the copier does not come to its end")


class CommittedReader:
    """What is committed in every partition of a topic, in the order of its offsets."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, failures: Failures) -> None:
        self.names: list[list[Name]] = [[] for _ in range(partitions)]
        self.positions = [0] * partitions
        self._failures = failures
        self._stopping = threading.Event()
        self._consumer = committed_consumer(bootstrap, **{"group.id": f"reader of {topic}"})
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for message in self._consumer.consume(500, 0.2):
                error = message.error()
                if error is None:
                    self.names[message.partition() or 0].append(name_of(message.value() or b""))
                elif error.fatal() or error.code() in DAMAGE:
                    self._failures.add(f"a reader: {error}")
            for each in self._consumer.position(self._consumer.assignment()):
                self.positions[each.partition] = max(self.positions[each.partition], each.offset)
        self._consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)


class TransactionalChaosLoad:
    """Everything that runs while faults are injected."""

    def __init__(self, bootstrap: str, topic: str, copy: str, partitions: int, producers: int) -> None:
        self.failures = Failures()
        self._bootstrap = bootstrap
        self._topics = topic, copy
        self._partitions = partitions
        self.producers = [
            TransactionalProducer(bootstrap, topic, partitions, number, self.failures) for number in range(producers)
        ]
        self.copier = Copier(bootstrap, topic, copy, self.failures)
        self.readers = [CommittedReader(bootstrap, each, partitions, self.failures) for each in (topic, copy)]

    @property
    def committed(self) -> int:
        """Records."""
        return self._partitions * sum(len(producer.committed) for producer in self.producers)

    def abandon(self) -> None:
        for stop in [*(each.stop for each in self.producers), self.copier.stop, *(each.stop for each in self.readers)]:
            stop()

    def finish(self, wait_for: Callable[..., Any]) -> dict[str, Any]:
        """With all brokers back: nothing is open for longer than its timeout, everything is read and copied."""
        for producer in self.producers:
            producer.stop()
        deadline_s = DEADLINE_S + TRANSACTION_TIMEOUT_MS / 1000
        wait_for("the reader at the end", lambda: self._is_at_end(0), deadline_s, 0.2)
        told = sum(map(len, self.readers[0].names))
        wait_for("everything copied", lambda: self._copied() >= told or self.failures.count, deadline_s, 0.2)
        self.copier.stop()
        wait_for("the reader of copies at the end", lambda: self._is_at_end(1), deadline_s, 0.2)
        for reader in self.readers:
            reader.stop()
        committed = set().union(*(producer.committed for producer in self.producers))
        aborted = set().union(*(producer.aborted for producer in self.producers))
        seen, copies = (reader.names for reader in self.readers)
        for fault in faults_of(self._partitions, seen, copies, committed, aborted):
            self.failures.add(fault)
        return {
            "transactions_committed": len(committed),
            "transactions_aborted": len(aborted),
            "records_read_as_committed": told,
            "starts_of_producers": sum(producer.starts for producer in self.producers),
            "starts_of_the_copier": self.copier.starts,
        }

    def _copied(self) -> int:
        return sum(map(len, self.readers[1].names))

    def _is_at_end(self, which: int) -> bool:
        with connect(self._bootstrap) as cluster:
            asked = dict.fromkeys(range(self._partitions), LATEST)
            ends = list_offsets(cluster, self._topics[which], asked)
        return all(self.readers[which].positions[index] >= found.offset for index, found in ends.items())
