"""What comes out of a batch: columns for bulk readers, `Record` for people and small clients."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Payload = bytes | bytearray
Header = tuple[str, bytes | None]
GivenHeaders = Mapping[str, bytes | str | None] | Sequence[tuple[str, bytes | str | None]]
"""What a producer takes for headers; text is written as UTF-8."""
NewRecord = tuple[int, bytes | None, bytes | None, Sequence[Header]]
"""Timestamp in ms, key, value, headers: what `build` takes."""


class Record(NamedTuple):
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]


class Columns(NamedTuple):
    """A batch's records as int64 columns that point into `payload`, the records as they are encoded.

    A start is a byte of the payload; a length of -1 is a null. Record n lies between `record_starts` n and n + 1, its
    headers between `header_starts` n and the record's end. All of it was checked: what these point at is inside.
    """

    payload: Payload
    offsets: array[int]
    timestamps_ms: array[int]
    key_starts: array[int]
    key_lengths: array[int]
    value_starts: array[int]
    value_lengths: array[int]
    header_starts: array[int]
    header_counts: array[int]
    record_starts: array[int]
