"""The connections of one client id in this process, shared by all its producers and consumers, opened when needed.

A broker answers the requests of one connection in order, so whatever may wait long there has a channel of its own: a
connection of its own to the same broker. `send` carries produce requests; a consumer's fetches, and each member of a
group, name channels of theirs; `control` carries what any broker can answer, to one broker at a time.

A broker whose connection failed counts as failing for AVOID_S, or until it can be reached again. Before any broker has
answered, whoever asks hears NoBroker, and asks again for as long as its own timeouts say (see `FirstContact`).
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from headrace.client.connection.broker_connection import LATEST_VERSION, Body, BrokerConnection, OnAnswer
from headrace.client.connection.metadata import REFRESH_MS, Broker, Metadata
from headrace.client.connection.reactor import Backoff, Reactor, Timer
from headrace.client.connection.stream import POOL_BYTES
from headrace.client.connection.thread_reactor import JOIN_S, ThreadReactor
from headrace.client.connection.tls import Tls, context_of
from headrace.client.errors import BrokerUnreachable, EngineClosed, NoBroker, Refusal
from headrace.errors import ErrorCode, HeadraceError, ProtocolError, SettingError
from headrace.ports.network import Address
from headrace.records.buffers import BufferPool
from headrace.wire import api as apis
from headrace.wire.message import Message

SEND: Final = "send"
CONTROL: Final = "control"
DEFAULT_PORT: Final = 9092
AVOID_S: Final = 5.0
CONTROL_TRY_S: Final = 5.0
IMPATIENT_S: Final = 1.0
QUIET_S: Final = 1.0
"""So long a first contact may take before anybody is told that it is waited for."""

log = logging.getLogger(__name__)

_NONE: Final[frozenset[int]] = frozenset()


class FirstContact:
    """The time before any broker has answered: who was tried, since when, and what came of it."""

    def __init__(self, bootstrap: tuple[Address, ...], now: Callable[[], float]) -> None:
        self.on_waiting: Callable[[NoBroker], None] = _log_waiting
        """Told once, when it takes longer than a moment."""
        self._bootstrap = bootstrap
        self._now = now
        self._since: float | None = None
        self._failures: list[HeadraceError] = []
        self._is_told = False
        self._is_made = False

    def begin(self) -> None:
        """Somebody asks."""
        if self._since is None:
            self._since = self._now()

    def failed(self, failures: Iterable[HeadraceError]) -> NoBroker:
        """All addresses were tried once more, in vain."""
        self.begin()
        self._failures = list(failures)
        error = self._told()
        if error.mapping.retriable and not self._is_told and self._tried_s >= QUIET_S:
            self._is_told = True
            self.on_waiting(error)
        return error

    def made(self) -> None:
        """A broker has answered."""
        self._is_made = True

    def error(self) -> NoBroker | None:
        """What to tell who cannot wait any longer; None if a broker has answered, or nobody has asked."""
        return None if self._is_made or self._since is None else self._told()

    @property
    def _tried_s(self) -> float:
        return 0.0 if self._since is None else self._now() - self._since

    def _told(self) -> NoBroker:
        silent = BrokerUnreachable(f"no answer from {', '.join(map(str, self._bootstrap))}")
        return NoBroker(self._failures or [silent], self._tried_s)


def _log_waiting(error: NoBroker) -> None:
    log.warning("still waiting for a first answer: %s", error)


class ConnectionPool:
    """Every maker calls `release`. Producers and consumers have it from `shared`."""

    reactor: Reactor

    def __init__(
        self,
        bootstrap: tuple[Address, ...],
        *,
        client_id: str,
        tls: ssl.SSLContext | None = None,
        reactor: Reactor | None = None,
        refresh_ms: int = REFRESH_MS,
        setup_timeout_s: float | None = None,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self.client_id = client_id
        self.reactor = ThreadReactor() if reactor is None else reactor
        self.metadata = Metadata(self.reactor, self, refresh_ms=refresh_ms)
        self.first_contact = FirstContact(bootstrap, self.reactor.now)
        self._owns_reactor = reactor is None
        self._bootstrap = bootstrap
        self._tls = tls
        self._setup_timeout_s = setup_timeout_s
        self._backoff = backoff
        self._buffers = BufferPool(POOL_BYTES)
        self._connections: dict[tuple[str, Address], BrokerConnection] = {}
        self._control: Address | None = None
        self._coordinators = Coordinators(self)
        self._avoided: dict[Address, float] = {}
        self._marked: dict[int, float] = {}
        self._lagging: dict[Address, float] = {}
        self._features: dict[str, int] = {}
        self._features_epoch = -1
        self._users = 1
        self._key: _Key | None = None
        self._closed = False

    @property
    def connections(self) -> tuple[BrokerConnection, ...]:
        return tuple(self._connections.values())

    def broker(self, broker_id: int, channel: str = SEND) -> BrokerConnection:
        """The connection to a broker; BrokerUnreachable if the cluster has none of that id now."""
        broker = self.metadata.snapshot.brokers.get(broker_id)
        if broker is None:
            raise BrokerUnreachable(f"broker {broker_id} is not in the cluster now")
        return self.connection(broker.address, channel)

    def connection(self, address: Address, channel: str) -> BrokerConnection:
        connection = self._connections.get((channel, address))
        if connection is not None:
            return connection
        with self.reactor.lock:
            if self._closed:
                raise EngineClosed("the client is closed; make a new one")
            self._prune()
            made = BrokerConnection(
                self.reactor,
                address,
                client_id=self.client_id,
                tls=self._tls,
                on_opened=self._opened,
                on_failed=self._failed,
                buffers=self._buffers,
                setup_timeout_s=self._setup_timeout_s,
                backoff=self._backoff(),
            )
            return self._connections.setdefault((channel, address), made)

    def _prune(self) -> None:
        """Let go of what was never opened again at addresses that the cluster has left."""
        kept = {*self._bootstrap, *(broker.address for broker in self.metadata.snapshot.brokers.values())}
        for key in [key for key, connection in self._connections.items() if key[1] not in kept and connection.is_idle]:
            del self._connections[key]

    def close_channel(self, channel: str) -> None:
        """Close the channel's connections to all brokers; for a consumer or member that goes."""
        with self.reactor.lock:
            error = EngineClosed("the client closed this connection before the answer came")
            self._coordinators.close_channel(channel, error)
            for key in [key for key in self._connections if key[0] == channel]:
                self._connections.pop(key).end(error)

    def ask_any(self, api_key: int, body: Body, on_answer: OnAnswer, *, timeout_s: float) -> None:
        """Ask a broker that can be reached: the one asked before, else any known one, else the bootstrap addresses in
        turn. A request whose broker was lost is sent to the next, so it must not matter if it is done twice.
        """
        with self.reactor.lock:
            _AnyBrokerRequest(self, api_key, body, on_answer, self.reactor.now() + timeout_s).next()

    def ask_elsewhere(self) -> None:
        """The broker asked last by `ask_any` may lag behind: begin with another one next time."""
        if self._control is not None:
            self._lagging[self._control] = self.reactor.now() + AVOID_S
            self._control = None

    def ask_coordinator(
        self,
        of: str | CoordinatorKey,
        api_key: int,
        body: Body,
        on_answer: OnAnswer,
        *,
        timeout_s: float,
        channel: str | None = None,
        max_version: int = LATEST_VERSION,
    ) -> None:
        """Ask the coordinator of a group, given by its name, or of whatever else the key says. It is looked up if not
        known, and forgotten when it says that it is not the one, or is lost. Members of one group in one process each
        need a channel: a join waits for all the others.
        """
        key = CoordinatorKey(GROUP_KEY_TYPE, of) if isinstance(of, str) else of
        with self.reactor.lock:
            self._coordinators.ask(key, api_key, body, on_answer, timeout_s, channel or str(key), max_version)

    def feature(self, name: str) -> int:
        """The level of a feature that the cluster has agreed on, by the latest broker that was heard; 0 if none has
        spoken of it.
        """
        return self._features.get(name, 0)

    def failed(self, broker_id: int) -> None:
        """A broker was found failing by another sign than its connection."""
        with self.reactor.lock:
            self._marked[broker_id] = self.reactor.now() + AVOID_S

    def failing(self) -> frozenset[int]:
        """Brokers whose connection failed a short while ago, or that were marked so."""
        if not self._avoided and not self._marked:
            return _NONE
        with self.reactor.lock:
            now = self.reactor.now()
            self._avoided = {address: until for address, until in self._avoided.items() if until > now}
            self._marked = {broker_id: until for broker_id, until in self._marked.items() if until > now}
            brokers = self.metadata.snapshot.brokers.items()
            return frozenset(self._marked) | {id for id, broker in brokers if broker.address in self._avoided}

    def release(self) -> None:
        """One user less; the last one closes everything. The user's code has heard then what it is to hear, unless it
        takes very long."""
        with _registry_lock:
            self._users -= 1
            last = self._users == 0
            if last and self._key is not None:
                _registry.pop(self._key, None)
        if last:
            self._close()
        elif isinstance(self.reactor, ThreadReactor):
            self.reactor.wait_callbacks(self.reactor.now() + JOIN_S)

    def _close(self) -> None:
        error = EngineClosed("the client was closed before the answer came")
        with self.reactor.lock:
            self._closed = True
            self.metadata.close(error)
            for connection in self.connections:
                connection.end(error)
            self._connections.clear()
            self._buffers.clear()
        if self._owns_reactor:
            self.reactor.close()

    def _opened(self, connection: BrokerConnection) -> None:
        self._avoided.pop(connection.address, None)
        self.first_contact.made()
        versions = connection.versions
        if versions is not None and versions.features_epoch >= self._features_epoch:
            self._features, self._features_epoch = versions.features, versions.features_epoch

    def _failed(self, connection: BrokerConnection, error: HeadraceError) -> None:
        self._avoided[connection.address] = self.reactor.now() + AVOID_S
        if self._control == connection.address:
            self._control = None

    def _candidates(self) -> list[Address]:
        """Where to ask what any broker knows, best first."""
        now = self.reactor.now()
        known = [broker.address for broker in self.metadata.snapshot.brokers.values()]
        opened = {address for (_, address), connection in self._connections.items() if connection.is_open}
        first = [] if self._control is None else [self._control]

        def rank(address: Address) -> tuple[bool, bool, bool]:
            avoided = max(self._avoided.get(address, 0.0), self._lagging.get(address, 0.0)) > now
            return avoided, address not in opened, address not in known

        others = sorted((*known, *self._bootstrap), key=rank)
        return list(dict.fromkeys((*first, *others)))


class _AnyBrokerRequest:
    """One request, sent to one address after the other; to the next as well when an answer is slow to come."""

    def __init__(self, pool: ConnectionPool, api_key: int, body: Body, on_answer: OnAnswer, deadline: float) -> None:
        self._pool = pool
        self._reactor = pool.reactor
        self._api_key = api_key
        self._body = body
        self._on_answer = on_answer
        self._deadline = deadline
        self._left = pool._candidates()
        self._pending = 0
        self._impatience: Timer | None = None
        self._failures: list[HeadraceError] = []
        self._over = False
        pool.first_contact.begin()

    def next(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None
        left_s = self._deadline - self._reactor.now()
        if self._over or not self._left or left_s <= 0:
            if not self._over and not self._pending:
                self._reactor.call_soon(lambda: self._finish(self._failure()))
            return
        address = self._left.pop(0)
        timeout_s = min(left_s, CONTROL_TRY_S) if self._left else left_s
        self._pending += 1
        try:
            connection = self._pool.connection(address, CONTROL)
        except EngineClosed as closed:
            error = closed
            self._reactor.call_soon(lambda: self._finish(error))
            return
        connection.ask(self._api_key, self._body, lambda answer: self._hear(address, answer), timeout_s=timeout_s)
        if self._left:
            self._impatience = self._reactor.call_at(self._reactor.now() + IMPATIENT_S, self.next)

    def _hear(self, address: Address, answer: Message | HeadraceError) -> None:
        self._pending -= 1
        if self._over:
            return
        if isinstance(answer, BrokerUnreachable | ProtocolError):
            self._failures.append(answer)
            self.next()
            return
        if isinstance(answer, Message):
            self._pool._control = address
        self._finish(answer)

    def _failure(self) -> HeadraceError:
        if not self._pool.metadata.snapshot.brokers:
            return self._pool.first_contact.failed(self._failures)
        return BrokerUnreachable("; ".join(dict.fromkeys(map(str, self._failures))) or "no broker answered in time")

    def _finish(self, answer: Message | HeadraceError) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
        if not self._over:
            self._over = True
            self._on_answer(answer)


GROUP_KEY_TYPE: Final = 0
TRANSACTION_KEY_TYPE: Final = 1
SHARE_KEY_TYPE: Final = 2
_KINDS: Final = {GROUP_KEY_TYPE: "group", TRANSACTION_KEY_TYPE: "transactional id", SHARE_KEY_TYPE: "share partition"}

COORDINATOR_MOVED: Final = frozenset((ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE))

OnFound = Callable[[Address | HeadraceError], None]


class CoordinatorKey(NamedTuple):
    """What has a coordinator: a group, a transactional id, or a share partition."""

    key_type: int
    name: str

    def __str__(self) -> str:
        return f"{_KINDS[self.key_type]} {self.name!r}"


class Coordinators:
    """Which broker is a coordinator: found when first asked, forgotten when it denies that or is lost."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._found: dict[CoordinatorKey, Address] = {}
        self._looking: dict[CoordinatorKey, list[tuple[str, OnFound]]] = {}

    def ask(
        self,
        key: CoordinatorKey,
        api_key: int,
        body: Body,
        on_answer: OnAnswer,
        timeout_s: float,
        channel: str,
        max_version: int,
    ) -> None:
        deadline = self._pool.reactor.now() + timeout_s

        def send(found: Address | HeadraceError) -> None:
            if isinstance(found, HeadraceError):
                on_answer(found)
                return

            def hear(answer: Message | HeadraceError) -> None:
                lost = isinstance(answer, BrokerUnreachable)
                if lost or (isinstance(answer, Message) and not COORDINATOR_MOVED.isdisjoint(_codes(answer))):
                    self.forget(key, found)
                on_answer(answer)

            left_s = max(0.0, deadline - self._pool.reactor.now())
            try:
                connection = self._pool.connection(found, channel)
            except HeadraceError as error:
                closed = error
                self._pool.reactor.call_soon(lambda: on_answer(closed))
                return
            connection.ask(api_key, body, hear, timeout_s=left_s, max_version=max_version)

        if key in self._found:
            send(self._found[key])
        elif key in self._looking:
            self._looking[key].append((channel, send))
        else:
            self._looking[key] = [(channel, send)]
            self._look_up(key, timeout_s)

    def close_channel(self, channel: str, error: HeadraceError) -> None:
        """What still waits for a coordinator must not open the channel again."""
        for key, waiting in self._looking.items():
            self._looking[key] = [entry for entry in waiting if entry[0] != channel]
            for _, send in (entry for entry in waiting if entry[0] == channel):
                send(error)

    def forget(self, key: CoordinatorKey, address: Address) -> None:
        if self._found.get(key) == address:
            del self._found[key]

    def _look_up(self, key: CoordinatorKey, timeout_s: float) -> None:
        def hear(answer: Message | HeadraceError) -> None:
            found = answer if isinstance(answer, HeadraceError) else read_coordinator(key, answer)
            if isinstance(found, Broker):
                self._pool.metadata.add_broker(found)
                self._found[key] = found.address
            for _, send in self._looking.pop(key, ()):
                send(found.address if isinstance(found, Broker) else found)

        self._pool.ask_any(apis.FIND_COORDINATOR, coordinator_request(key), hear, timeout_s=timeout_s)


def coordinator_request(key: CoordinatorKey) -> Message:
    return Message(key_type=key.key_type, coordinator_keys=[key.name])


def read_coordinator(key: CoordinatorKey, answer: Message) -> Broker | Refusal:
    """The broker that is the coordinator, by a FindCoordinator answer."""
    for found in answer.coordinators:
        if found.error_code != ErrorCode.NONE:
            return Refusal(found.error_code, f"coordinator of {key}", found.error_message)
        return Broker(found.node_id, Address(found.host, found.port), "")
    return Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, f"coordinator of {key}", "the broker's answer leaves it out")


def _codes(answer: Message) -> Iterator[int]:
    """Every error code that the answer of a coordinator may carry."""
    yield answer.__dict__.get("error_code", ErrorCode.NONE)
    for group in answer.__dict__.get("groups", ()):
        yield group.error_code
    for topic in answer.__dict__.get("topics", ()):
        for partition in topic.partitions:
            yield partition.error_code
    for topic in answer.__dict__.get("results_by_topic_v3_and_below", ()):
        for partition in topic.results_by_partition:
            yield partition.partition_error_code


@dataclass(frozen=True, slots=True)
class _Key:
    bootstrap: tuple[Address, ...]
    client_id: str
    tls: str | Path | int
    reactor: int


_registry: dict[_Key, ConnectionPool] = {}
_registry_lock = threading.Lock()


def shared(
    bootstrap: str | Iterable[str],
    *,
    client_id: str,
    tls: Tls = None,
    reactor: Reactor | None = None,
    refresh_ms: int = REFRESH_MS,
) -> ConnectionPool:
    """The pool of a client id: the same object for the same addresses, `tls` and reactor (None: threads).

    Nothing is connected yet. Call `release` when done with it.
    """
    addresses = parse_bootstrap(bootstrap)
    key = _Key(addresses, client_id, tls if isinstance(tls, str | Path) else id(tls), id(reactor))
    with _registry_lock:
        pool = _registry.get(key)
        if pool is not None:
            pool._users += 1
            return pool
        pool = ConnectionPool(
            addresses, client_id=client_id, tls=context_of(tls), reactor=reactor, refresh_ms=refresh_ms
        )
        pool._key = key
        _registry[key] = pool
        return pool


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


def _after_fork() -> None:
    """The child makes pools of its own; those of the parent stay refused to it."""
    _registry_lock._at_fork_reinit()  # type: ignore[attr-defined]
    _registry.clear()


os.register_at_fork(after_in_child=_after_fork)
