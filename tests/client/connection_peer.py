"""A peer on a real socket that says what a test wants it to say, for what no real broker can be brought to do."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.codec import decode_request, encode_response, read_request_header, write_response
from headrace.wire.message import Message

Answer = Message | bytes | None
"""A message in the request's version, bytes as they are (none: the connection is closed), or None for no answer."""
VERSIONS = Message(
    error_code=0,
    api_keys=[
        Message(api_key=api.key, min_version=api.min_version, max_version=api.max_version)
        for api in apis.KAFKA_APIS.values()
    ],
)


class Peer:
    """Answers ApiVersions as a broker does, and everything else by `reply(api_key, request)`.

    `greeting` is said instead in answer to ApiVersions. `reads=False`: nothing is read after that.
    """

    def __init__(
        self,
        reply: Callable[[int, Message], Answer] | None = None,
        *,
        greeting: Answer = VERSIONS,
        reads: bool = True,
    ) -> None:
        self.reply = reply or (lambda api_key, request: None)
        self.greeting = greeting
        self.reads = reads
        self.asked: list[int] = []
        self.accepted_at: list[float] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._server.getsockname())
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop()
        for thread in self._threads:
            thread.join(30)

    def drop(self) -> None:
        """Cut every connection there is."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.accepted_at.append(time.monotonic())
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while (head := _read(connection, 4)) is not None:
                frame = _read(connection, struct.unpack(">i", head)[0])
                if frame is None:
                    return
                header = read_request_header(frame)
                self.asked.append(header.api_key)
                if header.api_key == apis.API_VERSIONS:
                    answer = self.greeting
                else:
                    request = decode_request(header.api_key, header.version, frame, header.body)
                    answer = self.reply(header.api_key, request)
                if isinstance(answer, Message):
                    body = encode_response(header.api_key, header.version, answer)
                    answer = write_response(header.api_key, header.version, header.correlation_id, body)
                if answer == b"":
                    return
                if answer is not None:
                    connection.sendall(answer)
                if not self.reads:
                    _wait_for_the_end(connection)
                    return


def _read(connection: socket.socket, count: int) -> memoryview | None:
    buffer = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        received = connection.recv_into(buffer[filled:])
        if not received:
            return None
        filled += received
    return buffer


def _wait_for_the_end(connection: socket.socket) -> None:
    """Until `drop`, without taking anything from the other side."""
    poll_end = threading.Event()
    while connection.fileno() >= 0 and not poll_end.wait(0.02):
        try:
            connection.send(b"", socket.MSG_DONTWAIT)
            connection.getpeername()
        except OSError:
            return
