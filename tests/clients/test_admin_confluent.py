"""The admin calls of confluent-kafka."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

from brokers import Broker, wait_for
from clients.records import FIRST_TIMESTAMP_MS, Client, Record
from clients.topics import MakeTopic
from proving import proves

DEADLINE_S = 120.0
Offsets: Any = OffsetSpec


@pytest.fixture
def admin(broker: Broker) -> AdminClient:
    """Held for the whole test: a client that is collected loses its answers."""
    return AdminClient({"bootstrap.servers": broker.bootstrap})


def only(answers: dict[Any, Any]) -> Any:
    (future,) = answers.values()
    return future.result(DEADLINE_S)


def error_of(answers: dict[Any, Any]) -> int:
    with pytest.raises(KafkaException) as raised:
        only(answers)
    error: KafkaError = raised.value.args[0]
    return error.code()


def committed_group(broker: Broker, topic: str, offset: int) -> str:
    group = f"group-{uuid.uuid4()}"
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    consumer.close()
    return group


@proves("J7")
def test_topics_are_created_described_enlarged_and_deleted(admin: AdminClient) -> None:
    name = f"admin-{uuid.uuid4()}"
    only(admin.create_topics([NewTopic(name, 3, 1, config={"retention.ms": "60000"})]))
    assert error_of(admin.create_topics([NewTopic(name, 3, 1)])) == KafkaError.TOPIC_ALREADY_EXISTS
    assert len(admin.list_topics(timeout=DEADLINE_S).topics[name].partitions) == 3
    described = only(admin.describe_topics(TopicCollection([name])))
    assert (described.name, len(described.partitions), described.is_internal) == (name, 3, False)
    assert [partition.leader.id for partition in described.partitions] == [1, 1, 1]
    only(admin.create_partitions([NewPartitions(name, 5)]))
    wait_for("five partitions", lambda: len(only(admin.describe_topics(TopicCollection([name]))).partitions) == 5)
    assert error_of(admin.create_partitions([NewPartitions(name, 2)])) == KafkaError.INVALID_PARTITIONS
    only(admin.delete_topics([name]))
    assert name not in admin.list_topics(timeout=DEADLINE_S).topics
    assert error_of(admin.delete_topics([name])) == KafkaError.UNKNOWN_TOPIC_OR_PART


@proves("J7")
def test_a_dry_run_creates_nothing(admin: AdminClient) -> None:
    name = f"admin-{uuid.uuid4()}"
    only(admin.create_topics([NewTopic(name, 3, 1)], validate_only=True))
    assert name not in admin.list_topics(timeout=DEADLINE_S).topics


@proves("R15")
@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (NewTopic("no spaces allowed", 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("..", 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("n" * 250, 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("no-partitions", 0, 1), KafkaError.INVALID_PARTITIONS),
        (NewTopic("too-many-replicas", 1, 3), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic("odd-setting", 1, 1, config={"no.such.setting": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic("odd-value", 1, 1, config={"retention.ms": "soon"}), KafkaError.INVALID_CONFIG),
    ],
    ids=lambda value: value.topic[:20] if isinstance(value, NewTopic) else None,
)
def test_topics_that_cannot_be(admin: AdminClient, topic: NewTopic, code: int) -> None:
    assert error_of(admin.create_topics([topic])) == code


def test_topic_settings_are_described_and_altered(admin: AdminClient, topic: MakeTopic) -> None:
    name = topic(retention_ms=60_000)

    def settings() -> dict[str, str]:
        entries = only(admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, name)]))
        return {entry.name: entry.value for entry in entries.values()}

    assert settings()["retention.ms"] == "60000"
    assert settings()["cleanup.policy"] == "delete"
    change = ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND)
    only(admin.incremental_alter_configs([ConfigResource("topic", name, incremental_configs=[change])]))
    assert sorted(settings()["cleanup.policy"].split(",")) == ["compact", "delete"]
    assert settings()["retention.ms"] == "60000"
    reset = ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE)
    only(admin.incremental_alter_configs([ConfigResource("topic", name, incremental_configs=[reset])]))
    assert settings()["retention.ms"] == "604800000"
    only(admin.alter_configs([ConfigResource("topic", name, set_config={"segment.bytes": "1048576"})]))
    assert settings()["segment.bytes"] == "1048576"
    assert settings()["cleanup.policy"] == "delete", "what a full alter does not name goes back to its default"
    wrong = ConfigResource("topic", name, set_config={"retention.ms": "soon"})
    assert error_of(admin.alter_configs([wrong])) == KafkaError.INVALID_CONFIG


def test_broker_settings_are_described(admin: AdminClient) -> None:
    entries = only(admin.describe_configs([ConfigResource(ConfigResource.Type.BROKER, "1")]))
    assert entries["num.partitions"].value == "1"


def settings_of(admin: AdminClient, kind: Any, name: str) -> dict[str, Any]:
    return dict(only(admin.describe_configs([ConfigResource(kind, name)])))


def altered(admin: AdminClient, kind: Any, name: str, **changes: tuple[Any, str]) -> dict[str, Any]:
    """What is described after the changes, each an operation and a value by a name with underscores for dots."""
    entries = [
        ConfigEntry(key.replace("_", "."), value, incremental_operation=operation)
        for key, (operation, value) in changes.items()
    ]
    resource = ConfigResource(kind, name, incremental_configs=entries)
    only(admin.incremental_alter_configs([resource]))
    return {key: entry.value for key, entry in settings_of(admin, kind, name).items()}


def test_broker_settings_answer_under_the_names_that_kafka_gives_them(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker(settings={"rack": "RACK1", "log.max.message.bytes": 4321})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    described = settings_of(admin, ConfigResource.Type.BROKER, "1")
    values = {name: entry.value for name, entry in described.items()}
    assert (values["broker.id"], values["node.id"], values["broker.rack"]) == ("1", "1", "RACK1")
    assert values["advertised.listeners"] == f"PLAINTEXT://{broker.bootstrap}"
    assert values["listeners"] == "PLAINTEXT://127.0.0.1:0"
    assert values["log.dirs"] == values["data"]
    assert (values["message.max.bytes"], described["message.max.bytes"].is_read_only) == ("4321", False)
    assert described["broker.rack"].is_read_only
    for name in (
        "auto.create.topics.enable", "compression.type", "default.replication.factor", "min.insync.replicas",
        "group.initial.rebalance.delay.ms", "num.partitions", "offsets.topic.replication.factor", "log.roll.ms",
        "offsets.retention.minutes", "replica.lag.time.max.ms", "log.cleaner.backoff.ms", "replica.selector.class",
    ):  # fmt: skip
        assert name in values, name


def test_broker_settings_are_altered_by_either_name(fresh_broker: Callable[..., Broker]) -> None:
    """librdkafka's case 0081 sets what has no meaning here too."""
    broker = fresh_broker()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    put, remove = AlterConfigOpType.SET, AlterConfigOpType.DELETE
    add, subtract = AlterConfigOpType.APPEND, AlterConfigOpType.SUBTRACT
    kind = ConfigResource.Type.BROKER
    found = altered(
        admin,
        kind,
        "1",
        background_threads=(put, "9"),
        log_cleanup_policy=(add, "compact"),
        message_max_bytes=(put, "1234"),
        sasl_kerberos_min_time_before_relogin=(put, "58000"),
    )
    assert (found["background.threads"], found["log.cleanup.policy"]) == ("9", "delete,compact")
    assert (found["message.max.bytes"], found["log.max.message.bytes"]) == ("1234", "1234")
    found = altered(
        admin,
        kind,
        "1",
        background_threads=(remove, ""),
        log_cleanup_policy=(subtract, "compact"),
        message_max_bytes=(remove, ""),
    )
    assert (found["background.threads"], found["log.cleanup.policy"]) == ("10", "delete")
    assert found["message.max.bytes"] == "1048588"


@proves("F9")
def test_the_rates_that_kafkas_tool_sets_for_a_move_are_taken_and_put_back(fresh_broker: Callable[..., Broker]) -> None:
    """kafka-reassign-partitions --throttle sets both on every broker, and removes both when the move has ended."""
    admin = AdminClient({"bootstrap.servers": fresh_broker().bootstrap})
    put, remove, kind = AlterConfigOpType.SET, AlterConfigOpType.DELETE, ConfigResource.Type.BROKER
    rates = ("leader_replication_throttled_rate", "follower_replication_throttled_rate")
    moving = altered(admin, kind, "1", **dict.fromkeys(rates, (put, "1000000")))
    assert moving["leader.replication.throttled.rate"] == moving["replica.catchup.bytes.per.second"] == "1000000"
    assert moving["follower.replication.throttled.rate"] == "1000000"
    moved = altered(admin, kind, "1", **dict.fromkeys(rates, (remove, "")))
    assert moved["replica.catchup.bytes.per.second"] == str(50 << 20)


def test_settings_of_a_group_are_kept_by_its_name(admin: AdminClient) -> None:
    put, remove, kind = AlterConfigOpType.SET, AlterConfigOpType.DELETE, ConfigResource.Type.GROUP
    group = f"a/group {uuid.uuid4()}"
    described = settings_of(admin, kind, group)
    assert described["consumer.session.timeout.ms"].value == "45000"
    assert altered(admin, kind, group, consumer_session_timeout_ms=(put, "50000")) == {
        "consumer.session.timeout.ms": "50000",
        "consumer.heartbeat.interval.ms": "5000",
        "errors.deadletterqueue.copy.record.enable": "false",
        "errors.deadletterqueue.topic.name": "",
        "share.auto.offset.reset": "latest",
        "share.heartbeat.interval.ms": "5000",
        "share.isolation.level": "read_uncommitted",
        "share.record.lock.duration.ms": "30000",
        "share.retry.backoff.ms": "",
        "share.session.timeout.ms": "45000",
    }
    found = altered(admin, kind, group, consumer_session_timeout_ms=(remove, ""))
    assert found["consumer.session.timeout.ms"] == "45000"
    entry = ConfigEntry("segment.bytes", "1", incremental_operation=put)
    wrong = ConfigResource(kind, group, incremental_configs=[entry])
    assert error_of(admin.incremental_alter_configs([wrong])) == KafkaError.INVALID_CONFIG


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("leader.replication.throttled.replicas", "0:1,1:2", True),
        ("follower.replication.throttled.replicas", "*", True),
        ("leader.replication.throttled.replicas", "all of them", False),
        ("local.retention.ms", "-2", True),
        ("local.retention.bytes", "1000000", True),
        ("local.retention.bytes", "-3", False),
        ("remote.storage.enable", "false", True),
        ("remote.storage.enable", "true", False),
        ("remote.log.copy.disable", "true", False),
        ("segment.jitter.ms", "1000", True),
        ("preallocate", "true", True),
        ("message.timestamp.before.max.ms", "3600000", True),
    ],
)
def test_topic_settings_that_kafka_has_are_taken_or_refused_with_a_reason(
    admin: AdminClient, topic: MakeTopic, name: str, value: str, taken: bool
) -> None:
    made, kind = topic(), ConfigResource.Type.TOPIC
    if taken:
        found = altered(admin, kind, made, **{name.replace(".", "_"): (AlterConfigOpType.SET, value)})
        assert found[name] == value
        return
    with pytest.raises(KafkaException) as refused:
        altered(admin, kind, made, **{name.replace(".", "_"): (AlterConfigOpType.SET, value)})
    assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG
    assert name in refused.value.args[0].str()


def test_the_cluster_is_described(admin: AdminClient, broker: Broker) -> None:
    cluster = admin.describe_cluster().result(DEADLINE_S)
    assert [f"{node.host}:{node.port}" for node in cluster.nodes] == [broker.bootstrap]
    assert cluster.controller.id == 1
    assert cluster.cluster_id


def names(operations: list[Any] | None) -> set[str]:
    return {operation.name for operation in operations or ()}


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_client_may_do_is_told_when_it_asks(
    admin: AdminClient, broker: Broker, topic: MakeTopic, asked: bool
) -> None:
    name = topic()
    group = committed_group(broker, name, 0)
    cluster = admin.describe_cluster(include_authorized_operations=asked).result(DEADLINE_S)
    described = only(admin.describe_topics(TopicCollection([name]), include_authorized_operations=asked))
    members = only(admin.describe_consumer_groups([group], include_authorized_operations=asked))
    settings = {"DESCRIBE_CONFIGS", "ALTER_CONFIGS"} if asked else set()
    on_group = settings | ({"READ", "DESCRIBE", "DELETE"} if asked else set())
    assert names(members.authorized_operations) == on_group
    on_topic = on_group | ({"WRITE", "CREATE", "ALTER"} if asked else set())
    assert names(described.authorized_operations) == on_topic
    on_cluster = {"CREATE", "ALTER", "DESCRIBE", "CLUSTER_ACTION", "IDEMPOTENT_WRITE"} if asked else set()
    assert names(cluster.authorized_operations) == settings | on_cluster


@proves("G12")
def test_offsets_by_every_specification(
    admin: AdminClient, broker: Broker, clients: dict[str, Client], topic: MakeTopic
) -> None:
    name = topic()
    stamps = [FIRST_TIMESTAMP_MS + step for step in (0, 5000, 1000)]
    for stamp in stamps:
        clients["confluent-kafka"].produce(broker.bootstrap, name, [Record(b"v", timestamp_ms=stamp)])
    partition = TopicPartition(name, 0)

    def ask(spec: Any) -> Any:
        return only(admin.list_offsets({partition: spec}))

    assert ask(Offsets.earliest()).offset == 0
    assert ask(Offsets.latest()).offset == 3
    assert (ask(Offsets.max_timestamp()).offset, ask(Offsets.max_timestamp()).timestamp) == (1, stamps[1])
    assert ask(Offsets.for_timestamp(FIRST_TIMESTAMP_MS + 1)).offset == 1


def test_records_are_deleted_up_to_an_offset(
    admin: AdminClient, broker: Broker, clients: dict[str, Client], topic: MakeTopic
) -> None:
    name = topic()
    clients["confluent-kafka"].produce(broker.bootstrap, name, [Record(b"%d" % n) for n in range(10)])
    assert only(admin.delete_records([TopicPartition(name, 0, 4)])).low_watermark == 4
    assert only(admin.list_offsets({TopicPartition(name, 0): Offsets.earliest()})).offset == 4
    assert error_of(admin.delete_records([TopicPartition(name, 0, 11)])) == KafkaError.OFFSET_OUT_OF_RANGE


def test_groups_are_listed_described_altered_and_deleted(admin: AdminClient, broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    group = committed_group(broker, name, 7)
    assert group in {listed.group_id for listed in admin.list_consumer_groups().result(DEADLINE_S).valid}
    described = only(admin.describe_consumer_groups([group]))
    assert (described.state.name, described.members) == ("EMPTY", [])
    where = ConsumerGroupTopicPartitions(group, [TopicPartition(name, 0)])
    assert only(admin.list_consumer_group_offsets([where])).topic_partitions[0].offset == 7
    moved = ConsumerGroupTopicPartitions(group, [TopicPartition(name, 0, 3)])
    only(admin.alter_consumer_group_offsets([moved]))
    every = ConsumerGroupTopicPartitions(group)
    assert [p.offset for p in only(admin.list_consumer_group_offsets([every])).topic_partitions] == [3]
    only(admin.delete_consumer_groups([group]))
    assert group not in {listed.group_id for listed in admin.list_consumer_groups().result(DEADLINE_S).valid}
    assert error_of(admin.delete_consumer_groups([group])) == KafkaError.GROUP_ID_NOT_FOUND


def test_a_group_with_members_is_described_and_not_deleted(
    admin: AdminClient, broker: Broker, topic: MakeTopic
) -> None:
    name, group = topic(2), f"group-{uuid.uuid4()}"
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group, "client.id": "a member"})
    consumer.subscribe([name])
    while not consumer.assignment():
        consumer.poll(0.1)
    described = only(admin.describe_consumer_groups([group]))
    assert (described.state.name, described.partition_assignor) == ("STABLE", "range")
    (member,) = described.members
    assert member.client_id == "a member"
    assert sorted(p.partition for p in member.assignment.topic_partitions) == [0, 1]
    assert error_of(admin.delete_consumer_groups([group])) == KafkaError.NON_EMPTY_GROUP
    consumer.close()
