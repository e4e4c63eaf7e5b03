"""What the simulated disk keeps of a process that dies and of a machine that loses power; its contract is in
tests/system."""

from __future__ import annotations

import asyncio

import pytest

from headrace.ports.disk import read_whole
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.process import Process

SEEDS = range(200)


def disk_of(process: Process, sync_seconds: float = 0.01) -> VirtualDisk:
    disk = VirtualDisk(process)
    disk.serve(process, lambda: sync_seconds)
    return disk


def written(disk: VirtualDisk, synced: bytes, unsynced: bytes) -> None:
    file = disk.open("/log", create=True, writable=True)
    file.pwritev([synced], 0)
    disk.sync_now([file])
    disk.sync_folder("/")
    for at in range(len(unsynced)):
        file.pwritev([unsynced[at : at + 1]], len(synced) + at)


def test_a_dead_process_loses_its_files_and_locks_and_nothing_that_it_wrote() -> None:
    disk = disk_of(Process(VirtualLoop(), "one"))
    written(disk, b"safe", b"cached")
    lock = disk.lock("/lock")
    file = disk.open("/index", create=True, writable=True)
    file.allocate(64)
    view = file.map(64, writable=True, populate=False)
    view[:4] = b"mine"
    disk.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock.size()
    view[:4] = b"late"
    assert read_whole(disk, "/log") == b"safecached"
    disk.lock("/lock")
    again = disk.open("/index", writable=True)
    assert again.pread(4, 0) == b"mine"
    again.truncate(8)
    read_only = again.map(8, writable=False, populate=False)
    disk.release()
    disk.open("/index", writable=True).truncate(4)
    assert len(read_only) == 8


def test_a_power_cut_keeps_what_was_synced_and_a_random_part_of_the_rest() -> None:
    seen = set()
    for seed in SEEDS:
        disk = disk_of(Process(VirtualLoop(), "one"))
        written(disk, b"safe", b"123456")
        disk.crash(seed)
        content = read_whole(disk, "/log")
        assert content[:4] == b"safe"
        assert len(content) <= 10
        assert all(byte in (0, b"123456"[at]) for at, byte in enumerate(content[4:]))
        seen.add(content)
    assert b"safe" in seen
    assert b"safe123456" in seen
    assert any(b"\x00" in content for content in seen), "a later write may be kept without an earlier one"


def test_a_torn_write_is_cut_anywhere() -> None:
    seen = set()
    for seed in SEEDS:
        disk = disk_of(Process(VirtualLoop(), "one"))
        written(disk, b"", b"")
        disk.open("/log", writable=True).pwritev([b"0123456789"], 0)
        disk.crash(seed)
        seen.add(read_whole(disk, "/log"))
    assert {b"", b"0123456789"} < seen
    assert all(b"0123456789".startswith(content) for content in seen)


@pytest.mark.parametrize("synced", ["", "/new"])
def test_a_power_cut_loses_no_name_to_a_rename_between_two_folders(synced: str) -> None:
    seen = set()
    for seed in SEEDS:
        disk = disk_of(Process(VirtualLoop(), "one"))
        disk.make_folder("/old/folder")
        disk.open("/old/file", create=True)
        disk.make_folder("/new")
        for path in ("/old", "/new", "/"):
            disk.sync_folder(path)
        disk.make_folder("/new/inside")
        for name in ("folder", "file"):
            disk.rename(f"/old/{name}", f"/new/inside/{name}")
        if synced:
            disk.sync_folder(synced)
            disk.sync_folder(f"{synced}/inside")
        disk.crash(seed)
        places = "/old", "/new/inside"
        found = [name for place in places if disk.exists(place) for name in disk.list(place)]
        assert found.count("folder") == 1
        assert found.count("file") in (1, 2)
        assert not synced or sorted(disk.list("/new/inside")) == ["file", "folder"]
        seen.add((found.count("file"), disk.exists("/old/folder"), disk.exists("/old/file")))
    assert {moved for _, moved, _ in seen} == ({False} if synced else {True, False})


def test_what_was_renamed_into_a_folder_and_removed_there_does_not_come_back() -> None:
    for seed in SEEDS:
        disk = disk_of(Process(VirtualLoop(), "one"))
        disk.make_folder("/old")
        disk.make_folder("/new")
        disk.open("/old/file", create=True)
        disk.rename("/old/file", "/new/file")
        disk.remove("/new/file")
        for path in ("/old", "/new", "/"):
            disk.sync_folder(path)
        disk.crash(seed)
        assert disk.list("/old") == disk.list("/new") == []


def test_a_sync_takes_its_time_and_a_crash_before_its_end_may_lose_what_it_was_for() -> None:
    loop = VirtualLoop()
    lost = 0
    for seed in range(50):
        process = Process(loop, "one")
        disk = disk_of(process)
        written(disk, b"", b"")
        file = disk.open("/log", writable=True)
        file.pwritev([b"x"], 0)
        answers: list[OSError | None] = []
        disk.request_sync([file], answers.append)
        loop.run_until_complete(asyncio.sleep(0.009 if seed % 2 else 0.011))
        assert len(answers) == 1 - seed % 2
        process.die()
        disk.crash(seed)
        loop.run_until_complete(asyncio.sleep(1))
        assert len(answers) == 1 - seed % 2
        lost += read_whole(disk, "/log") != b"x"
        assert seed % 2 or read_whole(disk, "/log") == b"x"
    assert 0 < lost <= 25


def test_a_paused_process_hears_of_its_sync_when_it_goes_on() -> None:
    loop = VirtualLoop()
    process = Process(loop, "one")
    disk = disk_of(process)
    answers: list[OSError | None] = []
    disk.request_sync([disk.open("/log", create=True, writable=True)], answers.append)
    process.pause()
    loop.run_until_complete(asyncio.sleep(1))
    assert answers == []
    process.resume()
    loop.run_until_complete(asyncio.sleep(1))
    assert answers == [None]


def test_a_flipped_byte_is_there_before_and_after_a_crash() -> None:
    disk = disk_of(Process(VirtualLoop(), "one"))
    written(disk, b"safe", b"")
    disk.flip("/log", 1, 0x80)
    assert read_whole(disk, "/log") == b"s\xe1fe"
    disk.crash(1)
    assert read_whole(disk, "/log") == b"s\xe1fe"


def test_a_byte_that_decays_is_read_when_the_page_cache_is_dropped() -> None:
    disk = VirtualDisk(VirtualClock())
    file = disk.open("/f", create=True, writable=True)
    file.pwritev([b"abc"], 0)
    file.sync()
    disk.decay("/f", 1, 0x20)
    assert file.pread(3, 0) == b"abc"
    file.pwritev([b"d"], 3)
    disk.drop_caches()
    assert file.pread(4, 0) == b"abcd"  # what is not synced yet is nowhere else
    file.sync()
    view = file.map(4, writable=False, populate=False)
    disk.drop_caches()
    assert file.pread(4, 0) == bytes(view) == b"aBcd"
