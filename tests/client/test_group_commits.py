"""A commit that returned is in the group's log, and nothing takes it back; one that did not count says so.

On threads and on asyncio: of the latter every call is run to its end, and the loop stands still in between.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

import headrace
from brokers import Broker, wait_for
from client.blocking_consumer import Blocking
from clients.records import Record
from clients.with_confluent import ConfluentKafka
from headrace.client.admin import groups, operations
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.core import AssignmentSource
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.membership import Membership
from headrace.client.consumer.progress import NotHeld, Offsets, Saved
from headrace.errors import HeadraceError, InvalidRequest, RequestTimedOut
from proving import proves

MakeTopic = Callable[..., str]


MakeConsumer = Callable[..., Blocking]


@pytest.fixture(params=["threads", "asyncio"])
def join(request: pytest.FixtureRequest, broker: Broker, group: str) -> Iterator[MakeConsumer]:
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner()) if request.param == "asyncio" else None

        def make(*topics: str, **options: object) -> Blocking:
            made = Blocking(runner, *topics, bootstrap=broker.bootstrap, group=group, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def target(broker: Broker, topic: MakeTopic) -> str:
    name = topic()
    write(broker, name, 10)
    return name


def write(broker: Broker, topic: str, count: int, partition: int = 0) -> None:
    ConfluentKafka().produce(broker.bootstrap, topic, [Record(b"%d" % n, partition=partition) for n in range(count)])


class LateAnswers:
    """A group whose answers to commits come when the test gives them."""

    def __init__(self, source: AssignmentSource) -> None:
        self.asked: list[tuple[Offsets, Saved]] = []
        self._source = source

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def commit(self, offsets: Mapping[TopicPartition, int], on_done: Saved) -> None:
        self.asked.append((dict(offsets), on_done))


@proves("R8", "R9")
def test_a_commit_of_partitions_that_were_lost_says_so_once(
    cluster: Cluster, group: str, target: str, join: MakeConsumer
) -> None:
    consumer = join(target, commit_interval_ms=0)
    assert consumer.read(4) == [0, 1, 2, 3]
    # As after rebalance_timeout_ms of work.
    consumer.under_lock(consumer.membership._step_out)
    with pytest.raises(NotHeld, match=f"progress of {target}-0 was not saved"):
        consumer.commit()
    assert groups.fetch_offsets(cluster, group) == {}
    consumer.commit()
    assert consumer.read(4) == [0, 1, 2, 3]
    consumer.commit()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 4}


def test_a_commit_says_so_also_when_the_partition_is_back_unless_it_has_reached_as_far(
    cluster: Cluster, group: str, target: str, join: MakeConsumer
) -> None:
    consumer = join(target, commit_interval_ms=0)
    consumer.read(4)
    for again, reaches in ((2, False), (6, True)):
        consumer.under_lock(consumer.membership._step_out)
        assert consumer.read(again)[0] == 0
        if reaches:
            consumer.commit()
        else:
            with pytest.raises(NotHeld, match=f"{target}-0"):
                consumer.commit()
            consumer.seek(target, 0, 0)
            consumer.commit()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 6}


def test_what_was_committed_or_never_handed_out_is_not_missed_when_its_partition_goes(
    target: str, topic: MakeTopic, join: MakeConsumer
) -> None:
    consumer = join(target, topic(), commit_interval_ms=0)
    consumer.read(4)
    consumer.commit()
    consumer.under_lock(consumer.membership._step_out)
    consumer.commit()


def test_what_could_not_be_saved_when_its_partition_went_is_said(target: str, join: MakeConsumer) -> None:
    consumer = join(target)
    consumer.read(4)
    member = consumer.membership

    def give_up() -> None:
        consumer.core.collector.finish_last()
        member._progress.save = lambda offsets, on_done, within_s: on_done(RequestTimedOut("no"))  # type: ignore
        member._give_up(member.held)
        del member._progress.save

    consumer.under_lock(give_up)
    with pytest.raises(NotHeld, match=f"{target}-0"):
        consumer.commit()


@proves("R8")
def test_neither_the_clock_nor_a_close_takes_back_what_was_committed_ahead(
    cluster: Cluster, group: str, target: str, join: MakeConsumer
) -> None:
    consumer = join(target)
    consumer.read(2)
    consumer.commit({(target, 0): 7})
    for _ in range(2):
        consumer.read(2)
        consumer.under_lock(consumer.core._save_by_clock)
        consumer.commit()
        assert groups.fetch_offsets(cluster, group) == {(target, 0): 7}
    consumer.close()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 7}


def test_what_was_committed_ahead_is_gone_on_from_and_left_by_a_seek(
    cluster: Cluster, group: str, target: str, join: MakeConsumer
) -> None:
    consumer = join(target)
    consumer.read(2)
    consumer.commit({(target, 0): 4})
    assert consumer.read(6) == [2, 3, 4, 5, 6, 7]
    consumer.commit()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 8}
    consumer.commit({(target, 0): 10})
    consumer.seek(target, 0, 3)
    consumer.commit()
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 3}


def test_less_than_was_handed_out_stays_committed_until_more_is(target: str, join: MakeConsumer) -> None:
    consumer = join(target)
    consumer.read(4)
    consumer.read(2)
    consumer.commit({(target, 0): 1})
    consumer.under_lock(consumer.core.collector.finish_last)
    assert consumer.core.done_with() == {(target, 0): 6}
    consumer.commit({(target, 0): 1})
    assert consumer.core.done_with() == {}


def test_rows_after_records_leave_what_was_committed(broker: Broker, cluster: Cluster, group: str, target: str) -> None:
    """What an iterator had not given out is read again then, which is no seek of the caller's."""
    with headrace.Consumer(target, bootstrap=broker.bootstrap, group=group) as consumer:
        next(consumer.records())
        consumer.commit({(target, 0): 8})
        next(consumer.batches(batch_rows=2))
        assert consumer._core.done_with() == {}
    assert groups.fetch_offsets(cluster, group) == {(target, 0): 8}


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_commits_that_are_under_way_the_later_one_counts(target: str, join: MakeConsumer, first: int) -> None:
    consumer = join(target)
    consumer.read(4)
    late = LateAnswers(consumer.core._source)
    consumer.core._source = late  # type: ignore[assignment]
    answers: list[HeadraceError | None] = []
    consumer.core.commit(None, answers.append)
    consumer.core.commit({(target, 0): 2}, answers.append)
    for nth in (first, 1 - first):
        late.asked[nth][1](None)
    # The log has 2 now.
    consumer.core.commit(None, answers.append)
    assert [offsets[target, 0] for offsets, _ in late.asked] == [4, 2, 4]
    assert answers == [None, None]
    consumer.core._source = late._source


def test_after_a_commit_whose_end_is_not_known_all_is_saved_again(target: str, join: MakeConsumer) -> None:
    consumer = join(target)
    consumer.read(4)
    consumer.commit()
    late = LateAnswers(consumer.core._source)
    consumer.core._source = late  # type: ignore[assignment]
    answers: list[HeadraceError | None] = []
    timed_out = RequestTimedOut("it may have been saved")
    consumer.core.commit({(target, 0): 4}, answers.append)
    late.asked[0][1](timed_out)
    consumer.core.commit(None, answers.append)
    assert [offsets for offsets, _ in late.asked] == [{(target, 0): 4}, {(target, 0): 4}]
    assert answers == [timed_out]
    consumer.core._source = late._source


def test_an_offset_below_zero_is_refused(target: str, join: MakeConsumer) -> None:
    consumer = join(target)
    with pytest.raises(InvalidRequest, match=f"offset -1 of {target}-0 is below 0"):
        consumer.commit({(target, 0): -1})


@proves("R8", "R9")
def test_what_a_topic_gains_while_a_group_reads_it_is_read_from_its_first_record(
    broker: Broker, cluster: Cluster, group: str, topic: MakeTopic
) -> None:
    target = topic()
    with headrace.Consumer(target, bootstrap=broker.bootstrap, group=group, start="latest") as consumer:
        source = consumer._core._source
        assert isinstance(source, Membership)
        source._look_interval_s = 0.2
        assert consumer.position(target, 0) == 0
        operations.create_partitions(cluster, target, 2)
        cluster.forget()
        wait_for("the partition", lambda: len(cluster.topic(target).partitions) == 2)
        write(broker, target, 3, partition=1)
        found: list[int] = []

        def came() -> bool:
            found.extend(record.offset for record in consumer.poll(200))
            return len(found) >= 3

        wait_for("its records", came)
        assert found == [0, 1, 2]
