"""Handles of records that were received over HTTP: what one needs to acknowledge a record, at whatever broker leads its
partition then, as opaque text.

    base64url of: version 1 byte, topic id 16, partition uint32, offset uint64, secret 16, CRC-32C uint32

The lock of a record is that of a member of the group, whose name is made of the secret: it is drawn anew for each
receive, and nobody else knows it. So a handle whose lock has run out does not touch the next delivery of its record,
and one that was made up touches nothing. The checksum has the group in it: a handle of another group is told as such.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from headrace.errors import InvalidRequest
from headrace.queues.messages import TopicIdPartition

VERSION: Final = 1
SECRET_BYTES: Final = 16
_BODY: Final = struct.Struct(f">B16sIQ{SECRET_BYTES}s")
_CHECKSUM: Final = struct.Struct(">I")
HANDLE_CHARACTERS: Final = (_BODY.size + _CHECKSUM.size + 2) // 3 * 4
SHOWN_CHARACTERS: Final = 80


class Handle(NamedTuple):
    topic_id: bytes
    partition: int
    offset: int
    secret: bytes

    @property
    def place(self) -> TopicIdPartition:
        return self.topic_id, self.partition

    @property
    def member(self) -> str:
        return member_of(self.secret)

    def text(self, group: str) -> str:
        body = _BODY.pack(VERSION, *self)
        return base64.urlsafe_b64encode(body + _CHECKSUM.pack(_checksum(group, body))).decode().rstrip("=")


def member_of(secret: bytes) -> str:
    """The member that has acquired what was received under this secret."""
    return "http-" + base64.urlsafe_b64encode(secret).decode().rstrip("=")


def parse(group: str, text: str) -> Handle:
    """InvalidRequest for what is no handle, or none of this group."""
    try:
        # Written differently, it would be another text for the same bytes.
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body, (checksum,) = raw[: _BODY.size], _CHECKSUM.unpack(raw[_BODY.size :])
        version, *fields = _BODY.unpack(body)
    except (binascii.Error, ValueError, struct.error):
        raise InvalidRequest(f"{text[:SHOWN_CHARACTERS]!r} is no handle of a record") from None
    if version != VERSION or checksum != _checksum(group, body):
        raise InvalidRequest(f"{text[:SHOWN_CHARACTERS]!r} is no handle that group {group!r} was given")
    return Handle(*fields)


def _checksum(group: str, body: bytes) -> int:
    return int(crc32c(body, crc32c(group.encode())))
