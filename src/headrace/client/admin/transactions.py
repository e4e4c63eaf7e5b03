"""Transactions seen from outside: which there are, what holds up readers of committed records, and how to end them.

A transaction is ended through its coordinator, by whoever knows its transactional id, producer id and epoch: so a
prepared one is, from any process. One that no coordinator knows of, though a log has its records, is *hanging*: readers
of committed records wait for it, and nothing ends it but a marker that an operator writes into that partition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.client.admin.cluster import Cluster, Request, Retry
from headrace.client.connection.broker_connection import LATEST_VERSION, BrokerConnection
from headrace.client.connection.connections import TRANSACTION_KEY_TYPE
from headrace.client.connection.metadata import Broker
from headrace.client.connection.tls import Tls
from headrace.client.consumer.group_protocol import TopicPartition, by_topic
from headrace.client.errors import Refusal, TransactionRefused, check
from headrace.client.producer.transaction_core import EPOCHS_BUMPED, FEATURE, FENCED, FIRST_END, PASSING
from headrace.client.producer.transaction_requests import (
    GroupMember,
    Offsets,
    PreparedTransaction,
    ProducerIdentity,
    add_offsets_request,
    committed_code,
    end_request,
    offsets_commit_request,
)
from headrace.errors import ErrorCode, HeadraceError, InvalidRequest
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.message import Message

NO_TIMEOUT_MS: Final = 2**31 - 1
"""The timeout of a two-phase transaction, as it is described."""
OPEN_STATES: Final = ("Ongoing", "PrepareCommit", "PrepareAbort")
STATES: Final = (*OPEN_STATES, "CompleteCommit", "CompleteAbort", "Empty", "Dead")
HANGING_AFTER_MS: Final = 900_000
"""Kafka's transaction.max.timeout.ms: a coordinator that knows of it would have ended it by then."""
AT_ONCE: Final = 500
"""Transactions that one request asks for, and that are ended at a time."""


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id, as the list of all has it."""

    transactional_id: str
    producer_id: int
    state: str
    broker_id: int
    """Its coordinator."""


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """What the coordinator knows of a transactional id."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    start_ms: int | None
    """When the open transaction began."""
    partitions: tuple[TopicPartition, ...]
    owner_client_id: str | None = None
    """Who opened it; None where the broker does not tell."""
    owner_host: str | None = None

    @property
    def two_phase(self) -> bool:
        """No timeout ends it."""
        return self.timeout_ms == NO_TIMEOUT_MS

    @property
    def prepared(self) -> PreparedTransaction:
        """What it takes to end it."""
        return PreparedTransaction(self.transactional_id, self.producer_id, self.producer_epoch)

    def age_ms(self, now_ms: int) -> int | None:
        """How long it is open."""
        is_open = self.start_ms is not None and self.state in OPEN_STATES
        return max(0, now_ms - (self.start_ms or 0)) if is_open else None


@dataclass(frozen=True, slots=True)
class ActiveProducer:
    """A producer that a partition's log remembers."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    """Of its last marker; -1 if it has had none."""
    transaction_start: int | None
    """The first offset of its open transaction."""


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """An open transaction in a log that its coordinator does not know of."""

    producer: ActiveProducer
    transactional_id: str | None
    """None if no coordinator knows its producer."""


def list_transactions(
    cluster: Cluster,
    *,
    states: Sequence[str] = (),
    producer_ids: Sequence[int] = (),
    longer_than_ms: int | None = None,
    pattern: str | None = None,
) -> list[TransactionListing]:
    """Those of all coordinators, by name: in these states, of these producers, open for longer than so long, and with
    a name that the pattern describes."""
    request = Message(
        state_filters=list(states),
        producer_id_filters=list(producer_ids),
        duration_filter=-1 if longer_than_ms is None else longer_than_ms,
        transactional_id_pattern=pattern,
    )

    def ask() -> list[TransactionListing]:
        brokers = list(cluster.topology([]).brokers)
        asked = [(cluster.broker(broker_id), Request(apis.LIST_TRANSACTIONS, request)) for broker_id in brokers]
        found: list[TransactionListing] = []
        for broker_id, answer in zip(brokers, cluster.call_all(asked), strict=True):
            check(answer.error_code, f"list transactions of broker {broker_id}")
            if answer.unknown_state_filters:
                raise InvalidRequest(
                    f"there is no state {', '.join(answer.unknown_state_filters)}; there are {', '.join(STATES)}"
                )
            found += [
                TransactionListing(each.transactional_id, each.producer_id, each.transaction_state, broker_id)
                for each in answer.transaction_states
            ]
        return sorted(found, key=lambda each: each.transactional_id)

    return cluster.retry(ask)


def describe_transactions(
    cluster: Cluster, transactional_ids: Iterable[str], *, missing_ok: bool = False
) -> list[TransactionDescription]:
    """In the order asked. One that is not known raises a Refusal, or is left out."""
    wanted = list(dict.fromkeys(transactional_ids))

    def ask(names: list[str]) -> list[TransactionDescription]:
        by_coordinator: dict[BrokerConnection, list[str]] = {}
        for name, connection in _coordinators(cluster, names).items():
            by_coordinator.setdefault(connection, []).append(name)
        asked = [
            (connection, Request(apis.DESCRIBE_TRANSACTIONS, Message(transactional_ids=led)))
            for connection, led in by_coordinator.items()
        ]
        found: dict[str, TransactionDescription] = {}
        for answer in cluster.call_all(asked):
            for each in answer.transaction_states:
                if missing_ok and each.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                    continue
                check(each.error_code, f"transactional id {each.transactional_id!r}")
                found[each.transactional_id] = _described(each)
        return [found[name] for name in names if name in found]

    parts = [wanted[first : first + AT_ONCE] for first in range(0, len(wanted), AT_ONCE)]
    return [found for part in parts for found in cluster.retry(lambda part=part: ask(part))]  # type: ignore[misc]


def _described(found: Message) -> TransactionDescription:
    return TransactionDescription(
        found.transactional_id,
        found.transaction_state,
        found.producer_id,
        found.producer_epoch,
        found.transaction_timeout_ms,
        found.transaction_start_time_ms if found.transaction_start_time_ms >= 0 else None,
        tuple(sorted((topic.topic, index) for topic in found.topics for index in topic.partitions)),
        found.owner_client_id or None,
        found.owner_host or None,
    )


def describe_producers(cluster: Cluster, places: Iterable[TopicPartition]) -> list[ActiveProducer]:
    """The producers that the leaders of these partitions remember."""
    wanted = list(places)

    def ask() -> list[ActiveProducer]:
        by_leader: dict[BrokerConnection, list[TopicPartition]] = {}
        for place in wanted:
            by_leader.setdefault(cluster.leader(*place), []).append(place)
        asked = [
            (leader, Request(apis.DESCRIBE_PRODUCERS, _producers_request(led))) for leader, led in by_leader.items()
        ]
        found: list[ActiveProducer] = []
        for answer in cluster.call_all(asked):
            for topic in answer.topics:
                for row in topic.partitions:
                    check(row.error_code, f"producers of {topic.name}-{row.partition_index}", row.error_message)
                    found += [_active(topic.name, row.partition_index, each) for each in row.active_producers]
        return sorted(found, key=lambda each: (each.topic, each.partition, each.producer_id))

    return cluster.retry(ask)


def _producers_request(places: Iterable[TopicPartition]) -> Message:
    topics = by_topic(places).items()
    return Message(topics=[Message(name=name, partition_indexes=list(numbers)) for name, numbers in topics])


def _active(topic: str, partition: int, found: Message) -> ActiveProducer:
    start = found.current_txn_start_offset
    return ActiveProducer(
        topic,
        partition,
        found.producer_id,
        found.producer_epoch,
        found.last_sequence,
        found.last_timestamp,
        found.coordinator_epoch,
        start if start >= 0 else None,
    )


def find_hanging(
    cluster: Cluster,
    *,
    topics: Sequence[str] = (),
    broker_id: int | None = None,
    older_than_ms: int = HANGING_AFTER_MS,
    now_ms: int | None = None,
) -> list[HangingTransaction]:
    """Open transactions in logs, of these topics or of all, and of those that a broker leads, that have had no record
    for so long and that no coordinator has among its open ones."""
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    snapshot = cluster.retry(lambda: cluster.topology(list(topics) or None))
    for asked_for in topics:
        cluster.topic(asked_for)
    places = [
        (topic.name, number)
        for topic in snapshot.topics.values()
        for number, partition in enumerate(topic.partitions)
        if broker_id is None or partition.leader_id == broker_id
    ]
    suspects = [
        producer
        for producer in describe_producers(cluster, places)
        if producer.transaction_start is not None and producer.last_timestamp_ms <= now_ms - older_than_ms
    ]
    if not suspects:
        return []
    listed = list_transactions(cluster, producer_ids=sorted({each.producer_id for each in suspects}))
    names = {each.producer_id: each.transactional_id for each in listed}
    found = describe_transactions(cluster, names.values(), missing_ok=True)
    described = {each.transactional_id: each for each in found}
    hanging = []
    for suspect in suspects:
        name = names.get(suspect.producer_id)
        known = None if name is None else described.get(name)
        if known is None or (suspect.topic, suspect.partition) not in known.partitions:
            hanging.append(HangingTransaction(suspect, name))
    return hanging


def abort_hanging(cluster: Cluster, producer: ActiveProducer) -> None:
    """Write the marker of an abort into the partition, past any coordinator, as Kafka's tool does."""
    place = f"{producer.topic}-{producer.partition}"
    marker = Message(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        transaction_result=False,
        coordinator_epoch=max(0, producer.coordinator_epoch),
        topics=[Message(name=producer.topic, partition_indexes=[producer.partition])],
    )

    def ask() -> None:
        answer = cluster.call(
            cluster.leader(producer.topic, producer.partition), apis.WRITE_TXN_MARKERS, Message(markers=[marker])
        )
        for result in answer.markers:
            for topic in result.topics:
                for row in topic.partitions:
                    check(row.error_code, f"abort of the transaction of producer {producer.producer_id} in {place}")

    cluster.retry(ask)


def send_offsets(
    cluster: Cluster, opened: PreparedTransaction, offsets: Offsets, group: str, *, metadata: str = ""
) -> None:
    """Let a group without members go on from these offsets, with their metadata, if the transaction is committed."""
    identity = ProducerIdentity(opened.producer_id, opened.producer_epoch)
    adding = add_offsets_request(opened.transactional_id, identity, group)
    request = offsets_commit_request(opened.transactional_id, identity, offsets, GroupMember(group), metadata)

    def add() -> None:
        coordinator = cluster.transaction_coordinator(opened.transactional_id)
        answer = cluster.call(coordinator, apis.ADD_OFFSETS_TO_TXN, adding)
        check(answer.error_code, f"offsets of group {group!r} in the transaction {opened.transactional_id!r}")

    def commit() -> None:
        answer = cluster.call(cluster.coordinator(group), apis.TXN_OFFSET_COMMIT, request)
        check(committed_code(answer), f"offsets of group {group!r} in the transaction {opened.transactional_id!r}")

    cluster.retry(add)
    cluster.retry(commit)


def end_transactions(cluster: Cluster, prepared: Iterable[PreparedTransaction], *, commit: bool) -> None:
    """Commit or abort prepared transactions, many at a time; each may have been ended so before.

    All are tried. TransactionRefused names those that could not be, and why: ended otherwise, or taken over.
    """
    left = list(prepared)
    refused: list[tuple[PreparedTransaction, HeadraceError]] = []
    for first in range(0, len(left), AT_ONCE):
        part = left[first : first + AT_ONCE]
        waiting = {each.transactional_id: each for each in part}
        if len(waiting) < len(part):
            raise InvalidRequest("a transactional id has one transaction at a time, and two were given of one")
        cluster.retry(_end_some(cluster, waiting, refused, commit=commit))
    if refused:
        done = "committed" if commit else "aborted"
        told = "; ".join(f"{each.transactional_id!r}: {error}" for each, error in refused[:3])
        more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise TransactionRefused(
            f"{len(refused)} of {len(left)} transactions could not be {done}: {told}{more}", refused[0][1]
        )


def _end_some(
    cluster: Cluster,
    waiting: dict[str, PreparedTransaction],
    refused: list[tuple[PreparedTransaction, HeadraceError]],
    *,
    commit: bool,
) -> Callable[[], None]:
    """Asks for all that wait; raises, to be called again, while any has no answer that says something."""

    def ask() -> None:
        passing: HeadraceError | None = None
        found = _coordinators(cluster, list(waiting))
        asked = [(found[name], _end_of(cluster, each, commit=commit)) for name, each in waiting.items()]
        for each, answer in zip(list(waiting.values()), cluster.exchange(asked), strict=True):
            error = answer if isinstance(answer, HeadraceError) else None
            if isinstance(answer, Message) and answer.error_code != ErrorCode.NONE:
                error = Refusal(answer.error_code, "end of the transaction")
            if error is not None and (error.mapping.retriable or error.kafka_code in PASSING):
                passing = error
                continue
            if error is not None:
                refused.append((each, _told(error, commit=commit)))
            del waiting[each.transactional_id]
        if passing is not None:
            raise passing

    return ask


def _end_of(cluster: Cluster, prepared: PreparedTransaction, *, commit: bool) -> Request:
    identity = ProducerIdentity(prepared.producer_id, prepared.producer_epoch)
    bumped = cluster.pool.feature(FEATURE) >= EPOCHS_BUMPED
    body = end_request(prepared.transactional_id, identity, commit=commit)
    return Request(apis.END_TXN, body, max_version=LATEST_VERSION if bumped else FIRST_END)


def _told(error: HeadraceError, *, commit: bool) -> HeadraceError:
    ended = (ErrorCode.INVALID_TXN_STATE, ErrorCode.INVALID_PRODUCER_ID_MAPPING)
    if error.kafka_code in FENCED or error.kafka_code in ended:
        other = "aborted" if commit else "committed"
        return TransactionRefused(f"it was {other} before, or another producer has the transactional id now", error)
    return error


def _coordinators(cluster: Cluster, transactional_ids: list[str]) -> dict[str, BrokerConnection]:
    """Where to ask for each, found with one question."""
    answer = cluster.ask(
        apis.FIND_COORDINATOR, Message(key_type=TRANSACTION_KEY_TYPE, coordinator_keys=transactional_ids)
    )
    found: dict[str, BrokerConnection] = {}
    for each in answer.coordinators:
        check(each.error_code, f"coordinator of transactional id {each.key!r}", each.error_message)
        cluster.pool.metadata.add_broker(Broker(each.node_id, Address(each.host, each.port), ""))
        found[each.key] = cluster.broker(each.node_id)
    return found


def commit_prepared(
    prepared: PreparedTransaction | Iterable[PreparedTransaction],
    bootstrap: str | Iterable[str],
    *,
    timeout_ms: int = 30_000,
    tls: Tls = None,
) -> None:
    """Commit prepared transactions, from any process; thousands at once take a few requests to each broker.

    To do so again is no error: a driver that does not know whether it came so far commits again. What was aborted, or
    taken over, is named by TransactionRefused, when all others are committed.
    """
    _end_prepared(prepared, bootstrap, timeout_ms, tls, commit=True)


def abort_prepared(
    prepared: PreparedTransaction | Iterable[PreparedTransaction],
    bootstrap: str | Iterable[str],
    *,
    timeout_ms: int = 30_000,
    tls: Tls = None,
) -> None:
    """Abort prepared transactions, as `commit_prepared` commits them."""
    _end_prepared(prepared, bootstrap, timeout_ms, tls, commit=False)


def _end_prepared(
    prepared: PreparedTransaction | Iterable[PreparedTransaction],
    bootstrap: str | Iterable[str],
    timeout_ms: int,
    tls: Tls,
    *,
    commit: bool,
) -> None:
    given = [prepared] if isinstance(prepared, PreparedTransaction) else list(prepared)
    with Cluster(bootstrap, timeout_ms=timeout_ms, retry=Retry(within_ms=timeout_ms), tls=tls) as cluster:
        end_transactions(cluster, given, commit=commit)
