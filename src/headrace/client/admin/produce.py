"""Sending ready-made record batches: each to its partition's leader, all at once, each acknowledged or accounted for.

A request holds one batch per partition, as brokers demand; further batches of a partition follow in further requests of
the same write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from typing import Final

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.errors import Refusal, check
from headrace.client.producer.lane import Outcome, outcome_of_code
from headrace.client.producer.options import TRANSACTION_TIMEOUT_MS
from headrace.client.producer.request import Outgoing, answered_rows, encode_parts, producer_id_request
from headrace.client.producer.transaction_core import EPOCHS_BUMPED, FEATURE
from headrace.client.producer.transaction_requests import ProducerIdentity, begin_request
from headrace.errors import ErrorCode, HeadraceError, Unsupported
from headrace.records.batch import NO_PRODUCER, read_header
from headrace.wire import api as apis
from headrace.wire.message import Message

ACKS_NONE: Final = 0
ACKS_ALL: Final = -1

ANSWER_MARGIN_MS: Final = 10_000
BATCHES_PER_ROUND: Final = 500


@dataclass(frozen=True, slots=True)
class Produced:
    """Where a batch went. The offset is -1 when the broker was not asked (acks 0) or had the batch already."""

    base_offset: int
    log_append_time_ms: int


@dataclass(frozen=True, slots=True)
class ProducerId:
    producer_id: int
    producer_epoch: int


def init_producer_id(cluster: Cluster) -> ProducerId:
    """An identity under which repeated batches are recognised, for an idempotent producer."""

    def ask() -> ProducerId:
        answer = cluster.ask(apis.INIT_PRODUCER_ID, producer_id_request())
        check(answer.error_code, "producer id")
        return ProducerId(answer.producer_id, answer.producer_epoch)

    return cluster.retry(ask)


def open_transaction(
    cluster: Cluster, transactional_id: str, *, timeout_ms: int | None = None, previous: ProducerId | None = None
) -> ProducerId:
    """The identity for the next transaction of this transactional id: what is open under it is aborted, and who had it
    before can write nothing more. No timeout ends it, in two phases, unless one is given.

    Who had the `previous` identity goes on, and is refused (PRODUCER_FENCED) if somebody else has come in between.
    """
    identity = ProducerIdentity() if previous is None else ProducerIdentity(*astuple(previous))
    two_phase = timeout_ms is None
    request = begin_request(transactional_id, identity, timeout_ms or TRANSACTION_TIMEOUT_MS, two_phase=two_phase)

    def ask() -> ProducerId:
        coordinator = cluster.transaction_coordinator(transactional_id)
        (answer,) = cluster.call_all([(coordinator, Request(apis.INIT_PRODUCER_ID, request))])
        check(answer.error_code, f"transactional id {transactional_id!r}")
        return ProducerId(answer.producer_id, answer.producer_epoch)

    found = cluster.retry(ask)
    if cluster.pool.feature(FEATURE) < EPOCHS_BUMPED:
        raise Unsupported(f"the broker has no transactions of version {EPOCHS_BUMPED}, to which batches add partitions")
    return found


@dataclass(slots=True, eq=False)
class _Batch:
    outgoing: Outgoing
    result: Produced | HeadraceError

    @property
    def target(self) -> tuple[str, int]:
        return self.outgoing.topic, self.outgoing.partition

    @property
    def is_first(self) -> bool:
        """Of a producer in its partition."""
        header = read_header(self.outgoing.batch)
        return header.producer_id != NO_PRODUCER and header.base_sequence == 0


def produce(
    cluster: Cluster,
    outgoing: Sequence[Outgoing],
    *,
    acks: int = ACKS_ALL,
    timeout_ms: int = 30_000,
    transactional_id: str | None = None,
) -> list[Produced | HeadraceError]:
    """Send all batches and answer for each, in the order given: where it went, or why it did not. Transactional ones
    add their partitions to the transaction.

    Retriable errors are retried. Batches with a producer id stay in their order and are written once; without one, a
    batch may be written twice when its answer was lost, and may end up behind a later one when it was refused first.
    """
    batches = [_Batch(each, Refusal(ErrorCode.REQUEST_TIMED_OUT, "produce")) for each in outgoing]
    waiting = batches

    def send_waiting() -> None:
        nonlocal waiting
        again: list[_Batch] = []
        while waiting:
            now, waiting = _take_round(waiting)
            held = {batch.target for batch in again}
            again += _send_round(cluster, now, held, acks, timeout_ms, transactional_id)
        waiting = again
        if waiting:
            failure = waiting[0].result
            assert isinstance(failure, HeadraceError)
            raise failure

    # What is left has its own reason as its result.
    with suppress(HeadraceError):
        cluster.retry(send_waiting)
    return [batch.result for batch in batches]


def _take_round(waiting: Sequence[_Batch]) -> tuple[list[_Batch], list[_Batch]]:
    """What may leave at once, and what has to wait for its answers.

    The first batch of a producer in a partition travels alone: a broker that knows nothing of a producer takes
    any sequence from it, so a later batch could slip past a first one that is refused.
    """
    now: list[_Batch] = []
    later: list[_Batch] = []
    closed: set[tuple[str, int]] = set()
    for batch in waiting:
        if batch.target in closed or len(now) == BATCHES_PER_ROUND:
            closed.add(batch.target)
            later.append(batch)
            continue
        now.append(batch)
        if batch.is_first:
            closed.add(batch.target)
    return now, later


def _send_round(
    cluster: Cluster,
    batches: Sequence[_Batch],
    held: set[tuple[str, int]],
    acks: int,
    timeout_ms: int,
    transactional_id: str | None,
) -> list[_Batch]:
    """Send the batches, but not to partitions that are held; gives those that are worth another try, in order."""
    again: list[_Batch] = []

    def settle(batch: _Batch, result: Produced | HeadraceError) -> None:
        """Keep a batch for the next try if that makes sense, and with it those of its partition that come after it."""
        batch.result = result
        if isinstance(result, HeadraceError):
            follows_a_failure = batch.target in held and outcome_of_code(result.kafka_code) is Outcome.OUT_OF_ORDER
            if result.mapping.retriable or follows_a_failure:
                held.add(batch.target)
                again.append(batch)

    rounds: dict[tuple[BrokerConnection, int], list[_Batch]] = {}
    depth = Counter[tuple[str, int]]()
    for batch in batches:
        if batch.target in held:
            again.append(batch)
            continue
        try:
            leader = cluster.leader(*batch.target)
        except HeadraceError as error:
            settle(batch, error)
            continue
        rounds.setdefault((leader, depth[batch.target]), []).append(batch)
        depth[batch.target] += 1
    requests = [(leader, rounds[leader, level]) for leader, level in sorted(rounds, key=lambda key: key[1])]
    topic_ids = {topic: cluster.topic(topic).topic_id for topic in {topic for topic, _ in depth}}
    names = {topic_id: name for name, topic_id in topic_ids.items()}
    asked = []
    for leader, chosen in requests:
        parts = partial(
            encode_parts,
            outgoing=[batch.outgoing for batch in chosen],
            topic_ids=topic_ids,
            acks=acks,
            timeout_ms=timeout_ms,
            transactional_id=transactional_id,
        )
        asked.append((leader, Request(apis.PRODUCE, parts, answered=acks != ACKS_NONE)))
    for (_, chosen), answer in zip(requests, cluster.exchange(asked, timeout_ms + ANSWER_MARGIN_MS), strict=True):
        if isinstance(answer, HeadraceError):
            for batch in chosen:
                settle(batch, answer)
        elif acks == ACKS_NONE:
            for batch in chosen:
                settle(batch, Produced(-1, -1))
        else:
            rows = answered_rows(answer, names)
            for batch in chosen:
                settle(batch, _result(rows.get(batch.target), batch.target))
    return again


def _result(partition: Message | None, target: tuple[str, int]) -> Produced | HeadraceError:
    about = f"produce to {target[0]}-{target[1]}"
    if partition is None:
        return Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, about, "the broker's answer leaves this partition out")
    match outcome_of_code(partition.error_code):
        case Outcome.WRITTEN:
            return Produced(partition.base_offset, partition.log_append_time_ms)
        case Outcome.DUPLICATE:
            return Produced(-1, -1)
    return Refusal(partition.error_code, about, partition.error_message)
