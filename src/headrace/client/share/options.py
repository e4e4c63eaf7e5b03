"""What a share consumer may be told, with its defaults; the same for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict

from headrace.client import DEFAULT_BOOTSTRAP
from headrace.client.connection.exits import EXIT_TIMEOUT_MS
from headrace.client.connection.tls import Tls
from headrace.client.consumer.options import check_name
from headrace.client.share.offset_runs import Run
from headrace.errors import HeadraceError, SettingError

ACKNOWLEDGEMENTS: Final = ("implicit", "explicit")
ACQUIRE_MODES: Final = ("batch_optimized", "record_limit")
"""In the order of their numbers."""

Topics = str | Iterable[str] | None


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What became of acknowledgements of one partition."""

    topic: str
    partition: int
    ranges: tuple[Run, ...]
    """First and last offsets, the last included."""
    error: HeadraceError | None
    """None: they are kept."""


OnAcknowledged = Callable[[Acknowledged], object]


class ShareConsumerOptions(TypedDict, total=False):
    """See `ShareConsumerConfig` for their meaning."""

    bootstrap: str | Iterable[str]
    group: str
    acknowledgement: Literal["implicit", "explicit"]
    acquire_mode: Literal["batch_optimized", "record_limit"]
    max_poll_records: int
    client_id: str
    fetch_bytes: int
    max_wait_ms: int
    min_bytes: int
    check_crc: bool
    rack: str
    decoder: Callable[[bytes | None], Any] | None
    on_acknowledged: OnAcknowledged | None
    max_poll_interval_ms: int
    timeout_ms: int
    exit_timeout_ms: int
    tls: Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareConsumerConfig:
    bootstrap: str | Iterable[str] = DEFAULT_BOOTSTRAP
    """`host:port` of some brokers, with commas between or in a list; the others are heard of from them."""
    group: str = ""
    """The share group. Where it begins, how long records are locked, how often they are delivered and whether
    transactions are waited for are settings of the group: `share.auto.offset.reset` and those beside it."""
    acknowledgement: str = "implicit"
    """`implicit`: the next poll accepts what the last one gave, and so does `close`. `explicit`: each record is
    acknowledged by `acknowledge` before the next poll."""
    acquire_mode: str = "batch_optimized"
    """`batch_optimized`: a batch that is begun is acquired whole. `record_limit`: never more records than
    `max_poll_records`, however they lie in batches."""
    max_poll_records: int = 500
    """So many records are asked for, and given by a poll at most."""
    client_id: str = "headrace"
    """What brokers log and set quotas by; clients of one id and bootstrap share their connections."""
    fetch_bytes: int = 8 << 20
    """At most so much in an answer, but for a batch that alone is larger."""
    max_wait_ms: int = 500
    """How long a broker waits with its answer for records."""
    min_bytes: int = 1
    """How much it is to wait for; Headrace's brokers send what is there."""
    check_crc: bool = True
    """Whether batches are compared with their checksums."""
    rack: str = ""
    """Where this consumer is."""
    decoder: Callable[[bytes | None], Any] | None = None
    """Makes of the bytes of a value what `record.value` is to be. A record that it fails at is released."""
    on_acknowledged: OnAcknowledged | None = None
    """Called with an `Acknowledged` for each partition of which acknowledgements are kept or refused: within poll,
    commit or close, by the thread or task that calls that; on asyncio it may be a coroutine function. Without it what
    is refused is logged, unless `commit` tells it."""
    max_poll_interval_ms: int = 300_000
    """A member that does not poll for so long leaves the group, and joins again at its next poll."""
    timeout_ms: int = 30_000
    """How long commit and close may take, and an acknowledgement that is tried again; and how long a first broker is
    waited for: meanwhile `poll` gives nothing, then it raises NoBroker, and it is tried on."""
    exit_timeout_ms: int = EXIT_TIMEOUT_MS
    """How long a program that ends without `close` takes to leave the group."""
    tls: Tls = None
    """Speak TLS with the brokers: True trusts the system's authorities, the path of a PEM file those in it; or an
    ssl.SSLContext."""

    def __post_init__(self) -> None:
        if not self.group:
            raise SettingError(
                "a share consumer is a member of a share group: ShareConsumer('orders', group='packing')"
            )
        choices = ("acknowledgement", ACKNOWLEDGEMENTS), ("acquire_mode", ACQUIRE_MODES)
        for name, known in choices:
            if getattr(self, name) not in known:
                raise SettingError(f"{name} is {getattr(self, name)!r}; it may be {' or '.join(map(repr, known))}")
        for name in ("max_poll_records", "fetch_bytes", "timeout_ms", "max_poll_interval_ms"):
            if getattr(self, name) <= 0:
                raise SettingError(f"{name} is {getattr(self, name)}, and has to be above 0")
        for name in ("max_wait_ms", "min_bytes", "exit_timeout_ms"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name} is {getattr(self, name)}, and may not be below 0")

    @property
    def is_explicit(self) -> bool:
        return self.acknowledgement == "explicit"

    @property
    def acquire_number(self) -> int:
        """As ShareFetch has it."""
        return ACQUIRE_MODES.index(self.acquire_mode)


def config_of(options: ShareConsumerOptions) -> ShareConsumerConfig:
    given: dict[str, Any] = dict(options)
    if "bootstrap" in given and not isinstance(given["bootstrap"], str):
        given["bootstrap"] = tuple(given["bootstrap"])
    return ShareConsumerConfig(**given)


def names_of(topics: Topics) -> frozenset[str]:
    """Topics that are subscribed to; one that can never be there is told now."""
    names = [] if topics is None else [topics] if isinstance(topics, str) else list(topics)
    for name in names:
        check_name(name)
    return frozenset(names)
