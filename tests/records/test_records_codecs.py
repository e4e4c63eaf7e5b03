"""Each codec against an independent writer and reader of the same format, and against data that lies."""

import gzip
import os
import random
from collections.abc import Callable

import cramjam
import lz4.frame
import pytest
from aiokafka import codec as aiokafka_codec
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records.codecs import Codec, compress, decompress
from hypotheses import examples
from proving import proves

PACKED = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
THEIR_WRITERS: dict[Codec, Callable[[bytes], bytes]] = {
    Codec.GZIP: aiokafka_codec.gzip_encode,
    Codec.SNAPPY: aiokafka_codec.snappy_encode,
    Codec.LZ4: aiokafka_codec.lz4_encode,
    Codec.ZSTD: aiokafka_codec.zstd_encode,
}
THEIR_READERS: dict[Codec, Callable[[bytes], bytes]] = {
    Codec.GZIP: gzip.decompress,
    Codec.SNAPPY: aiokafka_codec.snappy_decode,
    Codec.LZ4: lz4.frame.decompress,
    Codec.ZSTD: aiokafka_codec.zstd_decode,
}
LARGE = b"".join(b'{"user": %d, "page": "/start"}' % nth for nth in range(20_000)) + os.urandom(100_000)
ZEROS = bytes(32 << 20)


@proves("J1")
@pytest.mark.parametrize("codec", PACKED)
@given(data=st.binary(min_size=1, max_size=2000))
@examples(40)
def test_what_we_write_they_read_and_the_other_way_round(codec: Codec, data: bytes) -> None:
    assert THEIR_READERS[codec](bytes(compress(codec, data))) == data
    assert decompress(codec, THEIR_WRITERS[codec](data)) == data
    assert decompress(codec, compress(codec, data)) == data


@pytest.mark.parametrize("codec", PACKED)
def test_large_data_both_ways(codec: Codec) -> None:
    assert THEIR_READERS[codec](bytes(compress(codec, memoryview(LARGE)))) == LARGE
    assert decompress(codec, memoryview(THEIR_WRITERS[codec](LARGE))) == LARGE


@pytest.mark.parametrize("codec", list(Codec))
def test_nothing_stays_nothing(codec: Codec) -> None:
    assert decompress(codec, compress(codec, b"")) == b""


def test_uncompressed_data_is_not_copied() -> None:
    view = memoryview(LARGE)
    assert decompress(Codec.NONE, view) is view


def test_raw_snappy_is_read() -> None:
    assert decompress(Codec.SNAPPY, bytes(cramjam.snappy.compress_raw(LARGE))) == LARGE


def test_several_members_or_frames_are_read() -> None:
    assert decompress(Codec.GZIP, gzip.compress(LARGE) + gzip.compress(b"end")) == LARGE + b"end"
    frame = bytes(cramjam.zstd.compress(LARGE))
    assert decompress(Codec.ZSTD, frame + frame) == LARGE + LARGE


def test_zstd_without_a_content_size_is_read() -> None:
    writer = cramjam.zstd.Compressor()
    writer.compress(LARGE)
    assert decompress(Codec.ZSTD, bytes(writer.finish())) == LARGE


@pytest.mark.parametrize("codec", list(Codec))
def test_the_bound_is_exact(codec: Codec) -> None:
    packed = compress(codec, LARGE)
    assert decompress(codec, packed, len(LARGE)) == LARGE
    with pytest.raises(InvalidRecord, match="more than"):
        decompress(codec, packed, len(LARGE) - 1)


@pytest.mark.parametrize("codec", PACKED)
def test_a_bomb_is_refused(codec: Codec) -> None:
    with pytest.raises(InvalidRecord, match="more than 1048576 bytes"):
        decompress(codec, compress(codec, ZEROS), 1 << 20)


def test_a_gzip_bomb_that_lies_about_its_size_is_refused() -> None:
    packed = bytearray(compress(Codec.GZIP, ZEROS))
    packed[-4:] = b"\x01\0\0\0"
    with pytest.raises((InvalidRecord, CorruptBatch)):
        decompress(Codec.GZIP, packed, 1 << 20)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(InvalidRecord, match="codec 5"):
        decompress(5, b"")
    with pytest.raises(InvalidRecord, match="codec 7"):
        compress(7, b"")


@pytest.mark.parametrize("codec", PACKED)
def test_damaged_data_gives_only_named_errors(codec: Codec) -> None:
    source = random.Random(codec)
    packed = bytes(compress(codec, LARGE[:3000]))
    refused = 0
    for _ in range(2000):
        damaged = bytearray(packed[: source.choice((len(packed), source.randrange(len(packed))))])
        for _ in range(source.randrange(4)):
            if damaged:
                damaged[source.randrange(len(damaged))] = source.randrange(256)
        try:
            assert len(decompress(codec, damaged, 1 << 20)) <= 1 << 20
        except (CorruptBatch, InvalidRecord):
            refused += 1
    assert refused > 500
