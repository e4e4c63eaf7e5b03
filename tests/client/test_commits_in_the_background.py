"""Transactions whose commit is not waited for: the next one is filled meanwhile, and comes to nothing if it fails."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import headrace.aio
from brokers import Broker, wait_for
from client.conftest import MakeTopic
from client.test_producer_transactions import DEADLINE_S, new_id, visible
from client.wire_tap import Seen, WireTap
from headrace import (
    Consumer,
    NoTransaction,
    Producer,
    TransactionFailed,
    TransactionFenced,
    TransactionInDoubt,
    TransactionTimedOut,
)
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

Tapped = tuple[WireTap, Broker]


@contextmanager
def held(
    tap: WireTap, api_key: int, change: Callable[[Seen, Message], None] | None = None
) -> Iterator[threading.Event]:
    """Answers of an API do not come until the event is set, or the block ends; then `change` may alter them."""
    go_on = threading.Event()

    def wait(seen: Seen, answer: Message) -> None:
        if seen.api_key == api_key and seen.body.transactional_id:
            assert go_on.wait(DEADLINE_S)
            if change is not None:
                change(seen, answer)

    tap.change = wait
    try:
        yield go_on
    finally:
        go_on.set()
        tap.change = lambda seen, answer: None


def refuse(seen: Seen, answer: Message) -> None:
    """A partition says that it takes none of the records."""
    for topic in answer.responses:
        for row in topic.partition_responses:
            row.error_code = ErrorCode.INVALID_RECORD


def new_topic() -> str:
    return f"behind-{uuid.uuid4().hex[:8]}"


@proves("T3")
def test_one_after_another_is_committed_while_the_next_is_filled(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=3)
    wanted = []
    with Producer(broker.bootstrap, transactional_id=new_id(), batch_bytes=2000) as producer:
        for nth in range(40):
            records = [b"%d-%d" % (nth, place) for place in range(1 + 17 * nth % 120)]
            with producer.transaction(wait=False) as t:
                deliveries = [t.send(name, record, key=record) for record in records]
            wanted += records
        t.wait()
        assert t.is_settled
        assert all(delivery.result().offset >= 0 for delivery in deliveries)
        t.wait()
    assert sorted(visible(broker.bootstrap, name)) == sorted(wanted)


@proves("T3")
def test_the_next_takes_records_at_once_and_they_leave_when_the_one_before_is_committed(
    tapped: Tapped, tap: WireTap
) -> None:
    broker, name = tapped[1], new_topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with producer.transaction() as t:
            t.send(name, b"0")
        with held(tap, apis.END_TXN) as go_on:
            with producer.transaction(wait=False) as first:
                first.send(name, b"1")
            with pytest.raises(NoTransaction, match="in transactions only"):
                producer.send_async(name, b"between two")
            second = producer.transaction(wait=False)
            second.begin()
            late = second.send(name, b"2")
            with pytest.raises(NoTransaction, match="open already"):
                producer.transaction().begin()
            with pytest.raises(NoTransaction, match="wait=False"):
                first.abort()
            wait_for("the end of the first", lambda: len(tap.of(apis.END_TXN)) >= 2, DEADLINE_S)
            assert len(tap.of(apis.PRODUCE)) == 2
            assert not first.is_settled
            assert not late.done
            go_on.set()
            second.commit()
            assert late.result().offset >= 0
        assert first.is_settled
        epochs = [each.body.producer_epoch for each in tap.of(apis.END_TXN)]
        assert epochs == sorted(set(epochs))
    assert visible(broker.bootstrap, name) == [b"0", b"1", b"2"]


@proves("T3")
def test_one_in_the_middle_is_aborted_alone(broker: Broker, topic: MakeTopic) -> None:
    name = topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with producer.transaction(wait=False) as t:
            t.send(name, b"0")
        with pytest.raises(KeyError, match="mine"), producer.transaction(wait=False) as t:  # noqa: PT012
            t.send(name, b"1")
            raise KeyError("mine")
        with producer.transaction(wait=False) as t:
            t.send(name, b"2")
        with producer.transaction(wait=False):
            pass
    assert visible(broker.bootstrap, name) == [b"0", b"2"]


@proves("T3")
@pytest.mark.parametrize("end", ["commit", "send", "own error", "nothing begins", "close"])
def test_when_one_fails_the_next_comes_to_nothing_with_it_and_it_is_said(
    tapped: Tapped, tap: WireTap, end: str
) -> None:
    broker, name = tapped[1], new_topic()
    producer = Producer(broker.bootstrap, transactional_id=new_id())
    with producer.transaction() as t:
        t.send(name, b"0")
    with held(tap, apis.PRODUCE, refuse) as go_on:
        with producer.transaction(wait=False) as first:
            lost = first.send(name, b"1")
        second = producer.transaction(wait=False)
        if end in ("commit", "send", "own error"):
            second.begin()
            behind = second.send(name, b"2")
        go_on.set()
        if end == "close":
            with pytest.raises(TransactionFailed, match="not written"):
                producer.close()
        elif end == "commit":
            with pytest.raises(TransactionFailed, match="one before it"):
                second.__exit__(None, None, None)
        elif end == "nothing begins":
            wait_for("the failure", lambda: first.is_settled, DEADLINE_S)
            with pytest.raises(TransactionFailed, match="not written"):
                second.begin()
        elif end == "send":
            wait_for("the failure", lambda: lost.done and first.is_settled, DEADLINE_S)
            with pytest.raises(TransactionFailed) as raised:
                second.send(name, b"3")
            second.__exit__(type(raised.value), raised.value, None)
        else:
            second.__exit__(KeyError, KeyError("mine"), None)
        if end in ("commit", "send", "own error"):
            assert isinstance(behind.exception(), headrace.NotDelivered)
            with pytest.raises(TransactionFailed):
                first.wait()
        tap.change = lambda seen, answer: None
    if end != "close":
        with producer.transaction(wait=False) as t:
            t.send(name, b"4")
        producer.close()
    with Producer(broker.bootstrap) as plain:
        plain.send(name, b"the end")
    wanted = [b"0", b"the end"] if end == "close" else [b"0", b"4", b"the end"]
    wait_for("what is committed, and no more", lambda: visible(broker.bootstrap, name) == wanted, DEADLINE_S)


@proves("T3")
def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_begin(tapped: Tapped, tap: WireTap) -> None:
    """Also where the one in between has ended by an error of its own."""
    broker, name = tapped[1], new_topic()
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with held(tap, apis.PRODUCE, refuse) as go_on:
            with producer.transaction(wait=False) as first:
                first.send(name, b"1")
            with pytest.raises(KeyError, match="mine"), producer.transaction(wait=False):  # noqa: PT012
                go_on.set()
                raise KeyError("mine")
        with pytest.raises(TransactionFailed, match="not written"):
            producer.transaction().begin()
        with producer.transaction() as t:
            t.send(name, b"2")
    assert visible(broker.bootstrap, name) == [b"2"]


@proves("T3")
@pytest.mark.parametrize("follows", [False, True])
def test_what_is_sent_again_while_nobody_waits_is_committed_too(tapped: Tapped, tap: WireTap, follows: bool) -> None:
    broker, name, left = tapped[1], new_topic(), [1, 1, 1]
    with Producer(broker.bootstrap, transactional_id=new_id()) as producer:
        with producer.transaction() as t:
            t.send(name, b"0")
        tap.lost = lambda seen: seen.api_key in (apis.PRODUCE, apis.END_TXN) and bool(left) and bool(left.pop())
        with producer.transaction(wait=False) as t:
            t.send(name, b"1")
        if follows:
            with producer.transaction(wait=False) as t:
                t.send(name, b"2")
        t.wait()
    assert left == []
    assert visible(broker.bootstrap, name) == [b"0", b"1", b"2"][: 2 + follows]


@proves("T3")
def test_records_of_the_next_that_came_too_late_fail_it_alone(tapped: Tapped, tap: WireTap) -> None:
    broker, name, written, ended = tapped[1], new_topic(), threading.Event(), threading.Event()

    def hold(seen: Seen, answer: Message) -> None:
        if seen.api_key in (apis.PRODUCE, apis.END_TXN):
            assert (written if seen.api_key == apis.PRODUCE else ended).wait(DEADLINE_S)

    with Producer(broker.bootstrap, transactional_id=new_id(), delivery_timeout_ms=3000) as producer:
        with producer.transaction() as t:
            t.send(name, b"0")
        tap.change = hold
        with producer.transaction(wait=False) as first:
            first.send(name, b"1")
        second = producer.transaction(wait=False)
        second.begin()
        late, half = second.send(name, b"2"), time.monotonic() + 1.5
        # So that the answer to the end of the first may come after the time of the record is up.
        wait_for("half of its time", lambda: time.monotonic() > half, DEADLINE_S)
        written.set()
        wait_for("the end of its time", lambda: late.done, DEADLINE_S)
        ended.set()
        first.wait()
        with pytest.raises(TransactionFailed, match="not written"):
            second.__exit__(None, None, None)
        with producer.transaction(wait=False) as t:
            t.send(name, b"3")
    assert visible(broker.bootstrap, name) == [b"0", b"1", b"3"]


@proves("T3")
def test_of_one_in_doubt_the_next_comes_to_nothing_and_the_commit_is_asked_again(tapped: Tapped, tap: WireTap) -> None:
    broker, name = tapped[1], new_topic()
    with Producer(
        broker.bootstrap, transactional_id=new_id(), delivery_timeout_ms=1500, request_timeout_ms=500
    ) as producer:
        with producer.transaction() as t:
            t.send(name, b"0")
        tap.lost = lambda seen: seen.api_key == apis.END_TXN
        with producer.transaction(wait=False) as first:
            first.send(name, b"1")
        second = producer.transaction(wait=False)
        second.begin()
        behind = second.send(name, b"2")
        with pytest.raises(TransactionFailed, match="one before it"):
            second.commit(wait=False)
        assert behind.exception() is not None
        with pytest.raises(TransactionInDoubt):
            first.wait()
        with pytest.raises(NoTransaction, match="again first"):
            producer.transaction().begin()
        tap.lost = lambda seen: False
        first.commit()
        with producer.transaction(wait=False) as t:
            t.send(name, b"3")
    assert visible(broker.bootstrap, name) == [b"0", b"1", b"3"]


@proves("T3")
def test_one_that_was_fenced_takes_the_next_along(tapped: Tapped, tap: WireTap) -> None:
    broker, name, transactional_id = tapped[1], new_topic(), new_id()
    producer = Producer(broker.bootstrap, transactional_id=transactional_id)
    with producer.transaction() as t:
        t.send(name, b"0")
    with held(tap, apis.PRODUCE) as go_on:
        with producer.transaction(wait=False) as first:
            first.send(name, b"1")
        second = producer.transaction(wait=False)
        second.begin()
        second.send(name, b"2")
        # Its answer is held, and those to the other one are not.
        wait_for("its record", lambda: sum(each.answer is not None for each in tap.of(apis.PRODUCE)) == 2, DEADLINE_S)
        tap.change = lambda seen, answer: None
        with Producer(broker.bootstrap, transactional_id=transactional_id) as other, other.transaction() as t:
            t.send(name, b"of another")
        go_on.set()
        with pytest.raises(TransactionFailed, match="taken over"):
            second.commit()
    with pytest.raises(TransactionFenced):
        producer.transaction().begin()
    with pytest.raises(TransactionFenced):
        first.wait()
    producer.close()
    assert visible(broker.bootstrap, name) == [b"0", b"of another"]


@proves("T3")
def test_one_that_was_open_for_too_long_takes_the_next_along(tapped: Tapped, tap: WireTap) -> None:
    broker, name = tapped[1], new_topic()
    with Producer(broker.bootstrap, transactional_id=new_id(), transaction_timeout_ms=1000) as producer:
        with producer.transaction() as t:
            t.send(name, b"0")
        first = producer.transaction(wait=False)
        first.begin()
        first.send(name, b"1")
        producer.flush()
        with Producer(broker.bootstrap) as plain:
            plain.send(name, b"behind it")
        wait_for("the timeout", lambda: visible(broker.bootstrap, name) == [b"0", b"behind it"], DEADLINE_S)
        first.commit(wait=False)
        second = producer.transaction()
        second.begin()
        second.send(name, b"2")
        with pytest.raises(TransactionFailed, match=r"one before it .* open for"):
            second.commit()
        with pytest.raises(TransactionTimedOut):
            first.wait()
        with producer.transaction() as t:
            t.send(name, b"3")
    assert visible(broker.bootstrap, name) == [b"0", b"behind it", b"3"]


@proves("T3")
def test_offsets_go_along_in_their_order(broker: Broker, topic: MakeTopic) -> None:
    source, target, group = topic(partitions=2), topic(), new_id()
    with Producer(broker.bootstrap) as plain:
        for nth in range(200):
            plain.send_async(source, b"%d" % nth)
    copied = 0
    with (
        Consumer(source, group=group, bootstrap=broker.bootstrap, commit_interval_ms=0, start="earliest") as consumer,
        Producer(broker.bootstrap, transactional_id=new_id()) as producer,
    ):
        while copied < 200:
            found = consumer.poll(60_000, max_records=20)
            with producer.transaction(wait=False) as t:
                for record in found:
                    t.send(target, record.value)
                t.send_offsets(consumer)
            copied += len(found)
        t.wait()
        assert sum(consumer.lag().values()) == 0
    assert sorted(visible(broker.bootstrap, target), key=int) == [b"%d" % nth for nth in range(200)]


@proves("T3")
def test_tasks_have_them_too(broker: Broker, topic: MakeTopic) -> None:
    name = topic(partitions=2)

    async def go() -> None:
        async with headrace.aio.Producer(broker.bootstrap, transactional_id=new_id()) as producer:
            for nth in range(20):
                async with producer.transaction(wait=False) as t:
                    for place in range(10):
                        t.send(name, b"%d" % (10 * nth + place))
                assert not t.is_settled
            await t.wait()
            assert t.is_settled
            with pytest.raises(NoTransaction):
                await t.abort()

    asyncio.run(go())
    assert sorted(visible(broker.bootstrap, name), key=int) == [b"%d" % nth for nth in range(200)]
