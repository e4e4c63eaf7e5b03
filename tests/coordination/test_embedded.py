from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from coordination.coordination_contract import CoordinationContract, Store
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import DataFolderError
from headrace.ports.coordination import Compacted, Put
from headrace.virtual.clock import VirtualClock
from proving import proves


@asynccontextmanager
async def embedded(path: Path, history_max: int = 50_000) -> AsyncIterator[Store]:
    clock = VirtualClock()

    async def let_pass(seconds: float) -> None:
        clock.advance(seconds)

    coordination = EmbeddedCoordination(str(path / "metadata.sqlite"), clock, history_max)
    try:
        yield Store(coordination, let_pass)
    finally:
        await coordination.close()


class TestEmbedded(CoordinationContract):
    def open(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        return embedded(folder)


@proves("R4")
def test_keys_and_revisions_survive_a_restart_and_leases_do_not(tmp_path: Path) -> None:
    async def body() -> None:
        async with embedded(tmp_path) as store:
            await store.coordination.put("/a", b"1")
            lease = await store.coordination.grant_lease(100)
            leased = await store.coordination.put("/b", b"", lease)
        async with embedded(tmp_path) as store:
            listing = await store.coordination.list("/")
            assert [(entry.key, entry.value) for entry in listing.entries] == [("/a", b"1")]
            assert await store.coordination.grant_lease(100) > lease
            response = await anext(store.coordination.watch("/b", leased + 1))
            assert [event.kind for event in response.events] == ["delete"]

    asyncio.run(body())


@proves("R4")
def test_an_acknowledged_change_survives_a_killed_process(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, signal, sys
sys.path[:0] = {sys.path!r}
from headrace.virtual.clock import VirtualClock
from headrace.coordination.embedded import EmbeddedCoordination
async def main():
    store = EmbeddedCoordination({str(tmp_path / "metadata.sqlite")!r}, VirtualClock())
    await store.put("/a", b"acknowledged")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == -9

    async def body() -> None:
        async with embedded(tmp_path) as store:
            found = await store.coordination.get("/a")
            assert found is not None
            assert found.value == b"acknowledged"

    asyncio.run(body())


def test_a_second_opener_is_told_that_the_file_is_in_use(tmp_path: Path) -> None:
    async def body() -> None:
        async with embedded(tmp_path):
            with pytest.raises(DataFolderError, match="in use by another process"):
                EmbeddedCoordination(str(tmp_path / "metadata.sqlite"), VirtualClock())

    asyncio.run(body())


def test_a_file_that_is_not_ours_is_named_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite"
    path.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(DataFolderError, match=r"metadata\.sqlite is damaged .* put back a copy"):
        EmbeddedCoordination(str(path), VirtualClock())


def test_a_file_with_a_damaged_page_is_named_as_damaged(tmp_path: Path) -> None:
    async def fill() -> None:
        async with embedded(tmp_path) as store:
            for first in range(0, 1000, 100):
                await store.coordination.transact([], [Put(f"/{n}", b"x" * 200) for n in range(first, first + 100)])

    asyncio.run(fill())
    path = tmp_path / "metadata.sqlite"
    content = bytearray(path.read_bytes())
    content[4096 : len(content) // 2] = b"\xa5" * (len(content) // 2 - 4096)
    path.write_bytes(content)
    with pytest.raises(DataFolderError, match="is damaged"):
        EmbeddedCoordination(str(path), VirtualClock())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFolderError, match="check folder and rights"):
        EmbeddedCoordination(str(tmp_path / "none" / "metadata.sqlite"), VirtualClock())


def test_history_is_bounded_and_a_watch_left_behind_is_told(tmp_path: Path) -> None:
    async def body() -> None:
        async with embedded(tmp_path, history_max=100) as store:
            first = await store.coordination.put("/a", b"")
            for _ in range(200):
                last = await store.coordination.put("/a", b"")
            with pytest.raises(Compacted):
                await anext(store.coordination.watch("/", first))
            response = await anext(store.coordination.watch("/", last - 40))
            assert len(response.events) == 41

    asyncio.run(body())
