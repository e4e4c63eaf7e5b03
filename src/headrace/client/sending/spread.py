"""Where records without a key go: one partition until its batch is full or sent, then on to the next good one.

Partitions without a leader, and those led by brokers to be avoided, are passed over, as long as others are left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def next_partition(current: int, leaders: Sequence[int | None], avoided: Collection[int]) -> int:
    """The next partition after `current`; `leaders` are broker ids by partition."""
    count = len(leaders)
    order = [(current + step) % count for step in range(1, count + 1)]
    led = [partition for partition in order if leaders[partition] is not None]
    good = (partition for partition in led if leaders[partition] not in avoided)
    return next(good, led[0] if led else order[0])
