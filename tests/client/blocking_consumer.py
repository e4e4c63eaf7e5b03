"""A consumer for threads or for asyncio, for tests that say the same of both."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping

import headrace
from brokers import wait_for
from headrace import aio
from headrace.client.consumer.core import ConsumerCore
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.membership import Membership
from headrace.records.consumer_records import ReceivedRecord


class Blocking:
    """A consumer of either kind, called as one for threads."""

    def __init__(self, runner: asyncio.Runner | None, *names: str | re.Pattern[str], **options: object) -> None:
        self._runner = runner
        topics = names[0] if isinstance(names[0], re.Pattern) else names

        async def make() -> aio.Consumer:
            return aio.Consumer(topics, **options)  # type: ignore[arg-type]

        self.consumer = (
            headrace.Consumer(topics, **options) if runner is None else runner.run(make())  # type: ignore[arg-type]
        )

    def _run(self, result: object) -> object:
        async def awaited(waiting: Awaitable[object]) -> object:
            return await waiting

        return self._runner.run(awaited(result)) if isinstance(result, Awaitable) and self._runner else result

    @property
    def core(self) -> ConsumerCore:
        return self.consumer._core

    def poll(self, most: int) -> list[ReceivedRecord]:
        return self._run(self.consumer.poll(200, max_records=most))  # type: ignore[return-value]

    def read(self, most: int) -> list[int]:
        """The offsets of the next records that come, so many at most."""
        found: list[ReceivedRecord] = []

        def came() -> bool:
            found.extend(self.poll(most))
            return bool(found)

        wait_for("records", came, pause_s=0.0)
        return [record.offset for record in found]

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        self._run(self.consumer.commit(offsets))

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self._run(self.consumer.seek(topic, partition, offset))

    def close(self) -> None:
        self._run(self.consumer.close())

    def under_lock(self, act: Callable[[], None]) -> None:
        async def on_loop() -> None:
            act()

        if self._runner is not None:
            self._runner.run(on_loop())
        else:
            with self.consumer._driver.lock:
                act()

    @property
    def membership(self) -> Membership:
        source = self.core._source
        assert isinstance(source, Membership)
        return source
