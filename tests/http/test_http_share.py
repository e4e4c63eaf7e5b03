"""Share groups over HTTP: receive, and acknowledge by handle; with whole brokers of both layouts, and a cluster."""

from __future__ import annotations

import base64
import json
import secrets
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brokers import Broker, Brokers, wait_for
from clients.sharing import DEADLINE_S, QUICK, share_group
from clusters import BrokerCluster
from headrace import Consumer, ShareConsumer
from headrace.client.admin.cluster import Cluster
from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC
from headrace.errors import InvalidRequest
from headrace.http.handles import Handle, parse
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves

LONG_MS = 20_000


@pytest.fixture(scope="module", params=[PARTITIONED, SHARED])
def share_broker(brokers: Brokers, request: pytest.FixtureRequest) -> Iterator[Broker]:
    broker = brokers.start(settings={**QUICK, "log.layout": request.param})
    yield broker
    broker.discard()


def ask(http: str, target: str, body: object | None = None) -> tuple[int, Any]:
    """Status and answer of a POST."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(http + target, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=2 * DEADLINE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def receive(broker: Broker, group: str, topic: str, **query: object) -> list[dict[str, Any]]:
    target = f"/groups/{group}/receive?" + urllib.parse.urlencode({"topic": topic, "wait_ms": LONG_MS, **query})
    status, answer = ask(broker.http, target)
    assert status == 200, answer
    assert (answer["group"], answer["topic"]) == (group, topic)
    found: list[dict[str, Any]] = answer["records"]
    return found


def acknowledge(broker: Broker, group: str, **said: list[str]) -> tuple[int, Any]:
    return ask(broker.http, f"/groups/{group}/acknowledge", said)


def write(broker: Broker, count: int, partitions: int = 1) -> str:
    """A new topic with so many records."""
    topic = f"t-{uuid.uuid4()}"
    assert ask(broker.http, "/topics", {"name": topic, "partitions": partitions})[0] == 201
    records = [{"value": str(number), "partition": number % partitions} for number in range(count)]
    assert ask(broker.http, f"/topics/{topic}/records", {"records": records})[0] == 200
    return topic


def handles(records: list[dict[str, Any]]) -> list[str]:
    return [record["handle"] for record in records]


def shown(records: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(record["value"], record["delivery_count"]) for record in records]


@proves("Q1", "J4")
def test_records_are_received_and_acknowledged_each_in_its_way(share_broker: Broker) -> None:
    topic, group = write(share_broker, 5), share_group(share_broker.bootstrap)
    first = receive(share_broker, group, topic, count=4)
    assert shown(first) == [(str(number), 1) for number in range(4)]
    one, two, three, four = handles(first)
    status, answer = acknowledge(share_broker, group, accept=[one], release=[two], reject=[three], renew=[four])
    assert status == 200, answer
    assert [result["acknowledged"] for result in answer["results"]] == ["accept", "release", "reject", "renew"]
    assert [result["handle"] for result in answer["results"]] == [one, two, three, four]
    again = receive(share_broker, group, topic)
    assert shown(again) == [("1", 2), ("4", 1)]
    assert acknowledge(share_broker, group, accept=[four, *handles(again)])[0] == 200, "a renewed handle stays valid"
    assert receive(share_broker, group, topic, wait_ms=500) == []


@proves("Q1")
def test_who_waits_is_given_what_is_written_meanwhile(share_broker: Broker) -> None:
    topic, group = write(share_broker, 1), share_group(share_broker.bootstrap)
    held = receive(share_broker, group, topic)
    with ShareConsumer(topic, bootstrap=share_broker.bootstrap, group=group) as member:
        assert member.poll(500) == [], "members that speak Kafka share the same records"
    status, answer = acknowledge(share_broker, group, release=handles(held))
    assert status == 200, answer
    with ShareConsumer(topic, bootstrap=share_broker.bootstrap, group=group) as member:
        assert [(record.value, record.delivery_count) for record in member.poll(LONG_MS)] == [(b"0", 2)]


@proves("Q1")
def test_a_handle_is_good_until_its_lock_has_run_out_and_once(share_broker: Broker) -> None:
    topic = write(share_broker, 2)
    group = share_group(share_broker.bootstrap, share_record_lock_duration_ms=1000)
    late = handles(receive(share_broker, group, topic))
    again = receive(share_broker, group, topic)
    assert shown(again) == [("0", 2), ("1", 2)]
    for how in ("accept", "release", "reject", "renew"):
        status, answer = acknowledge(share_broker, group, **{how: late})
        assert (status, answer["results"][0]["error"]["kind"]) == (409, "InvalidRecordState")
    status, answer = acknowledge(share_broker, group, accept=[late[0], handles(again)[1]])
    assert status == 207
    assert [list(result) for result in answer["results"]] == [["handle", "error"], ["handle", "acknowledged"]]
    assert acknowledge(share_broker, group, accept=[handles(again)[0]])[0] == 200
    assert acknowledge(share_broker, group, accept=handles(again))[0] == 409
    assert acknowledge(share_broker, group, release=late)[0] == 409


@proves("Q1")
def test_foreign_and_forged_handles_are_refused(share_broker: Broker) -> None:
    topic, group = write(share_broker, 1), share_group(share_broker.bootstrap)
    (text,) = handles(receive(share_broker, group, topic))
    other = share_group(share_broker.bootstrap)
    status, answer = acknowledge(share_broker, other, accept=[text])
    assert (status, answer["error"]["kind"]) == (400, "InvalidRequest")
    assert "was given" in answer["error"]["message"]
    real = parse(group, text)
    forged = real._replace(secret=secrets.token_bytes(16)).text(group)
    ahead = real._replace(offset=1000).text(group)
    status, answer = acknowledge(share_broker, group, accept=[forged, ahead])
    assert status == 409
    assert {result["error"]["kind"] for result in answer["results"]} == {"InvalidRecordState"}
    nowhere = real._replace(topic_id=bytes(16)).text(group)
    assert acknowledge(share_broker, group, accept=[nowhere])[0] == 404
    beyond = real._replace(partition=7).text(group)
    assert acknowledge(share_broker, group, accept=[beyond])[0] == 404
    for wrong in ("", "x", "ä", text + "A", text[:-1], text.swapcase(), base64.b64encode(b"y" * 49).decode()):
        status, answer = acknowledge(share_broker, group, accept=[wrong])
        assert (status, answer["error"]["kind"]) == (400, "InvalidRequest"), wrong
    assert acknowledge(share_broker, group, accept=[text])[0] == 200, "it is untouched"


def test_wrong_requests_are_told(share_broker: Broker) -> None:
    topic, group = write(share_broker, 1), share_group(share_broker.bootstrap)
    (text,) = handles(receive(share_broker, group, topic))
    http = share_broker.http
    for target, body, status in (
        (f"/groups/{group}/receive", None, 400),
        (f"/groups/{group}/receive?topic=nowhere", None, 404),
        (f"/groups/{group}/receive?topic={topic}&count=1001", None, 400),
        (f"/groups/{group}/receive?topic={OFFSETS_TOPIC}", None, 403),
        (f"/groups/{group}/acknowledge", {}, 400),
        (f"/groups/{group}/acknowledge", {"accept": text}, 400),
        (f"/groups/{group}/acknowledge", {"accept": [1]}, 400),
        (f"/groups/{group}/acknowledge", {"forget": [text]}, 400),
        (f"/groups/{group}/acknowledge", {"accept": [text], "release": [text]}, 400),
        (f"/groups/{group}/acknowledge", {"accept": [text] * 10_001}, 400),
    ):
        assert ask(http, target, body)[0] == status, target
    with Consumer(topic, bootstrap=share_broker.bootstrap, group=f"{group}-plain") as plain:
        assert plain.poll(LONG_MS)
        status, answer = ask(http, f"/groups/{group}-plain/receive?topic={topic}")
        assert (status, answer["error"]["kind"]) == (400, "InvalidRequest")
        assert "no share group" in answer["error"]["message"]


@proves("Q1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_handle_is_good_after_its_broker_was_killed(brokers: Brokers, layout: str) -> None:
    broker = brokers.start(settings={**QUICK, "log.layout": layout})
    topic, group = write(broker, 2), share_group(broker.bootstrap)
    one, two = handles(receive(broker, group, topic))
    broker.restart(clean=False)

    def is_acknowledged() -> bool:
        return acknowledge(broker, group, accept=[one])[0] == 200

    wait_for("the group's state", is_acknowledged, DEADLINE_S)
    assert acknowledge(broker, group, release=[two])[0] == 200
    assert shown(receive(broker, group, topic)) == [("1", 2)]
    broker.discard()


@proves("Q1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_handle_is_good_at_the_next_leader(tmp_path: Path, layout: str) -> None:
    settings = {
        **QUICK,
        "log.layout": layout,
        "broker.lease.ms": 3000,
        "offsets.topic.partitions": 2,
        "share.coordinator.state.topic.num.partitions": 2,
    }
    with BrokerCluster(tmp_path, settings=settings) as cluster:
        cluster.create_topic("orders", 1, replicas=3)
        group = share_group(cluster.bootstrap)
        leader = leader_of(cluster)
        body = {"records": [{"value": "0"}, {"value": "1"}]}
        assert ask(leader.http, "/topics/orders/records", body)[0] == 200
        one, two = handles(receive(leader, group, "orders"))
        other = next(broker for broker in cluster.brokers if broker is not leader)
        status, answer = acknowledge(other, group, accept=[one])
        assert (status, answer["results"][0]["error"]["kind"]) == (503, "NotLeader")
        assert leader.http in answer["results"][0]["error"]["message"]
        cluster.wait_in_sync({"orders": 1, OFFSETS_TOPIC: 2, SHARE_STATE_TOPIC: 2})
        leader.kill()
        alive = [broker for broker in cluster.brokers if broker is not leader]

        def is_acknowledged() -> bool:
            return any(acknowledge(broker, group, accept=[one])[0] == 200 for broker in alive)

        wait_for("another leader", is_acknowledged, DEADLINE_S)
        successor = leader_of(cluster)
        assert successor is not leader
        assert acknowledge(successor, group, release=[two])[0] == 200
        assert shown(receive(successor, group, "orders")) == [("1", 2)]


def leader_of(cluster: BrokerCluster) -> Broker:
    with Cluster(cluster.bootstrap) as client:
        return cluster.brokers[client.topology(["orders"]).topics["orders"].partitions[0].leader_id - 1]


def test_a_handle_says_what_it_was_made_of_to_its_group_alone() -> None:
    handle = Handle(bytes(range(16)), 3, 1 << 40, bytes(range(16, 32)))
    text = handle.text("packing")
    assert parse("packing", text) == handle
    with pytest.raises(InvalidRequest, match="no handle that group 'other' was given"):
        parse("other", text)
