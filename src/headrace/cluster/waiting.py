"""A coroutine's wait by the injected clock."""

from __future__ import annotations

import asyncio

from headrace.ports.clock import Clock


async def pause(clock: Clock, seconds: float) -> None:
    """Return after the delay; called off with the task that waits."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_later(seconds, lambda: None if done.done() else done.set_result(None))
    try:
        await done
    finally:
        timer.cancel()
