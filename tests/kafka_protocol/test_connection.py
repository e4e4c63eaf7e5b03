"""Connections: order, pace, limits, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from brokers import Broker, wait_for
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.api import KAFKA_APIS
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of
from proving import proves

Connect = Callable[[Broker], Raw]


@proves("G4")
def test_answers_leave_in_request_order_while_later_requests_are_worked_on(
    broker: Broker, connect: Connect, topic: str
) -> None:
    first, other = connect(broker), connect(broker)
    first.create(topic)
    waiting = first.send_fetch(topic, 0, wait_ms=10_000, min_bytes=1000)
    produced = first.send_produce(topic, batch_of([b"seen by others"]))
    seen = wait_for("the later produce to be worked on", lambda: other.fetch(topic).records)
    assert b"seen by others" in bytes(seen)
    other.produce(topic, batch_of([b"x" * 1000]))
    correlation_id, fetched = first.receive(apis.FETCH, 12)
    assert correlation_id == waiting
    assert len(fetched.responses[0].partitions[0].records) > 1000
    assert first.receive(apis.PRODUCE, 9)[0] == produced


def test_a_thousand_pipelined_requests_are_answered_in_order(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    sent = [raw.send_produce(topic, batch_of([b"n%d" % n])) for n in range(1000)]
    received = [raw.receive(apis.PRODUCE, 9) for _ in sent]
    assert [correlation_id for correlation_id, _ in received] == sent
    offsets = [answer.responses[0].partition_responses[0].base_offset for _, answer in received]
    assert offsets == list(range(1000))


def test_a_newer_api_versions_request_is_answered_in_version_0(broker: Broker, connect: Connect) -> None:
    raw = connect(broker)
    raw.socket.sendall(struct.pack(">ihhihx", 11, apis.API_VERSIONS, 99, 5, 0))
    correlation_id, answer = raw.receive(apis.API_VERSIONS, 0)
    assert (correlation_id, answer.error_code) == (5, 35)
    assert {row.api_key: row.max_version for row in answer.api_keys} == {
        api.key: api.max_version for api in KAFKA_APIS.values()
    }


def test_unknown_apis_and_versions_and_broken_bodies_close_the_connection_and_no_other(
    broker: Broker, connect: Connect, topic: str
) -> None:
    bystander = connect(broker)
    bystander.create(topic)
    for frame in (
        struct.pack(">ihhih", 10, 999, 0, 1, -1),
        struct.pack(">ihhih", 10, apis.METADATA, 99, 1, -1),
        struct.pack(">ihhih", 10, apis.PRODUCE, 9, 1, -1),
        struct.pack(">i", -5),
        struct.pack(">i", 0),
        struct.pack(">i", (1 << 31) - 1),
        struct.pack(">ihhih", 10, apis.LIST_OFFSETS, 5, 1, 5000),
        struct.pack(">ihhih", 17 << 20, apis.METADATA, 9, 1, -1),
    ):
        hostile = connect(broker)
        hostile.socket.sendall(frame)
        assert hostile.closed_by_broker(), frame
        assert bystander.produce(topic, batch_of([b"still here"])).error_code == 0


@proves("L7")
def test_a_connection_with_too_many_open_requests_is_not_read_until_it_has_caught_up(
    fresh_broker: Callable[..., Broker], connect: Connect, topic: str
) -> None:
    broker = fresh_broker(settings={"connection.requests.max": 10})
    raw, other = connect(broker), connect(broker)
    raw.create(topic)
    waiting = [raw.send_fetch(topic, 0, wait_ms=20_000) for _ in range(10)]
    held = [raw.send_produce(topic, batch_of([b"held back"])) for _ in range(3)]
    assert not other.fetch(topic, wait_ms=300).records, "a request beyond the limit was worked on"
    assert other.produce(topic, batch_of([b"wakes the fetches"])).base_offset == 0
    assert [raw.receive(apis.FETCH, 12)[0] for _ in waiting] == waiting
    assert [raw.receive(apis.PRODUCE, 9)[0] for _ in held] == held


@proves("L7")
def test_a_peer_that_does_not_read_its_answers_is_not_read_either(
    fresh_broker: Callable[..., Broker], connect: Connect, topic: str
) -> None:
    broker = fresh_broker(settings={"connection.queued.bytes": 1 << 20})
    slow, other = connect(broker), connect(broker)
    other.create(topic)
    for _ in range(20):
        other.produce(topic, batch_of([b"x" * 900_000]))
    before = broker.memory_bytes()
    for _ in range(50):
        slow.send_fetch(topic, 0, partition_max_bytes=20 << 20)
    assert other.produce(topic, batch_of([b"undisturbed"])).error_code == 0
    assert broker.memory_bytes() - before < 32 << 20
    for _ in range(50):
        assert len(slow.receive(apis.FETCH, 12)[1].responses[0].partitions[0].records) > 15 << 20


def test_connections_beyond_the_limit_are_closed_at_once(fresh_broker: Callable[..., Broker], connect: Connect) -> None:
    broker = fresh_broker(settings={"connections.max": 2})
    first, _second, third = connect(broker), connect(broker), connect(broker)
    assert third.closed_by_broker()
    assert first.call(apis.API_VERSIONS, 0).error_code == 0
    first.close()
    wait_for("a freed place", lambda: _answers(connect(broker)))


def _answers(raw: Raw) -> bool:
    try:
        return bool(raw.call(apis.API_VERSIONS, 0).api_keys)
    except (EOFError, ConnectionError):
        return False


@proves("G17")
def test_metadata_answers_with_the_address_of_the_listener_that_was_asked(
    fresh_broker: Callable[..., Broker],
) -> None:
    broker = fresh_broker(listen=("127.0.0.1:0", "outside=127.0.0.1:0"), advertise=("outside=broker.example:19092",))
    inside, outside = (broker.addresses[name].rsplit(":", 1) for name in ("kafka", "kafka.outside"))
    for address, told in ((inside, ("127.0.0.1", int(inside[1]))), (outside, ("broker.example", 19092))):
        raw = Raw((address[0], int(address[1])))
        answer = raw.call(apis.METADATA, 12, topics=None)
        assert [(node.host, node.port) for node in answer.brokers] == [told]
        raw.close()


@pytest.mark.parametrize(("version", "told"), [(10, ""), (11, ""), (12, None)])
def test_a_topic_asked_for_by_an_unknown_id_is_unknown(
    broker: Broker, connect: Connect, version: int, told: str
) -> None:
    raw = connect(broker)
    asked = [Message(name=None, topic_id=b"x" * 16)]
    answer = raw.call(apis.METADATA, version, topics=asked, allow_auto_topic_creation=False)
    assert [(topic.name, topic.error_code) for topic in answer.topics] == [(told, ErrorCode.UNKNOWN_TOPIC_ID)]


@proves("L7")
def test_more_requests_in_one_read_than_may_be_open_are_all_answered(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic)
    body = struct.pack(">hhih", apis.API_VERSIONS, 0, 7, -1)
    raw.socket.sendall((struct.pack(">i", len(body)) + body) * 3000)
    for _ in range(3000):
        assert raw.receive(apis.API_VERSIONS, 0)[0] == 7


def test_a_flood_of_metadata_requests_is_bounded_by_what_the_peer_reads(
    fresh_broker: Callable[..., Broker], connect: Connect, topic: str
) -> None:
    broker = fresh_broker(settings={"connection.queued.bytes": 1 << 20})
    greedy, other = connect(broker), connect(broker)
    other.create(topic, partitions=500)
    before = broker.memory_bytes()
    for _ in range(500):
        greedy.send(apis.METADATA, 9, topics=None)
    assert other.produce(topic, batch_of([b"undisturbed"])).error_code == 0
    assert broker.memory_bytes() - before < 16 << 20
    for _ in range(500):
        assert len(greedy.receive(apis.METADATA, 9)[1].topics[0].partitions) == 500


@proves("G17")
@pytest.mark.parametrize("name", [None, ""])
def test_a_topic_is_asked_for_by_its_id_with_no_name_or_an_empty_one(
    broker: Broker, connect: Connect, topic: str, name: str | None
) -> None:
    raw = connect(broker)
    asked = [Message(name=topic, topic_id=bytes(16))]
    (known,) = raw.call(apis.METADATA, 12, topics=asked, allow_auto_topic_creation=True).topics
    asked = [Message(name=name, topic_id=known.topic_id)]
    (found,) = raw.call(apis.METADATA, 13, topics=asked, allow_auto_topic_creation=True).topics
    assert (found.name, found.error_code) == (topic, ErrorCode.NONE)
