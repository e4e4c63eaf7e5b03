"""One file for the whole store, `@checkpoint`: what is safe of each log, so that a start reads no more than it must.

Line 1: CRC-32C of line 2, in hex. Line 2: JSON, {"version": 3, "logs": [[topic, partition, topic id in hex, clean,
recovery point, start offset, end offset, active segment, its bytes, wall ms of its first append, [[compacted up to,
wall ms], ...], truncations], ...]}. Version 1 has no truncations.

It is replaced whole; a crash leaves the old or the new one. `clean` is true only between a clean stop and the next
start. An old one costs time, never data: more is read again. Without one every log is read. A start offset inside a
segment (DeleteRecords) is written here at once; without it the folder's own word counts (`start_markers`), which may be
missing. So a broker without one joins its in-sync sets anew (`shortfall`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from headrace.ports.disk import Disk, read_whole
from headrace.storage.log import TopicPartition

FILE_NAME: Final = "@checkpoint"
VERSION: Final = 3
VERSION_WITHOUT_CUTS: Final = 1


class LogPoint(NamedTuple):
    """What one log was like when the checkpoint was taken; `recovery_offset` and everything before it is safe."""

    topic: str
    partition: int
    topic_id: str
    clean: bool
    recovery_offset: int
    start_offset: int
    end_offset: int
    active_base: int
    active_bytes: int
    began_ms: int
    cleanings: list[tuple[int, int]]
    cuts: int
    """How many truncations it speaks of (see `segments.truncation`)."""


KINDS: Final = [str, int, str, bool, int, int, int, int, int, int]
Points = dict[TopicPartition, LogPoint]


def encode(points: Iterable[LogPoint]) -> bytes:
    return seal({"version": VERSION, "logs": list(points)})


def seal(content: dict[str, Any]) -> bytes:
    """The two lines of a checkpoint."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x\n%b\n" % (crc32c(body), body)


def unseal(data: bytes) -> Any:
    """The content of a checkpoint; ValueError if it is not whole."""
    crc, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    if crc != b"%08x" % crc32c(body):
        raise ValueError("wrong CRC")
    return json.loads(body)


def decode(data: bytes) -> Points | None:
    """None if it is not whole."""
    try:
        content = unseal(data)
        if content["version"] not in (VERSION, VERSION_WITHOUT_CUTS):
            return None
        more = [0] if content["version"] == VERSION_WITHOUT_CUTS else []
        points = [_point([*fields, *more]) for fields in content["logs"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return {TopicPartition(point.topic, point.partition): point for point in points}


def _point(fields: list[Any]) -> LogPoint:
    *plain, cleanings, cuts = fields
    if [type(field) for field in plain] != KINDS or type(cleanings) is not list or type(cuts) is not int:
        raise TypeError("a field is missing, or of another kind")
    return LogPoint._make([*plain, [(int(cleaned_to), int(at_ms)) for cleaned_to, at_ms in cleanings], cuts])


def read(disk: Disk, folder: str) -> Points | None:
    """An empty one if there is none; None if it is damaged."""
    path = f"{folder}/{FILE_NAME}"
    return decode(read_whole(disk, path)) if disk.exists(path) else {}
