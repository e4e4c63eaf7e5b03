"""Topics, settings and groups through our own client."""

from __future__ import annotations

import uuid

import pytest

from brokers import Broker
from client.conftest import MakeTopic
from headrace.client.admin import groups, operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import list_offsets, read_batches
from headrace.client.admin.produce import produce
from headrace.client.consumer.consumer import Consumer
from headrace.client.errors import Refusal, UnknownTopic
from headrace.client.fetch_requests import EARLIEST
from headrace.client.producer.request import Outgoing
from headrace.errors import ErrorCode
from headrace.records import kernel
from proving import proves


def own_settings(cluster: Cluster, name: str) -> dict[str, str | None]:
    return {c.name: c.value for c in operations.describe_configs(cluster, "topic", name) if c.source == "topic"}


@proves("J7")
def test_a_topic_is_created_enlarged_altered_and_deleted(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2, retention_ms=86_400_000)
    described = cluster.topic(name)
    assert [p.index for p in described.partitions] == [0, 1]
    assert described.topic_id != bytes(16)
    assert own_settings(cluster, name) == {"retention.ms": "86400000"}
    operations.alter_configs(cluster, "topic", name, values={"segment.bytes": "1048576"}, unset=["retention.ms"])
    assert own_settings(cluster, name) == {"segment.bytes": "1048576"}
    operations.create_partitions(cluster, name, 4)
    assert len(cluster.topic(name).partitions) == 4
    operations.delete_topic(cluster, name)
    with pytest.raises(UnknownTopic, match=f"there is no topic {name!r}"):
        cluster.topic(name)


def test_what_cannot_be_done_to_a_topic_is_refused_with_the_reason(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    with pytest.raises(Refusal) as exists:
        operations.create_topic(cluster, name)
    assert exists.value.kafka_code == 36
    with pytest.raises(Refusal) as fewer:
        operations.create_partitions(cluster, name, 1)
    assert fewer.value.kafka_code == 37
    with pytest.raises(Refusal, match=r"nonsense\.setting"):
        operations.alter_configs(cluster, "topic", name, values={"nonsense.setting": "1"})
    with pytest.raises(Refusal) as replicas:
        operations.create_topic(cluster, name + "-2", replicas=99)
    assert replicas.value.kafka_code == 38
    with pytest.raises(UnknownTopic):
        operations.delete_topic(cluster, "not-there")


def test_the_cluster_and_its_folders_are_described(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    produce(cluster, [Outgoing(name, 1, kernel.build([(1, None, b"x" * 500, [])]))])
    described = operations.describe_cluster(cluster)
    assert described.cluster_id
    assert described.controller_id in {broker.broker_id for broker in described.brokers}
    sizes = {size.partition: size.size_bytes for size in operations.describe_log_folders(cluster, [name])}
    assert sizes.keys() == {0, 1}
    assert sizes[1] >= 500
    broker_id = described.brokers[0].broker_id
    assert any(config.name == "node.id" for config in operations.describe_configs(cluster, "broker", str(broker_id)))


def test_records_before_an_offset_are_deleted(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    produce(cluster, [Outgoing(name, 0, kernel.build([(1, None, b"x", [])])) for _ in range(10)])
    assert operations.delete_records(cluster, name, {0: 4}) == {0: 4}
    assert list_offsets(cluster, name, {0: EARLIEST})[0].offset == 4
    with pytest.raises(Refusal, match="start at `beginning`"):
        read_batches(cluster, name, 0, 3, 1)
    assert operations.delete_records(cluster, name, {0: -1}) == {0: 10}


def test_a_group_is_described_and_protected_while_it_has_members(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name, group_id = topic(partitions=3), f"g-{uuid.uuid4().hex[:8]}"
    with Consumer(name, bootstrap=broker.bootstrap, group=group_id, assignor="range", commit_interval_ms=0) as consumer:
        assert consumer.position(name, 1) == 0
        assert groups.fetch_offsets(cluster, group_id) == {}
        consumer.commit({(name, 1): 7})
        described = groups.describe_group(cluster, group_id)
        assert (described.state, described.assignor) == ("Stable", "range")
        assert [m.assignment for m in described.members] == [{name: (0, 1, 2)}]
        assert group_id in {listed.group_id for listed in groups.list_groups(cluster)}
        with pytest.raises(Refusal, match="stop its consumers first"):
            groups.delete_group(cluster, group_id)
    assert groups.describe_group(cluster, group_id).members == ()
    assert groups.fetch_offsets(cluster, group_id) == {(name, 1): 7}


def test_offsets_of_a_group_without_members_can_be_set_and_deleted(cluster: Cluster, topic: MakeTopic) -> None:
    name, group_id = topic(partitions=2), f"g-{uuid.uuid4().hex[:8]}"
    groups.commit_offsets(cluster, group_id, {(name, 0): 3, (name, 1): 4})
    assert groups.fetch_offsets(cluster, group_id) == {(name, 0): 3, (name, 1): 4}
    groups.delete_offsets(cluster, group_id, [(name, 0)])
    assert groups.fetch_offsets(cluster, group_id) == {(name, 1): 4}
    assert groups.fetch_offsets(cluster, group_id, [(name, 0)]) == {}
    groups.delete_group(cluster, group_id)
    with pytest.raises(Refusal) as gone:
        groups.describe_group(cluster, group_id)
    assert gone.value.kafka_code == ErrorCode.GROUP_ID_NOT_FOUND
