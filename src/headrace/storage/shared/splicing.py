"""Other entries for some offsets in the middle of a queue.

The queue file that they lie in is written anew beside the old one and takes its name when it is whole, so a disk
without room leaves everything as it was. Of an active file the old one is kept, as `.queue.old`, until a checkpoint no
longer tells of it: a start takes whichever agrees. A closed file is right either way, because the frames that its
entries lead to were synced before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.storage.shared.queuefile import ENTRY, ENTRY_BYTES, U32_MAX, QueueFile, Run


class Replacement(NamedTuple):
    """These runs now speak for the offsets from first to next; they begin with the first."""

    first_offset: int
    next_offset: int
    runs: Sequence[Run]


class Patch(NamedTuple):
    """These runs take the place of entries first to last, the latter not included."""

    first: int
    last: int
    runs: Sequence[Run]


def patched(file: QueueFile, patches: Sequence[Patch]) -> bytes | None:
    """All entries of a file with some of them replaced, patches in order; None if that cannot be said in one file."""
    pieces: list[bytes | memoryview] = []
    at = since_ms = 0
    for patch in patches:
        if patch.first > at:
            kept = file.entries(at, patch.first)
            if _since_ms(kept, 0) < since_ms:
                return None
            pieces.append(kept)
            since_ms = _since_ms(kept, patch.first - at - 1)
        for run in patch.runs:
            relative = run.offset - file.first_offset
            since_ms = max(since_ms, run.greatest_ms - file.base_ms)
            if not 0 <= relative <= U32_MAX or since_ms > U32_MAX:
                return None
            pieces.append(ENTRY.pack(run.number, run.byte, run.size, relative, since_ms))
        at = patch.last
    if at < file.count:
        kept = file.entries(at, file.count)
        if _since_ms(kept, 0) < since_ms:
            return None
        pieces.append(kept)
    return b"".join(pieces)


def _since_ms(entries: bytes | memoryview, nth: int) -> int:
    end = (nth + 1) * ENTRY_BYTES
    return int.from_bytes(entries[end - 4 : end], "little")
