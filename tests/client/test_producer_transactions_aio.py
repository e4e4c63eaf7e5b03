"""Transactions of the producer for asyncio."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from brokers import Broker, wait_for
from client.conftest import MakeTopic
from client.test_producer_transactions import DEADLINE_S, new_id, visible
from headrace import NotDelivered
from headrace.aio import Admin, Consumer, Producer, TransactionFenced
from proving import proves


@proves("T3")
def test_a_block_commits_and_an_exception_in_it_aborts(broker: Broker, topic: MakeTopic) -> None:
    name, source, group = topic(partitions=2), topic(), new_id()

    async def go() -> None:
        async with (
            Producer(broker.bootstrap) as plain,
            Producer(broker.bootstrap, transactional_id=new_id()) as producer,
            Consumer(source, bootstrap=broker.bootstrap, group=group, commit_interval_ms=0) as consumer,
            Admin(broker.bootstrap) as admin,
        ):
            await plain.send(source, b"read")
            records = await consumer.poll(60_000)
            async with producer.transaction() as t:
                for nth in range(100):
                    t.send(name, b"%d" % nth)
                await t.send_offsets(consumer)
            assert [record.value for record in records] == [b"read"]
            assert await admin.group_offsets(group) == {(source, 0): 1}
            with pytest.raises(ValueError, match="mine"):  # noqa: PT012
                async with producer.transaction() as t:
                    t.send(name, b"aborted")
                    await producer.flush()
                    raise ValueError("mine")
            with pytest.raises(asyncio.CancelledError):  # noqa: PT012
                async with producer.transaction() as t:
                    t.send(name, b"cancelled")
                    raise asyncio.CancelledError

    asyncio.run(go())
    assert sorted(visible(broker.bootstrap, name)) == sorted(b"%d" % nth for nth in range(100))


@proves("T3")
def test_records_for_a_topic_that_is_not_known_yet_are_in_their_transaction_or_in_none(
    broker: Broker, topic: MakeTopic
) -> None:
    kept, gone, missing = (f"aside-{uuid.uuid4().hex[:10]}" for _ in range(3))
    known = topic()

    async def go() -> None:
        async with Producer(broker.bootstrap, transactional_id=new_id(), delivery_timeout_ms=30_000) as producer:
            async with producer.transaction() as t:
                t.send(kept, b"x")
            t = producer.transaction()
            await t.begin()
            aborted = [t.send(gone, b"x"), t.send(missing, b"y")]
            await t.abort()
            for delivery in aborted:
                with pytest.raises((NotDelivered, Exception), match=r"abort|transaction"):
                    await delivery
            async with producer.transaction() as t:
                t.send(known, b"z")

    asyncio.run(go())
    wait_for("what was committed", lambda: visible(broker.bootstrap, kept) == [b"x"], DEADLINE_S)
    assert visible(broker.bootstrap, known) == [b"z"]


@proves("T3", "T4")
def test_fencing_and_two_phases_are_the_same(broker: Broker, topic: MakeTopic) -> None:
    name, transactional_id = topic(), new_id()

    async def go() -> None:
        async with (
            Producer(broker.bootstrap, transactional_id=transactional_id) as old,
            Producer(broker.bootstrap, transactional_id=transactional_id) as new,
            Admin(broker.bootstrap) as admin,
        ):
            with pytest.raises(TransactionFenced):  # noqa: PT012
                async with old.transaction() as t:
                    t.send(name, b"old")
                    async with new.transaction() as mine:
                        mine.send(name, b"new")
            async with new.transaction(two_phase=True) as mine:
                mine.send(name, b"prepared")
                prepared = await mine.prepare()
            await admin.end_transactions([prepared], commit=True)
            async with new.transaction(two_phase=True) as mine:
                mine.send(name, b"another")

    asyncio.run(go())
    wait_for("all", lambda: visible(broker.bootstrap, name) == [b"new", b"prepared", b"another"], DEADLINE_S)
