"""The network port: listening, connecting, and channels of bytes.

Real: system.network. In memory, seeded, for tests and the simulator: virtual.network.

A channel owns the receive buffer. `Session.received` gets everything that is buffered and answers how much of it
it is done with; the rest is offered again with more behind it. A session that needs a larger buffer for the frame
at hand sets `channel.want_bytes`. Views are only valid during the call: what is kept must be copied or written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import CannotListen
from headrace.ports.disk import Buffer, FileSlice

Part = Buffer | FileSlice


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Channel(Protocol):
    """One connection, seen from this side."""

    peer: Address
    local: Address
    want_bytes: int

    def send(self, parts: Sequence[Part]) -> None:
        """Queue the parts and send what the peer takes now; never blocks."""
        ...

    def queued_bytes(self) -> int:
        """What was given to `send` and has not left yet."""
        ...

    def pause(self) -> None:
        """Read nothing more from the peer until `resume`."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None:
        """Send what is queued, then close; nothing more is received."""
        ...

    def abort(self) -> None:
        """Close at once; what is queued is dropped."""
        ...


class Session(Protocol):
    """What runs on top of a channel."""

    def opened(self, channel: Channel) -> None: ...

    def received(self, data: memoryview) -> int:
        """Bytes from the peer; answers how many of them are used up."""
        ...

    def drained(self) -> None:
        """All that was queued has left."""
        ...

    def closed(self, reason: str) -> None:
        """The last call on a session: the connection is gone."""
        ...


class Listener(Protocol):
    address: Address

    def close(self) -> None: ...


class Network(Protocol):
    def listen(self, address: Address, accept: Callable[[], Session | None], tls: object | None = None) -> Listener:
        """Accept connections; `accept` makes a session for each, or refuses by None. Port 0 picks a free one.
        CannotListen says why there is none; `chosen_with` adds what the operator gives it with."""
        ...

    def connect(self, address: Address, session: Session, tls: object | None = None) -> None:
        """Open a connection; the session hears `opened`, or `closed` if that fails."""
        ...


@contextlib.contextmanager
def chosen_with(option: str) -> Iterator[None]:
    """Around `listen`: who is told to choose another address is told where."""
    try:
        yield
    except CannotListen as error:
        raise CannotListen(f"{error} with {option}") from None
