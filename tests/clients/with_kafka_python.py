"""kafka-python as a test client."""

from __future__ import annotations

import time
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from clients.records import Record

DEADLINE_S = 120.0


class KafkaPython:
    name = "kafka-python"
    sets_timestamps = True
    null_headers = False
    any_bytes_in_headers = True

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str = "none", acks: int = -1) -> None:
        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type=None if codec == "none" else codec,
            acks=acks,
            enable_idempotence=False,
            linger_ms=20,
        )
        try:
            sent = [
                producer.send(
                    topic,
                    record.value,
                    record.key,
                    list(record.headers),
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            for future in sent:
                future.get(DEADLINE_S)
        finally:
            producer.close()

    def consume(self, bootstrap: str, counts: dict[str, int]) -> dict[str, list[Record]]:
        consumer = KafkaConsumer(
            bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest", fetch_max_wait_ms=100
        )
        try:
            consumer.assign([TopicPartition(topic, 0) for topic in counts])
            read: dict[str, list[Record]] = {topic: [] for topic in counts}
            end = time.monotonic() + DEADLINE_S
            while any(len(read[topic]) < count for topic, count in counts.items()):
                assert time.monotonic() < end, f"nothing more within {DEADLINE_S} s"
                polled: dict[Any, list[Any]] = consumer.poll(timeout_ms=500)
                for partition, messages in polled.items():
                    read[partition.topic] += [
                        Record(m.value, m.key, tuple(m.headers), m.timestamp, m.partition, m.offset) for m in messages
                    ]
            return read
        finally:
            consumer.close()

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap)
        try:
            found = consumer.offsets_for_times({TopicPartition(topic, 0): timestamp_ms})[TopicPartition(topic, 0)]
            return None if found is None else found.offset
        finally:
            consumer.close()
