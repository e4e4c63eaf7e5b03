"""The checkpoint of the shared layout: `@checkpoint`, sealed like the one of `storage.checkpoint`, version 2.

{"version": 2, "layout": "shared", "clean": bool, "epoch_frames": bool, "position": position of the commit log, "logs":
[[topic, partition,
topic id in hex, start offset, end offset, bytes, first offset of the active queue file or -1, its entries, their CRC,
CRC of the leader epochs, [[number of a commit file, wanted bytes in it], ...], [[compacted up to, wall ms], ...]],
...]}.

Everything below the position is synced, and the queues speak for all of it and nothing more. A start goes on from
there. `epoch_frames` says that from there on every epoch is told by a frame; it is missing in checkpoints of before.
`clean` is true only between a clean stop and the next start. An old one costs time, never data. Without one, or
with one that is damaged, the whole commit log is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from headrace.ports.disk import Disk, read_whole
from headrace.storage.checkpoint import FILE_NAME, seal, unseal
from headrace.storage.log import TopicPartition

VERSION: Final = 2
LAYOUT: Final = "shared"

Pairs = list[tuple[int, int]]


class LogPoint(NamedTuple):
    """What one log was like when the checkpoint was taken."""

    topic: str
    partition: int
    topic_id: str
    start_offset: int
    end_offset: int
    size_bytes: int
    queue_first: int
    queue_count: int
    queue_crc: int
    epochs_crc: int
    live: Pairs
    cleanings: Pairs


KINDS: Final = [str, int, str, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    clean: bool = False
    position: int = 0
    logs: dict[TopicPartition, LogPoint] = field(default_factory=dict)
    epoch_frames: bool = False


def encode(clean: bool, position: int, points: Iterable[LogPoint]) -> bytes:
    head = {"version": VERSION, "layout": LAYOUT, "clean": clean, "epoch_frames": True, "position": position}
    return seal(head | {"logs": list(points)})


def decode(data: bytes) -> Checkpoint | None:
    """None if it is not whole."""
    try:
        content = unseal(data)
        if (content["version"], content["layout"]) != (VERSION, LAYOUT):
            return None
        points = [_point(fields) for fields in content["logs"]]
        logs = {TopicPartition(point.topic, point.partition): point for point in points}
        epoch_frames = bool(content.get("epoch_frames"))
        return Checkpoint(bool(content["clean"]), int(content["position"]), logs, epoch_frames)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _point(fields: list[Any]) -> LogPoint:
    *plain, live, cleanings = fields
    if [type(each) for each in plain] != KINDS:
        raise TypeError("a field is missing, or of another kind")
    return LogPoint._make([*plain, _pairs(live), _pairs(cleanings)])


def _pairs(found: list[list[int]]) -> Pairs:
    return [(int(first), int(second)) for first, second in found]


def read(disk: Disk, folder: str) -> Checkpoint | None:
    """An empty one if there is none; None if it is damaged."""
    path = f"{folder}/{FILE_NAME}"
    return decode(read_whole(disk, path)) if disk.exists(path) else Checkpoint()
