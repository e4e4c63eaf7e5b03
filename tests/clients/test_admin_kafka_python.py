"""The admin calls of kafka-python."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.admin import ConfigResource, OffsetSpec
from kafka.errors import InvalidTopicError, TopicAlreadyExistsError, UnknownTopicOrPartitionError
from kafka.structs import OffsetAndMetadata

from brokers import Broker, wait_for
from clients.records import Client, Record
from clients.topics import MakeTopic
from proving import proves


@pytest.fixture
def admin(broker: Broker) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    yield client
    client.close()


@proves("J7")
def test_topics_live_and_die(admin: KafkaAdminClient) -> None:
    name = f"admin-{uuid.uuid4()}"
    admin.create_topics({name: {"num_partitions": 3, "replication_factor": 1, "configs": {"retention.ms": "60000"}}})
    with pytest.raises(TopicAlreadyExistsError):
        admin.create_topics({name: {"num_partitions": 3, "replication_factor": 1}})
    with pytest.raises(InvalidTopicError):
        admin.create_topics({"no spaces allowed": {"num_partitions": 1, "replication_factor": 1}})
    assert name in admin.list_topics()
    (described,) = admin.describe_topics([name])
    assert [partition["partition_index"] for partition in described["partitions"]] == [0, 1, 2]
    by_id = admin.describe_topics([uuid.UUID(str(described["topic_id"]))])
    assert [topic["name"] for topic in by_id] == [name]
    admin.create_partitions({name: 5})
    wait_for("five partitions", lambda: len(admin.describe_topics([name])[0]["partitions"]) == 5)
    paged = admin.describe_topic_partitions([name], response_partition_limit=2)
    assert len(paged["topics"][0]["partitions"]) == 2
    assert paged["next_cursor"] == {"topic_name": name, "partition_index": 2}
    rest = admin.describe_topic_partitions([name], cursor=paged["next_cursor"])
    assert [p["partition_index"] for p in rest["topics"][0]["partitions"]] == [2, 3, 4]
    admin.delete_topics([name])
    assert name not in admin.list_topics()
    with pytest.raises(UnknownTopicOrPartitionError):
        admin.delete_topics([name])


@pytest.mark.parametrize("incremental", [True, False])
def test_settings_change(admin: KafkaAdminClient, topic: MakeTopic, incremental: bool) -> None:
    name = topic()

    def modified() -> dict[str, str]:
        described = admin.describe_configs([ConfigResource("topic", name)])["topic"][name]
        return {key: entry["value"] for key, entry in described.items()}

    admin.alter_configs([ConfigResource("topic", name, {"retention.ms": "60000"})], incremental=incremental)
    assert modified() == {"retention.ms": "60000"}
    admin.alter_configs([ConfigResource("topic", name, {"segment.bytes": "1048576"})], incremental=incremental)
    assert modified() == {"retention.ms": "60000", "segment.bytes": "1048576"}
    admin.reset_configs([ConfigResource("topic", name, ["retention.ms"])], incremental=incremental)
    assert modified() == {"segment.bytes": "1048576"}


def test_offsets_and_deleted_records(
    admin: KafkaAdminClient, broker: Broker, clients: dict[str, Client], topic: MakeTopic
) -> None:
    name = topic()
    clients["kafka-python"].produce(broker.bootstrap, name, [Record(b"%d" % n) for n in range(10)])
    partition = TopicPartition(name, 0)
    deleted = admin.delete_records({partition: 4})
    assert deleted[partition]["low_watermark"] == 4
    assert admin.list_partition_offsets({partition: OffsetSpec.EARLIEST})[partition].offset == 4
    assert admin.list_partition_offsets({partition: OffsetSpec.LATEST})[partition].offset == 10


def test_groups_and_their_offsets(admin: KafkaAdminClient, broker: Broker, topic: MakeTopic) -> None:
    name, group = topic(2), f"group-{uuid.uuid4()}"
    partition = TopicPartition(name, 0)
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap, group_id=group, enable_auto_commit=False)
    consumer.assign([partition])
    consumer.commit({partition: OffsetAndMetadata(7, "a note", -1)})
    consumer.close()
    assert group in {listed["group_id"] for listed in admin.list_groups()}
    assert group in {listed["group_id"] for listed in admin.list_groups(states_filter=["Empty"])}
    assert admin.describe_groups([group])[group]["group_state"] == "Empty"
    committed = admin.list_group_offsets([group])[group][partition]
    assert (committed.offset, committed.metadata) == (7, "a note")
    admin.alter_group_offsets(group, {partition: OffsetAndMetadata(3, "", -1)})
    assert admin.list_group_offsets({group: [partition]})[group][partition].offset == 3
    admin.delete_group_offsets(group, [partition])
    assert partition not in admin.list_group_offsets([group])[group]
    admin.alter_group_offsets(group, {partition: OffsetAndMetadata(3, "", -1)})
    admin.delete_groups([group])
    assert group not in {listed["group_id"] for listed in admin.list_groups()}


def test_cluster_and_log_dirs(
    admin: KafkaAdminClient, broker: Broker, clients: dict[str, Client], topic: MakeTopic
) -> None:
    name = topic(2)
    clients["kafka-python"].produce(broker.bootstrap, name, [Record(b"x" * 1000)])
    cluster = admin.describe_cluster()
    assert [(node["host"], node["port"]) for node in cluster["brokers"]] == [broker.host_port]
    assert cluster["controller_id"] == 1
    (answer,) = admin.describe_log_dirs([name])
    sizes = {
        part["partition_index"]: part["partition_size"]
        for folder in answer["log_dirs"]
        for described in folder["topics"]
        for part in described["partitions"]
        if described["name"] == name
    }
    assert sizes[0] > 1000
    assert sizes[1] == 0


def test_the_quorum_is_described_as_the_controller_and_who_can_become_it(admin: KafkaAdminClient) -> None:
    quorum = admin.describe_metadata_quorum()
    (partition,) = quorum["topics"][0]["partitions"]
    assert partition["leader_id"] == 1
    assert partition["leader_epoch"] >= 1
    assert [voter["replica_id"] for voter in partition["current_voters"]] == [1]
    assert [node["node_id"] for node in quorum["nodes"]] == [1]


def test_resources_that_have_settings_are_listed(admin: KafkaAdminClient, topic: MakeTopic) -> None:
    name = topic()
    listed = admin.list_config_resources()
    assert name in listed["topic"]
    assert listed["broker"] == ["1"]
    assert admin.list_config_resources(["BROKER"]) == {"broker": ["1"]}


def test_replicas_are_not_moved_between_folders(admin: KafkaAdminClient, broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    asked = {(name, 0, 1): "/somewhere/else", (name, 7, 1): str(broker.data)}
    assert {place: error.errno for place, error in admin.alter_replica_log_dirs(asked).items()} == {
        (name, 0, 1): 57,
        (name, 7, 1): 9,
    }
    (answer,) = admin.alter_replica_log_dirs({(name, 0, 1): str(broker.data)}).values()
    assert answer.errno == 0
