"""The deliveries of one share group from one partition, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.queues.messages import (
    AcknowledgementBatch,
    AcquiredRecords,
    ShareGroupConfig,
    ShareState,
)


class FoundBatch(NamedTuple):
    """A batch of the log; the last offset is included."""

    base_offset: int
    last_offset: int
    is_data: bool
    """False: nothing in it is ever delivered to this group."""


class SharePartition:
    def __init__(self, state: ShareState, config: ShareGroupConfig) -> None:
        """As it was kept, with its start set."""
        raise NotImplementedError

    def first_available(self) -> int:
        """Where to read next: the first record that can be acquired, or the end of all that was ever acquired."""
        raise NotImplementedError

    def acquire(
        self,
        member: str,
        from_offset: int,
        found: Sequence[FoundBatch],
        max_records: int,
        until_ms: int,
        *,
        record_limit: bool = False,
    ) -> list[AcquiredRecords]:
        """Of what was read from this offset on, have the member acquire what is available."""
        raise NotImplementedError

    def acknowledge(self, member: str, batches: Sequence[AcknowledgementBatch], until_ms: int) -> int:
        """All of it, or a code and nothing."""
        raise NotImplementedError

    def release_member(self, member: str) -> None:
        raise NotImplementedError

    def expire(self, now_ms: int) -> None:
        raise NotImplementedError

    def log_start(self, offset: int) -> None:
        raise NotImplementedError

    def take_write(self) -> ShareState | None:
        """What must be kept that was not taken before."""
        raise NotImplementedError
