"""Which partition a key belongs to, as every Kafka client has it.

The hash is the Java client's (MurmurHash2, 32 bits, seed 0x9747b28c, sign bit dropped), so that a key lands in the
same partition whichever way it came.
"""

from __future__ import annotations

import struct
from typing import Final

_SEED: Final = 0x9747B28C
_MULTIPLIER: Final = 0x5BD1E995
_SHIFT: Final = 24
_WORD: Final = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """The unsigned 32-bit hash of a key."""
    whole = len(key) & ~3
    digest = _SEED ^ len(key)
    for (word,) in struct.iter_unpack("<I", key[:whole]):
        word = word * _MULTIPLIER & _WORD
        word = (word ^ word >> _SHIFT) * _MULTIPLIER & _WORD
        digest = digest * _MULTIPLIER & _WORD ^ word
    if len(key) > whole:
        digest = (digest ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & _WORD
    digest = (digest ^ digest >> 13) * _MULTIPLIER & _WORD
    return digest ^ digest >> 15


def partition_for_key(key: bytes, partition_count: int) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partition_count
