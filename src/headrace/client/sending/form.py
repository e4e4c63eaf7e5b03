"""A lone batch's request, and the answer that says it was written, as far as they are the same each time.

Both are made once by the codec. Of the answer all bytes are known before but the numbers in the middle:

    correlation id, [head: ... error code 0], base offset int64, append time int64, log start offset int64, [tail: ...]

An answer that is anything else (an error, a throttle time, another partition) is left to the codec.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from headrace.client.produce import Outgoing, encode_parts
from headrace.ports.disk import Buffer
from headrace.wire import api as apis
from headrace.wire.codec import encode_response
from headrace.wire.header import write_response
from headrace.wire.message import ZERO_UUID, Message
from headrace.wire.varint import write_uvarint

_NUMBERS: Final = struct.Struct(">qqq")
_STAND_INS: Final = (0x6261_7365_5F6F_6666, 0x6170_7065_6E64_5F74, 0x6C6F_675F_7374_6172)
_SIZE_BYTES: Final = 4
_ID_BYTES: Final = 4
_int32 = struct.Struct(">i").pack


class Acknowledged(NamedTuple):
    """What the answer for a batch says if nothing is wrong."""

    base_offset: int
    append_ms: int


class Form:
    """For one partition, in one version of the request; `topic_id` is None where it is not known."""

    __slots__ = (
        "_answer_bytes",
        "_answer_head",
        "_answer_tail",
        "_flexible",
        "_head",
        "_numbers_at",
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
        offset, append_ms, start = _STAND_INS
        row = Message(
            index=partition, error_code=0, base_offset=offset, log_append_time_ms=append_ms, log_start_offset=start
        )
        answered = Message(name=topic, topic_id=topic_id or ZERO_UUID, partition_responses=[row])
        body = encode_response(apis.PRODUCE, version, Message(responses=[answered], throttle_time_ms=0))
        frame = write_response(apis.PRODUCE, version, 0, body)[_SIZE_BYTES:]
        self._numbers_at = frame.find(_NUMBERS.pack(*_STAND_INS))
        self._answer_bytes = len(frame) if self._numbers_at >= 0 else -1
        self._answer_head = frame[_ID_BYTES : self._numbers_at]
        self._answer_tail = frame[self._numbers_at + _NUMBERS.size :]

    def parts(self, data: Buffer) -> tuple[bytes, Buffer, bytes]:
        """The request's body."""
        size = write_uvarint(len(data) + 1) if self._flexible else _int32(len(data))
        return (self._head + size, data, self._tail)

    def read(self, frame: memoryview) -> Acknowledged | None:
        """What an answer says if it says that the batch was written."""
        at = self._numbers_at
        if (
            len(frame) != self._answer_bytes
            or frame[_ID_BYTES:at] != self._answer_head
            or frame[at + _NUMBERS.size :] != self._answer_tail
        ):
            return None
        offset, append_ms, _ = _NUMBERS.unpack_from(frame, at)
        return Acknowledged(offset, append_ms)
