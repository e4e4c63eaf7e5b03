"""Java's kafka-clients and Kafka Streams: transactions and exactly-once processing."""

from __future__ import annotations

from pathlib import Path

from brokers import Broker
from clients import with_java
from proving import proves


@proves("T1")
def test_transactions_with_java(broker: Broker) -> None:
    said = with_java.run("Transactions", broker.bootstrap, "classic")
    # As a retry of an EndTxn it was ended otherwise, or its epoch is gone: Kafka says either, by who is quicker.
    assert said.pop("late") in ("InvalidTxnStateException", "ProducerFencedException", "InvalidProducerEpochException")
    assert said.pop("zombie") in ("InvalidProducerEpochException", "ProducerFencedException")
    assert said == {
        "committed": "{t0=10, t2=10, t4=10}",
        "uncommitted": "60",
        "transformed.classic": "60 60",
        "offsets.classic": "true",
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
