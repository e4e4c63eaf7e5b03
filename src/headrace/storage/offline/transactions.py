"""Which transactions the batches of a partition tell of, offline: open, committed, aborted.

A transaction whose marker is there counts as ended, whether or not a watermark had passed it: a folder does not say.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from headrace.errors import HeadraceError
from headrace.ports.disk import File
from headrace.records.batch import BatchHeader
from headrace.records.control import read_marker

OPEN: Final = "open"
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"
NONE: Final = "-"


class EndedTransaction(NamedTuple):
    first_offset: int
    marker_offset: int
    outcome: str


class TransactionSurvey:
    """Batches go by in the order of their offsets."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        """First offset of the open transaction of each producer that has one."""
        self.ended: dict[int, list[EndedTransaction]] = {}
        """By producer, in the order of their markers."""
        self._markers: dict[int, str] = {}

    def add(self, file: File, position: int, header: BatchHeader) -> None:
        if not header.is_transactional or header.producer_id < 0:
            return
        if not header.is_control:
            if header.record_count:
                self.opened.setdefault(header.producer_id, header.base_offset)
            return
        try:
            marker = read_marker(file.pread(header.size_bytes, position), header)
        except HeadraceError:  # who checks its bytes names it
            return
        if marker is None:
            return
        outcome = COMMITTED if marker.committed else ABORTED
        self._markers[header.base_offset] = f"{outcome} here"
        first = self.opened.pop(header.producer_id, None)
        if first is not None:
            ended = self.ended.setdefault(header.producer_id, [])
            ended.append(EndedTransaction(first, header.base_offset, outcome))

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for ended in self.ended.values() for each in ended)

    def of_batch(self, header: BatchHeader) -> str:
        """What became of the batch, once all have gone by."""
        if not header.is_transactional:
            return NONE
        if header.is_control:
            return self._markers.get(header.base_offset, NONE)
        ended = self.ended.get(header.producer_id, [])
        at = bisect_right(ended, header.base_offset, key=lambda each: each.marker_offset)
        if at < len(ended) and ended[at].first_offset <= header.base_offset:
            return ended[at].outcome
        first = self.opened.get(header.producer_id)
        return OPEN if first is not None and first <= header.base_offset else NONE
