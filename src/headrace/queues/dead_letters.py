"""Dead letters: what is written of records that their share group has given up (KIP-1191). No I/O.

A letter is a record with these headers, all of them text, behind those of the record that it is of:

    __dlq.errors.topic             where that was
    __dlq.errors.partition
    __dlq.errors.offset
    __dlq.errors.group             who gave it up
    __dlq.errors.delivery.count    how often it was delivered
    __dlq.errors.message           why it was given up
    headrace.dlq.timestamp         the time of the record, in ms; Kafka has no name for it

The first six, and the words of the message, are Kafka's. Key, value and headers of the record are copied if its group
wants that, and Kafka copies no headers. The time of a letter is that of its writing. A record that is not in its log
any more, or cannot be read, has a letter of the first six headers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.queues.messages import Letter, Reason
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.records.codecs import Codec
from headrace.records.record import Header, NewRecord, Record

log = logging.getLogger(__name__)

TOPIC: Final = "__dlq.errors.topic"
PARTITION: Final = "__dlq.errors.partition"
OFFSET: Final = "__dlq.errors.offset"
GROUP: Final = "__dlq.errors.group"
DELIVERY_COUNT: Final = "__dlq.errors.delivery.count"
MESSAGE: Final = "__dlq.errors.message"
TIMESTAMP: Final = "headrace.dlq.timestamp"
NAMES: Final = frozenset({TOPIC, PARTITION, OFFSET, GROUP, DELIVERY_COUNT, MESSAGE, TIMESTAMP})

MESSAGES: Final = {
    Reason.REJECTED: "Offset rejected by client.",
    Reason.DELIVERIES: "Offset delivery count exceeded the threshold.",
}
RECORD_OVERHEAD_BYTES: Final = 48
"""More than what a record has beside key, value and headers."""


@dataclass(frozen=True, slots=True)
class LetterOrder:
    """Letters that are written as one batch: of these offsets, which were given up for one reason."""

    group: str
    topic: str
    partition: int
    first_offset: int
    last_offset: int
    delivery_count: int
    letter: Letter
    copies: bool
    now_ms: int
    most_bytes: int = 0
    """Leave out what would make it larger, except the first letter; 0: all of them are written."""


def build(source: bytes, order: LetterOrder) -> bytearray:
    """The batch, of which the offsets are `source`, whole batches of their log: in their codec if they are copied."""
    found, codec = _records(source, order)
    letters: list[NewRecord] = []
    size_bytes = 0
    for offset in range(order.first_offset, order.last_offset + 1):
        new = _letter(found.get(offset), offset, order)
        size_bytes += _size_bytes(new)
        if letters and order.most_bytes and size_bytes > order.most_bytes:
            break
        letters.append(new)
    return kernel.build(
        letters,
        codec if order.copies else Codec.NONE,
        producer_id=order.letter.producer_id,
        producer_epoch=0,
        base_sequence=order.letter.sequence,
    )


def _records(source: bytes, order: LetterOrder) -> tuple[dict[int, Record], int]:
    found: dict[int, Record] = {}
    codec = int(Codec.NONE)
    for header, view in batches(memoryview(source)):
        if header.is_control or header.last_offset < order.first_offset or header.base_offset > order.last_offset:
            continue
        codec = header.codec
        try:
            records = kernel.records(view)
        except (CorruptBatch, InvalidRecord) as error:
            where = f"{order.topic}-{order.partition}"
            log.warning("%s: dead letters from offset %d on have no copy: %s", where, header.base_offset, error)
            continue
        found.update({each.offset: each for each in records})
    return found, codec


def _letter(record: Record | None, offset: int, order: LetterOrder) -> NewRecord:
    headers: list[Header] = []
    if record is not None and order.copies:
        headers += [header for header in record.headers if header[0] not in NAMES]
    headers += (
        (TOPIC, order.topic.encode()),
        (PARTITION, b"%d" % order.partition),
        (OFFSET, b"%d" % offset),
        (GROUP, order.group.encode()),
        (DELIVERY_COUNT, b"%d" % order.delivery_count),
        (MESSAGE, MESSAGES[order.letter.reason].encode()),
    )
    if record is None:
        return order.now_ms, None, None, headers
    headers.append((TIMESTAMP, b"%d" % record.timestamp_ms))
    if not order.copies:
        return order.now_ms, None, None, headers
    return order.now_ms, record.key, record.value, headers


def _size_bytes(new: NewRecord) -> int:
    _, key, value, headers = new
    return RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"") + _headers_bytes(headers)


def _headers_bytes(headers: Sequence[Header]) -> int:
    return sum([len(name) + len(value or b"") + 8 for name, value in headers])
