"""The admin calls of kafkajs."""

from __future__ import annotations

import uuid

import pytest

from brokers import Broker, wait_for
from clients.records import Record
from clients.topics import MakeTopic
from clients.with_kafkajs import KafkaJS, KafkaJSError
from proving import proves

TOPIC_RESOURCE = 2


@proves("J7")
def test_topics_with_kafkajs(broker: Broker, kafkajs: KafkaJS) -> None:
    name, at = f"admin-{uuid.uuid4()}", broker.bootstrap
    assert kafkajs.admin(at, "createTopics", {"topics": [{"topic": name, "numPartitions": 3}]}) is True
    assert kafkajs.admin(at, "createTopics", {"topics": [{"topic": name, "numPartitions": 3}]}) is False
    with pytest.raises(KafkaJSError):
        kafkajs.admin(at, "createTopics", {"topics": [{"topic": "no spaces allowed", "numPartitions": 1}]})
    assert name in kafkajs.admin(at, "listTopics")
    kafkajs.admin(at, "createPartitions", {"topicPartitions": [{"topic": name, "count": 5}]})

    def partitions() -> list[int]:
        described = kafkajs.admin(at, "fetchTopicMetadata", {"topics": [name]})["topics"][0]
        return sorted(partition["partitionId"] for partition in described["partitions"])

    wait_for("five partitions", lambda: partitions() == [0, 1, 2, 3, 4])
    kafkajs.admin(at, "deleteTopics", {"topics": [name]})
    assert name not in kafkajs.admin(at, "listTopics")


def test_settings_and_cluster_with_kafkajs(broker: Broker, kafkajs: KafkaJS, topic: MakeTopic) -> None:
    name, at = topic(), broker.bootstrap
    resource = {"type": TOPIC_RESOURCE, "name": name}

    def setting(key: str) -> str:
        asked = {"resources": [{**resource, "configNames": [key]}], "includeSynonyms": False}
        (entry,) = kafkajs.admin(at, "describeConfigs", asked)["resources"][0]["configEntries"]
        return str(entry["configValue"])

    assert setting("cleanup.policy") == "delete"
    change = {**resource, "configEntries": [{"name": "cleanup.policy", "value": "compact"}]}
    kafkajs.admin(at, "alterConfigs", {"validateOnly": False, "resources": [change]})
    wait_for("the change", lambda: setting("cleanup.policy") == "compact")
    cluster = kafkajs.admin(at, "describeCluster")
    assert [(node["host"], node["port"]) for node in cluster["brokers"]] == [broker.host_port]
    assert cluster["controller"] == 1


def test_offsets_and_groups_with_kafkajs(broker: Broker, kafkajs: KafkaJS, topic: MakeTopic) -> None:
    name, group, at = topic(), f"group-{uuid.uuid4()}", broker.bootstrap
    kafkajs.produce(at, name, [Record(b"%d" % n) for n in range(10)])
    # kafkajs asks no metadata of its own here: it has to have seen the topic.
    before_four = {"topic": name, "partitions": [{"partition": 0, "offset": "4"}]}
    kafkajs.admin(at, "deleteTopicRecords", before_four, after=("fetchTopicOffsets", name))
    (offsets,) = kafkajs.admin(at, "fetchTopicOffsets", name)
    assert (offsets["low"], offsets["high"]) == ("4", "10")

    def committed() -> str:
        (found,) = kafkajs.admin(at, "fetchOffsets", {"groupId": group, "topics": [name]})
        return str(found["partitions"][0]["offset"])

    kafkajs.admin(
        at, "setOffsets", {"groupId": group, "topic": name, "partitions": [{"partition": 0, "offset": "7"}]}
    )  # fmt: skip
    assert committed() == "7"
    kafkajs.admin(at, "resetOffsets", {"groupId": group, "topic": name, "earliest": True})
    assert committed() in ("4", "-2"), "kafkajs writes the position it found, or that it wants the earliest"
    assert group in {listed["groupId"] for listed in kafkajs.admin(at, "listGroups")["groups"]}
    (described,) = kafkajs.admin(at, "describeGroups", [group])["groups"]
    assert described["state"] == "Empty"
    assert kafkajs.admin(at, "deleteGroups", [group])[0]["errorCode"] == 0
    assert group not in {listed["groupId"] for listed in kafkajs.admin(at, "listGroups")["groups"]}
