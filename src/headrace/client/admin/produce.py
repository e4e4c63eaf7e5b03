"""Sending ready-made record batches: each to its partition's leader, all at once, each acknowledged or accounted for.

A request holds one batch per partition, as brokers demand; further batches of a partition follow in further requests of
the same write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.client.admin.cluster import Cluster, Request
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.errors import Refusal, check
from headrace.client.producer.request import Outgoing, encode_parts
from headrace.errors import ErrorCode, HeadraceError
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
        request = Message(transactional_id=None, transaction_timeout_ms=60_000)
        answer = cluster.ask(apis.INIT_PRODUCER_ID, request)
        check(answer.error_code, "producer id")
        return ProducerId(answer.producer_id, answer.producer_epoch)

    return cluster.retry(ask)


def produce(
    cluster: Cluster, outgoing: Sequence[Outgoing], *, acks: int = ACKS_ALL, timeout_ms: int = 30_000
) -> list[Produced | HeadraceError]:
    """Send all batches and answer for each, in the order given: where it went, or why it did not.

    Retriable errors are retried. Batches with a producer id stay in their order and are written once; without one, a
    batch may be written twice when its answer was lost, and may end up behind a later one when it was refused first.
    """
    results: list[Produced | HeadraceError] = [Refusal(7, "produce")] * len(outgoing)
    waiting = list(range(len(outgoing)))

    def send_waiting() -> None:
        nonlocal waiting
        again: list[int] = []
        while waiting:
            now, waiting = _take_round(outgoing, waiting)
            _send_round(cluster, outgoing, now, results, again, acks, timeout_ms)
        waiting = again
        if waiting:
            failure = results[waiting[0]]
            assert isinstance(failure, HeadraceError)
            raise failure

    try:
        cluster.retry(send_waiting)
    except HeadraceError as error:
        for nth in waiting:
            if not isinstance(results[nth], HeadraceError):
                results[nth] = error
    return results


def _take_round(outgoing: Sequence[Outgoing], waiting: Sequence[int]) -> tuple[list[int], list[int]]:
    """What may leave at once, and what has to wait for its answers.

    The first batch of a producer in a partition travels alone: a broker that knows nothing of a producer takes
    any sequence from it, so a later batch could slip past a first one that is refused.
    """
    now: list[int] = []
    later: list[int] = []
    closed: set[tuple[str, int]] = set()
    for nth in waiting:
        target = (outgoing[nth].topic, outgoing[nth].partition)
        if target in closed or len(now) == BATCHES_PER_ROUND:
            closed.add(target)
            later.append(nth)
            continue
        now.append(nth)
        header = read_header(outgoing[nth].batch)
        if header.producer_id != NO_PRODUCER and header.base_sequence == 0:
            closed.add(target)
    return now, later


def _send_round(
    cluster: Cluster,
    outgoing: Sequence[Outgoing],
    places: Sequence[int],
    results: list[Produced | HeadraceError],
    again: list[int],
    acks: int,
    timeout_ms: int,
) -> None:
    """Send the batches at `places`; what is worth another try is added to `again`."""
    held = {(outgoing[nth].topic, outgoing[nth].partition) for nth in again}
    rounds = _plan(cluster, outgoing, places, results, held, again)
    asked = []
    for leader, request in rounds:
        chosen = [outgoing[nth] for nth in request]
        topic_ids = {each.topic: cluster.topic(each.topic).topic_id for each in chosen}
        body = partial(encode_parts, outgoing=chosen, topic_ids=topic_ids, acks=acks, timeout_ms=timeout_ms)
        asked.append((leader, Request(apis.PRODUCE, body, answered=acks != ACKS_NONE)))
    for (_, request), answer in zip(rounds, cluster.exchange(asked, timeout_ms + ANSWER_MARGIN_MS), strict=True):
        answered = _answers(cluster, answer) if acks != ACKS_NONE and isinstance(answer, Message) else {}
        for nth in request:
            target = (outgoing[nth].topic, outgoing[nth].partition)
            if isinstance(answer, HeadraceError):
                results[nth] = answer
            elif acks == ACKS_NONE:
                results[nth] = Produced(-1, -1)
            else:
                results[nth] = _result(answered.get(target), target)
            _retry_later(results[nth], nth, target, held, again)


def _plan(
    cluster: Cluster,
    outgoing: Sequence[Outgoing],
    places: Sequence[int],
    results: list[Produced | HeadraceError],
    held: set[tuple[str, int]],
    again: list[int],
) -> list[tuple[BrokerConnection, list[int]]]:
    """Requests with their leaders: one batch per partition in each, a partition's batches in order."""
    rounds: dict[tuple[BrokerConnection, int], list[int]] = {}
    depth: dict[tuple[str, int], int] = {}
    for nth in places:
        target = (outgoing[nth].topic, outgoing[nth].partition)
        if target in held:
            again.append(nth)
            continue
        try:
            leader = cluster.leader(*target)
        except HeadraceError as error:
            results[nth] = error
            _retry_later(error, nth, target, held, again)
            continue
        rounds.setdefault((leader, depth.get(target, 0)), []).append(nth)
        depth[target] = depth.get(target, 0) + 1
    return [(leader, rounds[leader, level]) for leader, level in sorted(rounds, key=lambda key: key[1])]


def _retry_later(
    result: Produced | HeadraceError, nth: int, target: tuple[str, int], held: set[tuple[str, int]], again: list[int]
) -> None:
    """Keep a batch for the next try if that makes sense, and with it those of its partition that come after it."""
    if isinstance(result, Produced):
        return
    follows_a_failure = target in held and result.kafka_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    if result.mapping.retriable or follows_a_failure:
        held.add(target)
        again.append(nth)


def _answers(cluster: Cluster, answer: Message) -> dict[tuple[str, int], Message]:
    return {
        (topic.name or cluster.topic_name(topic.topic_id), partition.index): partition
        for topic in answer.responses
        for partition in topic.partition_responses
    }


def _result(partition: Message | None, target: tuple[str, int]) -> Produced | HeadraceError:
    about = f"produce to {target[0]}-{target[1]}"
    if partition is None:
        return Refusal(ErrorCode.UNKNOWN_SERVER_ERROR, about, "the broker's answer leaves this partition out")
    if partition.error_code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
        return Produced(-1, -1)
    if partition.error_code != ErrorCode.NONE:
        return Refusal(partition.error_code, about, partition.error_message)
    return Produced(partition.base_offset, partition.log_append_time_ms)
