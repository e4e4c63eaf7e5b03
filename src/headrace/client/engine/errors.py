"""What can go wrong in the engine itself, beside what `client.refusal` has for brokers."""

from __future__ import annotations

from headrace.client.refusal import BrokerUnreachable
from headrace.errors import HeadraceError


class NeverSent(BrokerUnreachable):
    """The broker cannot be reached, and not one byte of the request was handed to the kernel: it has not seen it."""


class EngineClosed(HeadraceError):
    """The client was closed while this was under way, or before it was asked."""


class ForkedEngine(HeadraceError):
    """A client made before a fork was used in the child."""

    def __init__(self) -> None:
        super().__init__(
            "this client was made before the process forked, and its connections belong to the parent; "
            "make the Producer or Consumer in the child, after the fork"
        )
