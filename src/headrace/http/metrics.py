"""GET /metrics: everything that the broker counts, in Prometheus' text format (version 0.0.4).

A family is a line of help, a line of kind, then one line per set of labels; a histogram's buckets are cumulative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from headrace import __version__
from headrace.http.exchange import Exchange
from headrace.http.message import Response, text_response
from headrace.http.process import process_figures
from headrace.http.services import HttpServices
from headrace.metrics import LATENCY_BOUNDS_SECONDS, Histogram, Metrics, Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


def exposition(exchange: Exchange) -> Response:
    services = exchange.services
    lines: list[str] = []
    for name, kind, meaning, labels, value in _plain(services):
        lines += _head(name, kind, meaning)
        lines.append(_line(name, labels, value))
    lines += _requests(services.metrics)
    lines += _head("headrace_sync_seconds", "histogram", "Time of syncs to disk.")
    lines += _histogram("headrace_sync_seconds", (), services.metrics.syncs)
    lines += _families([*_logs(services), *_lags(services), *services.metrics.collected()])
    return text_response("\n".join(lines) + "\n", CONTENT_TYPE)


def _plain(services: HttpServices) -> Iterator[tuple[str, str, str, Labels, float]]:
    """Numbers that stand alone in their family."""
    metrics, process = services.metrics, process_figures()
    build = (("version", __version__), ("broker", str(services.broker_id)), ("cluster", services.cluster_id))
    yield "headrace_build_info", "gauge", "1, with what runs here as labels.", build, 1
    yield "headrace_ready", "gauge", "Whether requests can be served.", (), services.ready() is None
    yield "headrace_received_bytes_total", "counter", "Bytes of requests.", (), metrics.bytes_in
    yield "headrace_sent_bytes_total", "counter", "Bytes of responses.", (), metrics.bytes_out
    yield "headrace_batches_total", "counter", "Record batches taken from producers.", (), metrics.batches_in
    yield "headrace_connections", "gauge", "Open connections.", (), metrics.connections_open
    yield "headrace_connections_accepted_total", "counter", "Connections taken.", (), metrics.connections_accepted
    yield "headrace_connections_refused_total", "counter", "Connections refused.", (), metrics.connections_refused
    yield "headrace_connections_held_back", "gauge", "Not read until they catch up.", (), metrics.paused_connections
    yield "headrace_protocol_errors_total", "counter", "Requests that could not be read.", (), metrics.protocol_errors
    led = sum(partition.leading for partition in services.partitions)
    yield "headrace_partitions", "gauge", "Partitions led here.", (), led
    yield "headrace_replicas", "gauge", "Partitions held here, led or followed.", (), len(services.partitions)
    yield "process_resident_memory_bytes", "gauge", "Resident memory.", (), process.resident_bytes
    yield "process_cpu_seconds_total", "counter", "Processor time, user and system.", (), process.cpu_seconds
    yield "process_open_fds", "gauge", "Open descriptors.", (), process.open_files
    yield "process_max_fds", "gauge", "Most descriptors that may be open.", (), process.open_files_max


def _requests(metrics: Metrics) -> Iterator[str]:
    name = "headrace_request_seconds"
    yield from _head(name, "histogram", "Time from a request to its answer, by API.")
    for api, histogram in sorted(metrics.requests.items()):
        yield from _histogram(name, (("api", api),), histogram)
    name = "headrace_request_errors_total"
    yield from _head(name, "counter", "Requests answered with an error, by API and code.")
    for (api, code), count in sorted(metrics.request_errors.items()):
        yield _line(name, (("api", api), ("code", str(code))), count)


def _logs(services: HttpServices) -> Iterator[Sample]:
    for partition in services.partitions:
        where, log = partition.topic_partition, partition.log
        labels = (("topic", where.topic), ("partition", str(where.partition)))
        if partition.core is not None:
            in_sync = "Replicas in sync, of a partition led here."
            yield Sample("headrace_in_sync_replicas", "gauge", in_sync, labels, len(partition.core.isr))
        yield Sample("headrace_log_bytes", "gauge", "Size of a partition's log.", labels, log.size_bytes)
        yield Sample("headrace_log_start_offset", "gauge", "First offset of a log.", labels, log.start_offset)
        yield Sample("headrace_log_end_offset", "gauge", "Offset of the next record.", labels, log.end_offset)
        yield Sample(
            "headrace_high_watermark", "gauge", "Offset up to which consumers read.", labels, partition.high_watermark
        )
        if partition in services.partitions.damaged:
            damaged = "First offset of a replica that is known to be unreadable."
            yield Sample("headrace_damaged_offset", "gauge", damaged, labels, services.partitions.damaged[partition])
        yield Sample("headrace_log_offline", "gauge", "1 if the log has failed.", labels, log.offline is not None)
        if log.settings.retention_archived:
            held = "Bytes that retention would delete, had they been archived."
            yield Sample("headrace_held_bytes", "gauge", held, labels, log.held_bytes)
            archived = "Offset below which everything is archived."
            yield Sample("headrace_archived_offset", "gauge", archived, labels, log.archived_offset())
        keys = services.key_indexes.get(where)
        if keys is not None:
            behind = "Records that the key index does not have yet."
            yield Sample("headrace_key_index_behind", "gauge", behind, labels, keys.behind)
            yield Sample("headrace_key_index_bytes", "gauge", "Size of a key index.", labels, keys.size_bytes)


def _lags(services: HttpServices) -> Iterator[Sample]:
    for closed in services.closed_groups():
        meaning = "1 for a partition of __consumer_offsets whose groups are not answered, because it cannot be read."
        place = (("partition", str(closed.partition)), ("offset", str(closed.offset)))
        yield Sample("headrace_group_partition_closed", "gauge", meaning, place, 1)
    for lag in services.group_lags():
        labels = (("group", lag.group_id), ("topic", lag.topic), ("partition", str(lag.partition)))
        yield Sample("headrace_group_lag", "gauge", "Records that a group has not committed.", labels, lag.lag)


def _families(samples: Iterable[Sample]) -> Iterator[str]:
    """Samples in any order, brought together by name as the format wants them."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.name, []).append(sample)
    for name, members in families.items():
        yield from _head(name, members[0].kind, members[0].meaning)
        for sample in members:
            yield _line(name, sample.labels, sample.value)


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    cumulated = 0
    for bound, count in zip(LATENCY_BOUNDS_SECONDS, histogram.buckets, strict=False):
        cumulated += count
        yield _line(f"{name}_bucket", (*labels, ("le", f"{bound:g}")), cumulated)
    yield _line(f"{name}_bucket", (*labels, ("le", "+Inf")), histogram.count)
    yield _line(f"{name}_sum", labels, histogram.total_seconds)
    yield _line(f"{name}_count", labels, histogram.count)


def _head(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
    number = str(int(value)) if value == int(value) else repr(float(value))
    return f"{name}{{{shown}}} {number}" if shown else f"{name} {number}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
