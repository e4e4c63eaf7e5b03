"""KeyQuery on the wire: who is told of it, and what it answers partition by partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from brokers import Broker
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import NOW_MS, Raw
from proving import proves

Connect = Callable[[Broker], Raw]
ALL = 1 << 62


def ask(raw: Raw, topic: str, key: bytes, *partitions: int, **more: Any) -> list[Any]:
    asked = [Message(partition_index=index, first_offset=0, next_offset=ALL) for index in partitions]
    body = {"from_ms": -ALL, "to_ms": ALL, "newest_first": True, "max_records": 10, "max_bytes": 1 << 20} | more
    answers: list[Any] = raw.call(apis.KEY_QUERY, 0, topic=topic, key=key, partitions=asked, **body).partitions
    return answers


def values(answer: Any) -> list[bytes | None]:
    return [record.value for _, batch in batches(answer.records) for record in kernel.records(batch)]


def test_only_our_own_client_is_told_of_our_own_apis(broker: Broker, connect: Connect) -> None:
    raw = connect(broker)
    for name, told in (("librdkafka", False), ("headrace", True)):
        answer = raw.call(apis.API_VERSIONS, 3, client_software_name=name, client_software_version="1")
        assert (apis.KEY_QUERY in {row.api_key for row in answer.api_keys}) == told


@proves("R3")
def test_partitions_answer_with_batches_of_nothing_but_the_key(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, partitions=2, key_index="true")
    for index in range(2):
        records = [(NOW_MS + n, b"k%d" % (n % 3), b"%d-%d" % (index, n), ()) for n in range(9)]
        assert raw.produce(topic, bytes(kernel.build(records)), partition=index).error_code == 0
    first, second, gone = ask(raw, topic, b"k1", 0, 1, 7)
    assert (values(first), values(second)) == ([b"0-1", b"0-4", b"0-7"], [b"1-1", b"1-4", b"1-7"])
    assert (first.done, first.high_watermark, first.error_code, gone.error_code) == (True, 9, 0, 3)
    (newest,) = ask(raw, topic, b"k1", 0, max_records=1)
    assert (values(newest), newest.done, newest.searched) == ([b"0-7"], False, 7)
    (positions,) = ask(raw, topic, b"", 1, max_records=0)
    assert (positions.indexed_offset, positions.records) == (9, None)


@proves("R3")
def test_a_topic_without_an_index_is_told_so(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    (answer,) = ask(raw, topic, b"k", 0)
    assert answer.error_code == 40
    assert "key.index=true" in answer.error_message
    assert ask(raw, topic, b"k") == []
