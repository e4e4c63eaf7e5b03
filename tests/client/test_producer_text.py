"""Text is taken where bytes are, and written as UTF-8; headers may be a dict."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import headrace
from brokers import Broker
from client.conftest import MakeTopic
from headrace import aio
from headrace.client.admin.cluster import Cluster
from headrace.errors import InvalidRecord
from proving import proves

SAME_HEADERS: list[Any] = [
    [("shop", b"7"), ("none", None)],
    (("shop", "7"), ("none", None)),
    {"shop": "7", "none": None},
]
KEYS: list[Any] = ["änna", "änna".encode(), bytearray("änna".encode())]
VALUES: list[Any] = ["zwei Hemden ✓", "zwei Hemden ✓".encode(), memoryview("zwei Hemden ✓".encode())]
GIVEN = list(zip(VALUES, KEYS, SAME_HEADERS, strict=True))


def check(broker: Broker, name: str, count: int) -> None:
    with headrace.Consumer(name, bootstrap=broker.bootstrap) as consumer:
        found: list[headrace.Record] = []
        while len(found) < count:
            found += consumer.poll(timeout_ms=60_000)
    assert {(record.key, record.value) for record in found} == {("änna".encode(), "zwei Hemden ✓".encode())}
    assert all(record.headers == [("shop", b"7"), ("none", None)] for record in found)
    assert len({record.partition for record in found}) == 1, "the same key, the same partition"


@proves("U2")
def test_text_and_bytes_are_the_same_record(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=5)
    with headrace.Producer(broker.bootstrap) as producer:
        for value, key, headers in GIVEN:
            producer.send(name, value, key=key, headers=headers)
            producer.send_async(name, value, key=key, headers=headers)
            producer.send_oneway(name, value, key=key, headers=headers)
            producer.send_async(name, value, key=key, headers=headers, acks=1)
    check(broker, name, 4 * len(GIVEN))


@proves("U2")
def test_text_is_taken_on_asyncio(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=5)

    async def go() -> None:
        async with aio.Producer(broker.bootstrap) as producer:
            for value, key, headers in GIVEN:
                producer.send_async(name, value, key=key, headers=headers)
                await producer.send(name, value, key=key, headers=headers)

    asyncio.run(go())
    check(broker, name, 2 * len(GIVEN))


@proves("U2")
def test_an_order_key_may_be_text(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=5)
    with headrace.Producer(broker.bootstrap) as producer:
        sent = [producer.send_ordered(name, "v", order_key, key="k") for order_key in KEYS]
        assert len({delivery.result(60).partition for delivery in sent}) == 1


@proves("U2")
def test_a_text_key_beside_an_encoder_of_values_is_no_mistake(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    with headrace.Producer(broker.bootstrap, encoder=json.dumps) as producer:
        producer.send(name, {"a": 1}, key="s")
        with pytest.raises(TypeError, match=r"a record's key is bytes, str or None, not int$"):
            producer.send(name, {"a": 1}, key=7)  # type: ignore[arg-type]
    with headrace.Consumer(
        name, bootstrap=broker.bootstrap, decoder=lambda value: json.loads(value or b"null")
    ) as consumer:
        record = next(consumer.records(60_000))
        assert (record.key, record.value) == (b"s", {"a": 1})


@proves("U2")
def test_what_cannot_be_written_is_told_with_what_it_is(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with headrace.Producer(broker.bootstrap) as producer:
        with pytest.raises(TypeError, match="value is bytes, str or None, not dict: give the producer an encoder"):
            producer.send(name, {"a": 1})
        with pytest.raises(InvalidRecord, match=r"key .* is not valid text"):
            producer.send(name, b"v", key="\ud800")
        with pytest.raises(TypeError, match="headers are a dict or pairs"):
            producer.send(name, b"v", headers=["x"])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"a record's order key is bytes, str or None, not int"):
            producer.send_ordered(name, b"v", 7)  # type: ignore[arg-type]
