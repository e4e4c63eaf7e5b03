"""Truncations of a log of segments, so that a loss of power leaves what was before the cut or what is after it.

    <20-digit offset>.<number>.cut     the log was cut at that offset; no content
    <20-digit offset>.<number>.anew    everything was dropped, and the log began anew at that offset

Nothing waits for the disk, because every step until the first sync only changes names in the log's folder, and of those
a crash keeps the first ones. The marker comes first. Then the segments behind the cut are set aside, the last one
first, and a new segment begins at the cut. The segment that was cut keeps its old bytes, and the epochs file its old
entries: a start that finds the marker cuts both, and believes nothing from the offset on to have been synced.

When the names are synced the cut is durable; then the old bytes and entries go, and are synced in their turn. From then
on checkpoints bear the number of the cut. A marker with a number not above the checkpoint's says nothing any more.

Where a checkpoint does not bear the number of a new beginning, a start lets the log begin no later than there: what the
checkpoint says may be of before. So a start that was raised since is safe only in one that bears it (`would_lower`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace.ports.disk import Disk
from headrace.storage.segments.segment import Segment

log = logging.getLogger(__name__)

CUT: Final = ".cut"
ANEW: Final = ".anew"
DIGITS: Final = 20
NEVER: Final = 1 << 62


@dataclass(frozen=True, slots=True, order=True)
class Marker:
    number: int
    offset: int
    anew: bool

    @property
    def name(self) -> str:
        return f"{self.offset:0{DIGITS}d}.{self.number}{ANEW if self.anew else CUT}"


def markers(names: Iterable[str]) -> list[Marker]:
    """In the order in which they were made."""
    found: list[Marker] = []
    for name in names:
        digits, _, rest = name.partition(".")
        number, dot, ending = rest.partition(".")
        if dot + ending in (CUT, ANEW) and digits.isdigit() and number.isdigit():
            found.append(Marker(int(number), int(digits), dot + ending == ANEW))
    return sorted(found)


class Cuts:
    """Those of one log, counted: `number` were made, the names of `named` are synced, of `settled` nothing is left."""

    __slots__ = ("_asked", "_cleared", "_disk", "_folder", "_markers", "_tails", "least", "named", "number", "settled")

    def __init__(self, disk: Disk, folder: str, number: int) -> None:
        self._disk = disk
        self._folder = folder
        self._markers: list[Marker] = []
        self._tails: list[Segment] = []
        self._asked = (number, number)
        self.number = self.named = self._cleared = self.settled = number
        self.least = NEVER
        """Nothing from this offset on may be called safe by a checkpoint."""

    def begin(self, offset: int, *, anew: bool = False) -> None:
        """OSError if the folder takes no more names; nothing has changed then."""
        marker = Marker(self.number + 1, offset, anew)
        self._disk.open(f"{self._folder}/{marker.name}", create=True, writable=True).close()
        self.number += 1
        self._markers.append(marker)
        self.least = min(self.least, offset)

    def would_lower(self, start_offset: int) -> bool:
        """Whether the log began anew below, and no checkpoint bears it yet: a start would let it begin there."""
        markers = (marker for marker in self._markers if marker.anew and marker.number > self.settled)
        return any(marker.offset < start_offset for marker in markers)

    def has_tail(self, segment: Segment) -> None:
        """The segment's file holds more than the log does."""
        if segment not in self._tails:
            self._tails.append(segment)

    def take_tails(self) -> list[Segment]:
        """Their old bytes are about to go: the names are synced."""
        tails, self._tails = self._tails, []
        self.named = self._cleared = self.number
        return tails

    def asked(self) -> None:
        """A sync of the folder, and of all that was done before, is asked for."""
        self._asked = (self.number, self._cleared)

    def came_back(self) -> bool:
        """It has; whether old bytes can go now."""
        named, settled = self._asked
        self.named = max(self.named, named)
        self.settled = max(self.settled, settled)
        if self.settled == self.number:
            self.least = NEVER
        return self.named == self.number > self._cleared

    def remove_markers(self, upto: int) -> None:
        """A checkpoint bears this number. One that cannot be removed says nothing any more: a start removes it."""
        for marker in self._markers:
            path = f"{self._folder}/{marker.name}"
            try:
                if marker.number <= upto and self._disk.exists(path):
                    self._disk.remove(path)
            except OSError as error:
                log.warning("%s stays until the next start: %s", path, error)
        self._markers = [marker for marker in self._markers if marker.number > upto]


START: Final = ".start"


class StartMarkers:
    """Where a log begins inside a segment: `<20-digit offset>.start`, an empty file in its folder.

    The checkpoint holds the start of every log, and counts. But a start that cannot read one would let a log begin
    with its first segment, and what DeleteRecords has deleted of that would come back; where it is alone, or the last
    in sync, for good. So the folder says it too. The file is synced soon, and nothing waits for that: it is needed
    only when the checkpoint is lost. A log that begins anew has none.
    """

    def __init__(self, disk: Disk, folder: str, offsets: Iterable[int]) -> None:
        self._disk = disk
        self._folder = folder
        self._offsets = set(offsets)

    def note(self, offset: int) -> None:
        """The log begins there from now on."""
        try:
            self._disk.open(self._path(offset), create=True, writable=True).close()
            self._offsets.add(offset)
            self._remove(self._offsets - {offset})
        except OSError as error:
            log.warning("%s: only the checkpoint says where it begins: %s", self._folder, error)

    def forget(self) -> None:
        """It begins elsewhere, perhaps before. OSError: then it must not."""
        self._remove(set(self._offsets))

    def _remove(self, offsets: set[int]) -> None:
        for offset in offsets:
            if self._disk.exists(self._path(offset)):
                self._disk.remove(self._path(offset))
            self._offsets.discard(offset)

    def _path(self, offset: int) -> str:
        return f"{self._folder}/{offset:020d}{START}"
