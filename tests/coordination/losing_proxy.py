"""A way to etcd on which requests are held back and answers are lost, to try what a client makes of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

CHUNK_BYTES: Final = 1 << 16
FRAME_HEADER_BYTES: Final = 9
RESET_STREAM: Final = 3
GO_AWAY: Final = 7


class LosingProxy:
    """Passes on what comes, until it is told to hold requests or to lose answers."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._held: list[tuple[asyncio.StreamWriter, bytearray]] = []
        self.holding = False
        self.losing = False
        self.lost_bytes = 0
        self.answered = asyncio.Event()
        """Set by the first answer after a release."""

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def held_bytes(self) -> int:
        return sum(len(held) for _, held in self._held)

    async def release(self) -> None:
        """Let the held requests through as they were sent, without the client's later word that it gave them up."""
        self.holding = False
        self.answered.clear()
        for writer, held in self._held:
            writer.write(_without_withdrawals(bytes(held)))
            await writer.drain()
        self._held.clear()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, target]
        for work in (self._requests(reader, target), self._answers(target_reader, writer)):
            task = asyncio.ensure_future(work)
            self._tasks.add(task)

    async def _requests(self, reader: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        held: bytearray | None = None
        with suppress(ConnectionError):
            while chunk := await reader.read(CHUNK_BYTES):
                if not self.holding and held is None:
                    target.write(chunk)
                    await target.drain()
                    continue
                if held is None:
                    held = bytearray()
                    self._held.append((target, held))
                held += chunk
        if held is None:
            target.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(CHUNK_BYTES):
                self.answered.set()
                if self.losing:
                    self.lost_bytes += len(chunk)
                else:
                    writer.write(chunk)
                    await writer.drain()
        writer.close()


def _without_withdrawals(sent: bytes) -> bytes:
    """HTTP/2 frames but for those that take a request back."""
    kept, at = bytearray(), 0
    while at + FRAME_HEADER_BYTES <= len(sent):
        end = at + FRAME_HEADER_BYTES + int.from_bytes(sent[at : at + 3], "big")
        if sent[at + 3] not in (RESET_STREAM, GO_AWAY):
            kept += sent[at:end]
        at = end
    return bytes(kept)
