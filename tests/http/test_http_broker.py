"""The HTTP port of a whole broker: what comes in by HTTP goes out by Kafka, and the other way round."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from brokers import Broker, wait_for
from proving import proves

DEADLINE_SECONDS = 120.0
OUTSIDE = {"Content-Type": "application/json"}


def ask(broker: Broker, target: str, body: object | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(broker.http + target, data, OUTSIDE), timeout=DEADLINE_SECONDS
    ) as response:
        text = response.read().decode()
    return json.loads(text) if response.headers["Content-Type"] == "application/json" else text


def consumer(broker: Broker, group: str) -> Consumer:
    return Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "auto.offset.reset": "earliest"})


@proves("J4", "G17")
def test_a_kafka_consumer_reads_what_came_by_http(broker: Broker) -> None:
    records = [
        {"key": f"k{n}", "value": {"n": n}, "headers": {"trace": f"t{n}"}, "timestamp": 1_700_000_000_000 + n}
        for n in range(100)
    ]
    answer = ask(broker, "/topics/from-http/records", {"records": records})
    assert [place["offset"] for place in answer["offsets"]] == list(range(100))
    reading = consumer(broker, "http-readers")
    reading.assign([TopicPartition("from-http", 0, 0)])
    found: list[tuple[object, ...]] = []
    while len(found) < 100:
        message = reading.poll(DEADLINE_SECONDS)
        assert message is not None
        assert message.error() is None
        found.append((message.key(), message.value(), message.headers(), message.timestamp()[1]))
    reading.close()
    assert found == [(b"k%d" % n, b'{"n":%d}' % n, [("trace", b"t%d" % n)], 1_700_000_000_000 + n) for n in range(100)]


@proves("G18")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_http_reads_what_a_kafka_producer_wrote(broker: Broker, codec: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "compression.type": codec, "linger.ms": 20})
    for n in range(500):
        producer.produce(f"to-http-{codec}", b"v%d" % n, b"k", headers=[("h", b"\xff")], partition=0)
    assert producer.flush(DEADLINE_SECONDS) == 0
    found: list[dict[str, Any]] = []
    while len(found) < 500:
        page = ask(broker, f"/topics/to-http-{codec}/partitions/0/records?offset={len(found)}&count=70&wait_ms=1000")
        found += page["records"]
    assert [record["value"] for record in found] == [f"v{n}" for n in range(500)]
    assert all(record["headers"] == [{"key": "h", "value_base64": "/w=="}] for record in found)
    assert page["next_offset"] == page["high_watermark"] == 500


def test_an_operator_sees_the_lag_of_a_group(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()
    ask(broker, "/topics/watched/records", {"records": [{"value": "v"}] * 10})
    reading = consumer(broker, "slow-readers")
    reading.commit(offsets=[TopicPartition("watched", 0, 4)], asynchronous=False)
    reading.close()
    wanted = 'headrace_group_lag{group="slow-readers",topic="watched",partition="0"} 6'
    wait_for("the lag", lambda: wanted in ask(broker, "/metrics"))
    assert "slow-readers" in ask(broker, "/")
    assert ask(broker, "/ready") == {"status": "ready"}
    described = ask(broker, "/topics/watched")
    assert described["partition_list"][0]["high_watermark"] == 10
