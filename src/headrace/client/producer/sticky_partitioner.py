"""The sticky partitioner: records without a key go to one partition until its batch is full or sent, then to the next.

Partitions without a leader, and those led by brokers to be avoided, are passed over, as long as others are left.
Records with a key go by its hash, which the router computes (`records.router`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from headrace.errors import SettingError

TABLE: Final = ((550, 30_000), (1_000, 60_000), (2_000, 120_000), (3_000, 180_000), (15_000, 600_000))
FAILED_MS: Final = 30_000


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


class FaultLatency:
    """How long a send took says how long its broker is avoided by records that may go anywhere.

    The table pairs a duration with a time to stay away. The longest duration that was reached counts; a send that
    failed counts as one of 30 s. Each send replaces what the one before said, so a broker that is fast again is used
    again. Times in seconds of one monotonic clock; durations in milliseconds.
    """

    def __init__(self, table: Sequence[tuple[int, int]] = TABLE) -> None:
        rows = [(int(took_ms), int(avoid_ms)) for took_ms, avoid_ms in table]
        if rows != sorted(rows) or any(took_ms < 0 or avoid_ms < 0 for took_ms, avoid_ms in rows):
            raise SettingError(
                f"latency_table={table!r}: pairs (took ms, avoid ms) are wanted, both rising, none negative"
            )
        self._rows = tuple(reversed(rows))
        self._until: dict[int, float] = {}

    def avoid_ms(self, took_ms: float) -> int:
        return next((avoid_ms for least_ms, avoid_ms in self._rows if took_ms >= least_ms), 0)

    def took(self, broker_id: int, took_ms: float, now: float) -> None:
        avoid_ms = self.avoid_ms(took_ms)
        if avoid_ms:
            self._until[broker_id] = now + avoid_ms / 1000
        else:
            self._until.pop(broker_id, None)

    def failed(self, broker_id: int, now: float) -> None:
        self.took(broker_id, FAILED_MS, now)

    def avoided(self, now: float) -> frozenset[int]:
        return frozenset(broker_id for broker_id, until in self._until.items() if until > now)
