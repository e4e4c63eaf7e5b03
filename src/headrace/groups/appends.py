"""Records of groups cut into appends: each becomes one batch of the offsets topic, and a batch has a largest size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace.groups.offsets import Record

RECORDS_PER_APPEND: Final = 1000
BYTES_PER_APPEND: Final = 512 << 10


def in_appends(records: list[Record]) -> Iterator[list[Record]]:
    """The records in appends of bounded count and size."""
    part: list[Record] = []
    size_bytes = 0
    for key, value in records:
        count = len(key) + len(value or b"")
        if part and (len(part) >= RECORDS_PER_APPEND or size_bytes + count > BYTES_PER_APPEND):
            yield part
            part, size_bytes = [], 0
        part.append((key, value))
        size_bytes += count
    if part:
        yield part
