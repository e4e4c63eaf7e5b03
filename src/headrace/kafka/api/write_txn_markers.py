"""WriteTxnMarkers, versions 1 to 2: the coordinator of a transaction has its end written by the leaders of its
partitions. Version 2 tells which version of transactions the producer speaks. Between our brokers a tagged field says
which transaction of its transactional id is meant; Kafka's tools, which end a hanging one, leave it out. A request with
more than our brokers put into one is refused as a whole: each marker is a batch of its own.
"""

from __future__ import annotations

from functools import partial

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.transactions.marker_appends import Codes
from headrace.transactions.markers import PLACES_PER_REQUEST
from headrace.transactions.messages import MarkerRequest, Place
from headrace.wire.message import Message


def handle(request: Request) -> None:
    pending, markers = _Pending(request), request.body.markers
    places_count = sum(len(topic.partition_indexes) for marker in markers for topic in marker.topics)
    is_refused = max(len(markers), places_count) > PLACES_PER_REQUEST
    for marker in markers:
        places: tuple[Place, ...] = tuple(
            (topic.name, index) for topic in marker.topics for index in topic.partition_indexes
        )
        order = MarkerRequest(
            "",
            marker.producer_id,
            marker.producer_epoch,
            marker.coordinator_epoch,
            marker.transaction_result,
            marker.number,
            marker.transaction_version,
            places,
        )
        number = pending.add(order)
        if is_refused or order.producer_id < 0 or order.epoch < 0:
            pending.written(number, dict.fromkeys(places, ErrorCode.INVALID_REQUEST))
            continue
        request.services.marker_appends.write(order, places, partial(pending.written, number))
    pending.release()


class _Pending:
    """The request until each of its markers is answered."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._orders: list[MarkerRequest] = []
        self._codes: dict[int, Codes] = {}
        self._left = 1

    def add(self, order: MarkerRequest) -> int:
        self._left += 1
        self._orders.append(order)
        return len(self._orders) - 1

    def written(self, number: int, codes: Codes) -> None:
        self._codes[number] = codes
        self.release()

    def release(self) -> None:
        self._left -= 1
        if not self._left:
            markers = [_answer(order, self._codes[number]) for number, order in enumerate(self._orders)]
            self._request.reply(Message(markers=markers))


def _answer(order: MarkerRequest, codes: Codes) -> Message:
    topics: dict[str, list[Message]] = {}
    for name, index in order.partitions:
        result = Message(partition_index=index, error_code=codes[name, index])
        topics.setdefault(name, []).append(result)
    found = [Message(name=name, partitions=results) for name, results in topics.items()]
    return Message(producer_id=order.producer_id, topics=found)
