"""An HTTP port in this process: real sockets, a real loop in a thread of its own, a real store in a folder."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from chosen_layout import new_store
from headrace.cluster.config import Configs
from headrace.cluster.image import Broker, Image, PartitionState, Topic
from headrace.cluster.names import OFFSETS_TOPIC, is_reserved
from headrace.cluster.topics import Topics, limits_from
from headrace.coordinators.state_log import StateLog
from headrace.coordinators.state_partitions import ClosedPartition, StatePartitions
from headrace.errors import UnknownPartition
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.descriptions import Lag
from headrace.groups.limits import limits_from as group_limits_from
from headrace.groups.offsets import OFFSETS
from headrace.groups.share_groups import NoPersister
from headrace.http.server import HttpServer
from headrace.http.services import HttpServices, ShareServices
from headrace.metrics import Metrics
from headrace.partitions.partitions import Partitions
from headrace.ports.disk import Disk
from headrace.ports.network import Address
from headrace.queues.messages import ShareGroupConfig
from headrace.queues.share_partitions import SharePartitions
from headrace.settings.topic_name import check_topic_name
from headrace.settings.values import load, log_settings
from headrace.storage.keys.builder import KeyIndexes
from headrace.storage.log import TopicPartition
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork
from headrace.virtual.disk import VirtualDisk
from image_changes import ImageChanges

DEADLINE_SECONDS = 120.0
BROKER = 7
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


def no_share_groups(partitions: Partitions, disk: Disk) -> ShareServices:
    """Where no state of a share group can be kept."""

    def refuse(*_: Any, **_more: Any) -> None:
        raise AssertionError("no other broker is asked")

    config = ShareGroupConfig()
    shared = SharePartitions(partitions, disk, NoPersister(), lambda _: config)
    return ShareServices(shared, lambda _: config, refuse, secrets.token_bytes)


class HttpPort:
    """Topics are created by the test, or by a request when `auto_create` is set. With `faulty` the disk is the one in
    memory, `port.faults`, that can be filled, damaged and cooled down."""

    def __init__(self, folder: Path, *, faulty: bool = False, **settings: object) -> None:
        self._faulty = faulty
        self.auto_create = True
        self.unready: str | None = None
        self.lags: list[Lag] = []
        self.closed: list[ClosedPartition] = []
        self.metrics = Metrics()
        self._folder = folder
        self._settings = load(environment={}, flags={name.replace("_", "."): value for name, value in settings.items()})
        self._loop = uvloop.new_event_loop()
        self.failures: list[object] = []
        self._loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.on_loop(self._start)

    def _start(self) -> None:
        self.clock = LoopClock(self._loop)
        self.faults = VirtualDisk(self.clock)
        self.disk: Disk = self.faults if self._faulty else SystemDisk(self._loop, sync_helper=False)
        self.disk.make_folder(str(self._folder))
        self.store = new_store(self.disk, self.clock, str(self._folder))
        self.store.open({})
        self.partitions = Partitions(self.store, self.clock, BROKER)
        self.key_indexes = KeyIndexes(self.store, self.disk, self.clock, str(self._folder))
        self.changes = ImageChanges(self.clock, self._follow)
        self.image = replace(self.image, brokers={BROKER: Broker(BROKER, {}, "", self.clock.wall_ms() - 90_061_000)})
        self.groups = GroupCoordinator(
            self.clock,
            StateLog(self.partitions, OFFSETS_TOPIC).append,
            1,
            lambda: secrets.token_hex(8),
            group_limits_from(self._settings),
            lambda name: topic.id if (topic := self.image.topics.get(name)) is not None else None,
        )
        self.group_partitions = StatePartitions(OFFSETS, self.partitions, self.groups, self.disk, lambda: self.image)
        services = HttpServices(
            settings=self._settings,
            clock=self.clock,
            disk=self.disk,
            metrics=self.metrics,
            broker_id=BROKER,
            cluster_id="test-cluster",
            partitions=self.partitions,
            key_indexes=self.key_indexes,
            image=lambda: self.image,
            topics=Topics(
                self.changes, lambda: limits_from(self._settings), lambda: secrets.token_bytes(16), self.clock.wall_ms
            ),
            configs=Configs(self.changes, lambda: self._settings),
            effective_settings=lambda: self._settings,
            ensure_topic=self._ensure_topic,
            groups=self.groups,
            share=no_share_groups(self.partitions, self.disk),
            group_lags=lambda: self.lags,
            ready=lambda: self.unready,
            spawn=self._spawn,
            closed_groups=lambda: self.closed,
        )
        self.server = HttpServer(SocketNetwork(self._loop), Address("127.0.0.1", 0), services)
        self.server.start()

    @property
    def image(self) -> Image:
        return self.changes.view.image

    @image.setter
    def image(self, image: Image) -> None:
        self.changes.view.image = image

    def _follow(self, before: Image, after: Image) -> None:
        """Lead the partitions that were added, and no longer those that are gone."""
        known = {(name, state.index) for name, topic in before.topics.items() for state in topic.partitions}
        wanted = {(name, state.index) for name, topic in after.topics.items() for state in topic.partitions}
        for name, index in sorted(wanted - known):
            topic = after.topics[name]
            log = self.store.create(TopicPartition(name, index), topic.id, log_settings({}, topic.overrides))
            self.partitions.lead(log, 0, {BROKER: ""})
        for name, index in known - wanted:
            self.partitions.drop(TopicPartition(name, index))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ensure_topic(self, name: str) -> None:
        check_topic_name(name)
        if not self.auto_create:
            raise UnknownPartition(f"there is no topic {name!r}, and auto.create.topics.enable is off")
        self._add_topic(name, 1, {}, is_reserved(name))
        self.group_partitions.follow()

    def _add_topic(self, name: str, partitions: int, overrides: Mapping[str, str], internal: bool) -> None:
        topic_id = name.encode().ljust(16, b"\0")[:16]
        for index in range(partitions):
            log = self.store.create(TopicPartition(name, index), topic_id, log_settings({}, overrides))
            self.partitions.lead(log, 0, {BROKER: ""})
        states = tuple(PartitionState(index, BROKER, 0, (BROKER,), (BROKER,)) for index in range(partitions))
        topic = Topic(name, topic_id, states, dict(overrides), internal)
        self.image = replace(self.image, topics={**self.image.topics, name: topic})

    def on_loop(self, work: Callable[[], Found]) -> Found:
        """Run a function on the loop and wait for what it answers."""

        async def run() -> Found:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(DEADLINE_SECONDS)

    def create(self, name: str, partitions: int = 1, *, internal: bool = False, **overrides: object) -> None:
        given = {key.replace("_", "."): str(value) for key, value in overrides.items()}
        self.on_loop(lambda: self._add_topic(name, partitions, given, internal))

    def dial(self) -> socket.socket:
        return socket.create_connection((self.server.address.host, self.server.address.port), DEADLINE_SECONDS)

    def connection(self) -> http.client.HTTPConnection:
        address = self.server.address
        return http.client.HTTPConnection(address.host, address.port, timeout=DEADLINE_SECONDS)

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        connection: http.client.HTTPConnection | None = None,
    ) -> Answer:
        used = connection or self.connection()
        used.request(method, target, body, dict(headers or {}))
        response = used.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        if connection is None:
            used.close()
        return answer

    def get(self, target: str) -> Answer:
        return self.ask("GET", target)

    def produce(self, target: str, body: object, kind: str = "application/json", **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", target, content, {"Content-Type": kind, **headers})

    def close(self) -> None:
        self.on_loop(self.server.close)
        self.on_loop(self.groups.close)
        self.on_loop(self.key_indexes.close)
        self.on_loop(self.store.close)
        self.on_loop(self.disk.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)
        self._loop.close()
