"""What this broker holds, made to follow the image: logs are created, led, followed, altered and removed.

Role in a partition that this broker has a replica of:
- it leads if the key names it as leader with the incarnation that this process has drawn. A process that was started
  after the key was written leads nothing, whatever the key says, until the controller has looked at it;
- it follows if the leader that the key names is registered with the incarnation that the in-sync set has;
- otherwise it stands by, and nobody leads.

A log that cannot be created (a full disk, say) is tried again after pauses that double, and is not served until then.
If its partition goes elsewhere before, what was made of its folder goes too.
One that cannot be deleted stays open and unserved meanwhile; if its partition comes back before, it is served again.
Topics are told apart by id: one that was deleted and made anew while the broker was down begins with an empty log.

A log is deleted when its topic's deletion is in the image, and when its partition's key, of the same topic, was seen to
take this broker from its replicas. If the key is only missing, the log is set aside where it is: it is not served,
nothing of it is deleted or compacted, and it is served again, as it was, when the key comes back. If another topic has
taken its name by then, its folder is renamed, and a person decides about it.

While the metadata is in doubt (cluster.lineage) everything stays as it is: `is_held` says so. What an accepted copy has
elsewhere is set aside too: nobody has moved it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.image import NO_LEADER, Broker, Image, PartitionState, Topic
from headrace.errors import HeadraceError, NotLeader, UnknownPartition
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.replication.replication import Replication
from headrace.settings.values import TOPIC_BY_NAME, LogSettings, Value, log_settings
from headrace.storage.log import Log, LogStore, TopicPartition

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1
RETRY_SECONDS_MAX: Final = 10.0


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
        clock: Clock,
        store: LogStore,
        partitions: Partitions,
        replication: Replication,
        defaults: Callable[[Image], dict[str, Value]],
        is_held: Callable[[], bool] = lambda: False,
        doubted: Callable[[], None] = lambda: None,
    ) -> None:
        self._broker = broker
        self._incarnation = incarnation
        self._clock = clock
        self._store = store
        self._partitions = partitions
        self._replication = replication
        self._defaults = defaults
        self._is_held = is_held
        self._doubted = doubted
        self._missing: set[TopicPartition] = set()
        self._undeleted: set[TopicPartition] = set()
        """Logs that were to be deleted, and could not be."""
        self._pause_seconds = RETRY_SECONDS
        self._retry_at = 0.0
        self._held: dict[TopicPartition, tuple[bytes, PartitionState, int]] = {}
        """Topic's id, state and leader as they were last put into effect."""
        self._image: Image | None = None
        self._joined = False
        self._settings: tuple[Image | None, dict[bytes, LogSettings]] = None, {}
        """By topic's id, as an image says: every partition of a topic asks for them."""
        self._unknown: set[tuple[bytes, str]] = set()
        """Topics' ids, and settings of theirs that this version does not know, as was said once."""

    def settings_of(self, image: Image, topic: Topic) -> LogSettings:
        if self._settings[0] is not image:
            self._settings = image, {}
        known = self._settings[1].get(topic.id)
        if known is None:
            known = log_settings(self._defaults(image), topic.overrides)
            self._tell_unknown(topic)
            if topic.internal:
                # Nobody archives or queries our own topics: a default for all topics would let them grow without end.
                known = replace(known, retention_archived=False, key_index=False)
            self._settings[1][topic.id] = known
        return known

    def _tell_unknown(self, topic: Topic) -> None:
        for name in topic.overrides:
            if name not in TOPIC_BY_NAME and (topic.id, name) not in self._unknown:
                self._unknown.add((topic.id, name))
                log.warning("topic %r: setting %r is not known to this version and does nothing here", topic.name, name)

    def expected(
        self, image: Image, there: Mapping[TopicPartition, bytes], *, named_late: bool = False
    ) -> dict[TopicPartition, tuple[bytes, LogSettings]]:
        """Every log that this broker should have, for the store to open, and those that are `there`, by their topics'
        ids, and whose keys are missing. While the metadata is in doubt, what is there and nothing else; `named_late`:
        but records may be safe before the folder of their partition is, so what the image has here is opened too.
        """
        logs: dict[TopicPartition, tuple[bytes, LogSettings]] = {}
        for topic in image.topics.values():
            settings = self.settings_of(image, topic)
            for state in topic.partitions:
                if self._broker in state.replicas:
                    logs[TopicPartition(topic.name, state.index)] = (topic.id, settings)
        if self._is_held():
            found = {where: topic_id for where, (topic_id, _) in logs.items()} if named_late else {}
            untouched = _untouched(log_settings(self._defaults(image)))
            return {where: (topic_id, untouched) for where, topic_id in (found | dict(there)).items()}
        for where, topic_id in there.items():
            if where not in logs and self._is_missing(image, where, topic_id):
                logs[where] = topic_id, _untouched(log_settings(self._defaults(image)))
        return logs

    def start(self, image: Image) -> None:
        """Hold what the image says; the store is open. Every replica stands by until `join`."""
        if self._is_held():
            self._image = Image(image.prefix)  # what it says is taken up when it is accepted
            return
        self._image = image
        for topic in image.topics.values():
            self._serve(image, topic, altered=True)
        for kept in self._store.logs():
            if kept.topic_partition not in self._held:
                self._tell_missing(image, kept)

    @property
    def set_aside(self) -> list[Log]:
        """The logs here that are not served because the key of their partition, or of their topic, is missing."""
        return [kept for kept in self._store.logs() if kept.topic_partition not in self._held]

    def join(self) -> None:
        """Take the roles that the image says. Not before the incarnation file tells of this process: from here on logs
        may change.
        """
        assert self._image is not None
        self._joined = True
        for topic in self._image.topics.values():
            self._serve(self._image, topic, altered=False)

    def follow(self, old: Image, new: Image) -> None:
        """An image listener. Who was held takes up what has changed since."""
        if self._image is None or self._is_held():
            return
        old, self._image = self._image, new
        same_lineage = old.controls.lineage == new.controls.lineage
        if not same_lineage:
            self._undeleted.clear()  # nobody has moved it in this one
        for name, topic in old.topics.items():
            if new.topics.get(name) is not topic:
                self._part_with(new, topic, same_lineage)
        if old.deleted is not new.deleted or not same_lineage:
            for kept in self.set_aside:
                if kept.topic_id in new.deleted:
                    self._delete(kept.topic_partition)
        for where in [each for each in self._missing if not self._is_placed(new, each)]:
            self._missing.discard(where)
            if self._store.get(where) is None:
                self._delete(where)
        altered = old.cluster_config != new.cluster_config or old.broker_configs != new.broker_configs
        moved = old.brokers is not new.brokers
        for name, topic in new.topics.items():
            if altered or moved or old.topics.get(name) is not topic:
                before = old.topics.get(name)
                own_altered = before is None or before.overrides != topic.overrides
                self._serve(new, topic, altered=altered or own_altered)

    def retry(self) -> None:
        """Try again what could not be created or deleted, if it is time."""
        before = self._undone
        if not before or self._image is None or self._clock.now() < self._retry_at:
            return
        for name in sorted({missing.topic for missing in self._missing}):
            topic = self._image.topics.get(name)
            if topic is not None:
                self._serve(self._image, topic, altered=False)
        if not self._is_held():
            for where in sorted(self._undeleted):
                self._delete_again(self._image, where)
        fewer = self._undone < before
        self._pause_seconds = RETRY_SECONDS if fewer else min(2 * self._pause_seconds, RETRY_SECONDS_MAX)
        self._retry_at = self._clock.now() + self._pause_seconds

    @property
    def _undone(self) -> int:
        return len(self._missing) + len(self._undeleted)

    def _delete_again(self, image: Image, where: TopicPartition) -> None:
        kept = self._store.get(where)
        if where in self._held:
            self._undeleted.discard(where)
        elif kept is None or kept.topic_id in image.deleted or self._is_elsewhere(image, where, kept.topic_id):
            self._delete(where)

    def _part_with(self, image: Image, before: Topic, same_lineage: bool) -> None:
        """Stop serving what the image has no more, and delete what it says is to be deleted."""
        for state in before.partitions:
            where = TopicPartition(before.name, state.index)
            held = self._held.get(where)
            if held is None or self._is_ours(image, where, held[0]):
                continue
            topic_id = held[0]
            if topic_id in image.deleted:
                self._drop(where, UnknownPartition(f"topic {where.topic!r} was deleted"))
                self._delete(where)
            elif not same_lineage or self._is_missing(image, where, topic_id):
                self._drop(where, UnknownPartition(f"{where}: its key in coordination is missing"))
                kept = self._store.get(where)
                if kept is not None:
                    kept.settings = _untouched(kept.settings)
                    self._tell_missing(image, kept)
            else:
                self._drop(where, NotLeader(f"{where}: its replica moved to another broker"))
                self._delete(where)

    def _is_ours(self, image: Image, where: TopicPartition, topic_id: bytes) -> bool:
        topic = image.topics.get(where.topic)
        return topic is not None and topic.id == topic_id and self._is_placed(image, where)

    def _is_placed(self, image: Image, where: TopicPartition) -> bool:
        """Whether a partition of this name is to be here, whatever its topic."""
        state = image.partition(where.topic, where.partition)
        return state is not None and self._broker in state.replicas

    def _is_missing(self, image: Image, where: TopicPartition, topic_id: bytes) -> bool:
        """Whether nothing says where a partition is of which there is a log here."""
        topic = image.topics.get(where.topic)
        return topic is None or topic.id != topic_id or image.partition(where.topic, where.partition) is None

    def _is_elsewhere(self, image: Image, where: TopicPartition, topic_id: bytes) -> bool:
        return not self._is_missing(image, where, topic_id) and not self._is_ours(image, where, topic_id)

    def _tell_missing(self, image: Image, kept: Log) -> None:
        where = kept.topic_partition
        partition_key = keys.partition_key(image.prefix, where.topic, where.partition)
        log.error(
            "%s is set aside with offsets %d to %d: key %s is missing in coordination, or that of its topic, or has "
            "it elsewhere though nobody moved it; and nobody has deleted topic id %s. Put them back, and it is served "
            "again as it was; or delete the topic",
            where, kept.start_offset, kept.end_offset, partition_key, kept.topic_id.hex(),
        )  # fmt: skip

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
        opened = self._opened(image, topic, where)
        if opened is None:
            return
        if leader != NO_LEADER and opened.last_epoch() > state.leader_epoch:
            # The key is older than the log: whoever acted on it would cut what is acknowledged.
            leader = NO_LEADER
            self._doubted()
        if opened.offline is not None and leader != self._broker:
            leader = NO_LEADER  # nothing can be copied into it
        before = self._partitions.find_replica(topic.name, state.index)
        if leader == self._broker:
            partition = self._partitions.lead(
                opened,
                state.leader_epoch,
                state.incarnations,
                state.replicas,
                state.revision,
                state.adding,
                state.least_start,
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

    def _opened(self, image: Image, topic: Topic, where: TopicPartition) -> Log | None:
        """The log of a partition: the one that is there, or a new one; None if neither can be had now."""
        opened = self._store.get(where)
        try:
            if opened is not None and opened.topic_id != topic.id:
                self._make_way(image, opened)
                opened = None
            if opened is None:
                opened = self._store.create(where, topic.id, self.settings_of(image, topic))
            elif where not in self._held:
                opened.settings = self.settings_of(image, topic)
        except (HeadraceError, OSError) as error:
            if where not in self._missing:
                log.error("cannot create the log of %s: %s; it will be tried again", where, error)
            if not self._undone:
                self._pause_seconds = RETRY_SECONDS
            self._missing.add(where)
            return None
        self._missing.discard(where)
        self._undeleted.discard(where)
        return opened

    def _make_way(self, image: Image, kept: Log) -> None:
        """Another topic has taken the name."""
        where = kept.topic_partition
        if kept.topic_id in image.deleted:
            self._store.delete(where)
        else:
            aside = self._store.set_aside(where)
            log.error(
                "%s of topic id %s set aside as %s: its name is another topic's", where, kept.topic_id.hex(), aside
            )

    def _drop(self, where: TopicPartition, gone: HeadraceError) -> None:
        del self._held[where]
        self._replication.unfollow(where)
        self._partitions.drop(where, gone)

    def _delete(self, where: TopicPartition) -> None:
        try:
            self._store.delete(where)
        except (HeadraceError, OSError) as error:
            if where not in self._undeleted:
                log.error("cannot remove the log of %s: %s; it will be tried again", where, error)
            if not self._undone:
                self._pause_seconds = RETRY_SECONDS
            self._undeleted.add(where)
        else:
            self._undeleted.discard(where)


def _untouched(settings: LogSettings) -> LogSettings:
    """Nothing of the log is deleted, compacted or indexed."""
    return replace(settings, delete=False, compact=False, retention_archived=False)
