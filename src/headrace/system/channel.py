"""One connected socket: bytes in by one shared buffer, out by vectored writes and sendfile.

All channels read into one shared buffer, because a session is done with the bytes when `received` returns. Only a frame
that has not arrived whole gets a buffer of its own channel, of the size that the session asks for; the sum of these is
bounded (system.receive_buffers). An idle connection holds no buffer.

Sending never copies: buffers go out by sendmsg, large file slices by sendfile. Small ones, and all under TLS, are read.
A session hears `drained` and `closed` also from within its own `send`, `close` and `abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from headrace.ports.disk import FileSlice
from headrace.ports.network import Address, Part, Session
from headrace.system.pacing import unpace_loopback
from headrace.system.receive_buffers import LEAN_READ_BYTES, ReceiveBuffers

FIRST_OWN_BYTES: Final = 1 << 20
LEAST_SPACE_BYTES: Final = 4 << 10
SENDFILE_LEAST_BYTES: Final = 64 << 10
SENDFILE_TURN_BYTES: Final = 4 << 20
READ_PIECE_BYTES: Final = 256 << 10
VECTOR_PARTS: Final = 256
TLS_PIECE_BYTES: Final = 64 << 10
HANDSHAKE_SECONDS: Final = 20.0
TLS_HANDSHAKE: Final = b"\x16"
"""The type of the record that every TLS client begins with."""
TLS_ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x46"
"""Fatal, protocol_version: what a TLS port has for a client that does not speak TLS."""

log = logging.getLogger(__name__)


class SocketChannel:
    """One connected socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        buffers: ReceiveBuffers,
        sock: socket.socket,
        session: Session,
        tls: object | None,
        *,
        server_side: bool,
    ) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            unpace_loopback(sock)
        peer, local = sock.getpeername(), sock.getsockname()
        self.peer, self.local = Address(peer[0], peer[1]), Address(local[0], local[1])
        self.want_bytes = 0
        self._loop = loop
        self._buffers = buffers
        self._tls = isinstance(tls, ssl.SSLContext)
        if isinstance(tls, ssl.SSLContext):
            sock = tls.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        self._handshaking = self._tls
        self._server_side = server_side
        self._hello_due = self._tls and server_side
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
            return
        self._loop.call_later(HANDSHAKE_SECONDS, self._end_handshake)
        if not server_side:
            self._loop.call_soon(self._readable)

    # Receiving.

    def _readable(self) -> None:
        if self._fd < 0 or (self._handshaking and not self._shake_hands()):
            return
        if not self._reading or self._starving:
            return
        own = self._own
        if own is not None:
            space = own[self._have :]
        elif self._buffers.lean:
            space = self._buffers.shared[:LEAN_READ_BYTES]
        else:
            space = self._buffers.shared
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
        self._read_decrypted()

    def _read_again(self) -> None:
        self._loop.add_reader(self._fd, self._readable)
        self._read_decrypted()

    def _read_decrypted(self) -> None:
        """What TLS has decrypted and not handed out makes no socket readable."""
        if self._tls and self._reading and not self._starving and self._fd >= 0 and self._sock.pending():  # type: ignore[attr-defined]
            self._loop.call_soon(self._readable)

    def _offer(self, data: memoryview) -> None:
        """Give the session what there is and keep what it leaves in a buffer of our own."""
        self.want_bytes = 0
        used = self._session.received(data)
        if self._fd < 0 or self._closing:
            return
        if used < len(data):
            self._keep(data[used:])
            if self._reading and not self.want_bytes and len(data) - used >= 4:
                # The session was held and let go again while it worked: what it left is not a cut frame.
                self._loop.call_soon(self._offer_again)
            return
        starved = self._starving
        self._release_own()
        if starved and self._reading:
            self._read_again()

    def _keep(self, rest: memoryview) -> None:
        own, count = self._own, len(rest)
        size = self._own_size(count)
        if own is not None and (self._starving or len(own) >= size):
            own[:count] = rest
        else:
            buffers = self._buffers
            grown = buffers.take(size, 0 if own is None else len(own))
            if grown is None:
                self._starving = True
                self._loop.remove_reader(self._fd)
                grown = buffers.starve(self, own, rest)
            else:
                grown[:count] = rest
                if own is not None:
                    buffers.give(own)
            self._own = grown
        self._have = count

    def _own_size(self, count: int) -> int:
        """Room for the frame that the session asked for, got in steps, so that a mere claim of length costs little."""
        want = self.want_bytes if self.want_bytes > count else count + LEAST_SPACE_BYTES
        return min(want, max(FIRST_OWN_BYTES, 2 * count))

    def _release_own(self) -> None:
        if self._own is not None:
            own, self._own, self._have = self._own, None, 0
            starving, self._starving = self._starving, False
            self._buffers.give(own, starving=starving)

    def feed(self) -> bool:
        if self._fd < 0 or not self._starving or self._own is None:
            return True
        grown = self._buffers.take(self._own_size(self._have), len(self._own))
        if grown is None:
            return False
        own, self._own, self._starving = self._own, grown, False
        grown[: self._have] = own[: self._have]
        self._buffers.give(own, starving=True)
        if self._reading:
            self._read_again()
        return True

    def _shake_hands(self) -> bool:
        try:
            if self._hello_due and not self._hears_hello():
                return False
            self._sock.do_handshake()  # type: ignore[attr-defined]
        except ssl.SSLWantReadError:
            self._stop_writing()
            return False
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self._fd, self._writable)
            self._writing = True
            return False
        except BlockingIOError:
            return False
        except OSError as error:
            self._tell_failure(error)
            self._drop(f"TLS handshake failed: {error.strerror or error}")
            return False
        self._handshaking = False
        self._stop_writing()
        self._session.opened(self)
        return self._fd >= 0

    def _hears_hello(self) -> bool:
        """Whether the peer speaks TLS, by its first byte. One that does not gets an alert, which its client may know.

        The methods of the plain socket: those of TLS want to see TLS.
        """
        first = socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        self._hello_due = False
        if not first or first == TLS_HANDSHAKE:
            return True
        log.warning("closing the connection from %s: it does not speak TLS, and %s does", self.peer, self.local)
        # What is closed with bytes unread is reset, and the alert lost.
        socket.socket.recv(self._sock, LEAST_SPACE_BYTES)
        socket.socket.send(self._sock, TLS_ALERT)
        self._drop("TLS handshake failed: the peer does not speak TLS")
        return False

    def _tell_failure(self, error: OSError) -> None:
        """Who only connects and goes, as probes do, is not worth a line."""
        if self._server_side and isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            log.warning("no TLS with %s on %s: %s", self.peer, self.local, error.strerror or error)

    def _end_handshake(self) -> None:
        if self._handshaking:
            self._drop(f"no TLS handshake within {HANDSHAKE_SECONDS:g} s")

    def pause(self) -> None:
        if self._reading and self._fd >= 0:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if not self._reading and self._fd >= 0 and not self._closing:
            self._reading = True
            if not self._starving:
                self._read_again()
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
            if not len(part):
                continue
            self._out.append(part if isinstance(part, FileSlice) else memoryview(part))
            self._out_bytes += len(part)
        if not self._writing and not self._handshaking:
            self._send_some()

    def queued_bytes(self) -> int:
        return self._out_bytes

    def _writable(self) -> None:
        if not self._handshaking or self._shake_hands():
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
                if self._to_be_read(head):
                    self._read_head(head)
                    continue
                try:
                    sent = os.sendfile(self._fd, head.file.fileno(), head.position, min(head.count, turn_bytes))
                except OSError as error:
                    head.failed(error)
                    raise
                if sent == 0:
                    raise head.ended()
                self._out_bytes -= sent
                if sent < head.count:
                    out[0] = head.part(sent, head.count - sent)
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
        if self._tls:  # TLS takes a piece whole or not at all, and must be offered the same piece again
            sent = self._sock.send(head[:TLS_PIECE_BYTES])
        elif len(out) == 1:
            sent = self._sock.send(head)
        else:
            sent = self._sock.sendmsg(self._run())
        self._out_bytes -= sent
        while sent:
            first = out[0]
            assert isinstance(first, memoryview), "a run never reaches into a file slice"
            if sent < len(first):
                out[0] = first[sent:]
                return
            sent -= len(first)
            out.popleft()

    def _run(self) -> list[memoryview]:
        """What can leave in one vectored write; small slices in between are read, so that they do not break it up."""
        run: list[memoryview] = []
        read_bytes = 0
        for place, part in enumerate(list(islice(self._out, VECTOR_PARTS))):
            if isinstance(part, FileSlice):
                read_bytes += part.count
                if not self._to_be_read(part) or read_bytes > READ_PIECE_BYTES:
                    break
                part = self._out[place] = memoryview(part.read())
            run.append(part)
        return run

    def _to_be_read(self, part: FileSlice) -> bool:
        return self._tls or part.count < SENDFILE_LEAST_BYTES or part.file.fileno() < 0

    def _read_head(self, head: FileSlice) -> None:
        """Turn the slice at the head, or a piece of it, into bytes."""
        count = min(head.count, READ_PIECE_BYTES)
        data = head.part(0, count).read()
        self._out.popleft()
        if count < head.count:
            self._out.appendleft(head.part(count, head.count - count))
        self._out.appendleft(memoryview(data))

    # Closing.

    def close(self) -> None:
        if self._fd < 0 or self._closing:
            return
        self._closing = True
        self._reading = False
        self._loop.remove_reader(self._fd)
        self._release_own()
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
        if self._tls and self._closing:
            self._say_goodbye()
        self._sock.close()
        self._out.clear()
        self._out_bytes = 0
        self._release_own()
        self._session.closed(reason)

    def _say_goodbye(self) -> None:
        """Without TLS's own end mark the peer cannot tell a whole answer from a cut one."""
        with contextlib.suppress(OSError, ValueError):
            self._sock.unwrap()  # type: ignore[attr-defined]
