"""asyncio on virtual time: order, time, and what belongs to a process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from headrace.ports.clock import Clock
from headrace.system.clock import LoopClock
from headrace.virtual.loop import Stalled, VirtualLoop
from headrace.virtual.process import Process


def until(loop: asyncio.AbstractEventLoop, condition: Callable[[], object]) -> None:
    async def wait() -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.001)

    loop.run_until_complete(wait())


@pytest.mark.parametrize("kind", ["system", "process"])
def test_calls_run_soon_in_order_and_timers_by_their_time(kind: str) -> None:
    virtual = VirtualLoop()
    loop = virtual if kind == "process" else asyncio.new_event_loop()
    clock: Clock = Process(virtual, "one") if kind == "process" else LoopClock(loop)
    ran: list[str] = []
    clock.call_later(0.02, lambda: ran.append("later"))
    clock.call_later(0.01, lambda: ran.append("sooner"))
    clock.call_later(0.01, lambda: ran.append("never")).cancel()
    for name in ("a", "b", "c"):
        clock.call_soon(lambda name=name: ran.append(name))  # type: ignore[misc]
    assert ran == []
    began, wall_ms = clock.now(), clock.wall_ms()
    until(loop, lambda: len(ran) == 5)
    assert ran == ["a", "b", "c", "sooner", "later"]
    assert clock.now() - began >= 0.02
    assert clock.wall_ms() - wall_ms >= 19


def test_an_hour_of_sleep_takes_no_time() -> None:
    loop = VirtualLoop()

    async def sleep() -> float:
        await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        return loop.time()

    assert loop.run_until_complete(sleep()) == pytest.approx(3660)


def test_timers_of_one_moment_run_in_the_order_they_were_set() -> None:
    loop = VirtualLoop()
    ran: list[int] = []
    for n in range(50):
        loop.call_at(1.0, ran.append, n)
    loop.run_until_complete(asyncio.sleep(2))
    assert ran == list(range(50))


def test_who_waits_for_nothing_is_told() -> None:
    loop = VirtualLoop()
    with pytest.raises(Stalled):
        loop.run_until_complete(loop.create_future())


def test_jitter_changes_the_order_with_the_seed_alone() -> None:
    def course(seed: int) -> list[int]:
        loop = VirtualLoop(seed=seed, jitter_seconds=0.01)
        ran: list[int] = []
        for n in range(20):
            loop.call_later(0.001 * n, ran.append, n)
        loop.run_until_complete(asyncio.sleep(1))
        return ran

    assert course(1) == course(1)
    assert course(1) != course(2)


def test_a_runner_may_use_the_loop() -> None:
    async def work() -> str:
        async with asyncio.timeout(10):
            await asyncio.gather(*(asyncio.sleep(n) for n in range(5)))
        return "done"

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(work()) == "done"


class Counting:
    """Work of a process that shows in every way it can go on: task, timer, call."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.turns = 0
        self.rings: list[float] = []
        self.closed = False
        self._ring()
        process.run(self._count())

    def _ring(self) -> None:
        self.rings.append(self.process.now())
        self.process.call_later(1.0, self._ring)

    async def _count(self) -> None:
        try:
            while True:
                await asyncio.sleep(0.1)
                await asyncio.get_running_loop().create_task(asyncio.sleep(0))
                self.turns += 1
        finally:
            self.closed = True


def test_a_paused_process_does_nothing_and_then_all_that_came_due() -> None:
    loop = VirtualLoop()
    process, other = Process(loop, "one"), Process(loop, "two")
    counting, beside = Counting(process), Counting(other)
    loop.run_until_complete(asyncio.sleep(5.05))
    turns = counting.turns
    assert 45 <= turns <= 50
    process.pause()
    loop.run_until_complete(asyncio.sleep(10))
    assert counting.turns == turns
    assert len(counting.rings) == 6
    assert len(beside.rings) == 16
    process.resume()
    loop.run_until_complete(asyncio.sleep(1.5))
    assert counting.turns > turns
    assert counting.rings[6] == pytest.approx(15.05)


def test_a_dead_process_never_runs_again_not_even_its_finally() -> None:
    loop = VirtualLoop()
    process = Process(loop, "one")
    counting = Counting(process)
    loop.run_until_complete(asyncio.sleep(2.05))
    process.pause()
    loop.run_until_complete(asyncio.sleep(1))
    turns, rings = counting.turns, len(counting.rings)
    process.die()
    process.resume()
    loop.run_until_complete(asyncio.sleep(10))
    assert (counting.turns, len(counting.rings), counting.closed) == (turns, rings, False)
    process.bury()
    assert counting.closed


def test_who_waits_for_a_process_does_not_belong_to_it() -> None:
    loop = VirtualLoop()
    process = Process(loop, "one")

    async def outside() -> float:
        await process.run(asyncio.sleep(1))
        process.die()
        await asyncio.sleep(1)
        return loop.time()

    assert loop.run_until_complete(outside()) == pytest.approx(2)
