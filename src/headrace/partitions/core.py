"""What a leader decides, without I/O: the in-sync set, each replica's position, the high watermark.

A position is the offset below which a replica holds everything in the way the topic's durability asks for: written to
the page cache, or flushed to disk. The high watermark is the least position over the in-sync set. It never falls within
an epoch, and it stands still while the set is smaller than the minimum. One node alone is a set of one.
"""

from __future__ import annotations

from collections.abc import Iterable


class LeaderCore:
    """State of the leader of one partition in one epoch. Methods answer whether the watermark rose."""

    __slots__ = ("broker", "epoch", "epoch_start", "high_watermark", "in_sync", "min_in_sync", "positions")

    def __init__(
        self,
        broker: int,
        epoch: int,
        epoch_start: int,
        high_watermark: int,
        in_sync: Iterable[int],
        min_in_sync: int = 1,
    ) -> None:
        self.broker = broker
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.high_watermark = high_watermark
        self.in_sync = frozenset(in_sync)
        self.min_in_sync = min_in_sync
        self.positions = dict.fromkeys(self.in_sync, high_watermark)
        assert broker in self.in_sync, "a leader is always in its own in-sync set"

    @property
    def enough_in_sync(self) -> bool:
        return len(self.in_sync) >= self.min_in_sync

    def moved(self, replica: int, position: int) -> bool:
        """A replica, or the leader itself, holds everything below the position."""
        positions = self.positions
        if position <= positions.get(replica, -1):
            return False
        positions[replica] = position
        return self._advance()

    def in_sync_changed(self, in_sync: Iterable[int]) -> bool:
        """The in-sync set was changed and confirmed."""
        self.in_sync = frozenset(in_sync)
        assert self.broker in self.in_sync, "a leader is always in its own in-sync set"
        for replica in self.in_sync:
            self.positions.setdefault(replica, -1)
        return self._advance()

    def min_in_sync_changed(self, min_in_sync: int) -> bool:
        self.min_in_sync = min_in_sync
        return self._advance()

    def _advance(self) -> bool:
        if len(self.in_sync) < self.min_in_sync:
            return False
        positions = self.positions
        if len(self.in_sync) == 1:
            least = positions[self.broker]
        else:
            least = min(positions[replica] for replica in self.in_sync)
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True
