"""The contract of the coordination port on the store in memory, and the faults that it can have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordination.coordination_contract import CoordinationContract, Store
from headrace.errors import CoordinationError
from headrace.ports.coordination import OutcomeUnknown, WatchResponse
from headrace.virtual.coordination import DEADLINE_SECONDS, CoordinationStore, VirtualCoordination
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.process import Process


class TestSimulated(CoordinationContract):
    kind: type[CoordinationStore] = CoordinationStore

    def open(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        @asynccontextmanager
        async def simulated() -> AsyncIterator[Store]:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            client = self.kind(loop.clock).client("one", loop.clock)
            yield Store(client, asyncio.sleep)
            await client.close()

        return simulated()

    def run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main)


LEASE_SECONDS = 5.0


class Scene:
    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.store = CoordinationStore(self.loop.clock, seed=1)
        self.processes = [Process(self.loop, name) for name in ("one", "two")]
        self.one, self.two = (self.store.client(process.name, process) for process in self.processes)

    def run(self, body: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        self.loop.run_until_complete(self.processes[0].run(body(self)))


def changes(client: VirtualCoordination, from_revision: int) -> AsyncIterator[WatchResponse]:
    return client.watch("/", from_revision)


def test_a_change_whose_answer_is_lost_is_made() -> None:
    async def body(scene: Scene) -> None:
        scene.store.answers_lost = 1.0
        with pytest.raises(OutcomeUnknown, match="it may have done it"):
            await scene.one.put("/a", b"1")
        scene.store.answers_lost = 0.0
        found = await scene.one.get("/a")
        assert found is not None
        assert found.version == 1

    Scene().run(body)


def test_a_late_change_is_made_after_its_client_gave_up() -> None:
    async def body(scene: Scene) -> None:
        scene.store.late = 1.0
        with pytest.raises(OutcomeUnknown):
            await scene.one.put("/a", b"1")
        assert await scene.one.get("/a") is None
        await asyncio.sleep(3 * DEADLINE_SECONDS)
        assert await scene.one.get("/a") is not None

    Scene().run(body)


def test_a_host_that_is_cut_off_loses_its_lease_and_others_see_it() -> None:
    async def body(scene: Scene) -> None:
        lease = await scene.one.grant_lease(LEASE_SECONDS)
        revision = await scene.one.put("/a", b"", lease)
        scene.store.cut("one")
        asked = scene.loop.time()
        with pytest.raises(CoordinationError):
            await scene.one.get("/a")
        assert scene.loop.time() - asked == pytest.approx(DEADLINE_SECONDS, abs=0.01)
        async with asyncio.timeout(2 * LEASE_SECONDS):
            assert [event.kind for event in (await anext(changes(scene.two, revision + 1))).events] == ["delete"]
        scene.store.heal("one")
        assert not await scene.one.keep_alive(lease)

    Scene().run(body)


def test_leases_begin_anew_when_the_store_returns() -> None:
    async def body(scene: Scene) -> None:
        lease = await scene.one.grant_lease(LEASE_SECONDS)
        await scene.one.put("/a", b"", lease)
        scene.store.stop()
        await asyncio.sleep(10 * LEASE_SECONDS)
        scene.store.start()
        await asyncio.sleep(0.9 * LEASE_SECONDS)
        assert await scene.two.get("/a") is not None
        await asyncio.sleep(0.2 * LEASE_SECONDS)
        assert await scene.two.get("/a") is None

    Scene().run(body)


def test_a_broken_watch_says_so_and_is_taken_up_without_loss() -> None:
    async def body(scene: Scene) -> None:
        first = await scene.one.put("/a", b"1")
        watch = changes(scene.two, first)
        seen = (await anext(watch)).revision
        scene.store.break_watches()
        await scene.one.put("/a", b"2")
        with pytest.raises(CoordinationError):
            await anext(watch)
        assert [event.value for event in (await anext(changes(scene.two, seen + 1))).events] == [b"2"]

    Scene().run(body)


def test_a_paused_process_hears_its_answers_late_and_its_change_is_made_in_time() -> None:
    scene = Scene()
    heard: list[float] = []

    async def put() -> None:
        await scene.one.put("/a", b"1")
        heard.append(scene.loop.time())

    scene.processes[0].run(put())
    scene.loop.run_until_complete(asyncio.sleep(0.0001))
    scene.processes[0].pause()
    scene.loop.run_until_complete(asyncio.sleep(1))
    assert heard == []
    assert scene.store.get("/a") is not None
    scene.processes[0].resume()
    scene.loop.run_until_complete(asyncio.sleep(1))
    assert heard == [pytest.approx(1.0001, abs=0.001)]
