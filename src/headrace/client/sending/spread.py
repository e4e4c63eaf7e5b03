"""Where records without a key go: one partition until its batch is full or sent, then on to the next good one.

Partitions without a leader, and those led by brokers to be avoided, are passed over, as long as others are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection


def next_partition(current: int, count: int, leader: Callable[[int], int | None], avoided: Collection[int]) -> int:
    """The next partition after `current` of `count`; `leader` gives a partition's broker id."""
    led: int | None = None
    for step in range(1, count + 1):
        partition = (current + step) % count
        broker_id = leader(partition)
        if broker_id is None:
            continue
        if broker_id not in avoided:
            return partition
        led = partition if led is None else led
    return (current + 1) % count if led is None else led
