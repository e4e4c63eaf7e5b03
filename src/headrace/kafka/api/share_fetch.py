"""ShareFetch, versions 1 to 2. 2: exactly so many records at most (KIP-1206), and locks renewed (KIP-1222).

A member of a share group acquires records of the partitions of its share session (`kafka.share_sessions`), and
acknowledges others on the way. It is answered when both are kept: at once, or when there is something to acquire, or
its wait is over. The answer is encoded bytes with file slices of whole batches between them; nothing is read here.

Whoever has gone before the answer is ready acquires nothing: what was taken for it is released. `min_bytes` is not
waited for: what is there is acquired and sent, because others could have it meanwhile.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.errors import ErrorCode, HeadraceError, InvalidRequest
from headrace.kafka.connection import Request
from headrace.kafka.share_acknowledgements import Codes, Whereabouts, acknowledgements_of, by_topic, member_of
from headrace.kafka.share_sessions import FINAL_EPOCH, INITIAL_EPOCH, MemberKey, ShareSession
from headrace.ports.network import Part
from headrace.queues.messages import AcknowledgementBatch, AcknowledgeType, Acquired, AcquireRequest, TopicIdPartition
from headrace.storage.page_cache import are_warm
from headrace.wire import share_fetch as wire

RECORD_LIMIT: Final = 1
"""The acquire mode in which a batch is taken in part, rather than more records than were asked for."""

Found = dict[TopicIdPartition, Acquired]
NOTHING: Final = Acquired()


class PendingShareFetch:
    """One fetch until its answer."""

    __slots__ = (
        "_acknowledged",
        "_acquiring",
        "_asked",
        "_found",
        "_key",
        "_may_wait",
        "_request",
        "_session",
        "_timed",
        "answered",
    )

    def __init__(self, request: Request, key: MemberKey, session: ShareSession) -> None:
        body, services = request.body, request.services
        self._request = request
        self._key = key
        self._session = session
        self._acknowledged: Codes | None = None
        """None while what was acknowledged is not kept."""
        self._found: Found | None = None
        """None while there is nothing to tell, and it may still wait."""
        self.answered = False
        """It waits for nothing more that could be acquired."""
        self._acquiring = False
        self._timed = False
        self._may_wait = body.max_wait_ms > 0
        max_bytes = min(body.max_bytes, services.settings["fetch.max.bytes"])
        self._asked = AcquireRequest(
            group=key.group,
            member=key.member,
            max_records=body.max_records,
            max_bytes=max_bytes,
            partition_max_bytes=max_bytes,
            record_limit=body.share_acquire_mode == RECORD_LIMIT,
        )

    def start(self) -> None:
        request, services = self._request, self._request.services
        taken, refused = acknowledgements_of(request)
        if taken:
            services.share_partitions.acknowledge(
                *self._key, taken, lambda codes: self._acknowledgements_kept({**codes, **refused})
            )
        else:
            self._acknowledged = refused
        if request.body.share_session_epoch == FINAL_EPOCH:
            services.share_sessions.close(self._session)
        wants = self._asked.max_records > 0 and self._asked.max_bytes > 0 and bool(self._session.partitions)
        if wants and not self._session.closed and not request.body.is_renew_ack:
            self._acquire()
        else:
            self._settle({})

    def _acknowledgements_kept(self, codes: Codes) -> None:
        self._acknowledged = codes
        self._answer()

    def _acquire(self) -> None:
        self._acquiring = True
        places = list(self._session.partitions)
        self._request.services.share_partitions.acquire(self._asked, places, self._acquired)

    def _acquired(self, found: Found) -> None:
        self._acquiring = False
        if self._session.closed:
            self._release(found)
            found = {}
        if found or not self._may_wait or self._session.closed:
            self._settle(found)
            return
        services = self._request.services
        self._session.wait(self)
        services.share_partitions.wait(self._key.group, self._session.partitions, self)
        if not self._timed:
            self._timed = True
            wait_ms = min(self._request.body.max_wait_ms, services.settings["request.timeout.max.ms"])
            services.partitions.deadlines.add(services.clock.now() + wait_ms / 1000, self)

    def records_available(self) -> None:
        if not self.answered and not self._acquiring:
            self._session.wait(None)
            self._acquire()

    def expire(self) -> None:
        self._may_wait = False
        if not self._acquiring and not self.answered:
            self._settle({})

    def _settle(self, found: Found) -> None:
        self.answered = True
        self._session.wait(None)
        slices = [piece for acquired in found.values() for piece in acquired.slices]
        if are_warm(self._request.services.disk, slices, lambda: self._ready(found)):
            self._ready(found)

    def _ready(self, found: Found) -> None:
        self._found = found
        self._answer()

    def _answer(self) -> None:
        """Once both are known."""
        if self._found is None or self._acknowledged is None:
            return
        if self._session.closed:
            self._release(self._found)
            self._found = {}
        request, services = self._request, self._request.services
        where = Whereabouts(request)
        rows = _rows(self._found, self._acknowledged, where)
        for place, acquired in self._found.items():
            self._session.served(place)
            if acquired.records:
                self._count(place, acquired)
        lock_ms = services.share_group_config(self._key.group).lock_ms
        parts: list[Part] = []
        for part in wire.encode_response(
            request.correlation_id, ErrorCode.NONE, None, lock_ms, by_topic(rows), where.endpoints()
        ):
            if isinstance(part, tuple):
                parts.extend(part)
            else:
                parts.append(part)
        request.connection.fill(request.response, parts)

    def _count(self, place: TopicIdPartition, acquired: Acquired) -> None:
        services = self._request.services
        topic = services.view.image.topics_by_id.get(place[0])
        partition = None if topic is None else services.partitions.find(topic.name, place[1])
        if partition is not None:
            partition.traffic.sent(acquired.record_count, acquired.size_bytes)

    def _release(self, found: Found) -> None:
        """The session has ended, and its member will not see these. Where it has begun another one it keeps what that
        one has acquired."""
        services = self._request.services
        taken = {place: acquired.records for place, acquired in found.items() if acquired.records}
        if not taken:
            return
        if self._key not in services.share_sessions:
            services.share_partitions.release(*self._key)
            return
        types = (int(AcknowledgeType.RELEASE),)
        batches = {
            place: [AcknowledgementBatch(first, last, types) for first, last, _ in records]
            for place, records in taken.items()
        }
        services.share_partitions.acknowledge(*self._key, batches, lambda _: None)


def _rows(found: Found, acknowledged: Codes, where: Whereabouts) -> dict[TopicIdPartition, wire.SharedPartition]:
    rows: dict[TopicIdPartition, wire.SharedPartition] = {}
    for place in [*found, *(place for place in acknowledged if place not in found)]:
        acquired = found.get(place, NOTHING)
        code = where.code(place, acquired.error_code)
        said = where.code(place, acknowledged.get(place, ErrorCode.NONE))
        rows[place] = wire.SharedPartition(
            place[1],
            code,
            acknowledge_error_code=said,
            current_leader=where.leader(place, code or said),
            payload=acquired.slices,
            payload_bytes=acquired.size_bytes,
            acquired=acquired.records,
        )
    return rows


def handle(request: Request) -> None:
    services, body = request.services, request.body
    try:
        key = member_of(request)
        _check_renewal(body)
        session = _session(request, key)
    except HeadraceError as error:
        services.metrics.error("ShareFetch", error.kafka_code)
        parts = wire.encode_response(request.correlation_id, error.kafka_code, str(error), 0, ())
        request.connection.fill(request.response, parts)
        return
    PendingShareFetch(request, key, session).start()


def _check_renewal(body: Any) -> None:
    """A request that renews locks fetches nothing, or they might run out before it is answered."""
    if body.is_renew_ack and (body.max_bytes or body.min_bytes or body.max_records or body.max_wait_ms):
        raise InvalidRequest("a request that renews locks has 0 for the maxima of bytes, records and wait")


def _session(request: Request, key: MemberKey) -> ShareSession:
    """The session that this fetch begins, goes on with, or ends."""
    body, sessions, owner = request.body, request.services.share_sessions, request.connection
    named = [(topic.topic_id, each.partition_index) for topic in body.topics for each in topic.partitions]
    if body.share_session_epoch == INITIAL_EPOCH:
        if any(each.acknowledgement_batches for topic in body.topics for each in topic.partitions):
            raise InvalidRequest("who begins a share session has nothing to acknowledge")
        return sessions.open(owner, key, named)
    session = sessions.resume(owner, key, body.share_session_epoch)
    if body.share_session_epoch != FINAL_EPOCH:
        forgotten = [(topic.topic_id, index) for topic in body.forgotten_topics_data for index in topic.partitions]
        sessions.update(session, named, forgotten)
    return session
