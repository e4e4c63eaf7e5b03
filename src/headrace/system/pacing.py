"""Between two ends on one machine nothing is paced.

BBR looks for the bandwidth of a path by sending at a measured rate, by timers, in pieces. On one machine there is no
bottleneck to be found, and the search costs more than the copying: twice the kernel's time for a megabyte on either
side. Where it is the machine's rule, such connections follow Reno, which every process may choose.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

_PACED: Final = b"bbr"
_UNPACED: Final = b"reno"
_NAME_BYTES: Final = 16


def unpace_loopback(sock: socket.socket) -> None:
    """For a TCP connection that is open; one that is lost meanwhile, or refuses, is left as it is."""
    with contextlib.suppress(OSError):
        if sock.getpeername()[0] != sock.getsockname()[0]:
            return
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).startswith(_PACED):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)
