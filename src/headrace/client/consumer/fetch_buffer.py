"""Record sets that were fetched and wait to be handed out, in the order of arrival, within a bound of bytes.

A set counts with its bytes until it is taken, or, if it was taken to be held, until it is freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.client.consumer.cursor import Cursor


@dataclass(frozen=True, slots=True)
class CompletedFetch:
    """Whole batches of one partition as they came, from `first_offset` on; records before it do not count."""

    cursor: Cursor
    turn: int
    records: memoryview
    first_offset: int
    next_offset: int

    @property
    def counts(self) -> bool:
        return self.cursor.turn == self.turn


class FetchBuffer:
    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._sets: deque[CompletedFetch] = deque()

    @property
    def is_full(self) -> bool:
        return self.bytes >= self._most_bytes

    @property
    def ready(self) -> bool:
        """Whether there is a record set to take."""
        return any(not completed.cursor.paused for completed in self._sets)

    def add(self, completed: CompletedFetch) -> None:
        self._sets.append(completed)
        self.bytes += len(completed.records)

    def put_back(self, completed: CompletedFetch) -> None:
        """What was taken, or the rest of it, is the next of its partition again."""
        self._sets.appendleft(completed)
        self.bytes += len(completed.records)

    def take(self, *, hold: bool = False) -> CompletedFetch | None:
        """The oldest record set whose partition is not paused."""
        sets = self._sets
        for nth, completed in enumerate(sets):
            if not completed.cursor.paused:
                del sets[nth]
                if not hold:
                    self.bytes -= len(completed.records)
                return completed
        return None

    def drop_stale(self) -> None:
        """Those that no longer count."""
        self._drop(lambda completed: not completed.counts)

    def drop_of(self, cursor: Cursor) -> None:
        self._drop(lambda completed: completed.cursor is cursor)

    def drop_paused(self) -> None:
        """What waits of paused partitions is fetched again when they go on, so that it does not hold up the others."""
        for completed in reversed(self._sets):
            if completed.cursor.paused:
                completed.cursor.fetch_again(completed.first_offset)
        self._drop(lambda completed: completed.cursor.paused)

    def _drop(self, gone: Callable[[CompletedFetch], bool]) -> None:
        dropped = [completed for completed in self._sets if gone(completed)]
        if dropped:
            self._sets = deque(completed for completed in self._sets if not gone(completed))
            self.bytes -= sum(len(completed.records) for completed in dropped)
