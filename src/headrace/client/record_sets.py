"""How far a fetched record set reaches: found from the lengths of its batches, no record looked at."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records.batch import HEADER_BYTES, LENGTH_END, check, read_header

_LENGTH: Final = struct.Struct(">i")
_LENGTH_AT: Final = 8
_LEAST_LENGTH: Final = HEADER_BYTES - LENGTH_END


class Extent(NamedTuple):
    """`next_offset` is that after the last whole batch, or the one asked for if there is none."""

    next_offset: int
    whole_bytes: int
    cut_bytes: int
    """Of a batch that is cut, its whole size where the set tells it; 0 if the last batch is whole."""
    leader_epoch: int
    """Of the last whole batch; -1 if there is none."""


def extent(view: memoryview, at: int, where: str) -> Extent:
    """What whole batches of a record set that was asked for from offset `at` on hold.

    CorruptBatch or InvalidRecord, naming the place, if its first batch cannot be told from the next, or if the last one
    ends before `at`. A later batch that is malformed ends the set: it is the first one when it is asked for again.
    """
    pos, last, size = 0, -1, len(view)
    length = 0
    unpack = _LENGTH.unpack_from
    while size - pos >= HEADER_BYTES:
        (length,) = unpack(view, pos + _LENGTH_AT)
        if length < _LEAST_LENGTH or length + LENGTH_END > size - pos:
            break
        last, pos = pos, pos + length + LENGTH_END
    cut_bytes = length + LENGTH_END if size - pos >= HEADER_BYTES else size - pos
    if last < 0:
        if size - pos >= HEADER_BYTES and length < _LEAST_LENGTH:
            raise CorruptBatch(f"{where} at offset {at} or after: a batch gives its length as {length}")
        return Extent(at, 0, cut_bytes, -1)
    try:
        header = read_header(view, last)
        if header.next_offset <= at:
            check(view, last)
    except (CorruptBatch, InvalidRecord) as error:
        raise type(error)(f"{where} at offset {at} or after: {error}") from None
    if header.next_offset <= at:
        raise CorruptBatch(
            f"{where} at offset {at}: the last batch of the answer ends before, at {header.next_offset - 1}"
        )
    return Extent(header.next_offset, pos, cut_bytes, header.leader_epoch)
