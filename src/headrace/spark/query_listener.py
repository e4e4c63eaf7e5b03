"""Hears from Spark when a batch is complete: commits how far its query is, and counts for Prometheus.

Only the driver hears of it, and only in sessions that this listens to: those of `headrace.spark.start`, and those that
`headrace.spark.register` is told of. With the setting `spark.headrace.metrics.address` (`127.0.0.1:9464`) what is
counted is served there, as `/metrics`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from headrace.errors import OperatorError

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from pyspark.sql import SparkSession

METRICS_ADDRESS: Final = "spark.headrace.metrics.address"

_listening: Final[weakref.WeakSet[SparkSession]] = weakref.WeakSet()
_served: Final[dict[str, ThreadingHTTPServer]] = {}


class QueryListener(StreamingQueryListener):
    """What it needs is brought in with the first report: most sessions have no streams."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Spark waits for this before the query goes on: nothing is done."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Spark reports a batch when its own commit log has it."""
        from headrace.spark import group_commits, query_metrics

        group_commits.take(event.progress)
        query_metrics.totals.add(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        from headrace.spark import query_metrics

        query_metrics.totals.forget(str(event.id))


def listen(spark: SparkSession) -> None:
    """Once for each session. Spark has a list of listeners for each, so `newSession()` needs it anew."""
    if spark in _listening:
        return
    spark.streams.addListener(QueryListener())
    _listening.add(spark)
    address = spark.conf.get(METRICS_ADDRESS, None)
    if address and address not in _served:
        _served[address] = serve(address, _page)


def _page() -> str:
    from headrace.metrics import exposition
    from headrace.spark import query_metrics

    return exposition(query_metrics.totals.samples())


def serve(address: str, page: Callable[[], str]) -> ThreadingHTTPServer:
    """Answers GET /metrics from now on, until the process ends."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from headrace.metrics import CONTENT_TYPE

    host, _, port = address.rpartition(":")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = page().encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Not on the screen of whoever runs the query."""

    try:
        server = ThreadingHTTPServer((host, int(port)), Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise OperatorError(
            f"{METRICS_ADDRESS}={address} cannot be served: {error}; write such as 127.0.0.1:9464"
        ) from None
    threading.Thread(target=server.serve_forever, name="headrace-spark-metrics", daemon=True).start()
    return server
