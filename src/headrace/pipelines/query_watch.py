"""Streaming queries watched until they end, or until a signal asks for their end.

On a signal the batch that runs comes to its end first, so that nothing of it is done twice. Spark begins the next one
at once if there is more to read; that one, and one that takes too long, is broken off and run again by the next start.

Spark runs a task again whose Python process died, but not a query whose planning or committing one did. One that plans
a stream has to answer within ten seconds of its start, which no setting changes (4.3): a busy machine may be too slow
for that. Such queries are started again, and go on from their checkpoints.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import StreamingQueryException

from headrace.pipelines.summary import Progress
from headrace.spark import faults

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

POLL_S: Final = 0.2
# Short, for the sake of the batch that comes after the last one.
STOP_POLL_S: Final = 0.02
STOP_WITHIN_S: Final = 60.0
WORKER_LOST: Final = ("Python worker failed to connect back", "Python worker exited unexpectedly")
"""Words of Spark; tests/spark/test_next_spark.py looks for them there."""
RESTARTS: Final = 5


class Batches:
    """The batches of one query, each told once; a query that is started again goes on counting."""

    def __init__(self) -> None:
        self._last = -1

    def fresh(self, query: StreamingQuery) -> list[dict[str, Any]]:
        """What Spark reports of the batches that it has finished since the last look."""
        last = query.lastProgress
        if last is None or last["batchId"] <= self._last:
            return []
        # A trigger that finds nothing bears the number of the batch to come.
        done = [
            each for each in query.recentProgress if each["batchId"] > self._last and "addBatch" in each["durationMs"]
        ]
        for each in done:
            self._last = each["batchId"]
            faults.reached("batch-done", self._last)
        return done  # type: ignore[return-value]


def run(
    start: Callable[[], Sequence[StreamingQuery]],
    look: Callable[[Sequence[StreamingQuery]], None],
    stopping: threading.Event,
) -> bool:
    """Start queries and follow them to their end, again where one failed for want of a Python process. True if a signal
    came first."""
    for left in reversed(range(RESTARTS + 1)):
        try:
            queries = start()
            return follow(queries, partial(look, queries), stopping)
        except StreamingQueryException as error:
            if not left or not any(text in str(error) for text in WORKER_LOST):
                raise
            log.warning("a Python process of Spark did not start in time, or died: the query goes on with another")
    raise AssertionError("the last try returns or raises")


def follow(queries: Sequence[StreamingQuery], look: Callable[[], None], stopping: threading.Event) -> bool:
    """Wait until all have ended; one that fails ends the others, and its error is raised. True if a signal came first.

    `look` is called between, and once more when all have ended.
    """
    try:
        waiting = list(queries)
        while waiting := [query for query in waiting if not ended(query)]:
            look()
            if stopping.is_set():
                for query in waiting:
                    _stop(query)
                break
        look()
        return bool(waiting)
    except BaseException:
        for query in queries:
            query.stop()
        raise


def ended(query: StreamingQuery, within_s: float = POLL_S) -> bool:
    """Wait a little for the end; an error of the query is raised here."""
    return bool(query.awaitTermination(within_s))  # type: ignore[arg-type]


def _stop(query: StreamingQuery) -> None:
    patience, before = Progress(), _last_batch(query)
    while query.status["isTriggerActive"] and _last_batch(query) == before and patience.elapsed_s < STOP_WITHIN_S:
        if ended(query, STOP_POLL_S):
            return
    query.stop()


def _last_batch(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


@contextmanager
def signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask for an end; a second SIGINT interrupts."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def asked(number: int, _: object) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
