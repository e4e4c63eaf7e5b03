"""The contract of the coordination port on several simulated nodes, and what can befall them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from headrace.errors import CoordinationError
from headrace.ports.coordination import Behind, Compacted, OutcomeUnknown, WatchResponse
from headrace.virtual.coordination import DEADLINE_SECONDS
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.process import Process
from headrace.virtual.quorum import ATTEMPT_SECONDS, ELECTION_SECONDS, NOTICE_SECONDS, CoordinationQuorum, Node
from virtual import test_virtual_coordination

LEASE_SECONDS = 5.0


class TestQuorum(test_virtual_coordination.TestSimulated):
    kind = CoordinationQuorum


class Scene:
    """Three nodes, and a client at each of the first two."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.store = CoordinationQuorum(self.loop.clock, seed=1)
        self.processes = [Process(self.loop, name) for name in ("one", "two")]
        self.one, self.two = (
            self.store.client(process.name, process, number) for number, process in enumerate(self.processes)
        )

    @property
    def nodes(self) -> list[Node]:
        return self.store.nodes

    def run(self, body: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        self.loop.run_until_complete(self.processes[0].run(body(self)))

    async def taken(self, work: Coroutine[Any, Any, Any]) -> float:
        asked = self.loop.time()
        await work
        return self.loop.time() - asked


async def following(watch: AsyncIterator[WatchResponse]) -> WatchResponse:
    return await asyncio.wait_for(anext(watch), DEADLINE_SECONDS)


def test_a_node_that_lags_answers_late_and_never_with_what_is_old() -> None:
    async def body(scene: Scene) -> None:
        await scene.two.put("/a", b"1")
        scene.store.slow(scene.nodes[0], 0.2)
        revision = await scene.two.put("/a", b"2")
        asked = scene.loop.time()
        found = await scene.one.get("/a")
        assert found is not None
        assert found.mod_revision == revision
        assert 0.1 < scene.loop.time() - asked < 0.3

    Scene().run(body)


def test_watches_at_a_node_that_lags_are_told_late() -> None:
    async def body(scene: Scene) -> None:
        revision = await scene.two.put("/a", b"1")
        slow, quick = (aiter(client.watch("/", revision + 1)) for client in (scene.one, scene.two))
        scene.store.slow(scene.nodes[0], 0.2)
        waiting = [asyncio.ensure_future(following(watch)) for watch in (slow, quick)]
        await scene.two.put("/a", b"2")
        assert (await waiting[1]).events[0].value == b"2"
        assert not waiting[0].done()
        assert 0.1 < await scene.taken(waiting[0]) < 0.3  # type: ignore[arg-type]

    Scene().run(body)


def test_a_watch_at_a_node_that_knows_less_says_so() -> None:
    async def body(scene: Scene) -> None:
        scene.store.slow(scene.nodes[0], 1.0)
        await scene.two.put("/a", b"1")
        revision = await scene.two.put("/a", b"2")
        with pytest.raises(Behind):
            await following(aiter(scene.one.watch("/", revision + 1)))

    Scene().run(body)


def test_who_does_not_reach_a_node_goes_on_at_the_next_and_its_watches_miss_nothing() -> None:
    async def body(scene: Scene) -> None:
        revision = await scene.one.put("/a", b"0")
        watch = aiter(scene.one.watch("/", revision + 1))
        waiting = asyncio.ensure_future(following(watch))
        await asyncio.sleep(0.1)
        scene.store.part("one", scene.nodes[0])
        await scene.two.put("/a", b"1")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert ATTEMPT_SECONDS <= await scene.taken(scene.one.get("/a")) < 2 * ATTEMPT_SECONDS
        assert [event.value for event in (await waiting).events] == [b"1"]
        assert await scene.taken(scene.one.get("/a")) < 0.1

    Scene().run(body)


def test_what_is_gone_when_a_watch_goes_on_elsewhere_is_told() -> None:
    async def body(scene: Scene) -> None:
        revision = await scene.one.put("/a", b"0")
        waiting = asyncio.ensure_future(following(aiter(scene.one.watch("/", revision + 1))))
        await asyncio.sleep(0.1)
        scene.store.part("one", scene.nodes[0])
        await scene.two.put("/a", b"1")
        last = await scene.two.put("/a", b"2")
        await scene.two.compact(last)
        await scene.one.get("/a")
        with pytest.raises(Compacted):
            await waiting

    Scene().run(body)


def test_a_node_that_is_cut_off_is_left_and_leases_run_on() -> None:
    async def body(scene: Scene) -> None:
        lease = await scene.two.grant_lease(LEASE_SECONDS)
        revision = await scene.two.put("/a", b"", lease)
        gone = asyncio.ensure_future(anext(aiter(scene.one.watch("/", revision + 1))))
        scene.store.cut_off(scene.nodes[1])
        assert await scene.taken(scene.one.get("/a")) < 0.1
        asked = scene.loop.time()
        assert await scene.two.get("/a") is not None
        assert scene.loop.time() - asked >= ATTEMPT_SECONDS
        assert [event.kind for event in (await gone).events] == ["delete"]
        assert not await scene.two.keep_alive(lease)

    Scene().run(body)


def test_a_node_that_has_noticed_that_it_is_alone_refuses_and_ends_its_watches() -> None:
    async def body(scene: Scene) -> None:
        revision = await scene.one.put("/a", b"0")
        waiting = asyncio.ensure_future(following(aiter(scene.two.watch("/", revision + 1))))
        await asyncio.sleep(0.1)
        scene.store.cut_off(scene.nodes[1])
        await scene.one.put("/a", b"1")
        await asyncio.sleep(0.5 * NOTICE_SECONDS)
        assert not waiting.done()
        await asyncio.sleep(NOTICE_SECONDS)
        assert waiting.done()
        assert await scene.taken(scene.two.get("/a")) < 0.1

    Scene().run(body)


def test_without_a_leader_nothing_is_done_and_leases_begin_anew_with_the_next() -> None:
    async def body(scene: Scene) -> None:
        lease = await scene.two.grant_lease(LEASE_SECONDS)
        await scene.two.put("/a", b"", lease)
        await asyncio.sleep(0.9 * LEASE_SECONDS)
        scene.store.cut_off(scene.nodes[0])
        assert scene.store.leader is None
        revision = scene.store.revision
        await asyncio.sleep(ELECTION_SECONDS[1])
        assert scene.store.leader in scene.nodes[1:]
        assert scene.store.revision == revision
        await asyncio.sleep(0.9 * LEASE_SECONDS)
        assert await scene.two.get("/a") is not None
        await asyncio.sleep(0.3 * LEASE_SECONDS)
        assert await scene.two.get("/a") is None

    Scene().run(body)


def test_without_a_majority_nobody_is_elected_until_a_node_returns() -> None:
    async def body(scene: Scene) -> None:
        for node in scene.nodes[:2]:
            scene.store.cut_off(node)
        with pytest.raises(OutcomeUnknown):
            await scene.one.put("/a", b"1")
        with pytest.raises(CoordinationError):
            await scene.two.get("/a")
        scene.store.heal_node(scene.nodes[1])
        await asyncio.sleep(ELECTION_SECONDS[1])
        assert await scene.two.put("/a", b"2")

    Scene().run(body)


def test_a_change_that_is_sent_again_is_made_once() -> None:
    async def body(scene: Scene) -> None:
        scene.store.answers_lost = 1.0
        asyncio.get_running_loop().call_later(1.5 * ATTEMPT_SECONDS, setattr, scene.store, "answers_lost", 0.0)
        revision = await scene.one.put("/a", b"1")
        assert scene.store.losses > 0
        found = await scene.one.get("/a")
        assert found is not None
        assert (found.version, found.mod_revision) == (1, revision)

    Scene().run(body)


def test_a_leader_that_does_not_know_that_it_is_cut_off_says_that_a_lease_holds() -> None:
    async def body(scene: Scene) -> None:
        lease = await scene.one.grant_lease(LEASE_SECONDS)
        scene.store.cut_off(scene.nodes[0])
        assert await scene.taken(scene.one.keep_alive(lease)) < 0.1
        await asyncio.sleep(NOTICE_SECONDS)
        scene.store.revoke(lease)
        assert not await scene.one.keep_alive(lease)

    Scene().run(body)
