"""What each client writes, with each codec, every client reads: keys, values, headers and times intact."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from brokers import Broker
from clients.records import CODECS, FIRST_TIMESTAMP_MS, Client, Record, samples_for
from clients.topics import MakeTopic, create_topic
from proving import proves

NAMES = ("confluent-kafka", "kafka-python", "aiokafka", "kafkajs", "kcat")
written: dict[str, tuple[float, float]] = {}


@pytest.fixture
def topics_of(broker: Broker, clients: dict[str, Client]) -> Callable[[str], dict[str, str]]:
    """The topics that a client has written, by codec; they are written when first asked for."""

    def write(name: str) -> dict[str, str]:
        topics = {codec: f"matrix-{name}-{codec}" for codec in CODECS}
        if name not in written:
            began = time.time()
            for codec, topic in topics.items():
                create_topic(broker, topic)
                clients[name].produce(broker.bootstrap, topic, samples_for(clients[name]), codec)
            written[name] = began, time.time()
        return topics

    return write


def readable_by(reader: Client, record: Record) -> Record:
    """kcat prints headers as text with commas between them, so such values are compared by the other clients."""
    if reader.any_bytes_in_headers:
        return record
    return replace(record, headers=tuple((n, v) for n, v in record.headers if v is None or v.isalnum()))


@proves("G4", "J1", "J2")
@pytest.mark.parametrize("reader", NAMES)
@pytest.mark.parametrize("writer", NAMES)
def test_what_one_client_writes_another_reads(
    broker: Broker, clients: dict[str, Client], topics_of: Callable[[str], dict[str, str]], writer: str, reader: str
) -> None:
    expected = samples_for(clients[writer])
    topics = topics_of(writer)
    read = clients[reader].consume(broker.bootstrap, {topic: len(expected) for topic in topics.values()})
    for topic in topics.values():
        assert [record.offset for record in read[topic]] == list(range(len(expected)))
        for wrote, got in zip(expected, read[topic], strict=True):
            same = replace(wrote, offset=got.offset, timestamp_ms=got.timestamp_ms)
            assert readable_by(clients[reader], got) == readable_by(clients[reader], same), topic
            assert got.timestamp_ms is not None
            if wrote.timestamp_ms is not None:
                assert got.timestamp_ms == wrote.timestamp_ms
            else:
                began, ended = written[writer]
                assert int(began * 1000) <= got.timestamp_ms <= ended * 1000


@proves("G5")
@pytest.mark.parametrize("acks", [0, 1, -1])
@pytest.mark.parametrize("name", NAMES)
def test_every_level_of_acks(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic, name: str, acks: int
) -> None:
    target = topic()
    records = [Record(b"%d" % n, key=b"k") for n in range(20)]
    clients[name].produce(broker.bootstrap, target, records, acks=acks)
    read = clients["confluent-kafka"].consume(broker.bootstrap, {target: len(records)})[target]
    assert [record.value for record in read] == [record.value for record in records]


@proves("G12", "G18")
@pytest.mark.parametrize("name", NAMES)
def test_the_offset_of_a_time(broker: Broker, clients: dict[str, Client], topic: MakeTopic, name: str) -> None:
    target = topic()
    stamps = [FIRST_TIMESTAMP_MS + step for step in (0, 1000, 2000, 2000, 1500, 9000)]
    for stamp in stamps:
        clients["confluent-kafka"].produce(broker.bootstrap, target, [Record(b"v", timestamp_ms=stamp)])
    ask = clients[name].offset_at
    assert ask(broker.bootstrap, target, FIRST_TIMESTAMP_MS - 1) == 0
    assert ask(broker.bootstrap, target, FIRST_TIMESTAMP_MS + 1) == 1
    assert ask(broker.bootstrap, target, FIRST_TIMESTAMP_MS + 1001) == 2
    assert ask(broker.bootstrap, target, FIRST_TIMESTAMP_MS + 2001) == 5
    assert ask(broker.bootstrap, target, FIRST_TIMESTAMP_MS + 9001) is None


@proves("L3")
@pytest.mark.parametrize("name", NAMES)
def test_a_topic_is_created_by_its_first_producer(broker: Broker, clients: dict[str, Client], name: str) -> None:
    target = f"created-by-{name}"
    clients[name].produce(broker.bootstrap, target, [Record(b"first")])
    assert clients[name].consume(broker.bootstrap, {target: 1})[target][0].value == b"first"
