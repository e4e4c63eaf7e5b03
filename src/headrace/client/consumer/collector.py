"""Handing out what was fetched: as records, one by one or in lists, or as Arrow batches.

Handing out is by calls: what one call gave is done with when the next one begins. A record set that is handed out in
part waits open; when the way of handing out changes, or its partition pauses, the rest goes back to the others. What
was made into records already, and waits to be yielded or for its priority, is fetched again when rows are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import length_hint
from typing import TYPE_CHECKING, Final

from headrace.client.consumer.cursor import CompletedFetch, Cursor
from headrace.client.consumer.fetcher import Fetcher
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.options import ConsumerConfig
from headrace.client.consumer.priority import UNBOUNDED, PriorityOrder
from headrace.client.consumer.progress import Offsets
from headrace.errors import HeadraceError, InvalidRecord
from headrace.records.buffers import BufferPool
from headrace.records.consumer_records import ReceivedRecord, RecordSet

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.records.arrow import Decoder

TAKEN_BYTES: Final = 2 << 20
"""Of a longer list, the first records would have left the processor's caches when the caller gets it; and while it is
made, nobody would look after the network."""
POOL_BYTES: Final = 32 << 20
"""Of the buffers of Arrow batches, what is kept to be used again."""
_NOTHING: Final[list[ReceivedRecord]] = []


class Collector:
    def __init__(self, fetcher: Fetcher, options: ConsumerConfig) -> None:
        self._fetcher = fetcher
        self._check_crc = options.check_crc
        self._decode = options.decoder
        self.unread: Iterator[ReceivedRecord] = iter(_NOTHING)
        """Of the last chunk, what was not yielded yet."""
        self._chunk: list[ReceivedRecord] = _NOTHING
        self._completed: CompletedFetch | None = None
        self._reader: RecordSet | None = None
        self._rows: Iterator[pa.RecordBatch] | None = None
        self._damage: tuple[int, HeadraceError] | None = None
        """Where the rows end before the set does, and why."""
        self._decoders: dict[TopicPartition, Decoder] = {}
        self._pool = BufferPool(POOL_BYTES)
        header = options.priority_header
        self._order = PriorityOrder(header, options.buffer_bytes) if header else None
        self._moved: list[Cursor] = []

    @property
    def ready(self) -> bool:
        """Whether a call would give something now."""
        return (
            self._completed is not None
            or self._fetcher.ready
            or length_hint(self.unread) > 0
            or (self._order is not None and self._order.count > 0)
        )

    def finish_last(self) -> None:
        """What earlier calls gave is done with."""
        moved = self._moved
        first = self.first_unread() if self._chunk else {}
        for cursor in moved:
            if cursor.done < cursor.position and (not first or cursor.place not in first):
                cursor.done = cursor.position
        moved.clear()
        for place, offset in first.items():
            cursor = self._fetcher.cursors[place]
            cursor.done = max(cursor.done, min(cursor.position, offset))
            moved.append(cursor)

    def take(self, into: list[ReceivedRecord], most: int, most_bytes: int = UNBOUNDED) -> None:
        """Append records that are there now, up to `most` in all, or those of record sets of TAKEN_BYTES; none after
        those that reach `most_bytes`.
        """
        if self._completed is not None and not self._completed.counts:
            self._shut()
        if self._chunk:
            self._take_unread(into, most)
        if self._order is not None:
            self._take_in_order(into, most - len(into), most_bytes)
            return
        taken_bytes = 0
        while len(into) < most and most_bytes > 0 and (taken_bytes < TAKEN_BYTES or not into):
            reader = self._reader or self._open()
            if reader is None:
                return
            assert self._completed is not None
            completed, cursor, before, before_bytes = (
                self._completed,
                self._completed.cursor,
                len(into),
                reader.taken_bytes,
            )
            self._moved.append(cursor)
            try:
                try:
                    reader.take(into, most - before, most_bytes)
                finally:
                    most_bytes -= reader.taken_bytes - before_bytes
                    # Of a damaged set too: what stands before the damage is handed out.
                    if self._decode is not None:
                        self._decode_values(cursor, into, before)
            except HeadraceError as error:
                cursor.position = into[-1].offset + 1 if len(into) > before else cursor.position
                self._shut()
                self._fetcher.fail(cursor, error)
                continue
            if reader.finished:
                cursor.position = completed.next_offset
                self._shut()
                taken_bytes += len(completed.records)
            else:
                cursor.position = reader.next_offset

    def take_chunk(self, most: int) -> bool:
        """As many records into `unread`, to be yielded one by one; whatever call comes next gives out what is left."""
        chunk: list[ReceivedRecord] = []
        self.take(chunk, most)
        self._chunk, self.unread = chunk, iter(chunk)
        return bool(chunk)

    def take_rows(self, columns: tuple[str, ...], batch_rows: int) -> pa.RecordBatch | None:
        """The next Arrow batch of what is there now."""
        if self._completed is not None and not self._completed.counts:
            self._shut()
        if self._reader is not None:
            self._put_back()
        if self._chunk or self._order is not None:
            self._return_records()
        while True:
            if self._rows is None and not self._open_rows(columns, batch_rows):
                return None
            assert self._completed is not None
            assert self._rows is not None
            completed, cursor = self._completed, self._completed.cursor
            self._moved.append(cursor)
            rows = next(self._rows, None)
            if rows is not None:
                cursor.position = rows["offset"][-1].as_py() + 1
                return rows if "offset" in columns else rows.select(list(columns))
            damage = self._damage
            self._shut()
            if damage is None:
                cursor.position = completed.next_offset
            else:
                cursor.position, error = damage
                self._fetcher.fail(cursor, error)

    def _return_records(self) -> None:
        first = self.first_unread()
        if self._order is not None:
            for cursor in self._order.clear():
                first[cursor.place] = min(cursor.position, first.get(cursor.place, cursor.position))
            self._free()
        self._chunk, self.unread = _NOTHING, iter(_NOTHING)
        for place, offset in first.items():
            self._fetcher.read_again(place, offset)

    def _open_rows(self, columns: tuple[str, ...], batch_rows: int) -> bool:
        """All rows of the next set; of one that is damaged, those before the damage."""
        completed = self._completed = self._fetcher.take()
        if completed is None:
            return False
        decoder = self._decoder(completed.cursor.place, columns, batch_rows)
        first, end, checked = completed.first_offset, completed.next_offset, not self._check_crc
        hidden = completed.hidden
        try:
            found = list(decoder.decode(completed.records, first, end, checked=checked, hidden=hidden))
        except HeadraceError as error:
            end = max(first, decoder.at_offset)
            self._damage = end, error
            found = list(decoder.decode(completed.records, first, end, checked=checked, hidden=hidden))
        self._rows = iter(found)
        return True

    def _open(self) -> RecordSet | None:
        if self._rows is not None:
            self._put_back()
        completed = self._completed = self._fetcher.take()
        if completed is None:
            return None
        self._reader = self._reader_of(completed)
        return self._reader

    def _reader_of(self, completed: CompletedFetch) -> RecordSet:
        topic, partition = completed.cursor.place
        first, end = completed.first_offset, completed.next_offset
        return RecordSet(completed.records, topic, partition, first, end, self._check_crc, completed.hidden)

    def _decoder(self, place: TopicPartition, columns: tuple[str, ...], batch_rows: int) -> Decoder:
        from headrace.records.arrow import Decoder

        decoder = self._decoders.get(place)
        if decoder is None:
            # The offset is always needed, to know how far the rows reach.
            known = columns if "offset" in columns else (*columns, "offset")
            decoder = self._decoders[place] = Decoder(*place, known, batch_rows=batch_rows, pool=self._pool)
        return decoder

    def leave_values(self) -> None:
        """Values stay as they are on the wire, whatever the decoder."""
        self._decode = None

    def forget_decoders(self) -> None:
        """The columns wanted may be others from now on."""
        if self._rows is not None:
            self._put_back()
        self._decoders.clear()

    def close(self) -> None:
        """Give back what was kept for rows to come."""
        self._shut()
        self._decoders.clear()
        self._pool.clear()

    def _take_in_order(self, into: list[ReceivedRecord], most: int, most_bytes: int) -> None:
        order = self._order
        assert order is not None
        while order.has_room and (completed := self._fetcher.take(hold=True)) is not None:
            records: list[ReceivedRecord] = []
            reader = self._reader_of(completed)
            try:
                try:
                    reader.take(records, UNBOUNDED, order.room_bytes)
                finally:
                    if self._decode is not None:
                        self._decode_values(completed.cursor, records, 0)
            except HeadraceError as error:
                end = records[-1].offset + 1 if records else completed.first_offset
                order.put(replace(completed, next_offset=end), records, reader.taken_bytes)
                self._fetcher.stop(completed.cursor, error)
                continue
            if not reader.finished:
                # The rest when there is room for it again, however far the set was compressed.
                self._fetcher.put_back(replace(completed, first_offset=reader.next_offset))
                completed = replace(completed, next_offset=reader.next_offset)
            order.put(completed, records, reader.taken_bytes)
        self._moved += order.take(into, most, most_bytes)
        self._free()

    def _free(self) -> None:
        order = self._order
        assert order is not None
        freed, order.freed_bytes = order.freed_bytes, 0
        self._fetcher.free(freed)

    def _decode_values(self, cursor: Cursor, records: list[ReceivedRecord], first: int) -> None:
        """Values from `first` on through the decoder; the record that it fails at and those after it go."""
        decode = self._decode
        assert decode is not None
        for nth in range(first, len(records)):
            record = records[nth]
            try:
                record.value = decode(record.value)
            except Exception as error:
                del records[nth:]
                raise InvalidRecord(
                    f"{cursor} at offset {record.offset}: the decoder failed with {type(error).__name__}: {error}; "
                    "mend it, or seek past the record"
                ) from error

    def _take_unread(self, into: list[ReceivedRecord], most: int) -> None:
        rest = list(self.unread)
        taken = rest[: most - len(into)]
        into += taken
        cursors = self._fetcher.cursors
        self._moved += {
            cursor for record in taken if (cursor := cursors.get((record.topic, record.partition))) is not None
        }
        self._chunk = rest[len(taken) :]
        self.unread = iter(self._chunk)

    def first_unread(self) -> Offsets:
        """By partition, the lowest offset of the chunk that was not yielded yet."""
        first: Offsets = {}
        left = length_hint(self.unread)
        for record in self._chunk[len(self._chunk) - left :] if left else ():
            place = record.topic, record.partition
            first[place] = min(first.get(place, record.offset), record.offset)
        return first

    def _put_back(self) -> None:
        """What is open and was not handed out yet waits as a record set again."""
        completed = self._completed
        self._shut()
        if completed is not None and completed.counts and completed.cursor.position < completed.next_offset:
            self._fetcher.put_back(
                replace(completed, first_offset=max(completed.first_offset, completed.cursor.position))
            )

    def _shut(self) -> None:
        self._completed = self._reader = self._rows = self._damage = None

    def pause(self) -> None:
        """Some cursors are paused now."""
        if self._completed is not None and self._completed.cursor.paused:
            self._put_back()
        if self._order is not None:
            self._order.set_aside()
            self._free()

    def resume(self) -> None:
        if self._order is not None:
            self._order.bring_back()
            self._free()

    def drop(self, places: Iterable[TopicPartition]) -> None:
        """After a seek or a revoke: what is open or unread of these is not handed out any more."""
        gone = set(places)
        if self._completed is not None and not self._completed.counts:
            self._shut()
        rest = [record for record in self.unread if (record.topic, record.partition) not in gone]
        self._chunk, self.unread = rest, iter(rest)
        self._moved = [cursor for cursor in self._moved if cursor.place not in gone]
        if self._order is not None:
            # What no longer counts takes no room beside the others.
            self._order.bring_back()
        for place in gone - self._fetcher.cursors.keys():
            self._decoders.pop(place, None)
