"""Records of groups on their way to the log: in appends of bounded size, each of which becomes one batch of the offsets
topic, and only while the groups are those of the epoch that the partition is led in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from headrace.errors import Code
from headrace.groups.offsets import Record
from headrace.groups.shard import Shard

RECORDS_PER_APPEND: Final = 1000
BYTES_PER_APPEND: Final = 512 << 10

AppendDone = Callable[[int], None]
Append = Callable[[int, int, list[Record], AppendDone], None]
"""Append records to a partition of the offsets topic while it is led in this epoch; `done` hears the error code once
they are below the watermark."""


class Appends:
    def __init__(self, append: Append) -> None:
        self._append = append

    def add(self, shard: Shard, records: list[Record], done: AppendDone) -> None:
        """`done` hears once, the first error if there was one. Groups that were dropped have no say any more: who loads
        them from the log must not miss anything."""
        parts = [] if shard.gone else list(in_appends(records))
        codes: list[int] = []

        def part_done(code: int) -> None:
            codes.append(code)
            if len(codes) == len(parts):
                done(next((code for code in codes if code != Code.NONE), Code.NONE))

        for part in parts:
            self._append(shard.partition, shard.epoch, part, part_done if len(parts) > 1 else done)
        if not parts:
            done(Code.NOT_COORDINATOR if shard.gone else Code.NONE)


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
