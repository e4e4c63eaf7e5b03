"""What this broker holds, made to follow the image: logs are created, led, followed, altered and removed.

Role in a partition that this broker has a replica of:
- it leads if the key names it as leader with the incarnation that this process has drawn. A process that was started
  after the key was written leads nothing, whatever the key says, until the controller has looked at it;
- it follows if the leader that the key names is registered with the incarnation that the in-sync set has;
- otherwise it stands by, and nobody leads.

A log that cannot be created (a full disk, say) is tried again at every tick; until then the partition is not served.
Topics are told apart by id: one that was deleted and made anew while the broker was down begins with an empty log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.cluster.image import NO_LEADER, Broker, Image, PartitionState, Topic
from headrace.errors import HeadraceError, NotLeader, UnknownPartition
from headrace.partitions.partitions import Partitions
from headrace.replication.replication import Replication
from headrace.settings import LogSettings, Value, log_settings
from headrace.storage.log import Log, LogStore, TopicPartition

log = logging.getLogger(__name__)


def leader_of(state: PartitionState, brokers: Mapping[int, Broker], own: int, incarnation: str) -> int:
    """Who leads the partition as this process may see it; NO_LEADER if nobody does."""
    leader = state.leader
    if leader == NO_LEADER:
        return NO_LEADER
    known = state.incarnations.get(leader)
    if leader == own:
        return own if known == incarnation else NO_LEADER
    registered = brokers.get(leader)
    return leader if registered is not None and registered.incarnation == known else NO_LEADER


class Assignment:
    """Keeps store, partitions and links as the image says."""

    def __init__(
        self,
        broker: int,
        incarnation: str,
        store: LogStore,
        partitions: Partitions,
        replication: Replication,
        defaults: Callable[[Image], dict[str, Value]],
    ) -> None:
        self._broker = broker
        self._incarnation = incarnation
        self._store = store
        self._partitions = partitions
        self._replication = replication
        self._defaults = defaults
        self._missing: set[TopicPartition] = set()
        self._held: dict[TopicPartition, tuple[bytes, PartitionState, int]] = {}
        """Topic's id, state and leader as they were last put into effect."""
        self._image: Image | None = None
        self._joined = False

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
        """Hold what the image says; the store is open. Every replica stands by until `join`."""
        self._image = image
        for topic in image.topics.values():
            self._serve(image, topic, altered=True)

    def join(self) -> None:
        """Take the roles that the image says. Not before the incarnation file tells of this process: from here on logs
        may change.
        """
        assert self._image is not None
        self._joined = True
        for topic in self._image.topics.values():
            self._serve(self._image, topic, altered=False)

    def follow(self, old: Image, new: Image) -> None:
        """An image listener."""
        if self._image is None:
            return
        self._image = new
        for name, topic in old.topics.items():
            if new.topics.get(name) is not topic:
                self._remove_what_went(new, topic)
        self._missing = {where for where in self._missing if where.topic in new.topics}
        altered = old.cluster_config != new.cluster_config or old.broker_configs != new.broker_configs
        moved = old.brokers is not new.brokers
        for name, topic in new.topics.items():
            if altered or moved or old.topics.get(name) is not topic:
                before = old.topics.get(name)
                own_altered = before is None or before.overrides != topic.overrides
                self._serve(new, topic, altered=altered or own_altered)

    def retry(self) -> None:
        """Try again what could not be created."""
        if self._missing and self._image is not None:
            for name in sorted({missing.topic for missing in self._missing}):
                topic = self._image.topics.get(name)
                if topic is not None:
                    self._serve(self._image, topic, altered=False)

    def _remove_what_went(self, image: Image, before: Topic) -> None:
        for state in before.partitions:
            where = TopicPartition(before.name, state.index)
            held = self._held.get(where)
            if held is not None and not self._is_ours(image, where, held[0]):
                self._remove(where, image)

    def _is_ours(self, image: Image, where: TopicPartition, topic_id: bytes) -> bool:
        topic = image.topics.get(where.topic)
        if topic is None or topic.id != topic_id or where.partition >= len(topic.partitions):
            return False
        return self._broker in topic.partitions[where.partition].replicas

    def _serve(self, image: Image, topic: Topic, *, altered: bool) -> None:
        settings: LogSettings | None = self.settings_of(image, topic) if altered else None
        for state in topic.partitions:
            if self._broker not in state.replicas:
                continue
            where = TopicPartition(topic.name, state.index)
            leader = NO_LEADER
            if self._joined:
                leader = leader_of(state, image.brokers, self._broker, self._incarnation)
            held = self._held.get(where)
            if held is not None and settings is not None:
                self._alter(where, settings)
            if held is None or held[1] is not state or held[2] != leader:
                self._take_role(image, topic, state, leader)

    def _alter(self, where: TopicPartition, settings: LogSettings) -> None:
        partition = self._partitions.find_replica(where.topic, where.partition)
        if partition is not None and partition.log.settings != settings:
            partition.log.settings = settings
            self._partitions.settings_changed(partition)

    def _take_role(self, image: Image, topic: Topic, state: PartitionState, leader: int) -> None:
        where = TopicPartition(topic.name, state.index)
        opened = self._store.get(where) or self._create(image, topic, where)
        if opened is None:
            return
        if opened.offline is not None and leader != self._broker:
            leader = NO_LEADER  # nothing can be copied into it
        before = self._partitions.find_replica(topic.name, state.index)
        if leader == self._broker:
            partition = self._partitions.lead(
                opened, state.leader_epoch, state.incarnations, state.replicas, state.revision, state.adding
            )
            self._partitions.replicas_changed(partition, state.replicas, state.adding)
        else:
            partition = self._partitions.follow(opened, state.leader_epoch, leader)
        if partition is not before:
            if leader in (self._broker, NO_LEADER):
                self._replication.unfollow(where)
            else:
                self._replication.follow(partition, leader, state.leader_epoch)
        self._held[where] = topic.id, state, leader

    def _create(self, image: Image, topic: Topic, where: TopicPartition) -> Log | None:
        try:
            created = self._store.create(where, topic.id, self.settings_of(image, topic))
        except (HeadraceError, OSError) as error:
            if where not in self._missing:
                log.error("cannot create the log of %s: %s; it will be tried again", where, error)
            self._missing.add(where)
            return None
        self._missing.discard(where)
        return created

    def _remove(self, where: TopicPartition, image: Image) -> None:
        """The topic was deleted, or its replica moved away."""
        topic_id, _, _ = self._held.pop(where)
        topic = image.topics.get(where.topic)
        if topic is not None and topic.id == topic_id:
            gone: HeadraceError = NotLeader(f"{where}: its replica moved to another broker")
        else:
            gone = UnknownPartition(f"topic {where.topic!r} was deleted")
        self._replication.unfollow(where)
        self._partitions.drop(where, gone)
        try:
            self._store.delete(where)
        except (HeadraceError, OSError) as error:
            log.error("cannot remove the log of %s: %s; it is set aside at the next start", where, error)
