"""Record sets that were fetched and wait to be handed out, in the order of arrival, within a bound of bytes.

A set counts with its bytes until it is taken, or, if it was taken to be held, until it is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.client.consumer.cursor import Feed, RawSet


class Buffer:
    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._sets: deque[RawSet] = deque()

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._most_bytes

    @property
    def ready(self) -> bool:
        """Whether there is a record set to take."""
        return any(not raw.feed.paused for raw in self._sets)

    def add(self, raw: RawSet) -> None:
        self._sets.append(raw)
        self.bytes += len(raw.records)

    def put_back(self, raw: RawSet) -> None:
        """What was taken, or the rest of it, is the next of its partition again."""
        self._sets.appendleft(raw)
        self.bytes += len(raw.records)

    def take(self, *, hold: bool = False) -> RawSet | None:
        """The oldest record set whose partition is not paused."""
        sets = self._sets
        for nth, raw in enumerate(sets):
            if not raw.feed.paused:
                del sets[nth]
                if not hold:
                    self.bytes -= len(raw.records)
                return raw
        return None

    def drop_stale(self) -> None:
        """Those that no longer count."""
        self._drop(lambda raw: not raw.counts)

    def drop_of(self, feed: Feed) -> None:
        self._drop(lambda raw: raw.feed is feed)

    def drop_paused(self) -> None:
        """What waits of paused partitions is fetched again when they go on, so that it does not hold up the others."""
        for raw in reversed(self._sets):
            if raw.feed.paused:
                raw.feed.fetch_again(raw.first_offset)
        self._drop(lambda raw: raw.feed.paused)

    def _drop(self, gone: Callable[[RawSet], bool]) -> None:
        dropped = [raw for raw in self._sets if gone(raw)]
        if dropped:
            self._sets = deque(raw for raw in self._sets if not gone(raw))
            self.bytes -= sum(len(raw.records) for raw in dropped)
