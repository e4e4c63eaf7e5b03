"""What the broker counts: plain integers that the hot path adds to, and a histogram of latencies per API; and the table
of metric families, by which they are told.

The HTTP port tells them, in Prometheus' text format. Gauges that are cheaper to compute than to keep (log sizes, group
lag) come from collectors that run when somebody asks.

Names follow Prometheus' conventions: base units last, `_total` for what only rises. docs/METRICS.md is made from the
table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format: a line of help and one of kind for a family, then a line for each sample."""
LATENCY_BOUNDS_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as Prometheus has it: its name, kind and help, and the names of its labels."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, "gauge", meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Family:
    return Family(name, "counter", meaning, labels)


_OF = ("topic", "partition")

BUILD_INFO: Final = _gauge("headrace_build_info", "1, with what runs here as labels.", "version", "broker", "cluster")
READY: Final = _gauge("headrace_ready", "1 if requests can be served.")

RECEIVED_BYTES: Final = _counter("headrace_received_bytes_total", "Bytes of requests.")
SENT_BYTES: Final = _counter("headrace_sent_bytes_total", "Bytes of responses.")
BATCHES: Final = _counter("headrace_batches_total", "Record batches taken from producers.")
CONNECTIONS: Final = _gauge("headrace_connections", "Open connections.")
CONNECTIONS_ACCEPTED: Final = _counter("headrace_connections_accepted_total", "Connections taken.")
CONNECTIONS_REFUSED: Final = _counter("headrace_connections_refused_total", "Connections refused.")
CONNECTIONS_HELD_BACK: Final = _gauge("headrace_connections_held_back", "Not read until they catch up.")
HTTP_CONNECTIONS: Final = _gauge("headrace_http_connections", "Open HTTP connections.")
FETCH_SESSIONS: Final = _gauge("headrace_fetch_sessions", "Fetch sessions of consumers.")
FETCH_SESSION_PARTITIONS: Final = _gauge("headrace_fetch_session_partitions", "Partitions in all fetch sessions.")
FETCH_SESSION_EVICTIONS: Final = _counter(
    "headrace_fetch_session_evictions_total", "Fetch sessions that had to make room for others."
)
SHARE_SESSIONS: Final = _gauge("headrace_share_sessions", "Share sessions of members of share groups.")
SHARE_SESSION_PARTITIONS: Final = _gauge("headrace_share_session_partitions", "Partitions in all share sessions.")
PROTOCOL_ERRORS: Final = _counter("headrace_protocol_errors_total", "Requests that could not be read.")
REQUEST_SECONDS: Final = Family(
    "headrace_request_seconds", "histogram", "Time from a request to its answer, by API.", ("api",)
)
REQUEST_ERRORS: Final = _counter(
    "headrace_request_errors_total", "Requests answered with an error, by API and code.", "api", "code"
)
SYNC_SECONDS: Final = Family("headrace_sync_seconds", "histogram", "Time of syncs to disk.")

TOPIC_RECEIVED_BYTES: Final = _counter(
    "headrace_topic_received_bytes_total", "Bytes of record batches taken from producers, as they are stored.", "topic"
)
TOPIC_RECEIVED_RECORDS: Final = _counter(
    "headrace_topic_received_records_total", "Records taken from producers.", "topic"
)
TOPIC_SENT_BYTES: Final = _counter(
    "headrace_topic_sent_bytes_total", "Bytes of record batches sent to consumers, other brokers not counted.", "topic"
)
TOPIC_SENT_RECORDS: Final = _counter(
    "headrace_topic_sent_records_total",
    "Records that consumers have read: counted when they ask for what comes next, by offsets.",
    "topic",
)

PARTITIONS: Final = _gauge("headrace_partitions", "Partitions led here.")
REPLICAS: Final = _gauge("headrace_replicas", "Partitions held here, led or followed.")
UNDER_REPLICATED: Final = _gauge(
    "headrace_under_replicated_partitions", "Partitions led here with fewer replicas in sync than they should have."
)
UNDER_MIN_IN_SYNC: Final = _gauge(
    "headrace_under_min_in_sync_partitions", "Partitions led here that refuse acks=-1, as too few are in sync."
)
LEADERLESS: Final = _gauge(
    "headrace_leaderless_partitions", "Partitions of the whole cluster that nobody leads, as this broker has heard."
)
PARTITION_REPLICAS: Final = _gauge(
    "headrace_partition_replicas", "Replicas that a partition led here should have.", *_OF
)
IN_SYNC_REPLICAS: Final = _gauge("headrace_in_sync_replicas", "Replicas in sync, of a partition led here.", *_OF)
LOG_BYTES: Final = _gauge("headrace_log_bytes", "Size of a partition's log.", *_OF)
LOG_START_OFFSET: Final = _gauge("headrace_log_start_offset", "First offset of a log.", *_OF)
LOG_END_OFFSET: Final = _gauge("headrace_log_end_offset", "Offset of the next record.", *_OF)
HIGH_WATERMARK: Final = _gauge("headrace_high_watermark", "Offset up to which consumers read.", *_OF)
DAMAGED_OFFSET: Final = _gauge(
    "headrace_damaged_offset", "First offset of a replica that is known to be unreadable.", *_OF
)
LOG_OFFLINE: Final = _gauge("headrace_log_offline", "1 if the log has failed.", *_OF)
HELD_BYTES: Final = _gauge("headrace_held_bytes", "Bytes that retention would delete, had they been archived.", *_OF)
ARCHIVED_OFFSET: Final = _gauge("headrace_archived_offset", "Offset below which everything is archived.", *_OF)
KEY_INDEX_BEHIND: Final = _gauge("headrace_key_index_behind", "Records that the key index does not have yet.", *_OF)
KEY_INDEX_BYTES: Final = _gauge("headrace_key_index_bytes", "Size of a key index.", *_OF)

GROUP_LAG: Final = _gauge("headrace_group_lag", "Records that a group has not committed.", "group", *_OF)
GROUP_PARTITION_CLOSED: Final = _gauge(
    "headrace_group_partition_closed",
    "1 for a partition of __consumer_offsets whose groups are not answered, because it cannot be read.",
    "partition",
)

SHARE_PARTITIONS: Final = _gauge("headrace_share_partitions", "Share partitions in memory.")
SHARE_RECORDS_HELD: Final = _gauge(
    "headrace_share_records_held",
    "Records acquired by members, such as are available again, and such as wait for their dead letter (archiving).",
    "group",
    "state",
)
SHARE_ACQUIRED: Final = _counter("headrace_share_acquired_total", "Records acquired by members.", "group")
SHARE_REDELIVERED: Final = _counter(
    "headrace_share_redelivered_total", "Of these, records that had been delivered before.", "group"
)
SHARE_ACKNOWLEDGED: Final = _counter("headrace_share_acknowledged_total", "Records accepted by members.", "group")
SHARE_RELEASED: Final = _counter("headrace_share_released_total", "Records that members gave back.", "group")
SHARE_EXPIRED: Final = _counter("headrace_share_expired_total", "Records whose lock has expired.", "group")
SHARE_ARCHIVED: Final = _counter(
    "headrace_share_archived_total", "Records that are delivered no more, and were not accepted.", "group", "reason"
)
SHARE_DEAD_LETTERS: Final = _counter("headrace_share_dead_letters_total", "Dead letters written.", "group")
SHARE_DEAD_LETTER_FAILURES: Final = _counter(
    "headrace_share_dead_letter_failures_total",
    "Attempts to write dead letters that failed; they are tried again.",
    "group",
)
DELAYED_WAITING: Final = _gauge(
    "headrace_delayed_records_waiting", "Delayed records that are not due yet, of partitions led here.", "topic"
)
DELAYED_DELIVERED: Final = _counter("headrace_delayed_records_delivered_total", "Delayed records delivered.", "topic")
DELAYED_LATE_SECONDS: Final = _counter(
    "headrace_delayed_records_late_seconds_total",
    "How much later than due delayed records were delivered, over all of them.",
    "topic",
)
DELAYED_LATEST_SECONDS: Final = _gauge(
    "headrace_delayed_records_latest_seconds",
    "How much later than due the latest of the delayed records was delivered since the broker began to lead.",
    "topic",
)
TRANSACTIONS: Final = _gauge(
    "headrace_transactions", "Transactional ids that are coordinated here, by the state that they are in.", "state"
)
TRANSACTION_ENDING_SECONDS: Final = _gauge(
    "headrace_transaction_ending_age_seconds",
    "How long the oldest transaction that was decided here has not ended in all of its partitions; 0 without one.",
)
TRANSACTION_PARTITION_CLOSED: Final = _gauge(
    "headrace_transaction_partition_closed",
    "1 for a partition of __transaction_state whose transactional ids are not answered, because it cannot be read.",
    "partition",
)
TWO_PHASE_AGE_SECONDS: Final = _gauge(
    "headrace_two_phase_transaction_age_seconds",
    "How long the oldest open two-phase transaction has been open, of those that are coordinated here; 0 without one.",
)

SHARE_PARTITION_STATES: Final = _gauge(
    "headrace_share_partition_states", "Share partitions whose state is kept here, by their share coordinator."
)
SHARE_STATE_PARTITION_CLOSED: Final = _gauge(
    "headrace_share_state_partition_closed",
    "1 for a partition of __share_group_state whose share partitions are not answered, because it cannot be read.",
    "partition",
)

RESIDENT_BYTES: Final = _gauge("process_resident_memory_bytes", "Resident memory.")
CPU_SECONDS: Final = _counter("process_cpu_seconds_total", "Processor time, user and system.")
START_TIME: Final = _gauge("process_start_time_seconds", "When the process began, in seconds since 1970.")
OPEN_FDS: Final = _gauge("process_open_fds", "Open descriptors.")
MAX_FDS: Final = _gauge("process_max_fds", "Most descriptors that may be open.")

IMAGE_REVISION: Final = _gauge("headrace_image_revision", "Revision of etcd that a registry tells.")
BROKERS: Final = _gauge("headrace_brokers", "Brokers that a registry tells of.")
ETCD_SILENT_SECONDS: Final = _gauge("headrace_etcd_silent_seconds", "Time since etcd answered a registry.")

FAMILIES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Family))
"""All there are, in the order of this table."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number, with the values of its family's labels."""

    family: Family
    labels: tuple[str, ...]
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


class TopicTraffic:
    """What producers have brought to a topic here, and what consumers took."""

    __slots__ = ("batches_in", "bytes_in", "bytes_out", "records_in", "records_out")

    def __init__(self) -> None:
        self.batches_in = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        self.records_out = 0

    def sent(self, record_count: int, count_bytes: int) -> None:
        self.records_out += record_count
        self.bytes_out += count_bytes


class Metrics:
    def __init__(self) -> None:
        self.requests: dict[str, Histogram] = {}
        self.request_errors: dict[tuple[str, int], int] = {}
        self.bytes_in = 0
        self.bytes_out = 0
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


def exposition(samples: Iterable[Sample]) -> str:
    """Samples by family, in the order in which families come first."""
    lines: dict[Family, list[str]] = {}
    for sample in samples:
        lines.setdefault(sample.family, []).append(line(sample))
    return "".join(f"{each}\n" for family, mine in lines.items() for each in (*head_lines(family), *mine))


def head_lines(family: Family) -> tuple[str, str]:
    return f"# HELP {family.name} {family.meaning}", f"# TYPE {family.name} {family.kind}"


def line(sample: Sample) -> str:
    return sample_line(sample.family.name, zip(sample.family.labels, sample.labels, strict=True), sample.value)


def sample_line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    told = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
    number = str(int(value)) if value == int(value) else repr(float(value))
    return f"{name}{{{told}}} {number}" if told else f"{name} {number}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
