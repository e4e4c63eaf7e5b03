"""One broker's part in a cluster, without any front end: its logs, its replicas, its registration, and its candidacy.

All ports come from outside, so that the real broker (`server.node`) and the simulator run the same. `open` brings up
the store, the view of the cluster and the replicas, which stand by; `join` registers, and the controller then says what
this process leads. `leave` hands leaderships over while everything still runs; `close` takes down. A cluster of
one goes the same road: it elects itself and carries itself over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from headrace.cluster import keys
from headrace.cluster.assignment import Assignment
from headrace.cluster.changes import Changes
from headrace.cluster.config import Configs, EffectiveSettings, durability_altered_at, effective
from headrace.cluster.controller import Controller
from headrace.cluster.controller_core import Rules
from headrace.cluster.deletions import Deletions
from headrace.cluster.image import LIVE, NO_LEADER, Broker, Endpoint, Image, PartitionState, Previous, Topic
from headrace.cluster.incarnation import IncarnationFile
from headrace.cluster.isr_writer import IsrWriter
from headrace.cluster.lineage import MetadataWatch
from headrace.cluster.membership import ClusterAccess, Membership, settle_cluster_id
from headrace.cluster.replica_reports import ReplicaReports
from headrace.cluster.topics import Topics, limits_from
from headrace.cluster.view import ClusterView
from headrace.coordination.choice import etcd_addresses, on_etcd
from headrace.coordination.startup_wait import Patience
from headrace.coordination.waits import Compute, at_once
from headrace.errors import CoordinationError, RequestTimedOut, StorageFailed
from headrace.partitions.partitions import Partitions
from headrace.placement.internal_topics import internal_replicas
from headrace.ports.clock import Clock, Timer
from headrace.ports.coordination import Coordination
from headrace.ports.disk import Disk
from headrace.ports.network import Address, Network
from headrace.replication.replication import LinkTls, Replication, ReplicationSettings
from headrace.settings.values import BrokerSettings, Value, read_topic_overrides
from headrace.storage import folder, shortfall
from headrace.storage.layouts import Store, open_store
from headrace.storage.log import TICK_SECONDS, Log, TopicPartition
from headrace.storage.shortfall import NOTHING, Held, key_of
from headrace.storage.watermarks import Key, Watermarks

log = logging.getLogger(__name__)

JOIN_SECONDS: Final = 5.0
"""How long a start waits for the controller to say what this process leads."""
LEAVE_SECONDS: Final = 5.0
"""How long a stop waits for others to take over."""
INCARNATION_BYTES: Final = 8
LOOK_SECONDS: Final = 1.0
"""How often logs are looked at for those that are offline."""
LOST_MAX: Final = 10_000
"""Logs that a registration names as holding less; with more of them, nothing counts as held."""


@dataclass(frozen=True, slots=True)
class ClosedLogs:
    count: int
    clean: bool
    """Whether all of them are synced, and marked so."""


class Participant:
    """`failed` is called when a part that must run has died. `draw` answers so many random bytes. `connect` opens
    coordination, once the data folder is ours. `listen` is the port for the other brokers, `advertise` what they are
    told of it; without one this broker can follow and not be followed. `compute` runs pure work that takes long.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        network: Network,
        connect: Callable[[], Coordination],
        settings: BrokerSettings,
        folder: str,
        *,
        draw: Callable[[int], bytes],
        failed: Callable[[BaseException], None],
        listen: Address | None = None,
        advertise: Address | None = None,
        tls: LinkTls | None = None,
        boot: str = "",
        archived_offset: Callable[[TopicPartition], int] = lambda _: 0,
        open_segments_max: int = 1000,
        sync_files_max: int = 1000,
        compute: Compute = at_once,
    ) -> None:
        self.broker_id: int = settings["node.id"]
        self.settings = settings
        self.disk = disk
        self.clock = clock
        self.folder = folder
        self.incarnation = draw(INCARNATION_BYTES).hex()
        self._connect = connect
        self.draw = draw
        self._failed = failed
        self._network = network
        self._tls = tls
        self._listen = listen
        self._advertise = advertise
        self._boot = boot
        self._archived_offset = archived_offset
        self._open_segments_max = open_segments_max
        self._sync_files_max = sync_files_max
        self.compute = compute
        self._built = contextlib.AsyncExitStack()
        self.effective_settings = EffectiveSettings(lambda: self.settings, lambda: self.view.image, self.broker_id)
        self._rules: dict[str, tuple[Topic, BrokerSettings, Rules]] = {}
        self._replication_end: Endpoint | None = None
        self._look_again_at = 0.0
        self._joined = False
        self.closed_logs = ClosedLogs(0, clean=True)
        self.membership: Membership | None = None
        self.controller: Controller | None = None

    # Coming up.

    async def start(self) -> None:
        """Everything, for who has no front end."""
        await self.open()
        await self.join({})

    async def open(self) -> None:
        """Store, view and replicas; nothing is led yet. What was opened is closed by `close`, also after a failure."""
        built = self._built
        self.store = self._open_store()
        built.callback(self._close_store)
        # `auto` is settled now: whoever asks hears which layout it is.
        settled = {**self.settings.values, "log.layout": folder.layout_of(self.disk, self.folder)}
        self.settings = BrokerSettings(settled, self.settings.sources)
        self.coordination = self._connect()
        built.push_async_callback(self.coordination.close)
        self.cluster_id = await self._find_cluster()
        self.prefix = keys.cluster_prefix(self.cluster_id)
        self.view = ClusterView(self.coordination, self.prefix, self.clock, self._failed)
        built.push_async_callback(self.view.close)
        await self.view.start()
        self.metadata = MetadataWatch(
            self.coordination,
            self.view,
            self.clock,
            self.disk,
            self.folder,
            self.broker_id,
            self.cluster_id,
            self._failed,
        )
        self.metadata.start()
        built.push_async_callback(self.metadata.close)
        self.changes = Changes(self.coordination, self.view)
        self.topics = Topics(
            self.changes, lambda: limits_from(self.effective_settings()), lambda: self.draw(16), self.clock.wall_ms
        )
        self.configs = Configs(self.changes, self.effective_settings)
        if not self.view.image.brokers and not self.metadata.is_held:  # nobody can be creating one
            await self.topics.finish_interrupted()
        self._open_replicas()
        self._ticker: Timer = self.clock.call_later(TICK_SECONDS, self._tick)
        built.callback(lambda: self._ticker.cancel())

    async def _find_cluster(self) -> str:
        def settle() -> Awaitable[str]:
            return settle_cluster_id(self.coordination, self.settings["cluster.id"], lambda: self.draw(16))

        if not on_etcd(self.settings):
            return await settle()
        where = ",".join(etcd_addresses(self.settings["coordination"]))
        return await Patience(self.clock, f"etcd at {where}", self.settings["coordination.wait.ms"]).answer(settle)

    def _open_store(self) -> Store:
        settings = self.settings
        return open_store(
            self.disk,
            self.clock,
            self.folder,
            settings["log.layout"],
            retention_check_ms=settings["retention.check.ms"],
            cleaner_backoff_ms=settings["log.cleaner.backoff.ms"],
            checkpoint_ms=settings["checkpoint.ms"],
            producer_expire_ms=settings["producer.expire.ms"],
            archived_offset=self._archived_offset,
            open_segments_max=self._open_segments_max,
            sync_files_max=self._sync_files_max,
            commit_file_bytes=settings["commitlog.file.bytes"],
            rewrite_share=settings["commitlog.rewrite.share"],
        )

    def _open_replicas(self) -> None:
        watermarks = Watermarks(self.disk, self.clock, self.folder, lambda: self.partitions.watermarks())
        self.watermarks = watermarks
        committed, held = watermarks.read(), shortfall.held(self.disk, self.folder)
        self.partitions = Partitions(self.store, self.clock, self.broker_id, self.incarnation, committed)
        self.replication = Replication(
            self._network,
            self.partitions,
            self.clock,
            self.broker_id,
            self.incarnation,
            self.cluster_id,
            self._replication_settings(),
            self.disk,
            self._tls,
        )
        self._built.callback(watermarks.close)
        self._built.callback(self.replication.close)
        self.assignment = Assignment(
            self.broker_id,
            self.incarnation,
            self.clock,
            self.store,
            self.partitions,
            self.replication,
            self._topic_defaults,
            self._is_held,
            self.metadata.compare_logs,
        )
        self._record = IncarnationFile(self.disk, self.folder)
        if held is None and self._record.run is None:
            held = {}  # nobody has run here: nothing was held
        if not self.metadata.is_held:
            folder.remove_deleted(self.disk, self.folder, self.view.image.deleted)
        there = folder.topic_ids(self.disk, self.folder)
        named_late = self.settings["log.layout"] == folder.SHARED
        expected = self.assignment.expected(self.view.image, there, named_late=named_late)
        lost: set[Key] = set()
        same_boot = self._same_boot()
        self.store.open(
            expected, lambda: lost.update(self._note_shortfall(held, committed, same_boot)), same_boot=same_boot
        )
        self._make_room_for_copies(lost, held)
        self.store.on_durable(self._look_at)
        if self._listen is not None:
            real = self.replication.listen(self._listen)
            told = self._advertise or real
            self._replication_end = Endpoint(told.host, told.port or real.port)
        self.metadata.logs = self.store.logs
        self.metadata.compare_logs()
        self._follow_peers(self.view.image, self.view.image)
        self.assignment.start(self.view.image)
        watermarks.open()
        self.view.listen(self._follow_peers)
        self.view.listen(self._follow_settings)
        self.view.listen(self.assignment.follow)

    def _same_boot(self) -> bool:
        """Whether the kernel is known to have run on since the run before."""
        previous = self._record.run
        return previous is not None and previous.boot == self._boot != ""

    def _note_shortfall(
        self, held: Mapping[Key, Held] | None, committed: Mapping[Key, int], same_boot: bool
    ) -> frozenset[Key]:
        """Told before the store writes its checkpoint anew: a start after that would find nothing amiss any more."""
        lost = shortfall.short(self.store.logs(), held, committed) | shortfall.doubtful(self.store.logs(), same_boot)
        self._record.lost(lost | self._offline())
        return lost

    def _make_room_for_copies(self, lost: Collection[Key], held: Mapping[Key, Held] | None) -> None:
        for each in [each for each in self.store.logs() if key_of(each) in lost]:
            log.error("%s may hold less than it did: this broker joins its in-sync set anew", each.topic_partition)
            before = (held or {}).get(key_of(each), NOTHING)
            state = self.view.image.partition(each.topic_partition.topic, each.topic_partition.partition)
            if shortfall.lost_all(each, before) and state is not None and len(state.replicas) > 1:
                each.restart_at(before.start_offset)  # to be copied from there, not only from the end on

    def _replication_settings(self) -> ReplicationSettings:
        return ReplicationSettings(
            window_bytes=self.settings["replica.window.bytes"],
            catchup_bytes_per_second=self.effective_settings()["replica.catchup.bytes.per.second"],
            link_timeout_ms=self.settings["replica.link.timeout.ms"],
            lag_time_max_ms=self.settings["replica.lag.time.max.ms"],
            round_max_ms=self.settings["replica.round.max.ms"],
        )

    async def join(self, listeners: Mapping[str, Endpoint], http: Endpoint | None = None) -> None:
        """Register, and lead what the controller says; it is waited for, but not for ever."""
        previous = self._record.run
        broker = Broker(
            self.broker_id,
            listeners,
            self.incarnation,
            self.clock.wall_ms(),
            self.settings["rack"],
            http,
            replication=self._replication_end,
            boot=self._boot,
            previous=_registered(previous),
        )
        lease_seconds = self.settings["broker.lease.ms"] / 1000
        member = self.membership = Membership(
            self.coordination, self.prefix, self.clock, broker, self._failed, lease_seconds
        )
        synced = all(each.durable_offset >= each.written_offset for each in self.store.logs())
        began = self.view.image.revision if synced else 0
        self._record.write(Previous(self.incarnation, self._boot, clean=False, lost=self._offline(), began=began))
        try:
            await member.start()
        except (Exception, asyncio.CancelledError):  # a signal cancels it
            await member.close()
            if previous is not None:  # logs are as they were: what ran here before still says what they hold
                self._record.write(replace(previous, lost=previous.lost | self._offline()))
            raise
        self._joined = True
        self._built.push_async_callback(member.close)
        self.assignment.join()
        self.view.listen(member.follow)
        cluster = ClusterAccess(self.coordination, self.view, member, self.clock, self._failed, self._is_held)
        self.isr_writer = IsrWriter(cluster, self.partitions)
        self.replication.on_change = self.isr_writer.want
        self.replication.on_failure = self._failed
        self.reports = ReplicaReports(cluster, self.partitions)
        prefer_seconds = self.settings["leader.rebalance.ms"] / 1000
        self.controller = Controller(
            cluster,
            self.rules_of,
            prefer_seconds,
            self.compute,
            lambda: internal_replicas(self.effective_settings()),
        )
        deletions = Deletions(cluster, self.disk, self.folder, self.store)
        for part in (self.isr_writer, self.reports, self.controller, deletions):
            part.start()
            self._built.push_async_callback(part.close)
        try:
            await self.view.wait_for(self._is_settled, JOIN_SECONDS)
        except RequestTimedOut:
            log.warning("no controller has said in %g s what this broker leads; going on without", JOIN_SECONDS)

    def _is_held(self) -> bool:
        return self.metadata.is_held

    def _is_settled(self, image: Image) -> bool:
        if self.metadata.is_held:
            return True
        own = image.brokers.get(self.broker_id)
        if own is None or own.incarnation != self.incarnation:
            return False
        return not any(self._is_open(state) for topic in image.topics.values() for state in topic.partitions)

    def _is_open(self, state: PartitionState) -> bool:
        """Whether the controller has yet to look at what this process means for the partition."""
        if state.leader == self.broker_id:
            return state.incarnations.get(self.broker_id) != self.incarnation
        return state.leader == NO_LEADER and state.replicas == (self.broker_id,)

    # Running.

    @property
    def standing(self) -> bool:
        """Whether this broker is registered for certain."""
        return self.membership is not None and self.membership.standing

    def rules_of(self, topic: Topic) -> Rules:
        """What a topic's settings say about elections."""
        settings = self.effective_settings()
        known = self._rules.get(topic.name)
        if known is None or known[0] is not topic or known[1] is not settings:
            values = {**settings.topic_defaults(), **read_topic_overrides(topic.overrides)}
            durability = self.assignment.settings_of(self.view.image, topic).durability
            altered_at = durability_altered_at(self.view.image, topic)
            rules = Rules(durability, bool(values["unclean.leader.election.enable"]), altered_at)
            self._rules[topic.name] = known = topic, settings, rules
        return known[2]

    def _topic_defaults(self, image: Image) -> dict[str, Value]:
        return effective(self.settings, image, self.broker_id).topic_defaults()

    def _follow_peers(self, old: Image, new: Image) -> None:
        if old is new or old.brokers is not new.brokers:
            # Where a broker stands is remembered while its registration is away.
            self.partitions.racks.update({broker.id: broker.rack for broker in new.brokers.values()})
            self.replication.peers(
                {
                    broker.id: (Address(broker.replication.host, broker.replication.port), broker.incarnation)
                    for broker in new.brokers.values()
                    if broker.id != self.broker_id and broker.replication is not None
                }
            )

    def _follow_settings(self, old: Image, new: Image) -> None:
        if old.cluster_config is not new.cluster_config or old.broker_configs is not new.broker_configs:
            self.replication.limit_catchup(self.effective_settings()["replica.catchup.bytes.per.second"])

    def _tick(self) -> None:
        self._ticker = self.clock.call_later(TICK_SECONDS, self._tick)
        self.tick()

    def tick(self) -> None:
        """Runs every 100 ms by itself."""
        self.store.tick()
        self.replication.tick()
        self.assignment.retry()
        self.watermarks.tick()
        self.metadata.tick()
        if self.clock.now() >= self._look_again_at:
            self._look_again_at = self.clock.now() + LOOK_SECONDS
            self._tell_offline()
        if self.controller is not None:
            self.controller.tick()
            self.reports.tick()

    def _look_at(self, synced: Log) -> None:
        if synced.offline is not None and not self._record.tells_of(key_of(synced)):
            self._tell_offline()

    def _tell_offline(self) -> None:
        try:
            self._record.lost(self._offline())
        except OSError as error:
            log.error("that logs are offline cannot be kept for the next start; tried again: %s", error)

    def _offline(self) -> frozenset[Key]:
        return frozenset(key_of(each) for each in self.store.logs() if isinstance(each.offline, StorageFailed))

    # Going down.

    async def stop(self) -> None:
        await self.leave()
        await self.close()

    async def leave(self) -> None:
        """Have others take over what they can; returns when they have, or after a while."""
        if not self._joined or self.membership is None:
            return
        try:
            await self.membership.leave()
            await self.view.wait_for(lambda image: not self._can_hand_over(image), LEAVE_SECONDS)
        except (CoordinationError, RequestTimedOut) as error:
            log.warning("stopping before others have taken over all that this broker leads: %s", error)

    def _can_hand_over(self, image: Image) -> bool:
        """Whether something that this broker leads could be led by another member of its in-sync set."""
        staying = {
            broker.id: broker.incarnation
            for broker in image.brokers.values()
            if broker.id != self.broker_id and broker.state == LIVE
        }
        return any(
            state.leader == self.broker_id
            and any(drawn == staying.get(member) for member, drawn in state.incarnations.items())
            for topic in image.topics.values()
            for state in topic.partitions
        )

    async def close(self) -> None:
        """Take down what has been built, in reverse; safe at any point of a start that failed."""
        await self._built.aclose()

    def _close_store(self) -> None:
        count = len(list(self.store.logs()))
        clean = self.store.close()
        if not self._joined:  # nothing was served: what is there says of itself what it is
            return
        self.closed_logs = ClosedLogs(count, clean and not self._offline())
        if self._offline():
            self._tell_offline()
        elif clean:
            self._record.write(Previous(self.incarnation, self._boot, clean=True))


def _registered(previous: Previous | None) -> Previous | None:
    """What others are told of the run before."""
    if previous is not None and len(previous.lost) > LOST_MAX:
        return None
    return previous
