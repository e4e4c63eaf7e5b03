"""The composition root: builds the real ports and every room on top of them, in order, and takes them down again.

Start: folder and coordination, the image, the logs, partitions, groups, then listeners, last the registration: nobody
is sent here before everything behind the listeners stands. Stop goes the other way; the logs are marked clean last.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, Final

import uvloop

from headrace import __version__, logs
from headrace.cluster import keys
from headrace.cluster.assignment import Assignment
from headrace.cluster.config import Configs, effective
from headrace.cluster.embedded import EmbeddedCoordination
from headrace.cluster.image import Broker, Endpoint, Image
from headrace.cluster.leadership import plan_new_epochs
from headrace.cluster.membership import Membership, settle_cluster_id
from headrace.cluster.tasks import Tasks
from headrace.cluster.topics import TopicLimits, Topics
from headrace.cluster.view import ClusterView
from headrace.cluster.waiting import pause
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import limits_from
from headrace.groups.offsets import OFFSETS_TOPIC
from headrace.http.server import HttpServer
from headrace.http.services import HttpServices
from headrace.kafka import listeners
from headrace.kafka.group_loading import GroupPartitions
from headrace.kafka.group_log import GroupLog
from headrace.kafka.producer_ids import ProducerIds
from headrace.kafka.server import KafkaServer, Listening
from headrace.kafka.services import Services
from headrace.kafka.topic_creation import TopicCreation
from headrace.metrics import Metrics
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Timer
from headrace.ports.network import Address
from headrace.settings import BrokerSettings, Value
from headrace.storage.folder import layout_of
from headrace.storage.keys.builder import KeyIndexes
from headrace.storage.keys.index import KeyLimits
from headrace.storage.layouts import Store, open_store
from headrace.storage.log import TopicPartition
from headrace.system import descriptors
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.1
STOP_SECONDS: Final = 30.0
LOAD_SECONDS: Final = 10.0
GC_ALLOCATIONS: Final = 50_000


class Node:
    """One broker. `failed` is called when a part that must run has died."""

    def __init__(
        self, settings: BrokerSettings, loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]
    ) -> None:
        self.settings = settings
        self._loop = loop
        self._failed = failed
        self._broker_id: int = settings["node.id"]
        self._folder = os.path.abspath(settings["data"])
        self._specs = listeners.parse(settings["listen"], settings["advertise"])
        self._tasks_under_way: set[asyncio.Task[None]] = set()
        self._built = contextlib.AsyncExitStack()
        self.metrics = Metrics()
        self.http: HttpServer | None = None
        self._effective: tuple[Image, BrokerSettings] | None = None
        self.clock = LoopClock(loop)

    async def start(self) -> None:
        settings = self.settings
        built = self._built
        self.disk = SystemDisk(self._loop, sync_helper=settings["sync.helper"])
        self._descriptors = descriptors.allowed()
        built.callback(self.disk.close)
        self.store = self._open_store()
        built.callback(self.store.close)
        # `auto` is settled now: whoever asks hears which layout it is.
        settled = {**settings.values, "log.layout": layout_of(self.disk, self._folder)}
        settings = self.settings = BrokerSettings(settled, settings.sources)
        self.coordination = EmbeddedCoordination(f"{self._folder}/coordination.sqlite", self.clock)
        built.push_async_callback(self.coordination.close)
        self.cluster_id = await settle_cluster_id(
            self.coordination, settings["cluster.id"], lambda: secrets.token_bytes(16)
        )
        prefix = keys.cluster_prefix(self.cluster_id)
        self.view = ClusterView(self.coordination, prefix, self.clock, self._failed)
        built.push_async_callback(self.view.close)
        await self.view.start()
        tasks = Tasks(self.coordination, self.view)
        self.topics = Topics(tasks, self._limits, lambda: secrets.token_bytes(16))
        await self.topics.finish_interrupted()
        self._open_logs()
        if not self.store.was_clean:
            await tasks.run(lambda image: plan_new_epochs(image, self._broker_id))
        self._serve_partitions()
        built.callback(self.groups.close)
        built.callback(self._cancel_tasks)
        await self._load_groups()
        creation = TopicCreation(self.view, self.topics, self.effective_settings)
        self.services = Services(
            settings=settings,
            clock=self.clock,
            disk=self.disk,
            data_folder=self._folder,
            metrics=self.metrics,
            broker_id=self._broker_id,
            cluster_id=self.cluster_id,
            view=self.view,
            topics=self.topics,
            configs=Configs(tasks, self.effective_settings),
            creation=creation,
            partitions=self.partitions,
            key_indexes=self.key_indexes,
            groups=self.groups,
            producer_ids=ProducerIds(self.coordination, prefix),
            spawn=self.spawn,
            failed=self._failed,
            effective=self.effective_settings,
            controller_id=lambda: self._broker_id,
        )
        endpoints = self._listen()
        http = Endpoint(self.http.address.host, self.http.address.port) if self.http is not None else None
        broker = Broker(self._broker_id, endpoints, secrets.token_hex(8), self.clock.wall_ms(), settings["rack"], http)
        self.membership = Membership(self.coordination, prefix, self.clock, broker, self._failed)
        built.push_async_callback(self.membership.close)
        await self.membership.start()
        self._tick()
        built.callback(lambda: self._ticker.cancel())

    def _open_store(self) -> Store:
        return open_store(
            self.disk,
            self.clock,
            self._folder,
            self.settings["log.layout"],
            retention_check_ms=self.settings["retention.check.ms"],
            checkpoint_ms=self.settings["checkpoint.ms"],
            producer_expire_ms=self.settings["producer.expire.ms"],
            archived_offset=self._archived_offset,
            open_segments_max=self._descriptors.segments,
            sync_files_max=self._descriptors.sync_files,
            commit_file_bytes=self.settings["commitlog.file.bytes"],
            rewrite_share=self.settings["commitlog.rewrite.share"],
        )

    def _listen(self) -> dict[str, Endpoint]:
        """Open all listeners; what clients are told of each."""
        settings = self.settings
        network = SocketNetwork(self._loop, settings["receive.buffer.total.bytes"])
        tls = listeners.tls_context(settings) if any(spec.tls for spec in self._specs) else None
        self.server = KafkaServer(network, self.services, self._connections_max())
        self._built.callback(self.server.close)
        endpoints = {}
        for spec in self._specs:
            real = self.server.bind(Listening(spec.name, spec.address, tls if spec.tls else None))
            told = spec.advertised or real
            endpoints[spec.name] = Endpoint(told.host, told.port or real.port)
        if settings["http.listen"] != "off":
            address = listeners.parse_address(settings["http.listen"], "http.listen")
            self.http = HttpServer(network, address, self._http_services(), self._descriptors.http_connections)
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
        return HttpServices(
            settings=self.settings,
            clock=self.clock,
            disk=self.disk,
            metrics=self.metrics,
            broker_id=self._broker_id,
            cluster_id=self.cluster_id,
            partitions=self.partitions,
            key_indexes=self.key_indexes,
            image=lambda: self.view.image,
            ensure_topic=self.services.creation.ensure,
            group_lags=lambda: self.groups.lags(self._end_offset),
            ready=self._why_not_ready,
            spawn=self.spawn,
        )

    def _end_offset(self, topic: str, index: int) -> int | None:
        partition = self.partitions.find(topic, index)
        return partition.high_watermark if partition is not None else None

    def _why_not_ready(self) -> str | None:
        if not hasattr(self, "membership") or not self.membership.standing:
            return "the broker is not registered with the cluster"
        return None

    def effective_settings(self) -> BrokerSettings:
        """With what was altered while running; made anew only when the image has changed."""
        image = self.view.image
        if self._effective is None or self._effective[0] is not image:
            self._effective = image, effective(self.settings, image, self._broker_id)
        return self._effective[1]

    def _follow_log_level(self, _old: Image, _new: Image) -> None:
        logging.getLogger().setLevel(self.effective_settings()["log.level"].upper())

    def _limits(self) -> TopicLimits:
        settings = self.effective_settings()
        return TopicLimits(
            settings["num.partitions"],
            settings["default.replication.factor"],
            settings["partitions.max"],
            settings["log.placement"],
        )

    def _topic_defaults(self, image: Image) -> dict[str, Value]:
        return effective(self.settings, image, self._broker_id).topic_defaults()

    def _open_logs(self) -> None:
        self.partitions = Partitions(self.store, self.clock, self._broker_id)
        self.assignment = Assignment(
            self._broker_id, self.store, self.partitions, self._topic_defaults, lambda _: None, lambda _: None
        )
        self.store.open(self.assignment.expected(self.view.image))
        limits = KeyLimits(self.settings["key.index.entries"], self.settings["key.index.slots"])
        self.key_indexes = KeyIndexes(self.store, self.disk, self.clock, self._folder, limits)
        self._built.callback(self.key_indexes.close)

    def _serve_partitions(self) -> None:
        self.group_log = GroupLog(self.partitions)
        self.groups = GroupCoordinator(
            self.clock,
            self.group_log.append,
            self._offsets_partitions,
            lambda: str(uuid.uuid4()),
            lambda: limits_from(self.effective_settings()),
        )
        self.store.on_sync(self.metrics.syncs.add)
        self.group_partitions = GroupPartitions(self.partitions, self.groups, self.disk, lambda: self.view.image)
        self.assignment.start(self.view.image)
        self.group_partitions.follow()
        self.view.listen(self.assignment.follow)
        self.view.listen(self._follow_groups)
        self.view.listen(self._follow_log_level)

    async def _load_groups(self) -> None:
        """Clients find their groups at once; but a start does not wait for ever, nor for other brokers."""
        give_up = self.clock.now() + LOAD_SECONDS
        while self.group_partitions.reading and self.clock.now() < give_up:
            await pause(self.clock, 0.001)

    def _follow_groups(self, old: Image, new: Image) -> None:
        self.group_partitions.follow()
        self.group_partitions.forget_topics(old, new)

    def _archived_offset(self, where: TopicPartition) -> int:
        """What storage may take as archived; 0 while the group has committed nothing or cannot be asked."""
        group = self.effective_settings()["archive.group"]
        return self.groups.committed_offset(group, where.topic, where.partition) or 0

    def _offsets_partitions(self) -> int:
        topic = self.view.image.topics.get(OFFSETS_TOPIC)
        return len(topic.partitions) if topic is not None else self.settings["offsets.topic.partitions"]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks_under_way.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks_under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _tick(self) -> None:
        self._ticker: Timer = self.clock.call_later(TICK_SECONDS, self._tick)
        self.store.tick()
        self.key_indexes.tick()
        self.assignment.retry()
        self.group_partitions.follow()
        if self.http is not None:
            self.http.close_idle()

    async def stop(self) -> None:
        """Take down what has been built, in reverse; safe at any point of a start that failed."""
        await self._built.aclose()

    def _cancel_tasks(self) -> None:
        for task in list(self._tasks_under_way):
            task.cancel()

    def addresses(self) -> dict[str, Address]:
        return dict(self.server.addresses)


def run(settings: BrokerSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    logs.setup(settings["log.format"], settings["log.level"])
    return uvloop.run(_serve(settings))


async def _serve(settings: BrokerSettings) -> int:
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[BaseException | None] = loop.create_future()

    def stop(error: BaseException | None = None) -> None:
        if not stopping.done():
            stopping.set_result(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    node = Node(settings, loop, stop)
    try:
        await node.start()
        _quieten_collector()
        _say_ready(node)
        error = await stopping
        if error is not None:
            log.error("stopping: a part of the broker failed: %r", error, exc_info=error)
    finally:
        await asyncio.wait_for(node.stop(), STOP_SECONDS)
    return 0 if error is None else 1


def _quieten_collector() -> None:
    """What stands after the start stands for good; looking through it again and again would only stop the loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    gc.enable()


def _say_ready(node: Node) -> None:
    """One line on standard output for people and scripts: where to connect."""
    where = [
        ("kafka=" if name == listeners.DEFAULT_NAME else f"kafka.{name}=") + str(address)
        for name, address in node.addresses().items()
    ]
    if node.http is not None:
        where.append(f"http={node.http.address}")
    sys.stdout.write(" ".join(("ready", *where, f"pid={os.getpid()}")) + "\n")
    sys.stdout.flush()
    log.info("headrace %s on %s, cluster %s", __version__, socket.gethostname(), node.cluster_id)
