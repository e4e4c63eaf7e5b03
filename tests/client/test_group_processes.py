"""Groups of members that are processes: they join, leave and are killed; with other clients in the same group too."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable

import pytest

from brokers import Broker, wait_for
from clients.members import JOIN_DEADLINE_S, Join, Member, joining, wait_shared, wait_values
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from proving import proves

PARTITIONS = 6
MakeTopic = Callable[..., str]
rounds = itertools.count()
join = pytest.fixture(joining)


def write(broker: Broker, topic: str, per_partition: int = 3) -> set[bytes]:
    """Write a few records of their own to every partition."""
    records = [
        Record(b"%d-%d-%d" % (next(rounds), partition, n), partition=partition)
        for partition in range(PARTITIONS)
        for n in range(per_partition)
    ]
    ConfluentKafka().produce(broker.bootstrap, topic, records)
    return {record.value for record in records if record.value is not None}


def wait_all_held(*members: Member) -> None:
    """Wait until these have all partitions between them, each at least one and none twice."""

    def held() -> bool:
        for member in members:
            member.check_alive()
        numbers = sorted(number for member in members for number in member.partitions)
        return numbers == list(range(PARTITIONS)) and all(member.partitions for member in members)

    try:
        wait_for("all partitions to be held", held, JOIN_DEADLINE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {[(member.partitions, member.fatal) for member in members]}") from None


@proves("R8", "R9")
@pytest.mark.long
@pytest.mark.parametrize("assignors", [("average", "cooperative"), ("room-first", "consistent-hash")], ids="+".join)
def test_members_join_and_are_killed_and_nothing_is_read_twice(
    broker: Broker, cluster: Cluster, topic: MakeTopic, join: Join, assignors: tuple[str, ...]
) -> None:
    """Groups side by side, one for each assignor; a record counts when its progress is saved."""
    target = topic(partitions=PARTITIONS)
    names = {assignor: f"{assignor}-{uuid.uuid4().hex[:8]}" for assignor in assignors}
    first = {name: join("headrace", broker, names[name], target, strategy=name) for name in assignors}
    for member in first.values():
        wait_all_held(member)
    alone = write(broker, target)
    second = {name: join("headrace", broker, names[name], target, strategy=name) for name in assignors}
    for name in assignors:
        wait_all_held(first[name], second[name])
    both = write(broker, target)
    for name in assignors:
        wait_values([first[name], second[name]], alone | both)
        second[name].kill()
    for member in first.values():
        wait_all_held(member)
    after = write(broker, target)
    for name in assignors:
        wait_values([first[name]], after)
        first[name].leave()
        seen = sorted(value for member in (first[name], second[name]) for _, _, value in member.records)
        assert seen == sorted(alone | both | after), name
        assert set(groups.fetch_offsets(cluster, names[name]).values()) == {9}


@proves("R8")
@pytest.mark.parametrize(
    ("client", "assignor", "strategy"),
    [
        ("confluent-kafka", "average", "range"),
        ("confluent-kafka", "cooperative", "cooperative-sticky"),
        pytest.param("kafka-python", "cooperative", "cooperative-sticky", marks=pytest.mark.long),
        pytest.param("aiokafka", "consistent-hash", "range", marks=pytest.mark.long),
    ],
)
def test_members_with_other_clients_share_the_group(
    broker: Broker, topic: MakeTopic, join: Join, client: str, assignor: str, strategy: str
) -> None:
    """Each of the two leads once: the one that is there first does."""
    target, group = topic(partitions=PARTITIONS), f"mixed-{uuid.uuid4().hex[:8]}"
    ours = join("headrace", broker, group, target, strategy=assignor)
    wait_shared([ours], PARTITIONS)
    theirs = join(client, broker, group, target, strategy=strategy)
    wait_shared([ours, theirs], PARTITIONS)
    both = write(broker, target)
    wait_values([ours, theirs], both)
    ours.kill()
    wait_shared([theirs], PARTITIONS)
    again = join("headrace", broker, group, target, strategy=assignor)
    wait_shared([theirs, again], PARTITIONS)
    later = write(broker, target)
    wait_values([theirs, again], later)
    theirs.leave()
    wait_shared([again], PARTITIONS)
    seen = sorted(value for member in (ours, theirs, again) for _, _, value in member.records)
    assert seen == sorted(both | later)
