"""Putting one compacted segment in the place of some old ones, so that a crash leaves the old or the new.

The new files are written with the ending `.cleaned` and synced. Then each gets the ending `.swap`, the `.log` last:
from then on the new segment counts. Old segments of its range are removed, and the `.swap` files take their names, the
`.log` last again. Each step can be done twice, so a start finishes what a crash interrupted. `.cleaned` files are
thrown away.
"""

from __future__ import annotations

from typing import Final

from headrace.ports.disk import Disk
from headrace.storage.folder import stem
from headrace.storage.producers import SNAPSHOT
from headrace.storage.segments import segment
from headrace.storage.segments.segment import GAPS, INDEX, LOG, SUM, TIME_INDEX

CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
DIGITS: Final = 20


def prepare(disk: Disk, folder: str, base_offset: int) -> None:
    """The commit: after this, and a sync of the folder, the new segment counts."""
    start = stem(folder, base_offset)
    for ending in (INDEX, TIME_INDEX, SUM, LOG):
        disk.rename(start + ending + CLEANED, start + ending + SWAP)


def finish(disk: Disk, folder: str, base_offset: int) -> None:
    """Remove the old segments of the range and name the new files; whole again after any interruption."""
    start = stem(folder, base_offset)
    sum_path = start + SUM + SWAP if disk.exists(start + SUM + SWAP) else start + SUM
    found = segment.read_sum(disk, sum_path)
    assert found is not None, f"{sum_path} was synced before the swap began"
    for name in disk.list(folder):
        digits, dot, ending = name.partition(".")
        if not digits.isdigit() or not base_offset < int(digits) < found.next_offset:
            continue
        if dot + ending in {LOG, INDEX, TIME_INDEX, SUM, GAPS, SNAPSHOT}:
            disk.remove(f"{folder}/{name}")
    for ending in (INDEX, TIME_INDEX, SUM, LOG):
        if disk.exists(start + ending + SWAP):
            disk.rename(start + ending + SWAP, start + ending)
    if disk.exists(start + GAPS):
        disk.remove(start + GAPS)


def finish_all(disk: Disk, folder: str) -> None:
    """At start. A swap whose `.log` has not got its ending yet never began to count."""
    for name in disk.list(folder):
        if name.endswith(LOG + SWAP):
            finish(disk, folder, int(name[:DIGITS]))
    for name in disk.list(folder):
        if name.endswith(SWAP):
            disk.remove(f"{folder}/{name}")
    disk.sync_folder(folder)
