"""A leader's end of a link: streams of partitions to one follower broker.

What was written leaves in the same turn, without waiting for the leader's own sync or for any answer. The bytes that
were sent and not yet told as received are bounded by a window. Live traffic goes first; a follower that catches up and
is not in the in-sync set has a budget of bytes a second, and little of it is queued in front of live traffic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from headrace.errors import CorruptBatch, HeadraceError, ProtocolError
from headrace.partitions.partition import Partition
from headrace.partitions.partitions import Partitions
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk, FileSlice
from headrace.ports.network import Part
from headrace.replication import frames, streams, subscriptions
from headrace.replication.frames import Append, Epochs, Frame, Hello, Kind, Producers, Reason, Start, Stop, Watermark
from headrace.replication.link import Link
from headrace.replication.streams import Budget, Stream
from headrace.storage.log import ReadResult, TopicPartition
from headrace.storage.page_cache import are_warm
from headrace.storage.producers import UnreadableProducers

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 512 << 10
INSPECTION_BYTES: Final = 1 << 20
TIMES_TO_DOUBT: Final = 2
SLOW_QUEUED_BYTES: Final = 256 << 10
JOINED_MAX_BYTES: Final = 64 << 10
"""Many small frames are cheaper to join than to send as a vector."""


class Inspection(Enum):
    """What was found in a log that a follower wants to copy anew, before it drops its own."""

    WHOLE = "whole"
    LATER = "later"
    """Nothing yet."""


@dataclass(slots=True)
class LeaderContext:
    """What all links of a leader share."""

    partitions: Partitions
    disk: Disk
    clock: Clock
    budget: Budget
    window_bytes: int
    arrived: Callable[[LeaderSession, Hello], None]
    left: Callable[[LeaderSession], None]
    began: Callable[[LeaderSession, Stream], None]
    ended: Callable[[LeaderSession, Stream], None]
    judge_isr: Callable[[Partition], None]
    """A follower outside the in-sync set reported its position, and may join, or one inside has lost something."""
    reads: dict[tuple[Partition, int], Piece] = field(default_factory=dict)
    """What was read in this turn, by where it begins: each follower wants the same."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole batches of a log, up to an offset."""

    parts: list[Part]
    count: int
    next_offset: int


class LeaderSession:
    """See `link.LinkSession`."""

    def __init__(self, shared: LeaderContext) -> None:
        self._shared = shared
        self.link: Link
        self.broker = -1
        self.incarnation = ""
        self.under_way_bytes = 0
        self._streams: dict[int, Stream] = {}
        self._live: dict[Stream, None] = {}
        self._slow: dict[Stream, None] = {}
        self._pumping = False
        self._answers: list[bytes] = []
        self._unreadable: dict[TopicPartition, str] = {}
        """Why partitions could not be copied, as it was said."""
        self._inspected: dict[Partition, tuple[int, int]] = {}
        """From where to where logs were read for a follower that is about to drop its own."""
        self._inspecting: dict[Partition, frames.Subscribe] = {}
        """What such a follower asked for, while the pages that it is about come from the disk."""
        self._begun: dict[TopicPartition, tuple[int, int]] = {}
        """From where streams last began, and how often in a row."""

    # LinkSession.

    def greeted(self, hello: Hello) -> None:
        self.broker, self.incarnation = hello.broker, hello.incarnation
        self._shared.arrived(self, hello)

    def take(self, data: memoryview, frame: Frame) -> None:
        match frame.kind:
            case Kind.POSITIONS:
                self._positions(data, frame)
            case Kind.SUBSCRIBE:
                self._subscribe(frames.read_subscribe(data, frame))
            case Kind.UNSUBSCRIBE:
                subscription, _ = frames.read_unsubscribe(data, frame)
                stream = self._streams.get(subscription)
                if stream is not None:
                    self._end_stream(stream)
                self._inspecting = {
                    of: asked for of, asked in self._inspecting.items() if asked.subscription != subscription
                }
            case _:
                raise ProtocolError(f"a frame of kind {frame.kind}, which a follower never sends")

    def end_turn(self) -> None:
        self.pump()

    def drained(self) -> None:
        if self._slow:
            self.pump()

    def gone(self, reason: str) -> None:
        if self.broker >= 0:
            log.info("link from follower broker %d ended: %s", self.broker, reason)
        for stream in list(self._streams.values()):
            self._end_stream(stream)
        self._inspecting.clear()
        self._shared.left(self)

    # Subscriptions.

    def _subscribe(self, asked: frames.Subscribe, *, warm: bool = False) -> None:
        """`warm`: what has to be read for it is in the page cache by now."""
        partition = self._shared.partitions.find_by_id(asked.topic_id, asked.partition)
        stop = subscriptions.refusal(asked, partition, self.broker)
        if stop is not None or partition is None or partition.core is None:
            assert stop is not None
            self._answers.append(frames.answer(stop))
            return
        for stream in [stream for stream in self._streams.values() if stream.partition is partition]:
            self._end_stream(stream)
        core = partition.core
        self._inspecting.pop(partition, None)
        if asked.mends:
            seen = self._inspect(asked, partition, warm)
            if isinstance(seen, Stop):
                self._answers.append(frames.answer(seen))
            if seen is not Inspection.WHOLE:
                return
        stop = subscriptions.must_leave_first(asked, core, self.broker, self.incarnation)
        if stop is not None:
            core.asked_below_committed(self.broker, self.incarnation, asked.end, self._shared.clock.now())
            self._shared.judge_isr(partition)
            self._answers.append(frames.answer(stop))
            return
        told = subscriptions.answer(asked, partition.log, partition.high_watermark)
        if isinstance(told, Start):
            self._doubt_if_asked_again(told, partition)
            told = self._readable(told, partition) or told
        producers: list[Producers] = []
        if isinstance(told, Start) and subscriptions.begins_anew(asked, told):
            told = self._knows_producers(told, partition) or told
            if isinstance(told, Start):
                producers = subscriptions.producers_before(told, partition.log)
        self._answers += [frames.answer(told), *map(frames.producers, producers)]
        if isinstance(told, Start):
            self._inspected.pop(partition, None)
            follower = core.subscribed(self.broker, self.incarnation, told.from_offset, self._shared.clock.now())
            stream = Stream(told, self.broker, partition, core, follower, asked.last_epoch)
            self._streams[stream.subscription] = stream
            partition.replicated = True
            self._shared.began(self, stream)
            self.mark(stream)

    def _inspect(self, asked: frames.Subscribe, partition: Partition, warm: bool) -> Stop | Inspection:
        """A follower that mends its log drops everything from there on, and it may be the last that can read some of
        it. So all of that is read here first, some of it each time that it asks, and from the page cache: what is
        not there is brought in before."""
        held = partition.log
        begun, reached = self._inspected.get(partition, (asked.end, asked.end))
        reached = max(held.start_offset, reached if begun <= asked.end else asked.end)
        upto = min(asked.held, held.written_offset)
        if partition not in self._inspected and not warm:
            held.doubt()  # what this process wrote may have changed since, and would be sent as it is
        try:
            if reached < upto:
                found = held.read(reached, INSPECTION_BYTES, upto, warm=warm)
                if not warm and not self._is_warm(asked, partition, found):
                    return Inspection.LATER
                for piece in found.slices:
                    piece.read()
                is_empty = not found.count and found.unchecked is None  # compaction has left nothing up to there
                reached = upto if is_empty else max(reached, streams.whole_batches(found)[2])
        except HeadraceError as error:
            self._say_unreadable(partition, error)
            return Stop(asked.subscription, asked.epoch, Reason.UNREADABLE, str(error))
        except OSError as error:  # the log doubts what it gave out, and says the next time where it is wrong
            return Stop(asked.subscription, asked.epoch, Reason.INSPECTING, str(error))
        self._inspected[partition] = min(begun, asked.end), reached
        if reached >= upto:
            return Inspection.WHOLE
        text = f"{partition.topic_partition}: read up to offset {reached} of {upto}"
        return Stop(asked.subscription, asked.epoch, Reason.INSPECTING, text)

    def _is_warm(self, asked: frames.Subscribe, partition: Partition, found: ReadResult) -> bool:
        """Whether the pages are there; if not, the follower is answered when they are."""

        def again() -> None:
            if self._inspecting.get(partition) is asked:
                self._subscribe(asked, warm=True)
                self.pump()

        self._inspecting[partition] = asked
        if not are_warm(self._shared.disk, [*found.slices, *found.wanted], again):
            return False
        if (
            not found.count and found.wanted
        ):  # they are there, but have to be checked: at least one batch in a turn of its own
            self._shared.clock.call_soon(again)
            return False
        del self._inspecting[partition]
        return True

    def _doubt_if_asked_again(self, start: Start, partition: Partition) -> None:
        """A follower that asks for the same again could not take what it got: it may not be as it was written."""
        where = partition.topic_partition
        offset, times = self._begun.get(where, (start.from_offset, 0))
        times = times + 1 if offset == start.from_offset else 1
        self._begun[where] = start.from_offset, times
        if times == TIMES_TO_DOUBT and start.from_offset < partition.log.written_offset:
            partition.log.doubt()

    def _knows_producers(self, start: Start, partition: Partition) -> Stop | None:
        """Why nobody can say now what is known of producers."""
        try:
            partition.log.producers.load()
        except UnreadableProducers as error:
            self._say_unreadable(partition, error)
            partition.found_damage(error.offset)
            return Stop(start.subscription, start.epoch, Reason.UNREADABLE, str(error))
        except HeadraceError as error:  # perhaps there is more to read than a turn may
            return Stop(start.subscription, start.epoch, Reason.INSPECTING, str(error))
        hidden = partition.hidden_producers()
        if hidden is not None:
            partition.found_damage(hidden)
            text = f"{partition.topic_partition}: what it says of its producers is damaged at offset {hidden}"
            return Stop(start.subscription, start.epoch, Reason.UNREADABLE, text)
        return None

    def _readable(self, start: Start, partition: Partition) -> Stop | None:
        """Why there is nothing to copy from there."""
        held = partition.log
        try:
            held.read(start.from_offset, 1, held.written_offset)
        except (HeadraceError, OSError) as error:
            self._say_unreadable(partition, error)
            return Stop(start.subscription, start.epoch, Reason.UNREADABLE, str(error))
        return None

    def _say_unreadable(self, partition: Partition, error: Exception) -> None:
        """Once, however often the follower asks again."""
        where, text = partition.topic_partition, str(error)
        if self._unreadable.get(where) != text:
            self._unreadable[where] = text
            log.error("%s cannot be copied to broker %d: %s", where, self.broker, text)

    def _end_stream(self, stream: Stream) -> None:
        del self._streams[stream.subscription]
        self._live.pop(stream, None)
        self._slow.pop(stream, None)
        self.under_way_bytes -= stream.under_way_bytes
        stream.core.unsubscribed(self.broker, stream.follower)
        self._shared.ended(self, stream)

    def stop(self, stream: Stream, reason: Reason, text: str) -> None:
        """Tell the follower that this stream has ended."""
        self._end_stream(stream)
        self.link.send([frames.answer(Stop(stream.subscription, stream.epoch, reason, text))])

    def close_stream(self, stream: Stream) -> None:
        """The partition is not led any more. What is still queued of it lies in a log that may change from now on."""
        self.stop(stream, Reason.OLD_EPOCH, f"{stream.partition.topic_partition}: not led here any more")
        if self.link.queued_bytes:
            self.link.abort("a partition with bytes under way is not led here any more")

    # Positions.

    def _positions(self, data: memoryview, frame: Frame) -> None:
        shared, now = self._shared, self._shared.clock.now()
        for subscription, epoch, received, written, flushed, start in frames.read_positions(data, frame):
            stream = self._streams.get(subscription)
            if stream is None or stream.epoch != epoch or stream.partition.core is not stream.core:
                continue  # of an earlier subscription or epoch
            if received > stream.sent:
                raise ProtocolError(
                    f"{stream.partition.topic_partition}: a follower tells offset {received}, "
                    f"but only what lies below {stream.sent} was sent"
                )
            self.under_way_bytes -= stream.arrived(received)
            partition, core = stream.partition, stream.core
            end = partition.log.written_offset
            core.position_reported(stream.follower, received, written, flushed, end, now, start)
            shared.partitions.settle(partition)
            if not core.is_in_sync(self.broker, self.incarnation):
                shared.judge_isr(partition)

    # Sending.

    def mark(self, stream: Stream) -> None:
        """It has something to send: records, or a watermark."""
        if stream.waits_for_pages:
            return
        if stream.is_throttled:
            self._slow[stream] = None
        else:
            self._live[stream] = None

    def pump(self, *, with_others: bool = False) -> None:
        """Send what the window takes; `with_others`: other links send the same next."""
        if self._pumping:
            return
        if self._answers:  # a START goes before the records of its stream
            answers, self._answers = self._answers, []
            self.link.send([b"".join(answers)])
        if not (self._live or self._slow):
            return
        self._pumping = True  # sending may come back here, drained
        try:
            out: list[Part] = []
            news: list[Watermark] = []
            self._pump_live(out, news)
            if not self._live:
                self._pump_slow(out)
            if news:
                out.append(frames.watermarks(news))
            if out:
                self.link.send(_joined(out))
        finally:
            self._pumping = False
            if not with_others:
                self._shared.reads.clear()

    def _pump_live(self, out: list[Part], news: list[Watermark]) -> None:
        """A chunk of each in turn; a window that is full leaves the rest for when positions come in."""
        live = self._live
        while live:
            stream = next(iter(live))
            if stream.has_more():
                if self.under_way_bytes >= self._shared.window_bytes:
                    return
                del live[stream]
                if stream.is_throttled:
                    self._slow[stream] = None
                elif self._append(stream, out) and stream.has_more():
                    live[stream] = None
                continue
            del live[stream]
            known = stream.news()
            if known is not None:
                news.append((stream.subscription, stream.epoch, *known))

    def _pump_slow(self, out: list[Part]) -> None:
        shared, slow = self._shared, self._slow
        queued = self.link.queued_bytes
        while slow and not shared.budget.is_spent and self.under_way_bytes < shared.window_bytes:
            if queued >= SLOW_QUEUED_BYTES:
                return
            stream = next(iter(slow))
            del slow[stream]
            count = self._append(stream, out) if stream.has_more() else 0
            shared.budget.spend(count)
            queued += count
            if stream.subscription in self._streams and not stream.waits_for_pages:
                if stream.has_more():
                    self.mark(stream)
                elif not count:
                    self._live[stream] = None  # for its watermark

    def _append(self, stream: Stream, out: list[Part]) -> int:
        """Put the next piece of the stream into the frames to be sent; answers its bytes."""
        reads, key = self._shared.reads, (stream.partition, stream.sent)
        piece = reads.get(key)
        if piece is None:
            piece = self._read(stream, out)
            if piece is None:
                return 0
            reads[key] = piece
        if epochs := stream.epochs_before(piece.next_offset):
            out.append(frames.epochs(Epochs(stream.subscription, stream.epoch, epochs)))
        stream.news()
        told = Append(stream.subscription, stream.epoch, stream.sent, stream.told_watermark, stream.told_start)
        out.append(frames.append_head(told, piece.count))
        out.extend(piece.parts)
        stream.went(piece.next_offset, piece.count)
        self.under_way_bytes += piece.count
        return piece.count

    def _read(self, stream: Stream, out: list[Part]) -> Piece | None:
        """The next piece of the stream; None if there is none now. A STOP goes behind what is about to be sent."""
        held = stream.partition.log
        warm, stream.is_warm = stream.is_warm, False
        try:
            found = held.read(stream.sent, CHUNK_BYTES, held.written_offset, warm=warm)
            is_doubtful = not found.count or (stream.catching_up and not warm)
            if is_doubtful and not self._in_memory(stream, found):
                return None
            parts, count, next_offset = streams.whole_batches(found)
        except (HeadraceError, OSError) as error:
            self._say_unreadable(stream.partition, error)
            if isinstance(error, CorruptBatch):
                stream.partition.found_damage(stream.sent)
            self._end_stream(stream)
            out.append(frames.answer(Stop(stream.subscription, stream.epoch, Reason.UNREADABLE, str(error))))
            return None
        if next_offset <= stream.sent:
            return None
        return Piece(parts, count, next_offset)

    def _in_memory(self, stream: Stream, found: ReadResult) -> bool:
        """Whether the read can go on now; if not, it does once the disk has brought in the pages."""

        def again() -> None:
            if self._streams.get(stream.subscription) is stream:
                stream.waits_for_pages, stream.is_warm = False, True
                self.mark(stream)
                self.pump()

        wanted = found.slices if found.count else found.wanted
        stream.waits_for_pages = True
        if are_warm(self._shared.disk, wanted, again):
            if found.count:
                stream.waits_for_pages = False
                return True
            self._shared.clock.call_soon(again)  # they are there, but have to be checked: a piece at a time
        return False


def _joined(parts: list[Part]) -> list[Part]:
    if len(parts) == 1 or any(isinstance(part, FileSlice) for part in parts):
        return parts
    if sum(map(len, parts)) > JOINED_MAX_BYTES:
        return parts
    return [b"".join(parts)]  # type: ignore[arg-type]
