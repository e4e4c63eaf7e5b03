"""One contract for the real disk and the fault-injecting one."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.ports.disk import Disk, FileSlice, read_whole, write_atomically
from headrace.system.disk import SystemDisk
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

DEADLINE_SECONDS = 120.0


class Bench:
    """A disk with a folder to work in, and a way to wait for its answers."""

    def __init__(self, disk: Disk, folder: str, wait: Callable[[Callable[[], bool]], None]) -> None:
        self.disk = disk
        self.folder = folder
        self.wait = wait

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


def on_sim() -> Iterator[Bench]:
    clock = VirtualClock()
    disk = VirtualDisk(clock)
    disk.make_folder("/bench")

    def wait(done: Callable[[], bool]) -> None:
        clock.run_soon()
        assert done()

    yield Bench(disk, "/bench", wait)


def on_system(folder: str, *, helper: bool) -> Iterator[Bench]:
    loop = asyncio.new_event_loop()
    disk = SystemDisk(loop, sync_helper=helper)

    async def until(done: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while not done():
            assert time.monotonic() < end, "no answer"
            await asyncio.sleep(0)

    yield Bench(disk, folder, lambda done: loop.run_until_complete(until(done)))
    disk.close()
    loop.close()


@pytest.fixture(params=["sim", "helper", "thread"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "sim":
        yield from on_sim()
    else:
        yield from on_system(str(tmp_path), helper=request.param == "helper")


def test_parts_are_written_behind_each_other_and_read_back(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    assert file.pwritev([b"one", bytearray(b"two"), memoryview(b"three")], 0) == 11
    assert file.pwritev([b"TWO"], 3) == 3
    assert (file.size(), file.pread(100, 0), file.pread(3, 3)) == (11, b"oneTWOthree", b"TWO")
    assert file.pread(10, 11) == b""
    assert bench.disk.size(bench.path("a")) == 11


def test_the_time_of_the_last_write_is_told(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    file.pwritev([b"one"], 0)
    assert 1_500_000_000_000 < bench.disk.changed_ms(bench.path("a")) < 4_000_000_000_000


def test_more_parts_than_one_call_takes_are_written(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    parts = [b"%05d" % i for i in range(3000)]
    assert file.pwritev(parts, 7) == 15000
    assert file.pread(15000, 7) == b"".join(parts)


def test_a_file_shrinks_grows_and_gets_its_room(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    file.pwritev([b"0123456789"], 0)
    file.truncate(4)
    assert (file.size(), file.pread(10, 0)) == (4, b"0123")
    file.allocate(4096)
    assert file.size() == 4096
    assert file.pread(10, 0) == b"0123" + bytes(6)


def test_room_is_reserved_and_given_back_without_a_change_of_size(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    file.pwritev([b"0123456789"], 0)
    file.reserve(1 << 20)
    assert (file.size(), file.pread(20, 0)) == (10, b"0123456789")
    file.pwritev([b"abc"], 10)
    file.truncate(13)
    assert (file.size(), file.pread(20, 0)) == (13, b"0123456789abc")


def test_mapped_memory_is_the_file(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    file.allocate(4096)
    view = file.map(4096, writable=True, populate=True)
    view[10:13] = b"xyz"
    assert file.pread(3, 10) == b"xyz"
    view.release()
    again = bench.disk.open(bench.path("a")).map(16, writable=False, populate=False)
    assert bytes(again) == bytes(10) + b"xyz" + bytes(3)
    assert again.readonly


def test_a_missing_file_is_refused_unless_it_may_be_created(bench: Bench) -> None:
    with pytest.raises(FileNotFoundError):
        bench.disk.open(bench.path("a"))
    with pytest.raises(FileNotFoundError):
        bench.disk.remove(bench.path("a"))
    with pytest.raises(FileNotFoundError):
        bench.disk.rename(bench.path("a"), bench.path("b"))
    with pytest.raises(FileNotFoundError):
        bench.disk.open(bench.path("no/a"), create=True, writable=True)


def test_a_file_open_for_reading_is_not_written(bench: Bench) -> None:
    bench.disk.open(bench.path("a"), create=True, writable=True)
    with pytest.raises(OSError, match=r".") as raised:
        bench.disk.open(bench.path("a")).pwritev([b"x"], 0)
    assert raised.value.errno == errno.EBADF


def test_folders_are_made_listed_renamed_and_removed(bench: Bench) -> None:
    disk = bench.disk
    disk.make_folder(bench.path("t/t-0"))
    disk.make_folder(bench.path("t/t-0"))
    disk.open(bench.path("t/t-0/x"), create=True, writable=True).pwritev([b"x"], 0)
    assert disk.list(bench.path("t")) == ["t-0"]
    disk.rename(bench.path("t/t-0"), bench.path("t/t-1"))
    assert disk.exists(bench.path("t/t-1/x"))
    assert not disk.exists(bench.path("t/t-0"))
    with pytest.raises(NotADirectoryError):
        disk.list(bench.path("t/t-1/x"))
    disk.remove_folder(bench.path("t"))
    assert disk.list(bench.folder) == []


def test_an_atomic_write_replaces_the_whole_file(bench: Bench) -> None:
    for content in (b"first and long", b"second"):
        write_atomically(bench.disk, bench.path("a"), content)
        assert read_whole(bench.disk, bench.path("a")) == content
    assert bench.disk.list(bench.folder) == ["a"]


def test_an_open_file_outlives_its_name(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    file.pwritev([b"still here"], 0)
    bench.disk.remove(bench.path("a"))
    part = FileSlice(file, 6, 4)
    assert part.file.pread(part.count, part.position) == b"here"


@pytest.mark.parametrize("count", [0, 1, 8, 9, 300])
def test_any_number_of_files_is_synced_at_once(bench: Bench, count: int) -> None:
    files = []
    for i in range(count):
        files.append(bench.disk.open(bench.path(f"f{i}"), create=True, writable=True))
        files[-1].pwritev([b"x"], 0)
    answers: list[OSError | None] = []
    bench.disk.request_sync(files, answers.append)
    assert answers == [], "the answer comes later, on the loop"
    bench.wait(lambda: len(answers) == 1)
    assert answers == [None]
    bench.disk.sync_now(files)


def test_a_folder_is_synced_like_a_file(bench: Bench) -> None:
    answers: list[OSError | None] = []
    bench.disk.request_sync([bench.disk.open(bench.folder)], answers.append)
    bench.wait(lambda: len(answers) == 1)
    assert answers == [None]
    bench.disk.sync_folder(bench.folder)


def test_many_syncs_are_answered_in_order(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    order: list[int] = []
    for i in range(500):
        bench.disk.request_sync([file], lambda _, i=i: order.append(i))  # type: ignore[misc]
    bench.wait(lambda: len(order) == 500)
    assert order == list(range(500))


def test_a_read_ahead_is_answered(bench: Bench) -> None:
    file = bench.disk.open(bench.path("a"), create=True, writable=True)
    file.pwritev([b"x" * 100_000], 0)
    assert file.in_cache(0, 100_000)
    answers: list[bool] = []
    bench.disk.read_ahead(file, [(0, 100_000)], lambda: answers.append(True))
    bench.wait(lambda: bool(answers))
    assert file.in_cache(0, 100_000)


def test_a_lock_is_held_until_it_is_closed(bench: Bench) -> None:
    held = bench.disk.lock(bench.path("lock"))
    with pytest.raises(BlockingIOError):
        bench.disk.lock(bench.path("lock"))
    held.close()
    bench.disk.lock(bench.path("lock")).close()


def test_free_room_is_told(bench: Bench) -> None:
    assert bench.disk.free_bytes(bench.folder) > 0
