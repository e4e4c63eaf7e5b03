"""Frames cut out of any stream of bytes, parts written whatever the kernel takes at a time."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headrace.client.connection.stream import FrameReader, PartWriter
from headrace.errors import ProtocolError
from headrace.ports.disk import Buffer
from headrace.ports.network import Address
from headrace.records.buffers import BufferPool

WAIT_S = 30.0
POOL_BYTES = 4 << 20
SIZES = (4, 5, 7, 100, 1000, 32_764, 32_768, 32_769, 70_000, 1 << 20, 17 << 20)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a real connection; the first one does not block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        near.setblocking(False)
        with near, far:
            yield near, far


def frames_read(near: socket.socket, reader: FrameReader, count: int) -> list[memoryview]:
    frames: list[memoryview] = []
    while len(frames) < count:
        assert select.select([near], [], [], WAIT_S)[0], f"{len(frames)} of {count} frames came"
        reader.read(frames)
    return frames


def test_frames_come_whole_however_the_bytes_are_cut(sockets: tuple[socket.socket, socket.socket], seed: int) -> None:
    near, far = sockets
    draw = random.Random(seed)
    sizes = [draw.choice(SIZES[:-2]) for _ in range(300)] + [*SIZES, 4]
    contents = [draw.randbytes(size) for size in sizes]
    stream = memoryview(b"".join(struct.pack(">i", len(content)) + content for content in contents))

    def write() -> None:
        pos = 0
        while pos < len(stream):
            step = draw.choice((1, 3, 50, 1000, 32_768, 100_000, 5 << 20))
            far.sendall(stream[pos : pos + step])
            pos += step

    writer = threading.Thread(target=write)
    writer.start()
    frames = frames_read(near, FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES)), len(contents))
    writer.join()
    assert [bytes(frame) for frame in frames] == contents


def test_a_frame_has_memory_of_its_own(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    reader = FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES))
    far.sendall(struct.pack(">i", 4) + b"kept")
    (kept,) = frames_read(near, reader, 1)
    far.sendall(struct.pack(">i", 4) + b"next")
    frames_read(near, reader, 1)
    assert bytes(kept) == b"kept"


def test_a_large_frame_has_its_memory_until_the_last_slice_is_gone(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    reader = FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES))

    def arriving(letter: bytes) -> memoryview:
        writer = threading.Thread(target=far.sendall, args=[struct.pack(">i", 1 << 20) + letter * (1 << 20)])
        writer.start()
        (frame,) = frames_read(near, reader, 1)
        writer.join()
        return frame

    frame = arriving(b"a")
    first, kept = id(frame.obj), frame[1000:2000]
    del frame
    assert id(arriving(b"b").obj) != first
    assert bytes(kept) == b"a" * 1000
    del kept
    later = [arriving(b"c"), arriving(b"d")]
    assert first in {id(frame.obj) for frame in later}
    assert [bytes(frame) for frame in later] == [b"c" * (1 << 20), b"d" * (1 << 20)]


def test_a_small_frame_after_a_large_one_is_noticed(sockets: tuple[socket.socket, socket.socket]) -> None:
    """The large one ends exactly with what the socket holds, so that its end is no short read."""
    near, far = sockets
    reader = FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES))
    far.sendall(struct.pack(">i", 100_000) + bytes(40_000))
    select.select([near], [], [], WAIT_S)
    reader.read([])
    far.sendall(bytes(60_000))
    frames_read(near, reader, 1)
    far.sendall(struct.pack(">i", 4) + b"next")
    (after,) = frames_read(near, reader, 1)
    assert bytes(after) == b"next"


def test_whole_frames_before_a_broken_length_or_the_end_are_not_lost(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    reader = FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES))
    far.sendall(struct.pack(">i", 4) + b"good" + struct.pack(">i", -5))
    frames: list[memoryview] = []
    select.select([near], [], [], WAIT_S)
    with pytest.raises(ProtocolError, match="peer:1 announced an answer of -5 bytes"):
        reader.read(frames)
    assert [bytes(frame) for frame in frames] == [b"good"]
    far.sendall(struct.pack(">i", 1 << 20) + b"cut")
    far.shutdown(socket.SHUT_WR)
    reader = FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES))
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        frames_read(near, reader, 1)


def test_an_announced_length_takes_no_memory_before_it_is_filled(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    far.sendall(struct.pack(">i", 1 << 30) + b"x")
    select.select([near], [], [], WAIT_S)
    before = resident_bytes()
    reader = FrameReader(near, Address("peer", 1), BufferPool(POOL_BYTES))
    reader.read([])
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_parts_arrive_joined_in_order_and_are_counted(sockets: tuple[socket.socket, socket.socket], seed: int) -> None:
    near, far = sockets
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    draw = random.Random(seed)
    kinds = (bytes, bytearray, memoryview)
    parts: list[Buffer] = [
        draw.choice(kinds)(draw.randbytes(draw.choice((1, 2, 100, 5000, 200_000) if nth % 50 == 0 else (1, 9, 100))))
        for nth in range(3000)
    ]
    expected = b"".join(parts)
    received = bytearray()

    def read() -> None:
        while len(received) < len(expected):
            received.extend(far.recv(65536))

    reading = threading.Thread(target=read)
    writer = PartWriter(near)
    left = list(parts)
    started = False
    while left or not writer.is_idle:
        taken = left[: draw.randrange(1, 2500)]
        del left[: len(taken)]
        writer.give(taken, sum(map(len, taken)))
        while not writer.write():
            assert 0 <= writer.taken_bytes < writer.given_bytes
            if not started:
                reading.start()
                started = True
            assert select.select([], [near], [], WAIT_S)[1]
    reading.join(WAIT_S)
    assert bytes(received) == expected
    assert writer.taken_bytes == writer.given_bytes == len(expected)
    with suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)
