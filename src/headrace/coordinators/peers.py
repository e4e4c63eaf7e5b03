"""How a coordinator asks the other brokers: what the front end hands in, which has the connections to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.wire.message import Message


class Ask(Protocol):
    """`kafka.peers.Peers.ask`. `reply` hears once, later: the answer, or why there is none. What is asked `again`,
    because it could not be done before, does not hold up what is asked for the first time."""

    def __call__(
        self,
        broker: int,
        api_key: int,
        version: int,
        message: Message,
        reply: Callable[[Message | HeadraceError], None],
        timeout_ms: int,
        *,
        again: bool,
    ) -> None: ...
