"""What compaction keeps of a batch, in any layout: of each key's records the latest, with its offset.

A record without a value (a tombstone) goes once `delete.retention.ms` have passed since the first cleaning that saw it;
a log remembers its cleanings as (cleaned up to, wall ms).

Only what is decided is cleaned: everything below the first transaction that is not. The records of aborted transactions
go, and outdate nothing. A marker stays as long as a record of its transaction is there; then, like a tombstone, until
the time has passed, and the last one of a producer as long as the producer is known. With the marker of an aborted
transaction its entry in the index goes (see `aborted`). Other control batches stay.

A producer's last batches stay, empty if need be, as many as its state tells of: it may not have heard that they were
written, and ask for each of them again. Of these at least one is committed, because what is not may be cut; where none
is, nobody knows which was the last before them, and all of the producer's batches stay until the next cleaning. So does
the last batch of what is cleaned: what follows it may be cut, and the end of a log has to be readable.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from typing import Final, Protocol

from headrace.errors import HeadraceError
from headrace.records import kernel
from headrace.records.batch import BatchHeader, joined, read_header
from headrace.records.control import read_marker
from headrace.records.delayed import DELIVERED
from headrace.storage.aborted import AbortedTransactions
from headrace.storage.log import Log, look_at
from headrace.storage.producers import ProducerTable, UnreadableProducers

log = logging.getLogger(__name__)

KEYS_MAX: Final = 500_000
SHORT_KEY_BYTES: Final = 24
CLEANINGS_MAX: Final = 32

Batch = bytes | bytearray | memoryview


class CleanedLog(Log, Protocol):
    """A log that can be compacted."""

    cleanings: list[tuple[int, int]]

    @property
    def producers(self) -> ProducerTable: ...


def remember(cleaned: CleanedLog, cleaned_to: int, now_ms: int) -> None:
    """Add a cleaning; when there are many, the oldest two count as one, with the later time."""
    kept = [cleaning for cleaning in cleaned.cleanings if cleaning[0] < cleaned_to]
    if len(kept) >= CLEANINGS_MAX:
        del kept[0]
    cleaned.cleanings = [*kept, (cleaned_to, now_ms)]


class DecidedTransactions:
    """Of which batches were aborted, and of which transactions a cleaning has met records. One for a whole cleaning,
    which begins with the log."""

    def __init__(self, aborted: AbortedTransactions) -> None:
        self._aborted = aborted
        self._by_producer: dict[int, tuple[list[int], list[int]]] = {}
        for entry in aborted:
            firsts, markers = self._by_producer.setdefault(entry.producer_id, ([], []))
            firsts.append(entry.first_offset)
            markers.append(entry.marker_offset)
        self._met: set[int] = set()
        """Producers with records since their last marker."""

    def is_aborted(self, header: BatchHeader) -> bool:
        """Of a batch of records that is decided."""
        if not header.is_transactional or header.producer_id not in self._by_producer:
            return False
        firsts, markers = self._by_producer[header.producer_id]
        at = bisect_right(markers, header.base_offset)
        return at < len(markers) and firsts[at] <= header.base_offset

    def meets(self, header: BatchHeader) -> None:
        if header.is_transactional and header.record_count:
            self._met.add(header.producer_id)

    def ends(self, header: BatchHeader) -> bool:
        """A marker: whether the log held records of its transaction."""
        had_records = header.producer_id in self._met
        self._met.discard(header.producer_id)
        return had_records

    def forget(self, marker_offset: int) -> None:
        """The marker goes."""
        self._aborted.remove(marker_offset)


class LatestOffsets:
    """Key -> offset of its latest record in the dirty part, for about KEYS_MAX keys."""

    def __init__(self, transactions: DecidedTransactions | None = None) -> None:
        self.transactions = transactions or DecidedTransactions(AbortedTransactions(lambda offset, _: offset))
        self.offsets: dict[bytes, int] = {}
        self.reached = 0
        """Batches below it were read."""
        self.complete_to = 0
        """Every key of the dirty part below it is in the map."""

    @property
    def is_full(self) -> bool:
        return len(self.offsets) > KEYS_MAX

    def add(self, batch: Batch, header: BatchHeader) -> None:
        if not header.is_control and header.record_count and not self.transactions.is_aborted(header):
            for offset, key, _ in kernel.keys(batch):
                if key is not None:
                    self.offsets[_short(key)] = offset
        self.reached = header.next_offset


def give_up(cleaned: CleanedLog, latest: LatestOffsets, error: HeadraceError) -> None:
    """A batch is damaged, or makes no sense: a log that is not whole is not believed. Look at that place again."""
    log.error("%s is not compacted: %s", cleaned.topic_partition, error)
    reached = error.offset if isinstance(error, UnreadableProducers) else latest.reached
    look_at(cleaned, max(cleaned.start_offset, reached))


class CompactionFilter:
    """What one cleaning keeps."""

    def __init__(self, cleaned: CleanedLog, latest: LatestOffsets, now_ms: int) -> None:
        self._latest = latest.offsets
        self._progress = latest
        old_ms = now_ms - cleaned.settings.delete_retention_ms
        self._horizon = max((offset for offset, at_ms in cleaned.cleanings if at_ms <= old_ms), default=0)
        """Tombstones below it were there long enough for every reader to see."""
        self._transactions = latest.transactions
        states = cleaned.producers.states
        self._last_markers = {state.marker_offset for state in states.values()}
        self._last_batches = {each.base_offset for state in states.values() for each in state.batches}
        self._ahead = {
            producer_id
            for producer_id, state in states.items()
            if state.batches and state.batches[0].base_offset >= cleaned.committed_offset
        }
        """Producers of whose last batches none is committed."""

    def begins(self, offset: int) -> None:
        """What comes next is read from this offset on."""
        self._progress.reached = offset

    def thin(self, batch: Batch, header: BatchHeader) -> tuple[Batch, BatchHeader] | None:
        """The batch with what is kept of it, and its new header; None if nothing is. The very same batch if all is."""
        self._progress.reached = header.base_offset
        kept = self._thin(batch, header)
        self._progress.reached = header.next_offset
        return kept

    def _thin(self, batch: Batch, header: BatchHeader) -> tuple[Batch, BatchHeader] | None:
        if header.is_control:
            return None if self._marker_goes(batch, header) else (batch, header)
        if header.attributes & DELIVERED:  # without it, what it has delivered would seem to wait
            return batch, header
        keys = kernel.keys(batch)
        if header.is_transactional:
            self._transactions.meets(header)
        if self._transactions.is_aborted(header):
            keep = bytes(len(keys))
        else:
            keep = bytes(self._stays(*record) for record in keys)
        if keep and all(keep):
            return batch, header
        thinner = kernel.filter_batch(batch, keep) if any(keep) else None
        if thinner is None:
            if not self._stays_empty(header):
                return None
            if not header.record_count:
                return batch, header
            thinner = _emptied(header)
        return thinner, read_header(thinner)

    def _marker_goes(self, batch: Batch, header: BatchHeader) -> bool:
        marker = read_marker(batch, header)
        had_records = self._transactions.ends(header)
        offset = header.base_offset
        if marker is None or had_records or offset >= self._horizon:
            return False
        if offset in self._last_markers or header.next_offset == self._progress.complete_to:
            return False
        self._transactions.forget(offset)
        return True

    def _stays_empty(self, header: BatchHeader) -> bool:
        is_last = header.next_offset == self._progress.complete_to
        return is_last or header.base_offset in self._last_batches or header.producer_id in self._ahead

    def _stays(self, offset: int, key: bytes | None, is_tombstone: bool) -> bool:
        if key is None or self._latest.get(_short(key), -1) > offset:
            return False
        return not (is_tombstone and offset < self._horizon)


def _short(key: bytes) -> bytes:
    """Long keys are told apart by a digest, so that the map's memory does not depend on them."""
    return key if len(key) <= SHORT_KEY_BYTES else hashlib.blake2b(key, digest_size=32).digest()


def _emptied(header: BatchHeader) -> bytearray:
    """The batch without its records, which still holds its offsets and its producer's sequence."""
    return joined(header._replace(record_count=0), b"")
