"""Fetch sessions (KIP-227), frame by frame: what is told, what is not told again, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from brokers import Broker
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw, batch_of, values
from kafka_protocol.session_client import SessionClient
from proving import proves

Connect = Callable[[Broker], Raw]

NOT_FOUND = 70
INVALID_EPOCH = 71
UNKNOWN_TOPIC_ID = 100
INCONSISTENT_TOPIC_ID = 103
SESSION_TOPIC_ID_ERROR = 106


def topic_id(raw: Raw, topic: str) -> bytes:
    found = raw.call(
        apis.METADATA, 12, topics=[Message(topic_id=bytes(16), name=topic)], allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )  # fmt: skip
    return bytes(found.topics[0].topic_id)


def delete(raw: Raw, topic: str) -> None:
    deleted = raw.call(apis.DELETE_TOPICS, 6, topics=[Message(name=topic, topic_id=bytes(16))], timeout_ms=5000)
    assert deleted.responses[0].error_code == 0


@proves("N2")
@pytest.mark.parametrize("version", [7, 9, 11, 12])
def test_a_session_tells_only_what_is_new(broker: Broker, connect: Connect, topic: str, version: int) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic, partitions=3)
    session = SessionClient(raw, version)
    places: dict[Any, int] = {(topic, index): 0 for index in range(3)}
    assert set(session.fetch(places)) == set(places)
    assert session.session_id > 0
    assert session.fetch({}) == {}
    producer.produce(topic, batch_of([b"a", b"b"]), partition=1)
    rows = session.fetch({}, wait_ms=10_000)
    assert {place: values(row.records) for place, row in rows.items()} == {(topic, 1): [b"a", b"b"]}
    # Not moved on: it is sent again.
    assert values(session.fetch({})[topic, 1].records) == [b"a", b"b"]
    assert values(session.fetch({(topic, 1): 1})[topic, 1].records) == [b"a", b"b"]
    assert session.fetch({(topic, 1): 2}) == {}
    producer.produce(topic, batch_of([b"c"]), partition=1)
    assert values(session.fetch({}, wait_ms=10_000)[topic, 1].records) == [b"c"]


@proves("N2")
def test_a_session_by_topic_ids_tells_only_what_is_new(broker: Broker, connect: Connect, topic: str) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic, partitions=2)
    named = topic_id(raw, topic)
    session = SessionClient(raw, 17)
    assert set(session.fetch({(named, 0): 0, (named, 1): 0})) == {(named, 0), (named, 1)}
    producer.produce(topic, batch_of([b"a"]), partition=0)
    assert values(session.fetch({}, wait_ms=10_000)[named, 0].records) == [b"a"]
    assert session.fetch({(named, 0): 1}, [(named, 1)]) == {}
    producer.produce(topic, batch_of([b"b"]), partition=1)
    producer.produce(topic, batch_of([b"c"]), partition=0)
    assert {place: values(row.records) for place, row in session.fetch({}, wait_ms=10_000).items()} == {
        (named, 0): [b"c"]
    }


def test_forgotten_partitions_are_told_no_more_and_added_ones_in_full(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic, partitions=2)
    session = SessionClient(raw)
    session.fetch({(topic, 0): 0})
    assert set(session.fetch({(topic, 1): 0}, [(topic, 0)])) == {(topic, 1)}
    producer.produce(topic, batch_of([b"a"]), partition=0)
    assert session.fetch({}, wait_ms=20) == {}
    assert values(session.fetch({(topic, 0): 0})[topic, 0].records) == [b"a"]
    # Unknown ones are forgotten without a word.
    assert (topic, 0) in session.fetch({}, [(topic, 7), ("no-such-topic", 0)])


def test_a_session_that_has_forgotten_all_ends(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    session.fetch({(topic, 0): 0})
    ended = session.session_id
    assert session.fetch({}, [(topic, 0)], wait_ms=5000) == {}
    assert session.session_id == 0
    session.send({}, session_id=ended, epoch=2)
    assert session.receive_any() == (NOT_FOUND, {})


@proves("N2")
def test_sessions_that_are_not_there_and_wrong_epochs_are_named(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    for session_id in (0, 77, -5):
        session.send({(topic, 0): 0}, session_id=session_id, epoch=3)
        assert session.receive_any() == (NOT_FOUND, {})
    session.fetch({(topic, 0): 0})
    for epoch in (2, 9, -7, (1 << 31) - 1):
        session.send({}, epoch=epoch)
        assert session.receive_any() == (INVALID_EPOCH, {})
    assert session.fetch({}) == {}  # it goes on all the same
    session.send({}, epoch=1)
    assert session.receive_any()[0] == INVALID_EPOCH


def test_a_session_by_names_does_not_go_on_by_ids(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    named = topic_id(raw, topic)
    for first, then, place in ((12, 13, (named, 0)), (13, 12, (topic, 0))):
        session = SessionClient(raw, first)
        session.fetch({(topic if first == 12 else named, 0): 0})
        session.version = then
        session.send({place: 0})
        assert session.receive_any() == (SESSION_TOPIC_ID_ERROR, {})


def test_a_full_fetch_ends_the_session_that_it_names_and_begins_another(
    broker: Broker, connect: Connect, topic: str
) -> None:
    raw = connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    session.fetch({(topic, 0): 0})
    first = session.session_id
    session.epoch = 0
    assert set(session.fetch({(topic, 0): 0})) == {(topic, 0)}
    assert session.session_id not in (0, first)
    session.send({}, session_id=first, epoch=1)
    assert session.receive_any()[0] == NOT_FOUND
    # The last epoch ends it and begins none.
    second = session.session_id
    assert set(session.fetch({(topic, 0): 0}, epoch=-1)) == {(topic, 0)}
    assert session.session_id == 0
    session.send({}, session_id=second, epoch=1)
    assert session.receive_any()[0] == NOT_FOUND


@proves("N2")
def test_a_session_belongs_to_its_connection(broker: Broker, connect: Connect, topic: str) -> None:
    raw, other = connect(broker), connect(broker)
    raw.create(topic)
    session, thief = SessionClient(raw), SessionClient(other)
    session.fetch({(topic, 0): 0})
    thief.send({}, session_id=session.session_id, epoch=1)
    assert thief.receive_any()[0] == NOT_FOUND
    thief.send({(topic, 0): 0}, session_id=session.session_id, epoch=0)  # would end it, were it its own
    assert thief.receive_any()[0] == 0
    assert session.fetch({}) == {}


def test_a_fetch_before_its_forerunner_is_answered_is_refused(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    session.fetch({(topic, 0): 0})
    session.send({}, wait_ms=1000)
    session.send({}, epoch=2)
    assert session.receive() == {}
    assert session.receive_any()[0] == INVALID_EPOCH
    assert session.fetch({}) == {}


def test_a_full_fetch_answers_the_one_that_waits_in_its_session(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    session.fetch({(topic, 0): 0})
    first = session.session_id
    session.send({}, wait_ms=20_000)
    session.send({(topic, 0): 0}, epoch=0)
    assert session.receive() == {}
    session.epoch = 0
    assert set(session.receive()) == {(topic, 0)}
    assert session.session_id != first


def test_the_watermark_and_the_start_are_told_when_they_change(broker: Broker, connect: Connect, topic: str) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic)
    producer.produce(topic, batch_of([b"a", b"b", b"c"]))
    session = SessionClient(raw)
    assert session.fetch({(topic, 0): 3})[topic, 0].high_watermark == 3
    assert session.fetch({}) == {}
    deleted = producer.call(
        apis.DELETE_RECORDS, 2, timeout_ms=5000,
        topics=[Message(name=topic, partitions=[Message(partition_index=0, offset=2)])],
    )  # fmt: skip
    assert deleted.topics[0].partitions[0].error_code == 0
    row = session.fetch({})[topic, 0]
    assert (row.log_start_offset, row.high_watermark, len(row.records or b"")) == (2, 3, 0)
    assert session.fetch({}) == {}


def test_an_error_is_told_in_every_fetch_and_its_end_too(broker: Broker, connect: Connect, topic: str) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    places: dict[Any, int] = {(topic, 0): 5, (f"{topic}-later", 0): 0}
    for asked in (places, {}, {}):
        rows = session.fetch(asked, wait_ms=20_000)
        assert {place[0]: row.error_code for place, row in rows.items()} == {topic: 1, f"{topic}-later": 3}
    producer.create(f"{topic}-later")
    rows = session.fetch({(topic, 0): 0})
    assert {place[0]: row.error_code for place, row in rows.items()} == {topic: 0, f"{topic}-later": 0}
    assert session.fetch({}) == {}


@proves("N2")
def test_a_topic_that_is_made_anew_is_not_taken_for_the_old_one(broker: Broker, connect: Connect, topic: str) -> None:
    raw, other = connect(broker), connect(broker)
    raw.create(topic)
    old = topic_id(raw, topic)
    session = SessionClient(raw, 13)
    session.fetch({(old, 0): 0})
    session.send({}, wait_ms=20_000)
    delete(other, topic)
    assert session.receive()[old, 0].error_code == UNKNOWN_TOPIC_ID
    other.create(topic)
    assert session.fetch({}, wait_ms=20_000)[old, 0].error_code == INCONSISTENT_TOPIC_ID
    new = topic_id(raw, topic)
    assert session.fetch({(new, 0): 0}, [(old, 0)])[new, 0].error_code == 0
    assert session.fetch({}) == {}


def test_a_topic_that_is_made_anew_goes_on_in_a_session_by_names(broker: Broker, connect: Connect, topic: str) -> None:
    raw, other = connect(broker), connect(broker)
    raw.create(topic)
    other.produce(topic, batch_of([b"old"]))
    session = SessionClient(raw)
    session.fetch({(topic, 0): 1})
    delete(other, topic)
    assert session.fetch({}, wait_ms=20_000)[topic, 0].error_code == 3
    other.create(topic)
    assert session.fetch({}, wait_ms=20_000)[topic, 0].error_code == 1
    other.produce(topic, batch_of([b"new"]))
    assert values(session.fetch({(topic, 0): 0})[topic, 0].records) == [b"new"]


@proves("N2")
def test_a_full_answer_does_not_starve_those_behind(broker: Broker, connect: Connect, topic: str) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic, partitions=8)
    for index in range(8):
        for _ in range(4):
            producer.produce(topic, batch_of([b"x" * 900]), partition=index)
    session = SessionClient(raw)
    limits: dict[str, Any] = {"max_bytes": 1000, "partition_max_bytes": 1000}
    places: dict[Any, int] = {(topic, index): 0 for index in range(8)}
    served: list[int] = []
    moved: dict[Any, int] = dict(places)
    for _ in range(16):
        rows = session.fetch(moved, **limits)
        moved = {}
        for place, row in rows.items():
            if found := values(row.records or b""):
                served.append(place[1])
                places[place] += len(found)
                moved[place] = places[place]
    assert served == [*range(8), *range(8)]


def test_another_isolation_level_looks_at_all_again(broker: Broker, connect: Connect, topic: str) -> None:
    raw, producer = connect(broker), connect(broker)
    raw.create(topic)
    session = SessionClient(raw)
    session.fetch({(topic, 0): 0})
    producer.produce(topic, batch_of([b"a"]))
    assert values(session.fetch({}, isolation_level=1, wait_ms=5000)[topic, 0].records) == [b"a"]


def test_partitions_that_are_named_twice_are_one(broker: Broker, connect: Connect, topic: str) -> None:
    raw = connect(broker)
    raw.create(topic)
    row = Message(
        partition=0, current_leader_epoch=-1, fetch_offset=0, last_fetched_epoch=-1, log_start_offset=-1,
        partition_max_bytes=1000,
    )  # fmt: skip
    answer = raw.call(
        apis.FETCH, 12, replica_id=-1, max_wait_ms=0, min_bytes=1, max_bytes=1000, isolation_level=0, session_id=0,
        session_epoch=0, topics=[Message(topic=topic, partitions=[row, row]), Message(topic=topic, partitions=[row])],
        forgotten_topics_data=[Message(topic=topic, partitions=[0])], rack_id="",
    )  # fmt: skip
    assert answer.session_id > 0
    assert [(t.topic, len(t.partitions)) for t in answer.responses] == [(topic, 1)]


@proves("N2")
def test_sessions_are_bounded_and_who_gets_none_is_served_in_full(
    fresh_broker: Callable[..., Broker], connect: Connect
) -> None:
    broker = fresh_broker(settings={"max.incremental.fetch.session.cache.slots": "2"})
    raw = connect(broker)
    raw.create("t", partitions=2)
    sessions = [SessionClient(connect(broker)) for _ in range(3)]
    for session in sessions:
        assert set(session.fetch({("t", 0): 0, ("t", 1): 0})) == {("t", 0), ("t", 1)}
    assert [session.session_id > 0 for session in sessions] == [True, True, False]
    assert set(sessions[2].fetch({("t", 0): 0})) == {("t", 0)}
    sessions[0].raw.close()  # its session ends with it
    while not sessions[2].session_id:
        sessions[2].fetch({("t", 0): 0}, wait_ms=10)
    assert sessions[2].fetch({}) == {}


def test_a_broker_can_be_told_to_have_no_sessions(fresh_broker: Callable[..., Broker], connect: Connect) -> None:
    broker = fresh_broker(settings={"max.incremental.fetch.session.cache.slots": "0"})
    raw = connect(broker)
    raw.create("t")
    session = SessionClient(raw)
    assert set(session.fetch({("t", 0): 0})) == {("t", 0)}
    assert session.session_id == 0
