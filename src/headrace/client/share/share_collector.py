"""Handing out what was acquired: as records, one by one or in lists, or as Arrow batches.

Of whole batches that came, only the records that this member has acquired are handed out. Offsets among them that no
record has, as compaction leaves them, are said to be gaps. What cannot be read, because a batch is damaged or a decoder
fails, is released, so that another member or a later try may do better, until the group's limit of deliveries ends it;
the error is raised when there is nothing else to give.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Final

from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.share.deliveries import Deliveries
from headrace.client.share.offset_runs import OffsetRuns, Run
from headrace.client.share.options import ShareConsumerConfig
from headrace.client.share.share_fetcher import AcquiredSet, ShareFetcher, SharePlace
from headrace.errors import HeadraceError, InvalidRecord
from headrace.queues.messages import AcknowledgeType
from headrace.records.buffers import BufferPool
from headrace.records.consumer_records import ReceivedRecord, RecordSet

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.records.arrow import Decoder

POOL_BYTES: Final = 32 << 20
"""Of the buffers of Arrow batches, what is kept to be used again."""
MOST: Final = 1 << 62

log = logging.getLogger(__name__)


class ShareCollector:
    def __init__(self, fetcher: ShareFetcher, deliveries: Deliveries, options: ShareConsumerConfig) -> None:
        self.unread: Iterator[ReceivedRecord] = iter(())
        """Of the last chunk, what was not yielded yet."""
        self.failure: HeadraceError | None = None
        """What could not be read, told once."""
        self.is_iterated = False
        """The last call's records are yielded one by one: those before the last are done with."""
        self.places: dict[TopicPartition, SharePlace] = {}
        """By the names of records that were handed out: where they are acknowledged."""
        self._fetcher = fetcher
        self._deliveries = deliveries
        self._check_crc = options.check_crc
        self._decode = options.decoder
        self._chunk: Sequence[ReceivedRecord] = ()
        self._records: deque[ReceivedRecord] = deque()
        """Of the set that is open."""
        self._rows: deque[pa.RecordBatch] = deque()
        self._place: SharePlace | None = None
        """Of the set that is open, or was last."""
        self._decoders: dict[TopicPartition, Decoder] = {}
        self._pool = BufferPool(POOL_BYTES)

    @property
    def ready(self) -> bool:
        return bool(self._records or self._rows or self._fetcher.sets) or length_hint(self.unread) > 0

    def close(self) -> None:
        self._decoders.clear()
        self._pool.clear()

    # Records

    def take(self, into: list[ReceivedRecord], most: int) -> None:
        """Append records that are there now, up to `most` in all."""
        self.is_iterated = False
        if length_hint(self.unread):
            left, room = list(self.unread), most - len(into)
            into += left[:room]
            self._chunk = left[room:]
            self.unread = iter(self._chunk)
        while len(into) < most:
            if not self._records and not self._open():
                return
            count = min(most - len(into), len(self._records))
            taken = [self._records.popleft() for _ in range(count)]
            if taken:
                assert self._place is not None
                self._hand_out(self._place, runs_of([record.offset for record in taken]))
                into += taken

    def take_chunk(self, most: int) -> bool:
        """As many records into `unread`, to be yielded one by one; whatever call comes next gives out what is left."""
        chunk: list[ReceivedRecord] = []
        self.take(chunk, most)
        self._chunk, self.unread = chunk, iter(chunk)
        self.is_iterated = True
        return bool(chunk)

    def unyielded(self, *, last_too: bool) -> dict[TopicPartition, OffsetRuns]:
        """Of the chunk, what the application has not seen; with `last_too` also the record that it saw last."""
        left = length_hint(self.unread)
        first = len(self._chunk) - left
        if last_too and first > 0:
            first -= 1
        found: dict[TopicPartition, OffsetRuns] = {}
        for record in self._chunk[first:]:
            found.setdefault((record.topic, record.partition), OffsetRuns()).add(record.offset, record.offset)
        return found

    def _hand_out(self, place: SharePlace, runs: Iterable[Run]) -> None:
        where = place.topic, place.partition
        self.places[where] = place
        self._deliveries.hand_out(where, runs)

    def _open(self) -> bool:
        """The records of the next set; False if there is none."""
        if self._rows:
            self._return_rows()
        if not self._fetcher.sets:
            return False
        found = self._fetcher.sets.popleft()
        self._place = place = found.place
        first, end = found.acquired[0][0], found.acquired[-1][1] + 1
        records: list[ReceivedRecord] = []
        try:
            reader = RecordSet(found.records, place.topic, place.partition, first, end, self._check_crc)
            reader.take(records, MOST)
        except HeadraceError as error:
            self._fail(error)
            end = records[-1].offset + 1 if records else first
        records = acquired_of(records, found)
        self._say_gaps(found, runs_of([record.offset for record in records]), end)
        self._records.extend(records if self._decode is None else self._decoded(place, records))
        return True

    def _decoded(self, place: SharePlace, records: list[ReceivedRecord]) -> Iterator[ReceivedRecord]:
        """With values as the decoder makes them, without those that it fails at."""
        assert self._decode is not None
        for record in records:
            try:
                record.value = self._decode(record.value)
            except Exception as error:  # noqa: BLE001 - a decoder may raise anything
                self._give_back(place, [Run(record.offset, record.offset)])
                failed = InvalidRecord(
                    f"{place} at offset {record.offset}: the decoder failed with {type(error).__name__}: {error}; the "
                    "record is released, and comes again until the group's limit of deliveries"
                )
                failed.__cause__ = error
                self._fail(failed)
            else:
                yield record

    def _fail(self, error: HeadraceError) -> None:
        if self.failure is None:
            self.failure = error
        else:
            log.error("not told, because another error was not heard yet: %s", error)

    def _say_gaps(self, found: AcquiredSet, runs: Iterable[Run], end: int) -> None:
        """Offsets below `end` that no record has are gaps; what is from there on could not be read."""
        where = found.place.topic, found.place.partition
        self.places[where] = found.place
        seen = OffsetRuns()
        for run in runs:
            seen.add(*run)
        for first, last, _ in found.acquired:
            for run in seen.outside(first, min(last, end - 1)) if first < end else ():
                self._deliveries.say(where, run, AcknowledgeType.GAP)
            if last >= end:
                self._deliveries.say(where, Run(max(first, end), last), AcknowledgeType.RELEASE)

    # Rows

    def take_rows(self, columns: tuple[str, ...], batch_rows: int) -> pa.RecordBatch | None:
        """The next Arrow batch of what is there now."""
        if self._records:
            self._return_records()
        while not self._rows:
            if not self._open_rows(columns, batch_rows):
                return None
        rows = self._rows.popleft()
        assert self._place is not None
        self._hand_out(self._place, runs_of_rows(rows))
        return rows if "offset" in columns else rows.select(list(columns))

    def forget_decoders(self) -> None:
        """The columns wanted may be others from now on."""
        self._return_rows()
        self._decoders.clear()

    def _open_rows(self, columns: tuple[str, ...], batch_rows: int) -> bool:
        if not self._fetcher.sets:
            return False
        found = self._fetcher.sets.popleft()
        self._place = place = found.place
        decoder = self._decoder((place.topic, place.partition), columns, batch_rows)
        runs: list[Run] = []
        end = found.acquired[-1][1] + 1
        for first, last, _ in found.acquired:
            try:
                rows = list(decoder.decode(found.records, first, last + 1, checked=not self._check_crc))
            except HeadraceError as error:
                self._fail(error)
                end = max(first, decoder.at_offset)
                rows = list(decoder.decode(found.records, first, end, checked=not self._check_crc))
            self._rows.extend(rows)
            for each in rows:
                runs += runs_of_rows(each)
            if end <= last:
                break
        self._say_gaps(found, runs, end)
        return True

    def _decoder(self, where: TopicPartition, columns: tuple[str, ...], batch_rows: int) -> Decoder:
        from headrace.records.arrow import Decoder

        decoder = self._decoders.get(where)
        if decoder is None:
            known = columns if "offset" in columns else (*columns, "offset")
            decoder = self._decoders[where] = Decoder(*where, known, batch_rows=batch_rows, pool=self._pool)
        return decoder

    def _return_records(self) -> None:
        """Rows are wanted, of what is open as records."""
        assert self._place is not None
        self._give_back(self._place, runs_of([record.offset for record in self._records]))
        self._records.clear()

    def _return_rows(self) -> None:
        """Records are wanted, or other columns, of what is open as rows."""
        for rows in self._rows:
            assert self._place is not None
            self._give_back(self._place, runs_of_rows(rows))
        self._rows.clear()

    def _give_back(self, place: SharePlace, runs: Iterable[Run]) -> None:
        for run in runs:
            self._deliveries.say((place.topic, place.partition), run, AcknowledgeType.RELEASE)


def runs_of(offsets: Sequence[int]) -> list[Run]:
    """Of offsets in order."""
    if not offsets:
        return []
    if offsets[-1] - offsets[0] + 1 == len(offsets):
        return [Run(offsets[0], offsets[-1])]
    runs: list[Run] = []
    first = last = offsets[0]
    for offset in offsets[1:]:
        if offset != last + 1:
            runs.append(Run(first, last))
            first = offset
        last = offset
    return [*runs, Run(first, last)]


def runs_of_rows(rows: pa.RecordBatch) -> list[Run]:
    offsets = rows["offset"]
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return [Run(first, last)] if last - first + 1 == len(offsets) else runs_of(offsets.to_pylist())


def acquired_of(records: list[ReceivedRecord], found: AcquiredSet) -> list[ReceivedRecord]:
    """Those that this member has acquired, each with its delivery count."""
    kept: list[ReceivedRecord] = []
    ranges = iter(found.acquired)
    first, last, count = next(ranges)
    for record in records:
        offset = record.offset
        while offset > last:
            first, last, count = next(ranges, (MOST, MOST, 0))
        if offset >= first:
            record.delivery_count = count
            kept.append(record)
    return kept
