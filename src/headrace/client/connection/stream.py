"""Frames in, parts out, on one non-blocking socket.

Frames are a length of four bytes and as many bytes. Small ones are cut out of one buffer that many are received into
at once; one that is not whole yet gets a buffer of its own, which the rest is received into directly. Large ones are
used again when nobody has a slice of them any more. Parts are written as they are, as many at a time as the kernel
takes in one `sendmsg`; TLS joins small ones and encrypts the rest from where they are.
"""

from __future__ import annotations

import mmap
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from headrace.errors import ProtocolError
from headrace.ports.disk import Buffer
from headrace.ports.network import Address
from headrace.records.buffers import BufferPool
from headrace.wire.foreign_protocol import HEAD_BYTES

RESPONSE_MAX_BYTES: Final = 1 << 30
PARTS_PER_WRITE: Final = 1024  # IOV_MAX of Linux
RECEIVE_BYTES: Final = 32 << 10
# Above this a frame's buffer is memory that the kernel gives only as it is filled: a peer may announce what it likes.
TRUSTED_BYTES: Final = 16 << 20
WAKE_BYTES: Final = 256 << 10
POOL_BYTES: Final = 32 << 20
"""Of the buffers of frames, what is kept to be used again."""
TLS_JOINED_BYTES: Final = 16 << 10  # one TLS record

_size = struct.Struct(">i").unpack_from
_WAIT: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class FrameReader:
    def __init__(self, sock: socket.socket, peer: Address, pool: BufferPool) -> None:
        self._socket = sock
        self._peer = peer
        self._pool = pool
        self._sealed = isinstance(sock, ssl.SSLSocket)
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._held = 0  # bytes of a length that is cut
        self._frame: memoryview | None = None
        self._filled = 0
        self._wakes_at = 1
        self._ahead = 0  # bytes that are received and not cut
        self.max_bytes = RESPONSE_MAX_BYTES
        self.strange_head = b""
        """The first bytes of what was no frame."""

    @property
    def is_idle(self) -> bool:
        return self._frame is None and not self._held and not self._ahead

    def put_back(self, received: bytes) -> None:
        """Leave it to `read`, which was idle, that somebody else has received so much."""
        self._ahead = len(received)
        self._received[: self._ahead] = received

    def read(self, frames: list[memoryview]) -> None:
        """Add the frames that are whole now.

        Raises ConnectionResetError when the peer has closed, other OSError as the kernel says, and ProtocolError for
        a length that no broker sends; frames before that are in the list.
        """
        if self._ahead:
            ahead, self._ahead = self._ahead, 0
            self._cut(ahead, frames)
        while True:
            target = self._received[self._held :] if self._frame is None else self._frame[self._filled :]
            try:
                count = self._socket.recv_into(target)
            except _WAIT:
                self._sleep()
                return
            if not count:
                raise ConnectionResetError("the broker closed the connection")
            if self._frame is None:
                self._cut(self._held + count, frames)
            else:
                self._filled += count
                if self._filled == len(self._frame):
                    frames.append(self._frame)
                    self._frame = None
            # A short read has emptied the socket; what TLS has decrypted already it does not show by being readable.
            if count < len(target) and not self._sealed:
                self._sleep()
                return

    def _sleep(self) -> None:
        """Until enough of a large frame is there: it costs a wake-up for every so many bytes."""
        missing = 0 if self._frame is None or self._sealed else len(self._frame) - self._filled
        wakes_at = min(missing, WAKE_BYTES) if missing >= RECEIVE_BYTES else 1
        if wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)

    def _cut(self, end: int, frames: list[memoryview]) -> None:
        received, pos = self._received, 0
        while end - pos >= 4:
            (size,) = _size(received, pos)
            if not 4 <= size <= self.max_bytes:
                self.strange_head = bytes(received[pos : min(end, pos + HEAD_BYTES)])
                raise ProtocolError(f"{self._peer} announced an answer of {size} bytes: is it a Kafka port?")
            pos += 4
            have = end - pos
            if have >= size:
                frames.append(memoryview(bytearray(received[pos : pos + size])))
                pos += size
            else:
                self._frame = self._room(size)
                self._frame[:have] = received[pos:end]
                self._filled = have
                pos = end
        self._held = end - pos
        if self._held and pos:
            received[: self._held] = bytes(received[pos:end])

    def _room(self, size: int) -> memoryview:
        if size > TRUSTED_BYTES:
            return memoryview(mmap.mmap(-1, size))
        buffer = self._pool.take(size)
        frame = memoryview(buffer)[:size]
        self._pool.lend(buffer)
        return frame


class PartWriter:
    """Counts what was given and what the kernel has taken, so that it can be told of each request whether it began."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sealed = isinstance(sock, ssl.SSLSocket)
        self._parts: deque[Buffer] = deque()
        self.given_bytes = 0
        self.taken_bytes = 0

    @property
    def is_idle(self) -> bool:
        return not self._parts

    def give(self, parts: Sequence[Buffer], size: int) -> None:
        """Parts that together have `size` bytes; none is empty."""
        self._parts.extend(parts)
        self.given_bytes += size

    def left_over(self, rest: memoryview) -> None:
        """The rest of what was handed over past this writer, while it was idle, and is counted already."""
        self._parts.append(rest)

    def write(self) -> bool:
        """Hand over what the kernel takes; True if that was all."""
        parts = self._parts
        while parts:
            try:
                taken = self._send_sealed() if self._sealed else self._send()
            except _WAIT:
                return False
            self.taken_bytes += taken
            if self.taken_bytes == self.given_bytes:
                parts.clear()
                return True
            while taken >= len(parts[0]):
                taken -= len(parts.popleft())
            if taken:
                parts[0] = memoryview(parts[0])[taken:]
        return True

    def _send(self) -> int:
        parts = self._parts
        if len(parts) == 1:
            return self._socket.send(parts[0])
        return self._socket.sendmsg(parts if len(parts) <= PARTS_PER_WRITE else list(islice(parts, PARTS_PER_WRITE)))

    def _send_sealed(self) -> int:
        parts = self._parts
        joined: list[Buffer] = []
        size = 0
        while parts and size + len(parts[0]) <= TLS_JOINED_BYTES:
            part = parts.popleft()
            joined.append(part)
            size += len(part)
        # A write that could not be finished must be tried again with the same bytes: they stay together.
        if joined:
            parts.appendleft(b"".join(joined) if len(joined) > 1 else joined[0])
        return self._socket.send(parts[0])
