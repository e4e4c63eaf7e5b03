"""GET /topics/{topic}/partitions/{partition}/records: records from an offset on, up to a count.

    offset     where to begin: a number, `earliest` (default), `latest`, or `@` and a time in ms: the first record that
               is not older
    count      most records in the answer (100); `max_bytes` bounds the bytes of their keys and values (1 MiB)
    wait_ms    how long to wait for the first record (0)
    format     `json` (default): records unpacked, text as text, other bytes as base64.
               `binary`: whole record batches as they are in the log, from the one that holds the offset

JSON answers `next_offset`, `high_watermark` and `start_offset` beside the records; binary has them as headers
X-Next-Offset, X-High-Watermark, X-Start-Offset. A record is in the answer even if it alone is larger than max_bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final

from headrace.errors import CorruptBatch, InvalidRecord, InvalidRequest, StorageFailed
from headrace.http.bodies import PARTITION_MAX
from headrace.http.exchange import Exchange
from headrace.http.message import BINARY, Response, json_response, whole_number
from headrace.http.produce import led_partition
from headrace.http.topics import known_topic
from headrace.partitions.partition import Partition
from headrace.ports.disk import FileSlice
from headrace.records import kernel
from headrace.records.batch import HEADER_BYTES, BatchHeader, batches, read_header
from headrace.records.record import Record
from headrace.storage import refusal
from headrace.storage.log import look_at
from headrace.storage.page_cache import are_warm

QUERY: Final = ("offset", "count", "max_bytes", "wait_ms", "format")
COUNT: Final = 100
COUNT_MAX: Final = 10_000
MAX_BYTES: Final = 1 << 20
JSON_MAX_BYTES: Final = 8 << 20
OFFSET_MAX: Final = (1 << 63) - 1


def handle(exchange: Exchange) -> Response | None:
    request = exchange.request
    format = request.query.get("format", "json")
    if format not in ("json", "binary"):
        raise InvalidRequest(f"query parameter format: {format[:40]!r} is neither json nor binary")
    most_bytes = JSON_MAX_BYTES if format == "json" else exchange.services.settings["fetch.max.bytes"]
    return PendingFetch(
        exchange,
        topic=request.parameters["topic"],
        partition=whole_number("the partition", request.parameters["partition"], 0, PARTITION_MAX),
        max_records=request.integer("count", COUNT, 1, COUNT_MAX),
        max_bytes=request.integer("max_bytes", min(MAX_BYTES, most_bytes), 1, most_bytes),
        binary=format == "binary",
    ).start()


class PendingFetch:
    """One fetch until its answer; waits as a fetch of the Kafka front end does."""

    def __init__(
        self, exchange: Exchange, *, topic: str, partition: int, max_records: int, max_bytes: int, binary: bool
    ) -> None:
        self.answered = False
        self._exchange = exchange
        self._topic = topic
        self._index = partition
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._binary = binary
        self._offset = 0

    def start(self) -> Response | None:
        services, request = self._exchange.services, self._exchange.request
        wait_ms = request.integer("wait_ms", 0, 0, services.settings["request.timeout.max.ms"])
        partition = self._partition()
        self._offset = _first_offset(partition, request.query.get("offset", "earliest"))
        if not wait_ms or _has_data(partition, self._offset):
            return self._collect()
        partition.wait_for_data(self)
        services.partitions.deadlines.add(services.clock.now() + wait_ms / 1000, self)
        return None

    def grew(self, count: int) -> None:
        self._go_on()

    def expire(self) -> None:
        self._go_on()

    def _go_on(self) -> None:
        self.answered = True
        self._exchange.run(lambda _: self._collect())

    def _partition(self) -> Partition:
        services = self._exchange.services
        return led_partition(services, known_topic(services, self._topic), self._index)

    def _collect(self, *, warm: bool = False) -> Response | None:
        """Answer with what there is, once it was checked and can be read without a wait for the disk."""
        self.answered = True
        exchange, disk = self._exchange, self._exchange.services.disk
        partition = self._partition()
        found = partition.read(self._offset, self._max_bytes, warm=warm)
        if found.unchecked is not None:

            def again() -> None:
                exchange.run(lambda _: self._collect(warm=True))

            if are_warm(disk, found.wanted, again):
                exchange.services.clock.call_soon(again)
            return None
        if are_warm(disk, found.slices, lambda: exchange.run(lambda _: self._answer(partition, found.slices))):
            return self._answer(partition, found.slices)
        return None

    def _answer(self, partition: Partition, slices: Sequence[FileSlice]) -> Response:
        with refusal.reading(partition.topic_partition):
            if self._binary:
                return self._answer_binary(partition, slices)
            records, next_offset = self._unpack(partition, slices)
        return json_response(
            {
                "topic": self._topic,
                "partition": self._index,
                "records": [shown_record(record) for record in records],
                "next_offset": next_offset,
                "high_watermark": partition.high_watermark,
                "start_offset": partition.start_offset,
            }
        )

    def _unpack(self, partition: Partition, slices: Sequence[FileSlice]) -> tuple[list[Record], int]:
        found: list[Record] = []
        found_bytes = 0
        next_offset = self._offset
        for header, view in batches(memoryview(_read(slices))):
            if header.next_offset <= self._offset:
                continue
            for record in () if header.is_control else _records(partition, header, view):
                if record.offset < self._offset:
                    continue
                size_bytes = len(record.key or b"") + len(record.value or b"")
                if found and (len(found) == self._max_records or found_bytes + size_bytes > self._max_bytes):
                    return found, found[-1].offset + 1
                found.append(record)
                found_bytes += size_bytes
            next_offset = header.next_offset
        return found, next_offset

    def _answer_binary(self, partition: Partition, slices: Sequence[FileSlice]) -> Response:
        whole, next_offset = _whole_batches(slices, self._offset, self._max_records)
        positions = (
            ("X-Next-Offset", str(next_offset)),
            ("X-High-Watermark", str(partition.high_watermark)),
            ("X-Start-Offset", str(partition.start_offset)),
        )
        return Response(200, BINARY, whole, positions)


def _has_data(partition: Partition, offset: int) -> bool:
    found = partition.read(offset, 1)
    return found.count > 0 or found.unchecked is not None


def _first_offset(partition: Partition, given: str) -> int:
    if given == "earliest":
        return partition.first_offset()
    if given == "latest":
        return partition.high_watermark
    if given.startswith("@"):
        at_ms = whole_number("the time in query parameter offset", given[1:], 0, OFFSET_MAX)
        found = partition.log.offset_for_time(at_ms)
        return partition.high_watermark if found is None else min(found.offset, partition.high_watermark)
    try:
        return whole_number("query parameter offset", given, 0, OFFSET_MAX)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}, earliest, latest or @ and a time in ms") from None


def _read(slices: Sequence[FileSlice]) -> bytes:
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


def _whole_batches(slices: Sequence[FileSlice], offset: int, max_records: int) -> tuple[list[FileSlice], int]:
    """The slices without a cut batch at the end, up to the batch that reaches the count; and the offset after them."""
    whole: list[FileSlice] = []
    found, next_offset = 0, offset
    for piece in slices:
        position, end = piece.position, piece.position + piece.count
        while end - position >= HEADER_BYTES and found < max_records:
            header = read_header(piece.part(position - piece.position, HEADER_BYTES).read())
            if header.size_bytes > end - position:
                break
            position += header.size_bytes
            found += header.last_offset - max(offset, header.base_offset) + 1
            next_offset = header.next_offset
        if position > piece.position:
            whole.append(piece.part(0, position - piece.position))
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
