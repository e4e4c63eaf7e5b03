"""Records of one partition by key: from the index to offsets, from offsets to batches, and each record looked at.

A hash can lie, and a record may be gone or another by now, so a record counts only if its own key and time are what
was asked for. The answer is batches as they are in the log, thinned out to the records found. One query brings a
bounded number of records and bytes; `searched` tells where the next one goes on.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import InvalidRecord, OffsetOutOfRange
from headrace.ports.disk import Disk
from headrace.records import kernel
from headrace.records.batch import BatchHeader, read_header
from headrace.records.key_hashes import key_hash
from headrace.records.record import Columns
from headrace.storage.keys.file import KeyFile
from headrace.storage.keys.index import PartitionKeys
from headrace.storage.keys.steps import Steps
from headrace.storage.page_cache import are_warm

MOST: Final = 1 << 62
"""Offsets and timestamps stay below it, as in `records.kernel`."""
CHAIN_STEPS: Final = 4096
OFFSETS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """Records with this key, a time from `from_ms` to before `to_ms`, an offset from `first_offset` to before
    `next_offset`. Of more than `max_records` (or `max_bytes`, but one at least), the last or the first."""

    key: bytes
    from_ms: int = -MOST
    to_ms: int = MOST
    first_offset: int = 0
    next_offset: int = MOST
    newest_first: bool = True
    max_records: int = 1000
    max_bytes: int = 1 << 20
    committed: bool = True
    """Leave out records of aborted transactions; where those that are open begin, the limit of the search says."""


@dataclass(slots=True)
class KeyQueryResult:
    """Batches in the order of the search. All that was asked for and lies before `searched` in that order is there;
    `done` if nothing else is left."""

    batches: list[bytearray] = field(default_factory=list)
    records: int = 0
    size_bytes: int = 0
    searched: int = 0
    done: bool = False
    candidates: int = 0
    """Offsets that the index gave; those that are not among the records were lies, or are gone."""


class Search:
    """One query over an index that has caught up with `limit_offset`, which is where consumers' sight ends."""

    def __init__(self, disk: Disk, keys: PartitionKeys, wanted: Wanted, limit_offset: int) -> None:
        self.found = KeyQueryResult()
        self._disk = disk
        self._keys = keys
        self._log = keys.log
        self._wanted = wanted
        self._batch: _Batch | None = None
        self._hash = key_hash(wanted.key)
        self._limit = limit_offset
        self._first = max(wanted.first_offset, keys.log.start_offset)
        self._next = min(wanted.next_offset, limit_offset)

    def steps(self) -> Steps:
        if self._wanted.newest_first:
            yield from self._newest_first()
        else:
            yield from self._oldest_first()

    def _newest_first(self) -> Steps:
        while True:
            cuts = self._keys.cuts
            for offsets in self._offsets():
                if offsets:
                    yield from self._look_at(offsets)
                    if self._full:
                        return
                yield None
                if self._keys.cuts != cuts:
                    break
            else:
                self.found.done = True
                self.found.searched = self._first
                return

    def _oldest_first(self) -> Steps:
        """The chain is only known from its new end, so all offsets are gathered before the first is looked at."""
        gathered: array[int] = array("q")
        while True:
            cuts, before = self._keys.cuts, self._next
            for offsets in self._offsets():
                gathered.extend(offsets)
                if len(gathered) > 2 * OFFSETS_MAX:
                    self._next = gathered[len(gathered) - OFFSETS_MAX - 1]
                    del gathered[: len(gathered) - OFFSETS_MAX]
                yield None
                if self._keys.cuts != cuts:
                    break
            else:
                break
            del gathered[:]
            self._next = before
        gathered.reverse()
        yield from self._look_at(gathered)
        if not self._full:
            self.found.done = self._next == min(self._wanted.next_offset, self._limit)
            self.found.searched = self._next

    def _offsets(self) -> Iterator[list[int]]:
        """Where the index says that the key is, newest first, a bounded number of steps at a time."""
        wanted = self._wanted
        for file in reversed(self._keys.files):
            if file.next_offset <= self._first:
                return
            if file.first_offset < self._next:
                yield from self._in_file(file, wanted)

    def _in_file(self, file: KeyFile, wanted: Wanted) -> Iterator[list[int]]:
        entry = file.table.newest(self._hash)
        while entry:
            entry, offsets = file.table.find(
                self._hash, entry, self._first, self._next, wanted.from_ms, wanted.to_ms, CHAIN_STEPS
            )
            yield offsets

    @property
    def _full(self) -> bool:
        found, wanted = self.found, self._wanted
        return found.records >= wanted.max_records or found.size_bytes >= wanted.max_bytes

    def _look_at(self, offsets: Iterable[int]) -> Steps:
        """Read the batches that hold the offsets, which rise or fall, and keep the records that are right."""
        found, wanted = self.found, self._wanted
        for offset in offsets:
            if self._batch is None or not self._batch.holds(offset):
                self._keep()
                if self._full:
                    return
                yield None
                yield from self._read(offset)
            found.candidates += 1
            found.searched = offset if wanted.newest_first else offset + 1
            if wanted.newest_first:
                self._next = offset
            if self._batch is not None and self._first <= offset < self._limit and self._batch.take(offset, wanted):
                found.records += 1
                if found.records >= wanted.max_records:
                    break
        self._keep()

    def _read(self, offset: int) -> Steps:
        """The batch at the offset, once it was checked and is in the page cache; none if the log has it no more."""
        log, warm = self._log, False
        while True:
            try:
                found = log.read(offset, 1, log.written_offset, warm=warm)
            except OffsetOutOfRange:
                return
            waiting = found.slices or found.wanted
            came: list[bool] = []
            if not are_warm(self._disk, waiting, lambda came=came: came.append(True)):  # type: ignore[misc]
                yield lambda came=came: bool(came)  # type: ignore[misc]
            elif found.slices or not waiting:
                break
            else:
                yield None
            warm = True
        data = b"".join([piece.read() for piece in found.slices])
        if data:
            header = read_header(data)
            shown = not (self._wanted.committed and self._is_aborted(header))
            self._batch = _Batch(header, memoryview(data)[: header.size_bytes], shown=shown)

    def _is_aborted(self, header: BatchHeader) -> bool:
        """Whether the batch lies within an aborted transaction of its producer."""
        if not header.is_transactional:
            return False
        aborted = self._log.aborted(header.base_offset, header.next_offset)
        return any(producer == header.producer_id for producer, _ in aborted)

    def _keep(self) -> None:
        """Take what was chosen of the batch at hand into the answer."""
        batch, self._batch = self._batch, None
        if batch is not None and (thinned := batch.thinned()) is not None:
            self.found.batches.append(thinned)
            self.found.size_bytes += len(thinned)


class _Batch:
    """A batch of the log, and which of its records are wanted."""

    def __init__(self, header: BatchHeader, view: memoryview, *, shown: bool) -> None:
        self.header = header
        self._chosen: list[int] = []
        self._columns: Columns | None = None
        if shown and not header.is_control and header.record_count > 0:
            with contextlib.suppress(InvalidRecord):  # nobody can read such records, so nobody misses them
                self._columns = kernel.columns(view)

    def holds(self, offset: int) -> bool:
        return self.header.base_offset <= offset <= self.header.last_offset

    def take(self, offset: int, wanted: Wanted) -> bool:
        """Choose the record at the offset if it is there and right."""
        columns = self._columns
        if columns is None:
            return False
        nth = bisect_left(columns.offsets, offset)
        if nth == len(columns.offsets) or columns.offsets[nth] != offset:
            return False
        start, length = columns.key_starts[nth], columns.key_lengths[nth]
        if length != len(wanted.key) or columns.payload[start : start + length] != wanted.key:
            return False
        if not wanted.from_ms <= columns.timestamps_ms[nth] < wanted.to_ms:
            return False
        self._chosen.append(nth)
        return True

    def thinned(self) -> bytearray | None:
        """The batch with the chosen records alone, None if there are none."""
        if self._columns is None or not self._chosen:
            return None
        return kernel.thin(self.header, self._columns, sorted(self._chosen))
