"""The consumer's side of a fetch session by hand: each fetch in a session, what it changes, and what is known by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw

Place = tuple[str | bytes, int]
"""Topic, by its name or by its id, and partition."""


class SessionClient:
    def __init__(self, raw: Raw, version: int = 12) -> None:
        self.raw = raw
        self.version = version
        self.session_id = 0
        self.epoch = 0

    def send(
        self,
        asked: dict[Place, int],
        forgotten: Iterable[Place] = (),
        *,
        wait_ms: int = 0,
        max_bytes: int = 1 << 24,
        partition_max_bytes: int = 1 << 20,
        **more: Any,
    ) -> None:
        topics: list[Message] = []
        for (topic, partition), offset in asked.items():
            if not topics or (topics[-1].topic or topics[-1].topic_id) != topic:
                topics.append(Message(**_topic(topic), partitions=[]))
            topics[-1].partitions.append(
                Message(
                    partition=partition,
                    current_leader_epoch=more.get("leader_epoch", -1),
                    fetch_offset=offset,
                    last_fetched_epoch=-1,
                    log_start_offset=-1,
                    partition_max_bytes=partition_max_bytes,
                )
            )
        self.raw.send(
            apis.FETCH,
            self.version,
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=more.get("min_bytes", 1),
            max_bytes=max_bytes,
            isolation_level=more.get("isolation_level", 0),
            session_id=more.get("session_id", self.session_id),
            session_epoch=more.get("epoch", self.epoch),
            topics=topics,
            forgotten_topics_data=[Message(**_topic(topic), partitions=[index]) for topic, index in forgotten],
            rack_id=more.get("rack", ""),
        )

    def receive(self) -> dict[Place, Any]:
        """The rows of an answer without an error, which is the next one of the session."""
        code, rows = self.receive_any()
        assert code == 0
        return rows

    def receive_any(self) -> tuple[int, dict[Place, Any]]:
        answer = self.raw.receive(apis.FETCH, self.version)[1]
        if answer.error_code == 0:
            self.session_id = answer.session_id
            self.epoch = self.epoch + 1 if self.session_id else 0
        rows = {
            (topic.topic if self.version < 13 else topic.topic_id, row.partition_index): row
            for topic in answer.responses
            for row in topic.partitions
        }
        return answer.error_code, rows

    def fetch(self, asked: dict[Place, int], forgotten: Iterable[Place] = (), **more: Any) -> dict[Place, Any]:
        self.send(asked, forgotten, **more)
        return self.receive()


def _topic(topic: str | bytes) -> dict[str, Any]:
    if isinstance(topic, str):
        return {"topic": topic, "topic_id": bytes(16)}
    return {"topic": "", "topic_id": topic}
