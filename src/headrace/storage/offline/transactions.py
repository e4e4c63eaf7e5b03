"""Which transactions the batches of a partition tell of, offline: open, committed, aborted; and whether the index of
those that were aborted says the same.

A transaction whose marker is there counts as ended, whether or not a watermark had passed it: a folder does not say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.errors import HeadraceError
from headrace.ports.disk import Disk, File, read_whole
from headrace.records.batch import BatchHeader
from headrace.records.control import read_marker
from headrace.storage.aborted import ENTRY, TXN_INDEX, AbortedTransaction, IndexedFile
from headrace.storage.folder import stem
from headrace.storage.producers import SNAPSHOT, decode_snapshot

OPEN: Final = "open"
COMMITTED: Final = "committed"
ABORTED: Final = "aborted"
NONE: Final = "-"


class EndedTransaction(NamedTuple):
    first_offset: int
    marker_offset: int
    outcome: str


class TransactionSurvey:
    """Batches go by in the order of their offsets."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        """First offset of the open transaction of each producer that has one."""
        self.ended: dict[int, list[EndedTransaction]] = {}
        """By producer, in the order of their markers."""
        self._markers: dict[int, str] = {}

    def add(self, file: File, position: int, header: BatchHeader) -> None:
        if not header.is_transactional or header.producer_id < 0:
            return
        if not header.is_control:
            if header.record_count:
                self.opened.setdefault(header.producer_id, header.base_offset)
            return
        try:
            marker = read_marker(file.pread(header.size_bytes, position), header)
        except HeadraceError:  # who checks its bytes names it
            return
        if marker is None:
            return
        outcome = COMMITTED if marker.committed else ABORTED
        self._markers[header.base_offset] = f"{outcome} here"
        first = self.opened.pop(header.producer_id, None)
        if first is not None:
            ended = self.ended.setdefault(header.producer_id, [])
            ended.append(EndedTransaction(first, header.base_offset, outcome))

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for ended in self.ended.values() for each in ended)

    def of_batch(self, header: BatchHeader) -> str:
        """What became of the batch, once all have gone by."""
        if not header.is_transactional:
            return NONE
        if header.is_control:
            return self._markers.get(header.base_offset, NONE)
        ended = self.ended.get(header.producer_id, [])
        at = bisect_right(ended, header.base_offset, key=lambda each: each.marker_offset)
        if at < len(ended) and ended[at].first_offset <= header.base_offset:
            return ended[at].outcome
        first = self.opened.get(header.producer_id)
        return OPEN if first is not None and first <= header.base_offset else NONE

    def aborted_at(self, offset: int) -> bool:
        """Whether the marker of an abort stands there."""
        return self._markers.get(offset) == f"{ABORTED} here"


IndexFault = tuple[str, str]
"""A path, and what is wrong with it."""


def index_faults(
    disk: Disk, folder: str, survey: TransactionSurvey, start: int, end: int, *, compacted: bool
) -> list[IndexFault]:
    """How the index of aborted transactions differs from a log that is whole: as the newest snapshot of producers that
    can be read describes it, which a start takes. Compaction takes records and markers; a start sees to the rest."""
    offsets = sorted(int(name.removesuffix(SNAPSHOT)) for name in disk.list(folder) if name.endswith(SNAPSHOT))
    for offset in reversed([each for each in offsets if each <= end]):
        snapshot = decode_snapshot(read_whole(disk, stem(folder, offset) + SNAPSHOT))
        if snapshot is not None:
            break
    else:
        return []
    faults: list[IndexFault] = []
    known: dict[int, AbortedTransaction] = {}
    for each in snapshot.files:
        if each.last_marker < start:
            continue  # its file may have gone with what it tells of
        path = stem(folder, each.base_offset) + TXN_INDEX
        entries = _entries(disk, path, each)
        if entries is None:
            faults.append((path, "index of aborted transactions is damaged; the log itself is read instead"))
            continue
        for entry in entries:
            known[entry.marker_offset] = entry
            if entry.marker_offset >= start and not compacted and not survey.aborted_at(entry.marker_offset):
                faults.append((path, f"entry speaks of an abort at offset {entry.marker_offset}, and there is none"))
    if not faults:
        faults += _not_indexed(stem(folder, offset) + SNAPSHOT, survey, known, offset)
    return faults


def _entries(disk: Disk, path: str, described: IndexedFile) -> Iterator[AbortedTransaction] | None:
    """None if they are not as the snapshot describes them."""
    size = described.entry_count * ENTRY.size
    packed = read_whole(disk, path)[:size] if disk.exists(path) else b""
    if len(packed) != size or crc32c(packed) != described.crc:
        return None
    return (AbortedTransaction(*entry) for entry in ENTRY.iter_unpack(packed))


def _not_indexed(
    path: str, survey: TransactionSurvey, known: dict[int, AbortedTransaction], before: int
) -> Iterator[IndexFault]:
    """Readers would get records of these. One that began before the start of the log has an earlier first offset."""
    for producer_id, ended in survey.ended.items():
        for first, marker, outcome in ended:
            entry = known.get(marker)
            missing = entry is None or entry.producer_id != producer_id or entry.first_offset > first
            if outcome == ABORTED and marker < before and missing:
                yield path, f"the transaction of producer {producer_id} from offset {first} on was aborted: not indexed"
