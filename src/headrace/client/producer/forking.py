"""In a forked child every send of a producer made before is refused: nobody there would let its batches leave."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.client.connection.errors import ForkedEngine
from headrace.client.connection.weak_set import Remembered

if TYPE_CHECKING:
    from headrace.client.producer.sender import Sender

_left_behind: Remembered[Sender] = Remembered()


def stays_with_parent(sender: Sender) -> None:
    _left_behind.add(sender)


def _after_fork() -> None:
    for sender in _left_behind:
        sender.refusal = ForkedEngine()
        for desk in sender.desks():
            desk.router_here.closed = sender.refusal
    _left_behind.clear()


os.register_at_fork(after_in_child=_after_fork)
