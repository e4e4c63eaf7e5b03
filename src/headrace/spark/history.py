"""Option `history`: what a query reads of an archive, and what of the broker, cut at an offset of each partition.

A gap between both is told as any other loss, when the newest archive has it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from headrace.arrow.history import History, Part, Spans, covering, read_part
from headrace.client.admin.cluster import Cluster
from headrace.client.fetch_requests import EARLIEST
from headrace.spark import loss, plan
from headrace.spark.plan import Place

SPLIT_BYTES: Final = 32 << 20
"""Of files, which are compressed."""

Bounds = Mapping[Place, tuple[int, int]]


@dataclass(frozen=True)
class HistorySplit(InputPartition):
    """Rows of files of an archive, read by one task."""

    parts: tuple[Part, ...]


class Past:
    """The archive of a query, and where the broker's logs began when it was looked at."""

    def __init__(self, cluster: Cluster, folder: str, ids: Mapping[str, str], places: Iterable[Place]) -> None:
        self._ids = ids
        places = tuple(places)
        self._history, self.log_starts = covering(folder, lambda: plan.ends_of(cluster, places, EARLIEST))

    def check(self, columns: Iterable[str]) -> None:
        self._history.check(self._ids, columns)

    def floors(self) -> dict[Place, int]:
        """The first offset of each partition that archive or broker have."""
        starts = self._history.starts()
        return {place: min(start, starts.get(place, start)) for place, start in self.log_starts.items()}

    def first_at(self, place: Place, at_ms: int) -> int | None:
        return self._history.first_at(place, at_ms)

    def began_late(self, place: Place) -> bool:
        """Whether the broker has, or had, records from before the archive began."""
        return self.log_starts.get(place, 0) < self._history.begin(place)

    def divide(self, spans: Bounds, *, fail: bool, only_deleted: bool = False) -> tuple[Bounds, tuple[Bounds, Bounds]]:
        """What is read of the archive, and what of the broker, before and after that; with `only_deleted` the broker is
        asked for all that it has. What neither has is reported."""
        archived: dict[Place, tuple[int, int]] = {}
        early: dict[Place, tuple[int, int]] = {}
        live: dict[Place, tuple[int, int]] = {}
        gone: list[str] = []
        for place, (first, end) in spans.items():
            cut, log_start = min(end, self._history.ends.get(place, 0)), self.log_starts.get(place, 0)
            begin = min(end, self._history.begin(place))
            if self.began_late(place) and log_start <= first < begin:
                early[place] = first, begin
                first = begin
            if first < cut and not (only_deleted and first >= log_start):
                archived[place] = first, cut
                first = cut
            if first < min(end, log_start):
                gone.append(f"{loss.deleted(place, first, end, log_start)}, and {self._history.folder} ends before")
                first = log_start
            if first < end:
                live[place] = first, end
        loss.report(gone, fail=fail)
        return archived, (early, live)

    def splits(self, spans: Bounds, from_ms: int | None = None) -> list[HistorySplit]:
        """The archived spans, cut for tasks."""
        by_topic: dict[str, Spans] = {}
        for (topic, partition), span in spans.items():
            by_topic.setdefault(topic, {})[partition] = span
        found: list[HistorySplit] = []
        for topic, wanted in sorted(by_topic.items()):
            taken: list[Part] = []
            size = 0
            for part in self._history.parts(topic, wanted, from_ms=from_ms):
                if taken and size + part.size_bytes > SPLIT_BYTES:
                    found.append(HistorySplit(tuple(taken)))
                    taken, size = [], 0
                taken.append(part)
                size += part.size_bytes
            if taken:
                found.append(HistorySplit(tuple(taken)))
        return found


def read(split: HistorySplit, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    for part in split.parts:
        yield from read_part(part, columns)


def archived_since(
    folder: str, place: Place, first: int, end: int, columns: tuple[str, ...], *, fail: bool
) -> Iterator[pa.RecordBatch] | None:
    """Rows that a broker has deleted before they were read there, from the newest version of the archive; None if that
    has not come so far. What was deleted from before the archive began is reported."""
    history = History(folder)
    if history.ends.get(place, 0) < end:
        return None
    begin = min(end, history.begin(place))
    if first < begin:
        loss.report([f"{loss.deleted(place, first, begin, begin)}, and {folder} begins after that"], fail=fail)
    parts = history.parts(place[0], {place[1]: (first, end)})
    return (rows for part in parts for rows in read_part(part, columns))
