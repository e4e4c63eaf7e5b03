"""Records that are delivered later: asked for by a header of any producer, seen by plain consumers when due."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from brokers import PROGRAM, Broker, wait_for
from clients.records import CODECS, Client, Record
from clients.topics import MakeTopic, create_topic
from headrace import Admin
from headrace.records.delayed import DELAYED_DUE, DELAYED_OFFSET, DELAYED_TIMESTAMP, DELIVER_AFTER, DELIVER_AT
from proving import proves

DEADLINE_S = 60.0
NAMES = ("confluent-kafka", "kafka-python", "aiokafka", "kafkajs", "kcat")
HOUR_MS = 3_600_000
ON: dict[str, Any] = {"headrace_delay_enable": "true"}


def after(value: bytes, ms: int) -> Record:
    return Record(value, key=b"k", headers=((DELIVER_AFTER, b"%d" % ms), ("kept", b"yes")))


def send(bootstrap: str, topic: str, records: list[Record], **settings: object) -> list[int]:
    """In one batch of an idempotent producer; answers the offsets that it was told."""
    offsets: list[int] = []
    producer = Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 100, "log_level": 0, **settings}
    )

    def heard(error: object, message: object) -> None:
        assert error is None, error
        offsets.append(message.offset())  # type: ignore[attr-defined]

    for each in records:
        producer.produce(topic, each.value, each.key, 0, headers=list(each.headers), on_delivery=heard)
    assert producer.flush(DEADLINE_S) == 0
    return offsets


@proves("R12", "Q2")
@pytest.mark.parametrize("reader", NAMES)
def test_every_client_reads_delayed_records_when_they_are_due(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic, reader: str
) -> None:
    target = topic(**ON)
    offsets = send(
        broker.bootstrap,
        target,
        [after(b"third", 400), Record(b"first"), after(b"second", 200), after(b"never", HOUR_MS)],
        **{"compression.type": "lz4"},
    )
    assert offsets == [0, 1, 2, 3]
    read = clients[reader].consume(broker.bootstrap, {target: 3})[target]
    assert [each.value for each in read] == [b"first", b"second", b"third"]
    offsets_read = [each.offset or 0 for each in read]
    assert offsets_read == sorted(offsets_read)
    assert offsets_read[0] == len(offsets)
    assert [dict(each.headers)[DELAYED_OFFSET] for each in read] == [b"1", b"2", b"0"]
    for each in read[1:]:
        headers = dict(each.headers)
        assert DELIVER_AFTER not in headers
        assert headers["kept"] == b"yes"
        assert DELAYED_TIMESTAMP in headers
        due, at = headers[DELAYED_DUE], each.timestamp_ms
        assert due is not None
        assert at is not None
        assert int(due) <= at


@proves("Q2")
@pytest.mark.parametrize("writer", NAMES)
def test_every_client_can_delay(broker: Broker, clients: dict[str, Client], topic: MakeTopic, writer: str) -> None:
    target = topic(**ON)
    for codec in CODECS if writer == "confluent-kafka" else ("none", "gzip"):
        clients[writer].produce(broker.bootstrap, target, [after(codec.encode(), 300)], codec)
        clients[writer].produce(broker.bootstrap, target, [Record(codec.encode() + b" at once")], codec)
    count = 2 * (len(CODECS) if writer == "confluent-kafka" else 2)
    read = clients["confluent-kafka"].consume(broker.bootstrap, {target: count})[target]
    assert sum(DELAYED_OFFSET in dict(each.headers) for each in read) == count // 2
    assert len({each.value for each in read}) == count


def _note_error(errors: list[str], error: Any, _message: object) -> None:
    errors.append(error.name())


@proves("Q2")
def test_a_delay_that_makes_no_sense_is_refused_and_one_in_the_past_is_none(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic
) -> None:
    target = topic(**ON, headrace_delay_max_ms=60_000)
    far = str(int(time.time() * 1000) + HOUR_MS).encode()
    for name, value in ((DELIVER_AFTER, b"soon"), (DELIVER_AT, b"-5"), (DELIVER_AT, far), (DELIVER_AFTER, b"60001")):
        errors: list[str] = []
        producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        heard = partial(_note_error, errors)
        producer.produce(target, b"refused", headers=[(name, value)], on_delivery=heard)
        assert producer.flush(DEADLINE_S) == 0
        assert errors == ["INVALID_RECORD"], (name, value)
    offsets = send(broker.bootstrap, target, [Record(b"late", headers=((DELIVER_AT, b"1000"),)), Record(b"plain")])
    read = clients["confluent-kafka"].consume(broker.bootstrap, {target: 2})[target]
    assert [each.value for each in read] == [b"late", b"plain"]
    assert offsets == [0, 1]


@proves("Q2")
def test_records_of_transactions_are_not_delayed(broker: Broker, topic: MakeTopic) -> None:
    target = topic(**ON)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": target, "log_level": 0})
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    producer.produce(target, b"refused", headers=[(DELIVER_AFTER, b"5")])
    with pytest.raises(KafkaException):
        producer.commit_transaction(DEADLINE_S)
    producer.abort_transaction(DEADLINE_S)


@proves("Q2")
def test_a_topic_without_delays_takes_the_headers_as_any_others(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic
) -> None:
    target = topic()
    send(broker.bootstrap, target, [after(b"plain", HOUR_MS)])
    (read,) = clients["confluent-kafka"].consume(broker.bootstrap, {target: 1})[target]
    assert read.offset == 0
    assert dict(read.headers)[DELIVER_AFTER] == b"%d" % HOUR_MS


@proves("Q2")
def test_a_record_is_recalled_before_it_is_due(broker: Broker, clients: dict[str, Client], topic: MakeTopic) -> None:
    target = topic(**ON)
    first, second, third = send(
        broker.bootstrap, target, [after(b"one", HOUR_MS), after(b"two", 500), after(b"three", HOUR_MS)]
    )
    with Admin(broker.bootstrap) as admin:
        assert admin.recall(target, 0, first)
        assert admin.recall(target, 0, first)  # as one asks who has not heard the answer
        (read,) = clients["confluent-kafka"].consume(broker.bootstrap, {target: 1})[target]
        assert read.value == b"two"
        assert read.offset is not None
        assert not admin.recall(target, 0, second)
        assert not admin.recall(target, 0, read.offset)
    command = [str(PROGRAM), "queue", "recall", target, "0", "--bootstrap", broker.bootstrap]
    done = subprocess.run([*command, str(third)], capture_output=True, text=True, check=True)
    assert done.stdout == f"recalled offset {third} of {target}-0\n"
    refused = subprocess.run([*command, str(second)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "does not wait" in refused.stderr


@proves("Q2", "R12")
@pytest.mark.parametrize("clean", [True, False])
def test_what_waits_over_a_restart_is_delivered_once(
    fresh_broker: Callable[..., Broker], tmp_path: Path, clean: bool
) -> None:
    served = fresh_broker(settings={"retention.check.ms": 86_400_000})
    target = create_topic(served, "reminders", **ON)
    count = 300
    records = [after(b"%d" % each, 10 * each) for each in range(count)]
    send(served.bootstrap, target, records, **{"batch.num.messages": 50})
    consumer = Consumer({"bootstrap.servers": served.bootstrap, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([TopicPartition(target, 0, 0)])
    read: list[bytes] = []

    def has_read(wanted: int) -> bool:
        for message in consumer.consume(100, 0.05):
            assert message.error() is None, message.error()
            read.append(message.value() or b"")
        return len(read) >= wanted

    for part in (50, 150, count):
        wait_for(f"{part} deliveries", partial(has_read, part), DEADLINE_S)
        served.restart(clean=clean)
    send(served.bootstrap, target, [Record(b"end")])
    wait_for("the last record", partial(has_read, count + 1), DEADLINE_S)
    consumer.close()
    assert sorted(read[:-1], key=int) == [b"%d" % each for each in range(count)]
