"""Fetch sessions (KIP-227): what a consumer has asked for and was told stays here, so that a fetch names only changes.

A session keeps its partitions and, of them, the `ready` ones: those that may have something to tell. A partition joins
these when its consumer names it, when its watermark or start moves and when its role ends, as it wakes a waiting fetch;
it leaves them when its consumer has been told all there is. A fetch looks at these alone: 2,000 partitions at rest cost
nothing. Who was served goes to the end, so that a full answer does not starve those behind it.

A session belongs to its connection and ends with it. Kafka lets any connection go on with it; no client does, and so
nobody reads on, or ends, what another has begun. In all other respects, as in Kafka: ids are drawn by lot, epochs count
the fetches, and when all slots are taken one that was unused for two minutes makes room, or one that is at least so old
and smaller than the new one. Without room a fetch gets no session, and its consumer sends full fetches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from headrace import metrics
from headrace.errors import FetchSessionNotFound, FetchSessionTopicIds, InvalidFetchSessionEpoch
from headrace.wire.fetch import (
    FetchRequest,
    ForgottenTopic,
    RequestPartition,
    RequestTopic,
    ResponseTopic,
)

if TYPE_CHECKING:
    from headrace.partitions.partition import Partition

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
EPOCH_MAX: Final = (1 << 31) - 1
EVICTION_SECONDS: Final = 120.0
PARTITIONS_MAX: Final = 500_000
"""Over all sessions: at about 400 bytes each, 200 MB."""
CONNECTION_SESSIONS_MAX: Final = 4
"""A client has one session on a connection."""
READ_COMMITTED: Final = 1

Told = tuple[int, int, int]
"""High watermark, last stable offset, start."""
NEVER_TOLD: Final = (-2, -2, -2)
_OFFSET: Final = 2


class SessionFetch(Protocol):
    """A fetch of a session that waits for more data."""

    def grew(self, count: int) -> None: ...

    def expire(self) -> None:
        """Answer with what there is."""
        ...


class SessionTopic:
    """One topic of a session, by its name or by its id."""

    __slots__ = ("id", "name", "partitions")

    def __init__(self, name: str | None, topic_id: bytes | None) -> None:
        self.name = name
        self.id = topic_id
        self.partitions: dict[int, SessionPartition] = {}


class SessionPartition:
    """One partition of a session; waits at its partition like a fetch, as long as the session has it."""

    __slots__ = ("_partition", "_session", "answered", "asked", "told", "topic")

    def __init__(self, session: FetchSession, topic: SessionTopic, asked: RequestPartition) -> None:
        self.answered = False
        """Whether it was forgotten."""
        self.topic = topic
        self.asked = asked
        self.told: Told = NEVER_TOLD
        """What the consumer knows of it; NEVER_TOLD if it is to be told in any case."""
        self._session = session
        self._partition: Partition | None = None
        """Where it waits."""

    def grew(self, count: int) -> None:
        if not self.answered:
            self._session.grew(self, count)

    def wait_at(self, partition: Partition | None) -> None:
        before = self._partition
        if before is not partition:
            self._partition = partition
            if before is not None:
                before.stop_waiting(self)
            if partition is not None:
                partition.wait_for_data(self, committed=self._session.reads_committed)

    def leave(self) -> None:
        self.answered = True
        self.wait_at(None)


class FetchSession:
    def __init__(self, session_id: int, owner: Hashable, *, by_id: bool, now: float) -> None:
        self.id = session_id
        self.owner = owner
        self.by_id = by_id
        self.created = self.used = now
        self.epoch = INITIAL_EPOCH + 1
        """Of the next fetch."""
        self.size = 0
        self.told_size = -1
        """As the cache knows it."""
        self.busy = False
        """A fetch of it is not answered yet."""
        self.waiting: SessionFetch | None = None
        """That fetch, if it waits for data."""
        self.closed = False
        self._topics: dict[str | bytes | None, SessionTopic] = {}
        self._ready: dict[SessionPartition, None] = {}
        self._asked: list[SessionPartition] = []
        """The partitions of the last `asked`."""
        self._reader: tuple[int, str] | None = None
        """Isolation level and rack of the last fetch."""

    @property
    def reads_committed(self) -> bool:
        return self._reader is not None and self._reader[0] == READ_COMMITTED

    def grew(self, partition: SessionPartition, count: int) -> None:
        self._ready[partition] = None
        if self.waiting is not None:
            self.waiting.grew(count)

    def update(self, request: FetchRequest) -> None:
        """Take over what a fetch adds, changes and forgets."""
        for name, topic_id, rows in request.topics:
            key = topic_id if self.by_id else name
            topic = self._topics.get(key)
            if topic is None:
                topic = self._topics[key] = SessionTopic(name, topic_id)
            partitions = topic.partitions
            for row in rows:
                known = partitions.get(row[0])
                if known is None:
                    known = partitions[row[0]] = SessionPartition(self, topic, row)
                    self.size += 1
                else:
                    known.asked = row
                self._ready[known] = None
        if request.forgotten:
            self._forget(request.forgotten)
        reader = request.isolation_level, request.rack_id
        if reader != self._reader:
            if self._reader is not None:
                for partition in self._all():  # which wait as the last reader would
                    partition.wait_at(None)
                    self._ready[partition] = None
            self._reader = reader

    def _forget(self, forgotten: Sequence[ForgottenTopic]) -> None:
        for name, topic_id, indexes in forgotten:
            key = topic_id if self.by_id else name
            topic = self._topics.get(key)
            if topic is None:
                continue
            for index in indexes:
                gone = topic.partitions.pop(index, None)
                if gone is not None:
                    gone.leave()
                    self._ready.pop(gone, None)
                    self.size -= 1
            if not topic.partitions:
                del self._topics[key]

    def name_of(self, topic_id: bytes | None) -> str | None:
        """The name that the topic of this id had when it was last found."""
        topic = self._topics.get(topic_id)
        return None if topic is None else topic.name

    def asked(self, named: Callable[[bytes], str | None]) -> list[RequestTopic]:
        """What a full fetch of the ready partitions would ask, those first that waited longest; a topic may come more
        than once. `named` finds topics by id."""
        self._asked = list(self._ready)
        topics: list[RequestTopic] = []
        last: SessionTopic | None = None
        rows: list[RequestPartition] = []
        for partition in self._asked:
            topic = partition.topic
            if topic is not last:
                last, rows = topic, []
                if topic.id is not None:
                    topic.name = named(topic.id) or topic.name
                topics.append((topic.name if topic.id is None else None, topic.id, rows))
            rows.append(partition.asked)
        return topics

    def wait(self, topics: Sequence[ResponseTopic], partitions: Sequence[Partition]) -> None:
        """Hear of what comes to the partitions that `asked` named; `partitions` has those of rows without an error."""
        if self.closed:
            return
        found, order = iter(partitions), iter(self._asked)
        for _, _, rows in topics:
            for row in rows:
                is_read = not row.error_code and row.preferred_read_replica < 0
                next(order).wait_at(next(found) if is_read else None)

    def news(self, topics: Sequence[ResponseTopic], isolation_level: int) -> list[ResponseTopic]:
        """Of the rows for what `asked` named, those that tell something; the consumer knows it from now on."""
        told: list[ResponseTopic] = []
        ready, order = self._ready, iter(self._asked)
        for name, topic_id, rows in topics:
            kept = []
            for row in rows:
                partition = next(order)
                if row.error_code or row.preferred_read_replica >= 0:  # told each time, until it is gone
                    partition.told = NEVER_TOLD
                    kept.append(row)
                    continue
                bounds = row.high_watermark, row.last_stable_offset, row.log_start_offset
                if row.payload_bytes:
                    del ready[partition]
                    ready[partition] = None
                    kept.append(row)
                else:
                    if partition.told != bounds:
                        kept.append(row)
                    if partition.asked[_OFFSET] >= bounds[isolation_level == READ_COMMITTED]:
                        del ready[partition]
                partition.told = bounds
            if kept:
                told.append((name, topic_id, kept))
        self._asked = []
        return told

    def close(self) -> None:
        self.closed = True
        for partition in self._all():
            partition.leave()
        self._topics.clear()

    def _all(self) -> Iterator[SessionPartition]:
        return (partition for topic in self._topics.values() for partition in topic.partitions.values())


class FetchSessions:
    """All sessions of a broker. `draw` answers so many random bytes."""

    def __init__(
        self,
        slots: int,
        now: Callable[[], float],
        draw: Callable[[int], bytes],
        partitions_max: int = PARTITIONS_MAX,
    ) -> None:
        self._slots = slots
        self._partitions_max = partitions_max
        self._now = now
        self._draw = draw
        self._sessions: dict[int, FetchSession] = {}
        """The one that was unused for longest comes first."""
        self._evictable: list[tuple[int, int]] = []
        """Size and id of those that a larger one may replace, the smallest first."""
        self._of_owner: dict[Hashable, dict[int, FetchSession]] = {}
        self.partition_count = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def samples(self) -> Iterator[metrics.Sample]:
        yield metrics.Sample(metrics.FETCH_SESSIONS, (), len(self._sessions))
        yield metrics.Sample(metrics.FETCH_SESSION_PARTITIONS, (), self.partition_count)
        yield metrics.Sample(metrics.FETCH_SESSION_EVICTIONS, (), self.evictions)

    def create(self, owner: Hashable, request: FetchRequest, *, by_id: bool) -> FetchSession | None:
        """A session of what a full fetch names; None if there is no room for it."""
        size = sum(len(rows) for _, _, rows in request.topics)
        if not size or not self._make_room(owner, size):
            return None
        session_id = NO_SESSION
        while session_id == NO_SESSION or session_id in self._sessions:
            session_id = int.from_bytes(self._draw(4), "big") & 0x7FFFFFFF
        session = FetchSession(session_id, owner, by_id=by_id, now=self._now())
        session.update(request._replace(forgotten=[]))
        self._of_owner.setdefault(owner, {})[session_id] = session
        self._touch(session)
        return session

    def resume(self, owner: Hashable, request: FetchRequest, *, by_id: bool) -> FetchSession | None:
        """The session that an incremental fetch goes on with, updated by it; None if it has forgotten all of it."""
        session = self._sessions.get(request.session_id)
        if session is None or session.owner is not owner:
            raise FetchSessionNotFound(f"there is no fetch session {request.session_id} on this connection")
        if session.epoch != request.session_epoch or session.busy:
            raise InvalidFetchSessionEpoch(
                f"fetch session {session.id}: epoch {request.session_epoch} instead of {session.epoch}"
                + (", and the fetch before is not answered" if session.busy else "")
            )
        if session.by_id != by_id:
            raise FetchSessionTopicIds(
                f"fetch session {session.id} names topics by {'id' if session.by_id else 'name'}"
            )
        session.update(request)
        if not session.size:
            self.close(session)
            return None
        session.epoch = 1 if session.epoch == EPOCH_MAX else session.epoch + 1
        self._touch(session)
        if self.partition_count > self._partitions_max:
            self._evict(session)
            raise FetchSessionNotFound(f"fetch session {session.id} has no room for {session.size} partitions")
        return session

    def close_named(self, owner: Hashable, session_id: int) -> None:
        """A full fetch ends the session that it names, if it is its own."""
        session = self._sessions.get(session_id)
        if session is not None and session.owner is owner:
            self.close(session)

    def close_all(self, owner: Hashable) -> None:
        """A connection has ended: nobody waits any more."""
        for session in list(self._of_owner.get(owner, {}).values()):
            session.waiting = None
            self.close(session)

    def close(self, session: FetchSession) -> None:
        """Its fetch that waits is answered now: nothing would wake it."""
        if session.closed:
            return
        del self._sessions[session.id]
        self._unlist(session)
        self.partition_count -= session.told_size
        of_owner = self._of_owner[session.owner]
        del of_owner[session.id]
        if not of_owner:
            del self._of_owner[session.owner]
        session.close()
        if session.waiting is not None:
            session.waiting.expire()

    def _touch(self, session: FetchSession) -> None:
        """It is used now, and may have another size."""
        now = self._now()
        session.used = now
        self._sessions.pop(session.id, None)
        self._sessions[session.id] = session
        self._unlist(session)
        self.partition_count += session.size - max(0, session.told_size)
        session.told_size = session.size
        if now - session.created > EVICTION_SECONDS:
            insort(self._evictable, (session.size, session.id))

    def _unlist(self, session: FetchSession) -> None:
        entry = session.told_size, session.id
        at = bisect_left(self._evictable, entry)
        if at < len(self._evictable) and self._evictable[at] == entry:
            del self._evictable[at]

    def _make_room(self, owner: Hashable, size: int) -> bool:
        if self._slots <= 0 or size > self._partitions_max:
            return False
        own = self._of_owner.get(owner)
        if own is not None and len(own) >= CONNECTION_SESSIONS_MAX:
            self._evict(min(own.values(), key=lambda session: session.used))
        while len(self._sessions) >= self._slots or self.partition_count + size > self._partitions_max:
            oldest = next(iter(self._sessions.values()))
            if self._now() - oldest.used > EVICTION_SECONDS:
                self._evict(oldest)
            elif self._evictable and self._evictable[0][0] < size:
                self._evict(self._sessions[self._evictable[0][1]])
            else:
                return False
        return True

    def _evict(self, session: FetchSession) -> None:
        self.evictions += 1
        self.close(session)
