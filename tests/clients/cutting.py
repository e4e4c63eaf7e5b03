"""A TCP proxy that cuts connections after a random number of bytes, in either direction, in mid-frame if need be."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from typing import Final

CHUNK_BYTES: Final = 16384


class CuttingProxy:
    """Listens at once, so that its address can be advertised; forwards when it knows where to."""

    def __init__(self, seed: int, cut_after_bytes: tuple[int, int]) -> None:
        self.random = random.Random(seed)
        self.cut_after_bytes = cut_after_bytes
        self.cuts = 0
        self.cutting = True
        self.upstream: tuple[str, int] | None = None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            budget = self.random.randint(*self.cut_after_bytes)
            threading.Thread(target=self._forward, args=(client, budget), daemon=True).start()

    def _forward(self, client: socket.socket, budget: int) -> None:
        assert self.upstream is not None
        with client, selectors.DefaultSelector() as selector:
            try:
                server = socket.create_connection(self.upstream)
            except OSError:
                return
            with server:
                selector.register(client, selectors.EVENT_READ, server)
                selector.register(server, selectors.EVENT_READ, client)
                while True:
                    for key, _ in selector.select():
                        source, target = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        limit = min(CHUNK_BYTES, budget) if self.cutting else CHUNK_BYTES
                        try:
                            data = source.recv(limit)
                            target.sendall(data)
                        except OSError:
                            return
                        budget -= len(data)
                        if not data:
                            return
                        if budget <= 0 and self.cutting:
                            self.cuts += 1
                            return

    def close(self) -> None:
        self.listener.close()
