"""Groups over HTTP: reading from where a group left off, commits without a member, and what a member does to them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from brokers import Broker, wait_for
from headrace.cluster.image import Broker as Registered
from headrace.cluster.image import Endpoint
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.http import groups
from http_port import Answer, HttpPort
from proving import proves

DEADLINE_SECONDS = 120.0
JSON_BODY = {"Content-Type": "application/json"}


def ask(broker: Broker, method: str, target: str, body: object | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(broker.http + target, data, JSON_BODY, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def member(broker: Broker, group: str, topic: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    try:
        yield consumer
    finally:
        consumer.close()


def values(consumer: Consumer, count: int) -> list[int]:
    found: list[int] = []

    def complete() -> bool:
        for message in consumer.consume(count - len(found), 0.2):
            assert message.error() is None
            value = message.value()
            assert isinstance(value, bytes)
            found.append(int(value))
        return len(found) == count

    wait_for("the records", complete)
    return found


def commit(port: HttpPort, group: str, *offsets: dict[str, object]) -> Answer:
    return port.ask("POST", f"/groups/{group}/offsets", json.dumps({"offsets": offsets}).encode(), JSON_BODY)


def at(offset: int, topic: str = "orders", partition: int = 0, **more: object) -> dict[str, object]:
    return {"topic": topic, "partition": partition, "offset": offset, **more}


@proves("U5", "G18")
def test_a_group_goes_on_by_kafka_where_it_was_by_http_and_back(broker: Broker) -> None:
    topic, group = "shared-work", "http-and-kafka"
    assert ask(broker, "POST", "/topics", {"name": topic, "partitions": 2})[0] == 201
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for n in range(100):
        producer.produce(topic, b"%d" % n, partition=n % 2)
    assert producer.flush(DEADLINE_SECONDS) == 0

    by_http: list[int] = []
    while len(by_http) < 40:
        status, page = ask(broker, "GET", f"/topics/{topic}/records?group={group}&count=10")
        assert status == 200
        by_http += [int(record["value"]) for record in page["records"]]
        status, committed = ask(broker, "POST", f"/groups/{group}/offsets", {"offsets": page["offsets"]})
        assert (status, committed["offsets"]) == (200, page["offsets"])

    with member(broker, group, topic) as consumer:
        by_kafka = values(consumer, 50)
        consumer.commit(asynchronous=False)
        status, described = ask(broker, "GET", f"/groups/{group}")
        assert (status, described["state"], len(described["members"])) == (200, "Stable", 1)
        status, refused = ask(broker, "POST", f"/groups/{group}/offsets", {"offsets": [at(0, topic)]})
        assert (status, refused["error"]["kind"]) == (409, "GroupHasMembers")
        assert "has 1 live members" in refused["error"]["message"]
        assert ask(broker, "DELETE", f"/groups/{group}")[0] == 409

    wait_for("the member to be gone", lambda: ask(broker, "GET", f"/groups/{group}")[1]["state"] == "Empty")
    status, rest = ask(broker, "GET", f"/topics/{topic}/records?group={group}")
    assert status == 200
    seen = by_http + by_kafka + [int(record["value"]) for record in rest["records"]]
    assert sorted(seen) == list(range(100))
    assert len(rest["records"]) == 10


@proves("U5")
def test_what_was_committed_over_http_is_what_a_kafka_client_finds(broker: Broker) -> None:
    assert ask(broker, "POST", "/topics", {"name": "told"})[0] == 201
    body = {"offsets": [at(7, "told", metadata="half past")]}
    assert ask(broker, "POST", "/groups/told-group/offsets", body)[0] == 200
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "told-group"})
    try:
        [found] = consumer.committed([TopicPartition("told", 0)], timeout=DEADLINE_SECONDS)
        assert (found.offset, found.metadata) == (7, "half past")
        consumer.commit(offsets=[TopicPartition("told", 0, 3)], asynchronous=False)
    finally:
        consumer.close()
    offsets = ask(broker, "GET", "/groups/told-group/offsets")[1]["offsets"]
    assert offsets == [{"topic": "told", "partition": 0, "offset": 3, "metadata": "", "lag": 0}]
    listed = ask(broker, "GET", "/groups")[1]
    assert listed["elsewhere"] == 0
    assert {"group": "told-group", "state": "Empty", "type": "classic", "protocol_type": ""} in listed["groups"]
    assert ask(broker, "DELETE", "/groups/told-group/offsets?topic=told") == (
        200,
        {"group": "told-group", "deleted": [{"topic": "told", "partition": 0}]},
    )
    assert ask(broker, "GET", "/groups/told-group/offsets")[1]["offsets"] == []
    assert ask(broker, "DELETE", "/groups/told-group") == (200, {"group": "told-group", "deleted": True})
    assert ask(broker, "GET", "/groups/told-group")[0] == 404


@proves("U5")
def test_a_partition_is_read_from_where_the_group_left_off(port: HttpPort) -> None:
    port.produce("/topics/orders/records", {"records": [{"value": f"v{n}"} for n in range(10)]})

    def read(query: str) -> list[str]:
        found = port.get(f"/topics/orders/partitions/0/records?group=g{query}").json
        return [record["value"] for record in found["records"]]

    assert read("&count=2") == ["v0", "v1"]
    assert read("&reset=latest") == []
    assert commit(port, "g", at(8)).json == {"group": "g", "offsets": [at(8)]}
    assert read("") == read("&reset=latest") == ["v8", "v9"]
    assert commit(port, "g", at(99)).status == 200
    assert len(read("")) == 10, "there is no offset 99: the group begins as one that has none"
    assert read("&reset=latest") == []


@proves("U5")
def test_a_topic_is_read_whole_with_a_cursor(port: HttpPort) -> None:
    port.create("orders", 3)
    records = [{"value": f"{n}", "partition": n % 3} for n in range(300)]
    port.produce("/topics/orders/records", {"records": records})
    seen: list[tuple[int, int]] = []
    target = "/topics/orders/records?count=70"
    while page := port.get(target).json:
        if not page["records"]:
            break
        assert len(page["records"]) <= 70
        seen += [(record["partition"], int(record["value"])) for record in page["records"]]
        target = f"/topics/orders/records?count=70&cursor={page['cursor']}"
    assert sorted(value for _, value in seen) == list(range(300))
    for partition in range(3):
        ours = [value for index, value in seen if index == partition]
        assert ours == sorted(ours)
    assert (page["cursor"], page["elsewhere"]) == ("0:100,1:100,2:100", 0)
    small = port.get("/topics/orders/records?max_bytes=5").json
    assert 1 <= len(small["records"]) <= 5


@proves("U5")
def test_no_partition_waits_behind_a_busy_one(port: HttpPort) -> None:
    port.create("orders", 3)
    port.produce("/topics/orders/records", {"records": [{"value": "v", "partition": n % 3} for n in range(30)]})
    found = {port.get("/topics/orders/records?count=1").json["records"][0]["partition"] for _ in range(3)}
    assert found == {0, 1, 2}


@proves("U5")
def test_a_read_of_a_topic_waits_for_the_first_record_of_any_partition(port: HttpPort) -> None:
    port.create("orders", 3)
    waiting = port.connection()
    waiting.request("GET", "/topics/orders/records?wait_ms=60000&offset=latest")
    wait_for("it to wait", lambda: port.partitions.get("orders", 2).has_readers)
    port.produce("/topics/orders/records?partition=2", b"late", "text/plain")
    answer = json.loads(waiting.getresponse().read())
    assert [(record["partition"], record["value"]) for record in answer["records"]] == [(2, "late")]
    waiting.close()
    assert port.get("/topics/orders/records?wait_ms=1&offset=latest").json["records"] == []


@proves("U5")
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("group=g&offset=3", "give group or offset"),
        ("group=g&cursor=0:1", "give cursor or group"),
        ("reset=latest", "give group too"),
        ("cursor=0:0&offset=soon", "is not a whole number"),
        ("cursor=0:0&reset=latest", "give group too"),
        ("group=g&reset=last", "neither earliest nor latest"),
        ("group=", "the group name is empty"),
        ("group=__headrace.x", "reserved"),
        ("cursor=0", "the offset in query parameter cursor: ''"),
        ("cursor=0:1,0:2", "named twice"),
        ("cursor=a:1", "the partition in query parameter cursor: 'a'"),
        ("cursor=", "the partition in query parameter cursor: ''"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(port: HttpPort, query: str, says: str) -> None:
    port.create("orders")
    answer = port.get(f"/topics/orders/records?{query}")
    assert (answer.status, says in answer.error["message"]) == (400, True), answer.error


@proves("U5")
@pytest.mark.parametrize(
    ("offsets", "status", "says"),
    [
        ([], 400, "offsets is not a list such as"),
        ([{"topic": "orders", "partition": 0}], 400, "offset 0 has no offset"),
        ([at(1, "other")], 404, "there is no topic 'other'"),
        ([at(1, partition=1)], 404, "has partitions 0 to 0, not 1"),
        ([at(-1)], 400, "is not a whole number from 0"),
        ([at(1 << 63)], 400, "is not a whole number from 0"),
        ([at(1), at(2)], 400, "named twice"),
        ([at(1), "x"], 400, "offset 1 is not a JSON object"),
        ([at(1, more=1)], 400, "unknown field 'more'"),
        ([at(1, metadata="é" * 2049)], 400, "metadata may have 4096 bytes"),
        ([at(1, metadata="\ud800")], 400, "not valid text"),
        ([at(1), at(2), at(3), at(4)], 400, "one request takes 3 offsets"),
    ],
)
def test_a_commit_that_makes_no_sense_is_refused_whole(
    port: HttpPort, monkeypatch: pytest.MonkeyPatch, offsets: Any, status: int, says: str
) -> None:
    monkeypatch.setattr(groups, "COMMITS_MAX", 3)
    port.create("orders")
    answer = commit(port, "g", *offsets)
    assert (answer.status, says in answer.error["message"]) == (status, True), answer.error
    assert port.get("/groups/g/offsets").json == {"group": "g", "offsets": []}
    assert port.get("/groups/g").status == 404


@proves("U5")
def test_another_broker_s_group_names_its_coordinator(port: HttpPort) -> None:
    port.create("orders")
    port.create(OFFSETS_TOPIC, internal=True)

    def move() -> None:
        topic = port.image.topics[OFFSETS_TOPIC]
        moved = replace(topic, partitions=(replace(topic.partitions[0], leader=8),))
        other = Registered(8, {}, "", 0, http=Endpoint("other", 8083))
        port.image = replace(
            port.image,
            topics={**port.image.topics, OFFSETS_TOPIC: moved},
            brokers={**port.image.brokers, 8: other},
        )

    port.on_loop(move)
    for answer in (
        commit(port, "g", at(1)),
        port.get("/groups/g"),
        port.get("/groups/g/offsets"),
        port.get("/topics/orders/records?group=g"),
    ):
        assert (answer.status, answer.error["kind"], answer.error["retriable"]) == (503, "NotCoordinator", True)
        assert "is coordinated by broker 8; ask at http://other:8083" in answer.error["message"]
    assert port.get("/groups").json == {"groups": [], "elsewhere": 1}


@proves("U5")
def test_a_commit_that_could_not_be_written_is_not_answered_as_if_it_was(faulty_port: HttpPort) -> None:
    faulty_port.create("orders")
    assert commit(faulty_port, "g", at(5)).status == 200
    faulty_port.faults.capacity_bytes = 0
    answer = commit(faulty_port, "g", at(6))
    assert (answer.status, answer.error["retriable"]) == (503, True)
    assert faulty_port.get("/groups/g/offsets").json["offsets"][0]["offset"] == 5


@proves("U5")
def test_a_topic_is_read_from_a_cold_disk_without_a_wait_of_the_loop(faulty_port: HttpPort) -> None:
    port = faulty_port
    port.create("orders", 3)
    port.produce("/topics/orders/records", {"records": [{"value": f"{n}", "partition": n % 3} for n in range(30)]})
    for index in range(3):
        [piece] = port.on_loop(lambda index=index: port.partitions.get("orders", index).read(0, 1 << 20).slices)  # type: ignore[misc]
        port.on_loop(lambda path=piece.file.path: port.faults.evict(path))  # type: ignore[misc]
    found = port.get("/topics/orders/records").json
    assert sorted(int(record["value"]) for record in found["records"]) == list(range(30))
