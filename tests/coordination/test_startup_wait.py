"""How long a start waits for coordination, and what it says meanwhile; on virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace.coordination.startup_wait import NO_END, SAY_AGAIN_SECONDS, Patience
from headrace.coordination.waits import pause
from headrace.errors import CoordinationError
from headrace.ports.coordination import CoordinationRefused
from headrace.virtual.loop import VirtualLoop
from proving import proves

CALL_SECONDS = 8.0


class Store:
    """Answers from a certain time on; until then every call takes its time and fails."""

    def __init__(self, loop: VirtualLoop, from_seconds: float) -> None:
        self.clock = loop.clock
        self.from_seconds = from_seconds
        self.asked = 0

    async def ask(self) -> str:
        self.asked += 1
        if self.clock.now() >= self.from_seconds:
            return "here"
        await pause(self.clock, CALL_SECONDS)
        raise CoordinationError("nobody is there")


def test_what_comes_late_is_waited_for_and_said_every_so_often(caplog: pytest.LogCaptureFixture) -> None:
    loop = VirtualLoop()
    store = Store(loop, 100.0)
    with caplog.at_level(logging.WARNING):
        patience = Patience(loop.clock, "etcd at 127.0.0.1:2379", NO_END)
        assert loop.run_until_complete(patience.answer(store.ask)) == "here"
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == (
        "waiting for etcd at 127.0.0.1:2379 since 1 s, as long as it takes (coordination.wait.ms): no answer yet"
    )
    assert "nobody is there" in said[1]
    assert len(said) == 1 + (100 - 1) // SAY_AGAIN_SECONDS
    assert store.asked > 10


@pytest.mark.parametrize(("wait_ms", "asked"), [(0, 1), (30_000, 4)])
def test_the_wait_has_an_end(wait_ms: int, asked: int) -> None:
    loop = VirtualLoop()
    store = Store(loop, 1000.0)
    with pytest.raises(CoordinationError, match="nobody is there"):
        loop.run_until_complete(Patience(loop.clock, "etcd", wait_ms).answer(store.ask))
    assert store.asked == asked


@proves("U1")
def test_the_wait_ends_before_a_call_that_takes_longer() -> None:
    loop = VirtualLoop()
    store = Store(loop, 1000.0)
    with pytest.raises(CoordinationError, match=r"no answer from etcd at a:1 within 1 s .*no answer yet"):
        loop.run_until_complete(Patience(loop.clock, "etcd at a:1", 1000).answer(store.ask))
    assert loop.clock.now() == 1.0
    with pytest.raises(CoordinationError, match=r"within 20 s .*nobody is there"):
        loop.run_until_complete(Patience(loop.clock, "etcd", 20_000).answer(store.ask))
    assert loop.clock.now() == 21.0


def test_a_start_that_is_called_off_ends_its_wait() -> None:
    loop = VirtualLoop()
    store = Store(loop, 1000.0)

    async def call_off() -> None:
        waiting = asyncio.ensure_future(Patience(loop.clock, "etcd", 5000).answer(store.ask))
        await pause(loop.clock, 1.0)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(call_off())
    assert loop.clock.now() == 1.0


def test_what_is_refused_is_not_waited_for() -> None:
    loop = VirtualLoop()
    asked: list[float] = []

    async def refuse() -> str:
        asked.append(loop.clock.now())
        raise CoordinationRefused("invalid user ID or password")

    with pytest.raises(CoordinationRefused):
        loop.run_until_complete(Patience(loop.clock, "etcd", NO_END).answer(refuse))
    assert asked == [0.0]
