"""Java's kafka-clients and Kafka Streams: transactions, groups of the consumer protocol, exactly-once processing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from brokers import Broker
from clients import with_java
from proving import proves

QUICK_GROUPS = {
    "group.consumer.min.session.timeout.ms": 1000,
    "group.consumer.session.timeout.ms": 4000,
    "group.consumer.min.heartbeat.interval.ms": 100,
    "group.consumer.heartbeat.interval.ms": 300,
}


@proves("T1")
def test_transactions_with_java(broker: Broker) -> None:
    said = with_java.run("Transactions", broker.bootstrap, "classic", "consumer")
    # As a retry of an EndTxn it was ended otherwise, or its epoch is gone: Kafka says either, by who is quicker.
    assert said.pop("late") in ("InvalidTxnStateException", "ProducerFencedException", "InvalidProducerEpochException")
    assert said.pop("zombie") in ("InvalidProducerEpochException", "ProducerFencedException")
    assert said == {
        "committed": "{t0=10, t2=10, t4=10}",
        "uncommitted": "60",
        "transformed.classic": "60 60",
        "offsets.classic": "true",
        "transformed.consumer": "60 60",
        "offsets.consumer": "true",
        "after fencing": "[successor]",
        "listed": "[Ongoing]",
        "described": "Ongoing true 60000",
        "producing": "true 0",
        "stable": "0",
        "fenced by the admin": "0",
        "transaction.version": "2",
        "after the timeout": "0",
    }


@proves("T1")
def test_kafka_streams_counts_each_word_once_over_a_restart(broker: Broker, tmp_path: Path) -> None:
    assert with_java.run("WordCount", broker.bootstrap, str(tmp_path)) == {
        "round 1": "{mill=50, water=150, wheel=100}",
        "round 2": "{mill=100, water=300, wheel=200}",
    }


@proves("N1")
def test_groups_of_the_consumer_protocol_with_java(fresh_broker: Callable[..., Broker]) -> None:
    assert with_java.run("Groups", fresh_broker(settings=QUICK_GROUPS).bootstrap) == {
        "group.version": "1",
        "one member": "true",
        "two members": "true 2",
        "described": "true Consumer 2 uniform",
        "read": "true",
        "more partitions": "true",
        "one left": "true",
        "another joined": "true",
        "one died": "true",
        "empty": "Empty",
        "static members": "true",
        "it has its partitions back": "true 2",
        "a twin": "UnreleasedInstanceIdException",
        "pattern": "true",
        "a new topic": "true",
        "a wrong pattern": "InvalidRegularExpression",
        "classic": "true Classic",
        "mixed": "true Consumer",
        "read while mixed": "true",
        "one classic left": "true",
        "back": "true Classic",
        "mixed again": "true",
        "updated": "true Consumer",
    }
