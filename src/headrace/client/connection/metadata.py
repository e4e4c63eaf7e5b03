"""What a client knows of a cluster: brokers, topics, leaders. One snapshot, of the topics that somebody wants, replaced
whole, never edited.

It is asked for anew every 30 s, and at once when somebody found it stale; further asking is held back by a pause of
20 ms, doubling to 1 s, and many who ask are answered by one request. What an answer says of a partition counts only if
its leader epoch is not older than the one known: a broker that lags behind cannot bring an old leader back, nor take
partitions away. A topic is gone when it is not found for a second, as a broker may hear late of a new one.

A topic has another id when it was deleted and made again; then nothing of the old one counts, nor can a broker that
lags behind bring it back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from headrace.client.connection.broker_connection import Body, OnAnswer
from headrace.client.connection.reactor import Backoff, Reactor, Timer
from headrace.client.errors import Refusal, UnknownTopic
from headrace.errors import ErrorCode, HeadraceError
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.message import ZERO_UUID, Message

NO_LEADER: Final = -1

REFRESH_MS: Final = 30_000
GONE_AFTER_S: Final = 1.0
APPEAR_WITHIN_S: Final = 5.0
WANT_WITHIN_S: Final = 30.0
ASK_TIMEOUT_S: Final = 10.0
UNCHANGED_MAX: Final = 3
SINK_TOPIC: Final = "__spark_sink"
REPLAYS_TOPIC: Final = "__replays"
OWN_TOPICS: Final = frozenset({SINK_TOPIC, REPLAYS_TOPIC})
"""Made by the Spark sink and by replays for themselves, so brokers do not know them as internal: no pattern and no list
means them either."""


@dataclass(frozen=True, slots=True)
class Broker:
    broker_id: int
    address: Address
    rack: str


@dataclass(frozen=True, slots=True)
class Partition:
    index: int
    leader_id: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    topic_id: bytes
    is_internal: bool
    partitions: tuple[Partition, ...]
    """By index, without gaps."""


@dataclass(frozen=True, slots=True)
class MetadataSnapshot:
    """The cluster at one time. Never changed: another one takes its place."""

    cluster_id: str = ""
    controller_id: int = -1
    brokers: dict[int, Broker] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    """Of one answer: topics that were asked for and are not there, or not readable now."""


def metadata_request(topics: Iterable[str] | None, *, create: bool = False) -> Message:
    """For these topics, or all (None). `create` lets the broker make those that are missing."""
    named = None if topics is None else [Message(name=name) for name in topics]
    return Message(topics=named, allow_auto_topic_creation=create)


def read_metadata(answer: Message) -> MetadataSnapshot:
    """The contents of a Metadata answer."""
    topics: dict[str, Topic] = {}
    refused: dict[str, Refusal] = {}
    for topic in answer.topics:
        if topic.error_code != ErrorCode.NONE:
            refused[topic.name] = Refusal(topic.error_code, f"topic {topic.name!r}")
        else:
            internal = topic.is_internal or topic.name in OWN_TOPICS
            topics[topic.name] = Topic(topic.name, topic.topic_id, internal, _partitions(topic.partitions))
    brokers = {broker.node_id: _broker(broker) for broker in answer.brokers}
    return MetadataSnapshot(answer.cluster_id or "", answer.controller_id, brokers, topics, refused)


def _broker(endpoint: Message) -> Broker:
    return Broker(endpoint.node_id, Address(endpoint.host, endpoint.port), endpoint.rack or "")


def _partitions(partitions: Iterable[Message]) -> tuple[Partition, ...]:
    return tuple(
        Partition(
            partition.partition_index,
            partition.leader_id,
            partition.leader_epoch,
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            tuple(partition.offline_replicas),
        )
        for partition in sorted(partitions, key=lambda partition: int(partition.partition_index))
    )


OnKnown = Callable[[Topic | HeadraceError], None]
Listener = Callable[[str, Topic | None], None]
"""Hears the name and the topic as it is now (None: gone) when its id, partitions, leaders or epochs have changed."""


log = logging.getLogger(__name__)


class Asker(Protocol):
    """What asks the brokers."""

    def ask_any(self, api_key: int, body: Body, on_answer: OnAnswer, *, timeout_s: float) -> None: ...

    def ask_elsewhere(self) -> None:
        """The broker that was asked last may lag behind: take another one next time."""
        ...


@dataclass(slots=True)
class _Wanted:
    on_known: OnKnown
    create: bool
    since: float
    within_s: float
    missing_since: float = math.inf


class Metadata:
    """See the module."""

    def __init__(self, reactor: Reactor, asker: Asker, *, refresh_ms: int = REFRESH_MS) -> None:
        self.snapshot = MetadataSnapshot()
        self.listeners: list[Listener] = []
        self._reactor = reactor
        self._asker = asker
        self._refresh_s = refresh_ms / 1000
        self._interest: dict[str, None] = {}
        self._wanted: dict[str, list[_Wanted]] = {}
        self._stale: set[str] = set()
        self._missing_since: dict[str, float] = {}
        self._former_ids: dict[str, set[bytes]] = {}
        self._unasked = False  # somebody wants what is in no request yet
        self._asking = 0
        self._asked_at = -math.inf
        self._backoff = Backoff()
        self._unchanged = 0
        self._planned: Timer | None = None
        self._planned_at = math.inf
        self._refresh: Timer | None = None
        self._closed = False

    @property
    def brokers(self) -> dict[int, Broker]:
        return self.snapshot.brokers

    def topic(self, name: str) -> Topic | None:
        """The topic as last seen; None if it is not known yet, or not any more."""
        return self.snapshot.topics.get(name)

    def leader(self, topic: str, partition: int) -> int | None:
        """The broker that leads a partition; None if it is not known or there is none."""
        found = self.snapshot.topics.get(topic)
        if found is None or not 0 <= partition < len(found.partitions):
            return None
        leader_id = found.partitions[partition].leader_id
        return None if leader_id == NO_LEADER else leader_id

    def want(self, topic: str, *, create: bool, on_known: OnKnown, within_s: float | None = None) -> None:
        """Keep the topic in the snapshot from now on. `on_known` hears once: at once if it is known; otherwise when it
        is, or when asking again will not help, or did not for `within_s`. `create` lets the broker make it.
        """
        with self._reactor.lock:
            known = self.snapshot.topics.get(topic)
            self._interest[topic] = None
            if known is not None:
                _call(on_known, known)
                return
            waiting = self._wanted.setdefault(topic, [])
            limit_s = WANT_WITHIN_S if within_s is None else within_s
            waiting.append(_Wanted(on_known, create, self._reactor.now(), limit_s))
            if len(waiting) == 1 or (create and not any(each.create for each in waiting[:-1])):
                self._unasked = True
                self._plan(self._reactor.now())

    def stale(self, topic: str) -> None:
        """What is known of the topic was found wrong: ask again soon."""
        with self._reactor.lock:
            self._interest[topic] = None
            if topic not in self._stale:
                self._stale.add(topic)
                self._plan_paused()

    def hint(self, topic: str, partition: int, leader_id: int, epoch: int, endpoints: Iterable[Message]) -> None:
        """A broker that refused a request has named the leader (KIP-951); counts if its epoch is newer."""
        with self._reactor.lock:
            known = self.snapshot.topics.get(topic)
            if known is None or not 0 <= partition < len(known.partitions):
                return
            before = known.partitions[partition]
            named = {each.node_id: _broker(each) for each in endpoints}
            if leader_id < 0 or epoch <= before.leader_epoch or leader_id not in self.snapshot.brokers.keys() | named:
                return
            changed = replace(before, leader_id=leader_id, leader_epoch=epoch)
            partitions = (*known.partitions[:partition], changed, *known.partitions[partition + 1 :])
            topics = {**self.snapshot.topics, topic: replace(known, partitions=partitions)}
            self._replace(replace(self.snapshot, topics=topics, brokers={**self.snapshot.brokers, **named}))

    def learn(self, heard: MetadataSnapshot) -> None:
        """What a question of another has brought of the brokers; of topics only who asks here learns."""
        with self._reactor.lock:
            self.snapshot = replace(self.snapshot, controller_id=heard.controller_id, brokers=heard.brokers)

    def add_broker(self, broker: Broker) -> None:
        """One that another answer named, such as a group's coordinator."""
        if broker.broker_id not in self.snapshot.brokers:
            self.snapshot = replace(self.snapshot, brokers={**self.snapshot.brokers, broker.broker_id: broker})

    def close(self, error: HeadraceError) -> None:
        self._closed = True
        for timer in (self._planned, self._refresh):
            if timer is not None:
                timer.cancel()
        wanted, self._wanted = self._wanted, {}
        for waiting in wanted.values():
            for each in waiting:
                _call(each.on_known, error)

    def _plan_paused(self) -> None:
        """The first asking is at once; further ones soon after it wait longer and longer."""
        now = self._reactor.now()
        if now - self._asked_at > 2 * self._backoff.most_s:
            self._backoff.reset()
            self._unchanged = 0
        self._plan(max(now, self._asked_at + self._backoff.next_s))

    def _plan(self, when: float) -> None:
        if self._closed or self._asking or when >= self._planned_at:
            return  # what is under way or planned looks at all that is left over when it is done
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        self._planned_at = when
        if when <= self._reactor.now():
            self._reactor.call_soon(self._ask)
        else:
            self._planned = self._reactor.call_at(when, self._ask)

    def _ask(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
        self._planned, self._planned_at = None, math.inf
        if self._asking or self._closed:
            return
        now = self._reactor.now()
        if now - self._asked_at < 2 * self._backoff.most_s:
            self._backoff.take()
        self._asked_at = now
        create = [name for name, waiting in self._wanted.items() if any(each.create for each in waiting)]
        others = [name for name in self._interest if name not in create]
        self._stale.clear()
        self._unasked = False
        if self._unchanged >= UNCHANGED_MAX:
            self._unchanged = 0
            self._asker.ask_elsewhere()
        for names, creating in ((create, True), (others, False)):
            if names:
                self._asking += 1
                body = metadata_request(names, create=creating)
                self._asker.ask_any(apis.METADATA, body, self._hear(names), timeout_s=ASK_TIMEOUT_S)

    def _hear(self, names: Sequence[str]) -> OnAnswer:
        def hear(answer: Message | HeadraceError) -> None:
            self._asking -= 1
            if self._closed:
                return
            if isinstance(answer, HeadraceError):
                self._settle(names, answer)
                self._stale.update(name for name in names if name in self._interest)
            else:
                snapshot = read_metadata(answer)
                self._merge(names, snapshot)
                self._settle(names, snapshot)
            if not self._asking:
                self._plan_next()

        return hear

    def _plan_next(self) -> None:
        leaderless = any(
            part.leader_id == NO_LEADER for topic in self.snapshot.topics.values() for part in topic.partitions
        )
        if self._unasked:
            self._plan(self._reactor.now())
        elif self._wanted or self._stale or self._missing_since or leaderless:
            self._plan_paused()
        if self._refresh is not None:
            self._refresh.cancel()
            self._refresh = None
        if self._interest:
            self._refresh = self._reactor.call_at(self._reactor.now() + self._refresh_s, self._refresh_due)

    def _refresh_due(self) -> None:
        self._refresh = None
        self._unchanged = 0
        self._plan(self._reactor.now())

    def _merge(self, names: Sequence[str], heard: MetadataSnapshot) -> None:
        topics = dict(self.snapshot.topics)
        for name in names:
            if name in heard.topics:
                self._missing_since.pop(name, None)
                topics[name] = self._newer(topics.get(name), heard.topics[name])
            elif name in topics and self._is_gone(heard, name):
                del topics[name]
                if name not in self._wanted:
                    self._interest.pop(name, None)
        self._replace(replace(heard, topics=topics, refused={}))

    def _newer(self, known: Topic | None, heard: Topic) -> Topic:
        """Partition by partition, what has the newer leader epoch; partitions never become fewer."""
        if known is None:
            return heard
        if known.topic_id != heard.topic_id and ZERO_UUID not in (known.topic_id, heard.topic_id):
            former = self._former_ids.setdefault(known.name, set())
            if heard.topic_id in former:
                return known
            former.add(known.topic_id)
            return heard
        both = map(_newer_partition, known.partitions, heard.partitions)
        count = min(len(known.partitions), len(heard.partitions))
        return replace(heard, partitions=(*both, *heard.partitions[count:], *known.partitions[count:]))

    def _is_gone(self, heard: MetadataSnapshot, name: str) -> bool:
        refusal = heard.refused.get(name)
        if refusal is not None and refusal.kafka_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            return False
        now = self._reactor.now()
        if now - self._missing_since.setdefault(name, now) < GONE_AFTER_S:
            return False
        del self._missing_since[name]
        return True

    def _replace(self, snapshot: MetadataSnapshot) -> None:
        before, self.snapshot = self.snapshot, snapshot
        changed = [
            name
            for name in before.topics.keys() | snapshot.topics.keys()
            if _leadership(before.topics.get(name)) != _leadership(snapshot.topics.get(name))
        ]
        if changed:
            self._backoff.reset()
        self._unchanged = 0 if changed else self._unchanged + 1
        for name in changed:
            for listener in tuple(self.listeners):
                _call(listener, name, snapshot.topics.get(name))

    def _settle(self, names: Sequence[str], heard: MetadataSnapshot | HeadraceError) -> None:
        """Tell those who want a topic what came of it; who may hope goes on waiting."""
        now = self._reactor.now()
        for name in names:
            waiting = self._wanted.pop(name, [])
            left = []
            for each in waiting:
                found = self.snapshot.topics.get(name) or _failure(name, heard, each, now)
                if found is None:
                    left.append(each)
                else:
                    if isinstance(found, HeadraceError):
                        self._interest.pop(name, None)
                    _call(each.on_known, found)
            if left:
                self._interest[name] = None
                self._wanted[name] = left + self._wanted.get(name, [])


def _call(fn: Callable[..., None], *heard: object) -> None:
    """Whoever hears of changes may fail without harm to the others."""
    try:
        fn(*heard)
    except Exception:
        log.exception("a fault in the client: %r raised on metadata", fn)


def _failure(name: str, heard: MetadataSnapshot | HeadraceError, wanted: _Wanted, now: float) -> HeadraceError | None:
    """Why a topic that is not known yet will not be; None if it may still come."""
    over = now >= wanted.since + wanted.within_s
    if isinstance(heard, HeadraceError):
        return heard if over or not heard.mapping.retriable else None
    refusal = heard.refused.get(name) or Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {name!r}")
    if refusal.kafka_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        wanted.missing_since = min(wanted.missing_since, now)
        appears = wanted.create and now < wanted.missing_since + APPEAR_WITHIN_S
        return None if appears else UnknownTopic(name)
    return refusal if over or not refusal.mapping.retriable else None


def _newer_partition(known: Partition, heard: Partition) -> Partition:
    return known if 0 <= heard.leader_epoch < known.leader_epoch else heard


def _leadership(topic: Topic | None) -> object:
    """What listeners care for: replicas that fall behind and catch up are not among it."""
    return topic and (topic.topic_id, [(part.leader_id, part.leader_epoch) for part in topic.partitions])
