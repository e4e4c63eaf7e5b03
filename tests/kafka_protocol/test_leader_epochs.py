"""OffsetForLeaderEpoch: what a consumer has read stands as long as the log holds it, wherever the watermark is."""

from __future__ import annotations

from collections.abc import Callable

from brokers import Broker
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of
from proving import proves


@proves("G2")
def test_an_epoch_ends_where_the_log_says_not_where_the_watermark_is(
    broker: Broker, connect: Callable[[Broker], Raw], topic: str
) -> None:
    """KIP-320: a leader whose watermark is behind must not make consumers believe that records are gone."""
    raw = connect(broker)
    raw.create(topic, min_insync_replicas="2")
    assert raw.produce(topic, batch_of([b"a", b"b"]), acks=1).error_code == 0
    asked = Message(partition=0, current_leader_epoch=-1, leader_epoch=0)
    answer = raw.call(
        apis.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=[Message(topic=topic, partitions=[asked])]
    )  # fmt: skip
    row = answer.topics[0].partitions[0]
    assert (row.error_code, row.leader_epoch, row.end_offset) == (0, 0, 2)
    assert raw.fetch(topic).high_watermark == 0
