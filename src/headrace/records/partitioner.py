"""Which partition a key belongs to, as every Kafka client has it.

The hash is the Java client's (MurmurHash2, 32 bits, seed 0x9747b28c, sign bit dropped), so that a key lands in the
same partition whichever way it came. Kernels that are compiled have it, inlined, from `partitioner.pxd`; a test
compares the two line by line.
"""

from __future__ import annotations

from typing import Any, Final

SEED: Final = 0x9747B28C
FACTOR: Final = 0x5BD1E995
HALF_WORD: Final = 0xFFFFFFFF


def little_endian(data: Any, pos: int, size: int) -> int:
    """Up to four bytes as a number."""
    return int.from_bytes(data[pos : pos + size], "little")


def murmur2(data: Any, pos: int, length: int) -> int:
    """The unsigned 32-bit hash of a key that lies in `data`."""
    hashed = SEED ^ length
    while length >= 4:
        part = little_endian(data, pos, 4) * FACTOR & HALF_WORD
        part = (part ^ part >> 24) * FACTOR & HALF_WORD
        hashed = (hashed * FACTOR & HALF_WORD) ^ part
        pos += 4
        length -= 4
    if length > 0:
        hashed = (hashed ^ little_endian(data, pos, length)) * FACTOR & HALF_WORD
    hashed = (hashed ^ hashed >> 13) * FACTOR & HALF_WORD
    return hashed ^ hashed >> 15


def partition_for_key(key: bytes, partition_count: int) -> int:
    return (murmur2(key, 0, len(key)) & 0x7FFFFFFF) % partition_count
