"""`headrace pipeline replay`: records of an archive, or rows of a table, into a topic, each once. Needs no Spark.

    source (rows in an order of its own) -> condition -> a transaction for each window of rows -> topic

Rows of a window and how far the replay is then go into one transaction: progress is an offset of the group
`headrace-replay-NAME`, of partition 0 of the target topic, with what else the source wants to know in its metadata.
Whoever runs the replay takes over its transactional id first. So what was under way when a process died has happened,
or has not, and the next goes on behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from headrace.arrow.large_row import name_large_row
from headrace.arrow.transaction import Transaction
from headrace.arrow.write import Pending, WriteFailed
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.groups import Commit, fetch_commits
from headrace.client.admin.produce import open_two_phase
from headrace.client.errors import TransactionFailed
from headrace.errors import OperatorError
from headrace.pipelines import query_watch
from headrace.pipelines.summary import Progress, Summary, rate
from headrace.spark import faults

WINDOW_ROWS: Final = 20_000
BROKER_TIMEOUT_MS: Final = 60_000
GROUP_PREFIX: Final = "headrace-replay-"


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are written in one transaction, in their order, and what is known when they are."""

    rows: pa.Table
    passed: int
    """How many places of the source it covers, chosen or not."""
    next_offset: int
    note: str
    """Metadata of the offset."""
    told: str
    """Where it ends, for people."""
    place_of: Callable[[int], str]
    """Whence a row came, by its number in the window."""


class ReplaySource(Protocol):
    """Where rows come from. Its methods are called once each, in this order."""

    def check(self, cluster: Cluster) -> None:
        """OperatorError if it cannot be replayed there."""

    def go_on(self, reached: Commit | None) -> None:
        """How far the replay has come before, if it has; ValueError, KeyError or TypeError if it was another's."""

    def make_target(self, cluster: Cluster) -> None:
        """That there is a topic to write to, and that it fits."""

    def windows(self, most_rows: int) -> Iterator[Window]:
        """All that is not replayed yet, in order."""

    def facts(self) -> Mapping[str, Any]:
        """Of the source, for the summary."""


class ReplayOptions(Protocol):
    @property
    def bootstrap(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def replay(self) -> str:
        """Its name: the same for the same question, unless one is given."""

    @property
    def rate(self) -> float | None:
        """In records a second."""

    def source(self) -> ReplaySource: ...


def run(options: ReplayOptions, progress: Progress | None = None) -> Summary:
    """Send what is there now and not replayed yet, or as much of it as there is before a signal comes."""
    progress = progress or Progress()
    source = options.source()
    retry = Retry(within_ms=BROKER_TIMEOUT_MS, first_contact_ms=0)
    with Cluster(options.bootstrap, retry=retry) as cluster, query_watch.signals() as stopping:
        source.check(cluster)
        name = GROUP_PREFIX + options.replay
        # Ends what another run has left open, before it is asked how far that came.
        open_two_phase(cluster, name)
        reached = fetch_commits(cluster, name, [(options.target, 0)]).get((options.target, 0))
        try:
            source.go_on(reached)
        except (ValueError, KeyError, TypeError):
            raise OperatorError(f"group {name} was not made by this replay; give the replay another --name") from None
        source.make_target(cluster)
        replaying = _Replay(cluster, options, name, progress)
        most = WINDOW_ROWS if options.rate is None else max(1, min(WINDOW_ROWS, round(options.rate)))
        for window in source.windows(most):
            if stopping.is_set():
                break
            replaying.send(window, stopping)
        progress.done()
        facts = {"replay": options.replay, **source.facts(), "to": options.target, **replaying.facts()}
        facts |= {"went_on": reached is not None, "seconds": round(progress.elapsed_s, 1)}
        return Summary("replay", facts, ok=not stopping.is_set())


class _Replay:
    def __init__(self, cluster: Cluster, options: ReplayOptions, name: str, progress: Progress) -> None:
        self._cluster = cluster
        self._options = options
        self._name = name
        self._progress = progress
        self._records = self._passed = self._transactions = 0

    def facts(self) -> dict[str, Any]:
        return {"records": self._records, "offsets_passed": self._passed, "transactions": self._transactions}

    def send(self, window: Window, stopping: threading.Event) -> None:
        rate_, began = self._options.rate, time.monotonic()
        self._passed += window.passed
        if len(window.rows):
            self._write(window)
            self._records += len(window.rows)
            self._transactions += 1
        self._progress.say(
            f"replayed {self._records:,} records, {rate(self._records, self._progress.elapsed_s)}, {window.told}"
        )
        if rate_ is not None:
            stopping.wait(max(0.0, len(window.rows) / rate_ - (time.monotonic() - began)))

    def _write(self, window: Window) -> None:
        topic = self._options.target
        with Transaction(self._name, cluster=self._cluster, timeout_ms=BROKER_TIMEOUT_MS) as transaction:
            sent: list[tuple[int, pa.RecordBatch, Pending]] = []
            try:
                first = 0
                for batch in window.rows.combine_chunks().to_batches():
                    sent.append((first, batch, transaction.submit(topic, batch)))
                    first += len(batch)
                transaction.send_offsets({(topic, 0): window.next_offset}, self._name, metadata=window.note)
                faults.reached("replay-written", self._transactions)
                transaction.commit()
            except TransactionFailed:
                self._name_large_row(window, sent)
                raise
        faults.reached("replay-committed", self._transactions)

    def _name_large_row(self, window: Window, sent: list[tuple[int, pa.RecordBatch, Pending]]) -> None:
        """What failed in it says more than that the transaction did."""
        for first, batch, pending in sent:
            try:
                pending.result()
            except WriteFailed as failed:
                topic = self._options.target
                name_large_row(self._cluster, topic, batch, failed, lambda n, first=first: window.place_of(first + n))  # type: ignore[misc]
