"""Topics that are stored in one codec, as a producer and a consumer see them on the wire."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

import pytest

from brokers import Broker, wait_for
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.codecs import Codec
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import NOW_MS, Raw
from proving import proves

Connect = Callable[[Broker], Raw]
CODECS = {"uncompressed": Codec.NONE, "gzip": Codec.GZIP, "snappy": Codec.SNAPPY, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


def batch(value: bytes, codec: int, **producer: int) -> bytes:
    return bytes(kernel.build([(NOW_MS, b"k", value * 50, ())], codec, **producer))


def stored(raw: Raw, topic: str) -> list[tuple[int, bytes | None]]:
    """Codec and value of each record, from the first on."""
    found: list[tuple[int, bytes | None]] = []
    while fetched := raw.fetch(topic, len(found)).records:
        for header, view in batches(memoryview(fetched)):
            found += [(header.codec, record.value) for record in kernel.records(view)]
    return found


@proves("F3")
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("acks", [0, 1, -1])
def test_pipelined_batches_are_answered_and_stored_in_order(
    broker: Broker, connect: Connect, topic: str, name: str, acks: int
) -> None:
    raw = connect(broker)
    raw.create(topic, compression_type=name)
    sent = [(b"%d" % n, codec) for n, codec in enumerate([*Codec, *Codec])]
    for value, codec in sent:
        raw.send_produce(topic, batch(value, codec), acks)
    if acks:
        answers = [raw.receive(apis.PRODUCE, 9)[1].responses[0].partition_responses[0] for _ in sent]
        assert [(answer.error_code, answer.base_offset) for answer in answers] == [(0, n) for n in range(len(sent))]
    else:
        wait_for("all of them", lambda: raw.fetch(topic, 0).high_watermark == len(sent))
    assert stored(raw, topic) == [(CODECS[name], value * 50) for value, _ in sent]


@proves("J9")
def test_partitions_of_one_request_wait_for_their_own(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, partitions=3, compression_type="zstd")
    wrong = bytearray(batch(b"x", Codec.NONE))
    wrong[-1] ^= 1
    parts = [(0, batch(b"a", Codec.GZIP)), (1, batch(b"b", Codec.ZSTD)), (2, bytes(wrong))]
    answer = raw.call(
        apis.PRODUCE,
        9,
        transactional_id=None,
        acks=-1,
        timeout_ms=10_000,
        topic_data=[
            Message(name=topic, partition_data=[Message(index=index, records=records) for index, records in parts])
        ],
    )
    rows = {row.index: (row.error_code, row.base_offset) for row in answer.responses[0].partition_responses}
    assert rows == {0: (0, 0), 1: (0, 0), 2: (2, -1)}


def test_the_brokers_time_and_the_keys_are_heeded_as_well(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, compression_type="gzip", message_timestamp_type="LogAppendTime", cleanup_policy="compact")
    keyless = bytes(kernel.build([(NOW_MS, None, b"v", ()), (NOW_MS, b"k", b"v", ())], Codec.ZSTD))
    refused = raw.produce(topic, keyless)
    assert (refused.error_code, [wrong.batch_index for wrong in refused.record_errors]) == (87, [0])
    answer = raw.produce(topic, batch(b"v", Codec.ZSTD))
    assert (answer.error_code, answer.base_offset) == (0, 0)
    (header, view), *_ = batches(memoryview(raw.fetch(topic).records))
    assert (header.codec, kernel.records(view)[0].timestamp_ms) == (Codec.GZIP, answer.log_append_time_ms)


@proves("J10")
def test_an_idempotent_producer_sends_five_at_a_time(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, compression_type="gzip")
    producer = {"producer_id": 4711, "producer_epoch": 0}
    for n in range(20):
        raw.send_produce(topic, batch(b"%d" % n, Codec.LZ4, base_sequence=n, **producer), -1)
    raw.send_produce(topic, batch(b"19", Codec.LZ4, base_sequence=19, **producer), -1)
    answers = [raw.receive(apis.PRODUCE, 9)[1].responses[0].partition_responses[0] for _ in range(21)]
    assert [(row.error_code, row.base_offset) for row in answers] == [(0, n) for n in [*range(20), 19]]


@proves("J4")
def test_what_comes_by_http_is_stored_so_too(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic, compression_type="zstd")
    body = json.dumps({"records": [{"value": "a"}, {"value": "b"}]}).encode()
    request = urllib.request.Request(
        f"{broker.http}/topics/{topic}/records", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert [row["offset"] for row in json.load(answer)["offsets"]] == [0, 1]
    assert [codec for codec, _ in stored(raw, topic)] == [Codec.ZSTD] * 2
