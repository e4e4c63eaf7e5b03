"""The log store of a server that holds no partitions: with it, the brokers' own handlers answer who leads instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.errors import HeadraceError, Unsupported
from headrace.settings.values import LogSettings
from headrace.storage.log import Log, TopicPartition


class NoLogs:
    def create(self, topic_partition: TopicPartition, topic_id: bytes, settings: LogSettings) -> Log:
        raise Unsupported(f"a registry holds no partitions: {topic_partition} cannot be made here")

    def get(self, topic_partition: TopicPartition) -> Log | None:
        return None

    def logs(self) -> Iterator[Log]:
        return iter(())

    def delete(self, topic_partition: TopicPartition) -> None:
        return

    def set_aside(self, topic_partition: TopicPartition) -> str:
        raise Unsupported(f"a registry holds no partitions: {topic_partition} cannot be set aside here")

    def delete_left(self, topic: str, topic_id: bytes) -> None:
        return

    def write_staged(self) -> list[tuple[Log, HeadraceError]]:
        return []

    def settings_changed(self, topic_partition: TopicPartition) -> None:
        return

    def on_durable(self, listener: Callable[[Log], None]) -> None:
        return

    def tick(self) -> None:
        return

    def close(self) -> bool:
        return True
