"""`headrace queue` against a broker, with a real share consumer on the other side."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import AcknowledgeType

from brokers import Broker, Brokers, wait_for
from cli.conftest import Finished, run_command
from clients.sharing import QUICK, commit, member, poll, share_group, values, write
from clients.topics import create_topic
from proving import proves

Command = Callable[..., Finished]


@pytest.fixture(scope="module")
def share_broker(brokers: Brokers) -> Iterator[Broker]:
    broker = brokers.start(settings=QUICK)
    yield broker
    broker.discard()


@pytest.fixture
def call(share_broker: Broker) -> Command:
    def run(*arguments: str, stdin: str = "", exit_code: int = 0) -> Finished:
        return run_command(*arguments, bootstrap=share_broker.bootstrap, stdin=stdin, exit_code=exit_code)

    return run


class Queue:
    """A topic of six records, a share group that has accepted 0, released 1, rejected 2 and 3, and its dead letters."""

    def __init__(self, broker: Broker, *, copies: bool = True) -> None:
        self.bootstrap = broker.bootstrap
        self.topic = create_topic(broker, f"t-{uuid.uuid4()}")
        self.letters = create_topic(broker, f"dlq.{self.topic}", errors_deadletterqueue_group_enable="true")
        self.group = share_group(
            self.bootstrap,
            errors_deadletterqueue_topic_name=self.letters,
            errors_deadletterqueue_copy_record_enable=str(copies).lower(),
        )
        write(self.bootstrap, self.topic, [str(number) for number in range(6)], batched=False)
        self.consumer = member(self.bootstrap, self.group, self.topic, max_poll_records=4)
        found: list[Any] = []
        while len(found) < 4:
            found += poll(self.consumer)
        ways = [AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT, AcknowledgeType.REJECT]
        for message, how in zip(found, ways + [AcknowledgeType.RELEASE] * 2, strict=False):
            self.consumer.acknowledge(message, how)
        assert not commit(self.consumer)
        self.consumer.close()


def described(call: Command, group: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(call("queue", "describe", group, "--json").stdout)
    return shown


@proves("Q3", "Q6")
def test_queues_are_listed_described_and_peeked_into(share_broker: Broker, call: Command) -> None:
    queue = Queue(share_broker)
    wait_for("the letters", lambda: described(call, queue.group)["dead_letters"] == 2)
    shown = described(call, queue.group)
    assert (shown["dead_letter_topic"], shown["dead_letter_copies"], shown["depth"]) == (queue.letters, True, 3)
    (row,) = shown["partitions"]
    assert (row["start"], row["end"], row["in_flight"], row["letters_waiting"]) == (1, 6, 0, 0)
    (listed,) = [row for row in json.loads(call("queue", "list", "--json").stdout) if row["queue"] == queue.group]
    assert (listed["depth"], listed["dead_letters"], listed["members"]) == (3, 2, 0)
    lines = call("queue", "peek", queue.group, "--format", "%o %v").stdout.splitlines()
    assert lines == ["1 1", "4 4", "5 5"]
    assert call("queue", "peek", queue.group, "--format", "%v", "-n", "1").stdout == "1\n"
    text = call("queue", "describe", queue.group).stdout
    assert f"dead letters go to {queue.letters}, with 2 records, as copies" in text


@proves("Q3", "R10")
@pytest.mark.parametrize("copies", [True, False])
def test_dead_letters_are_shown_and_sent_again_once(share_broker: Broker, call: Command, copies: bool) -> None:
    queue = Queue(share_broker, copies=copies)
    wait_for("the letters", lambda: described(call, queue.group)["dead_letters"] == 2)
    shown = json.loads(call("queue", "redrive", queue.group, "--dry-run", "--json").stdout)
    assert [(row["source"], row["reason"]) for row in shown] == [
        (f"{queue.topic}-0:2", "rejected"), (f"{queue.topic}-0:3", "rejected"),
    ]  # fmt: skip
    assert json.loads(call("queue", "redrive", queue.group, "--reason", "deliveries", "--json").stdout)["sent"] == 0
    done = json.loads(call("queue", "redrive", queue.group, "--rate", "50", "--json").stdout)
    assert (done["sent"], done["gone"]) == (2, 0)
    assert json.loads(call("queue", "redrive", queue.group, "--json").stdout)["sent"] == 0, "it goes on where it was"
    consumed = call("consume", queue.topic, "--format", "%v %h").stdout.split()
    assert consumed == ["0", "1", "2", "3", "4", "5", "2", "3"], "without the headers of letters"
    assert json.loads(call("queue", "redrive", queue.group, "--again", "--json").stdout)["sent"] == 2


@proves("Q6")
def test_a_queue_is_purged_when_that_is_confirmed_and_reset(share_broker: Broker, call: Command) -> None:
    queue = Queue(share_broker)
    assert "pass over up to 5 records" in call("queue", "purge", queue.group, stdin="n\n", exit_code=1).stderr
    assert described(call, queue.group)["partitions"][0]["start"] == 1
    call("queue", "purge", queue.group, stdin="y\n")
    assert described(call, queue.group)["depth"] == 0
    rows = json.loads(call("queue", "reset", queue.group, "--to", "4", "--json").stdout)["partitions"]
    assert [(row["start"], row["new"]) for row in rows] == [(6, 4)]
    call("queue", "reset", queue.group, "--to", "earliest", "--dry-run")
    consumer = member(queue.bootstrap, queue.group, queue.topic)
    assert values(poll(consumer))[:1] == ["4"]
    failed = call("queue", "reset", queue.group, "--to", "earliest", exit_code=1)
    assert queue.group in failed.stderr
    consumer.close()
    call("queue", "reset", queue.group, "--to", "earliest")
    assert described(call, queue.group)["depth"] == 6


def test_other_groups_are_no_queues(share_broker: Broker, call: Command) -> None:
    topic = create_topic(share_broker, f"t-{uuid.uuid4()}")
    call("produce", topic, stdin="a\n")
    call("consume", topic, "--group", f"of-{topic}")
    assert "see `headrace group`" in call("queue", "describe", f"of-{topic}", exit_code=1).stderr
