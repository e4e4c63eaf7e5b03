"""Transactions written record by record with confluent-kafka, and which of their records a reader may be given."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from confluent_kafka import Producer

from brokers import Broker

WITHIN_S = 30


@dataclass(slots=True)
class Written:
    """A record as it lies in its partition; without a transaction it is committed."""

    partition: int
    value: bytes
    outcome: str


@dataclass(slots=True)
class Transactions:
    """Producers with a transaction each, or none, into one topic. Each record is acknowledged before the next."""

    broker: Broker
    topic: str
    records: list[Written] = field(default_factory=list)
    _producers: dict[str, Producer] = field(default_factory=dict)
    _open: dict[str, list[Written]] = field(default_factory=dict)

    def write(self, value: bytes, name: str = "", partition: int = 0) -> None:
        """Under a name: in the transaction of that producer, which begins here unless it is open."""
        if name not in self._producers:
            self._producers[name] = self._producer(name)
        written = Written(partition, value, "open" if name else "committed")
        if name:
            if name not in self._open:
                self._producers[name].begin_transaction()
            self._open.setdefault(name, []).append(written)
        self._producers[name].produce(self.topic, value, b"k", partition=partition)
        assert self._producers[name].flush(WITHIN_S) == 0
        self.records.append(written)

    def end(self, name: str, *, commit: bool) -> None:
        producer = self._producers[name]
        if commit:
            producer.commit_transaction(WITHIN_S)
        else:
            producer.abort_transaction(WITHIN_S)
        for each in self._open.pop(name):
            each.outcome = "committed" if commit else "aborted"

    def _producer(self, name: str) -> Producer:
        given = {"bootstrap.servers": self.broker.bootstrap, "linger.ms": 0}
        if name:
            given["transactional.id"] = f"{self.topic}-{name}"
        producer = Producer(given)
        if name:
            producer.init_transactions(WITHIN_S)
        return producer

    def draw(self, draw: random.Random, steps: int, partitions: int) -> None:
        """Transactions that begin, interleave and end at random; at the end some are open."""
        for step in range(steps):
            name = draw.choice(["", "a", "b", "c"])
            if name in self._open and draw.random() < 0.3:
                self.end(name, commit=draw.random() < 0.5)
            else:
                self.write(b"%d" % step, name, draw.randrange(partitions))

    def end_all(self, *, commit: bool = False) -> None:
        for name in list(self._open):
            self.end(name, commit=commit)

    @property
    def committed(self) -> list[tuple[int, bytes]]:
        """By partition and in their order: committed records before the first that is open."""
        shown: list[tuple[int, bytes]] = []
        for partition in sorted({each.partition for each in self.records}):
            for each in self.records:
                if each.partition == partition:
                    if each.outcome == "open":
                        break
                    if each.outcome == "committed":
                        shown.append((partition, each.value))
        return shown

    @property
    def all(self) -> list[tuple[int, bytes]]:
        return sorted(((each.partition, each.value) for each in self.records), key=lambda each: each[0])
