"""The consumer on asyncio, against a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import Broker
from client.test_consumer_pull import NOW_MS, send, values
from headrace.aio.consumer import Consumer
from headrace.client.admin.cluster import Cluster
from headrace.client.errors import EngineClosed, UnknownTopic
from headrace.errors import InvalidRequest
from proving import proves

MakeTopic = Callable[..., str]


@proves("R8")
def test_records_come_one_by_one_in_lists_and_as_arrow(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(1200))

    async def main() -> None:
        async with Consumer(name, bootstrap=broker.bootstrap, max_wait_ms=100) as consumer:
            found = []
            async for record in consumer:
                found.append(record)
                if len(found) == 40:
                    break
            found += await consumer.poll(5000, max_records=60)
            assert await consumer.position(name, 0) == 100
            found += [record async for record in consumer.records(timeout_ms=300)]
            assert values(found) == list(range(1200))
            assert await consumer.poll(timeout_ms=0) == []
            await consumer.seek_to_time(NOW_MS + 1_000_000)
            rows = [row async for batch in consumer.batches(timeout_ms=300) for row in batch.to_pylist()]
            assert [int(row["value"]) for row in rows] == list(range(1000, 1200))
            await consumer.seek(name, 0, 1190)
            await consumer.pause()
            assert await consumer.poll(timeout_ms=100) == []
            await consumer.resume()
            assert values(await consumer.poll(5000)) == list(range(1190, 1200))
            await consumer.seek_to_start()
            assert await consumer.lag() == {(name, 0): 1200}
            await consumer.seek_to_end()
            assert consumer.assignment == [(name, 0)]
            assert await consumer.position(name, 0) == 1200

    asyncio.run(main())


def test_others_on_the_loop_have_their_turn_while_records_come(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    for _ in range(20):
        send(cluster, name, range(5000), per_batch=5000)

    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with Consumer(name, bootstrap=broker.bootstrap) as consumer:
            task = asyncio.create_task(other())
            count, before = 0, 0
            async for _ in consumer:
                count += 1
                if count == 50_000:
                    before = turns
                if count == 100_000:
                    break
            task.cancel()
            assert turns > before

    asyncio.run(main())


@proves("R8")
@pytest.mark.parametrize("mode", ["cluster", "broadcast"])
def test_progress_is_saved_on_commit_and_on_close(
    broker: Broker, cluster: Cluster, topic: MakeTopic, tmp_path: Path, mode: str
) -> None:
    name = topic()
    send(cluster, name, range(300))

    def consumer() -> Consumer:
        return Consumer(name, bootstrap=broker.bootstrap, group=f"g-{name}", mode=mode, progress_dir=tmp_path)  # type: ignore[arg-type]

    async def fail() -> None:
        async with consumer() as third:
            assert values(await third.poll(20_000, max_records=10)) == list(range(110, 120))
            raise ZeroDivisionError

    async def main() -> None:
        async with consumer() as first:
            assert values(await first.poll(20_000, max_records=50)) == list(range(50))
            await first.commit()
            assert values(await first.poll(5000, max_records=50)) == list(range(50, 100))
        async with consumer() as second:
            assert values(await second.poll(20_000, max_records=10)) == list(range(100, 110))
        with pytest.raises(ZeroDivisionError):
            await fail()
        async with consumer() as fourth:
            assert values(await fourth.poll(20_000, max_records=10)) == list(range(110, 120))
        with pytest.raises(EngineClosed):
            await fourth.poll()

    asyncio.run(main())


def test_what_is_wrong_is_raised(broker: Broker, topic: MakeTopic) -> None:
    async def main() -> None:
        async with Consumer("nowhere-at-all", bootstrap=broker.bootstrap) as consumer:
            with pytest.raises(UnknownTopic):
                await consumer.poll(5000)

    asyncio.run(main())


@proves("R8")
@pytest.mark.parametrize("way", ["poll", "batches"])
def test_a_cancelled_call_takes_nothing(broker: Broker, cluster: Cluster, topic: MakeTopic, way: str) -> None:
    name = topic()
    send(cluster, name, range(100), per_batch=10)

    async def main() -> None:
        async with Consumer(name, bootstrap=broker.bootstrap) as consumer:

            async def take() -> list[int]:
                if way == "poll":
                    return values(await consumer.poll(5000, max_records=10))
                rows = await anext(consumer.batches(("value",), batch_rows=10, timeout_ms=5000), None)
                return [] if rows is None else [int(value.as_py()) for value in rows["value"]]

            found = await take()
            for turns in range(4):
                # As after a while without a call.
                consumer._driver._ceded_at = 0.0
                task = asyncio.create_task(take())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    found += await task
                except asyncio.CancelledError:
                    continue
            while len(found) < 100 and (more := await take()):
                found += more
            assert found == list(range(100))

    asyncio.run(main())


@proves("R8")
def test_what_an_iterator_did_not_yield_comes_as_rows_on_the_loop(
    broker: Broker, cluster: Cluster, topic: MakeTopic
) -> None:
    name = topic()
    send(cluster, name, range(300))

    async def main() -> None:
        async with Consumer(name, bootstrap=broker.bootstrap, max_wait_ms=50) as consumer:
            found = [await anext(aiter(consumer))]
            batches = consumer.batches(("offset",), timeout_ms=300)
            rest = [n async for rows in batches for n in rows["offset"].to_pylist()]
            assert [*values(found), *rest] == list(range(300))
            with pytest.raises(InvalidRequest, match="max_records is 0"):
                await consumer.poll(max_records=0)

    asyncio.run(main())


@proves("R8")
def test_what_another_task_does_takes_no_wake_up_away(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(1))

    async def main() -> None:
        consumer = Consumer(name, bootstrap=broker.bootstrap, group=f"g-{name}", max_wait_ms=50)
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def read() -> None:
            async for record in consumer:
                seen.put_nowait(int(record.value))

        reader = asyncio.create_task(read())
        assert await asyncio.wait_for(seen.get(), 20) == 0
        await consumer.commit({(name, 0): 1})
        await asyncio.to_thread(send, cluster, name, range(1, 2))
        assert await asyncio.wait_for(seen.get(), 20) == 1
        await consumer.close()
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(reader, 20)

    asyncio.run(main())
