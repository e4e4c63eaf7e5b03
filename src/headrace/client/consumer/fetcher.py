"""Fetching ahead of the caller: one question under way at each broker, over all its partitions, while there is room.

The next question leaves as soon as an answer came, before a record of it is looked at: how far an answer reaches is
known from the headers of its batches. Record sets wait as they came, slices of their answers, in the order of arrival.
Errors that pass are waited out and never seen; those that stay end the reading of one partition and are handed to the
caller. A log that begins after the offset wanted, or a topic that was made anew, is gone on with by the start rule, and
told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

from headrace.client.admin.fetch import CorruptLog, FetchLimits
from headrace.client.admin.offsets import EARLIEST
from headrace.client.connection.connections import Network
from headrace.client.connection.reactor import Timer
from headrace.client.consumer.cursor import Asked, Feed, RawSet, fetchable, larger, next_time
from headrace.client.consumer.fetch_buffer import Buffer
from headrace.client.consumer.fetch_request import fetch_request
from headrace.client.consumer.group_protocol import Place
from headrace.client.consumer.offset_lookup import Listing
from headrace.client.errors import Refusal, is_retriable
from headrace.client.record_sets import extent
from headrace.errors import Code, HeadraceError, OffsetOutOfRange
from headrace.wire import api as apis
from headrace.wire.message import Message

ANSWER_WITHIN_S: Final = 30.0
BUFFER_BYTES: Final = 16 << 20
SLOW_S: Final = 2.0
"""An answer that is later than this may never come: whether another broker leads now is asked meanwhile."""

_CORRUPT: Final = 2

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
        network: Network,
        limits: FetchLimits,
        *,
        start: int | None,
        buffer_bytes: int = BUFFER_BYTES,
        rack: str = "",
        on_ready: Callable[[], None],
        on_reset: Callable[[Reset], None],
    ) -> None:
        self.feeds: dict[Place, Feed] = {}
        self._network = network
        self._reactor = network.reactor
        self._routes = network.routes
        self._limits = limits
        self._start = start
        self._buffer = Buffer(buffer_bytes)
        self._rack = rack
        self._on_ready = on_ready
        self._on_reset = on_reset
        self._busy: dict[int, float] = {}
        """Brokers that have a question, and since when."""
        self._slow_s = limits.max_wait_ms / 1000 + SLOW_S
        self._watch: Timer | None = None
        self._full = False
        self._stuck: list[Feed] = []
        self._timer: Timer | None = None
        self._closed = False
        # Of its own: an answer that waits for records to come holds up whatever is asked behind it.
        self._lane = f"fetch {next(_lanes)}"
        self._routes.listeners.append(self._on_routes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._routes.listeners.remove(self._on_routes)
        self._network.close_lane(self._lane)
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        self.release(list(self.feeds))

    # What is read

    def assign(self, positions: Mapping[Place, int | None], moment: int | None = None) -> None:
        """Read these as well, from the offset given, else from the moment given, else by the start rule."""
        unknown: dict[Place, int] = {}
        for place, offset in positions.items():
            feed = self.feeds[place] = Feed(*place, self._limits.partition_max_bytes)
            found = self._routes.topic(place[0])
            feed.topic_id = b"" if found is None else found.topic_id
            if offset is not None and offset >= 0:
                feed.seek(offset)
                feed.saved = offset
            else:
                unknown[place] = EARLIEST if self._start is None else self._start
                if moment is not None:
                    unknown[place] = moment
        self.seek_moments(unknown)
        self.go_on()

    def release(self, places: Iterable[Place]) -> None:
        """No longer read these; what is buffered of them goes."""
        for place in places:
            feed = self.feeds.pop(place, None)
            if feed is not None:
                feed.leave()
        self._buffer.drop_stale()

    def seek(self, place: Place, offset: int) -> None:
        self.feeds[place].seek(offset)
        self._buffer.drop_stale()
        self.go_on()

    def seek_moments(self, moments: Mapping[Place, int], reset: tuple[int, str] | None = None) -> None:
        """Go on at the offsets of moments, as soon as they are found."""
        if not moments:
            return
        turns: dict[Place, tuple[Feed, int]] = {}
        for place, moment in moments.items():
            feed = self.feeds[place]
            feed.seek_moment(moment, reset)
            turns[place] = feed, feed.turn
        self._buffer.drop_stale()
        Listing(
            self._network,
            moments,
            lambda place, offset: self._on_found(*turns[place], offset),
            lambda place, error: self._on_not_found(*turns[place], error),
            lambda place: not self._closed and turns[place][0].turn == turns[place][1],
        )

    def pause(self, places: Iterable[Place]) -> None:
        for place in places:
            self.feeds[place].paused = True

    def resume(self, places: Iterable[Place]) -> None:
        for place in places:
            self.feeds[place].paused = False
        self.go_on()
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
        return next((feed.failure for feed in self.feeds.values() if feed.failure is not None), None)

    def take(self, *, hold: bool = False) -> RawSet | None:
        """The oldest record set whose partition is not paused. With `hold` it fills the buffer until `free`."""
        if self._stuck:
            self._reset_stuck()
        raw = self._buffer.take(hold=hold)
        if self._full:
            self.make_room()
            if raw is not None and not raw.counts:
                # Its topic turned out to be another one now.
                if hold:
                    self.free(len(raw.records))
                return self.take(hold=hold)
        return raw

    def free(self, size: int) -> None:
        """What was held is not any more; below 0, it is again."""
        self._buffer.bytes -= size
        self.make_room()

    def make_room(self) -> None:
        """Ask on where a full buffer kept from it, and no longer has to: partitions were paused, or sets taken."""
        if self._full and not (self._buffer.is_full and self._buffer.ready):
            self.go_on()

    def put_back(self, raw: RawSet) -> None:
        """What was taken, or the rest of it, is the next of its partition again."""
        self._buffer.put_back(raw)

    def fail(self, feed: Feed, error: HeadraceError) -> None:
        """Read a partition no further: what was fetched of it cannot be used."""
        feed.leave()
        self.stop(feed, error)
        self._buffer.drop_stale()

    def stop(self, feed: Feed, error: HeadraceError) -> None:
        """Read a partition no further, but hand out what was taken of it."""
        feed.failure = error
        feed.asked = None
        self._buffer.drop_of(feed)
        self._on_ready()

    # How it comes

    def go_on(self) -> None:
        """Ask every broker that is not asked yet for what there is room for."""
        if self._closed:
            return
        if self._buffer.is_full and not self._buffer.ready and not all(feed.paused for feed in self.feeds.values()):
            # Only where nothing else is left to hand out, as it has to be fetched again.
            self._buffer.drop_paused()
        self._full = self._buffer.is_full
        if self._full:
            return
        now = self._reactor.now()
        for feed in [feed for feed in self.feeds.values() if self._was_replaced(feed)]:
            why = f"topic {feed.topic!r} was deleted and created again"
            self.seek_moments({feed.place: EARLIEST}, (feed.position, why))
        by_broker, lost = fetchable(self.feeds.values(), self._leader, self._busy.__contains__, now)
        for feed in lost:
            feed.back_off(now)
            self._routes.stale(feed.topic)
        for broker_id, feeds in by_broker.items():
            self._ask(broker_id, feeds)
        self._wake_later(now)

    def _leader(self, feed: Feed) -> int | None:
        return self._routes.leader(feed.topic, feed.partition)

    def _was_replaced(self, feed: Feed) -> bool:
        """Notes the topic's id where it was not known yet."""
        topic = self._routes.topic(feed.topic)
        if topic is None or topic.topic_id == feed.topic_id:
            return False
        before, feed.topic_id = feed.topic_id, topic.topic_id
        return bool(before)

    def _wake_later(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = next_time(self.feeds.values(), now)
        if when is not None:
            self._timer = self._reactor.call_at(when, self.go_on)

    def _ask(self, broker_id: int, feeds: list[Feed]) -> None:
        asked = {feed.place: (feed, Asked(broker_id, feed.offset)) for feed in feeds}
        names = {feed.topic_id: feed.topic for feed in feeds}
        now = self._reactor.now()
        self._busy[broker_id] = now
        if self._watch is None:
            self._watch = self._reactor.call_at(now + self._slow_s, self._look_for_slow)
        for feed, question in asked.values():
            feed.asked = question

        def on_answer(answer: Message | HeadraceError) -> None:
            self._on_fetched(broker_id, asked, names, answer)

        try:
            link = self._network.broker(broker_id, self._lane)
        except HeadraceError as error:
            self._reactor.call_soon(lambda error=error: on_answer(error))  # type: ignore[misc]
            return
        timeout_s = self._limits.max_wait_ms / 1000 + ANSWER_WITHIN_S
        link.ask(
            apis.FETCH, fetch_request(feeds, self._routes, self._limits, self._rack), on_answer, timeout_s=timeout_s
        )

    def _on_fetched(
        self,
        broker_id: int,
        asked: dict[Place, tuple[Feed, Asked]],
        names: dict[bytes, str],
        answer: Message | HeadraceError,
    ) -> None:
        self._busy.pop(broker_id, None)
        if self._closed:
            return
        waiting = {place: (feed, question) for place, (feed, question) in asked.items() if feed.asked is question}
        for feed, _ in waiting.values():
            feed.asked = None
        if not isinstance(answer, HeadraceError) and answer.error_code != Code.NONE:
            answer = Refusal(answer.error_code, f"fetch from broker {broker_id}")
        if isinstance(answer, HeadraceError):
            self._on_broker_failed([feed for feed, _ in waiting.values()], answer)
        else:
            for topic in answer.responses:
                name = topic.topic or names.get(topic.topic_id, "")
                for partition in topic.partitions:
                    found = waiting.get((name, partition.partition_index))
                    if found is not None:
                        self._on_partition(*found, partition, answer)
        self.go_on()
        if self._buffer.ready or self.failure() is not None:
            self._on_ready()

    def _look_for_slow(self) -> None:
        self._watch = None
        since = self._reactor.now() - self._slow_s
        slow = {broker_id for broker_id, asked_at in self._busy.items() if asked_at <= since}
        asked = [feed for feed in self.feeds.values() if feed.asked is not None and feed.asked.broker_id in slow]
        for topic in {feed.topic for feed in asked}:
            self._routes.stale(topic)
        if self._busy:
            self._watch = self._reactor.call_at(self._reactor.now() + self._slow_s, self._look_for_slow)

    def _on_broker_failed(self, feeds: list[Feed], error: HeadraceError) -> None:
        now = self._reactor.now()
        for feed in feeds:
            feed.replica = None
            feed.back_off(now)
            if not error.mapping.retriable:
                feed.failure = error
        for topic in {feed.topic for feed in feeds}:
            self._routes.stale(topic)

    def _on_partition(self, feed: Feed, asked: Asked, partition: Message, answer: Message) -> None:
        if partition.error_code != Code.NONE:
            self._on_refused(feed, asked, partition, answer)
            return
        feed.succeed()
        feed.end = partition.high_watermark
        diverging = partition.diverging_epoch
        if diverging is not None and diverging.end_offset >= 0:
            self._on_cut_log(feed, diverging.end_offset)
            return
        if partition.preferred_read_replica >= 0:
            feed.prefer(partition.preferred_read_replica, self._reactor.now())
        if partition.records is not None and len(partition.records):
            self._take_in(feed, partition.records)

    def _take_in(self, feed: Feed, records: memoryview) -> None:
        try:
            reached = extent(records, feed.offset, str(feed))
            if reached.next_offset == feed.offset:
                feed.most_bytes = larger(feed, reached.cut_bytes)
                return
        except HeadraceError as error:
            feed.failure = error
            return
        if reached.whole_bytes < len(records):
            records = records[: reached.whole_bytes]
        self._buffer.add(RawSet(feed, feed.turn, records, feed.offset, reached.next_offset))
        feed.offset, feed.epoch = reached.next_offset, reached.leader_epoch
        # To the end of the line: a broker fills its answer from the first partition on.
        self.feeds[feed.place] = self.feeds.pop(feed.place)

    def _on_refused(self, feed: Feed, asked: Asked, partition: Message, answer: Message) -> None:
        code, now = partition.error_code, self._reactor.now()
        where = f"fetch of {feed} at offset {feed.offset}"
        if feed.replica == asked.broker_id:
            feed.replica = None
            feed.back_off(now)
        elif code == Code.OFFSET_OUT_OF_RANGE:
            self._on_out_of_range(feed)
        elif code == _CORRUPT:
            feed.failure = CorruptLog(code, where)
        elif not is_retriable(code):
            feed.failure = Refusal(code, where)
        else:
            feed.back_off(now)
            leader = partition.current_leader
            if leader is not None and leader.leader_id >= 0:
                self._routes.hint(
                    feed.topic, feed.partition, leader.leader_id, leader.leader_epoch, answer.node_endpoints
                )
            else:
                self._routes.stale(feed.topic)

    def _on_out_of_range(self, feed: Feed) -> None:
        if self._start is None:
            why = f"offset {feed.offset} is not in the log"
            feed.failure = OffsetOutOfRange(f"{feed}: {why}; seek to one that is, or give a start rule")
        else:
            feed.stuck = True
            self._stuck.append(feed)
            self._reset_stuck()

    def _reset_stuck(self) -> None:
        """Those of which everything that was fetched is handed out go on by the start rule."""
        assert self._start is not None
        waiting = [feed for feed in self._stuck if feed.stuck and self.feeds.get(feed.place) is feed]
        self._stuck = [feed for feed in waiting if feed.position < feed.offset]
        for feed in waiting:
            if feed.position >= feed.offset:
                why = f"offset {feed.offset} is not in the log"
                self.seek_moments({feed.place: self._start}, (feed.position, why))

    def _on_cut_log(self, feed: Feed, end_offset: int) -> None:
        """What was fetched ahead may be of the part that was cut, so it is fetched again."""
        before, done = feed.position, feed.done
        feed.seek(min(end_offset, before))
        feed.done = min(done, feed.offset)
        self._buffer.drop_stale()
        if feed.offset < before:
            why = "a new leader's log ends before what was read"
            self._on_reset(Reset(feed.topic, feed.partition, before, feed.offset, why))

    def _on_found(self, feed: Feed, turn: int, offset: int) -> None:
        if feed.turn != turn or self._closed:
            return
        reset = feed.reset
        feed.seek(offset)
        if reset is not None:
            self._on_reset(Reset(feed.topic, feed.partition, reset[0], offset, reset[1]))
        self.go_on()
        self._on_ready()

    def _on_not_found(self, feed: Feed, turn: int, error: HeadraceError) -> None:
        if feed.turn == turn and not self._closed:
            self.fail(feed, error)

    def _on_routes(self, *_: object) -> None:
        """Leaders may have moved: who is asked at another broker than the one to be read is asked anew."""
        now = self._reactor.now()
        for feed in self.feeds.values():
            leader = self._leader(feed)
            if leader is None:
                continue
            if feed.asked is not None and feed.asked.broker_id != feed.read_from(leader, now):
                feed.asked = None
            if feed.asked is None:
                feed.not_before = 0.0
        self.go_on()
