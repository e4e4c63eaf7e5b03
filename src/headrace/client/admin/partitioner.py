"""Which partition a record goes to: the one named, else by hash of the key, else spread.

The hash is in records.partitioner, so that a key lands in the same partition whichever way it came. Records without a
key stay on one partition until it has had its batch, then move to the next: full batches, evenly spread.
"""

from __future__ import annotations

import random

from headrace.records.partitioner import murmur2, partition_for_key

__all__ = ["Partitioner", "murmur2", "partition_for_key"]


class Partitioner:
    """Chooses partitions of one topic."""

    def __init__(self, partition_count: int, first: int | None = None) -> None:
        self._count = partition_count
        self._sticky = (random.randrange(partition_count) if first is None else first) % partition_count

    def choose(self, key: bytes | None) -> int:
        return self._sticky if key is None else partition_for_key(key, self._count)

    def batch_full(self, partition: int) -> None:
        """The partition has had its batch: records without a key go to the next one from now on."""
        if partition == self._sticky:
            self._sticky = (partition + 1) % self._count
