"""What a consumer may be told, with its defaults; the same for threads and for asyncio."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.connection.exits import EXIT_TIMEOUT_MS
from headrace.client.connection.tls import Tls
from headrace.client.consumer.fetcher import Reset
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.rebalance_notices import RebalanceCallback
from headrace.client.fetch_requests import EARLIEST, LATEST, FetchLimits
from headrace.errors import InvalidTopicName, SettingError
from headrace.records.isolation import isolation_of
from headrace.settings.topic_name import check_topic_name

STARTS: Final[dict[str, int | None]] = {"earliest": EARLIEST, "latest": LATEST, "none": None}
MODES: Final = ("cluster", "broadcast")


Topics = str | re.Pattern[str] | Iterable[str] | None
"""What is read: one topic, several, or all whose whole name matches: `re.compile(r"orders\\..*")`."""


class ConsumerOptions(TypedDict, total=False):
    """See `ConsumerConfig` for their meaning."""

    bootstrap: str | Iterable[str]
    partitions: Iterable[TopicPartition]
    group: str | None
    mode: Literal["cluster", "broadcast"]
    assignor: Literal["average", "room-first", "consistent-hash", "range", "cooperative"]
    start: Literal["earliest", "latest", "none"]
    client_id: str
    commit_interval_ms: int
    progress_dir: str | Path | None
    fetch_bytes: int
    partition_fetch_bytes: int
    buffer_bytes: int
    max_wait_ms: int
    min_bytes: int
    check_crc: bool
    isolation: Literal["committed", "uncommitted"]
    rack: str
    priority_header: str | None
    decoder: Callable[[bytes | None], Any] | None
    on_reset: Callable[[Reset], None] | None
    on_assigned: RebalanceCallback | None
    on_revoked: RebalanceCallback | None
    on_lost: RebalanceCallback | None
    session_timeout_ms: int
    rebalance_timeout_ms: int
    instance_id: str | None
    metadata_max_age_ms: int
    timeout_ms: int
    exit_timeout_ms: int
    tls: Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    topics: tuple[str, ...] | re.Pattern[str]
    bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP
    """`host:port` of some brokers, with commas between or in a list; the others are heard of from them."""
    partitions: tuple[TopicPartition, ...] = ()
    """Read just these, without a group, instead of whole topics."""
    group: str | None = None
    """Progress is kept under this name; without it, none is."""
    mode: str = "cluster"
    """`cluster`: members of a group share the partitions. `broadcast`: each reads all, progress in a local file."""
    assignor: str = "average"
    """How a group shares the partitions out; `room-first` by racks, `cooperative` moves no partition without need."""
    start: str = "earliest"
    """Where a partition without progress is begun, and where one goes on whose offset is gone; `none` refuses to."""
    client_id: str = "headrace"
    """What brokers log and set quotas by; clients of one id and bootstrap share their connections."""
    commit_interval_ms: int = 5000
    """How often progress is saved by itself; 0 leaves it to `commit`."""
    progress_dir: str | Path | None = None
    """Where broadcast mode keeps its files; else in the user's folder of state."""
    fetch_bytes: int = 8 << 20
    """At most so much in an answer, but for a batch that alone is larger."""
    partition_fetch_bytes: int = 1 << 20
    """Of each partition in an answer."""
    buffer_bytes: int = 16 << 20
    """While less than a quarter of this waits to be handed out, more is fetched: what waits longer has left the
    processor's caches. Where priorities are heeded, all of it is filled."""
    max_wait_ms: int = 500
    """How long a broker waits with its answer for `min_bytes`."""
    min_bytes: int = 1
    """Less than this is not answered before `max_wait_ms` are over."""
    check_crc: bool = True
    """Whether batches are compared with their checksums."""
    isolation: str = "committed"
    """`committed`: no record of a transaction before it is committed, and none of one that was aborted; a partition is
    read up to the first that is undecided. `uncommitted`: all records, as soon as all replicas in sync have them."""
    rack: str = ""
    """Where this consumer is: a replica in the same room is read instead of the leader."""
    priority_header: str | None = None
    """The header that has a record's priority, a number: of what was fetched, the highest is handed out first."""
    decoder: Callable[[bytes | None], Any] | None = None
    """Makes of the bytes of a value what `record.value` is to be."""
    on_reset: Callable[[Reset], None] | None = None
    """Told when the reading of a partition goes on elsewhere than it was; it is logged in any case."""
    on_assigned: RebalanceCallback | None = None
    """Called with a list of (topic, partition) that this consumer reads from now on, before any record of them is
    handed out; it may `seek`. As the next two it is called by the thread or task that polls, or listens, within that
    call, and on asyncio it may be a coroutine function. What it raises the call raises, after the rebalance has gone
    on; a listener logs it."""
    on_revoked: RebalanceCallback | None = None
    """Called with those that go to other members, while they are still held: what it commits is kept. On `close` it is
    called with all, by who closes; not when a program ends without `close`."""
    on_lost: RebalanceCallback | None = None
    """Called with those that were taken without asking: the group went on without this member, or, without a group,
    their topic was deleted. Others may be reading them, and nothing of them can be saved."""
    session_timeout_ms: int = 45_000
    """A member that the group's coordinator does not hear of for so long loses its partitions."""
    rebalance_timeout_ms: int = 300_000
    """A member that does not call `poll` for so long leaves the group."""
    instance_id: str | None = None
    """A name by which a member that comes back within its session keeps its partitions (static membership)."""
    metadata_max_age_ms: int = 30_000
    """How often the topics are looked at: within this a pattern finds new ones, and a group new partitions."""
    timeout_ms: int = 30_000
    """How long calls that ask a broker may take (commit, lag, position, close), and how long a first broker is waited
    for: meanwhile `poll` gives nothing, then it raises NoBroker, and it is tried on."""
    exit_timeout_ms: int = EXIT_TIMEOUT_MS
    """How long a program that ends without `close` takes to save progress and leave the group."""
    tls: Tls = None
    """Speak TLS with the brokers: True trusts the system's authorities, the path of a PEM file those in it; or an
    ssl.SSLContext."""

    def __post_init__(self) -> None:
        if not self.topics and not self.partitions:
            raise SettingError("a consumer needs a topic: Consumer('orders')")
        for name in (*self.names, *(topic for topic, _ in self.partitions)):
            check_name(name)
        if self.partitions and (self.topics or self.group):
            raise SettingError("partitions are read without a group and in place of topics: give either")
        if self.start not in STARTS:
            raise SettingError(f"start is {self.start!r}; it may be {', '.join(map(repr, STARTS))}")
        if self.mode not in MODES:
            raise SettingError(f"mode is {self.mode!r}; it may be {', '.join(map(repr, MODES))}")
        isolation_of(self.isolation)
        if self.mode == "broadcast" and not self.group:
            raise SettingError("broadcast mode keeps progress under the name of a group: give one")
        above_zero = ("fetch_bytes", "partition_fetch_bytes", "buffer_bytes", "timeout_ms", "session_timeout_ms")
        for name in (*above_zero, "metadata_max_age_ms"):
            if getattr(self, name) <= 0:
                raise SettingError(f"{name} is {getattr(self, name)}, and has to be above 0")
        for name in ("max_wait_ms", "min_bytes", "commit_interval_ms", "exit_timeout_ms"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name} is {getattr(self, name)}, and may not be below 0")

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """What the names of the topics match, if they are not given."""
        return self.topics if isinstance(self.topics, re.Pattern) else None

    @property
    def names(self) -> tuple[str, ...]:
        """The topics that are given by name."""
        return () if isinstance(self.topics, re.Pattern) else self.topics

    @property
    def limits(self) -> FetchLimits:
        """What every Fetch is told."""
        return FetchLimits(
            self.max_wait_ms,
            self.min_bytes,
            self.fetch_bytes,
            self.partition_fetch_bytes,
            isolation_of(self.isolation),
        )

    @property
    def start_moment(self) -> int | None:
        return STARTS[self.start]


def check_name(name: str) -> None:
    """A topic that can never be there is told now: otherwise it would be waited for."""
    if not isinstance(name, str):
        raise TypeError(f"a topic's name is a str, not {type(name).__name__}: {name!r}")
    try:
        check_topic_name(name)
    except InvalidTopicName as error:
        hint = f"; for all topics that match a pattern give re.compile({name!r})" if name else ""
        raise InvalidTopicName(f"{error}{hint}") from None


def config_of(topics: Topics, options: ConsumerOptions) -> ConsumerConfig:
    """Options of a consumer of one topic, of several, of all that match, or of the partitions that the options name."""
    given: dict[str, Any] = dict(options)
    if topics is None or isinstance(topics, str):
        topics = () if topics is None else (topics,)
    elif not isinstance(topics, re.Pattern):
        topics = tuple(dict.fromkeys(topics))
        if any(isinstance(name, re.Pattern) for name in topics):
            raise SettingError("a pattern is given alone, in place of topics; join several by |: re.compile('a.*|b.*')")
    places = tuple(dict.fromkeys((topic, int(partition)) for topic, partition in given.pop("partitions", ())))
    if "bootstrap" in given and not isinstance(given["bootstrap"], str):
        given["bootstrap"] = tuple(given["bootstrap"])
    return ConsumerConfig(topics=topics, partitions=places, **given)
