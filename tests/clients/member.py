"""A member of a consumer group as a process, so that a test can kill it: `member.py CLIENT SETTINGS-AS-JSON`.

It says on standard output, a JSON object a line: `assigned` whenever its partitions change, `record` for each record
once its offset is committed, `fatal` when it cannot go on. A line on standard input, or its end, makes it leave.
"""

from __future__ import annotations

import asyncio
import base64
import json
import select
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple


def say(event: str, **what: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **what}) + "\n")
    sys.stdout.flush()


def say_record(topic: str, partition: int, offset: int, value: bytes | None) -> None:
    text = None if value is None else base64.b64encode(value).decode()
    say("record", topic=topic, partition=partition, offset=offset, value=text)


class Assignment:
    """Tells of a change once."""

    def __init__(self) -> None:
        self.told: list[int] | None = None

    def now(self, partitions: Iterable[Any]) -> None:
        current = sorted(p.partition for p in partitions)
        if current != self.told and (current or self.told):
            self.told = current
            say("assigned", partitions=current)


def asked_to_leave() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Partition(NamedTuple):
    topic: str
    partition: int


def headrace(given: dict[str, Any]) -> None:
    from headrace import Consumer, HeadraceError

    consumer = Consumer(
        given["topic"],
        bootstrap=given["bootstrap"],
        group=given["group"],
        assignor=given["strategy"],
        session_timeout_ms=given["session_ms"],
        instance_id=given["instance"],
        commit_interval_ms=0,
        max_wait_ms=100,
    )
    assignment = Assignment()
    while not asked_to_leave():
        try:
            records = consumer.poll(50)
        except HeadraceError as error:
            say("fatal", error=str(error))
            break
        assignment.now(Partition(*place) for place in consumer.assignment)
        for record in records:
            try:
                consumer.commit({(record.topic, record.partition): record.offset + 1})
            except HeadraceError:
                break
            say_record(record.topic, record.partition, record.offset, record.value)
    consumer.close()


def confluent(given: dict[str, Any]) -> None:
    from confluent_kafka import Consumer, KafkaError, KafkaException

    settings = {
        "bootstrap.servers": given["bootstrap"],
        "group.id": given["group"],
        "partition.assignment.strategy": given["strategy"],
        "session.timeout.ms": given["session_ms"],
        "heartbeat.interval.ms": given["session_ms"] // 6,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 100,
        "log_level": 0,
    }
    if given["instance"]:
        settings["group.instance.id"] = given["instance"]
    if given["strategy"] == "consumer":  # no strategy of the client's: the consumer protocol, where the broker assigns
        settings["group.protocol"] = "consumer"
        for name in ("partition.assignment.strategy", "session.timeout.ms", "heartbeat.interval.ms"):
            del settings[name]
    consumer = Consumer(settings)
    consumer.subscribe([given["topic"]])
    assignment = Assignment()
    while not asked_to_leave():
        message = consumer.poll(0.05)
        assignment.now(consumer.assignment())
        if message is None:
            continue
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._FATAL:
                say("fatal", error=str(error))
            continue
        try:
            consumer.commit(message=message, asynchronous=False)
        except KafkaException:
            # The group moved on: whoever has the partition now gets this record again.
            continue
        say_record(str(message.topic()), int(message.partition() or 0), int(message.offset() or 0), message.value())
    consumer.close()


def kafka_python(given: dict[str, Any]) -> None:
    from kafka import KafkaConsumer
    from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
    from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
    from kafka.errors import KafkaError
    from kafka.structs import OffsetAndMetadata, TopicPartition

    strategies = {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
        "cooperative-sticky": CooperativeStickyAssignor,
    }
    consumer = KafkaConsumer(
        given["topic"],
        bootstrap_servers=given["bootstrap"],
        group_id=given["group"],
        group_instance_id=given["instance"],
        partition_assignment_strategy=[strategies[given["strategy"]]],
        session_timeout_ms=given["session_ms"],
        heartbeat_interval_ms=given["session_ms"] // 6,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        fetch_max_wait_ms=100,
    )
    # kafka-python 3.0 that leads a group before it knows the topic assigns nothing, and does not take the next one.
    consumer.partitions_for_topic(given["topic"])
    assignment = Assignment()
    while not asked_to_leave():
        polled = consumer.poll(timeout_ms=50)
        assignment.now(consumer.assignment())
        for partition, messages in polled.items():
            for message in messages:
                at = TopicPartition(partition.topic, partition.partition)
                try:
                    consumer.commit({at: OffsetAndMetadata(message.offset + 1, "", -1)})
                except KafkaError:
                    break
                say_record(message.topic, message.partition, message.offset, message.value)
    consumer.close()


async def aiokafka(given: dict[str, Any]) -> None:
    from aiokafka import AIOKafkaConsumer, TopicPartition
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor
    from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
    from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
    from aiokafka.errors import KafkaError

    strategies = {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
    }
    consumer = AIOKafkaConsumer(
        given["topic"],
        bootstrap_servers=given["bootstrap"],
        group_id=given["group"],
        group_instance_id=given["instance"],
        partition_assignment_strategy=[strategies[given["strategy"]]],
        session_timeout_ms=given["session_ms"],
        heartbeat_interval_ms=given["session_ms"] // 6,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        fetch_max_wait_ms=100,
    )
    await consumer.start()
    assignment = Assignment()
    while not asked_to_leave():
        polled = await consumer.getmany(timeout_ms=50)
        assignment.now(consumer.assignment())
        for partition, messages in polled.items():
            for message in messages:
                try:
                    await consumer.commit({TopicPartition(partition.topic, partition.partition): message.offset + 1})
                except KafkaError:
                    break
                say_record(message.topic, message.partition, message.offset, message.value)
    await consumer.stop()


def main() -> None:
    client, given = sys.argv[1], json.loads(sys.argv[2])
    if client == "headrace":
        headrace(given)
    elif client == "confluent-kafka":
        confluent(given)
    elif client == "kafka-python":
        kafka_python(given)
    else:
        asyncio.run(aiokafka(given))


if __name__ == "__main__":
    main()
