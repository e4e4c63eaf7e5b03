"""A registry, built from the real ports: any number run side by side, keep nothing, and do not know each other.

It follows the cluster's keys in etcd into an image that is replaced whole, and answers from it. On its Kafka port it
has the brokers' own handlers over no partitions and no groups: routes are told as a broker tells them, topics are made
as a broker makes them, producers get their ids; who produces, fetches or joins a group here is told who leads. So any
client can use registries as its bootstrap servers and go on when one of them is gone. When etcd does not answer it goes
on with the image that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import uuid
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Changes
from headrace.cluster.config import Configs, EffectiveSettings
from headrace.cluster.image import NO_BROKER
from headrace.cluster.leadership import Leadership
from headrace.cluster.names import OFFSETS_TOPIC, SHARE_STATE_TOPIC, TRANSACTIONS_TOPIC
from headrace.cluster.producer_ids import ProducerIds
from headrace.cluster.topics import TopicCreation, Topics, limits_from
from headrace.cluster.user_values import UserValues
from headrace.cluster.view import ClusterView
from headrace.coordination.choice import on_etcd, open_etcd
from headrace.coordination.startup_wait import Patience
from headrace.coordinators.state_log import StateLog
from headrace.errors import CoordinationError, OperatorError, SettingError
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import limits_from as group_limits_from
from headrace.http.server import HttpServer
from headrace.http.services import HttpServices, ShareServices
from headrace.kafka import leader_lookup, listeners
from headrace.kafka.fetch_sessions import FetchSessions
from headrace.kafka.first_writes import FirstWrites
from headrace.kafka.peers import Peers
from headrace.kafka.server import KafkaServer
from headrace.kafka.services import Services
from headrace.kafka.share_sessions import ShareSessions
from headrace.metrics import Metrics
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Timer
from headrace.ports.coordination import KeyValue
from headrace.queues.delays import Delays
from headrace.queues.messages import ShareGroupConfig
from headrace.queues.persister import StatePersister
from headrace.queues.share_coordinator import ShareCoordinator
from headrace.queues.share_partitions import SharePartitions
from headrace.registry.cluster_view import AdvertisedView
from headrace.registry.empty_store import NoLogs
from headrace.registry.pulse import Pulse
from headrace.registry.route_api import RouteApi
from headrace.server import process
from headrace.settings.values import BrokerSettings
from headrace.storage.keys.builder import KeyIndexes
from headrace.system import descriptors
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork
from headrace.transactions.coordinator import TransactionCoordinator
from headrace.transactions.limits import limits_from as transaction_limits_from
from headrace.transactions.marker_appends import MarkerAppends

log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS: Final = 1.0
NO_FOLDER: Final = ""


class Registry:
    """`failed` is called when a part that must run has died."""

    def __init__(self, settings: BrokerSettings, loop: asyncio.AbstractEventLoop, failed: process.Failed) -> None:
        if not on_etcd(settings):
            raise SettingError("a registry follows a cluster on etcd: give --etcd HOST:PORT,... or set coordination")
        self._settings = settings
        self._failed = failed
        self._specs = listeners.parse_unadvertised(settings["registry.listen"], "registry.listen")
        self._background = process.OwnedTasks(loop, failed)
        self._built = contextlib.AsyncExitStack()
        self._clock = LoopClock(loop)
        self._network = SocketNetwork(loop, settings["receive.buffer.total.bytes"])
        self._disk = SystemDisk(loop, sync_helper=False)
        self._metrics = Metrics()
        self._http: HttpServer | None = None

    async def start(self) -> None:
        built, settings = self._built, self._settings
        self._coordination = open_etcd(settings, self._clock, self._owner(), secrets.randbits(16))
        built.push_async_callback(self._coordination.close)
        self.cluster_id = await self._find_cluster()
        self._prefix = keys.cluster_prefix(self.cluster_id)
        self._view = ClusterView(self._coordination, self._prefix, self._clock, self._failed)
        built.push_async_callback(self._view.close)
        await self._view.start()
        self._advertised = AdvertisedView(self._view, self._clock, settings["registry.drop.after.ms"] / 1000)
        built.callback(self._advertised.close)
        self._effective = EffectiveSettings(lambda: settings, lambda: self._view.image, NO_BROKER)
        self._pulse = Pulse(self._coordination, self._clock, self.cluster_id, self._failed)
        built.callback(self._background.cancel)
        self._background.spawn(self._pulse.run())
        self._listen(self._services())
        self._close_idle()
        built.callback(lambda: self._idle_timer.cancel())

    def _owner(self) -> str:
        """Of receipts in etcd: the same at every start in the same place, so that they do not pile up."""
        port = self._specs[0].address.port
        return f"registry-{socket.gethostname().replace('/', '-')}-{port or secrets.token_hex(4)}"

    async def _find_cluster(self) -> str:
        """A registry makes no cluster: it waits for etcd, and for the first broker."""
        wanted, where = self._settings["cluster.id"], self._settings["coordination"]
        patience = Patience(self._clock, f"a cluster in {where}", self._settings["coordination.wait.ms"])

        async def cluster() -> KeyValue:
            found = await self._coordination.get(keys.CLUSTER_ID)
            if found is None:
                raise CoordinationError(f"there is no cluster in {where}: start a broker with that coordination first")
            return found

        found = await patience.answer(cluster)
        cluster_id = str(keys.decode(found.key, found.value))
        if wanted and wanted != cluster_id:
            raise OperatorError(f"setting cluster.id is {wanted!r}, and etcd holds cluster {cluster_id!r}")
        return cluster_id

    def _services(self) -> Services:
        clock, disk, effective = self._clock, self._disk, self._effective
        self._changes = Changes(self._coordination, self._view)
        made = Topics(self._changes, lambda: limits_from(effective()), lambda: secrets.token_bytes(16), clock.wall_ms)
        self._partitions = Partitions(NoLogs(), clock, NO_BROKER)
        groups = GroupCoordinator(
            clock,
            StateLog(self._partitions, OFFSETS_TOPIC).append,
            0,  # it leads none
            lambda: str(uuid.uuid4()),
            group_limits_from(effective()),
            lambda _name: None,
        )
        self._built.callback(groups.close)
        transactions = TransactionCoordinator(
            clock,
            StateLog(self._partitions, TRANSACTIONS_TOPIC).append,
            0,  # it leads none
            lambda done: done(None),
            lambda _request, _wanted, _done: None,
            transaction_limits_from(effective()),
        )
        self._built.callback(transactions.close)
        peers = Peers(self._network, clock, NO_BROKER, lambda: self._view.image)
        self._peers = peers
        self._built.callback(peers.close)
        share_states = ShareCoordinator(
            clock,
            StateLog(self._partitions, SHARE_STATE_TOPIC).append,
            0,  # it leads none
            lambda _topic_id, _partition: False,
        )
        return Services(
            settings=self._settings,
            clock=clock,
            disk=disk,
            data_folder=None,
            metrics=self._metrics,
            broker_id=NO_BROKER,
            cluster_id=self.cluster_id,
            view=self._advertised,
            changes=self._changes,
            topics=made,
            configs=Configs(self._changes, effective),
            auto_topic_creation=TopicCreation(self._view, made, effective),
            partitions=self._partitions,
            leadership=Leadership(self._coordination, self._view, self._background.spawn),
            key_indexes=KeyIndexes(self._partitions.store, disk, clock, NO_FOLDER),
            groups=groups,
            transactions=transactions,
            marker_appends=MarkerAppends(self._partitions, self._not_led_code, lambda _decision: None),
            first_writes=FirstWrites(clock, self._partitions, lambda: self._view.image, transactions, peers.ask),
            share_states=share_states,
            producer_ids=ProducerIds(self._coordination, self._view, secrets.token_bytes),
            fetch_sessions=FetchSessions(0, clock.now, secrets.token_bytes),  # there is nothing to fetch
            share_sessions=ShareSessions(lambda: 0, lambda _key: None),
            share_partitions=self._share_partitions(share_states, peers),
            share_group_config=lambda _group: ShareGroupConfig(),
            delays=Delays(self._partitions, self._disk, ""),
            spawn=self._background.spawn,
            failed=self._failed,
            effective_settings=effective,
            compute=asyncio.to_thread,
        )

    def _share_partitions(self, share_states: ShareCoordinator, peers: Peers) -> SharePartitions:
        persister = StatePersister(
            self._clock,
            self._partitions,
            lambda: self._view.image,
            share_states,
            peers.ask,
            lambda done: done(),  # nobody asks it for a topic of brokers
            secrets.token_bytes,
        )
        return SharePartitions(self._partitions, self._disk, persister, lambda _group: ShareGroupConfig())

    def _not_led_code(self, topic: str, index: int) -> int:
        return leader_lookup.not_led_code(self._view.image, topic, index)

    def _listen(self, services: Services) -> None:
        settings, allowed = self._settings, descriptors.allowed()
        tls = listeners.tls_context(settings) if any(spec.tls for spec in self._specs) else None
        connections_max = min(settings["connections.max"], allowed.kafka_connections)
        self._server = KafkaServer(self._network, services, connections_max)
        self._built.callback(self._server.close)
        told = {name for broker in self._view.image.brokers.values() for name in broker.listeners}
        for spec in self._specs:
            if told and spec.name not in told:
                log.warning("no broker has a listener %r: clients of it are told of no broker", spec.name)
            self._server.bind(spec.name, spec.address, tls if spec.tls else None)
        if settings["registry.http.listen"] != "off":
            address = listeners.parse_address(settings["registry.http.listen"], "registry.http.listen")
            routes = RouteApi(self.cluster_id, lambda: self._advertised.image, UserValues(self._changes), self._pulse)
            self._metrics.collect(routes.samples)
            http_services = self._http_services(services)
            self._http = HttpServer(
                self._network, address, http_services, allowed.http_connections, routes=routes.routes
            )
            self._built.callback(self._http.close)
            self._http.start()

    def _http_services(self, services: Services) -> HttpServices:
        return HttpServices(
            settings=self._settings,
            clock=self._clock,
            disk=self._disk,
            metrics=self._metrics,
            broker_id=NO_BROKER,
            cluster_id=self.cluster_id,
            partitions=self._partitions,
            key_indexes=services.key_indexes,
            image=lambda: self._advertised.image,
            topics=services.topics,
            configs=services.configs,
            effective_settings=services.effective_settings,
            ensure_topic=services.auto_topic_creation.ensure,
            groups=services.groups,
            share=ShareServices(
                services.share_partitions, services.share_group_config, self._peers.ask, secrets.token_bytes
            ),
            group_lags=lambda: (),
            ready=lambda: None,
            spawn=self._background.spawn,
        )

    def _close_idle(self) -> None:
        self._idle_timer: Timer = self._clock.call_later(IDLE_CHECK_SECONDS, self._close_idle)
        if self._http is not None:
            self._http.close_idle()

    async def stop(self) -> process.Ending:
        await self._built.aclose()
        return process.Ending("connections closed")

    def listening(self) -> list[str]:
        return process.where(self._server.addresses, None if self._http is None else self._http.address)

    def described(self) -> str:
        return f"registry of cluster {self.cluster_id}"


def run(settings: BrokerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    return process.run(settings, lambda loop, failed: Registry(settings, loop, failed))
