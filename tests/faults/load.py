"""Producers that never stop on a topic, and the account of what was acknowledged to them."""

from __future__ import annotations

import threading
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from brokers import Broker

DEADLINE_S: Final = 120.0
QUEUE_RECORDS: Final = 2000
BACKOFF_MS: Final = 20
FETCH_WAIT_MS: Final = 10


class Load:
    """One idempotent producer on all partitions: partition p gets the values p-0, p-1, ... in this order.

    It stays up while the broker is killed and started again, and sends again what was not acknowledged.
    """

    def __init__(self, broker: Broker, topic: str, partitions: int) -> None:
        self.topic = topic
        self.sent = [0] * partitions
        self.acknowledged = [0] * partitions
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "batch.num.messages": 50,
                "queue.buffering.max.messages": QUEUE_RECORDS,
                "message.timeout.ms": 300_000,
                "reconnect.backoff.ms": BACKOFF_MS,
                "reconnect.backoff.max.ms": BACKOFF_MS,
                "retry.backoff.ms": BACKOFF_MS,
                "retry.backoff.max.ms": BACKOFF_MS,
                "log_level": 0,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        partition = 0
        while not self._stopping.is_set():
            try:
                value = b"%d-%d" % (partition, self.sent[partition])
                self._producer.produce(self.topic, value, partition=partition, on_delivery=self._delivered)
            except BufferError:
                self._producer.poll(0.01)
                continue
            self.sent[partition] += 1
            partition = (partition + 1) % len(self.sent)
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        with self._changed:
            if error is not None:
                self.failures.append(str(error))
                return
            partition, number = map(int, message.value().split(b"-"))
            if message.offset() != number or number != self.acknowledged[partition]:
                self.failures.append(f"{message.value()} was acknowledged at offset {message.offset()}")
            self.acknowledged[partition] = number + 1
            self._changed.notify_all()

    def wait_acknowledged(self, more: int) -> None:
        """Wait until that many more records are acknowledged."""
        with self._changed:
            goal = sum(self.acknowledged) + more
            came = self._changed.wait_for(lambda: sum(self.acknowledged) >= goal or self.failures, DEADLINE_S)
        assert came, f"no {more} acknowledgements within {DEADLINE_S:g} s"
        assert self.failures == []

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._producer.purge()

    def finish(self) -> list[int]:
        """Stop sending, wait for all acknowledgements; records sent per partition."""
        self._stopping.set()
        self._thread.join()
        assert self._producer.flush(DEADLINE_S) == 0
        assert self.failures == []
        return self.sent


def values_of(broker: Broker, topic: str, partition: int, count: int) -> list[bytes]:
    """The first values of a partition; fails when an offset is left out or nothing more comes."""
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "reader", "enable.auto.commit": False}
    # The question for the end waits behind the fetch that finds nothing more.
    consumer = Consumer({**settings, "check.crcs": True, "fetch.wait.max.ms": FETCH_WAIT_MS})
    consumer.assign([TopicPartition(topic, partition, 0)])
    values: list[bytes] = []
    while len(values) < count:
        message = consumer.poll(DEADLINE_S)
        assert message is not None, f"{len(values)} of {count} records came"
        if message.error() is not None:
            raise KafkaException(message.error())
        assert message.offset() == len(values), "offsets are dense"
        values.append(message.value() or b"")
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=DEADLINE_S)
    consumer.close()
    assert end == len(values)
    return values
