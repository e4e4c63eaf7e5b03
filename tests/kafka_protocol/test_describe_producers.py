"""DescribeProducers: what a partition knows of its producers, on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brokers import Broker
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of
from proving import proves

Connect = Callable[[Broker], Raw]


def described(raw: Raw, topic: str, index: int = 0) -> Any:
    answer = raw.call(apis.DESCRIBE_PRODUCERS, 0, topics=[Message(name=topic, partition_indexes=[index])])
    ((partition,),) = [found.partitions for found in answer.topics]
    return partition


@proves("T1")
def test_the_producers_of_a_partition_are_told(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    assert described(raw, topic).active_producers == []
    raw.produce(topic, batch_of([b"a", b"b"], producer_id=4711, producer_epoch=3, base_sequence=5), acks=-1)
    (found,) = described(raw, topic).active_producers
    assert (found.producer_id, found.producer_epoch, found.last_sequence) == (4711, 3, 6)
    assert (found.coordinator_epoch, found.current_txn_start_offset) == (-1, -1)
    assert found.last_timestamp > 0


def test_a_partition_that_is_named_again_and_again_is_told_once(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, 2)
    rows = [Message(name=topic, partition_indexes=[1, 0] * 1000), Message(name=topic, partition_indexes=[0])]
    (found,) = raw.call(apis.DESCRIBE_PRODUCERS, 0, topics=rows).topics
    assert [partition.partition_index for partition in found.partitions] == [1, 0]


def test_a_partition_that_is_not_there_is_named(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    assert described(raw, topic, 7).error_code == 3
