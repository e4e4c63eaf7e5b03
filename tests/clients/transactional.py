"""Transactions as each client library offers them, behind one interface: a producer, readers of both isolation levels,
and consume-transform-produce with the client's own consumer.

A reader cannot tell the end of a log in all of them, so readers read until a record that the test wrote last has come
from every partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Final, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from aiokafka import errors as aiokafka_errors
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition
from kafka import errors as kafka_python_errors
from kafka.structs import OffsetAndMetadata

from clients.with_kafkajs import KafkaJS, KafkaJSError, decoded, encoded

DEADLINE_S: Final = 120.0
LAST: Final = b"the last one"
"""What a reader stops at, in each partition."""
STEP: Final = 10
"""How many records one transaction of `transform` takes at most."""
Answer = TypeVar("Answer")
Values = dict[int, list[bytes]]


class Transactional(Protocol):
    """A producer with a transactional id; made, it has fenced its predecessors (kafkajs: when it begins)."""

    def begin(self) -> None: ...

    def send(self, topic: str, partition: int, value: bytes) -> None:
        """Return when it is acknowledged."""

    def send_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        """By the group's name alone, as from outside of the group."""

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class TransactionalClient(Protocol):
    name: str

    def producer(self, bootstrap: str, transactional_id: str, timeout_ms: int = 60_000) -> Transactional: ...

    def is_fenced(self, error: BaseException) -> bool:
        """Whether it says that another one has this transactional id now."""

    def read(self, bootstrap: str, topic: str, partitions: int, committed: bool) -> Values:
        """All values before `LAST`, in each partition."""

    def transform(self, bootstrap: str, source: str, target: str, group: str, total: int) -> int:
        """Copy that many records in capitals, each transaction with the offsets that it has read up to, every second
        one aborted and done again; the number of transactions."""


class Reading:
    """What was read so far, up to the last record in each partition."""

    def __init__(self, partitions: int) -> None:
        self.values: Values = {partition: [] for partition in range(partitions)}
        self.ended: set[int] = set()

    @property
    def done(self) -> bool:
        return len(self.ended) == len(self.values)

    def take(self, partition: int, value: bytes) -> None:
        if value == LAST:
            self.ended.add(partition)
        else:
            self.values[partition].append(value)


class ConfluentTransactional:
    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        settings = {"transactional.id": transactional_id, "transaction.timeout.ms": timeout_ms, "linger.ms": 0}
        self.producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0, **settings})
        self.producer.init_transactions(DEADLINE_S)

    def begin(self) -> None:
        self.producer.begin_transaction()

    def send(self, topic: str, partition: int, value: bytes) -> None:
        errors: list[KafkaError | None] = []
        self.producer.produce(topic, value, partition=partition, on_delivery=lambda error, _: errors.append(error))
        while not errors:
            self.producer.poll(DEADLINE_S)
        if errors[0] is not None:
            raise KafkaException(errors[0])

    def send_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        member = Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": group, "log_level": 0})
        self.send_offsets_of(member, [TopicPartition(topic, partition, at) for partition, at in offsets.items()])

    def send_offsets_of(self, consumer: Consumer, offsets: list[TopicPartition]) -> None:
        self.producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), DEADLINE_S)

    def commit(self) -> None:
        self.producer.commit_transaction(DEADLINE_S)

    def abort(self) -> None:
        self.producer.abort_transaction(DEADLINE_S)

    def close(self) -> None:
        self.producer.purge()
        with contextlib.suppress(KafkaException):  # of one that was fenced
            self.producer.flush(0)


class WithConfluent:
    name = "confluent-kafka"

    def producer(self, bootstrap: str, transactional_id: str, timeout_ms: int = 60_000) -> ConfluentTransactional:
        return ConfluentTransactional(bootstrap, transactional_id, timeout_ms)

    def is_fenced(self, error: BaseException) -> bool:
        return isinstance(error, KafkaException) and error.args[0].code() in (
            KafkaError._FENCED,
            KafkaError._FATAL,
            KafkaError.INVALID_PRODUCER_EPOCH,
        )

    def read(self, bootstrap: str, topic: str, partitions: int, committed: bool) -> Values:
        isolation = {"isolation.level": "read_committed" if committed else "read_uncommitted"}
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", **isolation})
        reading = Reading(partitions)
        try:
            consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
            while not reading.done:
                message = consumer.poll(DEADLINE_S)
                assert message is not None, f"nothing more within {DEADLINE_S} s"
                assert message.error() is None, message.error()
                reading.take(message.partition() or 0, message.value() or b"")
            return reading.values
        finally:
            consumer.close()

    def transform(self, bootstrap: str, source: str, target: str, group: str, total: int) -> int:
        settings = {"auto.offset.reset": "earliest", "enable.auto.commit": False, "log_level": 0}
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, **settings})
        consumer.subscribe([source])
        producer = self.producer(bootstrap, f"{group}-transform")
        done = transactions = 0
        while done < total:
            messages = consumer.consume(STEP, 0.5)
            if not messages:
                continue
            transactions += 1
            producer.begin()
            for message in messages:
                producer.producer.produce(target, (message.value() or b"").upper(), partition=message.partition() or 0)
            first: dict[int, int] = {}
            for message in messages:
                first.setdefault(message.partition() or 0, message.offset() or 0)
            producer.send_offsets_of(consumer, consumer.position(consumer.assignment()))
            if transactions % 2:
                producer.abort()
                for partition, offset in first.items():
                    consumer.seek(TopicPartition(source, partition, offset))
            else:
                producer.commit()
                done += len(messages)
        consumer.close()
        producer.close()
        return transactions


class PythonTransactional:
    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self.producer = KafkaProducer(
            bootstrap_servers=bootstrap, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
        )
        self.producer.init_transactions()

    def begin(self) -> None:
        self.producer.begin_transaction()

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self.producer.send(topic, value, partition=partition).get(DEADLINE_S)

    def send_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        given = {PythonPartition(topic, p): OffsetAndMetadata(at, "", -1) for p, at in offsets.items()}
        self.producer.send_offsets_to_transaction(given, group)

    def commit(self) -> None:
        self.producer.commit_transaction()

    def abort(self) -> None:
        self.producer.abort_transaction()

    def close(self) -> None:
        self.producer.close(timeout=0)


class WithKafkaPython:
    name = "kafka-python"

    def producer(self, bootstrap: str, transactional_id: str, timeout_ms: int = 60_000) -> PythonTransactional:
        return PythonTransactional(bootstrap, transactional_id, timeout_ms)

    def is_fenced(self, error: BaseException) -> bool:
        fenced = (kafka_python_errors.ProducerFencedError, kafka_python_errors.InvalidProducerEpochError)
        return isinstance(error, fenced) or isinstance(error.__cause__, fenced)

    def read(self, bootstrap: str, topic: str, partitions: int, committed: bool) -> Values:
        consumer = KafkaConsumer(
            bootstrap_servers=bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=100,
            isolation_level="read_committed" if committed else "read_uncommitted",
        )
        reading = Reading(partitions)
        try:
            consumer.assign([PythonPartition(topic, partition) for partition in range(partitions)])
            while not reading.done:
                for messages in consumer.poll(timeout_ms=int(DEADLINE_S * 1000)).values():
                    for message in messages:
                        reading.take(message.partition, message.value)
            return reading.values
        finally:
            consumer.close()

    def transform(self, bootstrap: str, source: str, target: str, group: str, total: int) -> int:
        consumer = KafkaConsumer(
            source,
            bootstrap_servers=bootstrap,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_records=STEP,
        )
        producer = self.producer(bootstrap, f"{group}-transform")
        done = transactions = 0
        while done < total:
            polled: dict[Any, list[Any]] = consumer.poll(timeout_ms=500)
            if not polled:
                continue
            transactions += 1
            producer.begin()
            for partition, messages in polled.items():
                for message in messages:
                    producer.producer.send(target, message.value.upper(), partition=partition.partition)
            offsets = {p: OffsetAndMetadata(messages[-1].offset + 1, "", -1) for p, messages in polled.items()}
            producer.producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
            if transactions % 2:
                producer.abort()
                for partition, messages in polled.items():
                    consumer.seek(partition, messages[0].offset)
            else:
                producer.commit()
                done += sum(map(len, polled.values()))
        consumer.close()
        producer.close()
        return transactions


class Loop:
    """An event loop in a thread: a producer's own tasks go on between calls."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, DEADLINE_S), self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class AioTransactional:
    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self.loop = Loop()
        self.loop.run(self._start(bootstrap, transactional_id, timeout_ms))

    async def _start(self, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self.producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
        )
        await self.producer.start()

    def begin(self) -> None:
        self.loop.run(self.producer.begin_transaction())

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self.loop.run(self.producer.send_and_wait(topic, value, partition=partition))

    def send_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        given = {AioPartition(topic, partition): at for partition, at in offsets.items()}
        self.loop.run(self.producer.send_offsets_to_transaction(given, group))

    def commit(self) -> None:
        self.loop.run(self.producer.commit_transaction())

    def abort(self) -> None:
        self.loop.run(self.producer.abort_transaction())

    def close(self) -> None:
        with contextlib.suppress(aiokafka_errors.KafkaError):
            self.loop.run(self.producer.stop())
        self.loop.close()


class WithAioKafka:
    name = "aiokafka"

    def producer(self, bootstrap: str, transactional_id: str, timeout_ms: int = 60_000) -> AioTransactional:
        return AioTransactional(bootstrap, transactional_id, timeout_ms)

    def is_fenced(self, error: BaseException) -> bool:
        return isinstance(error, aiokafka_errors.ProducerFenced)

    def read(self, bootstrap: str, topic: str, partitions: int, committed: bool) -> Values:
        async def run() -> Values:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level="read_committed" if committed else "read_uncommitted",
            )
            await consumer.start()
            reading = Reading(partitions)
            try:
                consumer.assign([AioPartition(topic, partition) for partition in range(partitions)])
                while not reading.done:
                    message = await asyncio.wait_for(consumer.getone(), DEADLINE_S)
                    reading.take(message.partition, message.value or b"")
                return reading.values
            finally:
                await consumer.stop()

        return asyncio.run(run())

    def transform(self, bootstrap: str, source: str, target: str, group: str, total: int) -> int:
        async def run() -> int:
            consumer = AIOKafkaConsumer(
                source,
                bootstrap_servers=bootstrap,
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
            )
            producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{group}-transform")
            await consumer.start()
            await producer.start()
            done = transactions = 0
            while done < total:
                polled = await consumer.getmany(timeout_ms=500, max_records=STEP)
                if not polled:
                    continue
                transactions += 1
                await producer.begin_transaction()
                for partition, messages in polled.items():
                    for message in messages:
                        await producer.send(target, (message.value or b"").upper(), partition=partition.partition)
                offsets = {partition: messages[-1].offset + 1 for partition, messages in polled.items()}
                await producer.send_offsets_to_transaction(offsets, group)
                if transactions % 2:
                    await producer.abort_transaction()
                    for partition, messages in polled.items():
                        consumer.seek(partition, messages[0].offset)
                else:
                    await producer.commit_transaction()
                    done += sum(map(len, polled.values()))
            await consumer.stop()
            await producer.stop()
            return transactions

        return asyncio.run(run())


class JSTransactional:
    """kafkajs draws a new epoch for each transaction, when it begins."""

    def __init__(self, client: KafkaJS, bootstrap: str, transactional_id: str, timeout_ms: int) -> None:
        self.client = client
        self.number = client.node.ask(
            "transactional", bootstrap=bootstrap, transactionalId=transactional_id, timeoutMs=timeout_ms
        )

    def _ask(self, step: str, **given: object) -> None:
        self.client.node.ask("transaction", producer=self.number, step=step, **given)

    def begin(self) -> None:
        self._ask("begin")

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._ask("send", topic=topic, partition=partition, value=encoded(value))

    def send_offsets(self, group: str, topic: str, offsets: dict[int, int]) -> None:
        self._ask("sendOffsets", group=group, topic=topic, offsets=list(offsets.items()))

    def commit(self) -> None:
        self._ask("commit")

    def abort(self) -> None:
        self._ask("abort")

    def close(self) -> None:
        self._ask("close")


class WithKafkaJS:
    name = "kafkajs"

    def __init__(self, client: KafkaJS) -> None:
        self.client = client

    def producer(self, bootstrap: str, transactional_id: str, timeout_ms: int = 60_000) -> JSTransactional:
        return JSTransactional(self.client, bootstrap, transactional_id, timeout_ms)

    def is_fenced(self, error: BaseException) -> bool:
        return isinstance(error, KafkaJSError) and error.type in ("INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")

    def read(self, bootstrap: str, topic: str, partitions: int, committed: bool) -> Values:
        read = self.client.node.ask(
            "readUntil",
            bootstrap=bootstrap,
            topic=topic,
            partitions=partitions,
            last=encoded(LAST),
            uncommitted=not committed,
        )
        return {int(partition): [decoded(value) or b"" for value in values] for partition, values in read.items()}

    def transform(self, bootstrap: str, source: str, target: str, group: str, total: int) -> int:
        given = {"source": source, "target": target, "group": group, "total": total}
        transactions: int = self.client.node.ask("transform", bootstrap=bootstrap, **given)
        return transactions


def transactional_clients(kafkajs: KafkaJS) -> Iterator[TransactionalClient]:
    yield from (WithConfluent(), WithKafkaPython(), WithAioKafka(), WithKafkaJS(kafkajs))
