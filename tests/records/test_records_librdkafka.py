"""Batches as librdkafka writes and reads them, byte for byte, through the mock cluster that it carries inside.

The mock cluster keeps what it is sent, so a raw Fetch answers the producer's own bytes, and a raw Produce puts ours
before its consumer.
"""

import socket
import struct
from collections.abc import Iterator
from types import ModuleType

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from headrace.records import batch
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from proving import proves

DEADLINE_S = 120
NOW_MS = 1_700_000_000_000
NEW: list[NewRecord] = [
    (
        NOW_MS + 7 * (nth % 3),
        None if nth % 5 == 0 else b"key-%d" % nth,
        b"value " * (nth % 40),
        [("trace", b"%d" % nth)],
    )
    for nth in range(500)
]


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


class RawBroker:
    """One connection that speaks just enough of Produce v3 and Fetch v4."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=DEADLINE_S)

    def close(self) -> None:
        self._socket.close()

    def produce(self, topic: str, records: bytes) -> int:
        partition = struct.pack(">ii", 0, len(records)) + records
        body = struct.pack(">hhii", -1, -1, 5_000, 1) + text(topic) + struct.pack(">i", 1) + partition
        (code,) = struct.unpack_from(">h", self._ask(0, 3, body), 4 + 2 + len(topic) + 4 + 4)
        return int(code)

    def fetch(self, topic: str) -> bytes:
        body = struct.pack(">iiiibi", -1, 5_000, 1, 1 << 24, 0, 1) + text(topic)
        answer = self._ask(1, 4, body + struct.pack(">iiqi", 1, 0, 0, 1 << 24))
        at = 4 + 4 + 2 + len(topic) + 4
        _, code, _, _, aborted, size = struct.unpack_from(">ihqqii", answer, at)
        assert (code, max(aborted, 0)) == (0, 0)
        return answer[at + 30 : at + 30 + size]

    def _ask(self, api: int, version: int, body: bytes) -> bytes:
        head = struct.pack(">hhi", api, version, 1) + text("raw")
        self._socket.sendall(struct.pack(">i", len(head) + len(body)) + head + body)
        (size,) = struct.unpack(">i", self._read(4))
        return self._read(size)[4:]

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            assert part, "the mock broker closed the connection"
            data += part
        return data


@pytest.fixture(scope="module")
def mock_cluster() -> Iterator[tuple[str, int]]:
    owner = Producer({"test.mock.num.brokers": 1})
    (broker,) = owner.list_topics(timeout=DEADLINE_S).brokers.values()
    yield broker.host, broker.port
    del owner


@pytest.fixture
def raw_broker(mock_cluster: tuple[str, int]) -> Iterator[RawBroker]:
    broker = RawBroker(*mock_cluster)
    yield broker
    broker.close()


@proves("J1")
@pytest.mark.thorough
@pytest.mark.parametrize("codec", list(Codec))
def test_we_read_what_librdkafka_writes(
    kernel: ModuleType, mock_cluster: tuple[str, int], raw_broker: RawBroker, codec: Codec
) -> None:
    topic = f"written-{codec.name}-{kernel.compiled}"
    producer = Producer(
        {
            "bootstrap.servers": "{}:{}".format(*mock_cluster),
            "compression.codec": codec.name.lower(),
            "linger.ms": 100,
            "enable.idempotence": True,
        }
    )
    for timestamp_ms, key, value, headers in NEW:
        producer.produce(topic, value, key, 0, timestamp=timestamp_ms, headers=list(headers))
    assert producer.flush(DEADLINE_S) == 0
    found = []
    for header, view in batch.batches(memoryview(raw_broker.fetch(topic))):
        if header.base_offset == 0:
            assert header.codec == codec
            assert header.producer_id >= 0
        found += kernel.records(view)
    assert found == [(nth, *fields) for nth, fields in enumerate(NEW)]


@proves("J1")
@pytest.mark.parametrize("codec", list(Codec))
def test_librdkafka_reads_what_we_write(
    kernel: ModuleType, mock_cluster: tuple[str, int], raw_broker: RawBroker, codec: Codec
) -> None:
    topic = f"read-{codec.name}-{kernel.compiled}"
    address = "{}:{}".format(*mock_cluster)
    Producer({"bootstrap.servers": address}).list_topics(topic, timeout=DEADLINE_S)
    assert raw_broker.produce(topic, bytes(kernel.build(NEW, codec))) == 0
    consumer = Consumer({"bootstrap.servers": address, "group.id": "reader", "check.crcs": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(len(NEW), timeout=DEADLINE_S)
    consumer.close()
    assert [message.error() for message in messages] == [None] * len(NEW)
    assert [
        (message.timestamp()[1], message.key(), message.value(), message.headers() or []) for message in messages
    ] == [(timestamp_ms, key, value, list(headers)) for timestamp_ms, key, value, headers in NEW]
