"""Tails that a start cut and that may have been synced: `tail-cut`, an empty file in the folder of what was cut.

Who opens the store judges by `Log.tail` whether a log may hold less than it did, and keeps that (`shortfall`). But the
start that cuts may die before it has got so far, and the next one finds nothing to cut any more. So the file is there,
synced, before the first byte goes, and is removed when the judgement is kept and the checkpoint speaks of what is left.
A start that finds it knows neither what the tail was like nor on which boot of the kernel, and doubts it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from headrace.ports.disk import Disk
from headrace.storage.log import Tail

log = logging.getLogger(__name__)

MARKER: Final = "tail-cut"


def note(disk: Disk, folder: str, tail: Tail) -> None:
    """Such a tail is about to be cut. OSError: then it must not be."""
    if tail >= Tail.TORN:
        disk.open(f"{folder}/{MARKER}", create=True, writable=True).close()
        disk.sync_folder(folder)


def known(names: Iterable[str], tail: Tail) -> Tail:
    """What is known of a tail, of which this start found that, where its folder held these names before."""
    return max(tail, Tail.HOLED) if MARKER in names else tail


def forget(disk: Disk, folder: str) -> None:
    """It was judged, and that is kept."""
    try:
        if disk.exists(f"{folder}/{MARKER}"):
            disk.remove(f"{folder}/{MARKER}")
    except OSError as error:
        log.warning("%s: the next start doubts its end once more: %s", folder, error)
