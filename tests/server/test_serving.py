"""How a server process ends: when something happens while it starts, and when it is asked to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from headrace.server import process
from proving import proves

DEADLINE_SECONDS = 120.0


class Waiting:
    """A server whose start waits for others for ever, while one of its parts fails."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[BaseException], None]) -> None:
        loop.call_soon(failed, RuntimeError("a part is gone"))
        self.stopped = False

    async def start(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> process.Ending:
        self.stopped = True
        return process.Ending("nothing closed")

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


@pytest.fixture(autouse=True)
def kept_signals() -> Iterator[None]:
    """A server keeps the handlers that it has set: its process ends with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Ends:
    """A server that is asked to stop as soon as it stands."""

    def __init__(self, ending: process.Ending | None) -> None:
        self.ending = ending

    async def start(self) -> None:
        for _ in range(1 if self.ending else 2):
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)

    async def stop(self) -> process.Ending:
        return self.ending or await asyncio.get_running_loop().create_future()

    def listening(self) -> list[str]:
        return ["kafka=nowhere"]

    def described(self) -> str:
        return "a server"


@proves("U6")
@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        (process.Ending("2 partitions closed"), 0, "stopped cleanly: 2 partitions closed in "),
        (process.Ending("2 partitions closed", "the disk is full"), 1, "not stopped cleanly after "),
        (None, 1, "it took more than 0.05 s; the next start looks through what was open"),
    ],
)
def test_the_last_line_says_whether_the_end_was_clean(
    ending: process.Ending | None,
    code: int,
    says: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(process, "STOP_SECONDS", 0.05)
    assert asyncio.run(asyncio.wait_for(process._serve(lambda _loop, _failed: Ends(ending)), DEADLINE_SECONDS)) == code
    assert says in caplog.messages[-1]
    assert ("SIGTERM again: stopping since SIGTERM, for at most 0.05 s" in caplog.messages) == (ending is None)
