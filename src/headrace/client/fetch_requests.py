"""Fetch and ListOffsets requests, as the consumer and the blocking readers make them, and what their answers hold.

How far a fetched record set reaches is found from the lengths of its batches; no record is looked at.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from headrace.client.connection.stream import RESPONSE_MAX_BYTES
from headrace.client.errors import Refusal
from headrace.errors import CorruptBatch, ErrorCode, ErrorMapping, InvalidRecord
from headrace.records.batch import HEADER_BYTES, LENGTH_END, check, read_header
from headrace.records.isolation import Isolation
from headrace.wire.message import Message

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
"""Moments that are no times in ms, as ListOffsets has them."""
MOMENTS: Final = {"earliest": EARLIEST, "latest": LATEST}

MAX_BYTES: Final = 50 << 20
PARTITION_MAX_BYTES: Final = 1 << 20
MOST_SET_BYTES: Final = RESPONSE_MAX_BYTES // 2

_CONSUMER: Final = -1
_NO_SESSION: Final = 0
_NO_SESSION_EPOCH: Final = -1
_LENGTH: Final = struct.Struct(">i")
_LENGTH_AT: Final = 8
_LEAST_LENGTH: Final = HEADER_BYTES - LENGTH_END


class CorruptLog(Refusal):
    """The leader's own copy is damaged: asking again would read the same bytes."""

    def __init__(self, code: int, about: str) -> None:
        super().__init__(code, about)
        self.mapping = ErrorMapping(code, 502, False)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """How long a broker may wait for so many bytes, and how many it may send."""

    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = MAX_BYTES
    partition_max_bytes: int = PARTITION_MAX_BYTES
    isolation: Isolation = Isolation.UNCOMMITTED


class FetchChanges(NamedTuple):
    """What a Fetch says of its session: by topic the partitions that it adds or changes, and those that it forgets."""

    session_id: int
    epoch: int
    topics: list[Message]
    forgotten: list[Message]


def by_topic(named: Iterable[tuple[str, bytes, Any]]) -> list[Message]:
    """Of topic, topic id and what is said of a partition."""
    topics: dict[str, Message] = {}
    for name, topic_id, partition in named:
        topic = topics.get(name)
        if topic is None:
            topic = topics[name] = Message(topic=name, topic_id=topic_id, partitions=[])
        topic.partitions.append(partition)
    return list(topics.values())


def fetch_request(wanted: Iterable[tuple[str, bytes, Message]], limits: FetchLimits) -> Message:
    """Of topic, topic id and what is asked of a partition: no session, each request names all that it asks for."""
    changes = FetchChanges(_NO_SESSION, _NO_SESSION_EPOCH, by_topic(wanted), [])
    most_bytes = max((each.partition_max_bytes for topic in changes.topics for each in topic.partitions), default=0)
    return session_request(changes, limits, most_bytes)


def session_request(changes: FetchChanges, limits: FetchLimits, most_bytes: int, rack: str = "") -> Message:
    """The whole answer may be as large as that of any one partition, `most_bytes`."""
    return Message(
        replica_id=_CONSUMER,
        max_wait_ms=limits.max_wait_ms,
        min_bytes=limits.min_bytes,
        max_bytes=max(limits.max_bytes, most_bytes),
        isolation_level=limits.isolation,
        session_id=changes.session_id,
        session_epoch=changes.epoch,
        rack_id=rack,
        topics=changes.topics,
        forgotten_topics_data=changes.forgotten,
    )


def fetch_refusal(code: int, where: str) -> Refusal:
    """Why a partition was not read."""
    return (CorruptLog if code == ErrorCode.CORRUPT_MESSAGE else Refusal)(code, where)


def offsets_request(
    moments: Mapping[tuple[str, int], int], timeout_ms: int, isolation: Isolation = Isolation.UNCOMMITTED
) -> Message:
    """ListOffsets: by topic and partition a time in ms, EARLIEST, LATEST or MAX_TIMESTAMP.

    LATEST is the high watermark, for a reader of committed records the last stable offset.
    """
    topics: dict[str, list[Message]] = {}
    for (topic, partition), moment in moments.items():
        topics.setdefault(topic, []).append(Message(partition_index=partition, timestamp=moment))
    return Message(
        replica_id=_CONSUMER,
        isolation_level=isolation,
        topics=[Message(name=name, partitions=partitions) for name, partitions in topics.items()],
        timeout_ms=timeout_ms,
    )


def larger(size: int, cut_bytes: int, where: str) -> int:
    """How much to ask for of a partition, so that the batch which did not fit does."""
    if size >= MOST_SET_BYTES:
        raise CorruptBatch(f"{where}: a batch of {cut_bytes} bytes, more than {MOST_SET_BYTES}")
    return min(max(2 * size, cut_bytes), MOST_SET_BYTES)


class Extent(NamedTuple):
    """`next_offset` is that after the last whole batch, or the one asked for if there is none."""

    next_offset: int
    whole_bytes: int
    cut_bytes: int
    """Of a batch that is cut, its whole size where the set tells it; 0 if the last batch is whole."""
    leader_epoch: int
    """Of the last whole batch; -1 if there is none."""


def extent(view: memoryview, at: int, where: str) -> Extent:
    """What whole batches of a record set that was asked for from offset `at` on hold.

    CorruptBatch or InvalidRecord, naming the place, if its first batch cannot be told from the next, or if the last one
    ends before `at`. A later batch that is malformed ends the set: it is the first one when it is asked for again.
    """
    pos, last, size = 0, -1, len(view)
    length = 0
    unpack = _LENGTH.unpack_from
    while size - pos >= HEADER_BYTES:
        (length,) = unpack(view, pos + _LENGTH_AT)
        if length < _LEAST_LENGTH or length + LENGTH_END > size - pos:
            break
        last, pos = pos, pos + length + LENGTH_END
    cut_bytes = length + LENGTH_END if size - pos >= HEADER_BYTES else size - pos
    if last < 0:
        if size - pos >= HEADER_BYTES and length < _LEAST_LENGTH:
            raise CorruptBatch(f"{where} at offset {at} or after: a batch gives its length as {length}")
        return Extent(at, 0, cut_bytes, -1)
    try:
        header = read_header(view, last)
        if header.next_offset <= at:
            check(view, last)
    except (CorruptBatch, InvalidRecord) as error:
        raise type(error)(f"{where} at offset {at} or after: {error}") from None
    if header.next_offset <= at:
        raise CorruptBatch(
            f"{where} at offset {at}: the last batch of the answer ends before, at {header.next_offset - 1}"
        )
    return Extent(header.next_offset, pos, cut_bytes, header.leader_epoch)
