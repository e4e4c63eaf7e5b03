"""What a client of etcd sees when nodes are killed, paused and started again. Nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import collections
import functools
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from brokers import free_port
from coordination.etcd_clients import DEADLINE_SECONDS, client, clients, reaching, until
from coordination.losing_proxy import LosingProxy
from etcd_nodes import EtcdNodes, etcd_nodes
from headrace.coordination.etcd import EtcdCoordination
from headrace.coordination.etcd_connection import EtcdAccess
from headrace.errors import CoordinationError
from headrace.ports.coordination import Behind, Compare, OutcomeUnknown, Put
from proving import proves

PREFIX = "/faults/"
FAULTS = 60


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd"), 3) as etcd:
        yield etcd


@dataclass(slots=True)
class History:
    """What a writer was told, and what a watch delivered."""

    written: dict[int, list[str]] = field(default_factory=dict)
    """Keys by the revision that the writer was answered."""
    seen: dict[int, list[str]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    turns: int = 0
    stop: bool = False


async def write(coordination: EtcdCoordination, writer: int, history: History) -> None:
    """Counts a key of its own up, two keys at a time, each swap on the revision of the last."""
    counter = f"{PREFIX}{writer}/counter"
    found = await coordination.get(counter)
    revision, turn = (0, 0) if found is None else (found.mod_revision, int(found.value))
    while not history.stop:
        turn += 1
        twin = f"{PREFIX}{writer}/{turn}"
        held = Compare(counter, "mod_revision", "=", revision)
        result = await coordination.transact([held], [Put(counter, b"%d" % turn), Put(twin, b"")])
        assert result.succeeded, f"turn {turn} of writer {writer} was lost to nobody"
        revision = result.revision
        history.written[revision] = [counter, twin]
        history.turns += 1


async def follow(coordination: EtcdCoordination, start: int, history: History) -> None:
    async for response in coordination.watch(PREFIX, start):
        for event in response.events:
            history.seen.setdefault(event.mod_revision, []).append(event.key)
        revisions = list(dict.fromkeys(event.mod_revision for event in response.events))
        assert revisions == sorted(revisions)
        history.order.extend(revisions)
        assert response.revision == revisions[-1]


async def disturbed(etcd: EtcdNodes, faults: Sequence[Callable[[], None]]) -> History:
    """Two writers and two watches while the faults happen, each after writes went through again."""
    history, second = History(), History()
    async with clients(etcd, 4, call_seconds=DEADLINE_SECONDS) as (one, two, three, four):
        start = (await one.list(PREFIX)).revision + 1
        running = [
            asyncio.ensure_future(work)
            for work in (
                write(one, 1, history),
                write(two, 2, history),
                follow(three, start, history),
                follow(four, start, second),
            )
        ]
        failed = asyncio.gather(*running)

        async def went_on(turns: int = 20) -> None:
            before = history.turns
            await until("writes to go on", lambda: history.turns >= before + turns or failed.done())
            if failed.done():
                failed.result()

        await went_on()
        for fault in faults:
            await asyncio.get_running_loop().run_in_executor(None, fault)
            await went_on()
        history.stop = True
        await asyncio.gather(*running[:2])
        last = max(history.written)
        await until("both watches to have seen it all", lambda: last in history.seen and last in second.seen)
        for task in running[2:]:
            task.cancel()
        await asyncio.gather(failed, return_exceptions=True)
        for found in (history, second):
            assert found.order == sorted(set(found.order)), "a revision came twice or out of order"
            assert found.seen == history.written
    return history


@proves("G3")
def test_watches_and_transactions_survive_the_kill_of_one_of_the_leader_and_of_all(three_nodes: EtcdNodes) -> None:
    etcd = three_nodes

    def kill_one() -> None:
        etcd.kill((etcd.leader() + 1) % 3)

    def kill_leader() -> None:
        etcd.start_all()
        etcd.kill(etcd.leader())

    def kill_all() -> None:
        etcd.start_all()
        etcd.kill_all()
        etcd.start_all()

    history = asyncio.run(disturbed(etcd, [kill_one, kill_leader, kill_all]))
    assert history.turns >= 60


@pytest.mark.long
@proves("G3")
def test_watches_and_transactions_survive_many_kills_and_pauses(
    three_nodes: EtcdNodes, seed: int, proof_report: Callable[..., None]
) -> None:
    etcd, chance = three_nodes, random.Random(seed)
    done: collections.Counter[str] = collections.Counter()

    def kill(which: str) -> None:
        done[which] += 1
        etcd.start_all()
        if which == "all":
            etcd.kill_all()
            etcd.start_all()
        elif which == "pause":
            paused = chance.randrange(3)
            etcd.pause(paused)
            threading.Event().wait(chance.uniform(0.1, 5))
            etcd.resume(paused)
        else:
            leader = etcd.leader()
            etcd.kill(leader if which == "leader" else (leader + chance.choice((1, 2))) % 3)

    faults = [functools.partial(kill, chance.choice(("one", "leader", "all", "pause"))) for _ in range(FAULTS)]
    history = asyncio.run(disturbed(etcd, faults))
    proof_report(
        faults=FAULTS, transactions=history.turns, events_each_of_two_watches=2 * len(history.written), lost=0, twice=0,
        **done,
    )  # fmt: skip


def test_calls_leases_and_watches_leave_a_node_that_says_nothing(three_nodes: EtcdNodes) -> None:
    etcd = three_nodes.start_all()

    async def body() -> None:
        async with clients(etcd, 2, attempt_seconds=0.3) as (subject, other):
            start = await subject.put("/quiet/a", b"")
            lease = await subject.grant_lease(30)
            watch = subject.watch("/quiet/", start + 1)
            waiting = asyncio.ensure_future(anext(watch))
            await other.put("/noise", b"")
            etcd.pause(0)
            try:
                assert await subject.keep_alive(lease)
                revision = await other.put("/quiet/b", b"")
                response = await asyncio.wait_for(waiting, DEADLINE_SECONDS)
                assert [(event.key, event.mod_revision) for event in response.events] == [("/quiet/b", revision)]
            finally:
                etcd.resume(0)
            await subject.revoke_lease(lease)

    asyncio.run(body())


def test_a_lease_outlives_etcd_and_its_holder_hears_that_nobody_answers(three_nodes: EtcdNodes) -> None:
    etcd = three_nodes.start_all()

    async def body() -> None:
        async with clients(etcd, 1, attempt_seconds=0.3) as (subject,):
            lease = await subject.grant_lease(3)
            await subject.put("/held", b"", lease)
            etcd.kill_all()
            with pytest.raises(CoordinationError, match=r"did not answer, could not renew a lease .*Check"):
                await subject.keep_alive(lease)
            etcd.start_all()

            async def renewed() -> bool:
                try:
                    return await subject.keep_alive(lease)
                except CoordinationError:
                    return False

            await until("the lease to be renewed", renewed)
            found = await subject.get("/held")
            assert found is not None
            assert found.lease == lease

    asyncio.run(body())


def test_where_nobody_listens_an_operator_hears_what_to_check() -> None:
    async def body() -> None:
        nowhere = EtcdAccess((f"127.0.0.1:{free_port()}",))
        subject = reaching(nowhere, call_seconds=0.2)
        try:
            for call in (subject.get("/a"), subject.put("/a", b""), subject.grant_lease(1), subject.list("/")):
                with pytest.raises(
                    CoordinationError, match=r"did not answer.*refused.*nothing was changed.*coordination"
                ) as told:
                    await asyncio.wait_for(call, DEADLINE_SECONDS)
                assert not isinstance(told.value, OutcomeUnknown)
                assert nowhere.addresses[0] in str(told.value)
        finally:
            await subject.close()

    asyncio.run(body())


def test_a_watch_that_hears_of_no_change_does_not_fall_behind_compaction(tmp_path: Path) -> None:
    flags = ["--experimental-watch-progress-notify-interval=50ms"]

    async def body(etcd: EtcdNodes) -> None:
        proxy = LosingProxy(etcd.addresses[0])
        subject, other = reaching(EtcdAccess((await proxy.start(),))), client(etcd, "2")
        start = await other.put("/quiet/a", b"")
        waiting = asyncio.ensure_future(anext(subject.watch("/quiet/", start + 1)))
        for _ in range(10):
            newest = await other.put("/noise", b"")
        for _ in range(3):
            # Nothing else comes by this road but what etcd says of the watch's progress.
            proxy.answered.clear()
            await asyncio.wait_for(proxy.answered.wait(), DEADLINE_SECONDS)
        await other.compact(newest)
        etcd.kill(0)
        etcd.start(0)
        revision = await other.put("/quiet/b", b"")
        response = await asyncio.wait_for(waiting, DEADLINE_SECONDS)
        assert [(event.key, event.mod_revision) for event in response.events] == [("/quiet/b", revision)]
        for one in (subject, other):
            await one.close()
        await proxy.close()

    with etcd_nodes(tmp_path, flags=flags) as etcd:
        asyncio.run(body(etcd))


@proves("G14")
def test_a_watch_notices_a_restored_etcd_that_has_come_as_far_by_other_changes(tmp_path: Path) -> None:
    async def body(etcd: EtcdNodes) -> None:
        data, copy, other_course = etcd.nodes[0].data, tmp_path / "copy", tmp_path / "other course"
        subject, other = client(etcd), client(etcd, "2")
        start = await other.put("/restored/a", b"")
        etcd.stop(0)
        shutil.copytree(data, copy)
        etcd.start(0)
        for _ in range(3):
            await other.put("/restored/x", b"")
        etcd.stop(0)
        data.rename(other_course)
        copy.rename(data)
        etcd.start(0)
        watch = subject.watch("/restored/", start)
        assert (await anext(watch)).revision == start
        waiting = asyncio.ensure_future(anext(watch))
        assert await other.put("/restored/b", b"") == start + 1
        assert (await asyncio.wait_for(waiting, DEADLINE_SECONDS)).revision == start + 1
        waiting = asyncio.ensure_future(anext(watch))
        etcd.stop(0)
        data.rename(copy)
        other_course.rename(data)
        etcd.start(0)
        with pytest.raises(Behind, match=f"does not have /restored/b as it was seen at revision {start + 1}"):
            await asyncio.wait_for(waiting, DEADLINE_SECONDS)
        for one in (subject, other):
            await one.close()

    with etcd_nodes(tmp_path) as etcd:
        asyncio.run(body(etcd))


@pytest.mark.long
def test_a_watch_alone_notices_that_its_connection_is_dead(tmp_path: Path, proof_report: Callable[..., None]) -> None:
    """No packet comes back and no other call finds out: gRPC's pings do."""

    async def body(etcd: EtcdNodes) -> None:
        proxy = LosingProxy(etcd.addresses[0])
        subject, other = reaching(EtcdAccess((await proxy.start(), etcd.addresses[0]))), client(etcd, "2")
        start = await subject.put("/cut/a", b"")
        watch = subject.watch("/cut/", start)
        assert (await anext(watch)).revision == start
        waiting = asyncio.ensure_future(anext(watch))
        proxy.losing = proxy.holding = True
        began = time.monotonic()
        revision = await other.put("/cut/b", b"")
        assert (await asyncio.wait_for(waiting, DEADLINE_SECONDS)).revision == revision
        proof_report(seconds_until_the_watch_had_moved=round(time.monotonic() - began, 1))
        for one in (subject, other):
            await one.close()
        await proxy.close()

    with etcd_nodes(tmp_path) as etcd:
        asyncio.run(body(etcd))
