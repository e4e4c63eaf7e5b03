"""GET /metrics: everything that the broker counts, in Prometheus' text format.

The families are those of `headrace.metrics`, in that order; one without a sample is left out. A histogram's buckets are
cumulative.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headrace import __version__
from headrace import metrics as families
from headrace.cluster.image import Image
from headrace.http.description import TEXT, Answer, Operation
from headrace.http.exchange import Exchange
from headrace.http.message import PLAIN, Response, text_response
from headrace.http.process import process_figures
from headrace.http.services import HttpServices
from headrace.metrics import FAMILIES, LATENCY_BOUNDS_SECONDS, Family, Histogram, Metrics, Sample
from headrace.partitions.partition import Partition

EXPOSITION: Final = Operation(
    "Everything that is counted, for Prometheus", {200: Answer("Its text format.", {PLAIN: TEXT})}
)


def exposition(exchange: Exchange) -> Response:
    services = exchange.services
    lines: dict[Family, list[str]] = {}
    for sample in _samples(services):
        lines.setdefault(sample.family, []).append(families.line(sample))
    lines[families.SYNC_SECONDS] = list(_histogram(families.SYNC_SECONDS, (), services.metrics.syncs))
    lines[families.REQUEST_SECONDS] = [
        line
        for api, histogram in sorted(services.metrics.requests.items())
        for line in _histogram(families.REQUEST_SECONDS, (api,), histogram)
    ]
    told = dict.fromkeys((*FAMILIES, *lines))
    shown = [line for family in told if lines.get(family) for line in (*families.head_lines(family), *lines[family])]
    return text_response("\n".join(shown) + "\n", families.CONTENT_TYPE)


def _samples(services: HttpServices) -> Iterator[Sample]:
    build = __version__, str(services.broker_id), services.cluster_id
    yield Sample(families.BUILD_INFO, build, 1)
    yield Sample(families.READY, (), services.ready() is None)
    yield from _requests(services.metrics)
    yield from _topics(services)
    yield from _replication(services, services.image())
    for partition in services.partitions:
        yield from _log(services, partition)
    yield from _groups(services)
    yield from _process()
    yield from services.metrics.collected()


def _requests(metrics: Metrics) -> Iterator[Sample]:
    yield Sample(families.RECEIVED_BYTES, (), metrics.bytes_in)
    yield Sample(families.SENT_BYTES, (), metrics.bytes_out)
    yield Sample(families.CONNECTIONS, (), metrics.connections_open)
    yield Sample(families.CONNECTIONS_ACCEPTED, (), metrics.connections_accepted)
    yield Sample(families.CONNECTIONS_REFUSED, (), metrics.connections_refused)
    yield Sample(families.CONNECTIONS_HELD_BACK, (), metrics.paused_connections)
    yield Sample(families.PROTOCOL_ERRORS, (), metrics.protocol_errors)
    for (api, code), count in sorted(metrics.request_errors.items()):
        yield Sample(families.REQUEST_ERRORS, (api, str(code)), count)


def _topics(services: HttpServices) -> Iterator[Sample]:
    traffic = services.partitions.traffic
    yield Sample(families.BATCHES, (), sum(each.batches_in for each in traffic.values()))
    for topic, counted in traffic.items():
        yield Sample(families.TOPIC_RECEIVED_BYTES, (topic,), counted.bytes_in)
        yield Sample(families.TOPIC_RECEIVED_RECORDS, (topic,), counted.records_in)
        yield Sample(families.TOPIC_SENT_BYTES, (topic,), counted.bytes_out)
        yield Sample(families.TOPIC_SENT_RECORDS, (topic,), counted.records_out)


def _replication(services: HttpServices, image: Image) -> Iterator[Sample]:
    led, under_replicated, under_min = 0, 0, 0
    for partition in services.partitions:
        core = partition.core
        if core is None:
            continue
        where = partition.topic_partition
        topic = image.topics.get(where.topic)
        known = topic is not None and where.partition < len(topic.partitions)
        wanted = len(topic.partitions[where.partition].replicas) if topic is not None and known else len(core.isr)
        led += 1
        under_replicated += len(core.isr) < wanted
        under_min += not core.has_min_isr
        labels = where.topic, str(where.partition)
        yield Sample(families.PARTITION_REPLICAS, labels, wanted)
        yield Sample(families.IN_SYNC_REPLICAS, labels, len(core.isr))
    leaderless = sum(each.leader < 0 for topic in image.topics.values() for each in topic.partitions)
    yield Sample(families.PARTITIONS, (), led)
    yield Sample(families.REPLICAS, (), len(services.partitions))
    yield Sample(families.UNDER_REPLICATED, (), under_replicated)
    yield Sample(families.UNDER_MIN_IN_SYNC, (), under_min)
    yield Sample(families.LEADERLESS, (), leaderless)


def _log(services: HttpServices, partition: Partition) -> Iterator[Sample]:
    where, log = partition.topic_partition, partition.log
    labels = where.topic, str(where.partition)
    yield Sample(families.LOG_BYTES, labels, log.size_bytes)
    yield Sample(families.LOG_START_OFFSET, labels, log.start_offset)
    yield Sample(families.LOG_END_OFFSET, labels, log.end_offset)
    yield Sample(families.HIGH_WATERMARK, labels, partition.high_watermark)
    if partition in services.partitions.damaged:
        yield Sample(families.DAMAGED_OFFSET, labels, services.partitions.damaged[partition])
    yield Sample(families.LOG_OFFLINE, labels, log.offline is not None)
    if log.settings.retention_archived:
        yield Sample(families.HELD_BYTES, labels, log.held_bytes)
        yield Sample(families.ARCHIVED_OFFSET, labels, log.archived_offset())
    keys = services.key_indexes.get(where)
    if keys is not None:
        yield Sample(families.KEY_INDEX_BEHIND, labels, keys.behind)
        yield Sample(families.KEY_INDEX_BYTES, labels, keys.size_bytes)


def _groups(services: HttpServices) -> Iterator[Sample]:
    for closed in services.closed_groups():
        yield Sample(families.GROUP_PARTITION_CLOSED, (str(closed.partition),), 1)
    for lag in services.group_lags():
        yield Sample(families.GROUP_LAG, (lag.group_id, lag.topic, str(lag.partition)), lag.lag)


def _process() -> Iterator[Sample]:
    process = process_figures()
    yield Sample(families.RESIDENT_BYTES, (), process.resident_bytes)
    yield Sample(families.CPU_SECONDS, (), process.cpu_seconds)
    yield Sample(families.START_TIME, (), process.started_seconds)
    yield Sample(families.OPEN_FDS, (), process.open_files)
    yield Sample(families.MAX_FDS, (), process.open_files_max)


def _histogram(family: Family, labels: tuple[str, ...], histogram: Histogram) -> Iterator[str]:
    own = tuple(zip(family.labels, labels, strict=True))
    cumulated = 0
    for bound, count in zip(LATENCY_BOUNDS_SECONDS, histogram.buckets, strict=False):
        cumulated += count
        yield families.sample_line(f"{family.name}_bucket", (*own, ("le", f"{bound:g}")), cumulated)
    yield families.sample_line(f"{family.name}_bucket", (*own, ("le", "+Inf")), histogram.count)
    yield families.sample_line(f"{family.name}_sum", own, histogram.total_seconds)
    yield families.sample_line(f"{family.name}_count", own, histogram.count)
