"""What clients hear of a partition whose key is missing in coordination: nobody leads it, and the others go on."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing

from brokers import Broker, wait_for
from headrace.coordination.choice import FILE
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of, values
from proving import proves

TOPIC = "orders"
METADATA_VERSIONS = (1, 4, 8, 9, 12, 13)


def take_key(broker: Broker) -> tuple[object, ...]:
    """Of partition 1, from a stopped broker's metadata; answers the row."""
    with closing(sqlite3.connect(broker.data / FILE)) as file, file:
        (row,) = file.execute("SELECT * FROM keys WHERE key LIKE ?", (f"%/partitions/{TOPIC}/1",)).fetchall()
        file.execute("DELETE FROM keys WHERE key = ?", row[:1])
    return tuple(row)


def put_back(broker: Broker, row: tuple[object, ...]) -> None:
    with closing(sqlite3.connect(broker.data / FILE)) as file, file:
        file.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?)", row)


def described(raw: Raw, version: int) -> dict[int, Message]:
    answer = raw.call(
        apis.METADATA,
        version,
        topics=[Message(name=TOPIC, topic_id=bytes(16))],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    assert [found.error_code for found in answer.topics] == [ErrorCode.NONE]
    return {found.partition_index: found for found in answer.topics[0].partitions}


@proves("R1", "J6")
def test_a_partition_without_its_key_has_no_leader_and_comes_back_with_it(
    fresh_broker: Callable[..., Broker], connect: Callable[[Broker], Raw]
) -> None:
    broker = fresh_broker()
    raw = connect(broker)
    raw.create(TOPIC, partitions=3)
    for index in range(3):
        assert raw.produce(TOPIC, batch_of([b"%d" % index]), partition=index).error_code == ErrorCode.NONE
    broker.stop()
    row = take_key(broker)
    broker.start()
    raw = connect(broker)
    wait_for("the others are led", lambda: all(described(raw, 12)[index].leader_id == 1 for index in (0, 2)))
    for version in METADATA_VERSIONS:
        missing = described(raw, version)[1]
        assert (missing.error_code, missing.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, -1), version
        assert (missing.replica_nodes, missing.isr_nodes) == ([], []), version
    assert raw.produce(TOPIC, batch_of([b"refused"]), partition=1).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert raw.fetch(TOPIC, partition=1).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    asked = [Message(partition_index=1, current_leader_epoch=-1, timestamp=-1)]
    offsets = raw.call(
        apis.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=[Message(name=TOPIC, partitions=asked)]
    )
    assert offsets.topics[0].partitions[0].error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert raw.produce(TOPIC, batch_of([b"nowhere"]), partition=3).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert raw.produce(TOPIC, batch_of([b"more"]), partition=2).error_code == ErrorCode.NONE
    broker.stop()
    put_back(broker, row)
    broker.start()
    raw = connect(broker)
    wait_for("all are led", lambda: all(found.leader_id == 1 for found in described(raw, 12).values()))
    assert values(raw.fetch(TOPIC, partition=1).records) == [b"1"]
