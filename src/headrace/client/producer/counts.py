"""What a producer counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Records by their fate; batches, bytes and requests that left; batches moved to another partition, and split."""

    delivered: int = 0
    failed: int = 0
    unknown: int = 0
    dropped: int = 0
    batches: int = 0
    bytes: int = 0
    requests: int = 0
    retries: int = 0
    moved: int = 0
    splits: int = 0
    direct: int = 0
    """Records whose sender wrote them and read their answer itself."""
