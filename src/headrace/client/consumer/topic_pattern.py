"""Topics by a pattern: which there are whose whole name matches, looked up at the start and again and again.

Topics that brokers keep for themselves are left out, and the retry and dead-letter topics of the consumer's own group.
A topic counts as gone when two answers leave it out, a second apart: a broker that lags behind may not know of it yet.
Everything is called with the reactor's lock held.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from headrace.client.connection.connections import ConnectionPool
from headrace.client.connection.metadata import GONE_AFTER_S, metadata_request, read_metadata
from headrace.client.connection.reactor import Backoff, Timer
from headrace.errors import HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message

LOOK_TIMEOUT_S: Final = 10.0


class TopicPattern:
    """`on_topics` hears of all that match, the first time and whenever they have changed; `on_error` of every look that
    failed, which is repeated after a pause.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        pattern: re.Pattern[str],
        *,
        max_age_ms: int,
        left_out: frozenset[str],
        on_topics: Callable[[frozenset[str]], None],
        on_error: Callable[[HeadraceError], None],
    ) -> None:
        self.topics: frozenset[str] | None = None
        """None before the first answer."""
        self._pool = pool
        self._pattern = pattern
        self._max_age_s = max_age_ms / 1000
        self._left_out = left_out
        self._on_topics = on_topics
        self._on_error = on_error
        self._missing: frozenset[str] = frozenset()
        self._backoff = Backoff()
        self._timer: Timer | None = None
        self._closed = False

    def start(self) -> None:
        self._timer = None
        if not self._closed:
            self._pool.ask_any(apis.METADATA, metadata_request(None), self._seen, timeout_s=LOOK_TIMEOUT_S)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _seen(self, answer: Message | HeadraceError) -> None:
        if self._closed:
            return
        if isinstance(answer, HeadraceError):
            self._on_error(answer)
            self._later(self._backoff.take())
            return
        self._backoff.reset()
        snapshot = read_metadata(answer)
        matching = frozenset(
            name for name, topic in snapshot.topics.items() if not topic.is_internal and self._matches(name)
        )
        known = self.topics or frozenset()
        # A topic that is there, but of which the broker cannot say more now, is not missing.
        missing = known - matching - snapshot.refused.keys()
        gone, self._missing = missing & self._missing, missing - self._missing
        now = (known | matching) - gone
        self._later(min(GONE_AFTER_S, self._max_age_s) if self._missing else self._max_age_s)
        if now != self.topics:
            self.topics = now
            self._on_topics(now)

    def _matches(self, name: str) -> bool:
        return name not in self._left_out and self._pattern.fullmatch(name) is not None

    def _later(self, pause_s: float) -> None:
        reactor = self._pool.reactor
        self._timer = reactor.call_at(reactor.now() + pause_s, self.start)
