"""The files of a commit log: what is written where, what has to be synced, what is cut."""

from __future__ import annotations

import errno

import pytest

from headrace.storage.commitlog.commitlog import FILE_BYTES_MAX, CommitLog
from headrace.storage.commitlog.frames import FRAME_BYTES, position
from headrace.storage.log import Tail
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk

FOLDER = "/data/@commitlog"


def new_disk() -> VirtualDisk:
    disk = VirtualDisk(VirtualClock())
    disk.make_folder("/data")
    return disk


def opened(disk: VirtualDisk, file_bytes: int = 1000) -> CommitLog:
    found = CommitLog(disk, "/data", file_bytes)
    found.find_files()
    return found


def three_files(disk: VirtualDisk) -> CommitLog:
    """Of 10, 20 and 30 bytes."""
    log = opened(disk)
    log.write([b"a" * 10], 10)
    log.roll([b"b" * 20], 20)
    log.roll([b"c" * 30], 30)
    return log


def paths(log: CommitLog) -> list[str]:
    return [file.path for file in log.unsynced()]


def test_files_are_found_again_and_what_was_set_aside_is_removed() -> None:
    disk = new_disk()
    log = three_files(disk)
    assert log.set_aside([0]) == [log.path(0) + ".deleted"]
    for name in ("tail-cut", "what-an-operator-has-left-here.log"):
        disk.open(f"{FOLDER}/{name}", create=True, writable=True).close()
    again = opened(disk)
    assert again.sizes == log.sizes == {1: 20, 2: 30}
    assert (again.number, again.end) == (2, position(2, 30))
    assert not any(name.endswith(".deleted") for name in disk.list(FOLDER))
    assert disk.exists(f"{FOLDER}/tail-cut")
    with pytest.raises(FileNotFoundError):
        again.file(0)


def test_an_empty_log_begins_at_nothing_and_its_first_file_has_its_name_synced() -> None:
    log = opened(new_disk())
    assert (log.sizes, log.number, log.end, log.unsynced()) == ({}, 0, 0, [])
    assert log.write([b"abc"], 3) == 0
    assert log.write([b"de", b"f"], 3) == 3
    assert (log.end, log.sizes) == (6, {0: 6})
    assert paths(log) == [log.path(0), FOLDER]


def test_a_write_that_fails_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = new_disk()
    log = opened(disk)
    log.write([b"abc"], 3)
    file = log.active
    pwritev = type(file).pwritev

    def half(self: object, parts: list[bytes], at: int) -> int:
        pwritev(file, [b"".join(parts)[:2]], at)
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(type(file), "pwritev", half)
    with pytest.raises(OSError, match="no room"):
        log.write([b"defg"], 4)
    monkeypatch.undo()
    assert (log.end, disk.size(log.path(0))) == (3, 3)
    assert log.write([b"hi"], 2) == 3
    assert file.pread(10, 0) == b"abchi"


@pytest.mark.parametrize("fails", [True, False])
def test_the_next_file_is_begun_whole_or_not_at_all(fails: bool) -> None:
    disk = new_disk()
    log = opened(disk)
    log.write([b"abc"], 3)
    log.synced_to(3)
    # Left behind by a start that died: it holds more than is written now.
    left = disk.open(log.path(1), create=True, writable=True)
    left.pwritev([b"x" * 50], 0)
    if fails:
        disk.fail_write(log.path(1), errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            log.roll([b"defg"], 4)
        assert (log.number, log.end, log.sizes, disk.exists(log.path(1))) == (0, 3, {0: 3}, False)
        assert log.unsynced() == []
        return
    log.roll([b"defg"], 4)
    assert (log.number, log.end, log.sizes) == (1, position(1, 4), {0: 3, 1: 4})
    assert disk.size(log.path(1)) == 4
    assert log.file(0).pread(9, 0) == b"abc"
    assert paths(log) == [log.path(1), FOLDER]


def test_a_file_is_full_when_it_would_become_larger_and_never_while_it_is_empty() -> None:
    log = opened(new_disk(), 100)
    assert not log.is_full(500)
    assert log.room == 100 - FRAME_BYTES
    log.write([b"a" * 40], 40)
    assert log.room == 60 - FRAME_BYTES
    assert not log.is_full(60)
    assert log.is_full(61)
    log.roll([b"a"], 1)
    assert log.room == 99 - FRAME_BYTES


def test_a_sync_counts_for_what_was_written_when_it_was_asked_for() -> None:
    log = opened(new_disk())
    log.write([b"abc"], 3)
    assert [file.path for file in log.ask()] == [log.path(0), FOLDER]
    log.write([b"d"], 1)
    log.answered()
    assert log.synced == 3
    assert paths(log) == [log.path(0)]  # its name is safe, its last byte is not
    log.ask()
    log.answered()
    assert (log.synced, log.unsynced()) == (4, [])
    log.synced_to(2)
    assert log.synced == 4


def test_a_file_that_was_begun_meanwhile_is_not_synced_nor_is_its_name() -> None:
    log = opened(new_disk())
    log.write([b"abc"], 3)
    log.ask()
    log.roll([b"d"], 1)
    log.roll([b"e"], 1)
    log.answered()
    assert paths(log) == [log.path(0), log.path(1), log.path(2), FOLDER]
    log.ask()
    log.write([b"f"], 1)
    log.answered()
    assert log.synced == position(2, 1)
    assert paths(log) == [log.path(2)]


@pytest.mark.parametrize(
    ("upto", "doubted"),
    [(0, [0, 1, 2]), (position(1, 0), [1, 2]), (position(1, 20), [1, 2]), (position(2, 30), [2])],
)
def test_doubt_has_every_file_from_there_on_synced_anew_with_its_name(upto: int, doubted: list[int]) -> None:
    disk = new_disk()
    three_files(disk)
    log = opened(disk)
    log.doubt(upto)
    assert log.synced == upto
    assert paths(log) == [*(log.path(number) for number in doubted), FOLDER]
    empty = opened(new_disk())
    empty.doubt(0)
    assert empty.unsynced() == []


@pytest.mark.parametrize("synced", [0, position(1, 5), position(1, 12), position(2, 3)])
def test_a_cut_drops_what_comes_behind_and_what_is_left_counts_as_synced_at_most_to_there(synced: int) -> None:
    disk = new_disk()
    log = three_files(disk)
    log.synced = synced
    before = log.file(1)
    log.cut(1, 12)
    assert (log.number, log.end, log.sizes) == (1, position(1, 12), {0: 10, 1: 12})
    assert not disk.exists(log.path(2))
    assert log.synced == min(synced, position(1, 12))
    assert log.path(1) in paths(log)
    assert log.path(2) not in paths(log)
    assert FOLDER in paths(log)
    assert log.active is not before
    assert log.write([b"d"], 1) == 12
    assert log.file(1).pread(20, 0) == b"b" * 12 + b"d"


def test_what_was_cut_is_not_read_any_more() -> None:
    log = three_files(new_disk())
    log.file(1)
    log.cut(0, 5)
    for number in (1, 2):
        with pytest.raises(FileNotFoundError):
            log.file(number)
    assert log.file(0) is log.active


def test_a_tail_that_may_have_been_synced_is_noted_before_it_is_cut() -> None:
    disk = new_disk()
    log = three_files(disk)
    log.tail_found(Tail.CUT_SHORT)
    assert not disk.exists(f"{FOLDER}/tail-cut")
    log.tail_found(Tail.TORN)
    assert disk.exists(f"{FOLDER}/tail-cut")


def test_a_file_can_be_as_large_as_a_position_can_tell() -> None:
    log = opened(new_disk(), FILE_BYTES_MAX)
    assert log.room == FILE_BYTES_MAX - FRAME_BYTES
    assert log.file(0) is log.active


def test_what_is_set_aside_is_not_synced_any_more() -> None:
    log = three_files(new_disk())
    log.file(0)
    log.set_aside([0, 1])
    assert log.sizes == {2: 30}
    assert paths(log) == [log.path(2), FOLDER]
    with pytest.raises(FileNotFoundError):
        log.file(0)


def test_only_so_many_files_are_held_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.storage.commitlog.commitlog.OPEN_FILES_MAX", 2)
    disk = new_disk()
    log = three_files(disk)
    log.roll([b"d"], 1)
    log = opened(disk)
    files = [log.file(number) for number in (0, 1)]
    assert [log.file(number) for number in (0, 1)] == files
    log.file(2)
    assert log.file(1) is files[1]
    assert log.file(0) is not files[0]


def test_a_closed_log_has_nothing_to_sync() -> None:
    log = three_files(new_disk())
    log.close()
    assert log.unsynced() == []
