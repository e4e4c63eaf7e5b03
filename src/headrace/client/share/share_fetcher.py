"""Records from the leaders of a member's partitions, and acknowledgements to them.

One ShareFetch is under way to each broker while the application waits for records and none are there: what is fetched
ahead would only use up its lock. Acknowledgements travel with it, or by ShareAcknowledge: at once when somebody waits
for them, when records are there already, and when locks are renewed. All of one broker use one connection, to which its
share session belongs (`share_session`).

An acknowledgement goes to who leads the partition now: locks outlive the broker that gave them. What fails and may pass
is said again until `timeout_ms` after it was first said; then whoever asked hears why. Of a partition all that one
request says is taken, or nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.reactor import Backoff, Timer
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.errors import NeverSent, Refusal
from headrace.client.fetch_requests import fetch_refusal
from headrace.client.share.deliveries import Said, batches_of, settled
from headrace.client.share.options import ShareConsumerConfig
from headrace.client.share.share_session import FINAL_EPOCH, LOST, ShareSession, TopicIdPartition, by_topic
from headrace.errors import ErrorCode, HeadraceError, RequestTimedOut
from headrace.queues.messages import AcknowledgeType
from headrace.wire import api as apis
from headrace.wire.message import Message

ANSWER_WITHIN_S: Final = 30.0
CLOSE_WITHIN_S: Final = 5.0

_lanes = count()
_numbers = count()
log = logging.getLogger(__name__)


class SharePlace(NamedTuple):
    """A partition by name and by id: a topic that was made anew is another one."""

    topic: str
    topic_id: bytes
    partition: int

    @property
    def key(self) -> TopicIdPartition:
        return self.topic_id, self.partition

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(slots=True, eq=False)
class _Cursor:
    """A partition that is fetched."""

    place: SharePlace
    backoff: Backoff = field(default_factory=Backoff)
    not_before: float = 0.0


@dataclass(slots=True, eq=False)
class Acknowledgement:
    """What is to be said of one partition, until its leader has answered."""

    number: int
    """Those of later calls have higher ones."""
    place: SharePlace
    said: list[Said]
    deadline: float
    is_unsure: bool = False
    """An answer was lost: it may have been taken."""
    heard: list[Callable[[Acknowledgement, HeadraceError | None], None]] = field(default_factory=list)
    """Who waits for it."""
    backoff: Backoff = field(default_factory=Backoff)
    not_before: float = 0.0

    @property
    def renews(self) -> bool:
        return any(each.type is AcknowledgeType.RENEW for each in self.said)


@dataclass(frozen=True, slots=True)
class AcquiredSet:
    """Whole batches of one partition as they came, and which records of them are this member's."""

    place: SharePlace
    records: memoryview
    acquired: tuple[tuple[int, int, int], ...]
    """First offset, last offset, delivery count."""


class _Node:
    """A broker."""

    def __init__(self) -> None:
        self.session = ShareSession()
        self.is_fetching = False
        """A fetch is under way."""
        self.backoff = Backoff()
        self.not_before = 0.0


class ShareFetcher:
    """All methods are called with the reactor's lock held. `on_ready` is called when there is something to take or to
    tell; `on_settled` hears what became of each acknowledgement."""

    def __init__(
        self,
        pool: ConnectionPool,
        options: ShareConsumerConfig,
        member_id: str,
        *,
        on_ready: Callable[[], None],
        on_settled: Callable[[Acknowledgement, HeadraceError | None], None],
    ) -> None:
        self.sets: deque[AcquiredSet] = deque()
        """What waits to be handed out."""
        self.failure: HeadraceError | None = None
        """What keeps records from coming, told once."""
        self._pool = pool
        self._reactor = pool.reactor
        self._metadata = pool.metadata
        self._options = options
        self._member_id = member_id
        self._on_ready = on_ready
        self._on_settled = on_settled
        self._cursors: dict[TopicIdPartition, _Cursor] = {}
        self._nameless: frozenset[TopicIdPartition] = frozenset()
        """Assigned, and their topics are not known yet."""
        self._topics: frozenset[str] = frozenset()
        self._nodes: dict[int, _Node] = {}
        self._unsent: list[Acknowledgement] = []
        self._open: set[Acknowledgement] = set()
        """All that are not settled."""
        self._wanted = 0
        """Records that the application waits for."""
        self._timer: Timer | None = None
        self._closed = False
        self._channel = f"share fetch {next(_lanes)}"
        self._metadata.listeners.append(self._on_metadata)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._metadata.listeners.remove(self._on_metadata)
        self._pool.close_channel(self._channel)
        if self._timer is not None:
            self._timer.cancel()

    # What is fetched

    @property
    def assigned(self) -> list[TopicPartition]:
        return sorted((cursor.place.topic, cursor.place.partition) for cursor in self._cursors.values())

    def assign(self, places: frozenset[TopicIdPartition], topics: frozenset[str]) -> None:
        """Fetch these, of topics of these names, and no others."""
        names = {found.topic_id: name for name in topics if (found := self._metadata.topic(name)) is not None}
        self._topics = topics
        self._nameless = frozenset(place for place in places if place[0] not in names)
        self._cursors = {
            place: self._cursors.get(place) or _Cursor(SharePlace(names[place[0]], *place))
            for place in sorted(places - self._nameless)
        }
        for name in topics - set(names.values()) if self._nameless else ():
            self._metadata.stale(name)
        self.send()
        self._on_ready()

    def want(self, records: int) -> None:
        """The application waits for so many records; 0: it does not."""
        self._wanted = records
        self.send()

    # What is acknowledged

    def acknowledge(self, place: SharePlace, said: list[Said]) -> None:
        """To be said with the next request; `send` follows."""
        told = Acknowledgement(next(_numbers), place, said, self._reactor.now() + self._options.timeout_ms / 1000)
        self._unsent.append(told)
        self._open.add(told)

    @property
    def unsettled(self) -> set[Acknowledgement]:
        return set(self._open)

    def _settle(self, told: Acknowledgement, error: HeadraceError | None) -> None:
        self._open.discard(told)
        self._on_settled(told, error)
        for heard in told.heard:
            heard(told, error)

    def _failed(self, acknowledgements: Iterable[Acknowledgement], error: HeadraceError, *, unsure: bool) -> None:
        """Say it again later, or tell who asked that it cannot be."""
        now = self._reactor.now()
        for told in acknowledgements:
            told.is_unsure |= unsure
            told.not_before = now + told.backoff.take()
            if not error.mapping.retriable:
                self._settle(told, error)
            elif told.not_before >= told.deadline:
                waited_ms = self._options.timeout_ms
                self._settle(told, RequestTimedOut(f"{told.place}: not acknowledged in {waited_ms} ms: {error}"))
            else:
                self._unsent.append(told)

    # Requests

    def send(self) -> None:
        """To every broker what there is to say and to ask now."""
        if self._closed:
            return
        now = self._reactor.now()
        fetchable: dict[int, list[_Cursor]] = {}
        for cursor in self._cursors.values():
            leader = self._leader(cursor.place) if now >= cursor.not_before else None
            if leader is not None:
                fetchable.setdefault(leader, []).append(cursor)
            elif now >= cursor.not_before:
                cursor.not_before = now + cursor.backoff.take()
        unsent, self._unsent = self._unsent, []
        to_tell: dict[int, list[Acknowledgement]] = {}
        for told in unsent:
            leader = self._leader(told.place) if now >= told.not_before else None
            if leader is not None:
                to_tell.setdefault(leader, []).append(told)
            elif now >= told.not_before:
                self._failed([told], Refusal(ErrorCode.LEADER_NOT_AVAILABLE, f"acknowledge {told.place}"), unsure=False)
            else:
                self._unsent.append(told)
        wants = self._wanted > 0 and not self.sets
        for broker_id in dict.fromkeys((*to_tell, *(fetchable if wants else ()))):
            self._send_to(broker_id, fetchable.get(broker_id, []), to_tell.get(broker_id, []), now, wants=wants)
        self._wake_later(now)

    def _leader(self, place: SharePlace) -> int | None:
        leader = self._metadata.leader(place.topic, place.partition)
        if leader is None:
            self._metadata.stale(place.topic)
        return leader

    def _send_to(
        self, broker_id: int, cursors: list[_Cursor], told: list[Acknowledgement], now: float, *, wants: bool
    ) -> None:
        node = self._nodes.setdefault(broker_id, _Node())
        fetches = wants and bool(cursors) and not node.is_fetching
        if now < node.not_before or (node.is_fetching and not node.session.is_open):
            self._unsent += told
        elif not node.session.is_open:
            self._unsent += told  # a session begins without: the answer brings it on
            if fetches or told:
                self._fetch(broker_id, node, cursors, [], 0 if told else self._wanted)
        elif fetches and not any(each.renews for each in told):
            self._fetch(broker_id, node, cursors, told, self._wanted)
        else:
            if told:
                self._acknowledge(broker_id, node, told)
            if fetches:
                self._fetch(broker_id, node, cursors, [], self._wanted)

    def _fetch(
        self, broker_id: int, node: _Node, cursors: list[_Cursor], told: list[Acknowledgement], records: int
    ) -> None:
        node.is_fetching = True
        options = self._options
        places = {cursor.place.key: cursor for cursor in cursors}
        changes = node.session.changes(places)
        rows = {key: Message(partition_index=key[1], acknowledgement_batches=[]) for key in changes.added}
        rows |= _rows(told)
        body = Message(
            group_id=options.group,
            member_id=self._member_id,
            share_session_epoch=changes.epoch,
            max_wait_ms=options.max_wait_ms if records else 0,
            min_bytes=options.min_bytes if records else 0,
            max_bytes=options.fetch_bytes if records else 0,
            max_records=records,
            batch_size=records,
            share_acquire_mode=options.acquire_number,
            is_renew_ack=False,
            topics=by_topic(rows.items()),
            forgotten_topics_data=by_topic((key, key[1]) for key in changes.forgotten),
        )
        generation = node.session.generation

        def answered(answer: Message | HeadraceError) -> None:
            node.is_fetching = False
            if self._is_refused(broker_id, node, generation, told, cursors, answer):
                return
            assert isinstance(answer, Message)
            names = {place.key: place for place in _places(cursors, told)}
            for topic in answer.responses:
                for row in topic.partitions:
                    place = names.get((bytes(topic.topic_id), row.partition_index))
                    if place is not None:
                        self._take_in(place, places.get(place.key), row, answer)
            codes = {
                (bytes(topic.topic_id), row.partition_index): (row.acknowledge_error_code, row)
                for topic in answer.responses
                for row in topic.partitions
            }
            self._told(told, codes, answer)
            self.send()
            if self.sets or self.failure is not None:
                self._on_ready()

        self._ask(broker_id, apis.SHARE_FETCH, body, answered, body.max_wait_ms / 1000 + ANSWER_WITHIN_S)

    def _acknowledge(self, broker_id: int, node: _Node, told: list[Acknowledgement]) -> None:
        generation = node.session.generation
        body = self._acknowledge_request(node.session.next_epoch(), told)

        def answered(answer: Message | HeadraceError) -> None:
            if self._is_refused(broker_id, node, generation, told, [], answer):
                return
            assert isinstance(answer, Message)
            codes = {
                (bytes(topic.topic_id), row.partition_index): (row.error_code, row)
                for topic in answer.responses
                for row in topic.partitions
            }
            self._told(told, codes, answer)
            self.send()

        self._ask(broker_id, apis.SHARE_ACKNOWLEDGE, body, answered, ANSWER_WITHIN_S)

    def _acknowledge_request(self, epoch: int, told: Sequence[Acknowledgement]) -> Message:
        return Message(
            group_id=self._options.group,
            member_id=self._member_id,
            share_session_epoch=epoch,
            is_renew_ack=any(each.renews for each in told),
            topics=by_topic(_rows(told).items()),
        )

    def _ask(
        self,
        broker_id: int,
        api_key: int,
        body: Message,
        answered: Callable[[Message | HeadraceError], None],
        timeout_s: float,
    ) -> None:
        def heard(answer: Message | HeadraceError) -> None:
            if not self._closed:
                answered(answer)

        try:
            connection = self._pool.broker(broker_id, self._channel)
        except HeadraceError as error:
            refused = error  # the name of the handler ends with it
            self._reactor.call_soon(lambda: heard(refused))
            return
        connection.ask(api_key, body, heard, timeout_s=timeout_s)

    # Answers

    def _is_refused(
        self,
        broker_id: int,
        node: _Node,
        generation: int,
        told: list[Acknowledgement],
        cursors: list[_Cursor],
        answer: Message | HeadraceError,
    ) -> bool:
        """Whether the request as a whole came to nothing; then what is to be done about it is done."""
        if isinstance(answer, Message) and answer.error_code == ErrorCode.NONE:
            node.backoff.reset()
            return False
        unsure = isinstance(answer, HeadraceError) and not isinstance(answer, NeverSent)
        if isinstance(answer, Message):
            where = f"share group {self._options.group!r} at broker {broker_id}"
            answer = Refusal(answer.error_code, where, answer.error_message)
        if generation == node.session.generation:
            node.session.lose()
            if answer.kafka_code not in LOST:
                node.not_before = self._reactor.now() + node.backoff.take()
        if answer.kafka_code not in LOST:
            for topic in {place.topic for place in _places(cursors, told)}:
                self._metadata.stale(topic)
            if not answer.mapping.retriable:
                self.failure = answer
        self._failed(told, answer, unsure=unsure)
        self.send()
        self._on_ready()
        return True

    def _take_in(self, place: SharePlace, cursor: _Cursor | None, row: Message, answer: Message) -> None:
        if row.error_code == ErrorCode.NONE:
            if cursor is not None:
                cursor.backoff.reset()
            if row.acquired_records:
                acquired = tuple(
                    (each.first_offset, each.last_offset, each.delivery_count) for each in row.acquired_records
                )
                self.sets.append(AcquiredSet(place, memoryview(row.records or b""), acquired))
            return
        refusal = fetch_refusal(row.error_code, f"share fetch of {place}")
        self._moved(place, row, answer)
        if cursor is not None:
            cursor.not_before = self._reactor.now() + cursor.backoff.take()
        if not refusal.mapping.retriable and row.error_code not in PASSING:
            self.failure = refusal

    def _told(
        self, told: Iterable[Acknowledgement], codes: dict[TopicIdPartition, tuple[int, Message]], answer: Message
    ) -> None:
        for each in told:
            code, row = codes.get(each.place.key, (ErrorCode.NONE, None))
            if code == ErrorCode.NONE:
                self._settle(each, None)
                continue
            if row is not None:
                self._moved(each.place, row, answer)
            if code == ErrorCode.INVALID_RECORD_STATE and each.is_unsure:
                about = "asked again, as the first answer was lost, by which it may have been taken"
                self._settle(each, Refusal(code, f"acknowledge {each.place}, {about}"))
            else:
                self._failed([each], Refusal(code, f"acknowledge {each.place}"), unsure=False)

    def _moved(self, place: SharePlace, row: Message, answer: Message) -> None:
        leader = row.current_leader
        if leader is not None and leader.leader_id >= 0:
            self._metadata.hint(
                place.topic, place.partition, leader.leader_id, leader.leader_epoch, answer.node_endpoints
            )
        else:
            self._metadata.stale(place.topic)

    def _on_metadata(self, *_: object) -> None:
        """Leaders may have moved, or topics become known."""
        for cursor in self._cursors.values():
            cursor.not_before = 0.0
        for told in self._unsent:
            told.not_before = 0.0
        if self._nameless:
            self.assign(frozenset(self._cursors) | self._nameless, self._topics)
        else:
            self.send()

    def _wake_later(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [told.not_before for told in self._unsent]
        if self._wanted and not self.sets:
            times += [cursor.not_before for cursor in self._cursors.values()]
        if times:
            times += [node.not_before for node in self._nodes.values()]
        when = min((at for at in times if at > now), default=None)
        if when is not None:
            self._timer = self._reactor.call_at(when, self.send)

    # The end

    def end_sessions(self, on_done: Callable[[], None]) -> None:
        """Tell all brokers; what was acquired and not acknowledged goes to others."""
        open_nodes = {broker_id: node for broker_id, node in self._nodes.items() if node.session.is_open}
        left = set(open_nodes)
        if not left:
            self._reactor.call_soon(on_done)

        def answered(broker_id: int) -> None:
            left.discard(broker_id)
            if not left:
                on_done()

        for broker_id, node in open_nodes.items():
            node.session.lose()
            body = self._acknowledge_request(FINAL_EPOCH, [])
            self._ask(
                broker_id,
                apis.SHARE_ACKNOWLEDGE,
                body,
                lambda _, broker_id=broker_id: answered(broker_id),  # type: ignore[misc]
                CLOSE_WITHIN_S,
            )


PASSING: Final = frozenset({ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.UNKNOWN_TOPIC_ID})
"""Of a partition, beside what is retriable anywhere: its state is not made yet, or its topic is just being deleted; the
group's coordinator tells when it is not this member's any more."""


def _places(cursors: Iterable[_Cursor], told: Iterable[Acknowledgement]) -> list[SharePlace]:
    return [*(cursor.place for cursor in cursors), *(each.place for each in told)]


def _rows(told: Iterable[Acknowledgement]) -> dict[TopicIdPartition, Message]:
    """One for each partition, which names no offset twice."""
    said: dict[TopicIdPartition, list[Said]] = {}
    for each in sorted(told, key=attrgetter("number")):
        said.setdefault(each.place.key, []).extend(each.said)
    return {
        key: Message(partition_index=key[1], acknowledgement_batches=batches_of(settled(rows)))
        for key, rows in said.items()
    }
