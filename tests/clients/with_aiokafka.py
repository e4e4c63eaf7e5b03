"""aiokafka as a test client."""

from __future__ import annotations

import asyncio

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from clients.records import Record

DEADLINE_S = 120.0


class AioKafka:
    name = "aiokafka"
    sets_timestamps = True
    null_headers = True
    any_bytes_in_headers = True

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str = "none", acks: int = -1) -> None:
        async def run() -> None:
            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                compression_type=None if codec == "none" else codec,
                acks="all" if acks == -1 else acks,
                linger_ms=20,
            )
            await producer.start()
            try:
                sent = [
                    await producer.send(
                        topic,
                        record.value,
                        record.key,
                        record.partition,
                        record.timestamp_ms,
                        list(record.headers),
                    )
                    for record in records
                ]
                await asyncio.wait_for(asyncio.gather(*sent), DEADLINE_S)
            finally:
                await producer.stop()

        asyncio.run(run())

    def consume(self, bootstrap: str, counts: dict[str, int]) -> dict[str, list[Record]]:
        async def run() -> dict[str, list[Record]]:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest"
            )
            await consumer.start()
            try:
                consumer.assign([TopicPartition(topic, 0) for topic in counts])
                read: dict[str, list[Record]] = {topic: [] for topic in counts}
                while any(len(read[topic]) < count for topic, count in counts.items()):
                    m = await asyncio.wait_for(consumer.getone(), DEADLINE_S)
                    read[m.topic].append(Record(m.value, m.key, m.headers, m.timestamp, m.partition, m.offset))
                return read
            finally:
                await consumer.stop()

        return asyncio.run(run())

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        async def run() -> int | None:
            consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap)
            await consumer.start()
            try:
                found = await consumer.offsets_for_times({TopicPartition(topic, 0): timestamp_ms})
                answer = found[TopicPartition(topic, 0)]
                return None if answer is None else int(answer.offset)
            finally:
                await consumer.stop()

        return asyncio.run(run())
