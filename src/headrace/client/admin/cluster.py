"""A cluster as a blocking caller sees it: found from any address, asked at the right broker, asked again where that
helps. What the command line, Spark, Arrow and pipelines ask is on top of it.

The connections are those of `client.connection`, of this cluster alone; the caller's thread drives them while it waits.
What brokers say of topics is asked when it is needed, and asked anew after every retriable error: an operator wants to
know how things are now. Retries are bounded by time, with a growing pause. So is the first contact, as a broker may
just be starting; an address that waiting does not make right is told at once.

A connection whose answer does not come in time, or is not waited for after ctrl-C, is closed: the next question opens
it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.connection.broker_connection import LATEST_VERSION, Body, BrokerConnection
from headrace.client.connection.connections import (
    GROUP_KEY_TYPE,
    SHARE_KEY_TYPE,
    TRANSACTION_KEY_TYPE,
    ConnectionPool,
    CoordinatorKey,
    coordinator_request,
    parse_bootstrap,
    read_coordinator,
)
from headrace.client.connection.metadata import (
    NO_LEADER,
    MetadataSnapshot,
    Partition,
    Topic,
    metadata_request,
    read_metadata,
)
from headrace.client.connection.reactor import Backoff
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.connection.tls import Tls, context_of
from headrace.client.errors import BrokerUnreachable, EngineClosed, NeverSent, NoBroker, Refusal, UnknownTopic
from headrace.errors import ErrorCode, HeadraceError
from headrace.records.isolation import Isolation
from headrace.wire import api as apis
from headrace.wire.message import Message

APPEAR_WITHIN_MS: Final = 5_000
COORDINATORS_MAX: Final = 1_000
"""How many are remembered. Every transaction of a sink has a name of its own, and a worker lives for days."""
ADMIN: Final = "admin"
"""The channel of all requests but those of bulk reading."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How long retriable errors are worth another try, and how long to wait before it."""

    within_ms: int = 30_000
    pause_ms: int = 20
    pause_max_ms: int = 1000
    first_contact_ms: int | None = None
    """How long a first answer of any broker is waited for; as `within_ms` if it is not given."""

    def backoff(self) -> Backoff:
        return Backoff(self.pause_ms / 1000, self.pause_max_ms / 1000)


@dataclass(frozen=True, slots=True)
class Request:
    """A message, or what gives the parts of the body for the version agreed."""

    api_key: int
    body: Body
    answered: bool = True
    max_version: int = LATEST_VERSION


class Cluster:
    """Use as a context manager, or close it."""

    def __init__(
        self,
        bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP,
        *,
        client_id: str = "headrace",
        timeout_ms: int = 30_000,
        retry: Retry | None = None,
        tls: Tls = None,
        isolation: Isolation = Isolation.UNCOMMITTED,
    ) -> None:
        self.timeout_ms = timeout_ms
        """How long one answer is waited for."""
        self.isolation = isolation
        """Which records are read through it, and what is the end of a log."""
        self.tls = context_of(tls)
        self._bootstrap = parse_bootstrap(bootstrap)
        self._retry = retry or Retry()
        self._reactor = ThreadReactor()
        # Here is decided how long a connection may take to open, and when it is tried again.
        self.pool = ConnectionPool(
            self._bootstrap,
            client_id=client_id,
            tls=self.tls,
            reactor=self._reactor,
            setup_timeout_s=math.inf,
            backoff=lambda: Backoff(0.0),
        )
        self._topics: dict[str, Topic] = {}
        self._coordinators: dict[CoordinatorKey, int] = {}
        self._interrupted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def again(self) -> Cluster:
        """Another one like it, with connections of its own."""
        return Cluster(
            self.bootstrap,
            client_id=self.pool.client_id,
            timeout_ms=self.timeout_ms,
            retry=self._retry,
            tls=self.tls,
            isolation=self.isolation,
        )

    @property
    def bootstrap(self) -> list[str]:
        return [str(address) for address in self._bootstrap]

    def close(self) -> None:
        self.interrupt()
        self._reactor.close()

    def interrupt(self) -> None:
        """From any thread: whoever asks or waits hears EngineClosed, now or after the pause of a retry. Waits for
        nothing; `close` is still to be called.
        """
        if not self._interrupted:
            self._interrupted = True
            self.pool.release()
            self._reactor.wake()
            # No turn follows in this thread: the program's signal handlers get their places back here.
            self._reactor.lock.__enter__()
            self._reactor.lock.leave()

    def reach(self) -> None:
        """Wait for a first answer, and go on after any error that may pass."""
        self.retry(lambda: self.topology([]))

    def topology(self, topics: Sequence[str] | None = None, *, create: bool = False) -> MetadataSnapshot:
        """Ask anew: brokers and all topics, or those named. `create` lets the broker make topics that are missing."""
        answer = read_metadata(self.ask(apis.METADATA, metadata_request(topics, create=create)))
        self.pool.metadata.learn(answer)
        self._topics.update(answer.topics)
        for name in answer.refused:
            self._topics.pop(name, None)
        return answer

    def topic(self, name: str, *, create: bool = False, expected: bool = False, anew: bool = False) -> Topic:
        """A topic as last seen, or asked for, always if `anew`. One that is to be created, or just was, gets a moment
        to appear."""
        if name in self._topics and not anew:
            return self._topics[name]
        patient = create or expected

        def look_up() -> Topic:
            answer = self.topology([name], create=create)
            if name in answer.topics:
                return answer.topics[name]
            refusal = answer.refused.get(name) or Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r}")
            if refusal.kafka_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and not patient:
                raise UnknownTopic(name, known=self._names())
            raise refusal

        try:
            return self.retry(look_up, within_ms=APPEAR_WITHIN_MS if patient else None)
        except Refusal as refusal:
            if refusal.kafka_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise UnknownTopic(name) from None
            raise

    def _names(self) -> list[str]:
        return sorted(topic.name for topic in self.topology().topics.values() if not topic.is_internal)

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
        raise Refusal(ErrorCode.UNKNOWN_TOPIC_ID, f"topic id {topic_id.hex()}")

    def broker(self, broker_id: int) -> BrokerConnection:
        return self._connection(broker_id, ADMIN)

    def leader(self, topic: str, partition: int, channel: str = ADMIN) -> BrokerConnection:
        leader_id = self.partition(topic, partition).leader_id
        if leader_id == NO_LEADER:
            raise Refusal(ErrorCode.LEADER_NOT_AVAILABLE, f"partition {topic}-{partition}")
        return self._connection(leader_id, channel)

    def controller(self) -> BrokerConnection:
        return self.broker(self.topology([]).controller_id)

    def coordinator(self, group_id: str) -> BrokerConnection:
        """The broker that looks after a group."""
        return self._coordinator(CoordinatorKey(GROUP_KEY_TYPE, group_id))

    def transaction_coordinator(self, transactional_id: str) -> BrokerConnection:
        """The broker that looks after the transactions of an id."""
        return self._coordinator(CoordinatorKey(TRANSACTION_KEY_TYPE, transactional_id))

    def share_coordinator(self, key: str) -> BrokerConnection:
        """The broker that keeps what a share group has done with a partition (`queues.state_records`)."""
        return self._coordinator(CoordinatorKey(SHARE_KEY_TYPE, key))

    def _coordinator(self, key: CoordinatorKey) -> BrokerConnection:
        if key not in self._coordinators:
            found = read_coordinator(key, self.ask(apis.FIND_COORDINATOR, coordinator_request(key)))
            if isinstance(found, HeadraceError):
                raise found
            self.pool.metadata.add_broker(found)
            if len(self._coordinators) == COORDINATORS_MAX:
                self._coordinators.clear()
            self._coordinators[key] = found.broker_id
        return self.broker(self._coordinators[key])

    def ask(self, api_key: int, message: Message) -> Message:
        """Ask a broker that is connected and has nothing else to answer, else any that is known, else the first
        bootstrap address that answers. A request that has left goes to no second one. Where no broker has ever answered
        it is tried again, as long as a first contact may take.
        """
        contact, retry = self.pool.first_contact, self._retry
        contact.begin()
        within_ms = retry.within_ms if retry.first_contact_ms is None else retry.first_contact_ms
        deadline = time.monotonic() + within_ms / 1000
        backoff = retry.backoff()
        while True:
            failures: list[HeadraceError] = []
            for connection in self._candidates():
                try:
                    return self.call(connection, api_key, message)
                except EngineClosed:
                    raise
                except HeadraceError as error:
                    if connection.opened_count and not isinstance(error, NeverSent):
                        raise
                    failures.append(error)
            if self.pool.metadata.brokers:
                raise BrokerUnreachable("; ".join(dict.fromkeys(map(str, failures))))
            missing = contact.failed(failures)
            left_s = deadline - time.monotonic()
            if not missing.mapping.retriable or left_s <= 0:
                raise missing
            time.sleep(min(backoff.take(), left_s))

    def call(
        self, connection: BrokerConnection, api_key: int, message: Message, timeout_ms: int | None = None
    ) -> Message:
        """One request to one broker, and its answer."""
        (answer,) = self.call_all([(connection, Request(api_key, message))], timeout_ms)
        return answer

    def call_all(
        self, asked: Sequence[tuple[BrokerConnection, Request]], timeout_ms: int | None = None
    ) -> list[Message]:
        """As `exchange`; raises the first thing that went wrong."""
        answers: list[Message] = []
        for answer in self.exchange(asked, timeout_ms):
            if isinstance(answer, HeadraceError):
                raise answer
            answers.append(answer)
        return answers

    def exchange(
        self, asked: Sequence[tuple[BrokerConnection, Request]], timeout_ms: int | None = None
    ) -> list[Message | HeadraceError]:
        """Send to all brokers before waiting for any; answers, or what went wrong, in the order asked.

        Requests to one broker leave in one write, and those that want no answer get an empty message.
        """
        with self._reactor.lock:
            pending = [self.submit(connection, request) for connection, request in asked]
        return self.receive(pending, timeout_ms)

    def submit(self, connection: BrokerConnection, request: Request) -> Pending:
        """Send a request; `receive` gives its answer."""
        pending = Pending(connection)
        connection.ask(
            request.api_key,
            request.body,
            pending.hear,
            timeout_s=math.inf,
            answered=request.answered,
            max_version=request.max_version,
        )
        return pending

    def receive(self, pending: Sequence[Pending], timeout_ms: int | None = None) -> list[Message | HeadraceError]:
        """The answers to requests; whatever is not answered at the end of the time is not waited for any more."""
        timeout_s = (self.timeout_ms if timeout_ms is None else timeout_ms) / 1000
        try:
            self._reactor.wait(lambda: all(each.answer is not None for each in pending), time.monotonic() + timeout_s)
        finally:
            for each in pending:
                if each.answer is None:
                    doing = "waiting for an answer from" if each.connection.is_connected else "cannot connect to"
                    each.connection.close(
                        BrokerUnreachable(f"{doing} {each.connection.address}: no answer within the timeout")
                    )
        return [each.answer for each in pending if each.answer is not None]

    def wait(self, done: Callable[[], bool], within_ms: int) -> bool:
        """Drive the connections until `done()`, which is asked under the lock; False if the time is up before."""
        return self._reactor.wait(done, time.monotonic() + within_ms / 1000)

    def flush(self) -> None:
        """Let what was submitted leave now, not when it is waited for."""
        self._reactor.turn()

    def close_channel(self, channel: str) -> None:
        self.pool.close_channel(channel)

    def retry(self, operation: Callable[[], T], *, within_ms: int | None = None) -> T:
        """Run until it succeeds, fails for good, or time is up; what was known of leaders is looked up anew between.
        A first contact that failed has had its time, in `ask`.
        """
        deadline = time.monotonic() + (self._retry.within_ms if within_ms is None else within_ms) / 1000
        backoff = self._retry.backoff()
        while True:
            try:
                return operation()
            except NoBroker:
                raise
            except HeadraceError as error:
                if not error.mapping.retriable or time.monotonic() + backoff.next_s > deadline:
                    raise
            self.forget()
            time.sleep(backoff.take())

    def forget(self) -> None:
        """Leaders and coordinators may have moved: ask when they are needed next."""
        self._topics.clear()
        self._coordinators.clear()

    def _connection(self, broker_id: int, channel: str) -> BrokerConnection:
        if broker_id not in self.pool.metadata.brokers:
            self.topology([])
        return self.pool.broker(broker_id, channel)

    def _candidates(self) -> list[BrokerConnection]:
        """Whom to ask what any broker knows, best first."""
        known = (broker.address for broker in self.pool.metadata.brokers.values())
        connections = [self.pool.connection(address, ADMIN) for address in dict.fromkeys((*known, *self._bootstrap))]
        return sorted(connections, key=lambda connection: not connection.is_open or connection.in_flight > 0)


class Pending:
    """A request that was submitted, and its answer when it has come."""

    __slots__ = ("answer", "connection")

    def __init__(self, connection: BrokerConnection) -> None:
        self.connection = connection
        self.answer: Message | HeadraceError | None = None

    def hear(self, answer: Message | HeadraceError) -> None:
        self.answer = answer
