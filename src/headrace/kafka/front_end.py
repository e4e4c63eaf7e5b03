"""The Kafka front end on a participant: key indexes, groups, handlers and listeners, in the order that they need.

`server/node.py` puts it on the real ports, the simulator on its own: both build it here. A participant that is open
comes first, and it joins its cluster when the listeners stand: nobody is sent here before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

from headrace.cluster.image import Image
from headrace.cluster.leadership import Leadership
from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC, TRANSACTIONS_TOPIC
from headrace.cluster.participant import Participant
from headrace.cluster.producer_ids import ProducerIds
from headrace.cluster.topics import CreateTopic, TopicCreation
from headrace.coordination.waits import pause
from headrace.coordinators.state_log import StateLog
from headrace.coordinators.state_partitions import StatePartitions, accepted_losses
from headrace.errors import HeadraceError
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import limits_from
from headrace.groups.offsets import OFFSETS
from headrace.kafka import leader_lookup
from headrace.kafka.fetch_sessions import FetchSessions
from headrace.kafka.first_writes import FirstWrites
from headrace.kafka.peers import PeerListener, Peers
from headrace.kafka.server import KafkaServer
from headrace.kafka.services import Services
from headrace.kafka.share_sessions import ShareSessions
from headrace.metrics import SHARE_STATE_PARTITION_CLOSED, TRANSACTION_PARTITION_CLOSED, Metrics, Sample
from headrace.partitions.recompression import Recompression
from headrace.ports.network import Network
from headrace.queues.dead_letter_topics import ENABLED as DEAD_LETTERS_ENABLED
from headrace.queues.dead_letter_topics import DeadLetterTopics
from headrace.queues.delays import Delays
from headrace.queues.messages import ShareGroupConfig
from headrace.queues.persister import StatePersister
from headrace.queues.share_coordinator import SHARE_STATES, ShareCoordinator
from headrace.queues.share_partitions import SharePartitions
from headrace.storage.keys.builder import KeyIndexes
from headrace.storage.keys.index import KeyLimits
from headrace.transactions.coordinator import TRANSACTIONS, TransactionCoordinator
from headrace.transactions.limits import limits_from as transaction_limits_from
from headrace.transactions.marker_appends import Decision, MarkerAppends
from headrace.transactions.markers import Markers

LOAD_SECONDS: Final = 10.0


class FrontEnd:
    """Built when the participant is open; `close` takes it down before the participant goes."""

    def __init__(
        self,
        participant: Participant,
        network: Network,
        metrics: Metrics,
        *,
        connections_max: int,
        draw_id: Callable[[], str],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        failed: Callable[[BaseException], None],
        peer_listeners: Sequence[PeerListener] = (),
    ) -> None:
        self._participant = participant
        self._clock = participant.clock
        self._spawn = spawn
        self._built = contextlib.ExitStack()
        settings = participant.settings
        limits = KeyLimits(settings["key.index.entries"], settings["key.index.slots"])
        self.key_indexes = KeyIndexes(participant.store, participant.disk, self._clock, participant.folder, limits)
        self._built.callback(self.key_indexes.close)
        self.peers = Peers(network, self._clock, participant.broker_id, lambda: participant.view.image, peer_listeners)
        self._built.callback(self.peers.close)
        self._build_share_states()
        self.delays = Delays(participant.partitions, participant.disk, participant.folder)
        self._built.callback(self.delays.close)
        offsets_log = StateLog(participant.partitions, OFFSETS_TOPIC)
        self.groups = GroupCoordinator(
            self._clock,
            offsets_log.append,
            self._offsets_partitions(),
            draw_id,
            limits_from(participant.effective_settings()),
            self._topic_id,
            offsets_log.append_in_transaction,
            group_settings=lambda group: participant.view.image.group_configs.get(group, {}),
            persister=self.persister,
        )
        self._built.callback(self.groups.close)
        self.groups.catalog.follow(Image(""), participant.view.image)
        participant.store.on_sync(metrics.syncs.add)
        self.group_partitions = StatePartitions(
            OFFSETS,
            participant.partitions,
            self.groups,
            participant.disk,
            lambda: participant.view.image,
            lambda: accepted_losses(participant.effective_settings()[OFFSETS.loss_setting]),
        )
        self._build_transactions()
        self.group_partitions.follow()
        self.transaction_partitions.follow()
        self.share_state_partitions.follow()
        self.delays.follow()
        participant.view.listen(self._follow_cluster)
        participant.partitions.recompression = Recompression(participant.partitions, participant.compute, spawn)
        self.services = self._services(metrics, spawn, failed)
        metrics.collect(self.services.fetch_sessions.samples)
        metrics.collect(self.services.share_sessions.samples)
        metrics.collect(self.share_partitions.samples)
        metrics.collect(self.delays.samples)
        metrics.collect(self.transactions.samples)
        metrics.collect(self._closed_transactions)
        metrics.collect(self.share_states.samples)
        metrics.collect(self._closed_share_states)
        self.server = KafkaServer(network, self.services, connections_max)
        self._built.callback(self.server.close)

    def _build_transactions(self) -> None:
        participant = self._participant
        partitions = participant.partitions
        self.producer_ids = ProducerIds(participant.coordination, participant.view, participant.draw)
        self.marker_appends = MarkerAppends(partitions, self._not_led_code, self._decided)
        self.markers = Markers(
            self._clock, partitions, lambda: participant.view.image, self.marker_appends, self.peers.ask
        )
        self.transactions = TransactionCoordinator(
            self._clock,
            StateLog(partitions, TRANSACTIONS_TOPIC).append,
            self._transactions_partitions(),
            self._draw_producer_id,
            self.markers.send,
            transaction_limits_from(participant.effective_settings()),
        )
        self._built.callback(self.transactions.close)
        self.transaction_partitions = StatePartitions(
            TRANSACTIONS,
            partitions,
            self.transactions,
            participant.disk,
            lambda: participant.view.image,
            lambda: accepted_losses(participant.effective_settings()[TRANSACTIONS.loss_setting]),
        )

    def _build_share_states(self) -> None:
        participant = self._participant
        partitions = participant.partitions
        self._topic_creation = TopicCreation(participant.view, participant.topics, participant.effective_settings)
        self.share_states = ShareCoordinator(
            self._clock, StateLog(partitions, SHARE_STATE_TOPIC).append, self._share_state_partitions(), self._knows
        )
        self._built.callback(self.share_states.close)
        self.share_state_partitions = StatePartitions(
            SHARE_STATES,
            partitions,
            self.share_states,
            participant.disk,
            lambda: participant.view.image,
            lambda: accepted_losses(participant.effective_settings()[SHARE_STATES.loss_setting]),
        )
        self.persister = StatePersister(
            self._clock,
            partitions,
            lambda: participant.view.image,
            self.share_states,
            self.peers.ask,
            lambda done: self._spawn(self._create_share_state_topic(done)),
            participant.draw,
        )
        dead_letters = DeadLetterTopics(
            self._clock,
            partitions,
            lambda: participant.view.image,
            participant.effective_settings,
            self.peers.ask,
            lambda name, done: self._spawn(self._create_dead_letter_topic(name, done)),
            self._draw_producer_id,
            lambda work, done: self._spawn(self._compute(work, done)),
        )
        self.share_partitions = SharePartitions(
            partitions, participant.disk, self.persister, self._share_group_config, dead_letters
        )
        self._built.callback(self.share_partitions.close)

    def _services(
        self,
        metrics: Metrics,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        failed: Callable[[BaseException], None],
    ) -> Services:
        participant = self._participant
        return Services(
            settings=participant.settings,
            clock=self._clock,
            disk=participant.disk,
            data_folder=participant.folder,
            metrics=metrics,
            broker_id=participant.broker_id,
            cluster_id=participant.cluster_id,
            view=participant.view,
            changes=participant.changes,
            topics=participant.topics,
            configs=participant.configs,
            auto_topic_creation=self._topic_creation,
            partitions=participant.partitions,
            leadership=Leadership(participant.coordination, participant.view, spawn),
            key_indexes=self.key_indexes,
            groups=self.groups,
            transactions=self.transactions,
            marker_appends=self.marker_appends,
            first_writes=FirstWrites(
                self._clock, participant.partitions, lambda: participant.view.image, self.transactions, self.peers.ask
            ),
            share_states=self.share_states,
            producer_ids=self.producer_ids,
            fetch_sessions=FetchSessions(
                participant.settings["max.incremental.fetch.session.cache.slots"], self._clock.now, participant.draw
            ),
            share_sessions=ShareSessions(
                lambda: participant.effective_settings()["group.share.max.share.sessions"],
                lambda key: self.share_partitions.release(*key),
                begin=self.share_partitions.begin,
            ),
            share_partitions=self.share_partitions,
            share_group_config=self._share_group_config,
            delays=self.delays,
            spawn=spawn,
            failed=failed,
            effective_settings=participant.effective_settings,
            compute=participant.compute,
        )

    async def load_coordinators(self) -> None:
        """Clients find their groups, transactions and share partitions at once; but a start does not wait for ever, nor
        for other brokers."""
        give_up = self._clock.now() + LOAD_SECONDS
        loads = self.group_partitions, self.transaction_partitions, self.share_state_partitions
        while any(load.reading for load in loads) and self._clock.now() < give_up:
            await pause(self._clock, 0.001)

    def tick(self) -> None:
        """Every 100 ms."""
        self.key_indexes.tick()
        self.peers.tick()
        self.markers.tick()
        self.group_partitions.follow()
        self.transaction_partitions.follow()
        self.share_state_partitions.follow()
        self.delays.tick()

    def close(self) -> None:
        self._built.close()

    def _follow_cluster(self, old: Image, new: Image) -> None:
        settings = self._participant.effective_settings()
        self.groups.partition_count = self._offsets_partitions()
        self.groups.limits = limits_from(settings)
        self.groups.topics_changed(self.groups.catalog.follow(old, new))
        self.group_partitions.follow()
        self.group_partitions.forget_topics(old, new)
        self.transactions.partition_count = self._transactions_partitions()
        self.transactions.limits = transaction_limits_from(settings)
        self.transaction_partitions.follow()
        self.share_states.partition_count = self._share_state_partitions()
        self.share_state_partitions.follow()
        self.share_state_partitions.forget_topics(old, new)
        self.share_partitions.follow()
        self.delays.follow()

    def _share_group_config(self, group: str) -> ShareGroupConfig:
        return self.groups.limits.share.config(self._participant.view.image.group_configs.get(group, {}))

    def _draw_producer_id(self, done: Callable[[int | None], None]) -> None:
        known = self.producer_ids.at_hand()
        if known is not None:
            done(known)
        else:
            self._spawn(self._draw_from_coordination(done))

    async def _draw_from_coordination(self, done: Callable[[int | None], None]) -> None:
        try:
            drawn = await self.producer_ids.next()
        except HeadraceError:
            done(None)
        else:
            done(drawn)

    async def _create_share_state_topic(self, done: Callable[[], None]) -> None:
        with contextlib.suppress(HeadraceError):  # who waits for it hears that it is not there
            await self._topic_creation.ensure(SHARE_STATE_TOPIC)
        done()

    async def _create_dead_letter_topic(self, name: str, done: Callable[[str], None]) -> None:
        """As Kafka does: letters bear the time of their writing, whatever is usual in the cluster."""
        overrides = {DEAD_LETTERS_ENABLED: "true", "message.timestamp.type": "CreateTime"}
        try:
            await self._topic_creation.create(CreateTopic(name, overrides=overrides))
        except HeadraceError as error:
            done(f"topic {name!r} cannot be created: {error}")
        else:
            done("")

    async def _compute(self, work: Callable[[], bytearray], done: Callable[[bytearray | HeadraceError], None]) -> None:
        try:
            found = await self._participant.compute(work)
        except HeadraceError as error:
            done(error)
        else:
            done(found)

    def _knows(self, topic_id: bytes, partition: int) -> bool:
        topic = self._participant.view.image.topics_by_id.get(topic_id)
        return topic is not None and partition < len(topic.partitions)

    def _not_led_code(self, topic: str, index: int) -> int:
        return leader_lookup.not_led_code(self._participant.view.image, topic, index)

    def _decided(self, decision: Decision) -> None:
        """Offsets that were committed in a transaction count from here on, or are dropped."""
        partition = decision.partition
        where = partition.topic_partition
        if where.topic == OFFSETS_TOPIC:
            self.groups.end_transaction(
                where.partition, partition.epoch, decision.producer_id, committed=decision.committed
            )

    def _closed_transactions(self) -> Iterator[Sample]:
        for closed in self.transaction_partitions.closed():
            yield Sample(TRANSACTION_PARTITION_CLOSED, (str(closed.partition),), 1)

    def _closed_share_states(self) -> Iterator[Sample]:
        for closed in self.share_state_partitions.closed():
            yield Sample(SHARE_STATE_PARTITION_CLOSED, (str(closed.partition),), 1)

    def _topic_id(self, name: str) -> bytes | None:
        found = self._participant.view.image.topics.get(name)
        return None if found is None else found.id

    def _offsets_partitions(self) -> int:
        participant = self._participant
        topic = participant.view.image.topics.get(OFFSETS_TOPIC)
        return len(topic.partitions) if topic is not None else participant.settings["offsets.topic.partitions"]

    def _transactions_partitions(self) -> int:
        participant = self._participant
        topic = participant.view.image.topics.get(TRANSACTIONS_TOPIC)
        if topic is not None:
            return len(topic.partitions)
        return participant.settings["transaction.state.log.num.partitions"]

    def _share_state_partitions(self) -> int:
        participant = self._participant
        topic = participant.view.image.topics.get(SHARE_STATE_TOPIC)
        if topic is not None:
            return len(topic.partitions)
        return participant.settings["share.coordinator.state.topic.num.partitions"]
