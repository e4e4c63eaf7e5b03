"""A real broker deletes only what a real client has committed for the archive's group.

That nothing was deleted is told by a second topic with the same settings but without `retention.archived`: when
retention has taken all of it, it has looked at the other one as well.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from brokers import Broker, wait_for
from clients.topics import create_topic
from proving import proves

GROUP = "headrace-archive"
TOPIC = "events"
RECORDS = 120
COMMITTED = 61
SETTINGS = {"retention_ms": 1, "segment_bytes": 1024, "segment_index_bytes": 4096, "file_delete_delay_ms": 0}
_controls = itertools.count()


def produce(broker: Broker, topic: str, count: int = RECORDS) -> None:
    """One batch a record, so that segments end where the size says."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0, "batch.num.messages": 1})
    for n in range(count):
        producer.produce(topic, b"%d" % n * 20, partition=0)
    assert producer.flush(30) == 0


def watermarks(broker: Broker, topic: str) -> tuple[int, int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "unused"})
    low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
    consumer.close()
    return low, high


def retention_has_passed(broker: Broker) -> None:
    control = create_topic(broker, f"control-{next(_controls)}", **SETTINGS)
    produce(broker, control, 1)
    wait_for("retention of a topic without an archive", lambda: watermarks(broker, control) == (1, 1))


def commit(broker: Broker, offset: int, group: str = GROUP) -> None:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    committed = consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)
    assert committed[0].error is None
    consumer.close()


def bases(broker: Broker) -> list[int]:
    """Where segments begin; none in the layout `shared`."""
    return sorted(int(path.stem) for path in (broker.data / TOPIC / f"{TOPIC}-0").glob("*.log"))


def described(broker: Broker) -> dict[str, Any]:
    with urllib.request.urlopen(f"{broker.http}/topics/{TOPIC}", timeout=30) as answer:
        partition: dict[str, Any] = json.load(answer)["partition_list"][0]
        return partition


def metrics(broker: Broker) -> str:
    with urllib.request.urlopen(f"{broker.http}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def alter(broker: Broker, value: str) -> None:
    entry = ConfigEntry("retention.archived", value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


def archived_topic(fresh_broker: Callable[..., Broker]) -> Broker:
    broker = fresh_broker(settings={"retention.check.ms": 50, "group.initial.rebalance.delay.ms": 0})
    create_topic(broker, TOPIC, retention_archived="true", **SETTINGS)
    produce(broker, TOPIC)
    assert len(bases(broker)) > 5 or (broker.data / "@commitlog").exists()
    return broker


@proves("S4")
def test_nothing_goes_before_its_commit_and_then_no_more_than_was_committed(
    fresh_broker: Callable[..., Broker],
) -> None:
    broker = archived_topic(fresh_broker)
    retention_has_passed(broker)
    commit(broker, RECORDS, group="somebody-else")
    retention_has_passed(broker)
    assert watermarks(broker, TOPIC) == (0, RECORDS)
    segments = bases(broker)
    commit(broker, COMMITTED)
    wait_for("what is archived to go", lambda: watermarks(broker, TOPIC)[0] > 0)
    retention_has_passed(broker)
    low, high = watermarks(broker, TOPIC)
    assert high == RECORDS
    assert 0 < low <= COMMITTED
    assert bases(broker) == [base for base in segments if base >= low], "whole segments, where there are any"
    assert not segments or low in segments
    shown = described(broker)
    assert shown["archived_offset"] == COMMITTED
    assert 0 < shown["held_bytes"] <= shown["size_bytes"]
    assert f'headrace_archived_offset{{topic="{TOPIC}",partition="0"}} {COMMITTED}' in metrics(broker)
    for clean in (False, True):
        broker.restart(clean=clean)
        retention_has_passed(broker)
        assert watermarks(broker, TOPIC) == (low, RECORDS)
    commit(broker, 0)
    retention_has_passed(broker)
    assert watermarks(broker, TOPIC) == (low, RECORDS), "an archive that begins anew holds everything that is left"
    broker.kill()
    broker.start()
    commit(broker, RECORDS)
    wait_for("everything to go", lambda: watermarks(broker, TOPIC) == (RECORDS, RECORDS))


@proves("S4")
def test_the_setting_is_altered_while_the_broker_runs(fresh_broker: Callable[..., Broker]) -> None:
    broker = archived_topic(fresh_broker)
    alter(broker, "false")
    wait_for("retention without the archive", lambda: watermarks(broker, TOPIC) == (RECORDS, RECORDS))
    alter(broker, "true")
    produce(broker, TOPIC)
    retention_has_passed(broker)
    assert watermarks(broker, TOPIC) == (RECORDS, 2 * RECORDS)


@proves("S4")
def test_a_topic_of_the_same_name_begins_without_what_the_archive_has_of_the_old_one(
    fresh_broker: Callable[..., Broker],
) -> None:
    broker = archived_topic(fresh_broker)
    commit(broker, RECORDS)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([TOPIC])[TOPIC].result(30)
    create_topic(broker, TOPIC, retention_archived="true", **SETTINGS)
    produce(broker, TOPIC, 2 * RECORDS)
    retention_has_passed(broker)
    assert watermarks(broker, TOPIC) == (0, 2 * RECORDS)


@proves("S4")
def test_records_deleted_by_hand_go_and_the_broker_says_so(fresh_broker: Callable[..., Broker]) -> None:
    broker = archived_topic(fresh_broker)
    commit(broker, 10)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for offset, retained in ((5, 10), (50, 50)):  # retention too may delete what is archived
        wanted = TopicPartition(TOPIC, 0, offset)
        assert offset <= admin.delete_records([wanted])[wanted].result(30).low_watermark <= retained
    assert watermarks(broker, TOPIC) == (50, RECORDS)
    assert broker.stderr().count("which are not archived") == 1
    assert f"{TOPIC}-0: a client deletes offsets 10 to 49, which are not archived" in broker.stderr()


@proves("S4")
def test_a_default_for_all_topics_leaves_the_brokers_own_topics_alone(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker(settings={"log.retention.archived": True, "offsets.topic.partitions": 1})
    create_topic(broker, TOPIC)
    commit(broker, 0)
    held = [line.split("} ")[0] for line in metrics(broker).splitlines() if line.startswith("headrace_held_bytes{")]
    assert held == [f'headrace_held_bytes{{topic="{TOPIC}",partition="0"']
    assert (broker.data / "__consumer_offsets").exists()
