"""A cluster over HTTP: topics made at any broker or a registry are known to all, groups are found at one broker."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from brokers import Broker, wait_for
from clusters import BrokerCluster
from proving import proves
from registries import Registry


def ask(server: Broker, method: str, target: str, body: object | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.http + target, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def attempt(server: Broker, method: str, target: str, body: object | None = None) -> tuple[int, Any]:
    try:
        return 200, ask(server, method, target, body)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def names(server: Broker) -> set[str]:
    return {topic["name"] for topic in ask(server, "GET", "/topics")["topics"]}


@proves("U5", "R1")
def test_a_topic_made_at_one_door_of_the_cluster_is_known_at_all(cluster: BrokerCluster, registry: Registry) -> None:
    doors = [*cluster.brokers, registry]
    for number, door in enumerate(doors):
        name = f"by-door-{number}"
        made = ask(door, "POST", "/topics", {"name": name, "partitions": 2, "replicas": 2})
        assert [sorted(state["replicas"]) for state in made["partition_list"]] == [[1, 2], [1, 2]]
        for other in doors:
            wait_for("the topic", lambda: name in names(other))  # noqa: B023
        next_door = doors[(number + 1) % len(doors)]
        assert ask(next_door, "DELETE", f"/topics/{name}") == {"name": name, "deleted": True}
        for other in doors:
            wait_for("the topic to be gone", lambda: name not in names(other))  # noqa: B023


@proves("U5")
def test_a_group_s_commit_is_taken_by_its_coordinator_and_others_name_that(cluster: BrokerCluster, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": topic})
    place = TopicPartition(topic, 1)
    try:
        consumer.committed([place], timeout=60)
        commit = {"offsets": [{"topic": topic, "partition": 1, "offset": 4}]}
        answers = [attempt(broker, "POST", f"/groups/{topic}/offsets", commit) for broker in cluster.brokers]
        assert sorted(status for status, _ in answers) == [200, 503]
        there, elsewhere = sorted(cluster.brokers, key=lambda broker: answers[cluster.brokers.index(broker)][0])
        assert answers[cluster.brokers.index(there)][1]["offsets"] == commit["offsets"]
        for status, message in (
            answers[cluster.brokers.index(elsewhere)],
            attempt(elsewhere, "GET", f"/topics/{topic}/records?group={topic}"),
        ):
            assert (status, message.endswith(f"; ask at {there.http}")) == (503, True), message
        assert consumer.committed([place], timeout=60)[0].offset == 4
    finally:
        consumer.close()
