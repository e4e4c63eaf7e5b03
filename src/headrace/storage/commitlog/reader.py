"""From an offset to slices of the commit log: the places of recent reads first, then the queue, then a few headers.

Runs that touch are joined into one slice. A read ends where a run does, unless its first batch is larger than what was
asked for, and has at most SLICES_MAX slices. Bytes that this process did not write are checked run by run before they
are first served.

For everything that is not a fetch there are the batches of one partition by offset (`headers`) and by time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from headrace.errors import CorruptBatch, UnreadableBatch
from headrace.ports.disk import File, FileSlice, Source
from headrace.records.batch import LENGTH_END, BatchHeader
from headrace.storage.checked_bytes import CheckBudget, CheckedBytes
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.queue import Place, Queue
from headrace.storage.commitlog.queuefile import DAMAGED, GONE, NO_TIMESTAMP, Entry
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import ReadResult, TimedOffset
from headrace.storage.scan import Walk, find, read_log, sound_run, walk, walk_checked
from headrace.storage.segments.segments import in_batch

log = logging.getLogger(__name__)

PLACES_MAX: Final = 16
SLICES_MAX: Final = 512
AHEAD_MAX: Final = 512
RUN_START: Final = -1


@dataclass(slots=True)
class _Answer:
    """Slices in the making."""

    warm: bool
    source: Source
    slices: list[FileSlice] = field(default_factory=list)
    count: int = 0
    unchecked: FileSlice | None = None
    is_cold: bool = False
    """What is unchecked is not in the page cache; what comes behind it may not be either."""
    has_old: bool = False
    """It has bytes that this process had not served yet: a reader that catches up, and will go on."""
    file: File | None = None
    byte: int = 0
    end: int = 0

    def add(self, file: File, byte: int, end: int) -> None:
        self.count += end - byte
        if file is self.file and byte == self.end:
            self.end = end
            return
        self.flush()
        self.file, self.byte, self.end = file, byte, end

    def flush(self) -> None:
        if self.file is not None:
            self.slices.append(FileSlice(self.file, self.byte, self.end - self.byte, self.source))
        self.file = None


class Reader:
    def __init__(
        self,
        queue: Queue,
        commit_log: CommitLog,
        epochs: EpochHistory,
        budget: CheckBudget,
        checked_from: int,
        source: Source,
    ) -> None:
        self._queue = queue
        self._commit_log = commit_log
        self._epochs = epochs
        self._budget = budget
        self._source = source
        self.checked = CheckedBytes()
        """By offset, not by byte: where a batch lies may change."""
        self.checked.own_from = checked_from
        self._places: dict[int, tuple[Place, int]] = {}

    def doubt(self, end_offset: int) -> None:
        """Everything before this offset is checked again before it is served."""
        self.checked = CheckedBytes()
        self.checked.own_from = end_offset

    def forget(self) -> None:
        """Places have changed."""
        self._places.clear()

    def read(self, offset: int, max_bytes: int, limit: int, *, warm: bool) -> ReadResult:
        """Slices from the batch that holds the offset; the limit is the boundary of a batch above it."""
        found = self._find(offset)
        answer = _Answer(warm, self._source)
        while found is not None:
            place, entry, byte, base = found
            if entry.offset >= limit:
                self._remember(limit, place, RUN_START)
                break
            following = self._queue.settle((place[0], place[1] + 1))
            if entry.size == DAMAGED:
                if not answer.count:
                    raise self.damaged(entry)
                break
            if entry.size != GONE:
                end = self._end_in(place, entry, limit)
                if answer.count and answer.count + end - byte > max_bytes:
                    self._remember(base, place, byte)
                    break
                if not self._serve(answer, entry, byte, end, base, max_bytes):
                    break
                if len(answer.slices) >= SLICES_MAX:
                    max_bytes = 0
            if following is None:
                self._remember(limit, (place[0], place[1] + 1), RUN_START)
                break
            place = following
            entry = self._queue.entry(place)
            found = place, entry, entry.byte, entry.offset
        answer.flush()
        if warm or not (answer.is_cold or answer.has_old):
            return ReadResult(tuple(answer.slices), answer.count, answer.unchecked)
        after = self._queue.settle((place[0], place[1] + 1))
        ahead: tuple[FileSlice, ...] = ()
        if answer.is_cold:
            ahead, after = self._ahead(after, max_bytes - answer.count)
        beyond, _ = self._ahead(after, max_bytes)
        return ReadResult(tuple(answer.slices), answer.count, answer.unchecked, ahead, beyond)

    def _ahead(self, following: Place | None, max_bytes: int) -> tuple[tuple[FileSlice, ...], Place | None]:
        """Runs from the place on, as many as a read of so many bytes would come to, and the place behind them."""
        slices: list[FileSlice] = []
        while following is not None and max_bytes > 0 and len(slices) < AHEAD_MAX:
            entry = self._queue.entry(following)
            if entry.has_batches:
                slices.append(FileSlice(self._commit_log.file(entry.number), entry.byte, entry.size))
                max_bytes -= entry.size
            following = self._queue.settle((following[0], following[1] + 1))
        return tuple(slices), following

    def _find(self, offset: int) -> tuple[Place, Entry, int, int] | None:
        """Entry and byte of the first batch that ends at or after the offset, and its base offset."""
        known = self._places.get(offset)
        if known is not None:
            place = self._queue.settle(known[0])
            if place is not None:
                entry = self._queue.entry(place)
                if known[1] == RUN_START:
                    return place, entry, entry.byte, entry.offset
                return place, entry, known[1], offset
        place = self._queue.place(offset)
        while place is not None:
            entry = self._queue.entry(place)
            if entry.size == DAMAGED or (entry.size != GONE and offset <= entry.offset):
                return place, entry, entry.byte, entry.offset
            if entry.size != GONE:
                file = self._commit_log.file(entry.number)
                byte = self._seek(file, entry, offset)
                if byte < entry.byte + entry.size:
                    return place, entry, byte, int.from_bytes(read_log(file, 8, byte), "big")
            place = self._queue.settle((place[0], place[1] + 1))
        return None

    def _seek(self, file: File, entry: Entry, offset: int) -> int:
        byte = find(file, entry.byte, entry.byte + entry.size, entry.offset, offset, dense=True)
        if byte >= 0:
            return byte
        for byte, header in walk_checked(file, entry.byte, entry.byte + entry.size):
            if header.last_offset >= offset:
                return byte
        raise self._wrong(file, entry.byte, f"no batch holds offset {offset}")

    def _end_in(self, place: Place, entry: Entry, limit: int) -> int:
        """Where the limit lies in the run."""
        end = entry.byte + entry.size
        if limit >= entry.next_offset:
            return end
        known = self._places.get(limit)
        if known is not None and known[0] == place and known[1] != RUN_START:
            return known[1]
        byte = self._seek(self._commit_log.file(entry.number), entry, limit)
        if byte < end:
            self._remember(limit, place, byte)
        return byte

    def _serve(self, answer: _Answer, entry: Entry, byte: int, end: int, base: int, max_bytes: int) -> bool:
        """Put the run into the answer; False: the answer ends here."""
        file = self._commit_log.file(entry.number)
        next_offset = entry.next_offset
        sound = end
        if not self.checked.covers(base, next_offset):
            try:
                sound = self._check(answer, file, entry, byte, base)
            except CorruptBatch as error:
                if not answer.count:
                    raise
                log.error("%s", error)
                return False
        stop = min(sound, end)
        if stop <= byte:
            return False
        if not answer.count and stop - byte > max_bytes:
            first_end = byte + int.from_bytes(read_log(file, 4, byte + 8), "big") + LENGTH_END
            answer.add(file, byte, min(stop, max(first_end, byte + max_bytes)))
            return False
        answer.add(file, byte, stop)
        return sound >= end and end == entry.byte + entry.size

    def _check(self, answer: _Answer, file: File, entry: Entry, byte: int, base: int) -> int:
        """Check a run from the batch at the byte on; answers how far it is sound."""
        run_end = entry.byte + entry.size
        # What was read ahead is not probed once more: a miss would cost one short wait.
        if not answer.warm and not file.in_cache(byte, run_end - byte):
            answer.unchecked = FileSlice(file, byte, run_end - byte)
            answer.is_cold = True
            return byte
        if answer.count and self._budget.spent:
            answer.unchecked = FileSlice(file, byte, run_end - byte)
            return byte
        answer.has_old = True
        window = _readable(file, byte, run_end)
        if not window:
            raise self._wrong(file, byte, f"the file ends before the batch with offset {base}")
        at, due = 0, base
        while at < len(window):
            epoch = self._epochs.epoch_at(due)
            used = batches = 0
            if epoch is not None:
                left = self._budget.batches if at or answer.count else max(1, self._budget.batches)
                used, due, batches = sound_run(window[at:] if at else window, due, epoch, max(0, left))
            if not used:
                if (at or answer.count) and self._budget.spent:
                    break
                try:
                    used, due, batches = self._check_one(file, byte + at, run_end, due)
                except CorruptBatch as error:
                    if not at:
                        raise
                    log.error("%s", error)
                    break
            self._budget.spend(used, batches)
            at += used
        if at < len(window) and self._budget.spent:
            answer.unchecked = FileSlice(file, byte + at, run_end - byte - at)
        self.checked.add(base, entry.next_offset if byte + at == run_end else due, due)
        return byte + at

    def _check_one(self, file: File, byte: int, end: int, due: int) -> tuple[int, int, int]:
        _, header = next(walk_checked(file, byte, end, byte + 1))
        if header.base_offset != due:
            raise self._wrong(file, byte, f"base offset is {header.base_offset}, but {due} is due here")
        epoch = self._epochs.epoch_at(due)
        if epoch is not None and header.leader_epoch != epoch:
            raise self._wrong(file, byte, f"leader epoch is {header.leader_epoch}, not {epoch}")
        return header.size_bytes, header.next_offset, 1

    def damaged(self, entry: Entry) -> CorruptBatch:
        return CorruptBatch(
            f"{self._commit_log.path(entry.number)} at byte {entry.byte}: offsets {entry.offset} to "
            f"{entry.next_offset - 1} are damaged and not served; `headrace log verify` says more"
        )

    def _wrong(self, file: File, byte: int, what: str) -> CorruptBatch:
        return CorruptBatch(f"{file.path} at byte {byte}: {what}; `headrace log verify` says more")

    def _remember(self, offset: int, place: Place, byte: int) -> None:
        places = self._places
        if len(places) >= PLACES_MAX:
            del places[next(iter(places))]
        places[offset] = (place, byte)


def _readable(file: File, byte: int, end: int) -> bytes:
    """The bytes of a run, up to the first batch that the disk does not give back."""
    try:
        return read_log(file, end - byte, byte)
    except UnreadableBatch:
        at = byte
        with suppress(UnreadableBatch):
            for found, header in walk_checked(file, byte, end):
                at = found + header.size_bytes
        if at == byte:
            raise
        return read_log(file, at - byte, byte)


def headers(
    queue: Queue, commit_log: CommitLog, from_offset: int, wanted_offset: int
) -> Iterator[tuple[BatchHeader, FileSlice]]:
    """Every batch from the one that holds the offset. Damage is skipped below the wanted offset, else raised."""
    for entry in queue.entries(from_offset):
        if entry.size == DAMAGED and wanted_offset < entry.next_offset:
            raise CorruptBatch(
                f"{commit_log.path(entry.number)} at byte {entry.byte}: offsets {entry.offset} to "
                f"{entry.next_offset - 1} are damaged; `headrace log verify` says more"
            )
        for header, piece in _in_run(commit_log, entry):
            if header.next_offset > from_offset:
                yield header, piece


def checked_headers(
    queue: Queue, commit_log: CommitLog, from_offset: int, *, past_damage: bool, left_out: list[int]
) -> Iterator[tuple[BatchHeader, FileSlice]]:
    """The same, of batches that agree with their CRCs, and known damage is left out. At one that does not agree:
    CorruptBatch, or on with the next run. Takes down where damage was left out."""
    for entry in queue.entries(from_offset):
        if entry.size == DAMAGED and max(entry.offset, from_offset) < entry.next_offset:
            left_out.append(max(entry.offset, from_offset))
        try:
            for header, piece in _in_run(commit_log, entry, walk_checked):
                if header.next_offset > from_offset:
                    yield header, piece
        except CorruptBatch as error:
            if not past_damage:
                raise
            log.error("%s", error)
            left_out.append(max(entry.offset, from_offset))


def _in_run(commit_log: CommitLog, entry: Entry, walk_batches: Walk = walk) -> Iterator[tuple[BatchHeader, FileSlice]]:
    if not entry.has_batches:
        return
    file, expected = commit_log.file(entry.number), entry.offset
    for byte, header in walk_batches(file, entry.byte, entry.byte + entry.size):
        if header.base_offset != expected:
            raise CorruptBatch(
                f"{file.path} at byte {byte}: base offset is {header.base_offset}, but {expected} comes next; "
                "`headrace log verify` says more"
            )
        yield header, FileSlice(file, byte, header.size_bytes)
        expected = header.next_offset


def end_of_run(commit_log: CommitLog, entry: Entry) -> int:
    """The offset behind the last batch of a run, as far as its batches follow each other."""
    end = entry.offset
    with suppress(CorruptBatch):
        for header, _ in _in_run(commit_log, entry):
            end = header.next_offset
    return end


def offset_for_time(
    queue: Queue, commit_log: CommitLog, timestamp_ms: int, start_offset: int, end_offset: int
) -> TimedOffset | None:
    """The first record at or after `start_offset` whose timestamp is not below the one asked for."""
    for file, front in queue.files():
        if file.greatest_ms < timestamp_ms:
            continue
        for at in range(max(front, file.first_with_time(timestamp_ms)), file.count):
            for header, piece in _in_run(commit_log, queue.entry((file, at))):
                if header.next_offset > start_offset and header.max_timestamp_ms >= timestamp_ms:
                    found = in_batch(piece.file, piece.position, header, timestamp_ms, start_offset)
                    if found is not None:
                        return found if found.offset < end_offset else None
    return None


def greatest_timestamp(queue: Queue, commit_log: CommitLog, start_offset: int, end_offset: int) -> TimedOffset | None:
    """The first record that bears the greatest timestamp of all."""
    greatest_ms = max((file.greatest_ms for file, _ in queue.files()), default=NO_TIMESTAMP)
    if greatest_ms == NO_TIMESTAMP:
        return None
    return offset_for_time(queue, commit_log, greatest_ms, start_offset, end_offset)
