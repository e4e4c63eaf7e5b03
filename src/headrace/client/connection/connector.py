"""From an address to a socket that is connected, over TLS if asked for, without blocking.

Names are looked up in a thread of their own, for lack of another way; every address found is tried in turn. There is
no time limit here: who opens may cancel.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

from headrace.client.connection.reactor import Reactor
from headrace.client.errors import BrokerUnreachable, WrongEndpoint
from headrace.errors import HeadraceError
from headrace.ports.network import Address
from headrace.system.pacing import unpace_loopback

Found = list[tuple[Any, ...]]  # as getaddrinfo gives them

DEAF_MS: Final = 10_000
"""A host that acknowledges nothing for so long counts as lost, sooner than a request may time out."""

_UNKNOWN_NAME: Final = frozenset((socket.EAI_NONAME, socket.EAI_NODATA))
"""Nobody has such a host, and asking again will not bring it; other failures of a lookup may pass."""

_MAY_PASS: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
"""A peer that went away in the middle of the handshake, as one that is just starting does."""
_UNKNOWN_AUTHORITY: Final = frozenset({18, 19, 20, 21})
"""OpenSSL's codes for a certificate that is right but for who signed it: itself, or somebody who is not trusted."""

_UNDER_WAY: Final = frozenset((errno.EINPROGRESS, errno.EAGAIN, errno.EINTR))


class Connector:
    def __init__(
        self,
        reactor: Reactor,
        address: Address,
        tls: ssl.SSLContext | None,
        on_open: Callable[[socket.socket], None],
        on_failed: Callable[[HeadraceError], None],
    ) -> None:
        self._reactor = reactor
        self._address = address
        self._tls = tls
        self._on_open = on_open
        self._on_failed = on_failed
        self._socket: socket.socket | None = None
        self._left: Found = []
        self._reason = ""
        self._refused = False
        self._unknown_name = False
        self._over = False

    def start(self) -> None:
        """Nothing is called back before this returns."""
        try:
            found = self._look_up(socket.AI_NUMERICHOST)
        except OSError:
            threading.Thread(target=self._look_up_aside, name="headrace-lookup", daemon=True).start()
        else:
            self._reactor.call_soon(lambda: self._try(found))

    def cancel(self) -> None:
        self._over = True
        self._drop()

    def _look_up(self, flags: int = 0) -> Found:
        return list(socket.getaddrinfo(self._address.host, self._address.port, type=socket.SOCK_STREAM, flags=flags))

    def _look_up_aside(self) -> None:
        try:
            found, reason = self._look_up(), "the name has no address"
        except OSError as error:
            found, reason = [], f"the name cannot be looked up: {error.strerror or error}"
            self._unknown_name = error.errno in _UNKNOWN_NAME
        self._reactor.post(lambda: self._try(found, reason))

    def _try(self, found: Found, reason: str = "") -> None:
        self._left, self._reason = found, reason
        self._next()

    def _next(self) -> None:
        while self._left and not self._over:
            family, kind, protocol, _, target = self._left.pop(0)
            try:
                sock = self._socket = socket.socket(family, kind, protocol)
                sock.setblocking(False)
                _tune(sock)
                code = sock.connect_ex(target)
            except OSError as error:
                self._note(error)
                continue
            if code and code not in _UNDER_WAY:
                self._note(OSError(code, os.strerror(code)))
                continue
            self._reactor.watch(sock, self._connected, self._connected)
            return
        if not self._over:
            self._over = True
            self._on_failed((WrongEndpoint if self._unknown_name else BrokerUnreachable)(self._failure()))

    def _failure(self) -> str:
        if self._refused:
            return f"no broker answers at {self._address}"
        return f"cannot connect to {self._address}: {self._reason}"

    def _note(self, error: OSError) -> None:
        self._refused = isinstance(error, ConnectionRefusedError)
        self._reason = error.strerror or str(error)
        self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._reactor.unwatch(self._socket)
            self._socket.close()
            self._socket = None

    def _connected(self) -> None:
        sock = self._socket
        if self._over or sock is None:
            return
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._note(OSError(code, os.strerror(code)))
            self._next()
            return
        try:
            to_itself = sock.getpeername() == sock.getsockname()
        except OSError:
            return  # called without need: it is still under way
        if to_itself:
            # On one machine a free port may be given to the very socket that looks for it.
            self._note(ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there"))
            self._next()
        elif self._tls is None:
            self._finish(sock)
        else:
            self._seal(sock, self._tls)

    def _seal(self, plain: socket.socket, tls: ssl.SSLContext) -> None:
        self._reactor.unwatch(plain)
        try:
            self._socket = tls.wrap_socket(
                plain, server_hostname=self._address.host, do_handshake_on_connect=False, suppress_ragged_eofs=True
            )
        except (OSError, ValueError) as error:
            self._no_tls(error, str(error))
            return
        self._shake_hands()

    def _shake_hands(self) -> None:
        sock = self._socket
        if self._over or not isinstance(sock, ssl.SSLSocket):
            return
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self._reactor.watch(sock, self._shake_hands, None)
        except ssl.SSLWantWriteError:
            self._reactor.watch(sock, self._shake_hands, self._shake_hands)
        except OSError as error:
            self._no_tls(error, _handshake_failure(error))
        else:
            self._finish(sock)

    def _no_tls(self, error: OSError | ValueError, reason: str) -> None:
        self._over = True
        self._drop()
        wrong = isinstance(error, ssl.SSLError | ValueError) and not isinstance(error, _MAY_PASS)
        self._on_failed((WrongEndpoint if wrong else BrokerUnreachable)(f"no TLS with {self._address}: {reason}"))

    def _finish(self, sock: socket.socket) -> None:
        self._over = True
        self._socket = None
        self._reactor.unwatch(sock)
        unpace_loopback(sock)
        self._on_open(sock)


def _handshake_failure(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "this port does not speak TLS; leave out --tls and --tls-ca (or pass --no-tls), or tls= in Python"
    reason = error.strerror or str(error)
    if isinstance(error, (ConnectionError, ssl.SSLEOFError)):
        return f"{reason}; does this port speak TLS?"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _UNKNOWN_AUTHORITY:
        return f"{reason}; pass --tls-ca FILE (tls=FILE in Python) to trust it"
    return reason


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAF_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAF_MS // 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)
