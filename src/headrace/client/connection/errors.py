"""What can go wrong in the engine itself, beside what `client.errors` has for brokers."""

from __future__ import annotations

from headrace.client.errors import BrokerUnreachable
from headrace.errors import HeadraceError


class NeverSent(BrokerUnreachable):
    """The broker cannot be reached, and not one byte of the request was handed to the kernel: it has not seen it."""


class EngineClosed(HeadraceError):
    """The client was closed while this was under way, or before it was asked."""


class CalledWithin(HeadraceError):
    """A call that waits was made by code that runs in the middle of another call of the same thread."""

    def __init__(self) -> None:
        super().__init__(
            "this was called in the middle of another call of the same client, by a signal's handler or a finalizer: "
            "use send_async there, or set a flag and send outside of it"
        )


class ForkedEngine(HeadraceError):
    """A client made before a fork was used in the child."""

    def __init__(self) -> None:
        super().__init__(
            "this client was made before the process forked, and its connections belong to the parent; "
            "make the Producer or Consumer in the child, after the fork"
        )
