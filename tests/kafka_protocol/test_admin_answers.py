"""Admin APIs on the wire, in every version: AlterReplicaLogDirs, DescribeQuorum, ListConfigResources."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from brokers import Broker
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import Raw
from proving import proves

Connect = Callable[[Broker], Raw]


@pytest.mark.parametrize("version", [1, 2])
def test_a_replica_stays_in_the_one_folder_there_is(broker: Broker, connect: Connect, topic: str, version: int) -> None:
    raw = connect(broker)
    raw.create(topic)
    asked = [
        Message(path=str(broker.data), topics=[Message(name=topic, partitions=[0, 1])]),
        Message(path="/nowhere", topics=[Message(name=topic, partitions=[0])]),
    ]
    answer = raw.call(apis.ALTER_REPLICA_LOG_DIRS, version, dirs=asked)
    codes = [[row.error_code for row in result.partitions] for result in answer.results]
    assert codes == [[0, 9], [57]]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_quorum_of_another_topic_is_not_known(broker: Broker, connect: Connect, version: int) -> None:
    asked = [
        Message(topic_name="__cluster_metadata", partitions=[Message(partition_index=0)]),
        Message(topic_name="orders", partitions=[Message(partition_index=0)]),
    ]
    answer = connect(broker).call(apis.DESCRIBE_QUORUM, version, topics=asked)
    known, unknown = (topic.partitions[0] for topic in answer.topics)
    assert (known.error_code, known.leader_id) == (0, 1)
    assert (unknown.error_code, unknown.leader_id, unknown.current_voters) == (3, -1, [])


@proves("R1")
def test_every_broker_tells_the_same_leader_of_the_quorum(cluster: SharedCluster, connect: Connect) -> None:
    asked = [Message(topic_name="__cluster_metadata", partitions=[Message(partition_index=0)])]
    told = set()
    numbers = (1, 2, 3)
    for number in numbers:
        partition = connect(cluster.broker(number)).call(apis.DESCRIBE_QUORUM, 2, topics=asked).topics[0].partitions[0]
        assert sorted(voter.replica_id for voter in partition.current_voters) == list(numbers)
        told.add((partition.leader_id, partition.leader_epoch))
    assert len(told) == 1


def test_resources_are_listed_by_type(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    assert raw.call(apis.LIST_CONFIG_RESOURCES, 0).config_resources == []
    found = raw.call(apis.LIST_CONFIG_RESOURCES, 1, resource_types=[4, 4]).config_resources
    assert [(row.resource_type, row.resource_name) for row in found] == [(4, "1")]
    found = raw.call(apis.LIST_CONFIG_RESOURCES, 1, resource_types=[]).config_resources
    assert (2, topic) in [(row.resource_type, row.resource_name) for row in found]
    assert raw.call(apis.LIST_CONFIG_RESOURCES, 1, resource_types=[99]).error_code == 35
