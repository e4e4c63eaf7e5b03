"""What the broker counts: plain integers that the hot path adds to, and a histogram of latencies per API.

Nothing is formatted here; the HTTP port renders it. Gauges that are cheaper to compute than to keep (log sizes, group
lag) come from collectors that run when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

LATENCY_BOUNDS_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One number as Prometheus has it: name, kind, help, labels, value."""

    name: str
    kind: str
    meaning: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Histogram:
    __slots__ = ("buckets", "count", "total_seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
        self.count = 0
        self.total_seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.buckets[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += count
        self.count += count
        self.total_seconds += seconds * count


class Metrics:
    def __init__(self) -> None:
        self.requests: dict[str, Histogram] = {}
        self.request_errors: dict[tuple[str, int], int] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.batches_in = 0
        self.connections_open = 0
        self.connections_accepted = 0
        self.connections_refused = 0
        self.protocol_errors = 0
        self.paused_connections = 0
        self.syncs = Histogram()
        self._collectors: list[Callable[[], Iterable[Sample]]] = []

    def observe(self, api: str, seconds: float, count: int = 1) -> None:
        histogram = self.requests.get(api)
        if histogram is None:
            histogram = self.requests[api] = Histogram()
        histogram.add(seconds, count)

    def error(self, api: str, code: int) -> None:
        self.request_errors[api, code] = self.request_errors.get((api, code), 0) + 1

    def collect(self, collector: Callable[[], Iterable[Sample]]) -> None:
        """Ask this function for more samples at every scrape."""
        self._collectors.append(collector)

    def collected(self) -> Iterable[Sample]:
        for collector in self._collectors:
            yield from collector()
