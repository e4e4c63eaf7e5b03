"""A partition's log on this broker, as far as it is the same in every layout: offsets, epochs, producers, copied
batches, the bounds of a read. How batches lie on disk is the layout's: see `segments.log` and `commitlog.log`.

`committed_offset` is the partition's high watermark, as far as the log was told. Everything from it on may still be cut
by a truncation, so retention, compaction and the key index leave it alone: an older record that compaction had dropped
for its sake would be lost with it. Nobody tells a log that was just opened, so nothing of it is removed until someone
does.

`retire` is what retention calls instead of deleting: whoever serves the log decides when its start rises. A replica
must not begin where the others do not, and a follower never decides by its own clock. A log that nobody has taken over
deletes at once. `safe_start_offset` is the start that a checkpoint holds, so that no crash lowers it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import CorruptBatch, FencedEpoch, HeadraceError, OffsetOutOfRange, UnknownPartition
from headrace.ports.disk import FileSlice
from headrace.records.batch import BatchHeader, check
from headrace.settings.values import LogSettings
from headrace.storage import producers, refusal
from headrace.storage.aborted import AbortedEntries, AbortedIndex, AbortedTransactions
from headrace.storage.checkpoint import Done
from headrace.storage.epochs import EpochHistory, starts_in
from headrace.storage.log import EpochEnd, ReadResult, Tail, TopicPartition
from headrace.storage.producers import (
    Load,
    LogProducers,
    ProducerState,
    ProducerTable,
    Snapshot,
    Snapshots,
    newest_known,
)

if TYPE_CHECKING:
    from headrace.storage.local_store import StoreServices

log = logging.getLogger(__name__)

NOTHING: Final = ReadResult((), 0)


def _all_of_it() -> int:
    return 0


def check_copied(
    where: TopicPartition, data: memoryview, end_offset: int, last_epoch: int, *, is_empty: bool
) -> list[tuple[memoryview, BatchHeader]]:
    """The batches, which fill `data` and follow a log that ends so. Their offsets rise, perhaps with gaps, as in a log
    that was compacted; their epochs do not fall. The first may span the end of a log
    that is empty, as it may span the start of the leader's."""
    found: list[tuple[memoryview, BatchHeader]] = []
    at, size, due = 0, len(data), end_offset
    while at < size:
        try:
            header = check(data, at)
        except CorruptBatch as error:
            raise CorruptBatch(f"{where}: what was copied behind offset {due - 1}: {error}") from None
        if header.base_offset < due and not (is_empty and not found and header.next_offset > due):
            raise OffsetOutOfRange(f"{where}: a batch with offset {header.base_offset} cannot follow {due - 1}")
        if header.leader_epoch < last_epoch:
            raise FencedEpoch(
                f"{where}: a batch of epoch {header.leader_epoch} (offset {header.base_offset}) cannot follow one of "
                f"epoch {last_epoch}"
            )
        end = at + header.size_bytes
        found.append((data[at:end], header))
        at, due, last_epoch = end, header.next_offset, header.leader_epoch
    return found


@dataclass(slots=True, kw_only=True)
class RecoveredLog:
    """What a start found of a log in its folder."""

    start_offset: int = 0
    epochs: EpochHistory | None = None
    """None: nothing of them was read yet."""
    snapshots: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    """Offsets that the files of aborted transactions are named after."""
    cleanings: list[tuple[int, int]] = field(default_factory=list)
    tail: Tail = Tail.WHOLE


class LocalLog(ABC):
    """Offsets rise with deletions, appends and syncs: durable_offset <= written_offset <= end_offset, and start_offset
    is at most end_offset. Only a truncation lowers them, and everything that was known of what it cut with them."""

    topic_partition: TopicPartition
    topic_id: bytes
    folder: str
    settings: LogSettings
    start_offset: int
    safe_start_offset: int
    end_offset: int
    """Behind everything that was staged..."""
    written_offset: int
    """...that was written..."""
    durable_offset: int
    """...and that was synced."""
    sync_asked_offset: int
    """Behind everything that a sync was asked for."""
    committed_offset: int
    retiring_to: int
    retire: Callable[[int], None]
    delayed_from: Callable[[], int]
    held_bytes: int
    wanted_start: int
    truncations: int
    """How often the log was cut in this run: what was true of an offset before is not after it."""
    tail: Tail
    on_damage: Callable[[int], None]
    offline: HeadraceError | None
    producers: ProducerTable
    _services: StoreServices[Any]

    def __init__(
        self,
        services: StoreServices[Any],
        folder: str,
        topic_partition: TopicPartition,
        topic_id: bytes,
        settings: LogSettings,
        recovered: RecoveredLog,
    ) -> None:
        self._services = services
        self.folder = folder
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.settings = settings
        self.start_offset = recovered.start_offset
        self.committed_offset = self.retiring_to = self.held_bytes = self.wanted_start = 0
        self.retire = self.delete_before
        self.delayed_from = _all_of_it
        self.on_damage = lambda _offset: None
        self.tail = recovered.tail
        self.cleanings = recovered.cleanings
        self.truncations = 0
        self.copying = False
        self.offline = None
        self._refusal: HeadraceError | None = None
        """Why nothing is staged now: the log is offline, or a write of this turn has failed."""
        self._shortage = refusal.Shortage(topic_partition)
        self.epochs = recovered.epochs or EpochHistory(services.disk, folder)
        self.epochs.rebuild_from(self._epochs_in_log)
        self._epoch: int | None = None
        """Of the batch that was staged last; None: the next one looks whether it begins one."""
        self._epochs_before: int | None = None
        """How many epochs there were before those that the turn has begun; None: it has begun none."""
        self._leaders_epoch_starts: Sequence[tuple[int, int]] = ()
        self.producers = ProducerTable(services.producer_loads, self._load_producers)
        self.aborted_index = AbortedIndex(services.disk, folder, recovered.aborted)

    def __repr__(self) -> str:
        return f"<log {self.topic_partition} {self.start_offset}..{self.end_offset}>"

    @property
    def cleaned_to(self) -> int:
        """Everything before it has been compacted at least once."""
        return self.cleanings[-1][0] if self.cleanings else 0

    def archived_offset(self) -> int:
        archived = self._services.archived_offset(self.topic_partition)
        # An offset that this log never had was committed for another one of that name.
        return archived if 0 <= archived <= self.end_offset else 0

    def deletable_below(self) -> int:
        """Retention and compaction leave everything from this offset on."""
        end = self.committed_offset
        if self.settings.retention_archived:
            end = min(end, self.archived_offset())
        if self.settings.delays:
            end = min(end, self.delayed_from())
        return end

    def cleanable_below(self) -> int:
        """Compaction leaves everything from this offset on: what may be deleted, and is decided. As far as transactions
        are known; who cleans loads them first."""
        end = self.deletable_below()
        return self.decided_to(end) if self.producers.loaded else end

    def decided_to(self, offset: int) -> int:
        """As much below the offset, which is committed, as no transaction is in that is not decided; nothing while
        that is being read."""
        if not self.producers.loaded and self._decided_by_snapshot(offset):
            return offset
        try:
            undecided = self.producers.first_undecided(self.committed_offset)
        except HeadraceError:  # it is being read, or damaged: the next check asks again
            return self.start_offset
        return offset if undecided is None else max(self.start_offset, min(offset, undecided))

    @abstractmethod
    def _decided_by_snapshot(self, offset: int) -> bool:
        """Whether a snapshot at the offset says that no transaction was open there."""

    def last_epoch(self) -> int:
        return self.epochs.last_epoch()

    def epoch_end(self, epoch: int) -> EpochEnd | None:
        return self.epochs.end_of(epoch, self.start_offset, self.end_offset)

    def epoch_starts(self) -> Sequence[tuple[int, int]]:
        return self.epochs.entries

    def producers_before(self, offset: int) -> dict[int, ProducerState]:
        return producers.before(self.producers.states, offset)

    def aborted(self, from_offset: int, to_offset: int) -> list[tuple[int, int]]:
        aborted = self.producers.known.aborted
        if not aborted.files:
            return []
        found = aborted.between(from_offset, to_offset)
        return [(entry.producer_id, entry.first_offset) for entry in found]

    def committed_limit(self, from_offset: int, limit_offset: int, most: int) -> int:
        aborted = self.producers.known.aborted
        if not aborted.files:
            return limit_offset
        found = aborted.between(from_offset, limit_offset)
        last = next(islice(found, most - 1, None), None)
        return limit_offset if last is None else min(limit_offset, last.marker_offset + 1)

    def learn_producers(self, states: dict[int, ProducerState]) -> None:
        if self.start_offset != self.end_offset:
            return
        self.producers.learn(states)
        self._write_snapshot_at(self.written_offset, self.producers.states)
        self._sync_snapshot_soon()

    def _remember_producers(self, offset: int) -> None:
        """Have a snapshot at the offset, before what lies below it goes: nothing else tells of it then, and one further
        on may be cut. The last batches of a producer are enough: it has no older ones on their way. OSError and
        HeadraceError: nothing may go. What is damaged nobody can keep."""
        if not self._has_snapshot_at(offset) and (known := self._known_before(offset)):
            self._write_snapshot_at(offset, known)

    def _known_before(self, offset: int) -> dict[int, ProducerState]:
        """Of producers; nothing where that is damaged."""
        try:
            return self.producers_before(offset)
        except CorruptBatch as error:
            log.warning("%s: what lies below offset %d tells of no producers: %s", self.topic_partition, offset, error)
            return {}

    def append_copied(self, data: memoryview, epoch_starts: Sequence[tuple[int, int]] = ()) -> int:
        is_empty = self.start_offset == self.end_offset
        batches = check_copied(self.topic_partition, data, self.end_offset, self.last_epoch(), is_empty=is_empty)
        self.copying, self._leaders_epoch_starts = True, epoch_starts
        try:
            if batches and batches[0][1].base_offset < self.end_offset:
                start_offset, states = self.start_offset, self.producers.states
                self.restart_at(batches[0][1].base_offset)
                self.learn_producers(states)
                self.start_offset = start_offset
            for batch, header in batches:
                self._stage(batch, header, header.base_offset, header.leader_epoch)
        finally:
            self.copying, self._leaders_epoch_starts = False, ()
        return self.end_offset

    def _begin_epoch(self, epoch: int, base: int) -> None:
        """The batch that is staged at this offset is the first of its epoch here. Copied batches may have been
        compacted: where the leader has told when epochs began, that counts, else what `epochs` says of the least
        start. What is here belongs to epochs before."""
        entries = self.epochs.entries
        before = len(entries)
        is_empty = self.start_offset >= self.end_offset
        least = (entries[-1][1] if entries else 0) if is_empty else self.end_offset
        for begun, start in self._leaders_epoch_starts:
            if begun <= epoch:
                self.epochs.begin(begun, min(max(start, least), base))
        self.epochs.begin(epoch, min(self.end_offset, base))
        if self._epochs_before is None and len(entries) > before:
            self._epochs_before = before

    def _take_back_epochs(self) -> None:
        """Nothing of the turn was written, so it has begun no epoch; the next batch looks whether it does."""
        if self._epochs_before is not None:
            self.epochs.cut(self._epochs_before)
        self._epoch = self._epochs_before = None

    def _epochs_in_log(self) -> Iterator[tuple[int, int]]:
        return starts_in((header for header, _ in self.sound_headers(self.start_offset)), self.start_offset)

    def _newest_known(self, snapshots: Snapshots, first_offset: int) -> tuple[int, LogProducers]:
        bounds = first_offset, self.written_offset, self.committed_offset
        return newest_known(snapshots, self.aborted_index, self._aborted_file, *bounds)

    def _no_producers(self) -> LogProducers:
        return LogProducers(aborted=AbortedTransactions(self._aborted_file))

    def _replay_producers(self, known: LogProducers, from_offset: int, past_damage: bool) -> Load:
        """Bring what is known of producers before an offset up to what is written."""
        if (self.settings.compact or self.cleanings) and known.aborted.files:
            yield from self._drop_without_marker(known.aborted)
        if from_offset < self.written_offset:
            found = self._checked_headers(from_offset, past_damage)
            loads = self._services.producer_loads
            yield from producers.replay(known, from_offset, self.written_offset, found, loads.wall_ms(), loads.budget)
        return known

    def _drop_without_marker(self, aborted: AbortedTransactions) -> Iterator[None]:
        """Compaction may have taken markers after the index was written."""
        budget = self._services.producer_loads.budget
        for entry in list(aborted.between(0, self.written_offset)):
            try:
                header = next((header for header, _ in self.sound_headers(entry.marker_offset)), None)
            except CorruptBatch:
                continue  # who reads on from there meets it again
            if header is None or header.base_offset != entry.marker_offset:
                aborted.remove(entry.marker_offset)
            budget.spend(0, 1)
            if budget.spent:
                yield

    def _snapshot(self, offset: int, states: dict[int, ProducerState]) -> tuple[Snapshot, list[str]]:
        """What is known before an offset, with the index of aborted transactions written, which is to be synced."""
        if not self.producers.loaded:
            return Snapshot(states), []
        known = self.producers.known
        paths = self.aborted_index.write(known.aborted)
        return known.snapshot(offset)._replace(states=states), paths

    def _tidy_aborted(self) -> None:
        """A snapshot was written: files of aborted transactions that it does not need go."""
        if self.producers.loaded:
            self.aborted_index.tidy(self.producers.known.aborted)

    def _drop_aborted_before(self, offset: int) -> None:
        """The log begins there, or a little behind. One that is not loaded forgets them when it is."""
        if self.producers.loaded and self.producers.known.aborted.files:
            self.producers.known.aborted.drop_before(offset)
            try:
                self._tidy_aborted()
            except OSError as error:
                log.warning("%s: aborted transactions from before its start go later: %s", self.topic_partition, error)

    def read(self, offset: int, max_bytes: int, limit_offset: int, *, warm: bool = False) -> ReadResult:
        limit = min(limit_offset, self.written_offset)
        if offset < self.start_offset or offset > self.end_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is not in the log, which holds "
                f"{self.start_offset} to {self.end_offset - 1}"
            )
        if offset >= limit:
            return NOTHING
        try:
            return self._read(offset, max_bytes, limit, warm)
        except CorruptBatch:
            self.on_damage(offset)
            raise
        except OSError as error:
            raise refusal.unreadable(self.topic_partition, error) from error

    def sync_soon(self) -> None:
        self._services.sync_soon(self)

    def take_refusal(self) -> HeadraceError | None:
        """Why nothing is staged, if that was refused; says it once, unless the log is offline."""
        error, self._refusal = self._refusal, self.offline
        return error

    def _flush_staged(self) -> None:
        """Before a truncation; StorageFailed if the log is offline."""
        error = self._write_alone()
        if error is not None:
            log.warning("%s: what was staged before a truncation is dropped: %s", self.topic_partition, error)
        if self.offline is not None:
            raise self.offline.again()

    def _cut_to(self, end_offset: int) -> None:
        """The log ends there now."""
        self.end_offset = self.written_offset = end_offset
        self.safe_start_offset = min(self.safe_start_offset, self.start_offset)
        self.truncations += 1
        self._epoch = None
        self._forget_from(end_offset)
        self.producers.forget()

    def _forget_from(self, offset: int) -> None:
        """The log was cut there: nothing that was known of this offset and what follows counts any more."""
        self.committed_offset = min(self.committed_offset, offset)
        self.durable_offset = min(self.durable_offset, offset)
        self.sync_asked_offset = min(self.sync_asked_offset, offset)
        self.cleanings = [(min(cleaned_to, offset), at_ms) for cleaned_to, at_ms in self.cleanings]
        self.epochs.truncate(offset)

    def delete_before(self, offset: int, done: Done | None = None) -> None:
        if self.offline is not None:
            raise self.offline.again()
        offset = min(offset, self.written_offset)
        if offset > self.start_offset:
            self._raise_start(offset)
        elif done is None:
            return
        self._keep_start(self.start_kept(done))

    def _keep_start(self, kept: Done) -> None:
        """Have a checkpoint with the start of now; `kept` hears of it."""
        self._services.checkpoint_soon(kept)

    def delete(self) -> None:
        """Take nothing more: the partition is going away."""
        self.offline = self._refusal = UnknownPartition(f"{self.topic_partition} was deleted")
        self._drop_staged()

    def start_kept(self, done: Done | None) -> Done:
        """What a checkpoint that holds the start of now calls when it is written, or could not be."""
        start_offset, truncations = self.start_offset, self.truncations

        def kept(error: HeadraceError | None) -> None:
            if error is None and truncations == self.truncations:
                self.safe_start_offset = max(self.safe_start_offset, start_offset)
            if done is not None:
                done(error)

        return kept

    # What a layout has to say.

    @abstractmethod
    def _read(self, offset: int, max_bytes: int, limit: int, warm: bool) -> ReadResult:
        """From an offset of the log up to the limit, which is written."""

    @abstractmethod
    def sound_headers(self, from_offset: int) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """As `Log.headers`, but known damage is left out."""

    @abstractmethod
    def _checked_headers(self, from_offset: int, past_damage: bool) -> Iterator[tuple[BatchHeader, FileSlice]]:
        """The same, of batches that agree with their CRCs. Others are left out, and `producers.left_out` hears of them,
        or they raise CorruptBatch."""

    @abstractmethod
    def _load_producers(self, past_damage: bool) -> Load: ...

    @abstractmethod
    def _aborted_file(self, marker_offset: int, last: AbortedEntries | None) -> int:
        """The offset of the file of aborted transactions that one with this marker goes to."""

    @abstractmethod
    def _has_snapshot_at(self, offset: int) -> bool: ...

    @abstractmethod
    def _write_snapshot_at(self, offset: int, states: dict[int, ProducerState]) -> None:
        """What is known of producers before the offset; it is to be synced."""

    @abstractmethod
    def _sync_snapshot_soon(self) -> None: ...

    @abstractmethod
    def _raise_start(self, offset: int) -> None:
        """To an offset above it that is written."""

    @abstractmethod
    def _write_alone(self) -> HeadraceError | None:
        """Write what is staged before the turn ends; or take it back and answer why."""

    @abstractmethod
    def restart_at(self, offset: int) -> None: ...

    @abstractmethod
    def _stage(self, batch: memoryview, header: BatchHeader, base: int, epoch: int) -> None: ...

    @abstractmethod
    def _drop_staged(self) -> None: ...
