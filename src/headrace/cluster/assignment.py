"""What this broker holds, made to follow the image: logs are created, served, altered and removed as topics are.

A log that cannot be created (a full disk, say) is tried again at every tick; until then the partition is not served.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from headrace.cluster.image import Image, PartitionState, Topic
from headrace.errors import HeadraceError, UnknownPartition
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.settings import LogSettings, Value, log_settings
from headrace.storage.log import LogStore, TopicPartition

log = logging.getLogger(__name__)


class Assignment:
    """Keeps store and partitions as the image says. `served` and `dropped` hear of each change."""

    def __init__(
        self,
        broker: int,
        store: LogStore,
        partitions: Partitions,
        defaults: Callable[[Image], dict[str, Value]],
        served: Callable[[Partition], None],
        dropped: Callable[[TopicPartition], None],
    ) -> None:
        self._broker = broker
        self._store = store
        self._partitions = partitions
        self._defaults = defaults
        self._served = served
        self._dropped = dropped
        self._missing: set[TopicPartition] = set()
        self._image: Image | None = None

    def settings_of(self, image: Image, topic: Topic) -> LogSettings:
        settings = log_settings(self._defaults(image), topic.overrides)
        # Nobody archives or queries our own topics: a default for all topics would let them grow without end.
        return replace(settings, retention_archived=False, key_index=False) if topic.internal else settings

    def expected(self, image: Image) -> dict[TopicPartition, tuple[bytes, LogSettings]]:
        """Every log that this broker should have, for the store to open."""
        logs: dict[TopicPartition, tuple[bytes, LogSettings]] = {}
        for topic in image.topics.values():
            settings = self.settings_of(image, topic)
            for state in topic.partitions:
                if self._broker in state.replicas:
                    logs[TopicPartition(topic.name, state.index)] = (topic.id, settings)
        return logs

    def start(self, image: Image) -> None:
        """Serve what the image says; the store is open."""
        self._image = image
        for topic in image.topics.values():
            self._serve(image, topic)

    def follow(self, old: Image, new: Image) -> None:
        """An image listener."""
        if self._image is None:
            return
        self._image = new
        for name, topic in old.topics.items():
            successor = new.topics.get(name)
            if successor is None or successor.id != topic.id:
                self._remove(topic)
        defaults_changed = old.cluster_config != new.cluster_config or old.broker_configs != new.broker_configs
        for name, topic in new.topics.items():
            if old.topics.get(name) is not topic or defaults_changed:
                self._serve(new, topic)

    def retry(self) -> None:
        """Try again what could not be created."""
        if self._missing and self._image is not None:
            for name in {missing.topic for missing in self._missing}:
                topic = self._image.topics.get(name)
                if topic is not None:
                    self._serve(self._image, topic)

    def _serve(self, image: Image, topic: Topic) -> None:
        settings = self.settings_of(image, topic)
        for state in topic.partitions:
            if self._broker not in state.replicas:
                continue
            served = self._partitions.find(topic.name, state.index)
            if served is not None:
                served.log.settings = settings
                self._partitions.settings_changed(served)
            else:
                self._begin(topic, state, settings)

    def _begin(self, topic: Topic, state: PartitionState, settings: LogSettings) -> None:
        where = TopicPartition(topic.name, state.index)
        try:
            opened = self._store.get(where) or self._store.create(where, topic.id, settings)
        except (HeadraceError, OSError) as error:
            if where not in self._missing:
                log.error("cannot create the log of %s: %s; it will be tried again", where, error)
            self._missing.add(where)
            return
        self._missing.discard(where)
        self._served(
            self._partitions.lead(
                opened, state.leader_epoch, dict.fromkeys(state.isr, ""), state.replicas, state.revision
            )
        )

    def _remove(self, topic: Topic) -> None:
        gone = UnknownPartition(f"topic {topic.name!r} was deleted")
        for state in topic.partitions:
            where = TopicPartition(topic.name, state.index)
            self._missing.discard(where)
            if self._partitions.find(topic.name, state.index) is None:
                continue
            self._partitions.drop(where, gone)
            self._dropped(where)
            try:
                self._store.delete(where)
            except (HeadraceError, OSError) as error:
                log.error("cannot remove the log of %s: %s; it is set aside at the next start", where, error)
