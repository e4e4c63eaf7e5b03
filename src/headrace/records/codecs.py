"""Compression of a batch's records, as Kafka clients write and read it, with a bound on what may come out.

    0  none
    1  gzip     one member or several
    2  snappy   written in xerial blocks (what the Java client reads everywhere): 16 bytes of magic, version and
                compatible version, then blocks of an int32 size and raw snappy; raw snappy alone is read too
    3  lz4      one LZ4 frame of independent blocks
    4  zstd     one frame or several

A few bytes can claim to hold gigabytes, so every reader takes `max_bytes` and never allocates more than that.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Final

import cramjam
import lz4.frame

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records.batch import MAX_UNPACKED_BYTES

Data = bytes | bytearray | memoryview


class Codec(enum.IntEnum):
    """The low three bits of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def compress(codec: int, data: Data, level: int | None = None) -> Data:
    """`data` under `codec`, at a level as Kafka numbers them; None is the default of its clients or a faster one."""
    return _WRITERS[_known(codec)](data, level)


def decompress(codec: int, data: Data, max_bytes: int = MAX_UNPACKED_BYTES) -> Data:
    """What `data` unpacks to; InvalidRecord when that is more than `max_bytes`, CorruptBatch when it is damaged.

    Uncompressed data comes back as it is, not copied.
    """
    return _READERS[_known(codec)](data, max_bytes)


def _known(codec: int) -> Codec:
    try:
        return Codec(codec)
    except ValueError:
        raise InvalidRecord(f"compression codec {codec} does not exist: 0 to {max(Codec)} do") from None


def _too_large(codec: Codec, max_bytes: int) -> InvalidRecord:
    return InvalidRecord(
        f"{codec.name.lower()} records unpack to more than {max_bytes} bytes: let the producer send smaller batches"
    )


def _damaged(codec: Codec, reason: object) -> CorruptBatch:
    return CorruptBatch(f"{codec.name.lower()} records do not unpack: {reason}")


def _read_none(data: Data, max_bytes: int) -> Data:
    if len(data) > max_bytes:
        raise _too_large(Codec.NONE, max_bytes)
    return data


# -- gzip and zstd: the reader fills a buffer of ours, so the buffer is the bound

_LEAST_BUFFER_BYTES: Final = 64 << 10
_GROWTH: Final = 4
_OVERFULL: Final = "failed to write whole buffer"


def _read_into_buffer(
    codec: Codec, read_into: Callable[[Data, bytearray], int], data: Data, size_hint: int, max_bytes: int
) -> bytearray:
    """Try with the size that the data gives, then with larger buffers up to the bound."""
    size = min(size_hint or max(_LEAST_BUFFER_BYTES, _GROWTH * len(data)), max_bytes)
    while True:
        out = bytearray(size)
        try:
            del out[read_into(data, out) :]
        except cramjam.DecompressionError as error:
            if _OVERFULL not in str(error):
                raise _damaged(codec, error) from None
            if size >= max_bytes:
                raise _too_large(codec, max_bytes) from None
            size = min(max(size, _LEAST_BUFFER_BYTES) * _GROWTH, max_bytes)
        else:
            return out


def _read_gzip(data: Data, max_bytes: int) -> bytearray:
    # The last four bytes are the size of the last member, nearly always the only one.
    size_hint = int.from_bytes(data[-4:], "little")
    return _read_into_buffer(Codec.GZIP, cramjam.gzip.decompress_into, data, size_hint, max_bytes)


def _read_zstd(data: Data, max_bytes: int) -> bytearray:
    return _read_into_buffer(Codec.ZSTD, cramjam.zstd.decompress_into, data, _zstd_size(data), max_bytes)


_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def _zstd_size(data: Data) -> int:
    """The content size in a frame's header (RFC 8878, 3.1.1.1), or 0 if it has none."""
    if len(data) < 5 or data[:4] != _ZSTD_MAGIC:
        return 0
    descriptor = data[4]
    one_segment = descriptor >> 5 & 1
    width = (one_segment, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - one_segment) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(data[at : at + width], "little")
    return size + 256 if width == 2 else size


def _write_gzip(data: Data, level: int | None) -> bytes:
    return bytes(cramjam.gzip.compress(data, 6 if level is None or level < 0 else level))


def _write_zstd(data: Data, level: int | None) -> bytes:
    return bytes(cramjam.zstd.compress(data, 3 if level is None else level))


# -- lz4

_LZ4_MOST_EXPANSION: Final = 256


def _read_lz4(data: Data, max_bytes: int) -> bytes:
    # The reader allocates its limit at once, so a small input gets a small one.
    limit = min(max_bytes, _LZ4_MOST_EXPANSION * len(data)) + 1
    reader = lz4.frame.LZ4FrameDecompressor()
    try:
        out: bytes = reader.decompress(data, max_length=limit)
    except RuntimeError as error:
        raise _damaged(Codec.LZ4, error) from None
    if len(out) > max_bytes:
        raise _too_large(Codec.LZ4, max_bytes)
    if not reader.eof:
        raise _damaged(Codec.LZ4, "the frame is cut short")
    if reader.unused_data:
        raise _damaged(Codec.LZ4, "bytes follow the frame")
    return out


_LZ4_FAST_LEVEL: Final = 9
"""Kafka's default stands for the fast kind; every other level is one of the strong kind."""
_LZ4_STRONG_LEAST: Final = 3
_LZ4_STRONG_MOST: Final = 12


def _write_lz4(data: Data, level: int | None) -> bytes:
    strength = 0
    if level is not None and level != _LZ4_FAST_LEVEL:
        strength = max(_LZ4_STRONG_LEAST, min(level, _LZ4_STRONG_MOST))
    # The Java client reads independent blocks only.
    packed: bytes = lz4.frame.compress(data, compression_level=strength, block_linked=False, store_size=False)
    return packed


# -- snappy

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = struct.Struct(">8sii")
_XERIAL_VERSION: Final = 1
_XERIAL_BLOCK_BYTES: Final = 32 << 10
_INT32: Final = struct.Struct(">i")


def _write_snappy(data: Data, _level: int | None) -> bytes:
    view = memoryview(data)
    parts = [_XERIAL_HEADER.pack(_XERIAL_MAGIC, _XERIAL_VERSION, _XERIAL_VERSION)]
    for at in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = cramjam.snappy.compress_raw(view[at : at + _XERIAL_BLOCK_BYTES])
        parts += (_INT32.pack(len(block)), bytes(block))
    return b"".join(parts)


def _read_snappy(data: Data, max_bytes: int) -> bytearray:
    """Every block says how much it holds: measure all of them, then unpack into one buffer."""
    blocks = _snappy_blocks(memoryview(data))
    try:
        sizes = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        total = sum(sizes)
        if total > max_bytes:
            raise _too_large(Codec.SNAPPY, max_bytes)
        out = bytearray(total)
        view, at = memoryview(out), 0
        for block, size in zip(blocks, sizes, strict=True):
            cramjam.snappy.decompress_raw_into(block, view[at : at + size])
            at += size
    except cramjam.DecompressionError as error:
        raise _damaged(Codec.SNAPPY, error) from None
    return out


def _snappy_blocks(view: memoryview) -> list[memoryview]:
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return [view]
    blocks: list[memoryview] = []
    at, end = _XERIAL_HEADER.size, len(view)
    while at < end:
        if end - at < _INT32.size:
            raise _damaged(Codec.SNAPPY, "a block's size is cut short")
        (size,) = _INT32.unpack_from(view, at)
        at += _INT32.size
        if not 0 < size <= end - at:
            raise _damaged(Codec.SNAPPY, f"a block of {size} bytes where {end - at} are left")
        blocks.append(view[at : at + size])
        at += size
    return blocks


_READERS: Final[dict[Codec, Callable[[Data, int], Data]]] = {
    Codec.NONE: _read_none,
    Codec.GZIP: _read_gzip,
    Codec.SNAPPY: _read_snappy,
    Codec.LZ4: _read_lz4,
    Codec.ZSTD: _read_zstd,
}
_WRITERS: Final[dict[Codec, Callable[[Data, int | None], Data]]] = {
    Codec.NONE: lambda data, _: data,
    Codec.GZIP: _write_gzip,
    Codec.SNAPPY: _write_snappy,
    Codec.LZ4: _write_lz4,
    Codec.ZSTD: _write_zstd,
}
