"""GET /topics/{topic}/partitions/{partition}/records: records from an offset on, up to a count.

    offset     where to begin: a number, `earliest` (default), `latest`, or `@` and seconds since 1970 (13 digits:
               ms): the first record that is not older
    group      begin where this group has committed to, instead of `offset`; where it has not, or the log does not reach
               there any more, at the end that `reset` says: `earliest` (default) or `latest`
    count      most records in the answer (100); `max_bytes` bounds the bytes of their keys and values (1 MiB)
    wait_ms    how long to wait for the first record (0)
    isolation  `committed` (default): no records of transactions that are open or were aborted, and nothing behind the
               first open one; `uncommitted`: all up to the high watermark
    format     `json` (default): records unpacked, text as text, other bytes as base64.
               `binary`: whole record batches as they are in the log, from the one that holds the offset

JSON answers `next_offset`, `high_watermark`, `last_stable_offset` and `start_offset` beside the records; binary has
them as headers X-Next-Offset, X-High-Watermark, X-Last-Stable-Offset, X-Start-Offset. A record is in the answer even if
it alone is larger than max_bytes.
To read on as a group, commit `next_offset` (http.groups): reading alone commits nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from headrace.errors import CorruptBatch, InvalidRecord, InvalidRequest, OffsetOutOfRange, StorageFailed
from headrace.http.description import (
    BASE64,
    OFFSET,
    PARTITION,
    TEXT,
    Answer,
    Operation,
    Parameter,
    choice,
    closed,
    list_of,
    nullable,
    number,
)
from headrace.http.exchange import Exchange
from headrace.http.groups import committed_offset
from headrace.http.message import BINARY, JSON, OFFSET_MAX, PARTITION_MAX, Response, json_response, whole_number
from headrace.http.produce import led_partition
from headrace.http.services import HttpServices
from headrace.http.topics import known_topic
from headrace.partitions.partition import Partition
from headrace.ports.disk import FileSlice
from headrace.records import kernel
from headrace.records.batch import HEADER_BYTES, BatchHeader, batches, read_header
from headrace.records.isolation import Aborted, AbortedFilter
from headrace.records.record import Record
from headrace.settings.quantities import parse_epoch_ms
from headrace.storage import refusal
from headrace.storage.log import ReadResult, look_at
from headrace.storage.page_cache import are_warm

COUNT: Final = 100
COUNT_MAX: Final = 10_000
FORMATS: Final = ("json", "binary")
RESETS: Final = ("earliest", "latest")
ISOLATIONS: Final = ("committed", "uncommitted")
MAX_BYTES: Final = 1 << 20
JSON_MAX_BYTES: Final = 8 << 20

_BYTES_OR_NULL: Final = nullable(TEXT)
_HEADER: Final = closed({"key": TEXT}, {"value": _BYTES_OR_NULL, "value_base64": BASE64}, title="Header")
RECORD_FIELDS: Final = {"offset": OFFSET, "timestamp": number()}
RECORD_BYTES: Final = {
    "key": _BYTES_OR_NULL,
    "key_base64": BASE64,
    "value": _BYTES_OR_NULL,
    "value_base64": BASE64,
    "headers": list_of(_HEADER),
}
_RECORDS: Final = closed(
    {
        "topic": TEXT,
        "partition": PARTITION,
        "records": list_of(closed(RECORD_FIELDS, RECORD_BYTES, title="Record")),
        "next_offset": OFFSET,
        "high_watermark": OFFSET,
        "last_stable_offset": nullable(OFFSET),
        "start_offset": OFFSET,
    },
    title="Records",
)
FROM: Final = (
    Parameter(
        "offset",
        "Where to begin: a number, earliest, latest, or @ and seconds since 1970; 13 digits are ms.",
        {"type": "string", "pattern": "^(earliest|latest|[0-9]{1,18}|@[0-9]{1,11}|@[0-9]{13})$"},
    ),
    Parameter(
        "group", "Begin where this group has committed to.", {"type": "string", "minLength": 1, "maxLength": 255}
    ),
    Parameter("reset", "Where a group begins that has no offset there.", choice(*RESETS)),
)
ISOLATION: Final = Parameter(
    "isolation", "Whether to leave out what transactions have not committed.", choice(*ISOLATIONS)
)
BOUNDS: Final = (
    Parameter("count", f"Most records in the answer ({COUNT}).", number(1, COUNT_MAX)),
    Parameter("max_bytes", f"Most bytes of keys and values ({MAX_BYTES}).", number(1)),
    Parameter("wait_ms", "How long to wait for the first record (0).", number(0)),
    ISOLATION,
)
FETCH: Final = Operation(
    "Records of one partition, from an offset on",
    {
        200: Answer(
            "Records, or whole batches as they are in the log.",
            {JSON: _RECORDS, BINARY: {"type": "string", "format": "binary"}},
            dict.fromkeys(("X-Next-Offset", "X-High-Watermark", "X-Start-Offset"), TEXT),
        )
    },
    (*FROM, *BOUNDS, Parameter("format", "Records as JSON, or batches as bytes.", choice(*FORMATS))),
    errors=(404, 416, 422, 503),
)


def handle(exchange: Exchange) -> Response | None:
    request = exchange.request
    format = request.query.get("format", "json")
    if format not in FORMATS:
        raise InvalidRequest(f"query parameter format: {format[:40]!r} is neither json nor binary")
    most_bytes = JSON_MAX_BYTES if format == "json" else exchange.services.settings["fetch.max.bytes"]
    return PendingFetch(
        exchange,
        topic=request.parameters["topic"],
        partition=whole_number("the partition", request.parameters["partition"], 0, PARTITION_MAX),
        max_records=request.integer("count", COUNT, 1, COUNT_MAX),
        max_bytes=request.integer("max_bytes", min(MAX_BYTES, most_bytes), 1, most_bytes),
        binary=format == "binary",
        committed=reads_committed(request.query),
    ).start()


def reads_committed(query: Mapping[str, str]) -> bool:
    isolation = query.get("isolation", "committed")
    if isolation not in ISOLATIONS:
        raise InvalidRequest(f"query parameter isolation: {isolation[:40]!r} is neither committed nor uncommitted")
    return isolation == "committed"


class PendingFetch:
    """One fetch until its answer; waits as a fetch of the Kafka front end does."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        topic: str,
        partition: int,
        max_records: int,
        max_bytes: int,
        binary: bool,
        committed: bool,
    ) -> None:
        self.answered = False
        self._exchange = exchange
        self._topic = topic
        self._index = partition
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._binary = binary
        self._committed = committed
        self._offset = 0

    def start(self) -> Response | None:
        services, request = self._exchange.services, self._exchange.request
        wait_ms = request.integer("wait_ms", 0, 0, services.settings["request.timeout.max.ms"])
        partition = self._partition()
        check_start(request.query)
        self._offset = first_offset(services, partition, request.query)
        if not wait_ms or has_data(partition, self._offset, self._committed):
            return self._collect()
        partition.wait_for_data(self, committed=self._committed)
        services.partitions.deadlines.add(services.clock.now() + wait_ms / 1000, self)
        return None

    def grew(self, count: int) -> None:
        if count:
            self._go_on()

    def expire(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        self.answered = True
        self._exchange.run(lambda _: self._collect())

    def _partition(self) -> Partition:
        services = self._exchange.services
        return led_partition(services, known_topic(services, self._topic), self._index)

    def _collect(self) -> Response | None:
        self.answered = True
        reading = BatchRead(
            self._exchange, self._partition, self._offset, self._max_bytes, self._answer, committed=self._committed
        )
        return reading.collect()

    def _answer(self, partition: Partition, slices: Sequence[FileSlice], aborted: AbortedFilter) -> Response:
        with refusal.reading(partition.topic_partition):
            if self._binary:
                return self._answer_binary(partition, slices, aborted)
            records, next_offset, _ = unpack(
                partition, slices, aborted, self._offset, self._max_records, self._max_bytes
            )
        return json_response(
            {
                "topic": self._topic,
                "partition": self._index,
                "records": [shown_record(record) for record in records],
                "next_offset": next_offset,
                "high_watermark": partition.high_watermark,
                "last_stable_offset": partition.stable_offset_or_none(),
                "start_offset": partition.start_offset,
            }
        )

    def _answer_binary(self, partition: Partition, slices: Sequence[FileSlice], aborted: AbortedFilter) -> Response:
        whole, next_offset = _whole_batches(slices, aborted, self._offset, self._max_records)
        partition.traffic.records_out += next_offset - self._offset
        partition.traffic.bytes_out += sum(piece.count for piece in whole)
        stable = partition.stable_offset_or_none()
        positions = (
            ("X-Next-Offset", str(next_offset)),
            ("X-High-Watermark", str(partition.high_watermark)),
            *(() if stable is None else (("X-Last-Stable-Offset", str(stable)),)),
            ("X-Start-Offset", str(partition.start_offset)),
        )
        return Response(200, BINARY, whole, positions)


class BatchRead:
    """What a partition has from an offset on, handed to `done` once it was checked and can be read without a wait for
    the disk, with what tells batches of aborted transactions. `find` is asked again after each wait: the partition may
    be led elsewhere by then.
    """

    def __init__(
        self,
        exchange: Exchange,
        find: Callable[[], Partition],
        offset: int,
        max_bytes: int,
        done: Callable[[Partition, Sequence[FileSlice], AbortedFilter], Response | None],
        *,
        committed: bool,
    ) -> None:
        self._exchange = exchange
        self._find = find
        self._offset = offset
        self._max_bytes = max_bytes
        self._done = done
        self._committed = committed

    def collect(self, *, warm: bool = False) -> Response | None:
        """What `done` answers, if nothing has to be waited for; else it is run by the exchange later."""
        exchange, disk = self._exchange, self._exchange.services.disk
        partition = self._find()
        found, aborted = _read(partition, self._offset, self._max_bytes, self._committed, warm=warm)
        if found.unchecked is not None:

            def again() -> None:
                exchange.run(lambda _: self.collect(warm=True))

            if are_warm(disk, found.wanted, again):
                exchange.services.clock.call_soon(again)
            return None

        def done() -> Response | None:
            return self._done(partition, found.slices, AbortedFilter(aborted))

        if are_warm(disk, found.slices, lambda: exchange.run(lambda _: done())):
            return done()
        return None


def _read(
    partition: Partition, offset: int, max_bytes: int, committed: bool, *, warm: bool = False
) -> tuple[ReadResult, Sequence[Aborted]]:
    if committed:
        return partition.read_committed(offset, max_bytes, warm=warm)
    return partition.read(offset, max_bytes, warm=warm), ()


def unpack(
    partition: Partition,
    slices: Sequence[FileSlice],
    aborted: AbortedFilter,
    offset: int,
    max_records: int,
    max_bytes: int,
) -> tuple[list[Record], int, int]:
    """The records from the offset on, at least one if there is one, the offset to go on with, and the bytes of their
    keys and values; counted as sent.
    """
    found: list[Record] = []
    found_bytes = 0
    next_offset = offset
    for header, view in batches(memoryview(_bytes_of(slices))):
        hidden = aborted.hides(header) or header.is_control
        if header.next_offset <= offset:
            continue
        for record in () if hidden else _records(partition, header, view):
            if record.offset < offset:
                continue
            size_bytes = len(record.key or b"") + len(record.value or b"")
            if found and (len(found) == max_records or found_bytes + size_bytes > max_bytes):
                return _counted(partition, found, found[-1].offset + 1, found_bytes)
            found.append(record)
            found_bytes += size_bytes
        next_offset = header.next_offset
    return _counted(partition, found, next_offset, found_bytes)


def _counted(
    partition: Partition, found: list[Record], next_offset: int, found_bytes: int
) -> tuple[list[Record], int, int]:
    partition.traffic.records_out += len(found)
    partition.traffic.bytes_out += found_bytes
    return found, next_offset, found_bytes


def has_data(partition: Partition, offset: int, committed: bool) -> bool:
    found, _ = _read(partition, offset, 1, committed)
    return found.count > 0 or found.unchecked is not None


def check_start(query: Mapping[str, str]) -> None:
    """Refuse a beginning that makes no sense in any partition."""
    reset = query.get("reset", "earliest")
    if reset not in RESETS:
        raise InvalidRequest(f"query parameter reset: {reset[:40]!r} is neither earliest nor latest")
    if "group" not in query and "reset" in query:
        raise InvalidRequest("query parameter reset is for reading as a group: give group too")
    if "group" in query and "offset" in query:
        raise InvalidRequest("give group or offset: a group begins where it has committed to")
    _number_of(query.get("offset", "earliest"))


def first_offset(services: HttpServices, partition: Partition, query: Mapping[str, str]) -> int:
    """Where a query that was checked says to begin in this partition."""
    group = query.get("group")
    if group is None:
        return _named_offset(partition, query, "offset")
    committed = committed_offset(services, group, *partition.topic_partition)
    if committed is not None:
        with suppress(OffsetOutOfRange):
            partition.read(committed, 1)
            return committed
    return _named_offset(partition, query, "reset")


def _named_offset(partition: Partition, query: Mapping[str, str], parameter: str) -> int:
    given = query.get(parameter, "earliest")
    if given == "earliest":
        return partition.first_offset()
    if given == "latest" or given.startswith("@"):
        end = partition.last_stable_offset if reads_committed(query) else partition.high_watermark
        found = partition.log.offset_for_time(_number_of(given)) if given != "latest" else None
        return end if found is None else min(found.offset, end)
    return _number_of(given)


def _number_of(given: str) -> int:
    """The offset or the time in it; 0 for an end that has a name."""
    if given in RESETS:
        return 0
    if given.startswith("@"):
        try:
            return parse_epoch_ms(given[1:])
        except ValueError as error:
            raise InvalidRequest(f"the time in query parameter offset: {error}") from None
    try:
        return whole_number("query parameter offset", given, 0, OFFSET_MAX)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}, earliest, latest or @ and seconds since 1970") from None


def _bytes_of(slices: Sequence[FileSlice]) -> bytes:
    return b"".join([piece.read() for piece in slices])


def _records(partition: Partition, header: BatchHeader, view: memoryview) -> list[Record]:
    try:
        return kernel.records(view)
    except CorruptBatch as error:
        look_at(partition.log, header.base_offset)
        raise StorageFailed(f"{partition.topic_partition} is damaged at offset {header.base_offset}: {error}") from None
    except InvalidRecord as error:
        raise InvalidRecord(
            f"{partition.topic_partition}: {error}; go on at offset {header.next_offset}, or use format=binary"
        ) from None


def _whole_batches(
    slices: Sequence[FileSlice], aborted: AbortedFilter, offset: int, max_records: int
) -> tuple[list[FileSlice], int]:
    """The slices without a cut batch at the end and without aborted ones, up to the batch that reaches the count; and
    the offset after them."""
    whole: list[FileSlice] = []
    found, next_offset = 0, offset
    for piece in slices:
        begin, at = 0, 0
        while piece.count - at >= HEADER_BYTES and found < max_records:
            header = read_header(piece.part(at, HEADER_BYTES).read())
            if header.size_bytes > piece.count - at:
                break
            if aborted.hides(header):
                if at > begin:
                    whole.append(piece.part(begin, at - begin))
                begin = at + header.size_bytes
            else:
                found += header.last_offset - max(offset, header.base_offset) + 1
            at += header.size_bytes
            next_offset = header.next_offset
        if at > begin:
            whole.append(piece.part(begin, at - begin))
    return whole, next_offset


def shown_record(record: Record) -> dict[str, Any]:
    shown: dict[str, Any] = {"offset": record.offset, "timestamp": record.timestamp_ms}
    shown |= _shown_bytes("key", record.key)
    shown |= _shown_bytes("value", record.value)
    if record.headers:
        shown["headers"] = [{"key": name, **_shown_bytes("value", value)} for name, value in record.headers]
    return shown


def _shown_bytes(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
