"""Fetching ahead of the caller: one Fetch in flight to each broker, over all its partitions, while there is room.

The next request leaves as soon as a response came, before a record of it is looked at: how far a response reaches is
known from the headers of its batches. Record sets wait as they came, slices of their responses, in the order of
arrival. Errors that pass are waited out and never seen; those that stay end the reading of one partition and are handed
to the caller. A log that begins after the offset wanted, or a topic that was made anew, is gone on with by the start
rule, and `on_reset` hears of it.

Fetch versions 4 to 18, in a session with each broker (`fetch_session`). With the epochs of KIP-320 the
broker tells when it is not the leader that is meant, and when the log was cut below what was read; with the rack of
KIP-392 the leader names a follower to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.reactor import Timer
from headrace.client.consumer.cursor import CompletedFetch, Cursor, FetchBuffer, InFlight, fetchable, next_time
from headrace.client.consumer.fetch_session import Asked, FetchSession
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.offset_lookup import OffsetLookup
from headrace.client.errors import Refusal
from headrace.client.fetch_requests import EARLIEST, FetchLimits, extent, fetch_refusal, larger, session_request
from headrace.errors import ErrorCode, HeadraceError, OffsetOutOfRange
from headrace.records.isolation import Aborted, Isolation, aborted_of
from headrace.wire import api as apis
from headrace.wire.message import Message

ANSWER_WITHIN_S: Final = 30.0
BUFFER_BYTES: Final = 16 << 20
SLOW_S: Final = 2.0
"""An answer that is later than this may never come: whether another broker leads now is asked meanwhile."""

_NO_EPOCH: Final = -1

_lanes = count()


@dataclass(frozen=True, slots=True)
class Reset:
    """The reading of a partition went on elsewhere than it was: from `offset` to `next_offset`."""

    topic: str
    partition: int
    offset: int
    next_offset: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.topic}-{self.partition}: {self.reason}; reading goes on at offset {self.next_offset} "
            f"instead of {self.offset}"
        )


class Fetcher:
    """All methods are called with the reactor's lock held. `on_ready` is called when there is something to take.

    `start` is the moment where a partition is read from whose offset is unknown or no longer there; None ends the
    reading of it with OffsetOutOfRange.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        limits: FetchLimits,
        *,
        start: int | None,
        buffer_bytes: int = BUFFER_BYTES,
        rack: str = "",
        on_ready: Callable[[], None],
        on_reset: Callable[[Reset], None],
    ) -> None:
        self.cursors: dict[TopicPartition, Cursor] = {}
        self._pool = pool
        self._reactor = pool.reactor
        self._metadata = pool.metadata
        self._limits = limits
        self._start = start
        self._buffer = FetchBuffer(buffer_bytes)
        self._rack = rack
        self._on_ready = on_ready
        self._on_reset = on_reset
        self._busy: dict[int, float] = {}
        """Brokers with a Fetch in flight, and since when."""
        self._slow_s = limits.max_wait_ms / 1000 + SLOW_S
        self._sessions: dict[int, FetchSession] = {}
        self._watch: Timer | None = None
        self._full = False
        self._stuck: list[Cursor] = []
        self._timer: Timer | None = None
        self._closed = False
        # Of its own: an answer that waits for records to come holds up whatever is asked behind it.
        self._channel = f"fetch {next(_lanes)}"
        self._metadata.listeners.append(self._on_metadata)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._metadata.listeners.remove(self._on_metadata)
        self._pool.close_channel(self._channel)
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        self.release(list(self.cursors))

    # What is read

    def assign(self, positions: Mapping[TopicPartition, int | None], moment: int | None = None) -> None:
        """Read these as well, from the offset given, else from the moment given, else by the start rule."""
        unknown: dict[TopicPartition, int] = {}
        for place, offset in positions.items():
            cursor = self.cursors[place] = Cursor(*place, self._limits.partition_max_bytes)
            found = self._metadata.topic(place[0])
            cursor.topic_id = b"" if found is None else found.topic_id
            if offset is not None and offset >= 0:
                cursor.seek(offset)
                cursor.saved = offset
            else:
                unknown[place] = EARLIEST if self._start is None else self._start
                if moment is not None:
                    unknown[place] = moment
        self.seek_moments(unknown)
        self.send_fetches()

    def release(self, places: Iterable[TopicPartition]) -> None:
        """No longer read these; what is buffered of them goes."""
        for place in places:
            cursor = self.cursors.pop(place, None)
            if cursor is not None:
                cursor.leave()
        self._buffer.drop_stale()

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.cursors[place].seek(offset)
        self._buffer.drop_stale()
        self.send_fetches()

    def read_again(self, place: TopicPartition, offset: int) -> None:
        """What was taken from this offset on and not given out is taken again; progress stays."""
        self.cursors[place].read_again(offset)
        self._buffer.drop_stale()
        self.send_fetches()

    def seek_moments(self, moments: Mapping[TopicPartition, int], reset: tuple[int, str] | None = None) -> None:
        """Go on at the offsets of moments, as soon as they are found."""
        if not moments:
            return
        versions: dict[TopicPartition, tuple[Cursor, int]] = {}
        for place, moment in moments.items():
            cursor = self.cursors[place]
            cursor.seek_moment(moment, reset)
            versions[place] = cursor, cursor.version
        self._buffer.drop_stale()
        OffsetLookup(
            self._pool,
            moments,
            lambda place, offset: self._on_found(*versions[place], offset),
            lambda place, error: self._on_not_found(*versions[place], error),
            lambda place: not self._closed and versions[place][0].version == versions[place][1],
            isolation=self._limits.isolation,
        )

    def pause(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self.cursors[place].paused = True

    def resume(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self.cursors[place].paused = False
        self.send_fetches()
        if self.ready:
            self._on_ready()

    # What is handed out

    @property
    def ready(self) -> bool:
        """Whether there is a record set to take."""
        return self._buffer.ready

    @property
    def buffered_bytes(self) -> int:
        return self._buffer.bytes

    def failure(self) -> HeadraceError | None:
        """What ended the reading of a partition, of any one where there are several."""
        return next((cursor.failure for cursor in self.cursors.values() if cursor.failure is not None), None)

    def take(self, *, hold: bool = False) -> CompletedFetch | None:
        """The oldest record set whose partition is not paused. With `hold` it fills the buffer until `free`."""
        if self._stuck:
            self._reset_stuck()
        completed = self._buffer.take(hold=hold)
        if self._full:
            self.make_room()
            if completed is not None and not completed.counts:
                # Its topic turned out to be another one now.
                if hold:
                    self.free(len(completed.records))
                return self.take(hold=hold)
        return completed

    def free(self, size: int) -> None:
        """What was held is not any more; below 0, it is again."""
        self._buffer.bytes -= size
        self.make_room()

    def make_room(self) -> None:
        """Ask on where a full buffer kept from it, and no longer has to: partitions were paused, or sets taken."""
        if self._full and not (self._buffer.is_full and self._buffer.ready):
            self.send_fetches()

    def put_back(self, completed: CompletedFetch) -> None:
        """What was taken, or the rest of it, is the next of its partition again."""
        self._buffer.put_back(completed)

    def fail(self, cursor: Cursor, error: HeadraceError) -> None:
        """Read a partition no further: what was fetched of it cannot be used."""
        cursor.leave()
        self.stop(cursor, error)
        self._buffer.drop_stale()

    def stop(self, cursor: Cursor, error: HeadraceError) -> None:
        """Read a partition no further, but hand out what was taken of it."""
        cursor.failure = error
        cursor.in_flight = None
        self._buffer.drop_of(cursor)
        self._on_ready()

    # How it comes

    def send_fetches(self) -> None:
        """Ask every broker that is not asked yet for what there is room for."""
        if self._closed:
            return
        if (
            self._buffer.is_full
            and not self._buffer.ready
            and not all(cursor.paused for cursor in self.cursors.values())
        ):
            # Only where nothing else is left to hand out, as it has to be fetched again.
            self._buffer.drop_paused()
        self._full = self._buffer.is_full
        if self._full:
            return
        now = self._reactor.now()
        for cursor in [cursor for cursor in self.cursors.values() if self._was_replaced(cursor)]:
            why = f"topic {cursor.topic!r} was deleted and created again"
            self.seek_moments({cursor.place: EARLIEST}, (cursor.position, why))
        by_broker, lost = fetchable(self.cursors.values(), self._leader, self._busy.__contains__, now)
        for cursor in lost:
            cursor.back_off(now)
            self._metadata.stale(cursor.topic)
        for broker_id, cursors in by_broker.items():
            self._send_fetch(broker_id, cursors)
        self._wake_later(now)

    def _leader(self, cursor: Cursor) -> int | None:
        return self._metadata.leader(cursor.topic, cursor.partition)

    def _was_replaced(self, cursor: Cursor) -> bool:
        """Notes the topic's id where it was not known yet."""
        topic = self._metadata.topic(cursor.topic)
        if topic is None or topic.topic_id == cursor.topic_id:
            return False
        before, cursor.topic_id = cursor.topic_id, topic.topic_id
        return bool(before)

    def _wake_later(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = next_time(self.cursors.values(), now)
        if when is not None:
            self._timer = self._reactor.call_at(when, self.send_fetches)

    def _send_fetch(self, broker_id: int, cursors: list[Cursor]) -> None:
        asked = {cursor.place: (cursor, InFlight(broker_id, cursor.offset)) for cursor in cursors}
        names = {cursor.topic_id: cursor.topic for cursor in cursors}
        now = self._reactor.now()
        self._busy[broker_id] = now
        if self._watch is None:
            self._watch = self._reactor.call_at(now + self._slow_s, self._look_for_slow)
        for cursor, in_flight in asked.values():
            cursor.in_flight = in_flight

        def on_answer(answer: Message | HeadraceError) -> None:
            self._on_fetched(broker_id, asked, names, answer)

        try:
            connection = self._pool.broker(broker_id, self._channel)
        except HeadraceError as error:
            self._reactor.call_soon(lambda error=error: on_answer(error))  # type: ignore[misc]
            return
        timeout_s = self._limits.max_wait_ms / 1000 + ANSWER_WITHIN_S
        session = self._sessions.setdefault(broker_id, FetchSession())
        changes = session.changes({cursor.place: self._asked_of(cursor) for cursor in cursors})
        most_bytes = max(cursor.most_bytes for cursor in cursors)
        request = session_request(changes, self._limits, most_bytes, self._rack)
        connection.ask(apis.FETCH, request, on_answer, timeout_s=timeout_s)

    def _asked_of(self, cursor: Cursor) -> Asked:
        """What a Fetch asks of one partition."""
        known = self._metadata.topic(cursor.topic)
        leader_epoch = _NO_EPOCH
        if known is not None and cursor.partition < len(known.partitions):
            leader_epoch = known.partitions[cursor.partition].leader_epoch
        return cursor.topic_id, cursor.offset, leader_epoch, cursor.epoch, cursor.most_bytes

    def _on_fetched(
        self,
        broker_id: int,
        asked: dict[TopicPartition, tuple[Cursor, InFlight]],
        names: dict[bytes, str],
        answer: Message | HeadraceError,
    ) -> None:
        self._busy.pop(broker_id, None)
        if self._closed:
            return
        waiting = {
            place: (cursor, in_flight) for place, (cursor, in_flight) in asked.items() if cursor.in_flight is in_flight
        }
        for cursor, _ in waiting.values():
            cursor.in_flight = None
        session = self._sessions.setdefault(broker_id, FetchSession())
        if not isinstance(answer, HeadraceError) and answer.error_code != ErrorCode.NONE:
            answer = Refusal(answer.error_code, f"fetch from broker {broker_id}")
        if isinstance(answer, HeadraceError):
            if not session.lost(answer.kafka_code):
                self._on_broker_failed([cursor for cursor, _ in waiting.values()], answer)
        else:
            session.answered(answer)
            if len(waiting) < len(asked):
                session.reset()  # what it tells of the others is not taken in, and would not be told again
            for topic in answer.responses:
                name = topic.topic or names.get(topic.topic_id, "")
                for partition in topic.partitions:
                    found = waiting.get((name, partition.partition_index))
                    if found is not None:
                        self._on_partition(*found, partition, answer)
        self.send_fetches()
        if self._buffer.ready or self.failure() is not None:
            self._on_ready()

    def _look_for_slow(self) -> None:
        self._watch = None
        since = self._reactor.now() - self._slow_s
        slow = {broker_id for broker_id, asked_at in self._busy.items() if asked_at <= since}
        asked = [
            cursor
            for cursor in self.cursors.values()
            if cursor.in_flight is not None and cursor.in_flight.broker_id in slow
        ]
        for topic in {cursor.topic for cursor in asked}:
            self._metadata.stale(topic)
        if self._busy:
            self._watch = self._reactor.call_at(self._reactor.now() + self._slow_s, self._look_for_slow)

    def _on_broker_failed(self, cursors: list[Cursor], error: HeadraceError) -> None:
        now = self._reactor.now()
        for cursor in cursors:
            cursor.replica = None
            cursor.back_off(now)
            if not error.mapping.retriable:
                cursor.failure = error
        for topic in {cursor.topic for cursor in cursors}:
            self._metadata.stale(topic)

    def _on_partition(self, cursor: Cursor, asked: InFlight, partition: Message, answer: Message) -> None:
        if partition.error_code != ErrorCode.NONE:
            self._on_refused(cursor, asked, partition, answer)
            return
        cursor.succeed()
        committed = self._limits.isolation is Isolation.COMMITTED
        cursor.end = partition.last_stable_offset if committed else partition.high_watermark
        diverging = partition.diverging_epoch
        if diverging is not None and diverging.end_offset >= 0:
            self._on_cut_log(cursor, diverging.end_offset)
            return
        if partition.preferred_read_replica >= 0:
            cursor.prefer(partition.preferred_read_replica, self._reactor.now())
        if partition.records is not None and len(partition.records):
            self._take_in(cursor, partition.records, aborted_of(partition))

    def _take_in(self, cursor: Cursor, records: memoryview, aborted: tuple[Aborted, ...]) -> None:
        try:
            reached = extent(records, cursor.offset, str(cursor))
            if reached.next_offset == cursor.offset:
                cursor.most_bytes = larger(cursor.most_bytes, reached.cut_bytes, f"{cursor} at offset {cursor.offset}")
                return
        except HeadraceError as error:
            cursor.failure = error
            return
        if reached.whole_bytes < len(records):
            records = records[: reached.whole_bytes]
        self._buffer.add(CompletedFetch(cursor, cursor.version, records, cursor.offset, reached.next_offset, aborted))
        cursor.offset, cursor.epoch = reached.next_offset, reached.leader_epoch
        # To the end of the line: a broker fills its answer from the first partition on.
        self.cursors[cursor.place] = self.cursors.pop(cursor.place)

    def _on_refused(self, cursor: Cursor, asked: InFlight, partition: Message, answer: Message) -> None:
        code, now = partition.error_code, self._reactor.now()
        refusal = fetch_refusal(code, f"fetch of {cursor} at offset {cursor.offset}")
        if cursor.replica == asked.broker_id:
            cursor.replica = None
            cursor.back_off(now)
        elif code == ErrorCode.OFFSET_OUT_OF_RANGE:
            self._on_out_of_range(cursor)
        elif not refusal.mapping.retriable:
            cursor.failure = refusal
        else:
            cursor.back_off(now)
            leader = partition.current_leader
            if leader is not None and leader.leader_id >= 0:
                self._metadata.hint(
                    cursor.topic, cursor.partition, leader.leader_id, leader.leader_epoch, answer.node_endpoints
                )
            else:
                self._metadata.stale(cursor.topic)

    def _on_out_of_range(self, cursor: Cursor) -> None:
        if self._start is None:
            why = f"offset {cursor.offset} is not in the log"
            cursor.failure = OffsetOutOfRange(f"{cursor}: {why}; seek to one that is, or give a start rule")
        else:
            cursor.stuck = True
            self._stuck.append(cursor)
            self._reset_stuck()

    def _reset_stuck(self) -> None:
        """Those of which everything that was fetched is handed out go on by the start rule."""
        assert self._start is not None
        waiting = [cursor for cursor in self._stuck if cursor.stuck and self.cursors.get(cursor.place) is cursor]
        self._stuck = [cursor for cursor in waiting if cursor.position < cursor.offset]
        for cursor in waiting:
            if cursor.position >= cursor.offset:
                why = f"offset {cursor.offset} is not in the log"
                self.seek_moments({cursor.place: self._start}, (cursor.position, why))

    def _on_cut_log(self, cursor: Cursor, end_offset: int) -> None:
        """What was fetched ahead may be of the part that was cut, so it is fetched again."""
        before = cursor.position
        cursor.read_again(min(end_offset, before))
        cursor.done, cursor.committed = min(cursor.done, end_offset), min(cursor.committed, end_offset)
        cursor.begun = min(cursor.begun, cursor.offset)
        self._buffer.drop_stale()
        if cursor.offset < before:
            why = "a new leader's log ends before what was read"
            self._on_reset(Reset(cursor.topic, cursor.partition, before, cursor.offset, why))

    def _on_found(self, cursor: Cursor, version: int, offset: int) -> None:
        if cursor.version != version or self._closed:
            return
        reset = cursor.reset
        cursor.seek(offset)
        if reset is not None:
            self._on_reset(Reset(cursor.topic, cursor.partition, reset[0], offset, reset[1]))
        self.send_fetches()
        self._on_ready()

    def _on_not_found(self, cursor: Cursor, version: int, error: HeadraceError) -> None:
        if cursor.version == version and not self._closed:
            self.fail(cursor, error)

    def _on_metadata(self, *_: object) -> None:
        """Leaders may have moved: who is asked at another broker than the one to be read is asked anew."""
        now = self._reactor.now()
        for cursor in self.cursors.values():
            leader = self._leader(cursor)
            if leader is None:
                continue
            if cursor.in_flight is not None and cursor.in_flight.broker_id != cursor.read_from(leader, now):
                cursor.in_flight = None
            if cursor.in_flight is None:
                cursor.not_before = 0.0
        self.send_fetches()
