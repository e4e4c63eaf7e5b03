"""Markers on their way from the coordinator of a transaction to every partition that it wrote to.

What is sent in one turn leaves together: partitions that are led here are appended to at once, those of each other
broker go there in one request (WriteTxnMarkers, with the transaction's number in a tag of ours). What is not
acknowledged is sent again, to whoever leads then, after a pause; by a connection of its own, so that a partition which
cannot be written to holds up no others. A partition is done when its marker is below the watermark, or when its topic
was deleted. All is sent again by the next coordinator when this one goes: nothing is kept here.

One heap of pauses for all transactions, looked at in ticks: no timer per transaction.
"""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Final

from headrace.cluster.image import NO_LEADER, Image
from headrace.coordinators.peers import Ask
from headrace.errors import ErrorCode, HeadraceError
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.transactions.marker_appends import Codes, MarkerAppends
from headrace.transactions.messages import MarkerRequest, Place
from headrace.wire.api import WRITE_TXN_MARKERS
from headrace.wire.message import Message

log = logging.getLogger(__name__)

VERSION: Final = 2
"""Of WriteTxnMarkers."""
PLACES_PER_REQUEST: Final = 2000
TIMEOUT_MS: Final = 10_000
PAUSE_LEAST_SECONDS: Final = 0.1
PAUSE_MOST_SECONDS: Final = 2.0


class _Sending:
    """The end of one transaction, until every partition has acknowledged it."""

    __slots__ = ("done", "left", "pause_seconds", "request", "retried", "wanted")

    def __init__(self, request: MarkerRequest, wanted: Callable[[], bool], done: Callable[[], None]) -> None:
        self.request = request
        self.wanted = wanted
        self.done = done
        self.left = set(request.partitions)
        self.retried: set[Place] = set()
        """Those that wait for the next try."""
        self.pause_seconds = PAUSE_LEAST_SECONDS


Batch = list[tuple[_Sending, list[Place]]]
"""What one broker is asked in one request."""


class Markers:
    def __init__(
        self, clock: Clock, partitions: Partitions, image: Callable[[], Image], appends: MarkerAppends, ask: Ask
    ) -> None:
        self._clock = clock
        self._partitions = partitions
        self._image = image
        self._appends = appends
        self._ask = ask
        self._fresh: list[_Sending] = []
        self._pauses: list[tuple[float, int, _Sending]] = []
        self._order = count()
        self._under_way = 0

    def __len__(self) -> int:
        """Transactions whose markers are not all acknowledged."""
        return self._under_way

    def send(self, request: MarkerRequest, wanted: Callable[[], bool], done: Callable[[], None]) -> None:
        """See `transactions.messages.SendMarkers`."""
        self._under_way += 1
        if not self._fresh:
            self._clock.call_soon(self._send_fresh)
        self._fresh.append(_Sending(request, wanted, done))

    def tick(self) -> None:
        """Every 100 ms: try again what has paused long enough."""
        now, due = self._clock.now(), []
        while self._pauses and self._pauses[0][0] <= now:
            due.append(heapq.heappop(self._pauses)[2])
        tries = []
        for sending in due:
            places, sending.retried = sending.retried, set()
            if sending.wanted():
                tries.append((sending, sorted(places)))
            else:
                sending.left.clear()  # what is on its way is not waited for
                self._under_way -= 1
        self._send(tries, again=True)

    def _send_fresh(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._send([(sending, sending.request.partitions) for sending in fresh], again=False)

    def _send(self, tries: Sequence[tuple[_Sending, Iterable[Place]]], *, again: bool) -> None:
        by_broker: defaultdict[int, Batch] = defaultdict(list)
        for sending, places in tries:
            of_broker: defaultdict[int, list[Place]] = defaultdict(list)
            gone: list[Place] = []
            for place in places:
                leader = self._leader(place)
                (gone if leader is None else of_broker[leader]).append(place)
            for broker, led in of_broker.items():
                by_broker[broker].append((sending, led))
            self._acknowledged(sending, gone)
        for broker, batch in by_broker.items():
            if broker == NO_LEADER:
                for sending, places in batch:
                    self._pause(sending, places)
            elif broker == self._partitions.broker:
                self._append(batch)
            else:
                for part in in_parts(batch):
                    self._ask_broker(broker, part, again=again)

    def _leader(self, place: Place) -> int | None:
        """None: there is no such partition any more. A topic of which only the key is missing is still there."""
        topic, index = place
        if self._partitions.find(topic, index) is not None:
            return self._partitions.broker
        image = self._image()
        known = image.topics.get(topic)
        if known is None:
            return NO_LEADER if topic in image.keyless or topic in image.unfinished else None
        if index >= len(known.partitions):
            return None
        leader = known.partitions[index].leader
        return leader if leader in image.brokers and leader != self._partitions.broker else NO_LEADER

    # One broker.

    def _append(self, batch: Batch) -> None:
        for sending, places in batch:
            self._appends.write(sending.request, places, partial(self._answered, sending))
        self._partitions.end_turn()

    def _ask_broker(self, broker: int, batch: Batch, *, again: bool) -> None:
        def reply(answer: Message | HeadraceError) -> None:
            if isinstance(answer, HeadraceError):
                log.debug("markers for broker %d: %s", broker, answer)
                for sending, places in batch:
                    self._pause(sending, places)
                return
            for (sending, places), marker in zip(batch, _answers(answer, len(batch)), strict=True):
                self._answered(sending, {place: marker.get(place, ErrorCode.UNKNOWN_SERVER_ERROR) for place in places})

        message = Message(markers=[_marker(sending.request, places) for sending, places in batch])
        self._ask(broker, WRITE_TXN_MARKERS, VERSION, message, reply, TIMEOUT_MS, again=again)

    def _answered(self, sending: _Sending, codes: Codes) -> None:
        ended = [place for place, code in codes.items() if code == ErrorCode.NONE]
        for place, code in codes.items():
            if code == ErrorCode.INVALID_PRODUCER_EPOCH:
                # A producer's next epoch writes only when this transaction has ended everywhere: an earlier try of this
                # marker was taken, by a coordinator that could not hear of it.
                log.warning("%s-%d: transaction %r has ended there before", *place, sending.request.transactional_id)
                ended.append(place)
        self._acknowledged(sending, ended)
        self._pause(sending, codes.keys() - set(ended))

    def _acknowledged(self, sending: _Sending, places: Iterable[Place]) -> None:
        before = len(sending.left)
        sending.left.difference_update(places)
        if before and not sending.left:
            self._under_way -= 1
            sending.done()
        elif len(sending.left) < before:
            sending.pause_seconds = PAUSE_LEAST_SECONDS

    def _pause(self, sending: _Sending, places: Iterable[Place]) -> None:
        """What fails of one transaction within one pause is tried again together."""
        places = sending.left.intersection(places)
        if not places:
            return
        if not sending.retried:
            heapq.heappush(self._pauses, (self._clock.now() + sending.pause_seconds, next(self._order), sending))
            sending.pause_seconds = min(2 * sending.pause_seconds, PAUSE_MOST_SECONDS)
        sending.retried.update(places)


def in_parts(batch: Batch, most: int = PLACES_PER_REQUEST) -> Iterator[Batch]:
    """The same in parts of at most so many partitions."""
    part: Batch = []
    room = most
    for sending, places in batch:
        at = 0
        while at < len(places):
            taken = places[at : at + room]
            part.append((sending, taken))
            at += len(taken)
            room -= len(taken)
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def _marker(request: MarkerRequest, places: Iterable[Place]) -> Message:
    topics: dict[str, list[int]] = {}
    for topic, index in places:
        topics.setdefault(topic, []).append(index)
    return Message(
        producer_id=request.producer_id,
        producer_epoch=request.epoch,
        transaction_result=request.committed,
        topics=[Message(name=name, partition_indexes=indexes) for name, indexes in topics.items()],
        coordinator_epoch=request.coordinator_epoch,
        transaction_version=request.transaction_version,
        number=request.number,
    )


def _answers(answer: Message, wanted: int) -> list[Codes]:
    """The codes of each marker, in the order in which they were asked for."""
    found = [
        {(topic.name, one.partition_index): one.error_code for topic in marker.topics for one in topic.partitions}
        for marker in answer.markers
    ]
    return (found + [{}] * wanted)[:wanted]
