"""The consumer's side of fetch sessions: what a fetch names, and how a session that a broker lost is begun anew."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import pytest

from brokers import Broker, wait_for
from headrace import Admin, Consumer, Producer
from headrace.client.consumer.fetch_session import EPOCH_MAX, FetchSession
from headrace.client.fetch_requests import FetchChanges
from headrace.wire.message import Message
from proving import proves

ID = bytes(16)
OTHER_ID = bytes(range(16))
NOT_FOUND, INVALID_EPOCH, UNKNOWN = 70, 71, -1


def asked(offset: int, topic_id: bytes = ID) -> tuple[bytes, int, int, int, int]:
    return topic_id, offset, 3, 2, 1000


def named(changes: FetchChanges) -> dict[tuple[str, int], int]:
    return {(topic.topic, each.partition): each.fetch_offset for topic in changes.topics for each in topic.partitions}


def forgotten(changes: FetchChanges) -> list[tuple[str, int]]:
    return [(topic.topic, index) for topic in changes.forgotten for index in topic.partitions]


@proves("N2")
def test_a_fetch_names_what_differs_from_the_one_before() -> None:
    session = FetchSession()
    first = session.changes({("t", 0): asked(5), ("t", 1): asked(6), ("u", 0): asked(7)})
    assert (first.session_id, first.epoch) == (0, 0)
    assert named(first) == {("t", 0): 5, ("t", 1): 6, ("u", 0): 7}
    session.answered(Message(session_id=77))
    second = session.changes({("t", 0): asked(5), ("t", 1): asked(8), ("v", 0): asked(0)})
    assert (second.session_id, second.epoch) == (77, 1)
    assert named(second) == {("t", 1): 8, ("v", 0): 0}
    assert forgotten(second) == [("u", 0)]
    session.answered(Message(session_id=77))
    third = session.changes({("t", 0): asked(5), ("t", 1): asked(8), ("v", 0): asked(0)})
    assert (third.epoch, third.topics, third.forgotten) == (2, [], [])


def test_a_broker_without_sessions_is_sent_full_fetches() -> None:
    session = FetchSession()
    for _ in range(3):
        changes = session.changes({("t", 0): asked(5)})
        assert (changes.session_id, changes.epoch, named(changes)) == (0, 0, {("t", 0): 5})
        session.answered(Message(session_id=0))


@pytest.mark.parametrize(("code", "session_id"), [(NOT_FOUND, 0), (INVALID_EPOCH, 77), (UNKNOWN, 77)])
def test_a_session_that_is_lost_is_begun_anew_by_a_full_fetch(code: int, session_id: int) -> None:
    session = FetchSession()
    assert not session.lost(code)  # the answer to a full fetch is a failure like any other
    session.changes({("t", 0): asked(5)})
    session.answered(Message(session_id=77))
    session.changes({("t", 0): asked(5), ("t", 1): asked(5)})
    assert session.lost(code) == (code != UNKNOWN)
    changes = session.changes({("t", 0): asked(5)})
    assert (changes.session_id, changes.epoch, named(changes)) == (session_id, 0, {("t", 0): 5})
    assert forgotten(changes) == []


def test_a_topic_that_was_made_anew_begins_the_session_anew() -> None:
    session = FetchSession()
    session.changes({("t", 0): asked(5), ("u", 0): asked(1)})
    session.answered(Message(session_id=77))
    changes = session.changes({("t", 0): asked(0, OTHER_ID), ("u", 0): asked(1)})
    assert (changes.session_id, changes.epoch) == (77, 0)
    assert named(changes) == {("t", 0): 0, ("u", 0): 1}


def test_epochs_begin_again_at_1() -> None:
    session = FetchSession()
    session.changes({("t", 0): asked(5)})
    session.answered(Message(session_id=77))
    session._epoch = EPOCH_MAX
    session.answered(Message(session_id=77))
    assert session.changes({("t", 0): asked(6)}).epoch == 1


def metric(broker: Broker, name: str) -> float:
    with urllib.request.urlopen(broker.http + "/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@proves("N2")
@pytest.mark.parametrize("slots", ["1000", "0", "1"])
def test_a_consumer_of_many_partitions_reads_all_of_them(fresh_broker: Callable[..., Broker], slots: str) -> None:
    broker = fresh_broker(settings={"max.incremental.fetch.session.cache.slots": slots})
    partitions, rounds = 60, 3
    with Admin(broker.bootstrap) as admin:
        admin.create_topic("many", partitions=partitions)
    with (
        Producer(broker.bootstrap) as producer,
        Consumer("many", bootstrap=broker.bootstrap, start="earliest") as consumer,
        Consumer("many", bootstrap=broker.bootstrap, start="earliest", client_id="second") as second,
    ):
        for n in range(rounds):
            for index in range(partitions):
                producer.send_async("many", b"%d %d" % (index, n), partition=index)
            producer.flush()
            for reader in (consumer, second):
                found: set[tuple[int, bytes]] = set()
                while len(found) < partitions:
                    found |= {(each.partition, each.value) for each in reader.poll(20_000)}
                assert found == {(index, b"%d %d" % (index, n)) for index in range(partitions)}
        expected = min(2, int(slots))
        wait_for("the sessions", lambda: metric(broker, "headrace_fetch_sessions") == expected)
    wait_for("their end", lambda: metric(broker, "headrace_fetch_sessions") == 0)
