"""kafkajs as a test client: a Node process driven over JSON lines (see kafkajs/client.js)."""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any

from brokers import DIES_WITH_PARENT
from clients.records import Record

DEADLINE_S = 120.0
SCRIPT = Path(__file__).parent / "kafkajs" / "client.js"
NODE_MODULES = Path(__file__).resolve().parents[2] / ".work" / "node" / "node_modules"


class KafkaJSError(Exception):
    """What kafkajs threw, with the protocol's name for it where there is one."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__(f"{said['error']} ({said['type']})")
        self.type = said["type"]


def encoded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def decoded(value: str | None) -> bytes | None:
    return None if value is None else base64.b64decode(value)


def command() -> list[str]:
    return [*DIES_WITH_PARENT, "node", str(SCRIPT)]


def environment() -> dict[str, str]:
    return {**os.environ, "NODE_PATH": str(NODE_MODULES), "KAFKAJS_NO_PARTITIONER_WARNING": "1"}


class Node:
    """The process; answers are matched to questions by number."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
        )
        self.numbers = itertools.count()
        self.answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            self.answers[said["id"]].put(said)
        for waiting in self.answers.values():
            waiting.put({"error": "the Node process ended", "type": None})

    def ask(self, action: str, **given: object) -> Any:
        assert self.process.stdin is not None
        number = next(self.numbers)
        self.answers[number] = queue.Queue()
        self.process.stdin.write(json.dumps({"id": number, "do": action, **given}) + "\n")
        self.process.stdin.flush()
        said = self.answers[number].get(timeout=DEADLINE_S)
        del self.answers[number]
        if "error" in said:
            raise KafkaJSError(said)
        return said["ok"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class KafkaJS:
    name = "kafkajs"
    sets_timestamps = True
    null_headers = False
    any_bytes_in_headers = True

    def __init__(self) -> None:
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        if self._node is None or self._node.process.poll() is not None:
            self._node = Node()
        return self._node

    def close(self) -> None:
        if self._node is not None:
            self._node.close()

    def produce(
        self,
        bootstrap: str,
        topic: str,
        records: list[Record],
        codec: str = "none",
        acks: int = -1,
        **options: object,
    ) -> None:
        given = [
            {
                "key": encoded(record.key),
                "value": encoded(record.value),
                "partition": record.partition,
                "headers": [[name, encoded(value)] for name, value in record.headers],
                "timestamp": record.timestamp_ms,
            }
            for record in records
        ]
        self.node.ask("produce", bootstrap=bootstrap, topic=topic, records=given, codec=codec, acks=acks, **options)

    def consume(self, bootstrap: str, counts: dict[str, int]) -> dict[str, list[Record]]:
        read = self.node.ask("consume", bootstrap=bootstrap, counts=counts, group=f"kafkajs-{uuid.uuid4()}")
        return {topic: [record_of(said) for said in records] for topic, records in read.items()}

    def admin(self, bootstrap: str, method: str, *arguments: object, after: tuple[str, object] | None = None) -> Any:
        """Call a method of its admin client, on request after another call on the same client."""
        calls: list[tuple[str, tuple[object, ...]]] = [(after[0], (after[1],))] if after else []
        return self.node.ask("admin", bootstrap=bootstrap, calls=[*calls, (method, arguments)])

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        """kafkajs answers the end of the log where nothing is that new, so a record has to be there."""
        found = self.admin(bootstrap, "fetchTopicOffsetsByTimestamp", topic, timestamp_ms)
        end = self.admin(bootstrap, "fetchTopicOffsets", topic)
        offset = int(found[0]["offset"])
        return None if offset == int(end[0]["high"]) else offset


def record_of(said: dict[str, Any]) -> Record:
    return Record(
        decoded(said["value"]),
        decoded(said["key"]),
        tuple((name, decoded(value)) for name, value in said["headers"]),
        said["timestamp"],
        said["partition"],
        said["offset"],
    )
