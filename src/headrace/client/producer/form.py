"""A lone batch's request, and the answer that says it was written, as far as they are the same each time.

Both are made once by the codec. Of the answer all bytes are known before but the numbers in the middle:

    size, correlation id, [head: ... error code 0], base offset int64, append time int64, log start int64, [tail: ...]

An answer that is anything else (an error, a throttle time, another partition) is left to the codec.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace.client.admin.produce import Outgoing, encode_parts
from headrace.client.connection.frames import HEAD, make
from headrace.ports.disk import Buffer
from headrace.wire import api as apis
from headrace.wire.codec import encode_response
from headrace.wire.header import write_response
from headrace.wire.message import ZERO_UUID, Message
from headrace.wire.varint import write_uvarint

_NUMBERS: Final = struct.Struct(">qqq")
_STAND_INS: Final = (0x6261_7365_5F6F_6666, 0x6170_7065_6E64_5F74, 0x6C6F_675F_7374_6172)
_ID_AT: Final = 4
_HEAD_AT: Final = 8
_int32 = struct.Struct(">i").pack


class Acknowledged(NamedTuple):
    """What the answer for a batch says if nothing is wrong."""

    base_offset: int
    append_ms: int


class Form:
    """For one partition, in one version of the request; `topic_id` is None where it is not known."""

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
        self, version: int, topic: str, topic_id: bytes | None, partition: int, acks: int, timeout_ms: int
    ) -> None:
        self.key = (version, topic_id)
        self.version = version
        self._flexible = version >= apis.API[apis.PRODUCE].flexible_from
        ids = {} if topic_id is None else {topic: topic_id}
        nothing = [Outgoing(topic, partition, b"")]
        head, _, tail = encode_parts(version, nothing, ids, acks=acks, timeout_ms=timeout_ms)
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
