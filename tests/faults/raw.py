"""Requests by hand, for peers that behave as no client does: they send without reading, or read without end.

Produce version 3 and Fetch version 4: all fields of fixed width, see the protocol guide.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from crc32c import crc32c

PRODUCE: Final = 0
FETCH: Final = 1
API_VERSIONS: Final = 18


def zigzag(number: int) -> bytes:
    """A number that is not negative, as a varint of the record format."""
    number <<= 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def record_batch(value: bytes) -> bytes:
    """A batch of one record without key."""
    record = b"\0\0\0" + b"\x01" + zigzag(len(value)) + value + b"\0"
    records = zigzag(len(record)) + record
    checked = struct.pack(">hiqqqhii", 0, 0, 1_700_000_000_000, 1_700_000_000_000, -1, -1, -1, 1) + records
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def frame(api: int, version: int, correlation: int, body: bytes) -> bytes:
    content = struct.pack(">hhi", api, version, correlation) + text("raw") + body
    return struct.pack(">i", len(content)) + content


def produce(topic: str, partition: int, batch: bytes, acks: int = 1, correlation: int = 1) -> bytes:
    partitions = struct.pack(">iii", 1, partition, len(batch)) + batch
    body = struct.pack(">hhii", -1, acks, 30_000, 1) + text(topic) + partitions
    return frame(PRODUCE, 3, correlation, body)


def fetch(topic: str, partition: int, offset: int, max_bytes: int, correlation: int = 1) -> bytes:
    head = struct.pack(">iiiibi", -1, 0, 1, max_bytes, 0, 1)
    body = head + text(topic) + struct.pack(">iiqi", 1, partition, offset, max_bytes)
    return frame(FETCH, 4, correlation, body)


def read_frame(connection: socket.socket) -> bytes:
    """The next whole frame without its length; b"" when the peer has closed."""
    head = read_exactly(connection, 4)
    return read_exactly(connection, struct.unpack(">i", head)[0]) if head else b""


def read_exactly(connection: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count:
        read = connection.recv(count - len(got))
        if not read:
            return b""
        got += read
    return bytes(got)


def produced(connection: socket.socket, topic: str, partition: int, value: bytes) -> int:
    """Send one record and wait; the error code of the answer."""
    connection.sendall(produce(topic, partition, record_batch(value), acks=-1))
    answer = read_frame(connection)
    at = 4 + 4 + 2 + len(topic) + 4 + 4
    code: int = struct.unpack_from(">h", answer, at)[0]
    return code


def answers(address: tuple[str, int], timeout_s: float = 30.0) -> bool:
    """A new connection gets an answer to ApiVersions: the broker serves others."""
    with socket.create_connection(address, timeout_s) as connection:
        connection.sendall(frame(API_VERSIONS, 0, 7, b""))
        return read_frame(connection)[:4] == struct.pack(">i", 7)
