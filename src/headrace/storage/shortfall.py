"""Which logs hold less than they are known to have held, judged at a start.

Some things tell. The checkpoint of the run before (`@checkpoint`) says what was synced of each log: a log that ends
below that lost it, one that is empty where there was something lost its files, and so did one that cannot give what it
began with, because only deletions raise a start (see `Log.lost_front`). `@watermarks` says what was committed: a
replica that had it and ends below it lost it too. What was cut on purpose after the checkpoint looks the same for a
short while; to be taken for damaged costs such a replica a catching up, and never data. A checkpoint that is gone or
damaged tells nothing, neither how much there was nor where logs began, so that what was deleted may be back: then every
log counts as one that lacks something. And what the start had to cut above all that was known to be synced need not be
a write that was torn: a byte of it may have changed since it was synced.

Read `held` before the store is opened: opening writes the checkpoint anew.

`tail-cut`, an empty file in the folder of what was cut, tells of a tail that a start cut and that may have been synced.
Who opens the store judges by `Log.tail` whether a log may hold less than it did, and keeps that. But the start that
cuts may die before it has got so far, and the next one finds nothing to cut any more. So the file is there, synced,
before the first byte goes, and is removed when the judgement is kept and the checkpoint speaks of what is left. A start
that finds it knows neither what the tail was like nor on which boot of the kernel, and doubts it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from headrace.ports.disk import Disk
from headrace.storage import checkpoint, folder
from headrace.storage.commitlog import checkpoint as shared_checkpoint
from headrace.storage.log import Log, Tail
from headrace.storage.watermarks import Key


class Held(NamedTuple):
    """What a log had safe on disk."""

    start_offset: int
    end_offset: int


NOTHING: Final = Held(0, 0)


def held(disk: Disk, data: str) -> dict[Key, Held] | None:
    """What the run before has had synced of each log, as its checkpoint tells; None if there is none to tell it."""
    found: dict[Key, Held] = {}
    if not disk.exists(f"{data}/{checkpoint.FILE_NAME}"):
        return None
    if folder.layout_of(disk, data) == folder.SHARED:
        shared = shared_checkpoint.read(disk, data)
        if shared is None:
            return None
        for where, saved in shared.logs.items():
            found[bytes.fromhex(saved.topic_id), where.partition] = Held(saved.start_offset, saved.end_offset)
        return found
    points = checkpoint.read(disk, data)
    if points is None:
        return None
    for where, point in points.items():
        end_offset = point.end_offset if point.clean else point.recovery_offset
        found[bytes.fromhex(point.topic_id), where.partition] = Held(point.start_offset, end_offset)
    return found


def short(logs: Iterable[Log], held: Mapping[Key, Held] | None, watermarks: Mapping[Key, int]) -> frozenset[Key]:
    """The logs that lack something of what they held, or of which nobody can tell."""
    if held is None:
        return frozenset(map(key_of, logs))
    found = set()
    for log in logs:
        key = key_of(log)
        before = held.get(key, NOTHING)
        known_end = max(before.end_offset, watermarks.get(key, 0))
        if log.end_offset < known_end or lost_all(log, before) or log.lost_front():
            found.add(key)
    return frozenset(found)


def doubtful(logs: Iterable[Log], same_boot: bool) -> frozenset[Key]:
    """The logs whose end was cut at this start and may have been synced. As long as the kernel runs, what is in a file
    is what a process wrote, if not to its end; and what a loss of power leaves has seldom anything whole behind it.

    A log whose last bytes are gone, not wrong, looks like one whose writer was killed: only `short` can tell.
    """
    return frozenset(key_of(log) for log in logs if log.tail >= (Tail.TORN if same_boot else Tail.HOLED))


def lost_all(log: Log, before: Held) -> bool:
    """Whether its files are gone: it goes on where the checkpoint had it end, and there is nothing before that."""
    return log.start_offset == log.end_offset and before.start_offset < before.end_offset


def key_of(log: Log) -> Key:
    return log.topic_id, log.topic_partition.partition


log = logging.getLogger(__name__)

TAIL_CUT: Final = "tail-cut"


def note_cut(disk: Disk, folder: str, tail: Tail) -> None:
    """Such a tail is about to be cut. OSError: then it must not be."""
    if tail >= Tail.TORN:
        disk.open(f"{folder}/{TAIL_CUT}", create=True, writable=True).close()
        disk.sync_folder(folder)


def known_tail(names: Iterable[str], tail: Tail) -> Tail:
    """What is known of a tail, of which this start found that, where its folder held these names before."""
    return max(tail, Tail.HOLED) if TAIL_CUT in names else tail


def forget_cut(disk: Disk, folder: str) -> None:
    """It was judged, and that is kept."""
    try:
        if disk.exists(f"{folder}/{TAIL_CUT}"):
            disk.remove(f"{folder}/{TAIL_CUT}")
    except OSError as error:
        log.warning("%s: the next start doubts its end once more: %s", folder, error)
