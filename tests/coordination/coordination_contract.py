"""What every implementation of the Coordination port does. A test class of its own binds this to one implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import CoordinationError
from headrace.ports.coordination import (
    TRANSACTION_BYTES_MAX,
    Behind,
    Compacted,
    Compare,
    Coordination,
    Delete,
    Event,
    KeyValue,
    Put,
    WatchResponse,
)

DEADLINE_SECONDS = 20.0


@dataclass(slots=True)
class Store:
    """An implementation under test, with the means to let its time pass."""

    coordination: Coordination
    let_pass: Callable[[float], Awaitable[None]]
    lease_seconds: float = 5.0
    """A lease that is short here."""


Body = Callable[[Store], Coroutine[Any, Any, None]]


def absent(key: str) -> Compare:
    return Compare(key, "create_revision", "=", 0)


async def have(store: Store, key: str) -> KeyValue:
    found = await store.coordination.get(key)
    assert found is not None
    return found


async def following(watch: AsyncIterator[WatchResponse]) -> WatchResponse:
    return await asyncio.wait_for(anext(watch), DEADLINE_SECONDS)


async def events(watch: AsyncIterator[WatchResponse], count: int) -> list[Event]:
    """At least `count` events, in order."""
    seen: list[Event] = []
    while len(seen) < count:
        seen.extend((await following(watch)).events)
    return seen


class CoordinationContract:
    def open(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        raise NotImplementedError

    def run(self, folder: Path, body: Body) -> None:
        async def within() -> None:
            async with self.open(folder) as store:
                await asyncio.wait_for(body(store), 3 * DEADLINE_SECONDS)

        self.run_loop(within())

    def run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(main)

    def test_a_key_carries_its_revisions_and_version(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            first = await store.coordination.put("/a", b"1")
            second = await store.coordination.put("/a", b"2")
            assert second == first + 1
            assert await have(store, "/a") == KeyValue("/a", b"2", first, second, 2, 0)
            assert await store.coordination.delete("/a") == second + 1
            assert await store.coordination.get("/a") is None
            third = await store.coordination.put("/a", b"3")
            assert await have(store, "/a") == KeyValue("/a", b"3", third, third, 1, 0)

        self.run(tmp_path, body)

    def test_a_listing_is_in_key_order_below_its_prefix_at_one_revision(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            for key in ("/t/b", "/t/a", "/t/a/x", "/u", "/t", "/t/é"):
                revision = await store.coordination.put(key, key.encode())
            listing = await store.coordination.list("/t/")
            assert [entry.key for entry in listing.entries] == ["/t/a", "/t/a/x", "/t/b", "/t/é"]
            assert listing.revision == revision

        self.run(tmp_path, body)

    def test_a_long_listing_is_whole(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            keys = [f"/t/{n:04}" for n in range(2100)]
            for first in range(0, len(keys), 100):
                result = await store.coordination.transact([], [Put(key, b"") for key in keys[first : first + 100]])
            listing = await store.coordination.list("/t/")
            assert [entry.key for entry in listing.entries] == keys
            assert listing.revision == result.revision

        self.run(tmp_path, body)

    def test_deleting_what_is_not_there_changes_nothing(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            revision = await store.coordination.put("/a", b"")
            assert await store.coordination.delete("/nothing") == revision
            result = await store.coordination.transact([], [Delete("/none/", prefix=True)])
            assert result.succeeded
            assert result.revision == revision

        self.run(tmp_path, body)

    def test_a_transaction_acts_only_if_every_compare_holds(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            revision = await store.coordination.put("/a", b"1")
            held = Compare("/a", "mod_revision", "=", revision)
            lost = await store.coordination.transact([held, Compare("/b", "version", ">", 0)], [Put("/a", b"2")])
            assert not lost.succeeded
            assert lost.revision == revision
            assert (await have(store, "/a")).value == b"1"
            won = await store.coordination.transact([held, absent("/b")], [Put("/a", b"2"), Put("/b", b"")])
            assert won.succeeded
            assert won.revision == revision + 1
            assert (await have(store, "/a")).mod_revision == (await have(store, "/b")).mod_revision == won.revision
            assert not (await store.coordination.transact([held], [Delete("/a")])).succeeded

        self.run(tmp_path, body)

    @pytest.mark.parametrize(
        ("relation", "number", "holds"),
        [
            ("=", 2, True),
            ("=", 1, False),
            ("!=", 1, True),
            ("!=", 2, False),
            ("<", 3, True),
            ("<", 2, False),
            (">", 1, True),
            (">", 2, False),
        ],
    )
    def test_compares_know_four_relations(self, tmp_path: Path, relation: Any, number: int, holds: bool) -> None:
        async def body(store: Store) -> None:
            await store.coordination.put("/a", b"")
            await store.coordination.put("/a", b"")
            result = await store.coordination.transact([Compare("/a", "version", relation, number)], [])
            assert result.succeeded is holds

        self.run(tmp_path, body)

    def test_of_many_who_swap_one_wins(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            won = await asyncio.gather(
                *(store.coordination.transact([absent("/a")], [Put("/a", b"%d" % n)]) for n in range(20))
            )
            assert sum(result.succeeded for result in won) == 1

        self.run(tmp_path, body)

    def test_a_transaction_that_names_a_key_twice_is_refused_whole(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            refused: list[list[Put | Delete]] = [
                [Put("/a", b"1"), Put("/a", b"2")],
                [Put("/a", b"1"), Delete("/a")],
                [Delete("/", prefix=True), Put("/a", b"1")],
            ]
            for actions in refused:
                with pytest.raises(CoordinationError):
                    await store.coordination.transact([], actions)
            assert await store.coordination.get("/a") is None

        self.run(tmp_path, body)

    def test_a_transaction_beyond_its_bound_is_refused_whole(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            with pytest.raises(CoordinationError):
                await store.coordination.transact([], [Put(f"/{n}", b"") for n in range(129)])
            assert (await store.coordination.list("/")).entries == ()
            assert (await store.coordination.transact([], [Put(f"/{n}", b"") for n in range(128)])).succeeded

        self.run(tmp_path, body)

    def test_a_transaction_of_too_many_bytes_is_refused_whole(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            half = TRANSACTION_BYTES_MAX // 2 - len("/a")
            with pytest.raises(CoordinationError):
                await store.coordination.transact([], [Put("/a", bytes(half)), Put("/b", bytes(half + 1))])
            assert (await store.coordination.list("/")).entries == ()
            assert (await store.coordination.transact([], [Put("/a", bytes(half)), Put("/b", bytes(half))])).succeeded

        self.run(tmp_path, body)

    def test_a_transaction_arrives_in_one_watch_response(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            start = await store.coordination.put("/t/old", b"")
            watch = store.coordination.watch("/t/", start + 1)
            actions: list[Put | Delete] = [
                *(Put(f"/t/{n:03}", b"x") for n in range(100)),
                Delete("/t/old"),
                Put("/else", b""),
            ]
            result = await store.coordination.transact([], actions)
            response = await following(watch)
            assert response.revision >= result.revision
            assert sorted(event.key for event in response.events) == [*(f"/t/{n:03}" for n in range(100)), "/t/old"]
            assert {event.mod_revision for event in response.events} == {result.revision}
            assert {event.kind for event in response.events if event.key == "/t/old"} == {"delete"}

        self.run(tmp_path, body)

    def test_a_watch_waits_for_changes_to_come(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            start = await store.coordination.put("/t/a", b"1")
            watch = store.coordination.watch("/t/", start + 1)
            waiting = asyncio.ensure_future(following(watch))
            await store.coordination.put("/other", b"")
            revision = await store.coordination.put("/t/a", b"2")
            assert (await waiting).events == (Event("put", "/t/a", b"2", revision),)

        self.run(tmp_path, body)

    def test_a_watch_resumed_after_the_last_response_misses_and_repeats_nothing(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            start = await store.coordination.put("/t/a", b"")
            seen: list[bytes] = []
            revision = start
            for turn in range(10):
                watch = store.coordination.watch("/t/", revision + 1)
                for n in range(3):
                    await store.coordination.put("/t/a", b"%d" % (3 * turn + n))
                    await store.coordination.put("/noise", b"")
                response = await following(watch)
                seen.extend(event.value for event in response.events)
                revision = response.revision
            rest = store.coordination.watch("/t/", revision + 1)
            await store.coordination.put("/t/end", b"end")
            while not seen or seen[-1] != b"end":
                seen.extend(event.value for event in (await following(rest)).events)
            assert seen == [*(b"%d" % n for n in range(30)), b"end"]

        self.run(tmp_path, body)

    def test_a_watch_far_behind_gets_whole_revisions_in_order(self, tmp_path: Path) -> None:
        """Six megabytes of history, which etcd sends in pieces that end anywhere."""

        async def body(store: Store) -> None:
            revisions = [
                (
                    await store.coordination.transact(
                        [], [Put(f"/t/{n:03}", b"%d " % turn + bytes(9000)) for n in range(30)]
                    )
                ).revision
                for turn in range(22)
            ]
            watch = store.coordination.watch("/t/", revisions[0])
            seen: list[Event] = []
            while not seen or seen[-1].mod_revision < revisions[-1]:
                response = await following(watch)
                assert response.revision >= response.events[-1].mod_revision
                assert response.events[0].mod_revision > (seen[-1].mod_revision if seen else 0)
                seen.extend(response.events)
            assert [event.mod_revision for event in seen] == [revision for revision in revisions for _ in range(30)]
            assert [event.key for event in seen] == [f"/t/{n:03}" for n in range(30)] * 22

        self.run(tmp_path, body)

    def test_a_deletion_at_the_compacted_revision_is_not_lost_in_silence(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            await store.coordination.put("/t/a", b"1")
            deleted = await store.coordination.delete("/t/a")
            await store.coordination.put("/t/b", b"")
            await store.coordination.compact(deleted)
            watch = store.coordination.watch("/t/", deleted)
            try:
                first = (await following(watch)).events[0]
            except Compacted:
                return
            assert first == Event("delete", "/t/a", b"", deleted)

        self.run(tmp_path, body)

    def test_a_watch_from_compacted_revisions_says_so(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            first = await store.coordination.put("/t/a", b"1")
            await store.coordination.put("/t/a", b"2")
            last = await store.coordination.put("/t/a", b"3")
            await store.coordination.compact(last)
            with pytest.raises(Compacted):
                await following(store.coordination.watch("/t/", first))
            revision = await store.coordination.put("/t/a", b"4")
            resumed = await following(store.coordination.watch("/t/", last + 1))
            assert resumed.events == (Event("put", "/t/a", b"4", revision),)
            assert (await have(store, "/t/a")).version == 4

        self.run(tmp_path, body)

    def test_a_watch_from_beyond_what_comes_next_says_so(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            newest = await store.coordination.put("/a", b"1")
            with pytest.raises(Behind):
                await following(aiter(store.coordination.watch("/", newest + 2)))
            watch = aiter(store.coordination.watch("/", newest + 1))
            await store.coordination.put("/a", b"2")
            assert (await following(watch)).revision == newest + 1

        self.run(tmp_path, body)

    def test_compacting_beyond_the_newest_revision_is_refused(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            revision = await store.coordination.put("/a", b"")
            with pytest.raises(CoordinationError):
                await store.coordination.compact(revision + 1000)

        self.run(tmp_path, body)

    def test_a_lease_takes_its_keys_with_it(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            lease = await store.coordination.grant_lease(store.lease_seconds)
            await store.coordination.put("/b/1", b"", lease)
            await store.coordination.put("/b/2", b"", lease)
            start = await store.coordination.put("/b/3", b"")
            assert (await have(store, "/b/1")).lease == lease
            watch = store.coordination.watch("/b/", start + 1)
            await store.let_pass(2 * store.lease_seconds)
            gone = await events(watch, 2)
            assert {(event.kind, event.key) for event in gone} == {("delete", "/b/1"), ("delete", "/b/2")}
            assert [entry.key for entry in (await store.coordination.list("/b/")).entries] == ["/b/3"]
            assert not await store.coordination.keep_alive(lease)
            with pytest.raises(CoordinationError):
                await store.coordination.put("/b/1", b"", lease)

        self.run(tmp_path, body)

    def test_a_lease_kept_alive_holds(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            lease = await store.coordination.grant_lease(store.lease_seconds)
            await store.coordination.put("/b", b"", lease)
            for _ in range(4):
                await store.let_pass(store.lease_seconds / 2)
                assert await store.coordination.keep_alive(lease)
            assert (await have(store, "/b")).lease == lease

        self.run(tmp_path, body)

    def test_a_revoked_lease_takes_its_keys_at_once(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            lease = await store.coordination.grant_lease(store.lease_seconds)
            await store.coordination.put("/b", b"", lease)
            await store.coordination.revoke_lease(lease)
            assert await store.coordination.get("/b") is None
            assert not await store.coordination.keep_alive(lease)

        self.run(tmp_path, body)

    def test_a_key_written_without_its_lease_outlives_it(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            lease = await store.coordination.grant_lease(store.lease_seconds)
            await store.coordination.put("/b", b"1", lease)
            await store.coordination.put("/b", b"2")
            await store.coordination.revoke_lease(lease)
            assert (await have(store, "/b")).value == b"2"

        self.run(tmp_path, body)

    def test_an_election_is_first_come_first_served(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            async def standing() -> list[str]:
                listing = await store.coordination.list("/election/")
                return [entry.key for entry in sorted(listing.entries, key=lambda entry: entry.create_revision)]

            leases = [await store.coordination.grant_lease(100 * store.lease_seconds) for _ in range(3)]
            names = [f"/election/{name}" for name in ("z", "a", "m")]
            for name, lease in zip(names, leases, strict=True):
                result = await store.coordination.transact([absent(name)], [Put(name, b"", lease)])
            await store.coordination.put("/election/z", b"again", leases[0])
            assert await standing() == names
            watch = store.coordination.watch("/election/z", result.revision + 2)
            await store.coordination.revoke_lease(leases[0])
            assert [event.kind for event in (await following(watch)).events] == ["delete"]
            assert await standing() == names[1:]

        self.run(tmp_path, body)

    def test_a_closed_store_ends_its_watches_and_refuses_calls(self, tmp_path: Path) -> None:
        async def body(store: Store) -> None:
            start = await store.coordination.put("/a", b"")
            watch = store.coordination.watch("/", start + 1)
            waiting = asyncio.ensure_future(anext(watch, None))
            await asyncio.sleep(0)
            await store.coordination.close()
            assert await asyncio.wait_for(waiting, DEADLINE_SECONDS) is None
            with pytest.raises(CoordinationError, match="stopping"):
                await store.coordination.get("/a")
            with pytest.raises(CoordinationError, match="stopping"):
                await store.coordination.put("/a", b"")

        self.run(tmp_path, body)
