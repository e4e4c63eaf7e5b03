"""`headrace pipeline replay`: records of an archive back into a topic, each once. Needs no Spark.

    archive (files in the order of their offsets) -> condition -> a transaction for each window of offsets -> topic

Partition after partition is read, window by window. Rows of a window and how far the replay is then go into one
transaction: progress is an offset of the group `headrace-replay-NAME`, of partition 0 of the target topic, with the
source partition in its metadata. Whoever runs the replay takes over its transactional id first. So what was under way
when a process died has happened, or has not, and the next goes on behind it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from headrace.arrow.history import History, read_part
from headrace.arrow.transaction import Transaction
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.groups import fetch_commits
from headrace.client.admin.operations import create_topic
from headrace.client.admin.produce import open_two_phase
from headrace.client.errors import UnknownTopic
from headrace.errors import OperatorError
from headrace.pipelines import query_watch
from headrace.pipelines.summary import Progress, Summary, rate
from headrace.spark import faults

WINDOW_OFFSETS: Final = 20_000
COLUMNS: Final = ("partition", "offset", "timestamp", "key", "value", "headers")
BROKER_TIMEOUT_MS: Final = 60_000
GROUP_PREFIX: Final = "headrace-replay-"


@dataclass(frozen=True, slots=True)
class ReplayOptions:
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

    @property
    def target(self) -> str:
        return self.to or self.topic

    @property
    def replay(self) -> str:
        """Its name: the same for the same question, unless one is given."""
        if self.name:
            return self.name
        asked = (self.target, self.from_ms, self.until_ms, self.key, self.where, self.partition, self.dead_letters)
        told = repr((str(self.archive.resolve()), self.topic, *asked))
        return f"{self.topic}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class _Window:
    partition: int
    first: int
    end: int


def run(options: ReplayOptions, progress: Progress | None = None) -> Summary:
    """Send what is archived now and not replayed yet, or as much of it as there is before a signal comes."""
    progress = progress or Progress()
    history = History(options.archive)
    partitions = sorted(partition for topic, partition in history.ends if topic == options.topic)
    if not partitions:
        raise OperatorError(f"the archive {options.archive} has no records of a topic {options.topic!r}")
    retry = Retry(within_ms=BROKER_TIMEOUT_MS, first_contact_ms=0)
    with Cluster(options.bootstrap, retry=retry) as cluster, query_watch.signals() as stopping:
        history.check({}, COLUMNS)
        _refuse_itself(cluster, options, history)
        _make_target(cluster, options, partitions)
        # Ends what another run has left open, before it is asked how far that came.
        open_two_phase(cluster, _transactional_id(options))
        replaying = _Replay(cluster, options, history, progress)
        for window in replaying.windows(partitions):
            if stopping.is_set():
                break
            replaying.send(window, stopping)
        progress.done()
        return replaying.summary(stopping.is_set())


def _transactional_id(options: ReplayOptions) -> str:
    return f"{GROUP_PREFIX}{options.replay}"


def _refuse_itself(cluster: Cluster, options: ReplayOptions, history: History) -> None:
    if options.target != options.topic:
        return
    try:
        now = cluster.topic(options.topic).topic_id.hex()
    except UnknownTopic:
        return
    if history.topic_ids().get(options.topic) == now:
        raise OperatorError(
            f"topic {options.topic} is the one that {options.archive} has records of: what is written to it would be "
            "archived, and replayed again; give another topic with --to"
        )


def _make_target(cluster: Cluster, options: ReplayOptions, partitions: list[int]) -> None:
    needed = partitions[-1] + 1
    try:
        there = len(cluster.topic(options.target).partitions)
    except UnknownTopic:
        create_topic(cluster, options.target, partitions=needed)
        return
    if options.partition == "keep" and there < needed:
        raise OperatorError(
            f"topic {options.target} has {there} partitions, and the archive has records of partition {needed - 1}: "
            f"enlarge it with `headrace topic alter {options.target} --partitions {needed}`, or let keys decide with "
            "--partition key"
        )


class _Replay:
    def __init__(self, cluster: Cluster, options: ReplayOptions, history: History, progress: Progress) -> None:
        self._cluster = cluster
        self._options = options
        self._history = history
        self._progress = progress
        self._group = _transactional_id(options)
        self._records = self._passed = self._transactions = 0
        self._resumed = False

    def windows(self, partitions: list[int]) -> Iterator[_Window]:
        """All that is not replayed yet, in order."""
        options = self._options
        most = WINDOW_OFFSETS if options.rate is None else max(1, min(WINDOW_OFFSETS, round(options.rate)))
        at_partition, at_offset = self._reached()
        for partition in partitions:
            if partition < at_partition:
                continue
            place = options.topic, partition
            at = self._history.next_at(place, at_offset if partition == at_partition else 0)
            while at is not None:
                end = min(at + most, self._history.ends[place])
                yield _Window(partition, at, end)
                at = self._history.next_at(place, end)

    def _reached(self) -> tuple[int, int]:
        """Partition and offset that are next."""
        place = self._options.target, 0
        found = fetch_commits(self._cluster, self._group, [place]).get(place)
        if found is None:
            return 0, 0
        self._resumed = True
        try:
            return int(json.loads(found.metadata)["partition"]), found.offset
        except (ValueError, KeyError, TypeError):
            raise OperatorError(
                f"group {self._group} was not made by a replay; give the replay another --name"
            ) from None

    def send(self, window: _Window, stopping: threading.Event) -> None:
        options, began = self._options, time.monotonic()
        rows = self._rows(window)
        self._passed += window.end - window.first
        if len(rows):
            sent = rows.drop(["offset", *(["partition"] if options.partition == "key" else [])])
            with Transaction(self._group, cluster=self._cluster, timeout_ms=BROKER_TIMEOUT_MS) as transaction:
                for batch in sent.combine_chunks().to_batches():
                    transaction.submit(options.target, batch)
                note = json.dumps({"partition": window.partition})
                transaction.send_offsets({(options.target, 0): window.end}, self._group, metadata=note)
                faults.reached("replay-written", self._transactions)
                transaction.commit()
            faults.reached("replay-committed", self._transactions)
            self._records += len(rows)
            self._transactions += 1
        elapsed_s = self._progress.elapsed_s
        self._progress.say(
            f"replayed {self._records:,} records, {rate(self._records, elapsed_s)}, partition {window.partition} at "
            f"offset {window.end:,} of {self._history.ends[options.topic, window.partition]:,}"
        )
        if options.rate is not None:
            stopping.wait(max(0.0, len(rows) / options.rate - (time.monotonic() - began)))

    def _rows(self, window: _Window) -> pa.Table:
        """Those of a window that are asked for, in the order of their offsets."""
        options = self._options
        place, span = (options.topic, window.partition), (window.first, window.end)
        parts = self._history.parts(options.topic, {window.partition: span}, from_ms=options.from_ms)
        if options.dead_letters or options.where is not None:
            parts = [part for part in parts if part.put_aside is options.dead_letters]
        found = [batch for part in parts for batch in read_part(part, COLUMNS)]
        if not found:
            return pa.table({name: [] for name in COLUMNS})
        rows = pa.Table.from_batches(found).sort_by("offset")
        chosen: list[Any] = []
        if options.from_ms is not None:
            chosen.append(pc.greater_equal(rows["timestamp"], _moment(options.from_ms)))
        if options.until_ms is not None:
            chosen.append(pc.less(rows["timestamp"], _moment(options.until_ms)))
        if options.key is not None:
            chosen.append(pc.fill_null(pc.equal(rows["key"], pa.scalar(options.key, pa.binary())), False))
        if options.where is not None:
            offsets = self._history.chosen_offsets(place, span, options.where)
            chosen.append(pc.is_in(rows["offset"], value_set=offsets.combine_chunks()))
        return rows.filter(reduce(pc.and_, chosen)) if chosen else rows

    def summary(self, interrupted: bool) -> Summary:
        options = self._options
        facts = {
            "replay": options.replay,
            "archive": str(options.archive),
            "from": options.topic,
            "to": options.target,
            "records": self._records,
            "offsets_passed": self._passed,
            "transactions": self._transactions,
            "went_on": self._resumed,
            "seconds": round(self._progress.elapsed_s, 1),
        }
        return Summary("replay", facts, ok=not interrupted)


def _moment(at_ms: int) -> pa.Scalar:
    return pa.scalar(at_ms * 1000, pa.timestamp("us", tz="UTC"))
