"""One connection between two brokers, seen from either end: HELLO, whole frames, pings, silence.

Both ends ping when they have had nothing to say for a while, so silence means that the other end, or the way to it, is
gone: the link is closed. A frame that cannot be is an error of the peer: what came before it counts, and the link is
closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from headrace.errors import HeadraceError, ProtocolError
from headrace.ports.clock import Clock
from headrace.ports.network import Channel, Part
from headrace.replication import frames
from headrace.replication.frames import Frame, Hello, Kind

log = logging.getLogger(__name__)

PINGS_PER_TIMEOUT: Final = 4


class LinkSession(Protocol):
    """What is done with the frames at one end of a link."""

    def greeted(self, hello: Hello) -> None:
        """The peer has said who it is. Raises ProtocolError if it should not be here."""
        ...

    def take(self, data: memoryview, frame: Frame) -> None: ...

    def end_turn(self) -> None:
        """All frames of one read were taken. Runs after a broken one too."""
        ...

    def drained(self) -> None: ...

    def gone(self, reason: str) -> None:
        """The link is closed, or could not be opened."""
        ...


class Link:
    """See `ports.network.Session`."""

    def __init__(
        self,
        session: LinkSession,
        ours: Hello,
        clock: Clock,
        timeout_ms: int,
        append_max_bytes: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._session = session
        self._failed = failed
        self._ours = ours
        self._clock = clock
        self._timeout_seconds = timeout_ms / 1000
        self._append_max_bytes = append_max_bytes
        self._channel: Channel | None = None
        self._dead = False
        self.peer: Hello | None = None
        self.heard_at = self._sent_at = clock.now()

    @property
    def is_ready(self) -> bool:
        return self.peer is not None and not self._dead

    @property
    def queued_bytes(self) -> int:
        return self._channel.queued_bytes() if self._channel is not None else 0

    # Session.

    def opened(self, channel: Channel) -> None:
        if self._dead:  # given up meanwhile
            channel.abort()
            return
        self._channel = channel
        self.heard_at = self._clock.now()
        self.send([frames.hello(self._ours)])

    def received(self, data: memoryview) -> int:
        self.heard_at = self._clock.now()
        used = 0
        try:
            used = self._take_frames(data)
        except HeadraceError as error:
            self._break(str(error))
        except Exception as error:  # the boundary to the peer: what was staged before it must still be written
            log.exception("a frame from %s failed", self._who())
            self._break(f"a frame failed: {error!r}")
        try:
            self._session.end_turn()
        except Exception as error:  # the views that were staged die with this call, so this ends the broker
            self._failed(error)
            raise
        return len(data) if self._dead else used

    def _take_frames(self, data: memoryview) -> int:
        used = 0
        while not self._dead:
            frame = frames.read_head(data, used, self._append_max_bytes)
            if frame is None or frame.end > len(data):
                if used < len(data) and self._channel is not None:
                    self._channel.want_bytes = frames.HEAD_BYTES if frame is None else frame.end - used
                return used
            if self.peer is None:
                self._greet(frames.read_hello(data, frame))
            elif frame.kind != Kind.PING:
                self._session.take(data, frame)
            used = frame.end
        return used

    def _greet(self, hello: Hello) -> None:
        if hello.cluster_id != self._ours.cluster_id:
            raise ProtocolError(
                f"broker {hello.broker} belongs to cluster {hello.cluster_id!r}, this one to "
                f"{self._ours.cluster_id!r}: one of them has the wrong address"
            )
        if hello.broker == self._ours.broker:
            raise ProtocolError(f"the peer has our own number, {hello.broker}: every broker needs its own (node.id)")
        self.peer = hello
        self._session.greeted(hello)

    def drained(self) -> None:
        if not self._dead:
            self._session.drained()

    def closed(self, reason: str) -> None:
        self._channel = None
        if not self._dead:
            self._dead = True
            self._session.gone(reason)

    # Our side.

    def send(self, parts: Sequence[Part]) -> None:
        if self._channel is not None:
            self._sent_at = self._clock.now()
            self._channel.send(parts)

    def tick(self, now: float) -> None:
        silent = now - self.heard_at
        if silent > self._timeout_seconds:
            self.abort(f"silent for {silent:.1f} s" if self._channel is not None else f"not open after {silent:.1f} s")
        elif self.peer is not None and now - self._sent_at > self._timeout_seconds / PINGS_PER_TIMEOUT:
            self.send([frames.PING])

    def abort(self, reason: str) -> None:
        """End the link at once."""
        if self._dead:
            return
        self._dead = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()
        self._session.gone(reason)

    def _break(self, reason: str) -> None:
        log.warning("closing the link with %s: %s", self._who(), reason)
        self.abort(reason)

    def _who(self) -> str:
        if self.peer is not None:
            return f"broker {self.peer.broker}"
        return str(self._channel.peer) if self._channel is not None else "a broker"
