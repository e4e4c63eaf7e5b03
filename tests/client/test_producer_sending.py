"""The producer against a broker: every way to send, what is told of each record, limits and what they do."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brokers import Broker, Brokers, wait_for
from client.conftest import MakeTopic
from client.reading_back import read_partition, read_topic
from clients.cutting import CuttingProxy
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Position, fetch
from headrace.client.connection import connections
from headrace.client.errors import (
    DeliveryUnknown,
    NoBroker,
    NotDelivered,
    ProducerClosed,
    QueueFull,
    UnknownTopic,
)
from headrace.client.fetch_requests import FetchLimits
from headrace.client.producer.accumulator import ProducerBatch
from headrace.client.producer.producer import Producer
from headrace.errors import BatchTooLarge, HeadraceError, InvalidRecord, RequestTimedOut, SettingError
from headrace.records.batch import BatchHeader
from headrace.records.builder import Delivery, Report
from headrace.records.partitioner import partition_for_key
from proving import proves

MakeProducer = Callable[..., Producer]


@pytest.fixture
def producing(broker: Broker) -> Iterator[MakeProducer]:
    """Producers for the shared broker, closed at the end."""
    made: list[Producer] = []

    def make(**options: object) -> Producer:
        given = {"bootstrap": broker.bootstrap, "delivery_timeout_ms": 30_000, **options}
        producer = Producer(**given)  # type: ignore[arg-type]
        made.append(producer)
        return producer

    yield make
    for producer in made:
        producer.close(10.0)


class Hanging:
    """A broker that can be stopped, so that it takes connections and answers nothing, and go on."""

    def __init__(self, broker: Broker) -> None:
        self.bootstrap = broker.bootstrap
        self._pid = broker.pid

    def hang(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def hanging_broker(brokers: Brokers) -> Broker:
    return brokers.start()


@pytest.fixture
def hanging(hanging_broker: Broker) -> Iterator[Hanging]:
    broker = Hanging(hanging_broker)
    yield broker
    broker.go_on()


@proves("R6", "J8", "G17")
def test_a_record_sent_is_reported_and_is_where_the_report_says(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=3)
    producer = producing()
    headers: list[tuple[str, bytes | None]] = [("trace", b"\x00\xff"), ("trace", None), ("ü", b"")]
    report = producer.send(name, b"value", key=b"key", headers=headers, partition=2, timestamp_ms=1_700_000_000_000)
    assert report == Report(name, 2, 0, 1_700_000_000_000)
    (record,) = read_partition(cluster, name, 2)
    assert (record.key, record.value, record.headers) == (b"key", b"value", headers)
    assert producer.send(name, None, key=b"key", partition=2).offset == 1
    assert read_partition(cluster, name, 2)[1].value is None


@proves("R6", "J8")
def test_an_asynchronous_send_tells_its_future_and_its_callback(producing: MakeProducer, topic: MakeTopic) -> None:
    name = topic()
    producer = producing()
    heard: list[Delivery] = []
    deliveries = [producer.send_async(name, b"%d" % nth, callback=heard.append) for nth in range(100)]
    assert [delivery.result(20.0).offset for delivery in deliveries] == list(range(100))
    producer.flush(20.0)
    wait_for("the callbacks", lambda: len(heard) == 100)
    assert heard == deliveries
    late: list[Delivery] = []
    deliveries[0].add_callback(late.append)
    assert late == [deliveries[0]]


@proves("J8")
def test_a_record_that_nobody_waits_for_leaves_when_its_interval_is_over(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    producer = producing(interval_ms=50)
    delivery = producer.send_async(name, b"alone")
    wait_for("the background to send it", lambda: delivery.done)
    assert len(read_partition(cluster, name, 0)) == 1


@proves("J8")
def test_full_batches_leave_without_waiting_for_the_interval(producing: MakeProducer, topic: MakeTopic) -> None:
    producer = producing(interval_ms=3_600_000, batch_bytes=2_000)
    name = topic()
    deliveries = [producer.send_async(name, b"x" * 500) for _ in range(40)]
    wait_for("all but the last batch", lambda: all(delivery.done for delivery in deliveries[:-3]))
    assert not deliveries[-1].done
    producer.flush(20.0)
    assert deliveries[-1].done


@proves("R6")
def test_a_oneway_send_is_answered_by_nobody_and_arrives(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    producer = producing()
    for nth in range(20):
        producer.send_oneway(name, b"%d" % nth)
    producer.flush(20.0)
    wait_for("the records", lambda: len(read_partition(cluster, name, 0)) == 20)
    assert [record.value for record in read_partition(cluster, name, 0)] == [b"%d" % nth for nth in range(20)]


@pytest.mark.parametrize("acks", [-1, 0, 1])
def test_acks_of_the_producer_and_of_a_send(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic, acks: int
) -> None:
    name = topic()
    offset = producing(acks=acks).send(name, b"a").offset
    assert offset == (-1 if acks == 0 else 0)
    wait_for("the record", lambda: len(read_partition(cluster, name, 0)) == 1)
    assert (producing().send(name, b"b", acks=acks).offset == -1) is (acks == 0)
    with pytest.raises(SettingError, match="acks=3"):
        producing().send(name, b"c", acks=3)


@proves("J8")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec(producing: MakeProducer, cluster: Cluster, topic: MakeTopic, codec: str) -> None:
    name = topic()
    producer = producing(codec=codec)
    deliveries = [producer.send_async(name, b"%d " % nth * 100, key=b"k") for nth in range(200)]
    producer.flush(20.0)
    assert [delivery.result().offset for delivery in deliveries] == list(range(200))
    assert [record.value for record in read_partition(cluster, name, 0)] == [b"%d " % nth * 100 for nth in range(200)]


@proves("J8")
def test_an_encoder_makes_bytes_of_values(producing: MakeProducer, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    producing(encoder=lambda value: json.dumps(value).encode()).send(name, {"a": [1, None]})
    assert read_partition(cluster, name, 0)[0].value == b'{"a": [1, null]}'
    with pytest.raises(TypeError, match="encoder"):
        producing().send(name, {"a": 1})


@proves("J8")
def test_an_encoder_runs_without_the_lock_and_once_for_a_record(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    """It may wait for another thread that sends, and it is not called again when a full queue had to be waited for."""
    name = topic()
    other = producing()
    other.send(name, b"before")
    encoded: list[bytes] = []

    def encode(value: bytes) -> bytes:
        sending = threading.Thread(target=other.send, args=(name, b"meanwhile"), daemon=True)
        sending.start()
        sending.join(20.0)
        assert not sending.is_alive(), "nobody else can send while a value is encoded"
        encoded.append(value)
        return value

    values = [b"%d" % nth for nth in range(3)]
    producer = producing(encoder=encode, queue_records=1)
    deliveries = [producer.send_ordered(name, value, b"k") for value in values]
    assert [delivery.result(20.0).partition for delivery in deliveries] == [0, 0, 0]
    producer.send(name, b"3")
    producer.send_async(name, b"4").result(20.0)
    assert encoded == [*values, b"3", b"4"]
    assert [record.value for record in read_partition(cluster, name, 0) if record.value in encoded] == encoded


@proves("L3", "G17")
def test_an_unknown_topic_is_created_by_use(broker: Broker, cluster: Cluster) -> None:
    name = f"made-by-use-{time.time_ns()}"
    with Producer(broker.bootstrap) as producer:
        assert producer.send(name, b"first").offset == 0
    assert cluster.topic(name).partitions


@proves("G17")
def test_keys_go_by_their_hash_and_records_without_one_are_spread(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=5)
    producer = producing(batch_bytes=1_000, interval_ms=1)
    keyed = {nth: producer.send_async(name, b"v", key=b"key-%d" % nth) for nth in range(200)}
    producer.flush(20.0)
    for nth, delivery in keyed.items():
        assert delivery.result().partition == partition_for_key(b"key-%d" % nth, 5)
    spread = [producer.send_async(name, b"w" * 100) for _ in range(500)]
    producer.flush(20.0)
    counts = [sum(delivery.result().partition == partition for delivery in spread) for partition in range(5)]
    assert min(counts) > 50, counts
    with pytest.raises(UnknownTopic, match="no partition 5"):
        producer.send(name, b"v", partition=5)
    with pytest.raises(InvalidRecord, match="-1"):
        producer.send(name, b"v", partition=-1)


def test_a_topic_that_is_not_there_is_made_and_a_name_that_cannot_be_is_refused(producing: MakeProducer) -> None:
    producer = producing()
    assert producer.send("made-by-a-producer", b"v").topic == "made-by-a-producer"
    with pytest.raises(HeadraceError, match="no name"):
        producer.send("no name", b"v")


def test_a_record_above_the_limit_is_refused_before_it_is_queued(producing: MakeProducer, topic: MakeTopic) -> None:
    name = topic()
    producer = producing(max_record_bytes=1_000)
    with pytest.raises(BatchTooLarge, match="max_record_bytes"):
        producer.send_async(name, b"x" * 1_001)
    assert producer.metrics()["queue_records"] == 0


def test_a_record_that_the_broker_will_not_have_fails_alone(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(max_message_bytes=2_000)
    producer = producing(batch_bytes=1_000)
    producer.send(name, b"first")
    deliveries = [producer.send_async(name, b"x" * (5_000 if nth == 10 else 300)) for nth in range(30)]
    producer.flush(20.0)
    errors = [delivery.exception() for delivery in deliveries]
    failed = [nth for nth, error in enumerate(errors) if error is not None]
    assert failed == [10]
    assert isinstance(errors[10], NotDelivered)
    assert not isinstance(errors[10], DeliveryUnknown)
    assert errors[10].kafka_code == 10
    assert "max.message.bytes" in str(errors[10])
    assert [len(record.value or b"") for record in read_partition(cluster, name, 0)] == [5, *[300] * 29]
    assert producer.metrics()["renewals"] == 1


@proves("J8")
def test_when_the_queue_is_full_records_are_dropped_and_it_is_told(producing: MakeProducer, topic: MakeTopic) -> None:
    name = topic()
    producer = producing(queue_records=10, when_full=0, interval_ms=3_600_000)
    heard: list[Delivery] = []
    deliveries = [producer.send_async(name, b"v", callback=heard.append) for _ in range(25)]
    assert isinstance(deliveries[10].exception(), QueueFull)
    assert "queue_records" in str(deliveries[10].exception())
    assert producer.metrics()["dropped"] == 15
    assert heard == deliveries[10:]
    with pytest.raises(QueueFull):
        producer.send(name, b"v")
    producer.flush(20.0)
    assert all(delivery.exception() is None for delivery in deliveries[:10])
    assert producer.send(name, b"v").offset == 10


@proves("J8")
def test_when_the_queue_is_full_a_send_waits_for_room(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    producer = producing(queue_bytes=5_000, batch_bytes=1_000, interval_ms=3_600_000)
    deliveries = [producer.send_async(name, b"x" * 200) for _ in range(300)]
    assert producer.metrics()["queue_bytes"] <= 5_000
    producer.flush(20.0)
    assert [delivery.result().offset for delivery in deliveries] == list(range(300))
    assert producer.metrics()["dropped"] == 0


@proves("J8")
def test_when_the_queue_stays_full_a_send_waits_so_long_and_drops(hanging: Hanging, producing: MakeProducer) -> None:
    producer = producing(bootstrap=hanging.bootstrap, queue_records=5, when_full=200)
    producer.send("waiting", b"v")
    hanging.hang()
    began = producer._driver.reactor.now()
    deliveries = [producer.send_async("waiting", b"v") for _ in range(6)]
    error = deliveries[-1].exception()
    assert isinstance(error, QueueFull)
    assert "for 200 ms" in str(error)
    assert producer._driver.reactor.now() - began >= 0.2
    hanging.go_on()
    producer.flush(30.0)
    assert all(delivery.exception() is None for delivery in deliveries[:5])


def test_a_record_given_up_while_its_broker_is_gone_is_told_as_not_written_or_unknown(
    hanging: Hanging, producing: MakeProducer
) -> None:
    producer = producing(bootstrap=hanging.bootstrap, delivery_timeout_ms=2_500)
    producer.send("gone", b"0")
    hanging.hang()
    deliveries = [producer.send_async("gone", b"v") for _ in range(3)]
    with pytest.raises(NotDelivered, match="gone-0"):
        deliveries[0].result(20.0)
    producer.flush(20.0)
    hanging.go_on()
    assert wait_for("the broker", lambda: _sends(producer, "gone")).offset >= 1
    metrics = producer.metrics()
    assert metrics["failed"] + metrics["unknown"] >= 3
    assert metrics["queue_records"] == 0
    assert metrics["queue_bytes"] == 0


def _sends(producer: Producer, topic: str) -> Report | None:
    try:
        return producer.send(topic, b"after")
    except NotDelivered:
        return None


def test_a_record_for_a_topic_that_was_deleted_fails_and_says_so(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    producer = producing(delivery_timeout_ms=3_000)
    producer.send(name, b"v")
    operations.delete_topic(cluster, name)
    with pytest.raises(NotDelivered, match=name):
        producer.send(name, b"w")


def test_a_producer_sends_what_waits_when_it_is_closed_and_nothing_after(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    producer = producing(interval_ms=3_600_000)
    delivery = producer.send_async(name, b"v")
    producer.close()
    assert delivery.result().offset == 0
    with pytest.raises(ProducerClosed):
        producer.send_async(name, b"w")
    assert len(read_partition(cluster, name, 0)) == 1
    producer.close()


def test_a_flush_that_takes_too_long_says_so(hanging: Hanging, producing: MakeProducer) -> None:
    producer = producing(bootstrap=hanging.bootstrap)
    producer.send("slow", b"v")
    hanging.hang()
    delivery = producer.send_async("slow", b"v")
    with pytest.raises(RequestTimedOut, match="1 records"):
        producer.flush(0.1)
    with pytest.raises(RequestTimedOut, match="still under way"):
        delivery.result(0.1)
    producer.close(0.1)
    assert isinstance(delivery.exception(), NotDelivered)


def test_many_threads_send_through_one_producer(producing: MakeProducer, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=3)
    producer = producing(batch_bytes=4_000)

    def send(thread: int) -> None:
        for nth in range(300):
            if nth % 10 == 0:
                producer.send(name, b"%d-%d" % (thread, nth), key=b"%d" % thread)
            else:
                producer.send_async(name, b"%d-%d" % (thread, nth), key=b"%d" % thread)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush(20.0)
    found = [record for records in read_topic(cluster, name).values() for record in records]
    for number in range(6):
        mine = [record.value for record in found if record.key == b"%d" % number]
        assert mine == [b"%d-%d" % (number, nth) for nth in range(300)]


@pytest.mark.parametrize(
    "wrong",
    [{"acks": 2}, {"codec": "rar"}, {"in_flight": 0}, {"queue_bytes": 0}, {"interval_ms": -1}, {"batch_bytes": 0}],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Producer("127.0.0.1:1", **wrong)  # type: ignore[arg-type]


@proves("G17")
def test_a_topic_that_grows_is_used_whole(producing: MakeProducer, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    producer = producing()
    producer.send(name, b"v")
    operations.create_partitions(cluster, name, 4)
    assert wait_for("the new partition", lambda: _placed(producer, name, 3)).partition == 3
    wait_for("records in all", lambda: producer.send(name, b"w").partition == 2)


def _placed(producer: Producer, topic: str, partition: int) -> Report | None:
    try:
        return producer.send(topic, b"v", partition=partition)
    except UnknownTopic:
        return None


@proves("R6")
def test_an_order_key_keeps_its_partition_when_the_topic_grows(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=2)
    producer = producing()
    keys = [b"order-%d" % nth for nth in range(12)]
    before = {key: producer.send_ordered(name, b"1", key).result().partition for key in keys}
    operations.create_partitions(cluster, name, 7)
    wait_for("the new partitions", lambda: _placed(producer, name, 6))
    after = {key: producer.send_ordered(name, b"2", key, key=b"another").result().partition for key in keys}
    assert after == before


@proves("R6")
def test_records_behind_one_of_their_order_key_that_failed_do_not_overtake_it(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(max_message_bytes=2_000)
    producer = producing(batch_bytes=500, interval_ms=3_600_000)
    heard: list[Delivery] = []

    def send(value: bytes, order_key: bytes) -> Delivery:
        return producer.send_ordered(name, value, order_key, callback=heard.append)

    good = send(b"a1", b"a")
    refused = send(b"b1" * 2_000, b"b")
    mixed = [send(b"%s-%d" % (key, nth) * 20, key) for nth in range(6) for key in (b"a", b"b")]
    producer.flush(20.0)
    after = producer.send_ordered(name, b"b-after", b"b")
    producer.flush(20.0)
    assert good.result().offset == 0
    assert isinstance(refused.exception(), NotDelivered)
    told = [delivery.exception() for delivery in mixed]
    assert all(error is None for error in told[0::2])
    assert all(error is not None and "order key" in str(error) for error in told[1::2])
    assert after.exception() is None
    expected = [b"a1", *(b"a-%d" % nth * 20 for nth in range(6)), b"b-after"]
    records = read_partition(cluster, name, 0)
    assert [record.value for record in records] == expected
    assert [delivery.result().offset for delivery in mixed[0::2]] == [1, 2, 3, 4, 5, 6]
    wait_for("the callbacks", lambda: len(heard) == 14)
    assert producer.metrics()["queue_records"] == producer.metrics()["queue_bytes"] == 0


@proves("J10")
def test_connections_cut_at_any_byte_double_nothing_and_lose_nothing(
    fresh_broker: Callable[..., Broker], seed: int
) -> None:
    proxy = CuttingProxy(seed, (2_000, 60_000))
    broker = fresh_broker(advertise=(proxy.address,))
    proxy.upstream = broker.host_port
    count = 4_000
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "cut", partitions=3)
        with Producer(broker.bootstrap, batch_bytes=3_000, interval_ms=1) as producer:
            deliveries = [
                producer.send_async("cut", b"%d" % nth + bytes(200), key=b"%d" % (nth % 50)) for nth in range(count)
            ]
            producer.flush(60.0)
            assert all(delivery.exception() is None for delivery in deliveries)
        proxy.cutting = False
    assert proxy.cuts > 10
    host, port = broker.host_port
    with Cluster(f"{host}:{port}") as cluster:
        found = read_topic(cluster, "cut")
    numbers = {part: [int((record.value or b"").rstrip(b"\0")) for record in found[part]] for part in found}
    assert sorted(number for part in numbers.values() for number in part) == list(range(count))
    for partition, order in numbers.items():
        assert order == sorted(order), f"partition {partition}"
    for nth, delivery in enumerate(deliveries):
        report = delivery.result()
        if report.offset >= 0:
            assert numbers[report.partition][report.offset] == nth


@proves("J10")
@pytest.mark.parametrize("request_timeout_ms", [300, pytest.param(60_000, marks=pytest.mark.long)])
def test_what_a_broker_that_hung_has_in_its_sockets_neither_doubles_nor_overtakes(
    hanging: Hanging, request_timeout_ms: int
) -> None:
    """Records are given up while the broker is stopped; when it goes on, it finds their requests and works on them."""
    topic = f"hung-{request_timeout_ms}"
    with Producer(
        hanging.bootstrap, batch_bytes=400, delivery_timeout_ms=3_000, request_timeout_ms=request_timeout_ms
    ) as producer:
        deliveries: list[Delivery] = []

        def send(count: int) -> None:
            first = len(deliveries)
            deliveries.extend(producer.send_async(topic, b"%d" % nth, key=b"k") for nth in range(first, first + count))

        wait_for("the first record", lambda: _sends(producer, "hung-before"))
        send(100)
        producer.flush(20.0)
        hanging.hang()
        try:
            send(200)
            producer.flush(20.0)
        finally:
            hanging.go_on()
        gone_on = len(deliveries)
        send(100)
        producer.flush(20.0)
        wait_for("the broker to answer again", lambda: _sends(producer, "hung-before"))
        send(100)
        producer.flush(20.0)
    with Cluster(hanging.bootstrap) as cluster:
        found = [int(record.value or b"") for record in read_partition(cluster, topic, 0)]
    assert found == sorted(set(found)), "overtaken or there twice"
    errors = [delivery.exception() for delivery in deliveries]
    assert {nth for nth, error in enumerate(errors) if error is None} <= set(found), "lost"
    failed = {nth for nth, error in enumerate(errors) if error is not None and not isinstance(error, DeliveryUnknown)}
    assert not failed & set(found), "told as not written, but it is"
    assert any(isinstance(error, DeliveryUnknown) for error in errors[100:gone_on])
    assert errors[-1] is None


def test_a_producer_that_is_told_nothing_but_unreachable_addresses_says_which() -> None:
    told = r"no broker answers at 127\.0\.0\.1:1 \(tried for \d+\.\d s\)"
    with Producer("127.0.0.1:1", delivery_timeout_ms=200) as producer, pytest.raises(NoBroker, match=told):
        producer.send("t", b"v")


@proves("R6")
def test_a_topic_made_anew_with_fewer_partitions_is_written_on(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic(partitions=4)
    producer = producing()
    keys = [b"%d" % number for number in range(16)]
    for delivery in [producer.send_ordered(name, b"v", key) for key in keys]:
        delivery.result()
    reports = [producer.send(name, b"v") for _ in range(4)]
    while reports[-1].partition != 1:
        # Records without a key go to partition 2 from here on.
        reports.append(producer.send(name, b"v"))
    operations.delete_topic(cluster, name)
    operations.create_topic(cluster, name, partitions=1)
    assert producer.send(name, b"w").partition == 0
    assert producer.send(name, b"w").partition == 0
    assert {producer.send_ordered(name, b"w", key).result(20.0).partition for key in keys} == {0}


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        ({"timestamp_ms": 2**70}, InvalidRecord, "timestamp_ms"),
        ({"partition": 2**70}, InvalidRecord, "partition"),
        ({"headers": [(b"k", b"v")]}, TypeError, "name is text"),
        ({"headers": [b"name"]}, TypeError, "pairs"),
    ],
)
def test_a_record_that_cannot_be_says_what_is_wrong(
    producing: MakeProducer, topic: MakeTopic, wrong: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        producing().send_async(topic(), b"v", **wrong)


def test_a_table_that_cannot_be_leaves_no_network_behind() -> None:
    before = len(connections._registry)
    with pytest.raises(SettingError):
        Producer("127.0.0.1:1", client_id="wrong table", latency_table=[(5, 1), (1, 5)])
    assert len(connections._registry) == before


@proves("R6")
def test_batches_carry_producer_id_sequence_and_codec(
    producing: MakeProducer, cluster: Cluster, topic: MakeTopic
) -> None:
    name, plain = topic(), topic()
    producer, other = producing(), producing(codec="zstd", idempotent=False)
    for _ in range(3):
        producer.send(name, b"v")
    for delivery in [other.send_async(plain, bytes(1_000)) for _ in range(20)]:
        delivery.result()
    numbered, packed = _batches(cluster, name), _batches(cluster, plain)
    assert [header.base_sequence for header in numbered] == [0, 1, 2]
    assert len({header.producer_id for header in numbered}) == 1
    assert numbered[0].producer_id >= 0
    assert {header.attributes & 7 for header in numbered} == {0}
    assert {(header.producer_id, header.base_sequence, header.attributes & 7) for header in packed} == {(-1, -1, 4)}
    assert sum(header.size_bytes for header in packed) < 5_000


def _batches(cluster: Cluster, topic: str) -> list[BatchHeader]:
    (fetched,) = fetch(cluster, [Position(topic, 0, 0)], FetchLimits(max_wait_ms=100))
    return [header for header, _ in fetched.whole_batches()]


def test_a_batch_that_cannot_be_packed_fails_alone(
    producing: MakeProducer, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic(partitions=2)
    producer = producing(interval_ms=3_600_000)
    sign = ProducerBatch.sign

    def no_memory(batch: ProducerBatch) -> bytearray:
        if batch.buffer.partition == 0:
            raise MemoryError
        return sign(batch)

    monkeypatch.setattr(ProducerBatch, "sign", no_memory)
    deliveries = [producer.send_async(name, b"v", partition=partition) for partition in (0, 1)]
    producer.flush(20.0)
    assert isinstance(deliveries[0].exception(), NotDelivered)
    assert deliveries[1].result().offset == 0
    monkeypatch.undo()
    assert producer.send(name, b"w", partition=0).offset == 0


def test_a_callback_that_ends_its_thread_keeps_no_other_from_being_run(
    producing: MakeProducer, topic: MakeTopic
) -> None:
    name = topic()
    producer = producing(interval_ms=3_600_000)
    heard: list[Delivery] = []

    def ends(delivery: Delivery) -> None:
        raise SystemExit

    producer.send_async(name, b"v", callback=ends)
    after = producer.send_async(name, b"v", callback=heard.append)
    producer.flush(20.0)
    assert heard == [after]
    assert producer.metrics()["queue_records"] == 0
