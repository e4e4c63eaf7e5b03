"""How long records that were given back wait before they are delivered again: the setting `share.retry.backoff.ms` of a
share group."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

ROCKETMQ: Final = "rocketmq"
_SECONDS: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""RocketMQ's waits before each of its 16 retries."""


@lru_cache(maxsize=1000)
def backoff_table(text: str) -> tuple[int, ...]:
    """In ms, by how often a record was delivered; empty: it does not wait."""
    if text == ROCKETMQ:
        return tuple([seconds * 1000 for seconds in _SECONDS])
    return tuple([int(each) for each in text.split(",") if each.strip()])
