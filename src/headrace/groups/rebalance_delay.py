"""How long a rebalance waits for members to join.

A first rebalance, of an empty group, always waits a little, because more members are likely on their way, and a
little more each time that one came (KIP-134), up to the rebalance timeout. Any other ends as soon as all have joined.
"""

from __future__ import annotations

from headrace.groups.member import NEVER


class Patience:
    def __init__(self) -> None:
        self.deadline = NEVER
        self.first_round = False
        self.grew = False
        """A member came since the present wait began."""
        self._delay_ms = 0
        self._left_ms = 0

    def begin(self, now_seconds: float, timeout_ms: int) -> None:
        self.first_round = False
        self.deadline = now_seconds + timeout_ms / 1000

    def begin_first_round(self, now_seconds: float, timeout_ms: int, delay_ms: int) -> None:
        self._delay_ms, self._left_ms = delay_ms, timeout_ms
        self.first_round = True
        self._wait_on(now_seconds)

    def renew(self, now_seconds: float) -> bool:
        """The deadline has come; true if the wait goes on."""
        if not (self.first_round and self.grew and self._left_ms > 0):
            return False
        self._wait_on(now_seconds)
        return True

    def end(self) -> None:
        self.first_round = False
        self.deadline = NEVER

    def _wait_on(self, now_seconds: float) -> None:
        delay_ms = min(self._delay_ms, self._left_ms)
        self._left_ms -= delay_ms
        self.grew = False
        self.deadline = now_seconds + delay_ms / 1000
