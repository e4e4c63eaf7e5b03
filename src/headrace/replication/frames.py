"""Frames between two brokers. Bytes in, values out; no I/O.

A follower opens the link to a leader's internal port. Both begin with HELLO; anything else before it is an error. All
numbers are big-endian. A frame is the length of what follows (uint32), its kind (uint8) and its body:

    1 HELLO        magic 4 bytes "hrln", version uint16, broker int32, then cluster id and incarnation,
                   each a uint8 length and UTF-8
    2 SUBSCRIBE    subscription uint32, topic id 16 bytes, partition int32, epoch int32, last epoch int32, end int64,
                   held int64: where the follower's log ends, which is behind `end` when it wants to copy anew
    3 START        subscription, epoch, from int64, watermark int64, log start int64
    4 TRUNCATE     subscription, epoch, epoch to be cut int32, end int64
    5 RESET        subscription, epoch, log start int64
    6 STOP         subscription, epoch, reason uint8, then a uint16 length and UTF-8
    7 UNSUBSCRIBE  subscription, epoch
    8 APPEND       subscription, epoch, from int64, watermark int64, log start int64, then whole record batches to the
                   frame's end
    9 POSITIONS    entries of subscription, epoch, received int64, written int64, flushed int64, log start int64
   10 WATERMARKS   entries of subscription, epoch, watermark int64, log start int64
   11 PING         nothing
   12 EPOCHS       subscription, epoch, then entries of leader epoch int32, first offset int64, both rising: where the
                   epochs of the next APPEND began, since batches that would show it may have been compacted
   13 PRODUCERS    subscription, epoch, then producers as in a snapshot (see `storage.producers`): what is known of
                   them from before the START that this follows, where that is not 0 and the follower holds nothing

The log start of a leader is where it wants the partition to begin, that of a follower where its own log does, safe on
its disk. This is version 5: version 4 had no PRODUCERS, version 3 no EPOCHS, version 2 no log start in POSITIONS
either, version 1 no `held`. Two versions do not speak with each other.

Subscriptions are numbered by the follower, a new number each time, so that what was sent for an earlier one is told
apart; each frame also bears the leader epoch that it was sent in. Every length is bounded before memory is spent on it:
a frame that is too long, too short or unknown ends the link. Nothing of this is kept on disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from headrace.errors import ProtocolError

MAGIC: Final = b"hrln"
VERSION: Final = 5
HEAD: Final = struct.Struct(">IB")
HEAD_BYTES: Final = HEAD.size
LENGTH_BYTES: Final = 4
KIND_BYTES: Final = 1
CONTROL_MAX_BYTES: Final = 4 << 20
"""Most bytes of any frame but APPEND."""
ENTRIES_MAX: Final = 100_000
EPOCHS_MAX: Final = 10_000
"""Most epochs that are told at once, the newest; for others a follower goes by its batches."""
PRODUCERS_MAX: Final = 10_000
"""Most producers in one frame."""
TEXT_MAX_BYTES: Final = 1000

_HELLO = struct.Struct(">4sHi")
_SUBSCRIBE = struct.Struct(">I16siiiqq")
_START = struct.Struct(">Iiqqq")
_TRUNCATE = struct.Struct(">Iiiq")
_RESET = struct.Struct(">Iiq")
_STOP = struct.Struct(">IiBH")
_UNSUBSCRIBE = struct.Struct(">Ii")
_APPEND = struct.Struct(">Iiqqq")
_POSITION = struct.Struct(">Iiqqqq")
_WATERMARK = struct.Struct(">Iiqq")
_EPOCHS = struct.Struct(">Ii")
_EPOCH = struct.Struct(">iq")
_PRODUCERS = struct.Struct(">Ii")
_APPEND_HEAD = struct.Struct(">IBIiqqq")
APPEND_BYTES: Final = _APPEND.size


class Kind(IntEnum):
    HELLO = 1
    SUBSCRIBE = 2
    START = 3
    TRUNCATE = 4
    RESET = 5
    STOP = 6
    UNSUBSCRIBE = 7
    APPEND = 8
    POSITIONS = 9
    WATERMARKS = 10
    PING = 11
    EPOCHS = 12
    PRODUCERS = 13


class Reason(IntEnum):
    """Why a leader does not serve a subscription."""

    NOT_LEADER = 1
    OLD_EPOCH = 2
    NEW_EPOCH = 3
    NOT_REPLICA = 4
    UNREADABLE = 5
    IN_SYNC = 6
    """A member of the in-sync set asks for what it should hold: it has to leave the set first."""
    INSPECTING = 7
    """The leader reads first what the follower is about to drop; it is asked again for the rest."""


class Hello(NamedTuple):
    cluster_id: str
    broker: int
    incarnation: str


class Subscribe(NamedTuple):
    subscription: int
    topic_id: bytes
    partition: int
    epoch: int
    last_epoch: int
    end: int
    held: int

    @property
    def mends(self) -> bool:
        """It is about to drop what it holds from `end` on, to copy it anew."""
        return self.end < self.held


class Start(NamedTuple):
    subscription: int
    epoch: int
    from_offset: int
    watermark: int
    log_start: int


class Truncate(NamedTuple):
    """The leader's last epoch that is not above the follower's, and where it ends."""

    subscription: int
    epoch: int
    cut_epoch: int
    end: int


class Reset(NamedTuple):
    subscription: int
    epoch: int
    log_start: int


class Stop(NamedTuple):
    subscription: int
    epoch: int
    reason: int
    text: str


class Append(NamedTuple):
    """`from_offset` is where the last one ended: offsets may have gaps, so that a lost frame could look like one."""

    subscription: int
    epoch: int
    from_offset: int
    watermark: int
    log_start: int


class Epochs(NamedTuple):
    subscription: int
    epoch: int
    starts: Sequence[tuple[int, int]]
    """Leader epoch and the first offset of it."""


class Producers(NamedTuple):
    subscription: int
    epoch: int
    snapshot: bytes


Answer = Start | Truncate | Reset | Stop
Position = tuple[int, int, int, int, int, int]
"""Subscription, epoch, received, written, flushed, log start."""
Watermark = tuple[int, int, int, int]
"""Subscription, epoch, watermark, log start."""

PING: Final = HEAD.pack(KIND_BYTES, Kind.PING)


def _frame(kind: Kind, body: bytes) -> bytes:
    return HEAD.pack(KIND_BYTES + len(body), kind) + body


def hello(value: Hello) -> bytes:
    body = _HELLO.pack(MAGIC, VERSION, value.broker)
    for text in (value.cluster_id, value.incarnation):
        raw = text.encode()
        body += bytes((len(raw),)) + raw
    return _frame(Kind.HELLO, body)


def subscribe(value: Subscribe) -> bytes:
    return _frame(Kind.SUBSCRIBE, _SUBSCRIBE.pack(*value))


def unsubscribe(subscription: int, epoch: int) -> bytes:
    return _frame(Kind.UNSUBSCRIBE, _UNSUBSCRIBE.pack(subscription, epoch))


def answer(value: Answer) -> bytes:
    match value:
        case Start():
            return _frame(Kind.START, _START.pack(*value))
        case Truncate():
            return _frame(Kind.TRUNCATE, _TRUNCATE.pack(*value))
        case Reset():
            return _frame(Kind.RESET, _RESET.pack(*value))
        case Stop():
            raw = value.text.encode()[:TEXT_MAX_BYTES]
            return _frame(Kind.STOP, _STOP.pack(value.subscription, value.epoch, value.reason, len(raw)) + raw)


def append_head(value: Append, batch_bytes: int) -> bytes:
    """What goes before the batches, which the caller sends behind it."""
    return _APPEND_HEAD.pack(KIND_BYTES + APPEND_BYTES + batch_bytes, Kind.APPEND, *value)


def positions(entries: Iterable[Position]) -> bytes:
    return _frame(Kind.POSITIONS, b"".join(_POSITION.pack(*entry) for entry in entries))


def watermarks(entries: Iterable[Watermark]) -> bytes:
    return _frame(Kind.WATERMARKS, b"".join(_WATERMARK.pack(*entry) for entry in entries))


def epochs(value: Epochs) -> bytes:
    head = _EPOCHS.pack(value.subscription, value.epoch)
    return _frame(Kind.EPOCHS, head + b"".join(_EPOCH.pack(*start) for start in value.starts))


def producers(value: Producers) -> bytes:
    return _frame(Kind.PRODUCERS, _PRODUCERS.pack(value.subscription, value.epoch) + value.snapshot)


class Frame(NamedTuple):
    """A whole frame in the receive buffer: where its body begins and where the next frame does."""

    kind: int
    body: int
    end: int


def read_head(data: memoryview, at: int, append_max_bytes: int) -> Frame | None:
    """The frame at this place, which may not have arrived whole; None while not even its head has."""
    if len(data) - at < HEAD_BYTES:
        return None
    length, kind = HEAD.unpack_from(data, at)
    most = append_max_bytes if kind == Kind.APPEND else CONTROL_MAX_BYTES
    if not KIND_BYTES <= length <= most:
        raise ProtocolError(f"a frame of kind {kind} with {length} bytes; at most {most} are taken")
    return Frame(kind, at + HEAD_BYTES, at + LENGTH_BYTES + length)


def read_hello(data: memoryview, frame: Frame) -> Hello:
    if frame.kind != Kind.HELLO:
        raise ProtocolError(f"a link begins with a frame of kind {frame.kind}, not with HELLO")
    magic, version, broker = _unpack(_HELLO, data, frame)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"the peer speaks {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
    at = frame.body + _HELLO.size
    texts: list[str] = []
    for _ in range(2):
        size = data[at] if at < frame.end else 0
        if at + 1 + size > frame.end:
            raise ProtocolError("a HELLO is cut short")
        texts.append(_text(data[at + 1 : at + 1 + size]))
        at += 1 + size
    return Hello(texts[0], broker, texts[1])


def read_subscribe(data: memoryview, frame: Frame) -> Subscribe:
    return Subscribe(*_unpack(_SUBSCRIBE, data, frame))


def read_unsubscribe(data: memoryview, frame: Frame) -> tuple[int, int]:
    subscription, epoch = _unpack(_UNSUBSCRIBE, data, frame)
    return subscription, epoch


def read_start(data: memoryview, frame: Frame) -> Start:
    return Start(*_unpack(_START, data, frame))


def read_truncate(data: memoryview, frame: Frame) -> Truncate:
    return Truncate(*_unpack(_TRUNCATE, data, frame))


def read_reset(data: memoryview, frame: Frame) -> Reset:
    return Reset(*_unpack(_RESET, data, frame))


def read_stop(data: memoryview, frame: Frame) -> Stop:
    subscription, epoch, reason, size = _unpack(_STOP, data, frame)
    begin = frame.body + _STOP.size
    if begin + size > frame.end:
        raise ProtocolError("a STOP is cut short")
    return Stop(subscription, epoch, reason, _text(data[begin : begin + size]))


def read_append(data: memoryview, frame: Frame) -> Append:
    """Its head; the batches are the rest of the frame."""
    return Append(*_unpack(_APPEND, data, frame))


def read_positions(data: memoryview, frame: Frame) -> Iterator[Position]:
    return _entries(_POSITION, data, frame)


def read_watermarks(data: memoryview, frame: Frame) -> Iterator[Watermark]:
    return _entries(_WATERMARK, data, frame)


def read_epochs(data: memoryview, frame: Frame) -> Epochs:
    subscription, epoch = _unpack(_EPOCHS, data, frame)
    entries = Frame(frame.kind, frame.body + _EPOCHS.size, frame.end)
    starts: list[tuple[int, int]] = []
    for began, offset in _entries(_EPOCH, data, entries, EPOCHS_MAX):
        last_epoch, last_offset = starts[-1] if starts else (-1, 0)
        if began <= last_epoch or offset < last_offset:
            raise ProtocolError(f"epoch {began} from offset {offset} on cannot follow {last_epoch} from {last_offset}")
        starts.append((began, offset))
    return Epochs(subscription, epoch, starts)


def read_producers(data: memoryview, frame: Frame) -> Producers:
    subscription, epoch = _unpack(_PRODUCERS, data, frame)
    return Producers(subscription, epoch, bytes(data[frame.body + _PRODUCERS.size : frame.end]))


def _unpack(layout: struct.Struct, data: memoryview, frame: Frame) -> tuple[Any, ...]:
    if frame.end - frame.body < layout.size:
        raise ProtocolError(f"a frame of kind {frame.kind} with {frame.end - frame.body} bytes; it has {layout.size}")
    return layout.unpack_from(data, frame.body)


def _entries(layout: struct.Struct, data: memoryview, frame: Frame, most: int = ENTRIES_MAX) -> Iterator[Any]:
    size = frame.end - frame.body
    if size % layout.size or size > most * layout.size:
        raise ProtocolError(f"a frame of kind {frame.kind} with {size} bytes, which are no whole entries")
    return layout.iter_unpack(data[frame.body : frame.end])


def _text(raw: memoryview) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("text from the peer is not UTF-8") from None
