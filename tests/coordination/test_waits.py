"""Tasks in the background and who hears of their end."""

from __future__ import annotations

import asyncio

from headrace.coordination.waits import OwnedTask


def test_the_owner_of_a_task_hears_why_it_ended_and_nothing_when_it_is_closed() -> None:
    failures: list[BaseException] = []

    async def fail() -> None:
        raise ValueError("a bug")

    async def wait() -> None:
        await asyncio.get_running_loop().create_future()

    async def body() -> None:
        failing, waiting, idle = (OwnedTask(failures.append) for _ in range(3))
        failing.start(fail())
        waiting.start(wait())
        await asyncio.sleep(0)
        for task in (failing, waiting, idle):
            await task.close()
        await asyncio.sleep(0)

    asyncio.run(body())
    assert [str(failure) for failure in failures] == ["a bug"]
