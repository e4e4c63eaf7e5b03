"""Share groups seen from a test: librdkafka's share consumer, in this process or in one that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from confluent_kafka import AcknowledgeType, Message, Producer, ShareConsumer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from brokers import DIES_WITH_PARENT

PROGRAM = Path(__file__).parent / "share_member.py"
DEADLINE_S = 60.0
QUICK: dict[str, object] = {
    "group.share.heartbeat.interval.ms": 300,
    "group.share.min.heartbeat.interval.ms": 100,
    "group.share.session.timeout.ms": 5000,
    "group.share.min.session.timeout.ms": 1000,
    "group.share.min.record.lock.duration.ms": 1000,
}


def share_group(bootstrap: str, **config: object) -> str:
    """The name of a group that begins at the start of its topics; settings are named with underscores for dots."""
    name = f"g-{uuid.uuid4()}"
    given = {"share_auto_offset_reset": "earliest", **config}
    entries = [
        ConfigEntry(key.replace("_", "."), str(value), incremental_operation=AlterConfigOpType.SET)
        for key, value in given.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, name, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)
    return name


def write(bootstrap: str, topic: str, values: list[str], partitions: int = 1, *, batched: bool = True) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20 if batched else 0, "log_level": 0})
    for nth, value in enumerate(values):
        producer.produce(topic, value.encode(), partition=nth % partitions)
        if not batched:
            producer.flush()
    assert producer.flush(DEADLINE_S) == 0


def member(bootstrap: str, group: str, topic: str, *, explicit: bool = True, **config: object) -> ShareConsumer:
    consumer = ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit" if explicit else "implicit",
            "log_level": 0,
            **{key.replace("_", "."): value for key, value in config.items()},
        }
    )
    consumer.subscribe([topic])
    return consumer


def poll(consumer: ShareConsumer, within_s: float = DEADLINE_S) -> list[Message]:
    """The records of the next poll that has some; none if no poll had within this time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        found = [message for message in consumer.poll(0.2) if message.error() is None]
        if found:
            return found
    return []


def accept(consumer: ShareConsumer, messages: list[Message], how: AcknowledgeType = AcknowledgeType.ACCEPT) -> None:
    for message in messages:
        consumer.acknowledge(message, how)


def commit(consumer: ShareConsumer) -> list[str]:
    """The errors of partitions."""
    results = consumer.commit_sync(DEADLINE_S)
    return [error.args[0].name() for error in results.values() if error is not None]


def values(messages: list[Message]) -> list[str]:
    return [message.value().decode() for message in messages]  # type: ignore[union-attr]


def counts(messages: list[Message]) -> set[int | None]:
    return {message.delivery_count() for message in messages}


class ShareMember:
    """A member that is a process; a thread follows what it says."""

    def __init__(self, bootstrap: str, group: str, topic: str, *, acknowledge: bool = True) -> None:
        given = {"bootstrap": bootstrap, "group": group, "topic": topic, "acknowledge": acknowledge}
        self.records: list[tuple[str, int]] = []
        """Values and delivery counts."""
        self.process = subprocess.Popen(
            [*DIES_WITH_PARENT, sys.executable, str(PROGRAM), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == "record":
                self.records.append((told["value"], told["count"]))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
