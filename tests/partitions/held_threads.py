"""Recompression whose threads do their work when a test says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.partitions.partition import Appended, Partition
from headrace.partitions.recompression import Recompression
from partitions.led import Led


class HeldWork(Awaitable[bytearray]):
    """What a thread would do, done when the test says so."""

    def __init__(self, work: Callable[[], bytearray]) -> None:
        self._work = work

    def __await__(self) -> Generator[None, None, bytearray]:
        yield
        return self._work()


class Threads:
    def __init__(self, led: Led, **bounds: int) -> None:
        self.led = led
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.recompression = led.partitions.recompression = Recompression(
            led.partitions, HeldWork, self._spawn, **bounds
        )

    def _spawn(self, task: Coroutine[Any, Any, None]) -> None:
        task.send(None)
        self.tasks.append(task)

    def finish(self, nth: int = 0) -> None:
        with pytest.raises(StopIteration):
            self.tasks.pop(nth).send(None)

    def finish_all(self) -> None:
        while self.tasks:
            self.finish()

    def produce(self, partition: Partition, view: bytes | bytearray) -> Produced:
        """As the front end does it; the view dies with the call."""
        copied, produced = bytearray(view), Produced()
        if partition.stored_otherwise(memoryview(copied)):
            self.recompression.submit(partition, memoryview(copied), 1, produced)
            copied[:] = bytes(len(copied))
        else:
            produced(partition.append(memoryview(copied), 1))
            self.led.partitions.touch(partition)
            self.led.partitions.end_turn()
        return produced


class Produced:
    def __init__(self) -> None:
        self.outcome: Appended | HeadraceError | None = None

    def __call__(self, outcome: Appended | HeadraceError) -> None:
        assert self.outcome is None
        self.outcome = outcome

    @property
    def offset(self) -> int:
        assert isinstance(self.outcome, tuple), self.outcome
        return self.outcome[0]
