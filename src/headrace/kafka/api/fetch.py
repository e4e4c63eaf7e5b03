"""Fetch, versions 4 to 18. 7: fetch sessions; 9: leader epochs; 11: racks; 12: flexible; 13: topics by id;
16: where leaders are.

A fetch is answered at once when it has min_bytes or an error, else when enough has been committed or its wait is over.
The answer is encoded bytes with file slices between them; nothing is read here. A slice that is not in the page cache
is read ahead by the disk first, and what was never checked is checked over several turns, so that one consumer of old
data does not stop the others.
A fetch of a session (KIP-227, `kafka.fetch_sessions`) is one of the partitions that may have something to tell, and its
answer has those that do.
Who reads only what is committed (isolation level 1) is served up to the last stable offset, and told which transactions
were aborted; before that is known, after a start, the answer is OFFSET_NOT_AVAILABLE.
A consumer that names its rack is sent to a follower there, which serves it up to its own watermark (KIP-392). What a
follower does not have yet is OFFSET_NOT_AVAILABLE, never out of range: the leader has it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from headrace.cluster.image import Image
from headrace.errors import ErrorCode, HeadraceError
from headrace.kafka import leader_lookup
from headrace.kafka.connection import Connection, PendingResponse
from headrace.kafka.fetch_sessions import FINAL_EPOCH, INITIAL_EPOCH, NO_SESSION, READ_COMMITTED, FetchSession
from headrace.partitions.partition import NOTHING_READ, Partition
from headrace.ports.disk import FileSlice
from headrace.ports.network import Part
from headrace.storage.page_cache import are_warm, read_ahead
from headrace.wire import fetch as wire

ENOUGH_BYTES: Final = 4 << 20
"""With so much of an answer the rest, if it has to be checked first, is left to the next fetch."""
NO_REPLICA = -1
TOPIC_IDS_FROM: Final = 13
FOLLOWERS_FROM: Final = 11
"""The version from which on consumers know that they may be served by followers."""
ENDPOINTS_FROM: Final = 16
MOVED: Final = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})

Row = wire.FetchedPartition
Topics = list[tuple[str | None, bytes | None, list[Row]]]
Collected = tuple[Topics, int, bool, list[Partition], list[FileSlice]]
"""Rows for all partitions asked for; bytes found; whether one has an answer that cannot wait; the partitions that
could; what has to be checked before it can be found."""


class PendingFetch:
    """One fetch until its answer."""

    __slots__ = (
        "_connection",
        "_correlation_id",
        "_elsewhere",
        "_grown_bytes",
        "_request",
        "_response",
        "_served",
        "_session",
        "_version",
        "answered",
    )

    def __init__(
        self,
        connection: Connection,
        response: PendingResponse,
        version: int,
        correlation_id: int,
        request: wire.FetchRequest,
    ) -> None:
        self.answered = False
        self._connection = connection
        self._response = response
        self._version = version
        self._correlation_id = correlation_id
        self._request = request
        self._grown_bytes = 0
        self._elsewhere: set[int] | None = None
        """Brokers that lead partitions asked for here."""
        self._session: FetchSession | None = None
        self._served: list[tuple[Partition, int, int]] = []
        """Partitions of which something is in the answer, from which offset on, and how many bytes."""

    def start(self) -> None:
        request = self._request
        if request.session_epoch != FINAL_EPOCH or request.session_id != NO_SESSION:
            try:
                self._session = self._find_session()
            except HeadraceError as error:
                self._send(error.kafka_code, [])
                return
        self._go_on(may_wait=request.max_wait_ms > 0)

    def _find_session(self) -> FetchSession | None:
        """The session that this fetch goes on with, or begins."""
        request, owner = self._request, self._connection
        sessions, by_id = owner.services.fetch_sessions, self._version >= TOPIC_IDS_FROM
        if request.session_epoch not in (INITIAL_EPOCH, FINAL_EPOCH):
            session = sessions.resume(owner, request, by_id=by_id)
            if session is None:
                self._request = request._replace(topics=[])
        else:
            sessions.close_named(owner, request.session_id)
            session = sessions.create(owner, request, by_id=by_id) if request.session_epoch == INITIAL_EPOCH else None
        if session is not None:
            session.busy = True
        return session

    def _go_on(self, *, may_wait: bool, warm: bool = False) -> None:
        """Answer with what there is, once it was checked; or wait for more."""
        request, services, session = self._request, self._connection.services, self._session
        image = services.view.image
        asked = request.topics if session is None else session.asked(lambda topic_id: _named(image, topic_id))
        topics, count, failed, partitions, unchecked = self._collect(asked, warm)
        if unchecked and count < max(request.min_bytes, ENOUGH_BYTES):
            again = partial(self._go_on, may_wait=may_wait, warm=True)
            if are_warm(services.disk, unchecked, again):
                services.clock.call_soon(again)
            return
        if session is not None:
            session.wait(topics, partitions)
            may_wait = may_wait and not session.closed
        elif not partitions:
            may_wait = False
        if failed or count >= request.min_bytes or not may_wait:
            if session is not None:
                topics = session.news(topics, request.isolation_level)
                session.busy = False
            self._answer(topics)
            return
        self._grown_bytes = count
        if session is not None:
            session.waiting = self
        else:
            for partition in partitions:
                partition.wait_for_data(self, committed=request.isolation_level == READ_COMMITTED)
        wait_ms = min(request.max_wait_ms, services.settings["request.timeout.max.ms"])
        services.partitions.deadlines.add(services.clock.now() + wait_ms / 1000, self)

    def grew(self, count: int) -> None:
        self._grown_bytes += count
        if self._grown_bytes >= self._request.min_bytes:
            self.expire()

    def expire(self) -> None:
        self.answered = True
        if self._session is not None:
            self._session.waiting = None
        self._go_on(may_wait=False)

    def _collect(self, asked_topics: list[wire.RequestTopic], warm: bool) -> Collected:
        request = self._request
        services = self._connection.services
        image = services.view.image
        find = services.partitions.find
        left_bytes = min(request.max_bytes, services.settings["fetch.max.bytes"])
        rack = request.rack_id
        total, failed = 0, False
        waitable: list[Partition] = []
        unchecked: list[FileSlice] = []
        topics: Topics = []
        aborted: list[tuple[int, int]] | None = [] if request.isolation_level == READ_COMMITTED else None
        passed = self._connection.fetched
        self._served = served = []
        for name, topic_id, asked in asked_topics:
            rows: list[Row] = []
            topics.append((name, topic_id, rows))
            topic = name if topic_id is None else _named(image, topic_id)
            for index, epoch, offset, _, _, max_bytes in asked:
                partition = find(topic, index) if topic is not None else None
                if partition is None and topic is not None and self._version >= FOLLOWERS_FROM:
                    partition = leader_lookup.readable(services, topic, index)
                if partition is None or (topic_id is not None and partition.log.topic_id != topic_id):
                    rows.append(self._elsewhere_row(topic, topic_id, index, partition, aborted))
                    failed = True
                    continue
                watermark = partition.high_watermark
                start = partition.start_offset
                last = passed.pop(partition.topic_partition, None) if passed else None
                if last is not None and offset > last[0]:  # else it went back, as if it had read none of them
                    partition.traffic.records_out += min(offset, last[1]) - last[0]
                preferred = leader_lookup.preferred_replica(services, partition, offset, rack) if rack else None
                if preferred is not None:
                    rows.append(Row(index, 0, watermark, watermark, start, aborted, preferred, (), 0))
                    failed = True
                    continue
                if offset == watermark and aborted is None and (epoch < 0 or epoch == partition.epoch):
                    rows.append(Row(index, 0, watermark, watermark, start, aborted, NO_REPLICA, (), 0))
                    waitable.append(partition)
                    continue
                left_out, stable = aborted, watermark
                try:
                    partition.check_epoch(epoch)
                    found = NOTHING_READ
                    if aborted is not None:
                        stable = partition.last_stable_offset
                    if left_bytes > 0:
                        most = min(max_bytes, left_bytes)
                        if aborted is None:
                            found = partition.read(offset, most, warm=warm)
                        else:
                            found, left_out = partition.read_committed(offset, most, stable=stable, warm=warm)
                        if total and found.count > left_bytes:
                            found = NOTHING_READ  # its first batch is more than is left: that is for the next fetch
                        if found.unchecked is not None:
                            unchecked += found.wanted
                        if found.beyond:
                            read_ahead(services.disk, found.beyond)
                except HeadraceError as error:
                    rows.append(self._refused_row(topic, index, partition, offset, error, aborted))
                    failed = True
                    continue
                count = found.count
                if count:
                    left_bytes -= count
                    total += count
                    served.append((partition, offset, count))
                rows.append(Row(index, 0, watermark, stable, start, left_out, NO_REPLICA, found.slices, count))
                waitable.append(partition)
        return topics, total, failed, waitable, unchecked

    def _answer(self, topics: Topics) -> None:
        self.answered = True
        slices = [piece for _, _, rows in topics for row in rows for piece in row.payload]
        if are_warm(self._connection.services.disk, slices, lambda: self._send(ErrorCode.NONE, topics)):
            self._send(ErrorCode.NONE, topics)

    def _send(self, code: int, topics: Topics) -> None:
        self.answered = True
        parts: list[Part] = []
        ends = wire.NO_TAGS if self._elsewhere is None else wire.response_tags(self._endpoints(self._elsewhere))
        session_id = NO_SESSION if self._session is None else self._session.id
        for part in wire.encode_response(self._version, self._correlation_id, 0, code, session_id, topics, ends):
            if isinstance(part, tuple):
                parts.extend(part)
            else:
                parts.append(part)
        fetched = self._connection.fetched
        for partition, offset, count in self._served:
            partition.traffic.bytes_out += count
            fetched[partition.topic_partition] = offset, partition.high_watermark
        self._connection.fill(self._response, parts)

    def _refused_row(
        self,
        topic: str | None,
        index: int,
        partition: Partition,
        offset: int,
        error: HeadraceError,
        aborted: list[tuple[int, int]] | None,
    ) -> Row:
        code, watermark = error.kafka_code, partition.high_watermark
        if code == ErrorCode.OFFSET_OUT_OF_RANGE and not partition.leading and offset > watermark:
            code = ErrorCode.OFFSET_NOT_AVAILABLE
        self._connection.services.metrics.error("Fetch", code)
        bounds = watermark, watermark, partition.start_offset
        return Row(index, code, *bounds, aborted, NO_REPLICA, (), 0, self._tags(topic, index, code))

    def _elsewhere_row(
        self,
        topic: str | None,
        topic_id: bytes | None,
        index: int,
        other: Partition | None,
        aborted: list[tuple[int, int]] | None,
    ) -> Row:
        """Of a partition that cannot be read here. A topic of None: its id is not known; `other` is the partition of
        another topic that has the name."""
        image, session = self._connection.services.view.image, self._session
        code: int
        if topic is None:
            before = None if session is None else session.name_of(topic_id)
            made_anew = before is not None and before in image.topics
            code = ErrorCode.INCONSISTENT_TOPIC_ID if made_anew else ErrorCode.UNKNOWN_TOPIC_ID
        elif other is not None:
            code = ErrorCode.INCONSISTENT_TOPIC_ID
        else:
            code = leader_lookup.not_led_code(image, topic, index)
        return Row(index, code, -1, -1, -1, aborted, NO_REPLICA, (), 0, self._tags(topic, index, code))

    def _tags(self, topic: str | None, index: int, code: int) -> bytes:
        """Where the partition is led, if that is why it cannot be read here (KIP-951)."""
        leader = leader_lookup.leader_elsewhere(self._connection.services, topic, index) if code in MOVED else None
        if leader is None:
            return wire.NO_TAGS
        self._elsewhere = (self._elsewhere or set()) | {leader[0]}
        return wire.partition_tags(current_leader=leader)

    def _endpoints(self, brokers: set[int]) -> list[leader_lookup.NodeEndpoint]:
        if self._version < ENDPOINTS_FROM:
            return []
        return leader_lookup.endpoints(self._connection.services.view.image, self._connection.listener, brokers)


def _named(image: Image, topic_id: bytes) -> str | None:
    known = image.topics_by_id.get(topic_id)
    return None if known is None else known.name


def handle(
    connection: Connection,
    response: PendingResponse,
    version: int,
    correlation_id: int,
    data: memoryview,
    body: int,
    end: int,
) -> None:
    request = wire.decode(version, data, body, end)
    # After this turn's own appends: a client that produces and fetches on one connection sees what it sent.
    pending = PendingFetch(connection, response, version, correlation_id, request)
    connection.services.partitions.at_turn_end(lambda _: pending.start())
