"""Bringing file slices into the page cache, so that whoever needs their bytes does not stop the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.ports.disk import Disk, File, FileSlice, Range


def are_warm(disk: Disk, slices: Sequence[FileSlice], then: Callable[[], None]) -> bool:
    """True: all of them are in the page cache. Else the others are read ahead, and `then` runs on the loop."""
    cold: dict[File, list[Range]] = {}
    for piece in slices:
        # A probe that misses costs more than reading ahead what is there already: behind one miss, none is made.
        if cold or not piece.file.in_cache(piece.position, piece.count):
            cold.setdefault(piece.file, []).append((piece.position, piece.count))
    left = len(cold)

    def warmed() -> None:
        nonlocal left
        left -= 1
        if not left:
            then()

    for file, ranges in cold.items():
        disk.read_ahead(file, ranges, warmed)
    return not cold


def read_ahead(disk: Disk, slices: Sequence[FileSlice]) -> None:
    """Bring them into the page cache some time; nobody waits for it."""
    ranges: dict[File, list[Range]] = {}
    for piece in slices:
        ranges.setdefault(piece.file, []).append((piece.position, piece.count))
    for file, each in ranges.items():
        disk.read_ahead(file, each, _unheeded)


def _unheeded() -> None:
    pass
