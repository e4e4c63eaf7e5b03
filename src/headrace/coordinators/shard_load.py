"""A partition of an internal topic on its way into the shard that holds its state in memory.

For topics that nobody writes to in a transaction; see `state_partitions.Loading`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import ProducerEpoch


class LoadedShard(Protocol):
    loading: bool
    """Until all records were replayed."""
    gone: bool
    """This broker does not lead the partition in this epoch any more."""

    def replay(self, records: Iterable[Record]) -> None:
        """Take records in the order of the log. Taking the same ones again changes nothing. CorruptBatch for one that
        cannot be read."""
        ...

    def lost(self) -> None:
        """What was replayed up to here may not be the last of it."""
        ...


S = TypeVar("S", bound=LoadedShard)


class ShardLoad(Generic[S]):
    """Of no effect once the partition was resigned. `opened` hears of a shard that has everything."""

    def __init__(self, shard: S, opened: Callable[[S], None]) -> None:
        self._shard = shard
        self._opened = opened

    @property
    def wanted(self) -> bool:
        return self._shard.loading and not self._shard.gone

    def replay(self, records: Iterable[Record], producer: ProducerEpoch | None = None) -> None:
        if self.wanted:
            self._shard.replay(records)

    def replay_marker(self, producer: ProducerEpoch, *, committed: bool) -> None:
        """Nobody writes to this topic in a transaction."""

    def lost(self) -> None:
        if self.wanted:
            self._shard.lost()

    def ready(self) -> None:
        if self.wanted:
            self._opened(self._shard)
