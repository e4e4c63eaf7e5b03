"""A leader asks the partition's key whether it still is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.partition_keys import PREFIX, PartitionKeys
from headrace.cluster.leadership import Leadership
from headrace.errors import CoordinationError
from headrace.partitions.partition import Partition
from partitions.led import BROKER, Led, topic_id
from proving import proves

TOPIC = "orders"
EPOCH = 4


class Asker:
    def __init__(self) -> None:
        self.keys = PartitionKeys()
        self.keys.put(TOPIC, topic_id(TOPIC), BROKER, EPOCH)
        self.led = Led()
        log = self.led.lead(TOPIC).log
        self.partition: Partition = self.led.partitions.lead(log, EPOCH, {BROKER: ""})
        view: Any = SimpleNamespace(image=SimpleNamespace(prefix=PREFIX))
        coordination: Any = self.keys
        self._leadership = Leadership(coordination, view, self.keys.spawn)

    def ask(self) -> list[bool]:
        """What was told so far."""
        told: list[bool] = []
        self._leadership.confirm(self.partition, told.append)
        return told


@pytest.fixture
def asker() -> Asker:
    return Asker()


@proves("J6")
def test_the_key_decides(asker: Asker) -> None:
    assert asker.ask() == [True]
    for of_topic, leader, epoch in (
        (topic_id(TOPIC), BROKER, EPOCH + 1),  # it was replaced, and has been elected again
        (topic_id(TOPIC), BROKER + 1, EPOCH + 1),
        (topic_id(TOPIC), BROKER + 1, EPOCH),
        (topic_id(TOPIC), BROKER, EPOCH - 1),  # coordination was put back to an older copy
        (topic_id("another"), BROKER, EPOCH),
    ):
        asker.keys.put(TOPIC, of_topic, leader, epoch)
        assert asker.ask() == [False]


def test_who_cannot_know_does_not_lead(asker: Asker) -> None:
    asker.keys.failure = CoordinationError("nobody answers")
    assert asker.ask() == [False]
    asker.keys.failure = None
    asker.keys.put_wrong(TOPIC)
    assert asker.ask() == [False]
    asker.keys.delete(TOPIC)
    assert asker.ask() == [False]


def test_a_role_that_ends_meanwhile_is_none(asker: Asker) -> None:
    asker.keys.held = True
    told = asker.ask()
    asker.led.partitions.follow(asker.partition.log, EPOCH, BROKER + 1)
    asker.keys.answer()
    assert told == [False]


def test_one_question_at_a_time_and_none_that_left_before_it_was_asked(asker: Asker) -> None:
    asker.keys.held = True
    first = asker.ask()
    later = [asker.ask() for _ in range(5)]
    assert asker.keys.asked == 1
    asker.keys.answer()
    assert (first, later) == ([True], [[]] * 5)
    asker.keys.put(TOPIC, topic_id(TOPIC), BROKER + 1, EPOCH + 1)
    asker.keys.answer()
    assert (asker.keys.asked, later) == (2, [[False]] * 5)
    assert asker.ask() == []
    assert asker.keys.asked == 3
