"""DeleteRecords on the wire: what its timeout is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from brokers import Broker
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of

Connect = Callable[[Broker], Raw]


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_records_without_other_replicas_are_deleted_whatever_the_timeout(
    broker: Broker, connect: Connect, topic: str, timeout_ms: int
) -> None:
    raw = connect(broker)
    raw.create(topic, partitions=3)
    for partition in range(3):
        assert raw.produce(topic, batch_of([b"a", b"b", b"c"]), partition=partition).error_code == 0
    wanted = [Message(partition_index=0, offset=2), Message(partition_index=1, offset=-1)]
    beyond = Message(partition_index=2, offset=4)
    asked = Message(name=topic, partitions=[*wanted, beyond])
    rows = raw.call(apis.DELETE_RECORDS, 2, topics=[asked], timeout_ms=timeout_ms).topics[0].partitions
    assert [(row.error_code, row.low_watermark) for row in rows] == [(0, 2), (0, 3), (1, -1)]
