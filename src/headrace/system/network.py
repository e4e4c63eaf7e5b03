"""The real network: listening and connecting with non-blocking sockets on the loop; channels are in system.channel."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Final

from headrace.errors import CannotListen
from headrace.ports.network import Address, Session
from headrace.system.channel import SocketChannel
from headrace.system.receive_buffers import ReceiveBuffers

BACKLOG: Final = 512
ACCEPTS_A_TURN: Final = 64
ACCEPT_PAUSE_SECONDS: Final = 0.5
OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class SocketNetwork:
    """Listeners and connections of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own_buffers_limit_bytes: int = 256 << 20) -> None:
        self.loop = loop
        self.buffers = ReceiveBuffers(own_buffers_limit_bytes, loop.call_soon)

    def listen(
        self, address: Address, accept: Callable[[], Session | None], tls: object | None = None
    ) -> SocketListener:
        return SocketListener(self, address, accept, tls)

    def connect(self, address: Address, session: Session, tls: object | None = None) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            code = sock.connect_ex((address.host, address.port))
            reason = "" if code in (0, errno.EINPROGRESS) else os.strerror(code)
        except OSError as error:  # a host name that does not resolve
            reason = error.strerror or str(error)
        if reason:
            sock.close()
            self.loop.call_soon(session.closed, f"cannot connect to {address}: {reason}")
            return
        fd = sock.fileno()

        def connected() -> None:
            self.loop.remove_writer(fd)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                sock.close()
                session.closed(f"cannot connect to {address}: {os.strerror(code)}")
                return
            _open_channel(self, sock, session, tls, server_side=False)

        self.loop.add_writer(fd, connected)


def _open_channel(
    network: SocketNetwork, sock: socket.socket, session: Session, tls: object | None, *, server_side: bool
) -> None:
    try:
        SocketChannel(network.loop, network.buffers, sock, session, tls, server_side=server_side)
    except OSError as error:  # the peer was gone before its first byte
        sock.close()
        session.closed(f"gone before it was open: {error.strerror or error}")


class SocketListener:
    """One listening socket; the accept loop catches four named errors and nothing else."""

    def __init__(
        self, network: SocketNetwork, address: Address, accept: Callable[[], Session | None], tls: object | None
    ) -> None:
        self._network = network
        self._accept = accept
        self._tls = tls
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.setblocking(False)
        try:
            self._sock.bind((address.host, address.port))
            self._sock.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            self._sock.close()
            raise CannotListen(_cannot_listen(address, error)) from None
        name = self._sock.getsockname()
        self.address = Address(name[0], name[1])
        self._network.loop.add_reader(self._sock.fileno(), self._readable)

    def _readable(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _peer = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    raise
                log.warning("cannot accept a connection on %s: %s; trying again soon", self.address, error.strerror)
                self._network.loop.remove_reader(self._sock.fileno())
                self._network.loop.call_later(ACCEPT_PAUSE_SECONDS, self._listen_again)
                return
            session = self._accept()
            if session is None:
                sock.close()
                continue
            sock.setblocking(False)
            _open_channel(self._network, sock, session, self._tls, server_side=True)

    def _listen_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._network.loop.add_reader(self._sock.fileno(), self._readable)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._network.loop.remove_reader(self._sock.fileno())
            self._sock.close()


def _cannot_listen(address: Address, error: OSError | OverflowError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"cannot listen on {address}: the port is in use; stop what uses it or choose another"
    return f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}; choose another"
