"""What a service manager hears of a server: that it is ready, that it stops, that its loop is alive.

systemd with `Type=notify` names a datagram socket in NOTIFY_SOCKET and wants lines of NAME=VALUE there (sd_notify(3));
with `WatchdogSec=` it wants WATCHDOG=1 more often than every WATCHDOG_USEC microseconds. It is sent from the loop, so
that a loop that hangs is noticed. Without these variables nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

ALIVE: Final = ("WATCHDOG=1",)
AGAIN_SECONDS: Final = 0.1


class Supervisor:
    def __init__(self, loop: asyncio.AbstractEventLoop, environment: Mapping[str, str] = os.environ) -> None:
        self._loop = loop
        self._address = environment.get("NOTIFY_SOCKET", "")
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environment.get("WATCHDOG_USEC", "")
        self._watchdog_seconds = int(usec) / 1e6 / 2 if self._address and own and usec.isdecimal() else 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    def starting(self) -> None:
        self._tell("STATUS=starting")

    def ready(self, status: str) -> None:
        self._tell("READY=1", f"STATUS={status}")
        if self._watchdog_seconds:
            self._alive()

    def stopping(self, why: str) -> None:
        self._tell("STOPPING=1", f"STATUS=stopping: {why}")

    def ended(self, status: str) -> None:
        self._tell(f"STATUS={status}")
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _alive(self) -> None:
        self._watchdog = self._loop.call_later(self._watchdog_seconds, self._alive)
        self._tell(*ALIVE)

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        # Names that begin with @ are in the kernel's abstract space, where that is a zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto("\n".join(lines).encode(), address)
        except BlockingIOError:  # its queue is full: it is told what it waits for as soon as it reads again
            if lines != ALIVE:
                self._loop.call_later(AGAIN_SECONDS, self._tell, *lines)
        except OSError as error:
            log.warning("cannot tell the service manager %s: %s", lines[0], error.strerror)
