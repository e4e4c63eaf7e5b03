"""Arrow rows in a two-phase transaction: seen when it is committed, by whoever has what it takes, and not before."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable

import pyarrow as pa
import pytest

import headrace.arrow
from arrow.topics import make_topic
from brokers import Broker
from headrace import Admin, NoTransaction, TransactionFailed, TransactionRefused, abort_prepared, commit_prepared
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import Refusal
from proving import proves


def new_id() -> str:
    return f"arrow-{uuid.uuid4().hex[:12]}"


def rows_of(first: int, count: int) -> pa.RecordBatch:
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {"key": [b"%d" % n for n in numbers], "value": [b"value %d" % n for n in numbers]}
    )


def seen(broker: Broker, topic: str, isolation: str = "committed") -> list[bytes]:
    found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=["value"], isolation=isolation).read_all()
    return sorted(found["value"].to_pylist())


def values(first: int, count: int) -> list[bytes]:
    return sorted(b"value %d" % n for n in range(first, first + count))


@proves("T4", "S3")
def test_prepared_rows_of_all_topics_are_committed_by_whoever_has_them(broker: Broker) -> None:
    one, two = make_topic(broker, 3), make_topic(broker, 2)
    with headrace.arrow.Transaction(new_id(), bootstrap=broker.bootstrap, batch_bytes=2_000) as t:
        pending = [t.submit(one, rows_of(first, 500)) for first in range(0, 2000, 500)]
        assert len(t.write(two, rows_of(0, 10))) == 10
        prepared = pickle.loads(pickle.dumps(t.prepare()))
    assert sum(len(each.result()) for each in pending) == 2000
    assert seen(broker, one) == seen(broker, two) == []
    assert seen(broker, one, "uncommitted") == values(0, 2000)
    for _ in range(2):
        commit_prepared(prepared, broker.bootstrap)
    assert seen(broker, one) == values(0, 2000)
    assert seen(broker, two) == values(0, 10)
    with pytest.raises(TransactionRefused, match="committed before"):
        abort_prepared(prepared, broker.bootstrap)


@proves("S3")
def test_connections_that_are_lent_for_the_rows_stay_open_and_see_partitions_that_came_since(broker: Broker) -> None:
    topic = make_topic(broker, 1)
    with Cluster(broker.bootstrap) as cluster, Cluster(broker.bootstrap) as for_rows:
        assert len(for_rows.topic(topic).partitions) == 1
        operations.create_partitions(cluster, topic, 3)
        for first in (0, 500):
            with headrace.arrow.Transaction(new_id(), cluster=cluster, for_rows=for_rows) as t:
                written = t.write(topic, rows_of(first, 500))
                t.commit()
            assert set(written["partition"].to_pylist()) == {0, 1, 2}
            assert len(for_rows.topology([topic]).topics[topic].partitions) == 3
    assert seen(broker, topic) == values(0, 1000)


def test_a_block_that_is_left_otherwise_aborts_and_its_rows_are_never_seen(broker: Broker) -> None:
    topic, name = make_topic(broker), new_id()
    with headrace.arrow.Transaction(name, bootstrap=broker.bootstrap) as t:
        t.write(topic, rows_of(0, 10))
    with pytest.raises(KeyError), headrace.arrow.Transaction(name, bootstrap=broker.bootstrap) as t:  # noqa: PT012
        t.submit(topic, rows_of(10, 10))
        raise KeyError
    with headrace.arrow.Transaction(name, bootstrap=broker.bootstrap) as t:
        t.write(topic, rows_of(20, 10))
        t.commit()
        with pytest.raises(NoTransaction, match="over"):
            t.write(topic, rows_of(20, 10))
    assert seen(broker, topic) == values(20, 10)
    assert len(seen(broker, topic, "uncommitted")) == 30


def test_nothing_written_is_nothing_to_prepare(broker: Broker) -> None:
    with headrace.arrow.Transaction(new_id(), bootstrap=broker.bootstrap) as t:
        with pytest.raises(NoTransaction, match="nothing was written"):
            t.prepare()
        t.commit()


def test_rows_that_fail_leave_only_an_abort(broker: Broker) -> None:
    topic, name = make_topic(broker, 1, max_message_bytes="1000"), new_id()
    large = pa.RecordBatch.from_pydict({"value": [b"x" * 2000]})
    with headrace.arrow.Transaction(name, bootstrap=broker.bootstrap) as t:
        t.write(topic, rows_of(0, 3))
        t.submit(topic, large)
        with pytest.raises(TransactionFailed, match=r"max.message.bytes"):
            t.prepare()
        with pytest.raises(TransactionFailed, match="can only be aborted"):
            t.write(topic, rows_of(3, 3))
    assert seen(broker, topic) == []
    with Admin(broker.bootstrap) as admin:
        (found,) = admin.describe_transactions([name])
    assert found.state == "CompleteAbort"


@proves("T4")
def test_the_next_one_with_the_id_fences_the_one_before(broker: Broker) -> None:
    topic, name = make_topic(broker), new_id()
    with pytest.raises(TransactionFailed), headrace.arrow.Transaction(name, bootstrap=broker.bootstrap) as old:  # noqa: PT012
        old.write(topic, rows_of(0, 10))
        with headrace.arrow.Transaction(name, bootstrap=broker.bootstrap) as new:
            new.write(topic, rows_of(10, 10))
            new.commit()
        old.submit(topic, rows_of(20, 10))
        old.prepare()
    assert seen(broker, topic) == values(10, 10)


@proves("T4")
def test_a_prepared_transaction_outlives_a_kill_of_the_broker(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker()
    topic = make_topic(broker)
    with headrace.arrow.Transaction(new_id(), bootstrap=broker.bootstrap) as t:
        t.write(topic, rows_of(0, 100))
        prepared = t.prepare()
    broker.restart(clean=False)
    commit_prepared(prepared, broker.bootstrap)
    assert seen(broker, topic) == values(0, 100)


def test_a_broker_that_allows_no_two_phases_refuses_at_the_beginning(fresh_broker: Callable[..., Broker]) -> None:
    broker = fresh_broker(settings={"transaction.two.phase.commit.enable": "false"})
    with pytest.raises(Refusal, match="authorization failed"):
        headrace.arrow.Transaction(new_id(), bootstrap=broker.bootstrap)
