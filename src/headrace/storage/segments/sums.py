"""The `.sum` file of a compacted segment: CRC-32C of its whole `.log`, its size, and the offset after its range.

Compaction leaves gaps, so a wrong base offset cannot be told by its neighbours; this sum covers the bytes that no
batch's own CRC does. 28 bytes, big-endian: version uint32, CRC uint32, size uint64, next offset uint64, CRC of the
above uint32.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from headrace.ports.disk import Disk, File, read_whole

VERSION: Final = 1
CHUNK_BYTES: Final = 1 << 20

_BODY = struct.Struct(">IIQQ")


@dataclass(frozen=True, slots=True)
class Sum:
    crc: int
    size: int
    next_offset: int


def encode(found: Sum) -> bytes:
    body = _BODY.pack(VERSION, found.crc, found.size, found.next_offset)
    return body + crc32c(body).to_bytes(4, "big")


def read(disk: Disk, path: str) -> Sum | None:
    """None if it is not whole."""
    data = read_whole(disk, path)
    if len(data) != _BODY.size + 4 or crc32c(data[:-4]) != int.from_bytes(data[-4:], "big"):
        return None
    version, crc, size, next_offset = _BODY.unpack_from(data)
    return Sum(crc, size, next_offset) if version == VERSION else None


def of_file(file: File, size: int) -> int:
    crc, position = 0, 0
    while position < size:
        chunk = file.pread(min(CHUNK_BYTES, size - position), position)
        if not chunk:
            break
        crc = crc32c(chunk, crc)
        position += len(chunk)
    return crc
