"""What a replay takes from an archive: partition after partition, window by window, in the order of offsets. A window
has so many offsets, or fewer where their records are large: it is held in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from headrace.arrow.history import History, read_part
from headrace.arrow.stored_table import WINDOW_BYTES
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import create_topic
from headrace.client.connection.metadata import Topic
from headrace.client.errors import UnknownTopic
from headrace.errors import OperatorError
from headrace.pipelines.replay import Reached, Window
from headrace.records.arrow import TIMESTAMP_TYPE, schema

COLUMNS: Final = ("partition", "offset", "timestamp", "key", "value", "headers")
_NO_ROWS: Final = schema(COLUMNS).empty_table()


@dataclass(frozen=True, slots=True)
class ArchiveReplay:
    """`until_ms` is not included; a rate is in records a second. `partition="key"` lets keys decide anew."""

    archive: Path
    bootstrap: str
    topic: str
    to: str = ""
    from_ms: int | None = None
    until_ms: int | None = None
    key: bytes | None = None
    where: str | None = None
    rate: float | None = None
    partition: Literal["keep", "key"] = "keep"
    dead_letters: bool = False
    name: str = ""
    period: tuple[str | None, str | None] | None = None
    """The times as they were typed: two hours ago is the same question later."""

    @property
    def target(self) -> str:
        return self.to or self.topic

    @property
    def asked(self) -> str:
        """A digest of the question; at what rate is no part of it."""
        period = self.period or (self.from_ms, self.until_ms)
        chosen = (*period, self.key, self.where, self.partition, self.dead_letters)
        told = repr((str(self.archive.resolve()), self.topic, self.target, *chosen))
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    @property
    def replay(self) -> str:
        return self.name or f"{self.topic}-{self.asked}"

    def source(self) -> ArchiveSource:
        return ArchiveSource(self)


class ArchiveSource:
    """It has come to an offset of each partition: what is archived later is replayed when it is run again. Times are
    those that were meant when it began."""

    def __init__(self, options: ArchiveReplay) -> None:
        self._options = options
        self._history = History(options.archive)
        self._partitions = sorted(n for topic, n in self._history.ends if topic == options.topic)
        if not self._partitions:
            raise OperatorError(f"the archive {options.archive} has no records of a topic {options.topic!r}")
        self._period = options.from_ms, options.until_ms
        self._topic_id = self._history.topic_ids().get(options.topic, "")
        self._next: dict[int, int] = {}

    def check(self, cluster: Cluster) -> None:
        self._history.check({}, COLUMNS)
        try:
            self._refuse_archived(cluster.topic(self._options.target))
        except UnknownTopic:
            return

    def _refuse_archived(self, target: Topic) -> None:
        options = self._options
        if target.name == options.topic and target.topic_id.hex() == self._topic_id:
            raise OperatorError(
                f"topic {options.topic} is the one that {options.archive} has records of: what is written to it would "
                "be archived, and replayed again; give another topic with --to"
            )

    def go_on(self, reached: Reached) -> None:
        if (reached["asked"], reached["archived"]) != (self._options.asked, self._topic_id):
            raise OperatorError(
                f"the replay {self._options.replay} was begun with another archive, topic or choice of records; go on "
                "with the same, or give this one another --name"
            )
        self._period = reached["from_ms"], reached["until_ms"]
        self._next = {int(partition): offset for partition, offset in reached["next"].items()}

    def make_target(self, cluster: Cluster) -> None:
        target, needed = self._options.target, self._partitions[-1] + 1
        try:
            found = cluster.topic(target)
        except UnknownTopic:
            create_topic(cluster, target, partitions=needed)
            return
        # When it was first looked at a broker may not have heard of it.
        self._refuse_archived(found)
        there = len(found.partitions)
        if self._options.partition == "keep" and there < needed:
            raise OperatorError(
                f"topic {target} has {there} partitions, and the archive has records of partition {needed - 1}: "
                f"enlarge it with `headrace topic alter {target} --partitions {needed}`, or let keys decide with "
                "--partition key"
            )

    def windows(self, most_rows: int) -> Iterator[Window]:
        for partition in self._partitions:
            place, most = (self._options.topic, partition), most_rows
            at = self._history.next_at(place, self._next.get(partition, 0))
            while at is not None:
                window = self._window(partition, at, min(at + most, self._history.ends[place]))
                yield window
                # Where records are large, not many more are looked at than were taken.
                most = min(most_rows, 2 * window.passed)
                at = self._history.next_at(place, self._next[partition])

    def facts(self) -> Mapping[str, Any]:
        return {"archive": str(self._options.archive), "from": self._options.topic}

    def _window(self, partition: int, first: int, end: int) -> Window:
        rows, end = self._rows(partition, first, end)
        offsets = rows["offset"]
        self._next[partition] = end
        from_ms, until_ms = self._period
        reached = {"asked": self._options.asked, "archived": self._topic_id, "from_ms": from_ms, "until_ms": until_ms}
        return Window(
            rows.drop(["offset", *(["partition"] if self._options.partition == "key" else [])]),
            passed=end - first,
            reached={**reached, "next": dict(self._next)},
            told=f"partition {partition} at offset {end:,} of {self._history.ends[self._options.topic, partition]:,}",
            place_of=lambda n: f"the record at offset {offsets[n].as_py()} of partition {partition}",
        )

    def _rows(self, partition: int, first: int, end: int) -> tuple[pa.Table, int]:
        """Those of a window that are asked for, in the order of their offsets, and where it ends: earlier than it was
        to where they are more bytes than may be held at once. Files need not be in that order."""
        options, (from_ms, until_ms) = self._options, self._period
        parts = self._history.parts(options.topic, {partition: (first, end)}, from_ms=from_ms)
        if options.dead_letters or options.where is not None:
            parts = [part for part in parts if part.put_aside is options.dead_letters]
        offsets = None
        if options.where is not None:
            place, aside = (options.topic, partition), options.dead_letters
            found = self._history.chosen_offsets(place, (first, end), options.where, put_aside=aside)
            offsets = found.combine_chunks()
        held = _NO_ROWS
        for part in parts:
            for batch in read_part(part, COLUMNS):
                rows = pa.Table.from_batches([batch])
                chosen = [pc.less(rows["offset"], end), *chosen_rows(rows, from_ms, until_ms, options.key)]
                if offsets is not None:
                    chosen.append(pc.is_in(rows["offset"], value_set=offsets))
                held = pa.concat_tables([held, rows.filter(reduce(pc.and_, chosen))])
                if held.nbytes > WINDOW_BYTES and len(held) > 1:
                    held = _first_rows(held, WINDOW_BYTES // 2)
                    end = held["offset"][-1].as_py() + 1
        return held.sort_by("offset"), end


def _first_rows(rows: pa.Table, most_bytes: int) -> pa.Table:
    """As many rows of the lowest offsets as are no more bytes than that, but at least one; copied, so that the others
    can go."""
    order = pc.sort_indices(rows, [("offset", "ascending")])
    while rows.nbytes > most_bytes and len(rows) > 1:
        order = order.slice(0, max(1, len(order) // 2))
        rows, order = rows.take(order), pa.array(range(len(order)))
    return rows


def chosen_rows(rows: pa.Table, from_ms: int | None, until_ms: int | None, key: bytes | None) -> list[Any]:
    """For each thing that is asked of rows of records, which of them meet it."""
    chosen: list[Any] = []
    if from_ms is not None:
        chosen.append(pc.greater_equal(rows["timestamp"], _moment(from_ms)))
    if until_ms is not None:
        chosen.append(pc.less(rows["timestamp"], _moment(until_ms)))
    if key is not None:
        chosen.append(pc.equal(rows["key"], pa.scalar(key, pa.binary())))
    return [pc.fill_null(each, False) for each in chosen]


def _moment(at_ms: int) -> pa.Scalar:
    return pa.scalar(at_ms * 1000, TIMESTAMP_TYPE)
