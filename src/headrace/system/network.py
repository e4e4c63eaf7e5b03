"""The real network: non-blocking sockets on the loop, one receive buffer for all of them, vectored writes and sendfile.

All channels read into one shared buffer, because a session is done with the bytes when `received` returns. Only a frame
that has not arrived whole gets a buffer of its own channel, of the size that the session asks for; the sum of these is
bounded, and a channel that would go beyond it is not read until others are done. An idle connection holds no buffer.

Sending never copies: buffers go out by sendmsg, large file slices by sendfile. Small ones, and all under TLS, are read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from headrace.errors import OperatorError
from headrace.ports.disk import FileSlice
from headrace.ports.network import Address, Part, Session

SHARED_BYTES: Final = 512 << 10
FIRST_OWN_BYTES: Final = 1 << 20
SENDFILE_LEAST_BYTES: Final = 64 << 10
SENDFILE_TURN_BYTES: Final = 4 << 20
READ_PIECE_BYTES: Final = 256 << 10
VECTOR_PARTS: Final = 256
BACKLOG: Final = 512
ACCEPTS_A_TURN: Final = 64
ACCEPT_PAUSE_SECONDS: Final = 0.5
OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger(__name__)


class SocketNetwork:
    """Listeners and connections of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own_buffers_limit_bytes: int = 256 << 20) -> None:
        self.loop = loop
        self.shared = memoryview(bytearray(SHARED_BYTES))
        self.own_buffers_bytes = 0
        self.own_buffers_limit_bytes = own_buffers_limit_bytes
        self._spare: memoryview | None = None
        self._starved: deque[SocketChannel] = deque()

    def listen(
        self, address: Address, accept: Callable[[], Session | None], tls: object | None = None
    ) -> SocketListener:
        return SocketListener(self, address, accept, tls)

    def connect(self, address: Address, session: Session, tls: object | None = None) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex((address.host, address.port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self.loop.call_soon(session.closed, f"cannot connect to {address}: {os.strerror(code)}")
            return
        fd = sock.fileno()

        def connected() -> None:
            self.loop.remove_writer(fd)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                sock.close()
                session.closed(f"cannot connect to {address}: {os.strerror(code)}")
                return
            SocketChannel(self, sock, session, tls, server_side=False)

        self.loop.add_writer(fd, connected)

    def take_buffer(self, channel: SocketChannel, count: int) -> memoryview | None:
        """A buffer for a frame that is not whole yet; None: wait, `_starved` will be resumed when others are done."""
        if self.own_buffers_bytes and self.own_buffers_bytes + count > self.own_buffers_limit_bytes:
            self._starved.append(channel)
            return None
        spare, self._spare = self._spare, None
        if spare is None or len(spare) < count:
            spare = memoryview(bytearray(count))
        self.own_buffers_bytes += len(spare)
        return spare

    def give_buffer(self, buffer: memoryview) -> None:
        self.own_buffers_bytes -= len(buffer)
        if len(buffer) <= 2 * FIRST_OWN_BYTES:
            self._spare = buffer
        if self._starved:
            self.loop.call_soon(self._starved.popleft().unstarve)


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
            raise OperatorError(_cannot_listen(address, error)) from None
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
            try:
                SocketChannel(self._network, sock, session, self._tls, server_side=True)
            except OSError as error:  # the peer was gone before its first byte
                sock.close()
                session.closed(str(error))

    def _listen_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._network.loop.add_reader(self._sock.fileno(), self._readable)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._network.loop.remove_reader(self._sock.fileno())
            self._sock.close()


def _cannot_listen(address: Address, error: OSError | OverflowError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"cannot listen on {address}: the port is in use; stop what uses it or choose another with --listen"
    return f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}"


class SocketChannel:
    """One connected socket."""

    def __init__(
        self, network: SocketNetwork, sock: socket.socket, session: Session, tls: object | None, *, server_side: bool
    ) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer, local = sock.getpeername(), sock.getsockname()
        self.peer, self.local = Address(peer[0], peer[1]), Address(local[0], local[1])
        self.want_bytes = 0
        self._network = network
        self._loop = network.loop
        self._tls = isinstance(tls, ssl.SSLContext)
        if isinstance(tls, ssl.SSLContext):
            sock = tls.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        self._handshaking = self._tls
        self._sock = sock
        self._fd = sock.fileno()
        self._session = session
        self._own: memoryview | None = None
        self._have = 0
        self._out: deque[memoryview | FileSlice] = deque()
        self._out_bytes = 0
        self._reading = True
        self._starving = False
        self._writing = False
        self._closing = False
        self._loop.add_reader(self._fd, self._readable)
        if not self._handshaking:
            session.opened(self)
        elif not server_side:
            self._loop.call_soon(self._readable)

    # Receiving.

    def _readable(self) -> None:
        if self._fd < 0 or (self._handshaking and not self._shake_hands()):
            return
        own = self._own
        space = self._network.shared if own is None else own[self._have :]
        try:
            count = self._sock.recv_into(space)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._drop(f"receiving failed: {error.strerror or error}")
            return
        if count == 0:
            self._drop("closed by the peer")
            return
        if own is None:
            self._offer(space[:count])
        else:
            self._have += count
            self._offer(own[: self._have])
        if self._tls and self._reading and self._fd >= 0 and self._sock.pending():  # type: ignore[attr-defined]
            self._loop.call_soon(self._readable)

    def _offer(self, data: memoryview) -> None:
        """Give the session what there is and keep what it leaves in a buffer of our own."""
        self.want_bytes = 0
        used = self._session.received(data)
        if self._fd < 0:
            return
        rest = len(data) - used
        if not rest:
            if self._own is not None:
                self._release_own()
            return
        self._keep(data[used:], rest)

    def _keep(self, rest: memoryview, count: int) -> None:
        own = self._own
        want = max(self.want_bytes, count + 1)
        if own is not None and len(own) >= min(want, max(FIRST_OWN_BYTES, 2 * count)):
            own[:count] = rest
            self._have = count
            return
        grown = self._network.take_buffer(self, min(want, max(FIRST_OWN_BYTES, 2 * count)))
        if grown is None:
            grown = memoryview(bytearray(count + 1))
            self._network.own_buffers_bytes += len(grown)
            self._starving = True
            self._loop.remove_reader(self._fd)
        grown[:count] = rest
        if own is not None:
            self._network.give_buffer(own)
        self._own, self._have = grown, count

    def _release_own(self) -> None:
        if self._own is not None:
            own, self._own, self._have = self._own, None, 0
            self._network.give_buffer(own)

    def unstarve(self) -> None:
        """There is room for receive buffers again."""
        if self._fd >= 0 and self._starving:
            self._starving = False
            if self._reading:
                self._loop.add_reader(self._fd, self._readable)

    def _shake_hands(self) -> bool:
        try:
            self._sock.do_handshake()  # type: ignore[attr-defined]
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._fd, self._writable)
            self._writing = True
            return False
        except OSError as error:
            self._drop(f"TLS handshake failed: {error.strerror or error}")
            return False
        self._handshaking = False
        self._session.opened(self)
        return self._fd >= 0

    def pause(self) -> None:
        if self._reading and self._fd >= 0:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if not self._reading and self._fd >= 0 and not self._closing:
            self._reading = True
            if not self._starving:
                self._loop.add_reader(self._fd, self._readable)
            if self._have:
                self._loop.call_soon(self._offer_again)

    def _offer_again(self) -> None:
        if self._fd >= 0 and self._reading and self._own is not None and self._have:
            self._offer(self._own[: self._have])

    # Sending.

    def send(self, parts: Sequence[Part]) -> None:
        if self._fd < 0 or self._closing:
            return
        for part in parts:
            if isinstance(part, FileSlice):
                self._out.append(part)
                self._out_bytes += part.count
            else:
                view = memoryview(part)
                self._out.append(view)
                self._out_bytes += len(view)
        if not self._writing and not self._handshaking:
            self._send_some()

    def queued_bytes(self) -> int:
        return self._out_bytes

    def _writable(self) -> None:
        if self._handshaking:
            if not self._shake_hands():
                return
            self._stop_writing()
        self._send_some()

    def _send_some(self) -> None:
        try:
            blocked = self._send_queue()
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            blocked = True
        except (OSError, ValueError) as error:
            self._drop(f"sending failed: {getattr(error, 'strerror', None) or error}")
            return
        if blocked:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
            return
        self._stop_writing()
        if self._closing:
            self._drop("closed by us")
        else:
            self._session.drained()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)

    def _send_queue(self) -> bool:
        """Send until the queue is empty (False) or the socket or this turn's share is full (True)."""
        out = self._out
        turn_bytes = SENDFILE_TURN_BYTES
        while out:
            head = out[0]
            if isinstance(head, FileSlice):
                if self._tls or head.count < SENDFILE_LEAST_BYTES or head.file.fileno() < 0:
                    self._read_head(head)
                    continue
                sent = os.sendfile(self._fd, head.file.fileno(), head.position, min(head.count, turn_bytes))
                if sent == 0:
                    raise OSError(errno.EIO, f"{head.file.path} ends before position {head.position + head.count}")
                self._out_bytes -= sent
                if sent < head.count:
                    out[0] = FileSlice(head.file, head.position + sent, head.count - sent)
                else:
                    out.popleft()
                turn_bytes -= sent
                if turn_bytes <= 0:
                    return bool(out)
                continue
            self._send_buffers(head)
        return False

    def _send_buffers(self, head: memoryview) -> None:
        out = self._out
        if self._tls or len(out) == 1:
            sent = self._sock.send(head)
        else:
            run: list[memoryview] = []
            for part in out:
                if isinstance(part, FileSlice) or len(run) == VECTOR_PARTS:
                    break
                run.append(part)
            sent = self._sock.sendmsg(run)
        self._out_bytes -= sent
        while sent:
            first = out[0]
            if isinstance(first, FileSlice):  # a run never reaches into a slice
                raise AssertionError("sent more than was queued before a file slice")
            if sent < len(first):
                out[0] = first[sent:]
                return
            sent -= len(first)
            out.popleft()

    def _read_head(self, head: FileSlice) -> None:
        """Turn the slice at the head, or a piece of it, into bytes."""
        count = min(head.count, READ_PIECE_BYTES)
        data = head.file.pread(count, head.position)
        if len(data) != count:
            raise OSError(errno.EIO, f"{head.file.path} ends before position {head.position + count}")
        self._out.popleft()
        if count < head.count:
            self._out.appendleft(FileSlice(head.file, head.position + count, head.count - count))
        self._out.appendleft(memoryview(data))

    # Closing.

    def close(self) -> None:
        if self._fd < 0 or self._closing:
            return
        self._closing = True
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)
        if not self._out:
            self._drop("closed by us")

    def abort(self) -> None:
        self._drop("closed by us")

    def _drop(self, reason: str) -> None:
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        self._stop_writing()
        self._fd = -1
        self._sock.close()
        self._out.clear()
        self._out_bytes = 0
        self._release_own()
        self._session.closed(reason)
