"""Share groups (KIP-932) with real clients: librdkafka's share consumer, and Java's KafkaShareConsumer."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, Producer

from brokers import Broker, Brokers, wait_for
from clients import with_java
from clients.sharing import (
    DEADLINE_S,
    QUICK,
    ShareMember,
    accept,
    commit,
    counts,
    member,
    poll,
    share_group,
    values,
    write,
)
from clients.topics import create_topic
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves


@pytest.fixture(scope="module", params=[PARTITIONED, SHARED])
def share_broker(brokers: Brokers, request: pytest.FixtureRequest) -> Iterator[Broker]:
    broker = brokers.start(settings={**QUICK, "log.layout": request.param})
    yield broker
    broker.discard()


@pytest.fixture
def topic(share_broker: Broker) -> str:
    return create_topic(share_broker, f"t-{uuid.uuid4()}")


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@proves("Q1")
def test_members_share_partitions_that_are_fewer_than_they_are(share_broker: Broker) -> None:
    bootstrap, topic = share_broker.bootstrap, create_topic(share_broker, f"t-{uuid.uuid4()}", 2)
    group = share_group(bootstrap)
    seen: Counter[str] = Counter()
    by_member: Counter[int] = Counter()

    def consume(number: int) -> None:
        consumer = member(bootstrap, group, topic, max_poll_records=10)
        end = time.monotonic() + DEADLINE_S
        while len(seen) < 300 and time.monotonic() < end:
            found = poll(consumer, 1.0)
            accept(consumer, found)
            seen.update(values(found))
            by_member[number] += len(found)
        if found:
            assert not commit(consumer)
        consumer.close()

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    write(bootstrap, topic, numbers(300), partitions=2, batched=False)
    for thread in threads:
        thread.join()
    assert seen == Counter(numbers(300))
    assert sum(count > 0 for count in by_member.values()) >= 3, by_member


@proves("Q1")
def test_records_whose_lock_has_run_out_are_delivered_again(share_broker: Broker, topic: str) -> None:
    bootstrap = share_broker.bootstrap
    group = share_group(bootstrap, share_record_lock_duration_ms=2000)
    write(bootstrap, topic, numbers(5))
    first, second = member(bootstrap, group, topic), member(bootstrap, group, topic)
    found = poll(first)
    assert (values(found), counts(found)) == (numbers(5), {1})
    again = poll(second)
    assert (values(again), counts(again)) == (numbers(5), {2})
    accept(first, found)
    assert commit(first) == ["INVALID_RECORD_STATE"]
    accept(second, again)
    assert not commit(second)
    first.close()
    second.close()


@proves("Q1")
def test_a_released_record_comes_again_and_a_rejected_one_does_not(share_broker: Broker, topic: str) -> None:
    bootstrap = share_broker.bootstrap
    write(bootstrap, topic, numbers(3))
    consumer = member(bootstrap, share_group(bootstrap), topic)
    accepted, released, rejected = poll(consumer)
    consumer.acknowledge(accepted, AcknowledgeType.ACCEPT)
    consumer.acknowledge(released, AcknowledgeType.RELEASE)
    consumer.acknowledge(rejected, AcknowledgeType.REJECT)
    assert not commit(consumer)
    again = poll(consumer)
    assert (values(again), counts(again)) == (["1"], {2})
    accept(consumer, again)
    assert not commit(consumer)
    assert not poll(consumer, 1.0)
    consumer.close()


@proves("Q1")
def test_a_record_is_delivered_only_so_often(share_broker: Broker, topic: str) -> None:
    bootstrap = share_broker.bootstrap
    write(bootstrap, topic, numbers(1))
    consumer = member(bootstrap, share_group(bootstrap), topic)
    seen: list[int | None] = []
    while found := poll(consumer, 2.0 if seen else DEADLINE_S):
        seen += counts(found)
        accept(consumer, found, AcknowledgeType.RELEASE)
        assert not commit(consumer)
    assert seen == [1, 2, 3, 4, 5]
    consumer.close()


@proves("Q1")
def test_others_get_the_records_of_a_killed_member_at_once(share_broker: Broker, topic: str) -> None:
    bootstrap = share_broker.bootstrap
    group = share_group(bootstrap)
    write(bootstrap, topic, numbers(5))
    killed = ShareMember(bootstrap, group, topic, acknowledge=False)
    wait_for("its records", lambda: len(killed.records) == 5)
    consumer = member(bootstrap, group, topic)
    assert not poll(consumer, 1.0)
    killed.kill()
    found = poll(consumer, 10.0)
    assert values(found) == numbers(5), "long before its locks have run out"
    accept(consumer, found)
    assert not commit(consumer)
    consumer.close()


@proves("Q1")
def test_only_committed_records_are_delivered_where_a_group_asks_for_that(share_broker: Broker, topic: str) -> None:
    bootstrap = share_broker.bootstrap
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(DEADLINE_S)
    for value in ("one", "aborted", "two"):
        producer.begin_transaction()
        producer.produce(topic, value.encode(), partition=0)
        producer.flush(DEADLINE_S)
        (producer.abort_transaction if value == "aborted" else producer.commit_transaction)(DEADLINE_S)
    producer.begin_transaction()
    producer.produce(topic, b"undecided", partition=0)
    producer.flush(DEADLINE_S)
    for isolation, expected in (
        ("read_committed", ["one", "two"]),
        ("read_uncommitted", ["one", "aborted", "two", "undecided"]),
    ):
        consumer = member(bootstrap, share_group(bootstrap, share_isolation_level=isolation), topic)
        seen: list[str] = []
        while found := poll(consumer, 2.0 if seen else DEADLINE_S):
            seen += values(found)
            accept(consumer, found)
        assert seen == expected
        consumer.close()
    producer.commit_transaction(DEADLINE_S)


@proves("Q1")
@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_nothing_accepted_comes_again_after_the_broker_was_killed(brokers: Brokers, layout: str) -> None:
    broker = brokers.start(settings={**QUICK, "log.layout": layout})
    bootstrap, topic = broker.bootstrap, create_topic(broker, "orders")
    group = share_group(bootstrap)
    write(bootstrap, topic, numbers(100), batched=False)
    consumer = member(bootstrap, group, topic, max_poll_records=20)
    kept: list[str] = []
    for _ in range(2):
        found = poll(consumer)
        accept(consumer, found)
        assert not commit(consumer)
        kept += values(found)
    held = values(poll(consumer))
    assert len(kept) == 40
    assert held
    broker.restart(clean=False)
    successor = member(bootstrap, group, topic)
    seen: Counter[str] = Counter()

    def all_seen() -> bool:
        found = poll(successor, 1.0)
        accept(successor, found)
        seen.update(values(found))
        return len(seen) >= 60 - len(held)

    wait_for("what was not acquired", all_seen)
    assert not set(seen) & set(kept)
    assert max(seen.values()) == 1
    successor.close()
    consumer.close()
    broker.discard()


@proves("Q1")
def test_share_groups_with_java(share_broker: Broker) -> None:
    said = with_java.run("Shares", share_broker.bootstrap)
    assert said.pop("shared").rpartition(" ")[0] == "400 [1] by"
    assert said == {
        "nothing is left": "0",
        "acquired": "[0, 1, 2, 3, 4] [1]",
        "lock": "2000",
        "when the lock has run out": "[0, 1, 2, 3, 4] [2]",
        "too late": "InvalidRecordStateException",
        "in time": "kept",
        "each in its way": "kept",
        "released": "[1, 3] [2] 0",
        "deliveries": "[1, 2, 3, 4, 5]",
        "renewed": "kept, others had 0",
        "left": "true",
        "exactly": "[3, 3, 3, 1] [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]",
        "committed": "[one, two]",
        "uncommitted": "[one, aborted, two, undecided]",
        "described": "Stable 1",
        "listed": "true",
        "offsets": "[0, 1]",
    }
