"""A batch in another codec: the same records, offsets, times and producer, compressed anew and signed.

Works on bytes alone and releases the interpreter's lock for nearly all of its time, so that a thread can do it.
"""

from __future__ import annotations

from headrace.errors import BatchTooLarge
from headrace.records import batch, codecs
from headrace.records.batch import ATTRIBUTES_AT, CODEC_MASK, HEADER_BYTES, MAGIC, MAGIC_AT, MOST_BATCH_BYTES


def codec_of(view: memoryview) -> int | None:
    """The codec that a batch says it is in; None if it is no batch of this format."""
    if len(view) < HEADER_BYTES or view[MAGIC_AT] != MAGIC:
        return None
    return view[ATTRIBUTES_AT + 1] & CODEC_MASK


def recode(view: memoryview, codec: int, level: int | None = None) -> bytearray:
    """A producer's batch under this codec. CorruptBatch or InvalidRecord if it is not whole or holds too much."""
    header = batch.check_produced(view)
    unpacked = codecs.decompress(header.codec, view[HEADER_BYTES:])
    packed = codecs.compress(codec, unpacked, level)
    if HEADER_BYTES + len(packed) > MOST_BATCH_BYTES:
        raise BatchTooLarge(f"a batch of {HEADER_BYTES + len(packed)} bytes: the format ends at {MOST_BATCH_BYTES}")
    return batch.joined(header._replace(attributes=(header.attributes & ~CODEC_MASK) | codec), packed)
