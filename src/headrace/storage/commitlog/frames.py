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
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

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
