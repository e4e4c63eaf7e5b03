"""How the open files that the system allows are shared between clients and storage.

A flood of connections must not take the descriptors that a log needs for its next segment: storage has its share set
aside, as much as it can use, but not more than half.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Final

OTHERS: Final = 64
"""Listeners, the loop, the helper process, coordination, standard streams."""
A_SEGMENT: Final = 3
SEGMENTS_MAX: Final = 2000
PASSING_MAX: Final = 2000
"""Files that storage opens for a moment, most of them for a sync of many logs."""
HTTP_CONNECTIONS_MAX: Final = 1000
HTTP_SHARE: Final = 8


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Most of each that may be open."""

    kafka_connections: int
    http_connections: int
    segments: int
    sync_files: int
    """In one sync; the last log in it may go beyond."""


def shared_out(limit: int) -> Descriptors:
    free = max(limit - OTHERS, 16)
    storage = min(free // 2, SEGMENTS_MAX * A_SEGMENT + PASSING_MAX)
    passing = min(PASSING_MAX, storage // 2)
    http = min(HTTP_CONNECTIONS_MAX, max(1, (free - storage) // HTTP_SHARE))
    return Descriptors(
        kafka_connections=free - storage - http,
        http_connections=http,
        segments=max(1, (storage - passing) // A_SEGMENT),
        sync_files=max(1, passing // 2),
    )


def allowed() -> Descriptors:
    """By the limit of this process as it is now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return shared_out(1 << 20 if soft == resource.RLIM_INFINITY else soft)
