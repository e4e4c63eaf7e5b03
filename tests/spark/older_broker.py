"""A TCP proxy before a broker that tells its clients of no version of InitProducerId that has two phases, as brokers
that are older than those do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Final

from headrace.client.producer.transaction_requests import TWO_PHASE_FROM
from headrace.wire import api as apis

CHUNK_BYTES: Final = 65536


class OlderBroker:
    """Listens at once, so that its address can be advertised; forwards when it knows where to."""

    def __init__(self) -> None:
        self.upstream: tuple[str, int] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.bootstrap = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                assert self.upstream is not None
                server = socket.create_connection(self.upstream)
                threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=_pass_on, args=(server, client, True), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, is_answers: bool = False) -> None:
    """The first answer on every connection is that to ApiVersions."""
    with contextlib.suppress(OSError), source, target:
        if is_answers:
            target.sendall(_aged(_frame(source)))
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)


def _frame(source: socket.socket) -> bytes:
    held = b""
    while len(held) < 4 or len(held) < 4 + struct.unpack(">i", held[:4])[0]:
        chunk = source.recv(CHUNK_BYTES)
        if not chunk:
            raise ConnectionError
        held += chunk
    return held


def _aged(answer: bytes) -> bytes:
    served = apis.ALL_APIS[apis.INIT_PRODUCER_ID]
    entry = struct.pack(">hh", apis.INIT_PRODUCER_ID, served.min_version)
    assert entry + struct.pack(">h", served.max_version) in answer
    return answer.replace(
        entry + struct.pack(">h", served.max_version), entry + struct.pack(">h", TWO_PHASE_FROM - 1), 1
    )
