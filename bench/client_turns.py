"""One turn of one Python client, in a process of its own: `python bench/client_turns.py '{...}'` prints its figures.

Every client is used the quickest way that its own interface allows, with the same settings: batches of 64 KiB, linger
5 ms where records are batched and 0 where each is waited for, acks=all, idempotent, no compression; fetches of 1 MiB a
partition, CRCs checked. Before the clock starts, the client is connected and has sent or received something. Processor
time is that of the client's process, all threads, and of the broker's.

What is sent is counted afterwards by the broker's own offsets; what is received by records and by bytes.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import processes

BATCH_BYTES = 64 << 10
LINGER_MS = 5
FETCH_BYTES = 1 << 20
POLL_RECORDS = 10_000
WAIT_MS = 30_000
WARM = 200
STALLED = "nothing came for 30 s"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a process is asked to do."""

    client: str
    row: str
    bootstrap: str
    topic: str
    partitions: int
    count: int
    message_bytes: int
    broker_pid: int


class Clock:
    """Wall and processor time between `start` and `stop`."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._began = (0.0, 0.0, 0.0)
        self.figures: dict[str, float] = {}

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), processes.cpu_seconds(self._turn.broker_pid)

    def start(self) -> None:
        self._began = self._now()

    def stop(self, latencies_s: list[float] | None = None, before: int = 0) -> None:
        """`before` messages came before the clock was started."""
        wall, own, broker = (after - before for after, before in zip(self._now(), self._began, strict=True))
        count = self._turn.count - before
        million = count / 1e6
        self.figures = {
            "msg_per_s": count / wall,
            "cpu_s_per_million": own / million,
            "broker_cpu_s_per_million": broker / million,
        }
        if latencies_s:
            latencies_s.sort()
            for name, share in (("p50_us", 0.5), ("p99_us", 0.99)):
                self.figures[name] = latencies_s[int(share * (len(latencies_s) - 1))] * 1e6


def one_at_a_time(turn: Turn, clock: Clock, send: Callable[[bytes], object]) -> None:
    value, latencies_s, now = b"x" * turn.message_bytes, [], time.perf_counter
    for _ in range(WARM):
        send(value)
    clock.start()
    for _ in range(turn.count):
        began = now()
        send(value)
        latencies_s.append(now() - began)
    clock.stop(latencies_s)


def check(turn: Turn, records: int, size: int) -> None:
    if (records, size) != (turn.count, turn.count * turn.message_bytes):
        raise SystemExit(f"{turn.client} received {records} records of {size} bytes, {turn.count} were there")


# -- headrace


@contextmanager
def headrace_producer(turn: Turn, interval_ms: float) -> Iterator[Any]:
    import headrace

    with headrace.Producer(turn.bootstrap, batch_bytes=BATCH_BYTES, interval_ms=interval_ms, acks=-1) as producer:
        yield producer


def headrace_send(turn: Turn, clock: Clock) -> None:
    with headrace_producer(turn, LINGER_MS) as producer:
        value, topic, send = b"x" * turn.message_bytes, turn.topic, producer.send_async
        for _ in range(WARM):
            send(topic, value)
        producer.flush()
        clock.start()
        for _ in range(turn.count):
            send(topic, value)
        producer.flush()
        clock.stop()


def headrace_send_each(turn: Turn, clock: Clock) -> None:
    with headrace_producer(turn, LINGER_MS) as producer:
        one_at_a_time(turn, clock, lambda value: producer.send(turn.topic, value))


@contextmanager
def headrace_consumer(turn: Turn) -> Iterator[Any]:
    import headrace

    with headrace.Consumer(turn.topic, bootstrap=turn.bootstrap, partition_fetch_bytes=FETCH_BYTES) as consumer:
        yield consumer


def headrace_receive(turn: Turn, clock: Clock) -> None:
    with headrace_consumer(turn) as consumer:
        records, size = 1, len(consumer.poll(WAIT_MS, 1)[0].value)
        clock.start()
        while records < turn.count:
            found = consumer.poll(WAIT_MS, POLL_RECORDS)
            if not found:
                raise SystemExit(STALLED)
            records += len(found)
            size += sum([len(record.value) for record in found])
        clock.stop()
    check(turn, records, size)


def headrace_receive_each(turn: Turn, clock: Clock) -> None:
    with headrace_consumer(turn) as consumer:
        records, size = 1, len(consumer.poll(WAIT_MS, 1)[0].value)
        clock.start()
        for record in consumer.records():
            size += len(record.value)
            records += 1
            if records == turn.count:
                break
        clock.stop()
    check(turn, records, size)


def headrace_arrow(turn: Turn, clock: Clock) -> None:
    with headrace_consumer(turn) as consumer:
        arriving = consumer.batches()
        records = first = len(next(arriving))
        clock.start()
        for rows in arriving:
            records += len(rows)
            if records >= turn.count:
                break
        clock.stop(before=first)
    if records != turn.count:
        raise SystemExit(f"headrace received {records} rows, {turn.count} were there")


# -- headrace.aio


async def aio_send(turn: Turn, clock: Clock) -> None:
    from headrace import aio

    async with aio.Producer(turn.bootstrap, batch_bytes=BATCH_BYTES, interval_ms=LINGER_MS, acks=-1) as producer:
        value, topic = b"x" * turn.message_bytes, turn.topic
        await producer.send(topic, value)
        clock.start()
        for nth in range(turn.count):
            producer.send_async(topic, value)
            if nth % 1000 == 0:
                await asyncio.sleep(0)
        await producer.flush()
        clock.stop()


async def aio_send_each(turn: Turn, clock: Clock) -> None:
    from headrace import aio

    async with aio.Producer(turn.bootstrap, batch_bytes=BATCH_BYTES, interval_ms=LINGER_MS, acks=-1) as producer:
        await each_awaited(turn, clock, lambda value: producer.send(turn.topic, value))


async def aio_receive(turn: Turn, clock: Clock) -> None:
    from headrace import aio

    async with aio.Consumer(turn.topic, bootstrap=turn.bootstrap, partition_fetch_bytes=FETCH_BYTES) as consumer:
        records, size = 1, len((await consumer.poll(WAIT_MS, 1))[0].value)
        clock.start()
        while records < turn.count:
            found = await consumer.poll(WAIT_MS, POLL_RECORDS)
            if not found:
                raise SystemExit(STALLED)
            records += len(found)
            size += sum([len(record.value) for record in found])
        clock.stop()
    check(turn, records, size)


async def aio_receive_each(turn: Turn, clock: Clock) -> None:
    from headrace import aio

    async with aio.Consumer(turn.topic, bootstrap=turn.bootstrap, partition_fetch_bytes=FETCH_BYTES) as consumer:
        records, size = 1, len((await consumer.poll(WAIT_MS, 1))[0].value)
        clock.start()
        async for record in consumer:
            size += len(record.value)
            records += 1
            if records == turn.count:
                break
        clock.stop()
    check(turn, records, size)


async def each_awaited(turn: Turn, clock: Clock, send: Callable[[bytes], Any]) -> None:
    value, latencies_s, now = b"x" * turn.message_bytes, [], time.perf_counter
    for _ in range(WARM):
        await send(value)
    clock.start()
    for _ in range(turn.count):
        began = now()
        await send(value)
        latencies_s.append(now() - began)
    clock.stop(latencies_s)


# -- confluent-kafka


def confluent_producer(turn: Turn, linger_ms: int) -> Any:
    from confluent_kafka import Producer

    return Producer({
        "bootstrap.servers": turn.bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": linger_ms,
        "batch.size": BATCH_BYTES, "batch.num.messages": 100_000, "compression.type": "none",
        "queue.buffering.max.messages": 500_000, "queue.buffering.max.kbytes": 1 << 20, "socket.nagle.disable": True,
    })  # fmt: skip


def confluent_send(turn: Turn, clock: Clock) -> None:
    """Without a callback for each record, which would cost more."""
    producer = confluent_producer(turn, LINGER_MS)
    value, topic, produce = b"x" * turn.message_bytes, turn.topic, producer.produce
    for _ in range(WARM):
        produce(topic, value)
    producer.flush()
    clock.start()
    for _ in range(turn.count):
        try:
            produce(topic, value)
        except BufferError:
            producer.poll(0.05)
            produce(topic, value)
    if producer.flush(WAIT_MS / 1000):
        raise SystemExit(STALLED)
    clock.stop()


def confluent_send_each(turn: Turn, clock: Clock) -> None:
    producer = confluent_producer(turn, 0)
    produce, flush, topic = producer.produce, producer.flush, turn.topic

    def send(value: bytes) -> None:
        produce(topic, value)
        if flush(WAIT_MS / 1000):
            raise SystemExit(STALLED)

    one_at_a_time(turn, clock, send)


def confluent_consumer(turn: Turn) -> Any:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({
        "bootstrap.servers": turn.bootstrap, "group.id": "bench", "enable.auto.commit": False,
        "max.partition.fetch.bytes": FETCH_BYTES, "queued.max.messages.kbytes": 1 << 20, "check.crcs": True,
    })  # fmt: skip
    consumer.list_topics(turn.topic, WAIT_MS / 1000)
    consumer.assign([TopicPartition(turn.topic, partition, 0) for partition in range(turn.partitions)])
    return consumer


def confluent_receive(turn: Turn, clock: Clock) -> None:
    consumer = confluent_consumer(turn)
    records, size = 1, len(consumer.consume(1, WAIT_MS / 1000)[0].value())
    clock.start()
    while records < turn.count:
        found = consumer.consume(min(POLL_RECORDS, turn.count - records), WAIT_MS / 1000)
        if not found:
            raise SystemExit(STALLED)
        records += len(found)
        size += sum([len(record.value()) for record in found])
    clock.stop()
    check(turn, records, size)


def confluent_receive_each(turn: Turn, clock: Clock) -> None:
    consumer = confluent_consumer(turn)
    size = len(consumer.consume(1, WAIT_MS / 1000)[0].value())
    clock.start()
    for _ in range(turn.count - 1):
        record = consumer.poll(WAIT_MS / 1000)
        if record is None:
            raise SystemExit(STALLED)
        size += len(record.value())
    clock.stop()
    check(turn, turn.count, size)


def confluent_arrow(turn: Turn, clock: Clock) -> None:
    """The columns that `batches` gives, from lists."""
    import pyarrow as pa

    consumer = confluent_consumer(turn)
    records = len(consumer.consume(1, WAIT_MS / 1000))
    clock.start()
    while records < turn.count:
        found = consumer.consume(min(POLL_RECORDS, turn.count - records), WAIT_MS / 1000)
        if not found:
            raise SystemExit(STALLED)
        rows = pa.RecordBatch.from_pydict({
            "key": pa.array([each.key() for each in found], pa.binary()),
            "value": pa.array([each.value() for each in found], pa.binary()),
            "topic": pa.array([each.topic() for each in found], pa.string()),
            "partition": pa.array([each.partition() for each in found], pa.int32()),
            "offset": pa.array([each.offset() for each in found], pa.int64()),
            "timestamp": pa.array([each.timestamp()[1] * 1000 for each in found], pa.timestamp("us", "UTC")),
            "timestampType": pa.array([each.timestamp()[0] - 1 for each in found], pa.int32()),
        })  # fmt: skip
        records += len(rows)
    clock.stop()


# -- kafka-python


def kafka_python_producer(turn: Turn, linger_ms: int) -> Any:
    from kafka import KafkaProducer

    return KafkaProducer(
        bootstrap_servers=turn.bootstrap, acks="all", enable_idempotence=True, linger_ms=linger_ms,
        batch_size=BATCH_BYTES, compression_type=None,
    )  # fmt: skip


def kafka_python_send(turn: Turn, clock: Clock) -> None:
    producer = kafka_python_producer(turn, LINGER_MS)
    value, topic, send = b"x" * turn.message_bytes, turn.topic, producer.send
    for _ in range(WARM):
        send(topic, value)
    producer.flush()
    clock.start()
    for _ in range(turn.count):
        send(topic, value)
    producer.flush()
    clock.stop()
    producer.close()


def kafka_python_send_each(turn: Turn, clock: Clock) -> None:
    producer = kafka_python_producer(turn, 0)
    one_at_a_time(turn, clock, lambda value: producer.send(turn.topic, value).get(WAIT_MS / 1000))
    producer.close()


def kafka_python_consumer(turn: Turn) -> Any:
    from kafka import KafkaConsumer
    from kafka.structs import TopicPartition

    consumer = KafkaConsumer(
        bootstrap_servers=turn.bootstrap, enable_auto_commit=False, max_partition_fetch_bytes=FETCH_BYTES,
        max_poll_records=POLL_RECORDS, check_crcs=True, consumer_timeout_ms=WAIT_MS,
    )  # fmt: skip
    places = [TopicPartition(turn.topic, partition) for partition in range(turn.partitions)]
    consumer.assign(places)
    consumer.seek_to_beginning(*places)
    return consumer


def kafka_python_receive(turn: Turn, clock: Clock) -> None:
    consumer = kafka_python_consumer(turn)
    records, size = 1, len(next(consumer).value)
    clock.start()
    while records < turn.count:
        found = consumer.poll(WAIT_MS)
        if not found:
            raise SystemExit(STALLED)
        for each in found.values():
            records += len(each)
            size += sum([len(record.value) for record in each])
    clock.stop()
    check(turn, records, size)


def kafka_python_receive_each(turn: Turn, clock: Clock) -> None:
    consumer = kafka_python_consumer(turn)
    records, size = 1, len(next(consumer).value)
    clock.start()
    for record in consumer:
        size += len(record.value)
        records += 1
        if records == turn.count:
            break
    clock.stop()
    check(turn, records, size)


# -- aiokafka


@asynccontextmanager
async def aiokafka_producer(turn: Turn, linger_ms: int) -> AsyncIterator[Any]:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(
        bootstrap_servers=turn.bootstrap, acks="all", enable_idempotence=True, linger_ms=linger_ms,
        max_batch_size=BATCH_BYTES,
    )  # fmt: skip
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


async def aiokafka_send(turn: Turn, clock: Clock) -> None:
    async with aiokafka_producer(turn, LINGER_MS) as producer:
        value, topic = b"x" * turn.message_bytes, turn.topic
        await producer.send_and_wait(topic, value)
        clock.start()
        for _ in range(turn.count):
            await producer.send(topic, value)
        await producer.flush()
        clock.stop()


async def aiokafka_send_each(turn: Turn, clock: Clock) -> None:
    async with aiokafka_producer(turn, 0) as producer:
        await each_awaited(turn, clock, lambda value: producer.send_and_wait(turn.topic, value))


@asynccontextmanager
async def aiokafka_consumer(turn: Turn) -> AsyncIterator[Any]:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    consumer = AIOKafkaConsumer(
        bootstrap_servers=turn.bootstrap, enable_auto_commit=False, max_partition_fetch_bytes=FETCH_BYTES,
        check_crcs=True, auto_offset_reset="earliest",
    )  # fmt: skip
    consumer.assign([TopicPartition(turn.topic, partition) for partition in range(turn.partitions)])
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def aiokafka_receive(turn: Turn, clock: Clock) -> None:
    async with aiokafka_consumer(turn) as consumer:
        records, size = 1, len((await consumer.getone()).value)
        clock.start()
        while records < turn.count:
            found = await consumer.getmany(timeout_ms=WAIT_MS, max_records=POLL_RECORDS)
            if not found:
                raise SystemExit(STALLED)
            for each in found.values():
                records += len(each)
                size += sum([len(record.value) for record in each])
        clock.stop()
    check(turn, records, size)


async def aiokafka_receive_each(turn: Turn, clock: Clock) -> None:
    async with aiokafka_consumer(turn) as consumer:
        records, size = 1, len((await consumer.getone()).value)
        clock.start()
        async for record in consumer:
            size += len(record.value)
            records += 1
            if records == turn.count:
                break
        clock.stop()
    check(turn, records, size)


# -- no client


def bare_receive(turn: Turn, clock: Clock) -> None:
    import bare_socket

    bare_socket.receive(turn, clock, FETCH_BYTES)


Way = Callable[[Turn, Clock], Any]
WAYS: dict[str, dict[str, Way]] = {
    "headrace": {
        "send": headrace_send, "send each": headrace_send_each, "receive": headrace_receive,
        "receive each": headrace_receive_each, "arrow": headrace_arrow,
    },
    "headrace.aio": {
        "send": aio_send, "send each": aio_send_each, "receive": aio_receive, "receive each": aio_receive_each,
    },
    "confluent-kafka": {
        "send": confluent_send, "send each": confluent_send_each, "receive": confluent_receive,
        "receive each": confluent_receive_each, "arrow": confluent_arrow,
    },
    "kafka-python": {
        "send": kafka_python_send, "send each": kafka_python_send_each, "receive": kafka_python_receive,
        "receive each": kafka_python_receive_each,
    },
    "aiokafka": {
        "send": aiokafka_send, "send each": aiokafka_send_each, "receive": aiokafka_receive,
        "receive each": aiokafka_receive_each,
    },
    "bare socket": {"receive": bare_receive, "arrow": bare_receive},
}  # fmt: skip


def main() -> None:
    turn = Turn(**json.loads(sys.argv[1]))
    clock = Clock(turn)
    way = WAYS[turn.client][turn.row]
    if asyncio.iscoroutinefunction(way):
        import uvloop

        uvloop.run(way(turn, clock))
    else:
        way(turn, clock)
    print(json.dumps({**asdict(turn), **clock.figures}))


if __name__ == "__main__":
    main()
