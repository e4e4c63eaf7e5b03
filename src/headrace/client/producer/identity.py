"""The producer id under which the batches of a desk are numbered: asked for once, and again when a lane has used it up.

Desks have ids of their own: two lanes of one partition under one id would mix their sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.client.connection.connections import Network
from headrace.client.errors import Refusal
from headrace.client.producer.lane import Lane
from headrace.errors import Code, HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message

PAUSE_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0
TRANSACTION_TIMEOUT_MS: Final = 60_000


class Identities:
    """`on_change` is called when an id has come, or when it is time to ask again."""

    def __init__(self, network: Network, timeout_s: float, on_change: Callable[[], None]) -> None:
        self.failure: HeadraceError | None = None
        self._network = network
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._known: tuple[int, int] | None = None
        self._asking = False
        self._pause_s = PAUSE_S

    def give(self, lane: Lane) -> bool:
        """Let the lane have an id that it has not used; False if it has to wait for one."""
        if self._known is None or self._known[0] == lane.producer_id:
            self._known = None
            return False
        lane.adopt(*self._known)
        return True

    def ask(self) -> None:
        if self._asking or self._known is not None:
            return
        self._asking = True
        body = Message(transactional_id=None, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS)
        self._network.ask_any(apis.INIT_PRODUCER_ID, body, self._heard, timeout_s=self._timeout_s)

    def _heard(self, answer: Message | HeadraceError) -> None:
        if not isinstance(answer, HeadraceError) and answer.error_code != Code.NONE:
            answer = Refusal(answer.error_code, "producer id")
        if isinstance(answer, HeadraceError):
            self.failure = answer
            reactor = self._network.reactor
            reactor.call_at(reactor.now() + self._pause_s, self._again)
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            return
        self._asking, self._pause_s, self.failure = False, PAUSE_S, None
        self._known = (answer.producer_id, answer.producer_epoch)
        self._on_change()

    def _again(self) -> None:
        self._asking = False
        self._on_change()
