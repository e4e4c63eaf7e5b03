"""Bringing file slices into the page cache, so that whoever needs their bytes does not stop the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.ports.disk import Disk, FileSlice


def are_warm(disk: Disk, slices: Sequence[FileSlice], then: Callable[[], None]) -> bool:
    """True: all of them are in the page cache. Else the others are read ahead, and `then` runs on the loop."""
    cold = [piece for piece in slices if not piece.file.in_cache(piece.position, piece.count)]
    left = len(cold)

    def warmed() -> None:
        nonlocal left
        left -= 1
        if not left:
            then()

    for piece in cold:
        disk.read_ahead(piece.file, piece.position, piece.count, warmed)
    return not cold
