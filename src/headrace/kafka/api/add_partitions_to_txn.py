"""AddPartitionsToTxn, versions 0 to 5. 2: PRODUCER_FENCED; 3: flexible; 4: many transactions in one request, or only a
question about them; 5: TRANSACTION_ABORTABLE.

A transaction begins with its first partition. Versions up to 3 are those of clients. From 4 on other brokers ask: for a
producer that leaves it to the leaders to add what it writes to (KIP-890), and, with `verify_only`, whether a producer
has added what it is about to write to. Where one partition of a transaction is not there, none is added, and the others
say OPERATION_NOT_ATTEMPTED.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.kafka.first_writes import TRANSACTIONS_PER_REQUEST
from headrace.transactions.coordinator import HELD_SECONDS
from headrace.transactions.messages import EPOCHS_BUMPED, AddRequest, Place
from headrace.wire.message import Message

FENCED_FROM: Final = 2
MANY_FROM: Final = 4
ABORTABLE_FROM: Final = 5
TRANSACTIONS_MAX: Final = 2 * TRANSACTIONS_PER_REQUEST
"""In one request: each that is refused takes an append of the coordinator."""
BROKERS_HELD_SECONDS: Final = 0.02
"""Behind the question of another broker wait those of all its producers."""


def handle(request: Request) -> Message | None:
    body = request.body
    if request.version < MANY_FROM:
        asked = AddRequest(
            body.v3_and_below_producer_id, body.v3_and_below_producer_epoch, _places(body.v3_and_below_topics)
        )
        _Answer(request, 1).add(body.v3_and_below_transactional_id, asked)
        return None
    if len(body.transactions) > TRANSACTIONS_MAX:
        return Message(throttle_time_ms=0, error_code=ErrorCode.INVALID_REQUEST, results_by_transaction=[])
    answer = _Answer(request, len(body.transactions))
    if not body.transactions:
        return answer.message()
    for one in body.transactions:
        asked = AddRequest(one.producer_id, one.producer_epoch, _places(one.topics), EPOCHS_BUMPED)
        if one.verify_only:
            take = partial(answer.take, one.transactional_id)
            request.services.transactions.verify(one.transactional_id, asked, take)
        else:
            answer.add(one.transactional_id, asked)
    return None


def _places(topics: list[Message]) -> frozenset[Place]:
    return frozenset((topic.name, index) for topic in topics for index in topic.partitions)


class _Answer:
    """Leaves when each of the transactions in the request has been answered."""

    def __init__(self, request: Request, expected: int) -> None:
        self._request = request
        self._expected = expected
        self._results: list[tuple[str, dict[Place, int]]] = []

    def add(self, transactional_id: str, asked: AddRequest) -> None:
        services, places = self._request.services, asked.partitions
        missing = {place for place in places if services.view.image.partition(*place) is None}
        if missing:
            unknown, left = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.OPERATION_NOT_ATTEMPTED
            self.take(transactional_id, {place: unknown if place in missing else left for place in places})
            return

        def added(code: int) -> None:
            self.take(transactional_id, dict.fromkeys(places, code))

        held_seconds = HELD_SECONDS if self._request.version < MANY_FROM else BROKERS_HELD_SECONDS
        services.transactions.add(transactional_id, asked, added, held_seconds)

    def take(self, transactional_id: str, codes: dict[Place, int]) -> None:
        self._results.append((transactional_id, codes))
        if len(self._results) == self._expected:
            self._request.reply(self.message())

    def message(self) -> Message:
        if self._request.version < MANY_FROM:
            return Message(throttle_time_ms=0, results_by_topic_v3_and_below=self._topics(self._results[0][1]))
        results = [Message(transactional_id=name, topic_results=self._topics(codes)) for name, codes in self._results]
        return Message(throttle_time_ms=0, error_code=ErrorCode.NONE, results_by_transaction=results)

    def _topics(self, codes: dict[Place, int]) -> list[Message]:
        topics: dict[str, list[Message]] = {}
        for (topic, index), code in sorted(codes.items()):
            row = Message(partition_index=index, partition_error_code=self._code(code))
            topics.setdefault(topic, []).append(row)
        return [Message(name=topic, results_by_partition=rows) for topic, rows in topics.items()]

    def _code(self, code: int) -> int:
        version = self._request.version
        if code == ErrorCode.PRODUCER_FENCED and version < FENCED_FROM:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if code == ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM:
            return ErrorCode.INVALID_TXN_STATE
        return code
