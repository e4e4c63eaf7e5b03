"""A fetch session beside full fetches, over random histories: its consumer knows what they tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from brokers import Broker, wait_for
from headrace.records.batch import batches
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.clustered import SharedCluster
from kafka_protocol.raw import Raw, batch_of
from kafka_protocol.session_client import Place, SessionClient
from proving import proves

STEPS = 120
MOVES = 4


class Follower:
    """Reads partitions of one broker in a session, and knows of each what it was told last."""

    def __init__(self, raw: Raw, plain: Raw) -> None:
        self._session = SessionClient(raw)
        self._plain = SessionClient(plain)
        self.offsets: dict[Place, int] = {}
        self._known: dict[Place, tuple[int, int, int]] = {}
        self._changed: set[Place] = set()
        self._forgotten: set[Place] = set()

    def add(self, place: Place, offset: int) -> None:
        self.offsets[place] = offset
        self._changed.add(place)

    def forget(self, place: Place) -> None:
        self.offsets.pop(place, None)
        self._known.pop(place, None)
        self._changed.discard(place)
        self._forgotten.add(place)

    def agrees(self, *, move_on: bool) -> bool:
        """Fetches what is new; whether the consumer then knows what a full fetch tells, and was given its records."""
        changed = {place: self.offsets[place] for place in sorted(self._changed)}
        named = self._forgotten - self._changed
        self._changed, self._forgotten = set(), set()
        told = self._session.fetch(changed, sorted(named))
        for place, row in told.items():
            self._known[place] = row.error_code, row.high_watermark, row.log_start_offset
        full = self._plain.fetch(dict(sorted(self.offsets.items())), epoch=-1)
        expected = {place: (row.error_code, row.high_watermark, row.log_start_offset) for place, row in full.items()}
        same = expected == self._known
        for place, row in full.items():
            given = told[place].records if place in told else None
            same = same and bytes(given or b"") == bytes(row.records or b"")
        if move_on:
            for place, row in told.items():
                for header, _ in batches(memoryview(row.records or b"")):
                    self.add(place, header.next_offset)
        return same


@proves("N2")
def test_a_session_knows_what_full_fetches_tell(broker: Broker, connect: Callable[[Broker], Raw], seed: int) -> None:
    chance = random.Random(seed)
    topics = [f"sessions-{seed}-{n}" for n in range(3)]
    admin = connect(broker)
    follower = Follower(connect(broker), connect(broker))
    there = dict.fromkeys(topics, False)
    places: list[Place] = [(topic, index) for topic in topics for index in range(4)]
    follower.add(places[0], 0)
    for _ in range(STEPS):
        step = chance.choice(["produce"] * 6 + ["add", "add", "forget", "delete records", "topic", "rest"])
        topic, index = place = chance.choice(places)
        assert isinstance(topic, str)
        if step == "produce" and there[topic]:
            admin.produce(topic, batch_of([b"%d" % chance.randrange(1000)] * chance.randint(1, 3)), partition=index)
        elif step == "add":
            follower.add(place, follower.offsets.get(place, 0) if chance.random() < 0.8 else chance.randrange(9))
        elif step == "forget" and len(follower.offsets) > 1:
            follower.forget(place)
        elif step == "delete records" and there[topic]:
            row = Message(partition_index=index, offset=-1)
            asked = [Message(name=topic, partitions=[row])]
            admin.call(apis.DELETE_RECORDS, 2, timeout_ms=5000, topics=asked)
        elif step == "topic":
            if there[topic]:
                asked = [Message(name=topic, topic_id=bytes(16))]
                admin.call(apis.DELETE_TOPICS, 6, topics=asked, timeout_ms=5000)
            else:
                admin.create(topic, partitions=4)
            there[topic] = not there[topic]
        # What is appended is written and told before its answer; nothing else happens meanwhile.
        assert follower.agrees(move_on=chance.random() < 0.7), (step, place)


@proves("N2")
def test_sessions_know_what_full_fetches_tell_while_leaders_move(cluster: SharedCluster, topic: str, seed: int) -> None:
    chance = random.Random(seed)
    partitions = 3
    cluster.create(topic, [[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    followers = {number: Follower(cluster.raw(number), cluster.raw(number)) for number in (1, 2, 3)}
    for follower in followers.values():
        for index in range(partitions):
            follower.add((topic, index), 0)

    def all_agree() -> bool:
        agreed = [follower.agrees(move_on=True) for follower in followers.values()]
        return all(agreed)

    for _ in range(MOVES):
        for _ in range(4):
            index = chance.randrange(partitions)
            leader = cluster.state(topic)[index].leader
            cluster.raw(leader).produce(topic, batch_of([b"x"]), acks=-1, partition=index)
        wait_for("the sessions to agree with full fetches", all_agree)
        move(cluster, topic, chance.randrange(partitions), chance.sample([1, 2, 3], 3))
        wait_for("the sessions to agree with full fetches", all_agree)


def move(cluster: SharedCluster, topic: str, index: int, order: list[int]) -> None:
    """Another order of the replicas, and the first of it as leader."""
    asked = Message(name=topic, partitions=[Message(partition_index=index, replicas=order)])
    cluster.raw(1).call(
        apis.ALTER_PARTITION_REASSIGNMENTS, 1, timeout_ms=10_000, allow_replication_factor_change=True, topics=[asked]
    )
    wait_for("the new order", lambda: list(cluster.state(topic)[index].replicas) == order)

    def led() -> bool:
        elected: list[Any] = (
            cluster.raw(1)
            .call(
                apis.ELECT_LEADERS,
                2,
                election_type=0,
                topic_partitions=[Message(topic=topic, partitions=[index])],
                timeout_ms=15_000,
            )
            .replica_election_results
        )
        return bool(elected) and cluster.state(topic)[index].leader == order[0]

    wait_for("the first of them to lead", led)
