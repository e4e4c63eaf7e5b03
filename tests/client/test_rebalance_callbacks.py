"""What an application hears of its partitions: by the thread that polls, and in time to commit.

On threads and on asyncio: of the latter every call is run to its end, and the loop stands still in between.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

import headrace
from brokers import Broker, wait_for
from client.blocking_consumer import Blocking
from client.conftest import MakeTopic
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.membership import State
from proving import proves

ASSIGNORS = ("average", "cooperative")
COUNT = 10


@dataclass
class Heard:
    """All that one consumer was told, with the thread that told it; `act` is done in each callback."""

    events: list[tuple[str, list[TopicPartition]]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    act: Callable[[str, list[TopicPartition]], object] = lambda kind, places: None

    def options(self) -> dict[str, object]:
        return {f"on_{kind}": self._callback(kind) for kind in ("assigned", "revoked", "lost")}

    def _callback(self, kind: str) -> Callable[[list[TopicPartition]], object]:
        def hear(places: list[TopicPartition]) -> object:
            self.events.append((kind, places))
            self.threads.add(threading.get_ident())
            return self.act(kind, places)

        return hear

    def told(self, kind: str) -> list[int]:
        return sorted(number for each, places in self.events if each == kind for _, number in places)


Join = Callable[..., tuple[Blocking, Heard]]


@pytest.fixture(params=["threads", "asyncio"])
def join(request: pytest.FixtureRequest, broker: Broker, group: str) -> Iterator[Join]:
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner()) if request.param == "asyncio" else None

        def make(topic: str, **options: object) -> tuple[Blocking, Heard]:
            heard = Heard()
            given = {"commit_interval_ms": 0, "group": group, **heard.options(), **options}
            made = Blocking(runner, topic, bootstrap=broker.bootstrap, **given)
            if given["group"]:
                # A member hears of a rebalance by its heartbeats.
                made.membership._beat_s = 0.05
            stack.callback(made.close)
            return made, heard

        yield make


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def target(broker: Broker, topic: MakeTopic) -> str:
    """Two partitions with ten records each."""
    name = topic(partitions=2)
    records = [Record(b"%d" % n, partition=partition) for partition in (0, 1) for n in range(COUNT)]
    ConfluentKafka().produce(broker.bootstrap, name, records)
    return name


def read_all(consumer: Blocking, count: int) -> None:
    found = 0

    def came() -> bool:
        nonlocal found
        found += len(consumer.poll(500))
        return found >= count

    wait_for("all records", came, pause_s=0.0)
    assert found == count


def poll_until(done: Callable[[], bool], *consumers: Blocking) -> list[int]:
    """The partitions of what came meanwhile."""
    found: list[int] = []

    def turn() -> bool:
        for consumer in consumers:
            found.extend(record.partition for record in consumer.poll(500))
        return done()

    wait_for("the callbacks", turn, pause_s=0.0)
    return found


@proves("U2")
@pytest.mark.parametrize("assignor", ASSIGNORS)
def test_a_commit_while_partitions_go_is_kept_and_nothing_comes_twice(
    cluster: Cluster, group: str, target: str, join: Join, assignor: str
) -> None:
    first, heard = join(target, assignor=assignor)
    heard.act = lambda kind, places: first.consumer.commit() if kind == "revoked" else None
    read_all(first, 2 * COUNT)
    assert heard.events == [("assigned", [(target, 0), (target, 1)])]
    second, also_heard = join(target, assignor=assignor)
    came = poll_until(lambda: bool(also_heard.told("assigned")), first, second)
    assert came == [record.partition for record in second.poll(500)] == []
    gone = heard.events[1]
    assert gone[0] == "revoked"
    assert set(also_heard.told("assigned")) <= {number for _, number in gone[1]}
    assert len(gone[1]) == (1 if assignor == "cooperative" else 2)
    committed = groups.fetch_offsets(cluster, group)
    assert {place: committed[place] for place in gone[1]} == dict.fromkeys(gone[1], COUNT)
    assert heard.threads == also_heard.threads == {threading.get_ident()}


@proves("U2")
def test_partitions_that_were_taken_are_told_as_lost_and_their_return_too(target: str, join: Join) -> None:
    consumer, heard = join(target, rebalance_timeout_ms=300)
    read_all(consumer, 2 * COUNT)
    consumer.under_lock(consumer.membership._step_out)
    assert heard.told("lost") == []
    poll_until(lambda: len(heard.told("assigned")) == 4, consumer)
    both = [(target, 0), (target, 1)]
    assert heard.events == [("assigned", both), ("lost", both), ("assigned", both)]


@proves("U2")
@pytest.mark.parametrize(("assignor", "kind"), [("average", "assigned"), *((each, "revoked") for each in ASSIGNORS)])
def test_what_a_callback_raises_the_poll_raises_and_the_rebalance_goes_on(
    target: str, join: Join, assignor: str, kind: str
) -> None:
    first, heard = join(target, assignor=assignor)

    def fail(told: str, places: list[TopicPartition]) -> None:
        if told == kind and [each for each, _ in heard.events].count(kind) == 1:
            raise LookupError(kind)

    heard.act = fail
    if kind == "assigned":
        with pytest.raises(LookupError):
            poll_until(lambda: False, first)
        read_all(first, 2 * COUNT)
        return
    read_all(first, 2 * COUNT)
    second, also_heard = join(target, assignor=assignor)
    with pytest.raises(LookupError):
        poll_until(lambda: False, first, second)
    poll_until(lambda: bool(also_heard.told("assigned")), first, second)


@proves("U2")
def test_whoever_hears_of_a_partition_may_say_where_to_begin(target: str, join: Join) -> None:
    consumer, heard = join(target)
    heard.act = lambda kind, places: consumer.consumer.seek(target, 1, 7) if kind == "assigned" else None
    found: set[tuple[int, int]] = set()

    def came() -> bool:
        found.update((record.partition, record.offset) for record in consumer.poll(500))
        return len(found) == COUNT + 3

    wait_for("the records", came, pause_s=0.0)
    assert {offset for partition, offset in found if partition == 1} == {7, 8, 9}


@proves("U2")
def test_a_callback_that_polls_is_refused(target: str, join: Join) -> None:
    consumer, heard = join(target)
    heard.act = lambda kind, places: consumer.consumer.poll(0) if kind == "assigned" else None
    with pytest.raises(headrace.InvalidRequest, match="cannot poll itself"):
        poll_until(lambda: False, consumer)


@proves("U2")
def test_a_close_lets_all_partitions_go_with_what_the_callback_commits(
    cluster: Cluster, group: str, target: str, join: Join
) -> None:
    consumer, heard = join(target)
    heard.act = lambda kind, places: consumer.consumer.commit() if kind == "revoked" else None
    read_all(consumer, 2 * COUNT)
    consumer.close()
    assert heard.events[1:] == [("revoked", [(target, 0), (target, 1)])]
    assert groups.fetch_offsets(cluster, group) == {(target, 0): COUNT, (target, 1): COUNT}
    assert consumer.membership.state is State.ENDED


@proves("U2")
def test_a_close_whose_callback_fails_leaves_the_group_all_the_same(target: str, join: Join) -> None:
    consumer, heard = join(target)

    def fail(kind: str, places: list[TopicPartition]) -> None:
        if kind == "revoked":
            raise LookupError

    heard.act = fail
    read_all(consumer, 2 * COUNT)
    with pytest.raises(LookupError):
        consumer.close()
    assert consumer.membership.state is State.ENDED


@proves("U2")
def test_a_commit_after_an_error_does_not_count_what_was_being_worked_on(
    broker: Broker, cluster: Cluster, group: str, target: str
) -> None:
    """The `with` block ends by an error in the middle of the last call's records."""
    consumer = headrace.Consumer(
        target, bootstrap=broker.bootstrap, group=group, on_revoked=lambda places: consumer.commit()
    )

    def work() -> None:
        with consumer:
            wait_for("records", lambda: consumer.poll(200))
            raise LookupError

    with pytest.raises(LookupError):
        work()
    assert not any(groups.fetch_offsets(cluster, group).values())


@proves("U2")
def test_without_a_group_all_partitions_are_told(target: str, join: Join) -> None:
    consumer, heard = join(target, group=None)
    read_all(consumer, 2 * COUNT)
    assert heard.events == [("assigned", [(target, 0), (target, 1)])]
    consumer.close()
    assert heard.told("revoked") == [0, 1]


@proves("U2")
def test_a_listener_hears_of_partitions_and_goes_on_if_a_callback_fails(
    broker: Broker, group: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: set[tuple[int, int]] = set()
    heard = Heard()

    def fail(kind: str, places: list[TopicPartition]) -> None:
        raise LookupError(kind)

    heard.act = fail
    consumer = headrace.Consumer(
        target,
        bootstrap=broker.bootstrap,
        group=group,
        on_assigned=heard.options()["on_assigned"],  # type: ignore[arg-type]
    )
    with (
        caplog.at_level(logging.ERROR),
        consumer.listen(lambda record: seen.add((record.partition, record.offset)), ordered=True, threads=2),
    ):
        wait_for("all records", lambda: len(seen) == 2 * COUNT)
    assert heard.told("assigned") == [0, 1]
    assert "a callback of a rebalance failed" in caplog.text
    assert "LookupError: assigned" in caplog.text
