"""Transactions with four client libraries: what readers see, offsets with them, zombies, time that runs out, a crash.

Each expectation holds on Apache Kafka too: `pytest --apache-kafka DIR tests/clients/test_transactions.py`.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from brokers import Broker, wait_for
from clients.records import Client, Record
from clients.topics import MakeTopic, create_topic
from clients.transactional import (
    DEADLINE_S,
    LAST,
    Transactional,
    TransactionalClient,
    Values,
    WithConfluent,
    transactional_clients,
)
from clients.with_kafkajs import KafkaJS
from proving import proves

NAMES = ("confluent-kafka", "kafka-python", "aiokafka", "kafkajs")
Open = Callable[..., Transactional]


@pytest.fixture(scope="module")
def transactional(kafkajs: KafkaJS) -> dict[str, TransactionalClient]:
    return {client.name: client for client in transactional_clients(kafkajs)}


@pytest.fixture
def open_producer(transactional: dict[str, TransactionalClient]) -> Iterator[Open]:
    """`open_producer(client, broker, id)`; all are closed at the end, without a flush."""
    opened: list[Transactional] = []

    def start(client: str, broker: Broker, id: str, timeout_ms: int = 60_000) -> Transactional:
        producer = transactional[client].producer(broker.bootstrap, id, timeout_ms)
        opened.append(producer)
        return producer

    yield start
    for producer in opened:
        producer.close()


def end(broker: Broker, topic: str, partitions: int) -> None:
    """Write what readers stop at."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for partition in range(partitions):
        producer.produce(topic, LAST, partition=partition)
    assert producer.flush(DEADLINE_S) == 0


def committed_offsets(broker: Broker, group: str, topic: str, partitions: int) -> list[int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0})
    asked = [TopicPartition(topic, partition) for partition in range(partitions)]
    found = [one.offset for one in consumer.committed(asked, DEADLINE_S)]
    consumer.close()
    return found


def refused(call: Callable[[], None]) -> BaseException:
    """What the client raised: each has errors of its own."""
    with pytest.raises(Exception, match=r".") as caught:
        call()
    return caught.value


def new_id() -> str:
    return f"tx-{uuid.uuid4().hex[:12]}"


@proves("T1")
@pytest.mark.parametrize("client", NAMES)
def test_committed_records_are_read_by_all_and_aborted_ones_by_uncommitted_readers_alone(
    broker: Broker,
    topic: MakeTopic,
    open_producer: Open,
    transactional: dict[str, TransactionalClient],
    client: str,
) -> None:
    name = topic(partitions=2)
    producer = open_producer(client, broker, new_id())
    written: Values = {0: [], 1: []}
    committed: Values = {0: [], 1: []}
    for number, commits in enumerate((True, False, True, False, False, True)):
        producer.begin()
        for partition, place in itertools.product((0, 1), range(3)):
            value = b"%d of transaction %d" % (place, number)
            producer.send(name, partition, value)
            written[partition].append(value)
            if commits:
                committed[partition].append(value)
        if commits:
            producer.commit()
        else:
            producer.abort()
    end(broker, name, 2)
    for reader in transactional.values():
        assert reader.read(broker.bootstrap, name, 2, committed=True) == committed, reader.name
        assert reader.read(broker.bootstrap, name, 2, committed=False) == written, reader.name


@proves("T1")
@pytest.mark.parametrize("client", NAMES)
def test_what_is_read_written_and_committed_as_read_is_one_transaction(
    broker: Broker,
    topic: MakeTopic,
    clients: dict[str, Client],
    transactional: dict[str, TransactionalClient],
    client: str,
) -> None:
    source, target, group = topic(partitions=2), topic(partitions=2), f"group-{uuid.uuid4()}"
    sent: Values = {p: [b"record %d of %d" % (n, p) for n in range(30)] for p in (0, 1)}
    records = [Record(value, partition=p) for p, values in sent.items() for value in values]
    clients["confluent-kafka"].produce(broker.bootstrap, source, records)
    transactions = transactional[client].transform(broker.bootstrap, source, target, group, 60)
    assert transactions >= 2
    end(broker, target, 2)
    reader = WithConfluent()
    wanted = {partition: [value.upper() for value in values] for partition, values in sent.items()}
    assert reader.read(broker.bootstrap, target, 2, committed=True) == wanted
    every = reader.read(broker.bootstrap, target, 2, committed=False)
    assert sum(map(len, every.values())) > 60
    assert committed_offsets(broker, group, source, 2) == [30, 30]


@proves("T1")
@pytest.mark.parametrize("client", NAMES)
def test_offsets_count_when_their_transaction_commits_and_not_when_it_aborts(
    broker: Broker, topic: MakeTopic, open_producer: Open, client: str
) -> None:
    name, group = topic(partitions=2), f"group-{uuid.uuid4()}"
    producer = open_producer(client, broker, new_id())
    for offsets, commits in (({0: 5}, True), ({0: 7, 1: 7}, False), ({1: 3}, True)):
        producer.begin()
        producer.send_offsets(group, name, offsets)
        if commits:
            producer.commit()
        else:
            producer.abort()
    assert committed_offsets(broker, group, name, 2) == [5, 3]


@proves("T1")
@pytest.mark.parametrize("client", NAMES)
def test_a_producer_whose_id_another_one_took_can_write_and_commit_nothing_more(
    broker: Broker,
    topic: MakeTopic,
    open_producer: Open,
    transactional: dict[str, TransactionalClient],
    client: str,
) -> None:
    name, id = topic(), new_id()
    zombie = open_producer(client, broker, id)
    zombie.begin()
    zombie.send(name, 0, b"of the zombie, before")
    successor = open_producer(client, broker, id)
    successor.begin()
    successor.send(name, 0, b"of the successor")
    error = refused(lambda: zombie.send(name, 0, b"of the zombie, after"))
    assert transactional[client].is_fenced(error), repr(error)
    refused(zombie.commit)
    successor.commit()
    end(broker, name, 1)
    assert WithConfluent().read(broker.bootstrap, name, 1, committed=True) == {0: [b"of the successor"]}


@proves("T1")
def test_an_open_transaction_holds_back_committed_readers_and_no_others(
    broker: Broker, topic: MakeTopic, open_producer: Open
) -> None:
    name = topic()
    producer = open_producer("confluent-kafka", broker, new_id())
    readers = {}
    for level in ("read_committed", "read_uncommitted"):
        settings = {"isolation.level": level, "group.id": "unused", "enable.partition.eof": True}
        readers[level] = Consumer({"bootstrap.servers": broker.bootstrap, **settings})
        readers[level].assign([TopicPartition(name, 0, 0)])
    producer.begin()
    producer.send(name, 0, b"in the transaction")
    end(broker, name, 1)

    def ends(level: str) -> tuple[int, int]:
        low, high = readers[level].get_watermark_offsets(TopicPartition(name, 0), DEADLINE_S)
        return low, high

    assert ends("read_uncommitted") == (0, 2)
    assert ends("read_committed") == (0, 0)
    message = readers["read_committed"].poll(DEADLINE_S)
    error = message and message.error()
    assert error
    assert error.code() == KafkaError._PARTITION_EOF
    message = readers["read_uncommitted"].poll(DEADLINE_S)
    assert message
    assert message.value() == b"in the transaction"
    # It waits at the end already, and is woken by the marker.
    producer.commit()
    read = [readers["read_committed"].poll(DEADLINE_S) for _ in range(2)]
    assert [one and one.value() for one in read] == [b"in the transaction", LAST]
    assert wait_for("the end beyond the marker", lambda: ends("read_committed") == (0, 3))
    for reader in readers.values():
        reader.close()


@proves("T1")
def test_a_member_that_left_its_group_cannot_send_offsets_for_it(
    broker: Broker, topic: MakeTopic, open_producer: Open
) -> None:
    name, group = topic(), f"group-{uuid.uuid4()}"
    producer = open_producer("confluent-kafka", broker, new_id()).producer  # type: ignore[attr-defined]
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0}
    left = Consumer(settings)
    left.subscribe([name])
    wait_for("an assignment", lambda: left.poll(0.1) or left.assignment())
    metadata = left.consumer_group_metadata()
    left.close()
    producer.begin_transaction()
    with pytest.raises(KafkaException) as caught:
        producer.send_offsets_to_transaction([TopicPartition(name, 0, 1)], metadata, DEADLINE_S)
    error = caught.value.args[0]
    assert error.code() in (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION)
    assert error.txn_requires_abort()
    producer.abort_transaction(DEADLINE_S)
    assert committed_offsets(broker, group, name, 1) == [-1001]


@proves("T1")
def test_a_timeout_beyond_what_the_broker_allows_is_refused(broker: Broker, open_producer: Open) -> None:
    with pytest.raises(KafkaException) as caught:
        open_producer("confluent-kafka", broker, new_id(), timeout_ms=2**31 - 1)
    assert caught.value.args[0].code() == KafkaError.INVALID_TRANSACTION_TIMEOUT


@proves("T1")
@pytest.mark.parametrize("client", ["confluent-kafka", "aiokafka"])
def test_a_transaction_whose_time_is_up_is_aborted_and_its_producer_fenced(
    broker: Broker,
    topic: MakeTopic,
    open_producer: Open,
    transactional: dict[str, TransactionalClient],
    client: str,
) -> None:
    name = topic()
    producer = open_producer(client, broker, new_id(), timeout_ms=1000)
    producer.begin()
    producer.send(name, 0, b"too late")
    end(broker, name, 1)
    assert WithConfluent().read(broker.bootstrap, name, 1, committed=True) == {0: []}
    error = refused(producer.commit)
    assert transactional[client].is_fenced(error), repr(error)


@proves("T1", "T2")
def test_transactions_go_on_over_a_crash_of_the_broker(
    fresh_broker: Callable[..., Broker], open_producer: Open
) -> None:
    broker = fresh_broker()
    name, group = create_topic(broker, "crash", 2), "crash"
    producer = open_producer("confluent-kafka", broker, "crash")
    producer.begin()
    producer.send(name, 0, b"first")
    producer.commit()
    aborted = open_producer("confluent-kafka", broker, "aborted")
    aborted.begin()
    aborted.send(name, 0, b"aborted")
    aborted.abort()
    producer.begin()
    producer.send(name, 0, b"before")
    producer.send_offsets(group, name, {0: 1})
    broker.restart(clean=False)
    producer.send(name, 1, b"after")
    producer.commit()
    end(broker, name, 2)
    read = WithConfluent().read(broker.bootstrap, name, 2, committed=True)
    assert read == {0: [b"first", b"before"], 1: [b"after"]}
    assert committed_offsets(broker, group, name, 1) == [1]
