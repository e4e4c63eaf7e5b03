"""The consumer protocol (KIP-848) with a real client: librdkafka's `group.protocol=consumer`."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupType, TopicPartition
from confluent_kafka.admin import AdminClient

from brokers import Broker, Brokers, wait_for
from clients.members import Join, Member, joining, wait_shared, wait_values
from clients.records import Client, Record
from clients.topics import create_topic
from proving import proves

PARTITIONS = 4
CLIENT = "confluent-kafka"
QUICK = {
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.session.timeout.ms": "3000",
    "group.initial.rebalance.delay.ms": "0",
}
join = pytest.fixture(joining)
rounds = itertools.count()


@pytest.fixture(scope="module")
def quick_broker(brokers: Brokers) -> Iterator[Broker]:
    broker = brokers.start(settings=QUICK)
    yield broker
    broker.discard()


@pytest.fixture
def target(quick_broker: Broker) -> str:
    return create_topic(quick_broker, f"t-{uuid.uuid4()}", PARTITIONS)


@pytest.fixture
def write(quick_broker: Broker, clients: dict[str, Client]) -> Callable[[str], set[bytes]]:
    def write_some(topic: str) -> set[bytes]:
        records = [Record(b"%d-%d" % (next(rounds), partition), partition=partition) for partition in range(PARTITIONS)]
        clients[CLIENT].produce(quick_broker.bootstrap, topic, records)
        return {record.value for record in records if record.value is not None}

    return write_some


def new_group() -> str:
    return f"group-{uuid.uuid4()}"


def values_of(*members: Member) -> list[bytes]:
    return sorted(value for member in members for _, _, value in member.records)


def group_type(broker: Broker, group: str) -> tuple[str, str]:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    found = {one.group_id: one for one in admin.list_consumer_groups().result().valid}
    return found[group].type.name, found[group].state.name


@proves("N1")
def test_members_join_leave_and_die(
    quick_broker: Broker, target: str, join: Join, write: Callable[[str], set[bytes]]
) -> None:
    group = new_group()
    first = join(CLIENT, quick_broker, group, target, strategy="consumer")
    wait_shared([first], PARTITIONS)
    alone = write(target)
    wait_values([first], alone)
    second = join(CLIENT, quick_broker, group, target, strategy="consumer")
    wait_shared([first, second], PARTITIONS)
    assert len(first.partitions) == len(second.partitions) == 2
    both = write(target)
    wait_values([first, second], both)
    assert group_type(quick_broker, group) == ("CONSUMER", "STABLE")
    second.kill()
    wait_shared([first], PARTITIONS)
    after_death = write(target)
    wait_values([first], after_death)
    first.leave()
    third = join(CLIENT, quick_broker, group, target, strategy="consumer")
    wait_shared([third], PARTITIONS)
    continued = write(target)
    wait_values([third], continued)
    assert values_of(first, second, third) == sorted(alone | both | after_death | continued)


@proves("N1")
def test_a_static_member_comes_back_to_its_partitions(quick_broker: Broker, target: str, join: Join) -> None:
    group = new_group()
    staying = join(CLIENT, quick_broker, group, target, strategy="consumer", instance="staying")
    returning = join(CLIENT, quick_broker, group, target, strategy="consumer", instance="returning")
    wait_shared([staying, returning], PARTITIONS)
    had, changes = returning.partitions, staying.changes
    returning.leave()
    returned = join(CLIENT, quick_broker, group, target, strategy="consumer", instance="returning")
    wait_for("the same partitions again", lambda: returned.partitions == had)
    assert staying.changes == changes


@proves("N1")
def test_classic_members_are_replaced_by_others_one_by_one_and_back(
    quick_broker: Broker, target: str, join: Join, write: Callable[[str], set[bytes]]
) -> None:
    group, written = new_group(), set[bytes]()
    members: list[Member] = []

    def check(*now: Member) -> None:
        wait_shared(list(now), PARTITIONS)
        values = write(target)
        written.update(values)
        wait_values(list(now), values)

    def member(strategy: str) -> Member:
        members.append(join(CLIENT, quick_broker, group, target, strategy=strategy))
        return members[-1]

    eager = member("range")
    check(eager)
    new = member("consumer")
    check(eager, new)
    assert group_type(quick_broker, group)[0] == "CONSUMER"
    other = member("consumer")
    check(eager, new, other)
    eager.leave()
    check(new, other)
    cooperative = member("cooperative-sticky")
    check(new, other, cooperative)
    new.leave()
    other.leave()
    check(cooperative)
    assert group_type(quick_broker, group)[0] == "CLASSIC"
    assert set(values_of(*members)) == written


@proves("N1")
def test_a_regular_expression_follows_the_topics(quick_broker: Broker) -> None:
    prefix = f"logs-{uuid.uuid4()}"
    first = create_topic(quick_broker, f"{prefix}-a")
    consumer = Consumer(
        {"bootstrap.servers": quick_broker.bootstrap, "group.id": new_group(), "group.protocol": "consumer"}
    )
    try:
        consumer.subscribe([f"^{prefix}-.*"])

        def topics() -> list[str]:
            consumer.poll(0.05)
            return sorted(place.topic for place in consumer.assignment())

        wait_for("the topic", lambda: topics() == [first])
        second = create_topic(quick_broker, f"{prefix}-b")
        wait_for("both topics", lambda: topics() == [first, second])
    finally:
        consumer.close()


@proves("N1")
def test_the_group_goes_on_after_a_restart_of_the_broker(
    fresh_broker: Callable[..., Broker], clients: dict[str, Client], join: Join
) -> None:
    broker = fresh_broker(settings=QUICK)
    target, group = create_topic(broker, "t", PARTITIONS), new_group()
    members = [join(CLIENT, broker, group, target, strategy="consumer") for _ in range(2)]
    wait_shared(members, PARTITIONS)
    broker.restart(clean=False)
    records = [Record(b"%d" % partition, partition=partition) for partition in range(PARTITIONS)]
    clients[CLIENT].produce(broker.bootstrap, target, records)
    wait_values(members, {b"%d" % partition for partition in range(PARTITIONS)})
    wait_shared(members, PARTITIONS)


@proves("N1")
def test_offsets_are_committed_in_the_members_epoch(quick_broker: Broker, target: str) -> None:
    settings: dict[str, Any] = {"bootstrap.servers": quick_broker.bootstrap, "group.id": new_group()}
    consumer = Consumer({**settings, "group.protocol": "consumer", "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([target])
        wait_for("partitions", lambda: consumer.poll(0.05) or len(consumer.assignment()) == PARTITIONS)
        consumer.commit(offsets=[TopicPartition(target, 0, 7)], asynchronous=False)
        (found,) = consumer.committed([TopicPartition(target, 0)], timeout=10)
        assert found.offset == 7
    finally:
        consumer.close()
    admin = AdminClient({"bootstrap.servers": quick_broker.bootstrap})
    listed = admin.list_consumer_groups(types={ConsumerGroupType.CONSUMER}).result().valid
    assert settings["group.id"] in {group.group_id for group in listed}
