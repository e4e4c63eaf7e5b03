"""The composition root: builds the real ports and every room on top of them, in order, and takes them down again.

Start: helper processes, the broker's part in its cluster (`cluster.participant`) which leads nothing yet, groups, then
listeners, last the registration: nobody is sent here before everything behind the listeners stands. Stop goes the other
way: first others take over what is led here, while clients are still served; the logs are marked clean last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import uuid
from collections.abc import Callable

from headrace.cluster.image import Endpoint, Image
from headrace.cluster.participant import Participant
from headrace.coordination.choice import on_etcd, open_coordination
from headrace.http.server import HttpServer
from headrace.http.services import HttpServices, ShareServices
from headrace.kafka import listeners
from headrace.kafka.front_end import FrontEnd
from headrace.metrics import Metrics
from headrace.ports.clock import Timer
from headrace.ports.network import Address
from headrace.server import process
from headrace.server.archive_progress import ArchivedOffsets
from headrace.server.process import Ending, OwnedTasks
from headrace.settings.values import BrokerSettings
from headrace.storage.log import TICK_SECONDS, TopicPartition
from headrace.system import descriptors
from headrace.system.boot import boot_id
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork

log = logging.getLogger(__name__)


class Node:
    """One broker. `failed` is called when a part that must run has died."""

    def __init__(
        self, settings: BrokerSettings, loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]
    ) -> None:
        self._failed = failed
        self._specs = listeners.parse(settings["listen"], settings["advertise"])
        between = listeners.replication(settings, clustered=on_etcd(settings))
        self._background = OwnedTasks(loop, failed)
        self._built = contextlib.AsyncExitStack()
        self.metrics = Metrics()
        self.http: HttpServer | None = None
        self.archived: ArchivedOffsets | None = None
        self.clock = LoopClock(loop)
        # The helper process is started before anything that starts threads.
        self.disk = SystemDisk(loop, sync_helper=settings["sync.helper"])
        self._built.callback(self.disk.close)
        self._descriptors = descriptors.allowed()
        self.network = SocketNetwork(loop, settings["receive.buffer.total.bytes"])
        self.participant = self._participant(settings, *between)
        self._built.push_async_callback(self.participant.close)

    def _participant(self, settings: BrokerSettings, listen: Address | None, advertise: Address | None) -> Participant:
        folder = os.path.abspath(settings["data"])
        return Participant(
            self.disk,
            self.clock,
            self.network,
            lambda: open_coordination(settings, folder, self.clock),
            settings,
            folder,
            draw=secrets.token_bytes,
            failed=self._failed,
            listen=listen,
            advertise=advertise,
            tls=listeners.replication_tls(settings),
            boot=boot_id(),
            archived_offset=self._archived_offset,
            open_segments_max=self._descriptors.segments,
            sync_files_max=self._descriptors.sync_files,
            compute=asyncio.to_thread,
        )

    async def start(self) -> None:
        built, participant = self._built, self.participant
        await participant.open()
        self.settings = participant.settings
        built.callback(self._background.cancel)
        self.front_end = FrontEnd(
            participant,
            self.network,
            self.metrics,
            connections_max=self._connections_max(),
            draw_id=lambda: str(uuid.uuid4()),
            spawn=self._background.spawn,
            failed=self._failed,
            peer_listeners=listeners.peer_listeners(self._specs, participant.settings),
        )
        built.callback(self.front_end.close)
        participant.view.listen(self._follow_log_level)
        endpoints = self._listen()
        http = Endpoint(self.http.address.host, self.http.address.port) if self.http is not None else None
        self._open_archived()
        await participant.join(endpoints, http)
        await self.front_end.load_coordinators()
        self._tick()
        built.callback(lambda: self._ticker.cancel())

    def _listen(self) -> dict[str, Endpoint]:
        """Open all listeners; what clients are told of each."""
        settings = self.settings
        tls = listeners.tls_context(settings) if any(spec.tls for spec in self._specs) else None
        endpoints = {}
        for spec in self._specs:
            real = self.front_end.server.bind(spec.name, spec.address, tls if spec.tls else None)
            told = spec.advertised or real
            endpoints[spec.name] = Endpoint(told.host, told.port or real.port)
        if settings["http.listen"] != "off":
            address = listeners.parse_address(settings["http.listen"], "http.listen")
            self.http = HttpServer(self.network, address, self._http_services(), self._descriptors.http_connections)
            self._built.callback(self.http.close)
            self.http.start()
        return endpoints

    def _connections_max(self) -> int:
        wanted: int = self.settings["connections.max"]
        allowed = self._descriptors.kafka_connections
        if wanted > allowed:
            log.warning(
                "the limit of open files leaves room for %d connections, not for connections.max, %d: raise the limit",
                allowed, wanted,
            )  # fmt: skip
        return min(wanted, allowed)

    def _http_services(self) -> HttpServices:
        participant = self.participant
        return HttpServices(
            settings=self.settings,
            clock=self.clock,
            disk=self.disk,
            metrics=self.metrics,
            broker_id=participant.broker_id,
            cluster_id=participant.cluster_id,
            partitions=participant.partitions,
            key_indexes=self.front_end.key_indexes,
            image=lambda: participant.view.image,
            topics=participant.topics,
            configs=participant.configs,
            effective_settings=participant.effective_settings,
            ensure_topic=self.front_end.services.auto_topic_creation.ensure,
            groups=self.front_end.groups,
            share=ShareServices(
                self.front_end.share_partitions,
                self.front_end.services.share_group_config,
                self.front_end.peers.ask,
                secrets.token_bytes,
            ),
            group_lags=lambda: self.front_end.groups.lags(self._end_offset),
            closed_groups=lambda: self.front_end.group_partitions.closed(),
            ready=self._why_not_ready,
            spawn=self._background.spawn,
        )

    def _end_offset(self, topic: str, index: int) -> int | None:
        """As far as it is known here: a follower's watermark is a little behind its leader's."""
        partition = self.participant.partitions.find_replica(topic, index)
        return partition.high_watermark if partition is not None else None

    def _why_not_ready(self) -> str | None:
        if not self.participant.standing:
            return "the broker is not registered with the cluster"
        if self.participant.metadata.is_held:
            return (
                "the cluster's metadata was put back to an older copy: see headrace cluster accept-metadata --dry-run"
            )
        return None

    def _follow_log_level(self, _old: Image, _new: Image) -> None:
        logging.getLogger().setLevel(self.participant.effective_settings()["log.level"].upper())

    def _open_archived(self) -> None:
        plain = next((self.front_end.server.addresses[spec.name] for spec in self._specs if not spec.tls), None)
        self.archived = ArchivedOffsets(
            self.clock,
            self.participant.partitions,
            self.front_end.groups,
            lambda: self.participant.view.image,
            lambda: self.participant.effective_settings()["archive.group"],
            None if plain is None else str(plain),
            self._background.spawn,
        )

    def _archived_offset(self, where: TopicPartition) -> int:
        return 0 if self.archived is None else self.archived.offset(where)

    def _tick(self) -> None:
        self._ticker: Timer = self.clock.call_later(TICK_SECONDS, self._tick)
        self.front_end.tick()
        if self.archived is not None:
            self.archived.tick()
        if self.http is not None:
            self.http.close_idle()

    async def stop(self) -> Ending:
        """Take down what has been built, in reverse; safe at any point of a start that failed."""
        await self.participant.leave()
        await self._built.aclose()
        logs = self.participant.closed_logs
        undone = "" if logs.clean else f"not all logs could be marked as whole; {process.RECOVERED}"
        return Ending(f"{logs.count} partition{'s' * (logs.count != 1)} closed", undone)

    def listening(self) -> list[str]:
        http = None if self.http is None else self.http.address
        return process.where(self.front_end.server.addresses, http)

    def described(self) -> str:
        return f"broker {self.participant.broker_id} of cluster {self.participant.cluster_id}"


def run(settings: BrokerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    return process.run(settings, lambda loop, failed: Node(settings, loop, failed))
