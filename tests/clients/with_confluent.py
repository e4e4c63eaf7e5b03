"""confluent-kafka (librdkafka) as a test client."""

from __future__ import annotations

from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from clients.records import Record

DEADLINE_S = 120.0


def record_of(message: Any) -> Record:
    kind, timestamp_ms = message.timestamp()
    return Record(
        message.value(),
        message.key(),
        tuple(message.headers() or ()),
        None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
        message.partition(),
        message.offset(),
    )


class ConfluentKafka:
    name = "confluent-kafka"
    sets_timestamps = True
    null_headers = True
    any_bytes_in_headers = True

    def produce(self, bootstrap: str, topic: str, records: list[Record], codec: str = "none", acks: int = -1) -> None:
        producer = Producer(
            {"bootstrap.servers": bootstrap, "compression.type": codec, "acks": acks, "linger.ms": 20, "log_level": 0}
        )
        errors: list[object] = []

        def delivered(error: object, _message: object) -> None:
            if error:
                errors.append(error)

        for record in records:
            producer.produce(
                topic,
                record.value,
                record.key,
                record.partition,
                on_delivery=delivered,
                headers=list(record.headers),
                timestamp=record.timestamp_ms or 0,
            )
        left = producer.flush(DEADLINE_S)
        assert (left, errors) == (0, [])

    def consume(self, bootstrap: str, counts: dict[str, int]) -> dict[str, list[Record]]:
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", "enable.auto.commit": False})
        try:
            consumer.assign([TopicPartition(topic, 0, 0) for topic in counts])
            read: dict[str, list[Record]] = {topic: [] for topic in counts}
            while any(len(read[topic]) < count for topic, count in counts.items()):
                message = consumer.poll(DEADLINE_S)
                assert message is not None, f"nothing more within {DEADLINE_S} s"
                assert message.error() is None, message.error()
                read[str(message.topic())].append(record_of(message))
            return read
        finally:
            consumer.close()

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        partition = TopicPartition(topic, 0)
        admin = AdminClient({"bootstrap.servers": bootstrap})
        asked = admin.list_offsets({partition: OffsetSpec.for_timestamp(timestamp_ms)})
        offset = asked[partition].result(DEADLINE_S).offset
        return None if offset < 0 else offset
