"""Keys of partitions, answered when a test says so, and the tasks that wait for the answers."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from headrace.cluster import keys
from headrace.cluster.image import PartitionState, encode_partition
from headrace.errors import CoordinationError
from headrace.ports.coordination import KeyValue

PREFIX = "/headrace/c/"


class _Held(Awaitable[None]):
    def __await__(self) -> Generator[None, None, None]:
        yield


class PartitionKeys:
    """The one call of the Coordination port that `cluster.leadership` needs."""

    def __init__(self) -> None:
        self.held = False
        """Whether answers wait for `answer`."""
        self.failure: CoordinationError | None = None
        self.asked = 0
        self._found: dict[str, KeyValue] = {}
        self._tasks: list[Coroutine[Any, Any, None]] = []

    def put(self, topic: str, topic_id: bytes, leader: int, epoch: int) -> None:
        key = keys.partition_key(PREFIX, topic, 0)
        state = PartitionState(0, leader, epoch, (leader,), (leader,))
        self._found[key] = KeyValue(key, encode_partition(topic_id, state), 1, 1, 1)

    def put_wrong(self, topic: str) -> None:
        key = keys.partition_key(PREFIX, topic, 0)
        self._found[key] = KeyValue(key, b"[]", 1, 1, 1)

    def delete(self, topic: str) -> None:
        del self._found[keys.partition_key(PREFIX, topic, 0)]

    async def get(self, key: str) -> KeyValue | None:
        self.asked += 1
        if self.held:
            await _Held()
        if self.failure is not None:
            raise self.failure
        return self._found.get(key)

    def spawn(self, task: Coroutine[Any, Any, None]) -> None:
        try:
            task.send(None)
        except StopIteration:
            return
        self._tasks.append(task)

    def answer(self) -> None:
        """What is asked now; what is asked because of that waits."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            self.spawn(task)
