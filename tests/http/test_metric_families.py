"""What /metrics tells: families named by Prometheus' conventions, traffic by topic, replicas that are missing."""

from __future__ import annotations

import re
import time
import urllib.request
from dataclasses import replace

from confluent_kafka import Consumer, Producer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from brokers import Broker, wait_for
from headrace.cluster.image import PartitionState
from headrace.metrics import FAMILIES
from http_port import BROKER, HttpPort
from proving import proves

DEADLINE_SECONDS = 120.0
NAME = re.compile(r"(headrace|process)(_[a-z]+)+")
BASE_UNITS = ("seconds", "bytes")
OTHER_UNITS = re.compile("_(ms|milliseconds|millis|minutes|hours|days|kb|kilobytes|mb|megabytes|gb|bits|percent)(_|$)")
TAKEN_SUFFIXES = ("_bucket", "_sum", "_count", "_info_total")
TAKEN_LABELS = {"le", "quantile", "job", "instance"}


def parsed(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and values of labels, as Prometheus' own parser reads them."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def scraped(broker: Broker) -> dict[str, dict[tuple[str, ...], float]]:
    with urllib.request.urlopen(f"{broker.http}/metrics", timeout=DEADLINE_SECONDS) as answer:
        return parsed(answer.read().decode())


@proves("U4")
def test_families_are_named_by_the_conventions() -> None:
    """What `promtool check metrics` looks for."""
    for family in FAMILIES:
        assert NAME.fullmatch(family.name), family
        assert family.meaning.endswith("."), family
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        assert not family.name.endswith(TAKEN_SUFFIXES), family
        assert not OTHER_UNITS.search(family.name), family
        assert not {"counter", "gauge", "histogram"} & set(family.name.split("_")), family
        assert family.kind != "histogram" or family.name.endswith(BASE_UNITS), family
        assert all(re.fullmatch("[a-z]+", label) for label in family.labels), family
        assert not TAKEN_LABELS & set(family.labels), family


@proves("U4")
def test_names_of_families_are_unique() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)


@proves("U4")
def test_all_that_a_broker_tells_is_in_the_table_and_can_be_parsed(broker: Broker) -> None:
    known = {family.name: family for family in FAMILIES}
    with urllib.request.urlopen(f"{broker.http}/metrics", timeout=DEADLINE_SECONDS) as answer:
        told = list(text_string_to_metric_families(answer.read().decode()))
    for family in told:
        declared = known[f"{family.name}_total" if family.type == "counter" else family.name]
        assert (family.type, family.documentation) == (declared.kind, declared.meaning)
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*declared.labels}
    assert len(told) == len({family.name for family in told}) > 20


@proves("U4")
def test_a_process_tells_when_it_began(broker: Broker) -> None:
    began = scraped(broker)["process_start_time_seconds"][()]
    assert time.time() - 86_400 < began <= time.time() + 1
    assert scraped(broker)["process_start_time_seconds"][()] == began


@proves("U4")
def test_records_and_bytes_of_a_topic_are_counted_both_ways(broker: Broker) -> None:
    topic, other = "counted-both-ways", "counted-not"
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, "compression.type": "lz4"})
    for n in range(1000):
        producer.produce(topic, b"value %d" % n, partition=0)
    producer.produce(other, b"value", partition=0)
    assert producer.flush(DEADLINE_SECONDS) == 0
    now = scraped(broker)
    assert now["headrace_topic_received_records_total"][topic,] == 1000
    assert now["headrace_topic_received_records_total"][other,] == 1
    stored = now["headrace_log_bytes"][topic, "0"]
    assert now["headrace_topic_received_bytes_total"][topic,] == stored > 0
    assert now["headrace_topic_sent_records_total"][topic,] == now["headrace_topic_sent_bytes_total"][topic,] == 0
    for reads in (1, 2):
        _read_all(broker, topic, 1000)
        _wait_for_read(broker, topic, 1000 * reads)
    now = scraped(broker)
    assert now["headrace_topic_sent_bytes_total"][topic,] >= 2 * stored
    assert now["headrace_topic_sent_records_total"][other,] == 0


def _wait_for_read(broker: Broker, topic: str, count: int) -> None:
    """They count when the consumer asks for what comes next."""
    wait_for("what was read", lambda: scraped(broker)["headrace_topic_sent_records_total"][topic,] == count)


def _read_all(broker: Broker, topic: str, count: int) -> None:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "counters", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    read = 0
    while (message := consumer.poll(DEADLINE_SECONDS)) is not None and message.error() is None:
        read += 1
    assert read == count
    consumer.close()


@proves("U4")
def test_records_read_over_http_are_counted(port: HttpPort) -> None:
    port.produce("/topics/orders/records", {"records": [{"key": "k", "value": f"v{n}"} for n in range(7)]})
    assert len(port.get("/topics/orders/partitions/0/records?count=3").json["records"]) == 3
    port.get("/topics/orders/partitions/0/records?format=binary")
    told = parsed(port.get("/metrics").body.decode())
    assert told["headrace_topic_received_records_total"]["orders",] == 7
    assert told["headrace_batches_total"][()] == 1
    assert told["headrace_topic_sent_records_total"]["orders",] == 3 + 7
    assert told["headrace_topic_sent_bytes_total"]["orders",] == 9 + told["headrace_log_bytes"]["orders", "0"]


@proves("U4")
def test_partitions_that_lack_replicas_or_a_leader_are_counted(port: HttpPort) -> None:
    port.create("whole")
    port.create("lacking", 2)
    lacking = port.image.topics["lacking"]
    first = PartitionState(0, BROKER, 0, (BROKER,), (BROKER, 8, 9))
    nobody = PartitionState(1, -1, 0, (8,), (8, 9))
    changed = replace(lacking, partitions=(first, nobody))
    port.image = replace(port.image, topics={**port.image.topics, "lacking": changed})
    port.on_loop(lambda: port.partitions.drop(port.partitions.get("lacking", 1).topic_partition))
    told = parsed(port.get("/metrics").body.decode())
    assert told["headrace_under_replicated_partitions"][()] == 1
    assert told["headrace_under_min_in_sync_partitions"][()] == 0
    assert told["headrace_leaderless_partitions"][()] == 1
    assert told["headrace_partition_replicas"] == {("whole", "0"): 1, ("lacking", "0"): 3}
    assert told["headrace_in_sync_replicas"] == {("whole", "0"): 1, ("lacking", "0"): 1}
    assert told["headrace_partitions"][()] == 2


@proves("U4")
def test_a_topic_that_is_held_here_no_longer_is_not_told(port: HttpPort) -> None:
    port.produce("/topics/gone/records", b"v", "text/plain")
    assert ("gone",) in parsed(port.get("/metrics").body.decode())["headrace_topic_received_records_total"]
    gone = port.partitions.get("gone", 0).topic_partition
    port.on_loop(lambda: port.partitions.drop(gone))
    assert "headrace_topic_received_records_total" not in parsed(port.get("/metrics").body.decode())
