from __future__ import annotations

import json
from dataclasses import asdict, replace

from headrace.cluster.image import Image
from headrace.placement.listing import BrokerRow, HeldRow, PartitionRow, ReplicaRow, by_broker, by_topic
from headrace.placement.moves import begin_move
from placement.placed import image_of
from proving import proves


def image() -> Image:
    """Broker 3 is down, and partition 1 of topic t moves to broker 4."""
    placed = image_of([1, 2, 4], {"t": [[1, 3], [2, 1]], "a": [[3]]}, racks={2: "r"}, draining={2})
    topic = placed.topics["t"]
    moving = begin_move(replace(topic.partitions[1], leader_epoch=6), (4, 1))
    return replace(placed, topics={**placed.topics, "t": replace(topic, partitions=(topic.partitions[0], moving))})


@proves("G15")
def test_by_topic_every_partition_tells_its_leader_replicas_and_move() -> None:
    assert by_topic(image(), {("t", 0, 1): 50}) == (
        PartitionRow("a", 0, -1, 0, (ReplicaRow(3, in_sync=True, live=False),)),
        PartitionRow("t", 0, 1, 0, (ReplicaRow(1, True, True, 50), ReplicaRow(3, False, False))),
        PartitionRow(
            "t",
            1,
            2,
            6,
            (ReplicaRow(2, True, True), ReplicaRow(1, True, True), ReplicaRow(4, False, True)),
            target=(4, 1),
        ),
    )


@proves("G15")
def test_by_broker_everything_that_it_leads_and_follows_is_listed() -> None:
    assert by_broker(image(), {("t", 0, 1): 50}) == (
        BrokerRow(1, True, False, "", (HeldRow("t", 0, True, 50),), (HeldRow("t", 1, True),)),
        BrokerRow(2, True, True, "r", (HeldRow("t", 1, True),), ()),
        BrokerRow(3, False, False, "", (), (HeldRow("a", 0, True), HeldRow("t", 0, False))),
        BrokerRow(4, True, False, "", (), (HeldRow("t", 1, False),)),
    )


def test_rows_are_ready_for_json() -> None:
    rows: list[PartitionRow | BrokerRow] = [*by_topic(image()), *by_broker(image())]
    assert json.loads(json.dumps([asdict(row) for row in rows]))[0]["replicas"][0]["broker"] == 3


def test_both_views_hold_the_same_replicas() -> None:
    by_partition = {(row.topic, row.partition, held.broker) for row in by_topic(image()) for held in row.replicas}
    assert by_partition == {
        (held.topic, held.partition, row.broker) for row in by_broker(image()) for held in (*row.leads, *row.follows)
    }
