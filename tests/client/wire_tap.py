"""A proxy between a client and a real broker that notes every request, and may change what a broker answers.

What it reads and can change are Produce, Fetch, ShareAcknowledge and requests of transactions; the rest is passed
on as it is.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.wire import api as apis
from headrace.wire.codec import (
    RequestHeader,
    decode_request,
    decode_response,
    encode_response,
    read_request_header,
    read_response_header,
    write_response,
)
from headrace.wire.message import Message

SIZE = struct.Struct(">i")
READ = (
    apis.PRODUCE,
    apis.FETCH,
    apis.INIT_PRODUCER_ID,
    apis.END_TXN,
    apis.TXN_OFFSET_COMMIT,
    apis.SHARE_ACKNOWLEDGE,
)


@dataclass(eq=False)
class Seen:
    """One request, and its answer if one came."""

    connection: int
    api_key: int
    body: Message
    came_at: float
    answer: Message | None = None
    answered_at: float = 0.0


def _silent(seen: Seen) -> bool:
    return seen.api_key == apis.PRODUCE and seen.body.acks == 0


@dataclass(eq=False)
class WireTap:
    """Listens at once, so that its address can be advertised; `upstream` is the broker.

    `change(seen, answer)` may alter an answer before it is passed on; where `lost(seen)` is true the connection is cut
    instead: the broker has done what was asked, and nobody hears of it.
    """

    change: Callable[[Seen, Message], None] = lambda seen, answer: None
    lost: Callable[[Seen], bool] = lambda seen: False
    upstream: tuple[str, int] = ("", 0)
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def of(self, api_key: int) -> list[Seen]:
        return [each for each in self.seen if each.api_key == api_key]

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.upstream)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pending: deque[tuple[RequestHeader, Seen]] = deque()
            number += 1
            for work in (self._requests, self._answers):
                threading.Thread(target=work, args=(client, server, pending, number), daemon=True).start()

    def _requests(
        self, client: socket.socket, server: socket.socket, pending: deque[tuple[RequestHeader, Seen]], number: int
    ) -> None:
        with server:
            while (frame := _frame(client)) is not None:
                header = read_request_header(memoryview(frame))
                body = Message()
                if header.api_key in READ:
                    body = decode_request(header.api_key, header.version, memoryview(frame), header.body)
                seen = Seen(number, header.api_key, body, time.monotonic())
                if not _silent(seen):
                    pending.append((header, seen))
                self.seen.append(seen)
                server.sendall(SIZE.pack(len(frame)) + frame)
            server.shutdown(socket.SHUT_RDWR)

    def _answers(
        self, client: socket.socket, server: socket.socket, pending: deque[tuple[RequestHeader, Seen]], number: int
    ) -> None:
        with client:
            while (frame := _frame(server)) is not None:
                header, seen = pending.popleft()
                if self.lost(seen):
                    client.shutdown(socket.SHUT_RDWR)
                    return
                view = memoryview(frame)
                correlation_id, pos = read_response_header(header.api_key, header.version, view)
                assert correlation_id == header.correlation_id, "an answer that nobody asked for"
                if header.api_key not in READ:
                    client.sendall(SIZE.pack(len(frame)) + frame)
                    continue
                seen.answer = decode_response(header.api_key, header.version, view, pos)
                self.change(seen, seen.answer)
                body = encode_response(header.api_key, header.version, seen.answer)
                seen.answered_at = time.monotonic()
                client.sendall(write_response(header.api_key, header.version, correlation_id, body))


def _frame(sock: socket.socket) -> bytes | None:
    head = _read(sock, SIZE.size)
    return None if head is None else _read(sock, SIZE.unpack(head)[0])


def _read(sock: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        try:
            read = sock.recv(size - len(found))
        except OSError:
            return None
        if not read:
            return None
        found += read
    return bytes(found)
