"""Forwards TCP connections and holds back what passes, each way, for so long: a longer wire, for kernels without netem.

Called as  python delay_proxy.py LISTEN:TARGET [LISTEN:TARGET ...]  with ports on loopback. Prints `ready`. A line with
milliseconds on its input sets the delay each way for what arrives from then on, and is repeated as the answer.
"""

import asyncio
import sys
from collections import deque
from typing import cast

import uvloop

HOST = "127.0.0.1"


class Wire:
    """How long the way is now."""

    def __init__(self) -> None:
        self.delay_s = 0.0


class End(asyncio.Protocol):
    """One side of a forwarded connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.other: End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Uvloop's transports are not instances of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._deliver()

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.carry(data)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.other is not None
        self.other.end()

    def carry(self, data: bytes) -> None:
        due = asyncio.get_running_loop().time() + self._wire.delay_s
        self._under_way.append((max(due, self._under_way[-1][0] if self._under_way else 0.0), data))
        if self._timer is None:
            self._deliver()

    def end(self) -> None:
        self._under_way.append((asyncio.get_running_loop().time() + self._wire.delay_s, b""))
        if self._timer is None:
            self._deliver()

    def _deliver(self) -> None:
        self._timer = None
        if self._transport is None:
            return
        loop = asyncio.get_running_loop()
        while self._under_way and self._under_way[0][0] <= loop.time():
            data = self._under_way.popleft()[1]
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
        if self._under_way:
            self._timer = loop.call_at(self._under_way[0][0], self._deliver)


async def forward(wire: Wire, listen_port: int, target_port: int) -> None:
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[None]] = set()

    def accepted() -> End:
        near, far = End(wire), End(wire)
        near.other, far.other = far, near

        async def connect() -> None:
            try:
                await loop.create_connection(lambda: far, HOST, target_port)
            except OSError:
                near.end()

        task = loop.create_task(connect())
        opening.add(task)
        task.add_done_callback(opening.discard)
        return near

    await loop.create_server(accepted, HOST, listen_port)


async def main() -> None:
    wire = Wire()
    for pair in sys.argv[1:]:
        listen_port, target_port = map(int, pair.split(":"))
        await forward(wire, listen_port, target_port)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    while line := await reader.readline():
        wire.delay_s = float(line) / 1000
        print(line.decode().strip(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
