"""Produce requests: which batches go into one, and what its answer says of each.

A request, as written here for versions 3 to 13 (compact lengths and tagged fields from 9, topic ids in 13):

    transactional id, acks int16, timeout int32, topics [name or id, partitions [index int32, records]]

Batches are never joined with the rest of it: they leave as parts of one vectored write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from headrace.client.connection.broker_connection import HEAD, make
from headrace.client.connection.metadata import Metadata
from headrace.client.producer.accumulator import PartitionBuffer, ProducerBatch
from headrace.client.producer.options import REQUEST_BYTES, TRANSACTION_TIMEOUT_MS
from headrace.ports.disk import Buffer
from headrace.wire import api as apis
from headrace.wire.codec import encode_response, write_response
from headrace.wire.message import ZERO_UUID, Message
from headrace.wire.varint import write_uvarint

_NUMBERS: Final = struct.Struct(">qqq")
_STAND_INS: Final = (0x6261_7365_5F6F_6666, 0x6170_7065_6E64_5F74, 0x6C6F_675F_7374_6172)
_ID_AT: Final = 4
_HEAD_AT: Final = 8
_TOPIC_IDS_FROM: Final = 13
_int32 = struct.Struct(">i").pack


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One record batch, complete and signed, for one partition."""

    topic: str
    partition: int
    batch: Buffer


def encode_parts(
    version: int,
    outgoing: Sequence[Outgoing],
    topic_ids: Mapping[str, bytes],
    *,
    acks: int,
    timeout_ms: int,
    transactional_id: str | None = None,
) -> list[Buffer]:
    """The body of a Produce request, its batches as parts of their own."""
    topics: dict[str, list[Outgoing]] = {}
    for each in outgoing:
        topics.setdefault(each.topic, []).append(each)
    flexible = version >= apis.KAFKA_APIS[apis.PRODUCE].flexible_from
    writer = _BodyWriter(flexible)
    if transactional_id is None:
        writer.head += b"\0" if flexible else b"\xff\xff"
    else:
        writer.string(transactional_id)
    writer.head += struct.pack(">hi", acks, timeout_ms)
    writer.count(len(topics))
    for name, batches in topics.items():
        if version >= _TOPIC_IDS_FROM:
            writer.head += topic_ids[name]
        else:
            writer.string(name)
        writer.count(len(batches))
        for each in batches:
            writer.head += struct.pack(">i", each.partition)
            writer.buffer(each.batch)
            writer.tags()
        writer.tags()
    writer.tags()
    return writer.finish()


class _BodyWriter:
    """Small fields gather in `head`; a buffer becomes a part of its own between two heads."""

    def __init__(self, flexible: bool) -> None:
        self.head = bytearray()
        self._flexible = flexible
        self._parts: list[Buffer] = []

    def count(self, number: int) -> None:
        self.head += write_uvarint(number + 1) if self._flexible else struct.pack(">i", number)

    def string(self, text: str) -> None:
        encoded = text.encode()
        self.head += write_uvarint(len(encoded) + 1) if self._flexible else struct.pack(">h", len(encoded))
        self.head += encoded

    def buffer(self, buffer: Buffer) -> None:
        self.count(len(buffer))
        self._parts += (self.head, buffer)
        self.head = bytearray()

    def tags(self) -> None:
        if self._flexible:
            self.head += b"\0"

    def finish(self) -> list[Buffer]:
        return [*self._parts, self.head]


def answered_rows(answer: Message, names: Mapping[bytes, str]) -> dict[tuple[str, int], Message]:
    """An answer by topic and partition; `names` has the topics by id."""
    return {
        (topic.name or names.get(topic.topic_id, ""), partition.index): partition
        for topic in answer.responses
        for partition in topic.partition_responses
    }


def producer_id_request() -> Message:
    """InitProducerId outside of transactions."""
    return Message(transactional_id=None, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS)


class Acknowledged(NamedTuple):
    """What the answer for a batch says if nothing is wrong."""

    base_offset: int
    append_ms: int


class ProduceTemplate:
    """A lone batch's request, and the answer that says it was written, as far as they are the same each time.

    For one partition, in one version of the request; `topic_id` is None where it is not known. Both are made once by
    the codec. Of the answer all bytes are known before but the numbers in the middle:

        size, correlation id, [head: ... error code 0], base offset int64, append time int64, log start int64, [tail]

    An answer that is anything else (an error, a throttle time, another partition) is left to the codec.
    """

    __slots__ = (
        "_answer",
        "_answer_head",
        "_answer_size",
        "_answer_tail",
        "_before",
        "_flexible",
        "_head",
        "_size",
        "_tail",
        "key",
        "version",
    )

    def __init__(
        self,
        version: int,
        topic: str,
        topic_id: bytes | None,
        partition: int,
        acks: int,
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> None:
        self.key = (version, topic_id)
        self.version = version
        self._flexible = version >= apis.KAFKA_APIS[apis.PRODUCE].flexible_from
        ids = {} if topic_id is None else {topic: topic_id}
        nothing = [Outgoing(topic, partition, b"")]
        head, _, tail = encode_parts(
            version, nothing, ids, acks=acks, timeout_ms=timeout_ms, transactional_id=transactional_id
        )
        self._head = bytes(head)[: -1 if self._flexible else -4]
        self._tail = bytes(tail)
        self._size = -1
        self._before = b""
        offset, append_ms, start = _STAND_INS
        row = Message(
            index=partition, error_code=0, base_offset=offset, log_append_time_ms=append_ms, log_start_offset=start
        )
        answered = Message(name=topic, topic_id=topic_id or ZERO_UUID, partition_responses=[row])
        body = encode_response(apis.PRODUCE, version, Message(responses=[answered], throttle_time_ms=0))
        frame = write_response(apis.PRODUCE, version, 0, body)
        found = frame.find(_NUMBERS.pack(*_STAND_INS))
        at = found if found >= 0 else len(frame)
        self._answer_size = frame[:_ID_AT]
        self._answer_head = frame[_HEAD_AT:at]
        self._answer_tail = frame[at + _NUMBERS.size :]
        # An earlier version has fewer numbers, and the answer never this form.
        self._answer = struct.Struct(f">{_ID_AT}si{len(self._answer_head)}sqqq{len(self._answer_tail)}s")

    def parts(self, data: Buffer) -> tuple[bytes, Buffer, bytes]:
        """The request's body."""
        if len(data) != self._size:
            self._size = len(data)
            self._before = self._head + (write_uvarint(self._size + 1) if self._flexible else _int32(self._size))
        return (self._before, data, self._tail)

    def frame(self, head_end: bytes, correlation_id: int, data: Buffer) -> bytes:
        """The whole request; `head_end` is what comes between the correlation id and the body."""
        if len(data) != self._size:
            self.parts(data)
        before, after = self._before, self._tail
        size = HEAD.size - 4 + len(head_end) + len(before) + len(data) + len(after)
        return b"".join((HEAD.pack(size, apis.PRODUCE, self.version, correlation_id), head_end, before, data, after))

    def read(self, frame: bytes, correlation_id: int) -> Acknowledged | None:
        """What an answer, with its size, says if it says that the batch was written."""
        answer = self._answer
        if len(frame) != answer.size:
            return None
        size, found_id, head, offset, append_ms, _, tail = answer.unpack(frame)
        if found_id != correlation_id or size != self._answer_size:
            return None
        if head != self._answer_head or tail != self._answer_tail:
            return None
        return make(Acknowledged, (offset, append_ms))


class Attempt(NamedTuple):
    """One attempt at a batch."""

    buffer: PartitionBuffer
    pending: ProducerBatch
    number: int
    """Which one: an answer to an older one says nothing any more."""
    data: Buffer


@dataclass(slots=True)
class ProduceRequest:
    """For one broker and one acks: one batch of a partition, as brokers demand, and batches of others up to a size."""

    attempts: list[Attempt] = field(default_factory=list)
    size_bytes: int = 0
    names: dict[bytes, str] = field(default_factory=dict)
    """Topics by id, for answers that give only that."""
    template: ProduceTemplate | None = None
    """Of a lone batch."""

    def takes(self, size_bytes: int) -> bool:
        return not self.attempts or self.size_bytes + size_bytes <= REQUEST_BYTES

    def add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.size_bytes += len(attempt.data)

    def body(self, metadata: Metadata, acks: int, timeout_ms: int) -> Callable[[int], Sequence[Buffer]]:
        """Makes the parts for the version that is agreed when the request leaves."""
        ids = {}
        for each in self.attempts:
            topic = metadata.topic(each.buffer.topic)
            if topic is not None:
                ids[topic.name] = topic.topic_id
                self.names[topic.topic_id] = topic.name
        if len(self.attempts) == 1:
            return partial(self._lone_parts, ids, timeout_ms)
        outgoing = [Outgoing(each.buffer.topic, each.buffer.partition, each.data) for each in self.attempts]
        transactional_id = self.attempts[0].buffer.accumulator.options.transactional_id
        return partial(
            encode_parts,
            outgoing=outgoing,
            topic_ids=ids,
            acks=acks,
            timeout_ms=timeout_ms,
            transactional_id=transactional_id,
        )

    def _lone_parts(self, ids: dict[str, bytes], timeout_ms: int, version: int) -> Sequence[Buffer]:
        buffer, data = self.attempts[0].buffer, self.attempts[0].data
        self.template = template = template_of(buffer, version, ids.get(buffer.topic), timeout_ms)
        return template.parts(data)

    def read(self, frame: bytes, correlation_id: int) -> Acknowledged | None:
        """What the answer says, if it can be told without decoding it."""
        return None if self.template is None else self.template.read(frame, correlation_id)


def template_of(buffer: PartitionBuffer, version: int, topic_id: bytes | None, timeout_ms: int) -> ProduceTemplate:
    """Of the partition, which keeps the last one."""
    if buffer.template is None or buffer.template.key != (version, topic_id):
        accumulator = buffer.accumulator
        transactional_id = accumulator.options.transactional_id
        buffer.template = ProduceTemplate(
            version, buffer.topic, topic_id, buffer.partition, accumulator.acks, timeout_ms, transactional_id
        )
    return buffer.template


def add(requests: list[ProduceRequest], after: int, buffer: PartitionBuffer, pending: ProducerBatch) -> int:
    """Put a batch into the first request from place `after` on that has room; gives the place after it."""
    attempt = Attempt(buffer, pending, pending.attempt, pending.sign())
    while True:
        if after == len(requests):
            requests.append(ProduceRequest())
        if requests[after].takes(len(attempt.data)):
            requests[after].add(attempt)
            return after + 1
        after += 1
