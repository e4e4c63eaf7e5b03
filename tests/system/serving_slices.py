"""A process that sends one file to one peer as a slice and ends: `serving_slices.py FILE [CERTIFICATE_FOLDER]`.

Prints its port, so that the test can connect, and is run under strace to see which system calls carry the bytes.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from certificates import Certificate
from headrace.ports.disk import FileSlice
from headrace.ports.network import Address, Channel
from headrace.system.disk import SystemDisk
from headrace.system.network import SocketNetwork


class Sender:
    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self._file = SystemDisk().open(path)
        self._loop = loop

    def opened(self, channel: Channel) -> None:
        channel.send([FileSlice(self._file, 0, self._file.size())])
        channel.close()

    def received(self, data: memoryview) -> int:
        return len(data)

    def drained(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self._loop.stop()


def main(path: str, certificates: str | None = None) -> None:
    loop = asyncio.new_event_loop()
    tls = None
    if certificates is not None:
        folder = Path(certificates)
        tls = Certificate(folder / "certificate.pem", folder / "key.pem").server_context()
    listener = SocketNetwork(loop).listen(Address("127.0.0.1", 0), lambda: Sender(path, loop), tls)
    sys.stdout.write(f"{listener.address.port}\n")
    sys.stdout.flush()
    loop.run_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
