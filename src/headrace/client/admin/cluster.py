"""A cluster as a client sees it: found from any address, asked at the right broker, asked again where that helps.

One connection per broker, opened when first needed. Leaders and coordinators are remembered and looked up again after
every retriable error. Retries are bounded by time, with a growing pause; only the first contact is not retried, so that
a wrong address is told at once.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.admin.connection import Connection
from headrace.client.connection.topology import NO_LEADER, Broker, Partition, Topic, Topology, read_topology
from headrace.client.errors import BrokerUnreachable, NoBroker, Refusal, check
from headrace.errors import Code, HeadraceError, Mapping, SettingError
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.message import Message

DEFAULT_PORT: Final = 9092
APPEAR_WITHIN_MS: Final = 5_000
GROUP_KEY_TYPE: Final = 0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How long retriable errors are worth another try, and how long to wait before it."""

    within_ms: int = 30_000
    pause_ms: int = 20
    pause_max_ms: int = 1000


class Cluster:
    """Use as a context manager, or close it."""

    def __init__(
        self,
        bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP,
        *,
        client_id: str = "headrace",
        timeout_ms: int = 30_000,
        retry: Retry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self._timeout_ms = timeout_ms
        self._retry = retry or Retry()
        self._tls = tls
        self._connections: dict[Address, Connection] = {}
        self._brokers: dict[int, Broker] = {}
        self._topics: dict[str, Topic] = {}
        self._coordinators: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def timeout_ms(self) -> int:
        """How long one answer is waited for."""
        return self._timeout_ms

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def reach(self) -> None:
        """Wait for the first answer, as after any error that may pass: where the address is known to be right."""

        def ask() -> None:
            try:
                self.topology([])
            except NoBroker as error:
                raise BrokerUnreachable(str(error)) from None

        self.retry(ask)

    def topology(self, topics: Sequence[str] | None = None, *, create: bool = False) -> Topology:
        """Ask anew: brokers and all topics, or those named. `create` lets the broker make topics that are missing."""
        asked = None if topics is None else [Message(name=name) for name in topics]
        request = Message(topics=asked, allow_auto_topic_creation=create)
        answer = read_topology(self.any_connection().call(apis.METADATA, request))
        self._brokers = answer.brokers
        self._topics.update(answer.topics)
        for name in answer.refused:
            self._topics.pop(name, None)
        return answer

    def topic(self, name: str, *, create: bool = False, expected: bool = False) -> Topic:
        """A topic as last seen, or asked for. One that is to be created, or just was, gets a moment to appear."""
        if name in self._topics:
            return self._topics[name]
        patient = create or expected

        def look_up() -> Topic:
            answer = self.topology([name], create=create)
            if name in answer.topics:
                return answer.topics[name]
            refusal = answer.refused.get(name) or Refusal(Code.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r}")
            if refusal.kafka_code == Code.UNKNOWN_TOPIC_OR_PARTITION and not patient:
                raise UnknownTopic(name)
            raise refusal

        try:
            return self.retry(look_up, within_ms=APPEAR_WITHIN_MS if patient else None)
        except Refusal as refusal:
            if refusal.kafka_code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                raise UnknownTopic(name) from None
            raise

    def partition(self, topic: str, partition: int) -> Partition:
        partitions = self.topic(topic).partitions
        if not 0 <= partition < len(partitions):
            raise UnknownTopic(topic, partition, len(partitions))
        return partitions[partition]

    def topic_name(self, topic_id: bytes) -> str:
        """The name of a topic in an answer that gives only its id; the topic was in the request, so it is known."""
        for topic in self._topics.values():
            if topic.topic_id == topic_id:
                return topic.name
        raise Refusal(Code.UNKNOWN_TOPIC_ID, f"topic id {topic_id.hex()}")

    def any_connection(self) -> Connection:
        """A connection that is open, else to any broker known, else to the first bootstrap address that answers."""
        for connection in self._connections.values():
            if connection.is_open and not connection.awaited_count:
                return connection
        failures = []
        for address in (*(broker.address for broker in self._brokers.values()), *self._bootstrap):
            try:
                return self._connect(address)
            except HeadraceError as error:
                failures.append(str(error))
        reached_before = bool(self._brokers)
        raise (BrokerUnreachable if reached_before else NoBroker)("; ".join(dict.fromkeys(failures)))

    def connection(self, broker_id: int) -> Connection:
        broker = self._brokers.get(broker_id)
        if broker is None:
            self.topology([])
            broker = self._brokers.get(broker_id)
        if broker is None:
            raise BrokerUnreachable(f"broker {broker_id} is not in the cluster now")
        return self._connect(broker.address)

    def leader(self, topic: str, partition: int) -> Connection:
        leader_id = self.partition(topic, partition).leader_id
        if leader_id == NO_LEADER:
            raise Refusal(5, f"partition {topic}-{partition}")
        return self.connection(leader_id)

    def open_leader(self, topic: str, partition: int) -> Connection:
        """A connection to a partition's leader that is the caller's own, to be closed by it."""
        shared = self.leader(topic, partition)
        return Connection(shared.address, client_id=self._client_id, timeout_ms=self._timeout_ms, tls=self._tls)

    def controller(self) -> Connection:
        return self.connection(self.topology([]).controller_id)

    def coordinator(self, group_id: str) -> Connection:
        """The broker that looks after a group."""
        if group_id not in self._coordinators:
            request = Message(key_type=GROUP_KEY_TYPE, coordinator_keys=[group_id])
            (found,) = self.any_connection().call(apis.FIND_COORDINATOR, request).coordinators
            check(found.error_code, f"coordinator of group {group_id!r}", found.error_message)
            address = Address(found.host, found.port)
            self._brokers.setdefault(found.node_id, Broker(found.node_id, address, ""))
            self._coordinators[group_id] = found.node_id
        return self.connection(self._coordinators[group_id])

    def retry(self, operation: Callable[[], T], *, within_ms: int | None = None) -> T:
        """Run until it succeeds, fails for good, or time is up; what was known of leaders is looked up anew between."""
        deadline = time.monotonic() + (self._retry.within_ms if within_ms is None else within_ms) / 1000
        pause_ms = self._retry.pause_ms
        while True:
            try:
                return operation()
            except HeadraceError as error:
                if not error.mapping.retriable or time.monotonic() + pause_ms / 1000 > deadline:
                    raise
            self.forget()
            time.sleep(pause_ms / 1000)
            pause_ms = min(2 * pause_ms, self._retry.pause_max_ms)

    def forget(self) -> None:
        """Leaders and coordinators may have moved: ask when they are needed next."""
        self._topics.clear()
        self._coordinators.clear()

    def _connect(self, address: Address) -> Connection:
        connection = self._connections.get(address)
        if connection is None or not connection.is_open:
            connection = Connection(address, client_id=self._client_id, timeout_ms=self._timeout_ms, tls=self._tls)
            self._connections[address] = connection
        return connection


class UnknownTopic(HeadraceError):
    """A topic or partition that the cluster does not have, and that asking again will not bring."""

    mapping = Mapping(Code.UNKNOWN_TOPIC_OR_PARTITION, 404, False)

    def __init__(self, topic: str, partition: int | None = None, partition_count: int = 0) -> None:
        if partition is None:
            super().__init__(f"there is no topic {topic!r}; `headrace topic create {topic}` makes it")
        else:
            super().__init__(f"topic {topic!r} has no partition {partition}, only 0 to {partition_count - 1}")


def parse_bootstrap(bootstrap: str | Iterable[str]) -> tuple[Address, ...]:
    """Addresses from `host:port,host:port` or a list of such; the port may be left out."""
    given = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    addresses = tuple(parse_address(item.strip()) for item in given if item.strip())
    if not addresses:
        raise SettingError("no bootstrap address was given; write host:port, such as 127.0.0.1:9092")
    return addresses


def parse_address(text: str) -> Address:
    """`host`, `host:port`, `[v6]` or `[v6]:port`."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        port = rest.removeprefix(":") if rest else str(DEFAULT_PORT)
        valid = bool(closed) and (not rest or rest.startswith(":"))
    else:
        host, colon, port = text.partition(":")
        port = port if colon else str(DEFAULT_PORT)
        valid = True
    if not (valid and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise SettingError(f"{text!r} is not an address; write host:port, such as 127.0.0.1:9092 or [::1]:9092")
    return Address(host, int(port))
