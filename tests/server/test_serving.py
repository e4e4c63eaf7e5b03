"""How a server process ends when something happens while it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.server import process

DEADLINE_SECONDS = 120.0


class Waiting:
    """A server whose start waits for others for ever, while one of its parts fails."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]) -> None:
        loop.call_soon(failed, RuntimeError("a part is gone"))
        self.stopped = False

    async def start(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        self.stopped = True

    def listening(self) -> list[str]:
        raise AssertionError("it never stood")

    def described(self) -> str:
        raise AssertionError("it never stood")


def test_a_part_that_fails_ends_a_start_that_waits() -> None:
    made: list[Waiting] = []

    def make(loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]) -> Waiting:
        made.append(Waiting(loop, failed))
        return made[0]

    assert asyncio.run(asyncio.wait_for(process._serve(make), DEADLINE_SECONDS)) == 1
    assert made[0].stopped
