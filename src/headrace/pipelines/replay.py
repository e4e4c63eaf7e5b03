"""`headrace pipeline replay`: records of an archive, or rows of a table, into a topic, each once. Needs no Spark.

    source (rows in an order of its own) -> condition -> a transaction for each window of rows -> topic

Rows of a window and how far the replay is then go into one transaction: progress is a record of the compacted topic
`__replays`, the name of the replay its key, and is kept for good. Whoever runs the replay takes over its transactional
id first. So what was under way when a process died has happened, or has not, and the next goes on behind it; one that
was taken over from can write nothing more.

    {"version": 1, "target": id of the topic that is written to, "reached": what the source wants to know}

A topic that was deleted and made anew has nothing of the replay: it begins anew too. One that a broker has only not
heard of yet is waited for.
"""

from __future__ import annotations

import json
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
from headrace.client.admin.compacted_topic import CompactedTopic
from headrace.client.admin.produce import ProducerId, open_transaction
from headrace.client.connection.metadata import REPLAYS_TOPIC
from headrace.client.errors import TransactionFailed, UnknownTopic
from headrace.client.producer.transaction_core import FENCED
from headrace.cluster.names import TRANSACTIONS_TOPIC
from headrace.errors import HeadraceError, OperatorError
from headrace.pipelines import query_watch
from headrace.pipelines.summary import Progress, Summary, rate
from headrace.spark import faults

WINDOW_ROWS: Final = 20_000
WINDOW_OPEN_MAX_MS: Final = 300_000
"""Readers of committed records wait no longer than that for a window whose process died."""
BROKER_TIMEOUT_MS: Final = 60_000
ID_PREFIX: Final = "headrace-replay-"
PROGRESS_TOPIC: Final = REPLAYS_TOPIC
_VERSION: Final = 1

_progress_topic: Final = CompactedTopic(PROGRESS_TOPIC, "a replay", like=TRANSACTIONS_TOPIC)

Reached = dict[str, Any]
"""How far a source is, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are written in one transaction, in their order, and what is known when they are."""

    rows: pa.Table
    passed: int
    """How many places of the source it covers, chosen or not."""
    reached: Reached
    """For `go_on`, when they are written."""
    told: str
    """Where it ends, for people."""
    place_of: Callable[[int], str]
    """Whence a row came, by its number in the window."""


class ReplaySource(Protocol):
    """Where rows come from. Its methods are called once each, in this order."""

    def check(self, cluster: Cluster) -> None:
        """OperatorError if it cannot be replayed there."""

    def go_on(self, reached: Reached) -> None:
        """How far the replay has come before, if it has. OperatorError if that was of another question; ValueError,
        KeyError or TypeError if it was of another kind of source."""

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
        name = ID_PREFIX + options.replay
        # Ends what another run has left open, before it is asked how far that came.
        producer = open_transaction(cluster, name, timeout_ms=WINDOW_OPEN_MAX_MS)
        _progress_topic.make(cluster)
        known = _known(cluster, options)
        reached = None if known is None or not _is_of(cluster, options, known) else dict(known["reached"])
        if reached is not None:
            try:
                source.go_on(reached)
            except (ValueError, KeyError, TypeError):
                raise OperatorError(
                    f"a replay {options.replay!r} was begun of something else; give this one another --name"
                ) from None
        source.make_target(cluster)
        replaying = _Replay(cluster, options, producer, progress)
        if known is not None and reached is None and known["target"] == replaying.target_id:
            raise OperatorError(
                f"brokers did not know of topic {options.target} at first, and now they do: run the replay again, it "
                "goes on where it ended"
            )
        most = WINDOW_ROWS if options.rate is None else max(1, min(WINDOW_ROWS, round(options.rate)))
        for window in source.windows(most):
            if stopping.is_set():
                break
            replaying.send(window, stopping)
        progress.done()
        facts = {"replay": options.replay, **source.facts(), "to": options.target, **replaying.facts()}
        facts |= {"went_on": reached is not None, "seconds": round(progress.elapsed_s, 1)}
        return Summary("replay", facts, ok=not stopping.is_set())


def _known(cluster: Cluster, options: ReplayOptions) -> dict[str, Any] | None:
    """How far the replay is, and in which topic; None if it has not begun."""
    # Others that write their progress hold it up for no longer than a window may be open.
    found = _progress_topic.read(cluster, options.replay.encode(), 2 * WINDOW_OPEN_MAX_MS)
    if found is None or found[0] is None:
        return None
    known: dict[str, Any] = json.loads(found[0])
    if known["version"] != _VERSION:
        raise OperatorError(f"a later version of headrace has begun the replay {options.replay!r}; go on with that")
    return known


def _is_of(cluster: Cluster, options: ReplayOptions, known: Mapping[str, Any]) -> bool:
    """Whether the topic is the one that was replayed to."""
    try:
        found = cluster.topic(options.target, expected=True)
    except UnknownTopic:
        return False
    return found.topic_id.hex() == str(known["target"])


class _Replay:
    def __init__(self, cluster: Cluster, options: ReplayOptions, producer: ProducerId, progress: Progress) -> None:
        self._cluster = cluster
        self._options = options
        self._producer = producer
        self._progress = progress
        self.target_id = cluster.topic(options.target, expected=True).topic_id.hex()
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
        with self._transaction() as transaction:
            sent: list[tuple[int, pa.RecordBatch, Pending]] = []
            try:
                first = 0
                for batch in window.rows.combine_chunks().to_batches():
                    sent.append((first, batch, transaction.submit(topic, batch)))
                    first += len(batch)
                # Last, as whoever asks for the progress of another replay waits from here on.
                transaction.submit(PROGRESS_TOPIC, self._progress_row(window.reached))
                faults.reached("replay-written", self._transactions)
                transaction.commit()
            except TransactionFailed:
                self._name_large_row(window, sent)
                raise
        faults.reached("replay-committed", self._transactions)
        self._producer = transaction.producer

    def _transaction(self) -> Transaction:
        """The next one of this process, if no other has taken the replay over."""
        try:
            return Transaction(
                ID_PREFIX + self._options.replay,
                cluster=self._cluster,
                timeout_ms=BROKER_TIMEOUT_MS,
                open_max_ms=WINDOW_OPEN_MAX_MS,
                previous=self._producer,
            )
        except HeadraceError as error:
            if error.kafka_code not in FENCED:
                raise
            raise OperatorError(f"another process runs the replay {self._options.replay!r} now") from None

    def _progress_row(self, reached: Reached) -> pa.RecordBatch:
        key = self._options.replay.encode()
        value = json.dumps({"version": _VERSION, "target": self.target_id, "reached": reached}).encode()
        partition = pa.array([_progress_topic.partition_of(key)], pa.int32())
        return pa.RecordBatch.from_pydict({"key": [key], "value": [value], "partition": partition})

    def _name_large_row(self, window: Window, sent: list[tuple[int, pa.RecordBatch, Pending]]) -> None:
        """What failed in it says more than that the transaction did."""
        for first, batch, pending in sent:
            try:
                pending.result()
            except WriteFailed as failed:
                topic = self._options.target
                name_large_row(self._cluster, topic, batch, failed, lambda n, first=first: window.place_of(first + n))  # type: ignore[misc]
