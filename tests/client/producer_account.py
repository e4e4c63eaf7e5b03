"""A load of numbered records by key, and the account of what was acknowledged against what is in the log."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

from headrace import Delivery, Producer
from headrace.records.record import Record

KEYS = 40


class NumberedLoad:
    """A thread that sends records `key-number` in order, as fast as the queue lets it, until it is finished."""

    def __init__(self, producer: Producer, topic: str, seed: int, pause_s: float = 0.0005) -> None:
        self.deliveries: list[tuple[int, int, Delivery]] = []
        self._producer = producer
        self._topic = topic
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def acknowledged(self) -> int:
        return self._producer.metrics()["delivered"]

    def _run(self) -> None:
        numbers = [0] * KEYS
        try:
            while not self._over.wait(self._pause_s):
                key = self._random.randrange(KEYS)
                value = b"%d-%d" % (key, numbers[key])
                delivery = self._producer.send_async(self._topic, value, key=b"key-%d" % key)
                self.deliveries.append((key, numbers[key], delivery))
                numbers[key] += 1
        except BaseException as failure:
            self._failure = failure
            raise

    def finish(self, timeout_s: float) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._producer.flush(timeout_s)


Told = tuple[int, int, int, int]
"""Key, number, partition, offset; the offset is -1 where the broker did not tell it."""


def told(deliveries: Iterable[tuple[int, int, Delivery]]) -> list[Told]:
    """Of the acknowledged ones, where they are said to be."""
    return [
        (key, number, delivery.result().partition, delivery.result().offset)
        for key, number, delivery in deliveries
        if delivery.exception() is None
    ]


def check(acknowledged: Iterable[Told], log: dict[int, list[Record]]) -> None:
    """Nothing acknowledged is lost or elsewhere, nothing is there twice, every key is in order."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    last: dict[int, int] = {}
    for partition, records in log.items():
        for record in records:
            key, number = map(int, (record.value or b"").split(b"-"))
            assert (key, number) not in places, f"{key}-{number} is there twice"
            assert last.get(key, -1) < number, f"{key}-{number} was overtaken by {key}-{last[key]}"
            places[key, number] = (partition, record.offset)
            last[key] = number
    for key, number, partition, offset in acknowledged:
        assert (key, number) in places, f"{key}-{number} was acknowledged and is lost"
        if offset >= 0:
            assert places[key, number] == (partition, offset), f"{key}-{number} is not where it was said to be"
