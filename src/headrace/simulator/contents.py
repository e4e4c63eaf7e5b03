"""What simulated producers write, so that a record tells where it comes from."""

from __future__ import annotations

from typing import Final

from headrace.simulator.history import Batch

KEYS: Final = 5


def content_of(batch: Batch, nth: int, padding: int) -> bytes:
    return b"%d:%d:%d:" % (*batch, nth) + b"." * padding


def parse_content(content: bytes) -> tuple[Batch, int]:
    producer, number, nth, _ = content.split(b":", 3)
    return (int(producer), int(number)), int(nth)


def key_of(batch: Batch, nth: int) -> bytes:
    """The key of a record, where topics are compacted."""
    producer, number = batch
    return b"%d" % ((producer + number * number + nth) % KEYS)
