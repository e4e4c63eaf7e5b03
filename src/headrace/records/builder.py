# cython: boundscheck=False, wraparound=False, cdivision=True
"""Batches of a producer, record by record in the buffer that leaves, and what becomes of them.

    OpenBatch(sent: SentBatch, codec=0, room=65536, first_bytes=4096)
        .count  .size (bytes, header included)  .record_bytes  .first_ms  .max_ms  .sealed  .sent  .codec  .room
        .pinned (some record has a key or a partition of its own, so the batch may go nowhere else)
        .append(timestamp_ms, key, value, headers=()) -> place in the batch, -1 if there is no room or it is sealed
        .seal(producer_id=-1, epoch=-1, base_sequence=-1, attributes=0) -> bytearray, the signed batch.
            Called again it signs the same bytearray anew, in place, for another identity.
        .reuse(): empty again, for one that nobody has a delivery of
        May be subclassed: the sender's state goes there.
    SentBatch(topic, partition, owner) .topic  .partition  .base_offset  .append_ms  .error  .done  .owner
        .finish(base_offset, append_ms=-1) -> bool     .fail(error) -> bool
            True if there are callbacks: then run `.run_callbacks()` where user code may run. The first of them counts.
        .split([(place of its first record, SentBatch), ...]): its records went on in these; `done` stays False here.
    Delivery(sent, place, timestamp_ms) .done  .sent  .place  .timestamp_ms
        .result(timeout_s=None) -> Report  .exception(timeout_s=None) -> HeadraceError | None  .add_callback(fn)
        fn gets the delivery; `await delivery` gives the report where the owner can be awaited.
        .move(sent, place): the record went to another batch; its callbacks go with it.
    Report(topic, partition, offset, timestamp_ms)

What `owner` (the sender) provides to those who wait:

    wait(delivery, deadline)         drive until delivery.done or time.monotonic() reaches deadline (None: no end)
    awaited(delivery) -> Awaitable[Report]

A batch is built in the buffer that is sent: 61 bytes are kept free for the header (see `batch`), records follow
(format: see `kernel`), and only compression copies them. Nothing here survives a crash.

The same file runs as Python and, with the C types of `builder.pxd`, compiled: `compiled` tells which one runs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from crc32c import crc32c

from headrace.errors import BatchTooLarge, HeadraceError, InvalidRecord, RequestTimedOut
from headrace.records.codecs import compress
from headrace.records.record import GivenHeaders, Header

try:
    import cython
except ImportError:
    from headrace.records import cython_stub as cython

if not cython.compiled:  # else they are constants and inlined functions, as the .pxd says
    from headrace.records.batch import ATTRIBUTES_AT, CRC_AT, HEADER_BYTES, LENGTH_END, MAGIC, MOST, MOST_BATCH_BYTES
    from headrace.records.memory import copy, octets
    from headrace.records.varints import put_varint, varint_size

compiled: Final = not __file__.endswith((".py", ".pyc"))


_make = tuple.__new__

log = logging.getLogger(__name__)


class Report(NamedTuple):
    """Where a record went. The offset is -1 when the broker did not tell (acks 0, or it had the record already)."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class Owner(Protocol):
    """The sender that batches belong to; see the module."""

    def wait(self, delivery: Delivery, deadline: float | None) -> None: ...
    def awaited(self, delivery: Delivery) -> Awaitable[Report]: ...


def put_number(out: Any, pos: int, size: int, value: int) -> None:
    """Big-endian, in `size` bytes."""
    while size > 0:
        size -= 1
        out[pos + size] = value & 0xFF
        value >>= 8


def put_bytes(out: Any, pos: int, length: int, content: bytes | None) -> int:
    pos = put_varint(out, pos, length)
    if length > 0:
        copy(out, pos, content, 0, length)
        pos += length
    return pos


def as_bytes(field: Any, what: str) -> bytes:
    """A copy of something that is like bytes, or text as UTF-8; TypeError for anything else."""
    if isinstance(field, str):
        try:
            return field.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(f"a record's {what} {field!r} is not valid text: {error.reason}") from None
    if isinstance(field, (bytes, bytearray, memoryview)):
        return bytes(field)
    advice = ": give the producer an encoder, such as json.dumps" if what == "value" else ""
    raise TypeError(f"a record's {what} is bytes, str or None, not {type(field).__name__}{advice}")


def encoded_headers(headers: GivenHeaders) -> bytes | None:
    """The end of a record: count and headers as they are written; None for no header."""
    if not isinstance(headers, (tuple, list)) and isinstance(headers, Mapping):
        headers = tuple(headers.items())
    found = tuple(headers)
    if not found:
        return None
    fields: list[bytes | None] = []
    size = varint_size(len(found))
    for pair in found:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"headers are a dict or pairs (name, value), not {pair!r}")
        name, content = pair
        if not isinstance(name, str):
            raise TypeError(f"a header's name is text, not {type(name).__name__}")
        try:
            text = name.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(f"header name {name!r} is not valid text: {error.reason}") from None
        field = content if content is None or type(content) is bytes else as_bytes(content, "header")
        size += varint_size(len(text)) + len(text) + (1 if field is None else varint_size(len(field)) + len(field))
        fields.append(text)
        fields.append(field)
    buffer = bytearray(size)
    out = octets(buffer)
    pos = put_varint(out, 0, len(found))
    for field in fields:
        pos = put_bytes(out, pos, -1 if field is None else len(field), field)
    return bytes(buffer)


class SentBatch:
    """What became of a batch, for everyone who waits for one of its records."""

    def __init__(self, topic: str, partition: int, owner: Owner) -> None:
        self.topic = topic
        self.partition = partition
        self.owner = owner
        self.base_offset = -1
        self.append_ms = -1
        self.error: HeadraceError | None = None
        self.done = False
        self.parts: list[tuple[int, SentBatch]] | None = None
        self.callbacks: deque[tuple[Callable[[Delivery], object], Delivery]] = deque()

    def finish(self, base_offset: int, append_ms: int = -1) -> bool:
        """The broker has it; `append_ms` where the broker's time counts."""
        if not self.done:
            self.base_offset = base_offset
            self.append_ms = append_ms
            self.done = True
        return len(self.callbacks) > 0

    def fail(self, error: HeadraceError) -> bool:
        if not self.done:
            self.error = error
            self.done = True
        return len(self.callbacks) > 0

    def split(self, parts: list[tuple[int, SentBatch]]) -> None:
        """The records go on in other batches, in order; each with the place here of its first record."""
        self.parts = parts
        self.hand_on()

    def part(self, place: int) -> tuple[SentBatch, int]:
        """The batch that the record of this place went on in, and its place there."""
        assert self.parts is not None
        at = len(self.parts) - 1
        while self.parts[at][0] > place:
            at -= 1
        first, sent = self.parts[at]
        return (sent, place - first) if sent.parts is None else sent.part(place - first)

    def hand_on(self) -> None:
        """Give the callbacks to the batches that their records are in now."""
        while self.callbacks:
            try:
                pair = self.callbacks.popleft()
            except IndexError:
                break
            pair[1].batch().callbacks.append(pair)

    def run_callbacks(self) -> None:
        """Run the callbacks, each once, whichever thread comes here first. None keeps another from being run."""
        raised: BaseException | None = None
        while self.callbacks:
            try:
                callback, delivery = self.callbacks.popleft()
            except IndexError:
                break
            try:
                callback(delivery)
            except Exception:
                log.exception("the callback of a record sent to %s-%d failed", self.topic, self.partition)
            except BaseException as error:  # noqa: BLE001 - passed on when the others have run
                raised = error
        if raised is not None:
            raise raised


@cython.no_gc
@cython.freelist(4096)
@cython.cclass
class Delivery:
    """What becomes of one record. Any thread may wait for it."""

    def __init__(self, sent: SentBatch, place: int, timestamp_ms: int) -> None:
        self.sent = sent
        self.place = place
        self.timestamp_ms = timestamp_ms

    @property
    def done(self) -> bool:
        return self.batch().done

    def batch(self) -> SentBatch:
        """The batch that the record is in now."""
        sent = self.sent
        return sent if sent.parts is None else sent.part(self.place)[0]

    def result(self, timeout_s: float | None = None) -> Report:
        """Where the record went, when the broker has it; raises what kept it from getting there."""
        if not self.batch().done:
            self.wait(timeout_s)
        sent = self.batch()
        if sent.error is not None:
            raise sent.error.with_traceback(None)
        place = self.place if self.sent.parts is None else self.sent.part(self.place)[1]
        offset = sent.base_offset + place if sent.base_offset >= 0 else -1
        at_ms = sent.append_ms if sent.append_ms >= 0 else self.timestamp_ms
        # As the class does, without running Python code for it.
        return _make(Report, (sent.topic, sent.partition, offset, at_ms))

    def exception(self, timeout_s: float | None = None) -> HeadraceError | None:
        """What kept the record from getting there, or None if it did."""
        if not self.batch().done:
            self.wait(timeout_s)
        return self.batch().error

    def wait(self, timeout_s: float | None = None) -> None:
        self.sent.owner.wait(self, None if timeout_s is None else time.monotonic() + timeout_s)
        if not self.batch().done:
            raise RequestTimedOut(
                f"a record for {self.sent.topic}-{self.sent.partition} is not acknowledged after {timeout_s} s and is "
                "still under way: wait longer, or look at the broker"
            )

    def add_callback(self, callback: Callable[[Delivery], object]) -> None:
        """`callback(delivery)` runs once the record is done, at once if it is already."""
        sent = self.sent
        sent.callbacks.append((callback, self))
        if sent.parts is not None:
            sent.hand_on()
            sent = self.batch()
        if sent.done:
            sent.run_callbacks()

    def move(self, sent: SentBatch, place: int) -> None:
        """The record is in another batch now. For the sender, with its lock."""
        before = self.sent
        self.sent = sent
        self.place = place
        if before.callbacks:
            kept = [pair for pair in before.callbacks if pair[1] is not self]
            sent.callbacks.extend(pair for pair in before.callbacks if pair[1] is self)
            before.callbacks = deque(kept)

    def __await__(self) -> Generator[Any, None, Report]:
        return self.sent.owner.awaited(self).__await__()

    def __repr__(self) -> str:
        state = "under way" if not self.done else "delivered" if self.batch().error is None else "failed"
        return f"<Delivery to {self.sent.topic}-{self.sent.partition}, {state}>"


class OpenBatch:
    """A batch that takes records until it is sealed."""

    def __init__(self, sent: SentBatch, codec: int = 0, room: int = 65536, first_bytes: int = 4096) -> None:
        self.sent = sent
        self.codec = codec
        self.room = room
        self.count = 0
        self.size = HEADER_BYTES
        self.record_bytes = 0
        self.first_ms = -1
        self.max_ms = -1
        self.sealed = False
        self.pinned = False
        self.allocated = max(HEADER_BYTES, min(room, first_bytes))
        self.buffer = bytearray(self.allocated)

    def append(self, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Sequence[Header] = ()) -> int:
        """The record's place, or -1 when there is no room; one record always fits."""
        return self.put(timestamp_ms, key, value, encoded_headers(headers) if headers else None)

    def put(self, timestamp_ms: int, key: bytes | None, value: bytes | None, tail: bytes | None) -> int:
        """As `append`, with the headers as `encoded_headers` gives them."""
        if self.sealed:
            return -1
        if not -MOST < timestamp_ms < MOST:
            raise InvalidRecord(f"a record for {self.sent.topic} has timestamp {timestamp_ms} ms, out of range")
        if self.count == 0:
            self.first_ms = timestamp_ms
            self.max_ms = timestamp_ms
        delta_ms = timestamp_ms - self.first_ms
        key_length = -1 if key is None else len(key)
        value_length = -1 if value is None else len(value)
        tail_length = 1 if tail is None else len(tail)
        length = 1 + varint_size(delta_ms) + varint_size(self.count) + varint_size(key_length)
        length += varint_size(value_length) + tail_length
        if key_length > 0:
            length += key_length
        if value_length > 0:
            length += value_length
        end = self.size + length + varint_size(length)
        if end > self.room and self.count > 0:
            return -1
        if end > MOST_BATCH_BYTES:
            raise BatchTooLarge(f"a record for {self.sent.topic} makes a batch of {end} bytes: the format ends before")
        if end > self.allocated:
            self.grow(end)
        out = octets(self.buffer)
        pos = put_varint(out, self.size, length)
        out[pos] = 0
        pos = put_varint(out, pos + 1, delta_ms)
        pos = put_varint(out, pos, self.count)
        pos = put_bytes(out, pos, key_length, key)
        pos = put_bytes(out, pos, value_length, value)
        if tail is None:
            out[pos] = 0
        else:
            copy(out, pos, tail, 0, tail_length)
        self.record_bytes += end - self.size
        self.size = end
        self.max_ms = max(self.max_ms, timestamp_ms)
        self.count += 1
        return self.count - 1

    def grow(self, needed: int) -> None:
        self.allocated = max(needed, min(self.room, 4 * self.allocated))
        if cython.compiled:
            PyByteArray_Resize(self.buffer, self.allocated)  # type: ignore[name-defined] # noqa: F821
        else:
            self.buffer += bytes(self.allocated - len(self.buffer))

    def seal(self, producer_id: int = -1, epoch: int = -1, base_sequence: int = -1, attributes: int = 0) -> bytearray:
        """The batch, signed. A second call signs the same bytes for another identity."""
        if self.count == 0:
            raise InvalidRecord(f"a batch for {self.sent.topic} needs at least one record")
        if not self.sealed:
            self.pack()
            self.sealed = True
        buffer = self.buffer
        out = octets(buffer)
        put_number(out, 0, 8, 0)
        put_number(out, 8, 4, self.size - LENGTH_END)
        put_number(out, 12, 4, -1)
        put_number(out, 16, 1, MAGIC)
        put_number(out, ATTRIBUTES_AT, 2, attributes | self.codec)
        put_number(out, 23, 4, self.count - 1)
        put_number(out, 27, 8, self.first_ms)
        put_number(out, 35, 8, self.max_ms)
        put_number(out, 43, 8, producer_id)
        put_number(out, 51, 2, epoch)
        put_number(out, 53, 4, base_sequence)
        put_number(out, 57, 4, self.count)
        put_number(out, CRC_AT, 4, crc32c(memoryview(buffer)[ATTRIBUTES_AT:]))
        return buffer

    def reuse(self) -> None:
        """Make it empty again; for one that nobody else has, nor any delivery of it."""
        self.count = 0
        self.size = HEADER_BYTES
        self.record_bytes = 0
        self.sealed = False
        self.pinned = False
        self.sent.base_offset = -1
        self.sent.append_ms = -1
        self.sent.done = False

    def pack(self) -> None:
        del self.buffer[self.size :]
        if self.codec:
            packed = bytearray(HEADER_BYTES)
            packed += compress(self.codec, memoryview(self.buffer)[HEADER_BYTES:])
            self.buffer = packed
            self.size = len(packed)
        self.allocated = self.size
