"""Topics made, altered and deleted over HTTP: as Kafka's own APIs do it, with the same refusals."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from brokers import Broker, wait_for
from headrace.http import documents
from headrace.http.message import Request
from http_port import Answer, HttpPort
from proving import proves

DEADLINE_SECONDS = 120.0
JSON_BODY = {"Content-Type": "application/json"}


def change(port: HttpPort, method: str, target: str, body: object) -> Answer:
    return port.ask(method, target, json.dumps(body).encode(), JSON_BODY)


def ask(broker: Broker, method: str, target: str, body: object | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(broker.http + target, data, JSON_BODY, method=method)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@proves("U5")
def test_a_kafka_client_sees_the_topic_that_was_made_altered_and_deleted_over_http(broker: Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    settings = {"retention.ms": 60_000, "cleanup.policy": ["compact", "delete"], "follower.reads": True}
    status, made = ask(broker, "POST", "/topics", {"name": "made-by-http", "partitions": 2, "settings": settings})
    assert status == 201
    assert made["overrides"] == {
        "retention.ms": "60000",
        "cleanup.policy": "compact,delete",
        "follower.reads": "true",
    }
    assert len(admin.list_topics(timeout=DEADLINE_SECONDS).topics["made-by-http"].partitions) == 2

    status, altered = ask(
        broker, "PATCH", "/topics/made-by-http", {"settings": {"retention.ms": None, "segment.bytes": 1 << 20}}
    )
    assert status == 200
    assert altered["settings"]["segment.bytes"] == str(1 << 20)
    resource = ConfigResource(ConfigResource.Type.TOPIC, "made-by-http")
    [seen] = [found.result(DEADLINE_SECONDS) for found in admin.describe_configs([resource]).values()]
    assert {name: seen[name].value for name in altered["settings"]} == altered["settings"]
    assert altered["overrides"].keys() == {"cleanup.policy", "follower.reads", "segment.bytes"}

    status, enlarged = ask(broker, "PATCH", "/topics/made-by-http", {"partitions": 3})
    assert (status, enlarged["partitions"]) == (200, 3)
    assert ask(broker, "DELETE", "/topics/made-by-http") == (200, {"name": "made-by-http", "deleted": True})
    wait_for("the topic to be gone", lambda: "made-by-http" not in admin.list_topics(timeout=DEADLINE_SECONDS).topics)
    status, gone = ask(broker, "DELETE", "/topics/made-by-http")
    assert (status, gone["error"]["kind"]) == (404, "UnknownPartition")


@proves("U5")
def test_a_dry_run_says_what_would_be_made_and_makes_nothing(port: HttpPort) -> None:
    answer = change(port, "POST", "/topics?dry_run=true", {"name": "tried", "assignments": [[7], [7]]})
    assert (answer.status, answer.json["partitions"], answer.json["partition_list"][1]["replicas"]) == (200, 2, [7])
    assert port.get("/topics/tried").status == 404
    assert change(port, "POST", "/topics?dry_run=yes", {"name": "tried"}).status == 400


@proves("U5")
@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"name": "a b"}, 400, "InvalidTopicName", "characters that are not allowed"),
        ({"name": "__consumer_offsets"}, 400, "InvalidTopicName", "is the broker's own"),
        ({"name": "there"}, 409, "TopicExists", "is there already"),
        ({"name": "new", "partitions": 0}, 400, "InvalidPartitions", "0 partitions asked for"),
        ({"name": "new", "partitions": 10_001}, 400, "InvalidPartitions", "a topic has 1 to 10000"),
        ({"name": "new", "replicas": 2}, 400, "InvalidReplication", "2"),
        ({"name": "new", "settings": {"durabilty": "disk"}}, 400, "InvalidConfig", "durability"),
        ({"name": "new", "settings": {"retention.ms": "soon"}}, 400, "InvalidConfig", "soon"),
        ({"name": "new", "settings": {"retention.ms": {}}}, 400, "InvalidRequest", "retention.ms is not text"),
        ({"name": "new", "settings": ["a"]}, 400, "InvalidRequest", "settings is not an object"),
        ({"name": "new", "assignments": [[8]]}, 400, "InvalidAssignment", "8"),
        ({"name": "new", "assignments": [7]}, 400, "InvalidRequest", "[[1, 2], [2, 1]]"),
        ({"name": "new", "assignments": [[7]], "partitions": 1}, 400, "InvalidRequest", "not with both"),
        ({"name": 1}, 400, "InvalidRequest", "name is not text"),
        ({"name": "\ud800"}, 400, "InvalidRequest", "name is not valid text"),
        ({"partitions": 1}, 400, "InvalidRequest", "the body has no name"),
        ({"name": "new", "partitions": True}, 400, "InvalidRequest", "partitions is not a whole number"),
        ({"name": "new", "replica": 1}, 400, "InvalidRequest", "unknown field 'replica'"),
        ([], 400, "InvalidRequest", "not a JSON object"),
    ],
)
def test_a_topic_that_cannot_be_made_is_refused_with_the_reason(
    port: HttpPort, body: object, status: int, kind: str, says: str
) -> None:
    port.create("there")
    answer = change(port, "POST", "/topics", body)
    assert (answer.status, answer.error["kind"]) == (status, kind)
    assert says in answer.error["message"]
    assert port.get("/topics/new").status == 404


@proves("U5")
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"partitions": 1}, 400, "the new total must be larger"),
        ({"partitions": 2, "settings": {}}, 400, "each is a change of its own"),
        ({}, 400, "each is a change of its own"),
        ({"settings": {"nothing": "1"}}, 400, "unknown setting 'nothing'"),
    ],
)
def test_an_alteration_that_makes_no_sense_is_refused(port: HttpPort, body: object, status: int, says: str) -> None:
    assert change(port, "POST", "/topics", {"name": "orders"}).status == 201
    answer = change(port, "PATCH", "/topics/orders", body)
    assert (answer.status, says in answer.error["message"]) == (status, True)
    assert change(port, "PATCH", "/topics/other", {"partitions": 2}).status == 404


@proves("U5")
def test_a_page_in_a_browser_cannot_make_or_delete_topics(port: HttpPort) -> None:
    """What it may send without asking us first is of other content types, by GET or POST."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b"):
        answer = port.ask("POST", "/topics", b'{"name":"forged"}', {"Content-Type": kind, "Origin": "http://elsewhere"})
        assert (answer.status, answer.error["kind"]) == (415, "UnknownContentType")
        assert "send application/json" in answer.error["message"]
    asked = port.ask("OPTIONS", "/topics", None, {"Access-Control-Request-Method": "DELETE", "Origin": "http://e"})
    assert asked.status == 405
    assert not any(name.lower().startswith("access-control") for name in asked.headers)


@proves("U5")
def test_a_topic_made_over_http_is_written_and_read_at_once(port: HttpPort) -> None:
    assert change(port, "POST", "/topics", {"name": "orders", "partitions": 2}).status == 201
    assert port.produce("/topics/orders/records?partition=1", b"v", "text/plain").status == 200
    assert port.get("/topics/orders/partitions/1/records").json["records"][0]["value"] == "v"
    assert port.ask("DELETE", "/topics/orders").status == 200
    assert port.get("/topics/orders/partitions/1/records").status == 404


def test_a_field_that_is_null_is_as_one_that_is_not_there() -> None:
    request = Request(
        "POST", "/topics", {}, (("content-type", b"application/json"),), b'{"name":"a","partitions":null}'
    )
    assert documents.read_object(request, ("name", "partitions")) == {"name": "a"}
