"""Clients of a test's etcd, and waiting on their loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from etcd_nodes import EtcdNodes
from headrace.coordination.etcd import EtcdCoordination
from headrace.coordination.etcd_connection import EtcdAccess
from headrace.system.clock import LoopClock

DEADLINE_SECONDS: Final = 120.0
LOOK_AGAIN_SECONDS: Final = 0.01


def client(etcd: EtcdNodes, owner: str = "1", first: int = 0, **times: float) -> EtcdCoordination:
    return reaching(EtcdAccess(tuple(etcd.addresses)), owner, first, **times)


def reaching(access: EtcdAccess, owner: str = "1", first: int = 0, **times: float) -> EtcdCoordination:
    return EtcdCoordination(access, LoopClock(asyncio.get_running_loop()), owner, first, **times)


@asynccontextmanager
async def clients(etcd: EtcdNodes, count: int, **times: float) -> AsyncIterator[list[EtcdCoordination]]:
    """So many, which begin at different nodes."""
    made = [client(etcd, str(number), number, **times) for number in range(count)]
    try:
        yield made
    finally:
        for one in made:
            await one.close()


async def until(what: str, holds: Callable[[], bool | Awaitable[bool]]) -> None:
    for _ in range(int(DEADLINE_SECONDS / LOOK_AGAIN_SECONDS)):
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
    raise AssertionError(f"waited {DEADLINE_SECONDS:g} s for {what}")
