"""Frames: what the commit log is made of. Everything else in a data folder of this layout can be derived from them.

A header of 48 bytes, big-endian, then the payload:

    at  0  "HRF" and the kind        4 bytes        at 28  first offset                   int64
    at  4  size of the payload       uint32         at 36  next offset (after the last)   int64
    at  8  topic id                  16 bytes       at 44  CRC-32C of the 44 bytes before  uint32
    at 24  partition                 int32

    A  append    batches with dense offsets, first to next, behind what the partition holds. If it held more than
                 `first`, that was truncated before
    R  replace   whatever the partition holds from first to next is now these batches, perhaps with gaps, perhaps none
    B  bounds    the partition now holds first to next and nothing else; no payload. So a truncation, a raised start
                 and a new beginning are told; before the last come the bounds 0 to 0, so that what was known of
                 epochs and producers is forgotten. Every file begins with the bounds of all partitions, so that what a
                 removed file told of them is not missed
    S  synced    `first` is a position of the commit log: everything below it had been synced when this was written.
                 At the beginning of a file `next` is the position where the file before it ended; else 0
    E  epoch     `next` is the leader epoch that the partition's batches from `first` on bear, until another frame tells
                 of a later one; no payload. It comes before the first batch of the epoch, and with a file's bounds the
                 last one is told again

A payload's integrity is told by its batches' own CRCs. Those do not cover epochs, which frames tell; commit logs of
before have no such frames (see `checkpoint`), and their batches are believed. A position is a file's number and a byte
in it, number << 32 | byte, and rises through the whole log.

`Scanner` reads the commit log frame by frame, `read_batches` those of a frame run by run, everything checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from headrace.ports.disk import File
from headrace.records.batch import ATTRIBUTES_AT, HEADER_BYTES, LENGTH_END
from headrace.records.batch import MAGIC as BATCH_MAGIC
from headrace.storage.commitlog.queuefile import DAMAGED, NO_TIMESTAMP, Run
from headrace.storage.scan import Broken, Chain, scan

if TYPE_CHECKING:
    from headrace.storage.commitlog.commitlog import CommitLog

FRAME_BYTES: Final = 48
MAGIC: Final = b"HRF"
APPEND: Final = b"HRFA"
REPLACE: Final = b"HRFR"
BOUNDS: Final = b"HRFB"
SYNCED: Final = b"HRFS"
EPOCH: Final = b"HRFE"
WITH_BATCHES: Final = frozenset((APPEND, REPLACE))
WITHOUT_RANGE: Final = frozenset((SYNCED, EPOCH))
KINDS: Final = frozenset((APPEND, REPLACE, BOUNDS, SYNCED, EPOCH))
NO_TOPIC: Final = bytes(16)
BYTE_MASK: Final = 0xFFFFFFFF

_BODY = struct.Struct(">4sI16siqq")
_FRAME = struct.Struct(">4sI16siqqI")
_pack = _BODY.pack

Key = tuple[bytes, int]
"""Topic id and partition."""


class Frame(NamedTuple):
    """A header whose CRC is right; `byte` is where its payload begins."""

    kind: bytes
    size: int
    topic_id: bytes
    partition: int
    first_offset: int
    next_offset: int
    number: int
    byte: int

    @property
    def key(self) -> Key:
        return self.topic_id, self.partition

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.byte + self.size


def position(number: int, byte: int) -> int:
    return number << 32 | byte


def pack(kind: bytes, size: int, topic_id: bytes, partition: int, first_offset: int, next_offset: int) -> bytes:
    body = _pack(kind, size, topic_id, partition, first_offset, next_offset)
    return body + crc32c(body).to_bytes(4, "big")


def synced(upto: int, previous_end: int = 0) -> bytes:
    return pack(SYNCED, 0, NO_TOPIC, -1, upto, previous_end)


def unpack(window: bytes, at: int, number: int, byte: int) -> Frame | None:
    """The frame whose header is in the window and begins at that byte of the file; None if it is none."""
    if len(window) - at < FRAME_BYTES or window[at : at + 4] not in KINDS:
        return None
    kind, size, topic_id, partition, first, following, crc = _FRAME.unpack_from(window, at)
    if crc32c(window[at : at + _BODY.size]) != crc or first < 0 or (following < first and kind not in WITHOUT_RANGE):
        return None
    if kind not in WITH_BATCHES and size:
        return None
    return Frame(kind, size, topic_id, partition, first, following, number, byte + FRAME_BYTES)


def candidates(window: bytes) -> Iterator[int]:
    """Places in the window where a header could begin."""
    at = window.find(MAGIC)
    while at >= 0:
        yield at
        at = window.find(MAGIC, at + 1)


WINDOW_BYTES: Final = 1 << 20

_FIELDS = struct.Struct(">qiibI2xi8xq14xi").unpack_from


@dataclass(frozen=True, slots=True)
class BrokenBytes:
    """Bytes of a commit file that are no whole frame."""

    number: int
    byte: int
    end: int
    reason: str
    cut_short: bool = False
    """Whether they are the beginning of a frame, and the file ends before it does. A header has a CRC: its size is
    right."""


class Scanner:
    """Whole frames in order, and what lies between them."""

    def __init__(self, commit_log: CommitLog) -> None:
        self._commit_log = commit_log
        self._window = b""
        self._window_at = (-1, 0)

    def frames(self, from_position: int) -> Iterator[Frame | BrokenBytes]:
        first, byte = from_position >> 32, from_position & BYTE_MASK
        for number, size in sorted(self._commit_log.sizes.items()):
            if number >= first:
                yield from self._in_file(number, byte if number == first else 0, size)

    def _in_file(self, number: int, byte: int, size: int) -> Iterator[Frame | BrokenBytes]:
        file = self._commit_log.file(number)
        while byte < size:
            frame = self._frame_at(file, number, byte, size)
            if frame is not None and frame.end <= size:
                yield frame
                byte = frame.end
                continue
            reason = (
                "no frame begins here" if frame is None else f"a frame of {frame.size} bytes is cut by the file's end"
            )
            end = self._search(file, number, byte + 1, size)
            cut_short = end == size and (frame is not None or size - byte < FRAME_BYTES)
            yield BrokenBytes(number, byte, end, reason, cut_short)
            byte = end

    def _frame_at(self, file: File, number: int, byte: int, size: int) -> Frame | None:
        at = self._in_window(file, number, byte, FRAME_BYTES, size)
        return unpack(self._window, at, number, byte)

    def _in_window(self, file: File, number: int, byte: int, count: int, size: int) -> int:
        """Have the bytes in the window; answers where."""
        at = byte - self._window_at[1]
        if self._window_at[0] != number or at < 0 or at + count > len(self._window):
            self._window = file.pread(min(max(WINDOW_BYTES, count), size - byte), byte)
            self._window_at, at = (number, byte), 0
        return at

    def payload(self, frame: Frame) -> memoryview:
        size = self._commit_log.sizes[frame.number]
        at = self._in_window(self._commit_log.file(frame.number), frame.number, frame.byte, frame.size, size)
        return memoryview(self._window)[at : at + frame.size]

    def _search(self, file: File, number: int, byte: int, size: int) -> int:
        """Where the next whole frame begins; the file's end if there is none."""
        while size - byte >= FRAME_BYTES:
            window = file.pread(min(WINDOW_BYTES, size - byte), byte)
            for at in candidates(window):
                if len(window) - at < FRAME_BYTES:
                    break
                frame = unpack(window, at, number, byte + at)
                if frame is not None and frame.end <= size:
                    return byte + at
            byte += max(1, len(window) - FRAME_BYTES + 1)
        return size


@dataclass(slots=True)
class Batches:
    """What a frame holds: its runs, epochs with their least starts (see `epochs`) and first batches; what is wrong."""

    runs: list[Run] = field(default_factory=list)
    epochs: list[tuple[int, int, int]] = field(default_factory=list)
    damage: list[Broken] = field(default_factory=list)
    epoch: int = -1
    last_base: int = -1
    """Offset of the last whole batch."""


@dataclass(frozen=True, slots=True)
class Unsound:
    """What is wrong with a frame's batches. `torn`: bytes are not what was written, as a write cut short leaves them;
    else every batch agrees with its CRC, and one cannot be true: its offset, epoch or count."""

    reason: str
    torn: bool = False


def read_batches(payload: memoryview, frame: Frame, interval_bytes: int, epoch: int) -> Batches | Unsound:
    """The batches of a frame that is whole; or why it is not. No batch has a lower epoch than the one given."""
    found = _read_batches(payload, frame, interval_bytes, epoch)
    if isinstance(found, Batches):
        return found
    torn = _why_torn(payload)
    return Unsound(torn or found, torn=bool(torn))


def _why_torn(payload: memoryview) -> str:
    """Where the batches stop agreeing with their CRCs; "" if they do not."""
    at, size = 0, len(payload)
    while at < size:
        if size - at < HEADER_BYTES:
            return f"{size - at} bytes at the frame's end are no batch"
        _, length, _, magic, crc, _, _, _ = _FIELDS(payload, at)
        end = at + length + LENGTH_END
        if (
            magic != BATCH_MAGIC
            or not at + HEADER_BYTES <= end <= size
            or crc32c(payload[at + ATTRIBUTES_AT : end]) != crc
        ):
            return f"the batch at its byte {at} has a wrong CRC, size or magic"
        at = end
    return ""


def _read_batches(payload: memoryview, frame: Frame, interval_bytes: int, epoch: int) -> Batches | str:
    """In one pass; "" where a batch does not agree with its CRC."""
    found = Batches(epoch=epoch)
    sparse = frame.kind == REPLACE
    at, size, expected = 0, len(payload), frame.first_offset
    run_at, run_base, run_ms, number, byte = 0, expected, NO_TIMESTAMP, frame.number, frame.byte
    while at < size:
        if size - at < HEADER_BYTES:
            return ""
        base, length, batch_epoch, magic, crc, last_delta, max_ms, count = _FIELDS(payload, at)
        end = at + length + LENGTH_END
        if (
            magic != BATCH_MAGIC
            or not at + HEADER_BYTES <= end <= size
            or crc32c(payload[at + ATTRIBUTES_AT : end]) != crc
        ):
            return ""
        if base != expected and not (sparse and base > expected):
            return f"base offset is {base}, but {expected} comes next"
        if not 0 <= count <= last_delta + 1 or batch_epoch < found.epoch:
            return f"the batch with offset {base} counts {count} records in epoch {batch_epoch}"
        if batch_epoch != found.epoch:
            found.epoch = batch_epoch
            found.epochs.append((batch_epoch, expected, base))
        if at > run_at and (base != expected or at - run_at >= interval_bytes):
            found.runs.append(Run(number, byte + run_at, at - run_at, run_base, run_ms))
            run_at, run_ms = at, NO_TIMESTAMP
        if at == run_at:
            run_base = base
        run_ms = max(run_ms, max_ms)
        at, expected, found.last_base = end, base + last_delta + 1, base
    if expected > frame.next_offset or (expected != frame.next_offset and not sparse):
        return f"it ends with offset {expected}, but its header says {frame.next_offset}"
    if size:
        found.runs.append(Run(number, byte + run_at, size - run_at, run_base, run_ms))
    return found


def places(payload: memoryview) -> Iterator[tuple[int, int]]:
    """Base offset and epoch of each batch, as far as headers make sense."""
    at, size = 0, len(payload)
    while size - at >= HEADER_BYTES:
        base, length, epoch, magic, _, _, _, _ = _FIELDS(payload, at)
        at += length + LENGTH_END
        if magic != BATCH_MAGIC or length + LENGTH_END < HEADER_BYTES or at > size:
            return
        yield base, epoch


def read_damaged(file: File, frame: Frame, epoch: int, epoch_at: Callable[[int], int | None]) -> Batches:
    """What is whole of a frame that is damaged; every whole batch is a run of its own."""
    found = Batches(epoch=epoch)
    chain, expected = Chain(dense=frame.kind != REPLACE, epoch_at=epoch_at), frame.first_offset
    for part in scan(file, frame.end, frame.first_offset, chain, frame.byte, epoch):
        if isinstance(part, Broken):
            found.damage.append(part)
            found.runs.append(Run(frame.number, part.position, DAMAGED, part.expected_offset, NO_TIMESTAMP))
            continue
        header = part.header
        if header.next_offset > frame.next_offset:  # its base offset cannot be true, nor what is told by it
            reason = f"offsets up to {header.next_offset - 1}, but its frame ends with {frame.next_offset - 1}"
            found.damage.append(Broken(part.position, frame.end, expected, None, reason))
            found.runs.append(Run(frame.number, part.position, DAMAGED, expected, NO_TIMESTAMP))
            break
        if header.leader_epoch != found.epoch:
            found.epoch = header.leader_epoch
            found.epochs.append((found.epoch, expected, header.base_offset))
        found.runs.append(
            Run(frame.number, part.position, header.size_bytes, header.base_offset, header.max_timestamp_ms)
        )
        expected, found.last_base = header.next_offset, header.base_offset
    else:
        if not found.damage and expected != frame.next_offset and chain.dense:
            reason = f"it ends with offset {expected}, but its header says {frame.next_offset}"
            found.damage.append(Broken(frame.byte, frame.end, expected, None, reason))
            found.runs.append(Run(frame.number, frame.byte, DAMAGED, expected, NO_TIMESTAMP))
    return found
