"""Consumer groups of real clients: members that join, leave and die, and offsets that outlive them and the broker."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, TopicPartition

from brokers import Broker, wait_for
from clients.members import Join, Member, joining, wait_shared, wait_values
from clients.records import Client, Record
from clients.topics import MakeTopic, create_topic
from headrace.settings.values import BROKER_BY_NAME
from proving import proves

PARTITIONS = 4
# Each client once and each strategy once; the other pairs are in the long runs.
STRATEGIES = (
    ("confluent-kafka", "cooperative-sticky"),
    ("kafka-python", "sticky"),
    ("aiokafka", "roundrobin"),
    ("kafkajs", "its own round robin"),
    ("kcat", "range"),
)
MORE_STRATEGIES = (
    ("confluent-kafka", "range"),
    ("confluent-kafka", "roundrobin"),
    ("kafka-python", "range"),
    ("kafka-python", "roundrobin"),
    ("kafka-python", "cooperative-sticky"),
    ("aiokafka", "range"),
    ("aiokafka", "sticky"),
)
rounds = itertools.count()
join = pytest.fixture(joining)


def write(broker: Broker, writer: Client, topic: str, per_partition: int = 3) -> set[bytes]:
    """Write a few records of their own to every partition."""
    records = [
        Record(b"%d-%d-%d" % (next(rounds), partition, n), partition=partition)
        for partition in range(PARTITIONS)
        for n in range(per_partition)
    ]
    writer.produce(broker.bootstrap, topic, records)
    return {record.value for record in records if record.value is not None}


def values_of(*members: Member) -> list[bytes]:
    return sorted(value for member in members for _, _, value in member.records)


@proves("G4")
@pytest.mark.parametrize(
    ("client", "strategy"),
    [*STRATEGIES, *(pytest.param(*pair, marks=pytest.mark.long) for pair in MORE_STRATEGIES)],
)
def test_members_join_leave_and_die(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic, join: Join, client: str, strategy: str
) -> None:
    target, group = topic(PARTITIONS), f"group-{uuid.uuid4()}"
    writer = clients["confluent-kafka"]

    first = join(client, broker, group, target, strategy=strategy)
    wait_shared([first], PARTITIONS)
    alone = write(broker, writer, target)
    wait_values([first], alone)

    second = join(client, broker, group, target, strategy=strategy)
    wait_shared([first, second], PARTITIONS)
    both = write(broker, writer, target)
    wait_values([first, second], both)
    for member in (first, second):
        later = [(partition, value) for partition, _, value in member.records if value in both]
        assert {partition for partition, _ in later} <= set(member.partitions)

    second.kill()
    wait_shared([first], PARTITIONS)
    after_death = write(broker, writer, target)
    wait_values([first], after_death)

    first.leave()
    third = join(client, broker, group, target, strategy=strategy)
    wait_shared([third], PARTITIONS)
    continued = write(broker, writer, target)
    wait_values([third], continued)
    if client != "kcat":
        # kcat commits by interval, so a kill may repeat records; the others say a record only when it is committed.
        assert values_of(first, second, third) == sorted(alone | both | after_death | continued)


@proves("G4")
def test_different_clients_share_one_group(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic, join: Join
) -> None:
    target, group = topic(PARTITIONS), f"group-{uuid.uuid4()}"
    members = [
        join(client, broker, group, target) for client in ("confluent-kafka", "kafka-python", "aiokafka", "kcat")
    ]
    wait_shared(members, PARTITIONS)
    values = write(broker, clients["confluent-kafka"], target)
    wait_values(members, values)
    members.pop(0).leave()
    wait_shared(members, PARTITIONS)


@pytest.mark.parametrize(
    "client", ["confluent-kafka", "aiokafka", pytest.param("kafka-python", marks=pytest.mark.long)]
)
def test_a_static_member_returns_without_a_rebalance(broker: Broker, topic: MakeTopic, join: Join, client: str) -> None:
    target, group = topic(PARTITIONS), f"group-{uuid.uuid4()}"
    staying = join(client, broker, group, target, instance="staying", session_ms=20_000)
    returning = join(client, broker, group, target, instance="returning", session_ms=20_000)
    wait_shared([staying, returning], PARTITIONS)
    had, changes = returning.partitions, staying.changes
    returning.kill()
    returned = join(client, broker, group, target, instance="returning", session_ms=20_000)
    wait_for("the same partitions again", lambda: returned.partitions == had)
    assert staying.changes == changes


def test_the_second_owner_of_an_instance_fences_the_first(broker: Broker, topic: MakeTopic, join: Join) -> None:
    client = "confluent-kafka"
    target, group = topic(PARTITIONS), f"group-{uuid.uuid4()}"
    first = join(client, broker, group, target, instance="only")
    wait_shared([first], PARTITIONS)
    second = join(client, broker, group, target, instance="only")
    wait_shared([second], PARTITIONS)
    wait_for("the first to be told that it is fenced", lambda: first.fatal)


@proves("R4")
@pytest.mark.parametrize(
    "clean", [pytest.param(True, marks=pytest.mark.long, id="stopped"), pytest.param(False, id="killed")]
)
def test_offsets_and_members_continue_after_a_restart(
    fresh_broker: Callable[..., Broker], clients: dict[str, Client], join: Join, clean: bool
) -> None:
    """The members stay up: they find the broker again and go on where they were."""
    broker = fresh_broker()
    members = {}
    before = {}
    for client in ("confluent-kafka", "kafka-python", "aiokafka", "kafkajs"):
        target = create_topic(broker, f"restarted-{client}", PARTITIONS)
        members[client] = join(client, broker, f"group-{client}", target)
        wait_shared([members[client]], PARTITIONS)
        before[client] = write(broker, clients["confluent-kafka"], target)
        wait_values([members[client]], before[client])
    left = join("confluent-kafka", broker, "group-left", "restarted-confluent-kafka")
    wait_values([left], before["confluent-kafka"])
    left.leave()

    broker.restart(clean)

    for client, member in members.items():
        after = write(broker, clients["confluent-kafka"], f"restarted-{client}")
        wait_values([member], after)
        assert values_of(member) == sorted(before[client] | after)
    returned = join("confluent-kafka", broker, "group-left", "restarted-confluent-kafka")
    wait_values([returned], after_of(members["confluent-kafka"], before["confluent-kafka"]))
    assert not set(values_of(returned)) & before["confluent-kafka"]


def after_of(member: Member, before: set[bytes]) -> set[bytes]:
    return set(values_of(member)) - before


def counting(counts: list[int]) -> Callable[[Consumer, list[TopicPartition]], None]:
    return lambda _, found: counts.append(len(found))


@proves("R9")
def test_members_that_come_within_the_initial_delay_share_the_first_assignment(
    fresh_broker: Callable[..., Broker],
) -> None:
    """librdkafka's cases 0113 and 0118 count the rebalances of members that start one after the other."""
    by_default = BROKER_BY_NAME["group.initial.rebalance.delay.ms"].default
    broker = fresh_broker(settings={"group.initial.rebalance.delay.ms": by_default})
    name = create_topic(broker, "shared", PARTITIONS)
    assigned: list[list[int]] = [[], []]
    members = [Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g"}) for _ in assigned]
    try:
        for member, counts in zip(members, assigned, strict=True):
            member.subscribe([name], on_assign=counting(counts))
            begun = time.monotonic()
            while time.monotonic() - begun < 0.5:
                member.poll(0.05)
        wait_for("partitions for both", lambda: [member.poll(0.05) for member in members] and all(assigned))
        assert assigned == [[2], [2]], "partitions per assignment"
    finally:
        for member in members:
            member.close()


@proves("G4", "R9")
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_offsets_are_committed_while_partitions_are_taken_away(
    broker: Broker, clients: dict[str, Client], topic: MakeTopic, strategy: str
) -> None:
    """As librdkafka's cases 0113 and 0118: what the one member commits as it hands over, the other goes on from."""
    writer, name = clients["confluent-kafka"], topic(PARTITIONS)
    wanted = write(broker, writer, name)
    group = f"handing-over-{uuid.uuid4()}"
    seen: list[bytes] = []
    committed: list[int] = []

    def hand_over(consumer: Consumer, found: list[TopicPartition]) -> None:
        held = [each for each in consumer.position(found) if each.offset >= 0]
        told = consumer.commit(offsets=held, asynchronous=False) if held else []
        assert all(each.error is None for each in told or [])
        committed.append(len(held))

    def member() -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": group,
                "partition.assignment.strategy": strategy,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
            }
        )

    def polled(*members: Consumer) -> set[bytes]:
        for each in members:
            message = each.poll(0.05)
            if message is not None and message.error() is None:
                seen.append(message.value() or b"")
        return set(seen)

    first, second = member(), member()
    try:
        first.subscribe([name], on_revoke=hand_over)
        wait_for("every record", lambda: polled(first) == wanted)
        second.subscribe([name])
        wait_for(
            "half of the partitions each",
            lambda: polled(first, second) and [len(each.assignment()) for each in (first, second)] == [2, 2],
        )
        more = write(broker, writer, name)
        wait_for("the records after it", lambda: polled(first, second) >= more)
        assert sorted(seen) == sorted(wanted | more), "each record once"
        assert sum(committed) == (PARTITIONS if strategy == "range" else PARTITIONS - 2)
    finally:
        first.close()
        second.close()
