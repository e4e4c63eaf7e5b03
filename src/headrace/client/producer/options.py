"""What a producer can be told, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.client.producer.sticky_partitioner import FaultLatency
from headrace.errors import SettingError
from headrace.records.codecs import Codec

ACKS: Final = (-1, 0, 1)
BATCH_BYTES: Final = 64 << 10
QUEUE_BYTES: Final = 64 << 20
QUEUE_RECORDS: Final = 2_000_000
RECORD_BYTES: Final = 1 << 20
REQUEST_BYTES: Final = 1 << 20
"""A request takes further batches up to here; a single one may be larger."""
TRANSACTION_TIMEOUT_MS: Final = 60_000

_CODECS: Final = {codec.name.lower(): codec for codec in Codec}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """The defaults are those of `Producer`, which names all of them."""

    acks: int
    idempotent: bool
    codec: str
    batch_bytes: int
    interval_ms: float
    queue_bytes: int
    queue_records: int
    when_full: float
    max_record_bytes: int
    encoder: Callable[[Any], bytes | str | None] | None
    delivery_timeout_ms: float
    request_timeout_ms: float
    in_flight: int
    avoid_slow: bool
    latency_table: Sequence[tuple[int, int]]
    exit_timeout_ms: float
    transactional_id: str | None
    transaction_timeout_ms: int

    def __post_init__(self) -> None:
        check_acks(self.acks)
        _need(self.codec in _CODECS, "codec", self.codec, "one of " + ", ".join(_CODECS))
        _need(self.in_flight >= 1, "in_flight", self.in_flight, "1 or more")
        for name in ("batch_bytes", "queue_bytes", "queue_records", "max_record_bytes"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("delivery_timeout_ms", "request_timeout_ms"):
            _need(getattr(self, name) > 0, name, getattr(self, name), "more than 0 ms")
        FaultLatency(self.latency_table)
        self._check_transactional()
        for name in ("interval_ms", "exit_timeout_ms"):
            _need(getattr(self, name) >= 0, name, getattr(self, name), "0 ms or more")

    def _check_transactional(self) -> None:
        given, timeout_ms = self.transactional_id, self.transaction_timeout_ms
        _need(timeout_ms >= 1, "transaction_timeout_ms", timeout_ms, "1 ms or more")
        if given is None:
            return
        if not isinstance(given, str) or not given:
            raise SettingError(f"transactional_id={given!r} cannot be: give a name, the same in every run of this task")
        if self.acks != -1 or not self.idempotent:
            raise SettingError("a transactional producer is idempotent and waits for all replicas in sync: acks=-1")

    @property
    def codec_id(self) -> int:
        return int(_CODECS[self.codec])

    def is_idempotent(self, acks: int) -> bool:
        """Whether batches sent with these acks carry sequence numbers: the broker must answer for all its replicas."""
        return self.idempotent and acks == -1


def check_acks(acks: int) -> None:
    _need(acks in ACKS, "acks", acks, "-1 (all replicas in sync), 1 (the leader) or 0 (nobody)")


def _need(holds: bool, name: str, given: object, wanted: str) -> None:
    if not holds:
        raise SettingError(f"{name}={given!r} cannot be: give {wanted}")
