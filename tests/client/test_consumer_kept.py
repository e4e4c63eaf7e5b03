"""What a consumer gave stays as it was, though the buffers behind it are used again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pyarrow as pa
import pytest

from brokers import Broker
from headrace import Consumer, Producer, Record, aio
from headrace.client.consumer.collector import TAKEN_BYTES
from headrace.client.consumer.options import ConsumerOptions
from proving import proves

COUNT = 6000
PARTITIONS = 2
PASSES = 4
MakeTopic = Callable[..., str]


@pytest.fixture
def filled(broker: Broker, topic: MakeTopic, seed: int) -> tuple[str, dict[tuple[int, int], bytes]]:
    """A topic of some 10 MB, and its values by partition and offset."""
    name, draw = topic(partitions=PARTITIONS), random.Random(seed)
    values = [draw.randbytes(draw.choice((10, 1024, 1024, 3000, 5000))) for _ in range(COUNT)]
    with Producer(broker.bootstrap) as producer:
        sent = [producer.send_async(name, value, partition=nth % PARTITIONS) for nth, value in enumerate(values)]
        reports = [each.result(30) for each in sent]
    return name, {(report.partition, report.offset): value for report, value in zip(reports, values, strict=True)}


def options(broker: Broker) -> ConsumerOptions:
    return {"bootstrap": broker.bootstrap, "partition_fetch_bytes": 300_000, "max_wait_ms": 100}


def value_bytes(rows: pa.RecordBatch) -> pa.Buffer:
    """As they lie in memory, without those that the buffer has to spare."""
    column = rows["value"]
    _, ends, data = column.buffers()
    last = pa.Array.from_buffers(pa.int32(), len(column) + 1, [None, ends], 0)[-1].as_py()
    return data.slice(0, last)


@proves("R8")
def test_arrow_batches_that_are_kept_never_change(
    broker: Broker, filled: tuple[str, dict[tuple[int, int], bytes]], seed: int
) -> None:
    """Whole ones, slices of them, and their bare buffers, while the rest comes and goes several times over."""
    name, values = filled
    draw = random.Random(seed)
    kept: list[pa.RecordBatch] = []
    bare: list[tuple[memoryview, bytes]] = []
    taken: dict[int, int] = {}
    with Consumer(name, **options(broker)) as consumer:
        for _ in range(PASSES):
            consumer.seek_to_start()
            rows = 0
            for batch in consumer.batches(timeout_ms=10_000):
                rows += len(batch)
                data = value_bytes(batch)
                taken[data.address] = taken.get(data.address, 0) + 1
                choice = draw.randrange(8)
                if choice == 0:
                    kept.append(batch)
                elif choice == 1:
                    kept.append(batch.slice(len(batch) // 2, 20))
                elif choice == 2:
                    bare.append((memoryview(data).cast("B"), data.to_pybytes()))
                del batch, data
                if rows == COUNT:
                    break
    assert max(taken.values()) > 1, "no buffer was used again, so nothing is shown here"
    assert len(kept) > 5
    assert len(bare) > 5
    for rows_kept in kept:
        places = zip(rows_kept["partition"].to_pylist(), rows_kept["offset"].to_pylist(), strict=True)
        assert [values[place] for place in places] == rows_kept["value"].to_pylist()
    for view, before in bare:
        assert view == before


def test_records_that_are_kept_never_change(broker: Broker, filled: tuple[str, dict[tuple[int, int], bytes]]) -> None:
    name, values = filled
    kept: list[Record] = []
    with Consumer(name, **options(broker)) as consumer:
        for _ in range(PASSES):
            consumer.seek_to_start()
            found = 0
            while found < COUNT:
                records = consumer.poll(10_000, 10_000)
                assert records, f"{found} of {COUNT} came"
                found += len(records)
                kept += records[::3]
    assert [record.value for record in kept] == [values[record.partition, record.offset] for record in kept]


def test_records_that_are_kept_never_change_on_asyncio(
    broker: Broker, filled: tuple[str, dict[tuple[int, int], bytes]]
) -> None:
    name, values = filled
    kept: list[Record] = []

    async def receive() -> None:
        async with aio.Consumer(name, **options(broker)) as consumer:
            for _ in range(PASSES):
                await consumer.seek_to_start()
                found = 0
                while found < COUNT:
                    records = await consumer.poll(10_000, 1000)
                    assert records, f"{found} of {COUNT} came"
                    found += len(records)
                    kept.extend(records[::3])

    asyncio.run(receive())
    assert [record.value for record in kept] == [values[record.partition, record.offset] for record in kept]


def test_a_list_ends_where_it_would_be_large(broker: Broker, filled: tuple[str, dict[tuple[int, int], bytes]]) -> None:
    name, values = filled
    sizes: list[int] = []
    found: list[Record] = []
    with Consumer(name, **options(broker)) as consumer:
        while len(found) < COUNT:
            records = consumer.poll(10_000, 2 * COUNT)
            assert records, f"{len(found)} of {COUNT} came"
            sizes.append(sum(len(record.value) for record in records))
            found += records
    assert max(sizes) < TAKEN_BYTES + 300_000
    for partition in range(PARTITIONS):
        mine = [record.offset for record in found if record.partition == partition]
        assert mine == list(range(len(mine)))
    assert {(record.partition, record.offset): record.value for record in found} == values


def test_a_closed_consumer_keeps_no_buffers(broker: Broker, filled: tuple[str, dict[tuple[int, int], bytes]]) -> None:
    name, values = filled
    own: ConsumerOptions = {**options(broker), "client_id": "closed-consumer"}  # shares its connections with nobody
    with Consumer(name, **own) as consumer:
        consumer.seek_to_start()
        rows = 0
        for batch in consumer.batches(timeout_ms=10_000):
            rows += len(batch)
            if rows == len(values):
                break
        pools = consumer._collector._pool, consumer._pool._buffers
        assert all(pool._known for pool in pools)
    assert [pool._known for pool in pools] == [[], []]
    assert [pool._bytes for pool in pools] == [0, 0]
