"""The real disk's helper process: small, mortal, replaceable; and a real full disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.ports.disk import SYNC_FAILED, File, SyncFailed
from headrace.system import sync_helper
from headrace.system.disk import DATASYNC_FILES_MAX, SystemDisk, SystemFile, syncfs_tells
from storage.small_disk import small_disk

DEADLINE_SECONDS = 120.0
HELPER_MEMORY_KIB = 16_000


def wait(loop: asyncio.AbstractEventLoop, done: Callable[[], bool]) -> None:
    async def until() -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while not done():
            assert time.monotonic() < end
            await asyncio.sleep(0)

    loop.run_until_complete(until())


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    created = asyncio.new_event_loop()
    yield created
    created.close()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_the_helper_is_small(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    disk = SystemDisk(loop)
    answers: list[OSError | None] = []
    disk.request_sync([disk.open(str(tmp_path / "a"), create=True)], answers.append)
    wait(loop, lambda: bool(answers))
    status = Path(f"/proc/{disk.helper_pid}/status").read_text()
    rss_kib = int(status.split("VmRSS:")[1].split()[0])
    assert rss_kib < HELPER_MEMORY_KIB
    disk.close()


def test_the_helper_ends_with_the_disk(loop: asyncio.AbstractEventLoop) -> None:
    disk = SystemDisk(loop)
    pid = disk.helper_pid
    assert pid is not None
    disk.close()
    assert not alive(pid)


def test_the_helper_ends_when_the_broker_is_killed() -> None:
    script = (
        "import asyncio, time; from headrace.system.disk import SystemDisk\n"
        "disk = SystemDisk(asyncio.new_event_loop()); print(disk.helper_pid, flush=True); time.sleep(1000)"
    )
    broker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "src"}
    )
    assert broker.stdout is not None
    helper_pid = int(broker.stdout.readline())
    assert alive(helper_pid)
    broker.send_signal(signal.SIGKILL)
    broker.wait()
    broker.stdout.close()
    end = time.monotonic() + DEADLINE_SECONDS
    while alive(helper_pid):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_syncs_go_on_in_a_thread_when_the_helper_dies(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SystemDisk(loop)
    assert disk.helper_pid is not None
    file = disk.open(str(tmp_path / "a"), create=True, writable=True)
    os.kill(disk.helper_pid, signal.SIGKILL)
    answers: list[OSError | None] = []
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            disk.request_sync([file], answers.append)
        wait(loop, lambda: len(answers) == 3)
    assert answers == [None] * 3
    assert [record.message for record in caplog.records] == [
        "the sync helper process has ended; syncs go on in a thread, slower, until the broker is restarted"
    ]
    assert disk.helper_pid is None
    disk.close()


@pytest.mark.parametrize("helper", [True, False])
def test_a_failed_sync_is_told_with_its_reason(loop: asyncio.AbstractEventLoop, helper: bool) -> None:
    disk = SystemDisk(loop, sync_helper=helper)
    null = disk.open("/dev/null", writable=True)
    answers: list[OSError | None] = []
    disk.request_sync([null], answers.append)
    wait(loop, lambda: bool(answers))
    assert answers[0] is not None
    assert answers[0].errno == errno.EINVAL
    assert answers[0].filename == "/dev/null"
    disk.close()


@pytest.mark.parametrize("helper", [True, False])
def test_a_failed_sync_names_the_files_that_failed_and_the_others_are_safe(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, helper: bool
) -> None:
    disk = SystemDisk(loop, sync_helper=helper)
    files = [disk.open(str(tmp_path / f"f{n}"), create=True, writable=True) for n in range(4)]
    files[1:1] = nulls = [disk.open("/dev/null", writable=True) for _ in range(2)]
    answers: list[OSError | None] = []
    disk.request_sync(files, answers.append)
    wait(loop, lambda: bool(answers))
    assert isinstance(answers[0], SyncFailed)
    assert answers[0].files == tuple(nulls)
    with pytest.raises(SyncFailed) as raised:
        disk.sync_now(files)
    assert raised.value.files == tuple(nulls)
    disk.close()


@pytest.mark.parametrize("broken", [0, 2], ids=["of another file", "of ours"])
def test_when_the_sync_of_a_file_system_fails_each_file_is_asked(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sync_helper, "sync_file_system", refuse)
    disk = SystemDisk(loop, sync_helper=False)
    files = [disk.open(str(tmp_path / f"f{n}"), create=True, writable=True) for n in range(30)]
    nulls = [disk.open("/dev/null", writable=True) for _ in range(broken)]
    answers: list[OSError | None] = []
    disk.request_sync([*nulls[:1], *files, *nulls[1:]], answers.append)
    wait(loop, lambda: bool(answers))
    if not broken:
        assert answers == [None]
        disk.sync_now(files)
    else:
        assert isinstance(answers[0], SyncFailed)
        assert answers[0].files == tuple(nulls)
    disk.close()


def test_a_sync_that_is_waited_for_comes_after_those_under_way(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    """One of them may take the only word of a failure, and leaves its mark before it is done."""
    disk = SystemDisk(loop)
    file = disk.open(str(tmp_path / "a"), create=True, writable=True)
    file.pwritev([b"x"], 0)
    answers: list[OSError | None] = []
    assert disk.helper_pid is not None
    os.kill(disk.helper_pid, signal.SIGSTOP)
    disk.request_sync([file], answers.append)
    waiting = threading.Thread(target=disk.sync_now, args=([file],))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    os.kill(disk.helper_pid, signal.SIGCONT)
    waiting.join(DEADLINE_SECONDS)
    assert not waiting.is_alive()
    assert answers == [], "the loop tells it"
    wait(loop, lambda: answers == [None])
    disk.close()


@pytest.mark.parametrize("dies", [True, False])
def test_syncs_under_way_are_done_by_a_thread_when_the_helper_is_dead(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, dies: bool
) -> None:
    disk = SystemDisk(loop, sync_helper=dies)
    file = disk.open(str(tmp_path / "a"), create=True, writable=True)
    if disk.helper_pid is not None:
        os.kill(disk.helper_pid, signal.SIGKILL)
    answers: list[OSError | None] = []
    disk.request_sync([file], answers.append)
    disk.sync_now([file])
    wait(loop, lambda: answers == [None])
    disk.close()


def test_a_slice_of_a_file_keeps_it_open_and_nothing_else_does(tmp_path: Path) -> None:
    disk = SystemDisk()
    before = len(os.listdir("/proc/self/fd"))
    file = disk.open(str(tmp_path / "a"), create=True, writable=True)
    file.allocate(4096)
    view = file.map(4096, writable=True, populate=True)
    del file
    view.release()
    del view
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cold_file_is_told_from_a_warm_one(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    disk = SystemDisk(loop)
    file = disk.open(str(tmp_path / "a"), create=True, writable=True)
    file.pwritev([b"x" * (4 << 20)], 0)
    file.sync()
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if file.in_cache(0, 4 << 20):
        pytest.skip("this file system does not drop its cache when told to")
    done: list[bool] = []
    disk.read_ahead(file, [(0, 4 << 20)], lambda: done.append(True))
    wait(loop, lambda: bool(done))
    assert file.in_cache(0, 4 << 20)
    disk.close()


@pytest.fixture
def helper() -> Iterator[socket.socket]:
    """The helper's loop in a thread of this process, so that a test can get at what it stands on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_SECONDS)

    def run() -> None:
        with theirs:
            sync_helper.serve(theirs)

    thread = threading.Thread(target=run)
    thread.start()
    yield ours
    ours.close()
    thread.join(DEADLINE_SECONDS)


def ask(channel: socket.socket, kind: bytes, number: int, descriptor: int) -> None:
    socket.send_fds(channel, [sync_helper.pack(kind, number, [(0, 100)])], [descriptor])


def answer(channel: socket.socket) -> tuple[int, int]:
    number, failed, _ = sync_helper.ANSWER.unpack(channel.recv(sync_helper.ANSWER.size))
    return number, failed


def test_only_a_few_threads_read_ahead_and_a_sync_does_not_wait_for_them(
    helper: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, reading, most, lock = threading.Event(), [0], [0], threading.Lock()

    def slow_read(descriptor: int, ranges: list[tuple[int, int]]) -> None:
        with lock:
            reading[0] += 1
            most[0] = max(most[0], reading[0])
        gate.wait(DEADLINE_SECONDS)
        with lock:
            reading[0] -= 1

    monkeypatch.setattr(sync_helper, "read_ahead", slow_read)
    monkeypatch.setattr(sync_helper, "READS_WAITING_MAX", 30)
    with (tmp_path / "a").open("w") as file:
        for number in range(60):
            ask(helper, sync_helper.READ_AHEAD, number, file.fileno())
        ask(helper, sync_helper.DATASYNC, 1000, file.fileno())
        early = [answer(helper)]
        while early[-1][0] != 1000:
            early.append(answer(helper))
        gate.set()
        numbers = {number for number, _ in early} | {answer(helper)[0] for _ in range(61 - len(early))}
    assert numbers == {*range(60), 1000}
    assert most[0] <= sync_helper.READERS_MAX
    assert len(early) > 60 - 30 - sync_helper.READERS_MAX, "beyond the bound they are not read ahead"


def test_the_helper_lives_on_when_it_gets_no_thread(
    helper: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    with (tmp_path / "a").open("w") as file:
        for number, kind in enumerate((sync_helper.READ_AHEAD, sync_helper.DATASYNC, sync_helper.READ_AHEAD)):
            ask(helper, kind, number, file.fileno())
            assert answer(helper) == (number, 0)


def test_a_sync_whose_files_did_not_all_arrive_has_failed(helper: socket.socket, tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file:
        packet = sync_helper.pack(sync_helper.DATASYNC, 7, [])
        socket.send_fds(helper, [packet], [file.fileno()] * (sync_helper.FILES_MAX + 5))
        assert answer(helper) == (7, errno.EMFILE)


def test_the_limit_of_open_files_is_raised() -> None:
    SystemDisk()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


def test_a_write_to_a_full_disk_is_an_error_not_a_short_write(tmp_path: Path) -> None:
    with small_disk(tmp_path) as folder:
        disk = SystemDisk()
        file = disk.open(f"{folder}/a", create=True, writable=True)
        with pytest.raises(OSError, match="No space left") as raised:
            file.pwritev([b"x" * (1 << 20)] * 64, 0)
        assert raised.value.errno == errno.ENOSPC
        file.truncate(0)
        with pytest.raises(OSError, match="No space left"):
            file.allocate(64 << 20)
        assert file.pwritev([b"x"], 0) == 1


def test_a_request_grows_with_its_ranges_and_an_answer_is_of_fixed_size() -> None:
    assert len(sync_helper.pack(sync_helper.READ_AHEAD, 1, [(0, 1), (5, 2)])) == 9 + 2 * 16
    assert sync_helper.ANSWER.size == 20


def test_a_failed_sync_leaves_its_mark_before_it_is_told(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    assert sync_helper.MARKER == SYNC_FAILED
    disk = SystemDisk(loop)
    for name in ("file", "folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "file" / "a").touch()
    # A descriptor that only names its file cannot be synced.
    unusable = [SystemFile(str(tmp_path / name), os.open(tmp_path / name, os.O_PATH)) for name in ("file/a", "folder")]
    for each in unusable:
        answers: list[OSError | None] = []
        disk.request_sync([each], answers.append)
        wait(loop, lambda answers=answers: bool(answers))  # type: ignore[misc]
        assert isinstance(answers[0], SyncFailed)
    assert (tmp_path / "file" / SYNC_FAILED).exists()
    assert (tmp_path / "folder" / SYNC_FAILED).exists()
    disk.close()


def test_a_sync_that_failed_in_a_helper_that_died_has_failed(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    disk = SystemDisk(loop)
    assert disk.helper_pid is not None
    (tmp_path / "lost").mkdir()
    files = [disk.open(str(tmp_path / name), create=True, writable=True) for name in ("whole", "lost/a")]
    os.kill(disk.helper_pid, signal.SIGSTOP)
    answers: list[OSError | None] = []
    disk.request_sync(files, answers.append)
    (tmp_path / "lost" / SYNC_FAILED).touch()  # the last thing that it did
    os.kill(disk.helper_pid, signal.SIGKILL)
    wait(loop, lambda: bool(answers))
    assert isinstance(answers[0], SyncFailed)
    assert answers[0].files == (files[1],)
    disk.close()


def test_a_file_system_whose_sync_was_not_answered_by_a_helper_that_died_is_not_asked_again(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    """The kernel tells of a failure once for each open file: the files themselves are asked instead."""
    disk = SystemDisk(loop)
    assert disk.helper_pid is not None
    files: list[File] = [disk.open(str(tmp_path / f"{n}"), create=True, writable=True) for n in range(20)]
    (tmp_path / "lost").touch()
    files.append(SystemFile(str(tmp_path / "lost"), os.open(tmp_path / "lost", os.O_PATH)))  # cannot be synced
    os.kill(disk.helper_pid, signal.SIGSTOP)
    answers: list[OSError | None] = []
    disk.request_sync(files, answers.append)
    os.kill(disk.helper_pid, signal.SIGKILL)
    wait(loop, lambda: bool(answers))
    assert isinstance(answers[0], SyncFailed)
    assert answers[0].files == (files[-1],)
    disk.close()


def test_what_cannot_be_looked_at_is_not_called_absent(tmp_path: Path) -> None:
    """A checkpoint or a log that a sick disk hides for a moment would be taken for one that never was."""
    disk = SystemDisk(None)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links") as raised:
        disk.exists(str(tmp_path / "loop"))
    assert raised.value.errno == errno.ELOOP
    assert not disk.exists(str(tmp_path / "absent"))
    (tmp_path / "file").touch()
    assert not disk.exists(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("release", "tells"),
    [
        ("5.8.0", True),
        ("6.18.44-fc-v490", True),
        ("5.7.19", False),
        ("4.18.0-553.el8", False),
        ("3.10", False),
        ("?", False),
    ],
)
def test_syncfs_tells_of_lost_pages_since_linux_5_8(release: str, tells: bool) -> None:
    assert syncfs_tells(release) == tells


@pytest.mark.parametrize(
    ("kernel", "kinds"), [("5.7.0", {sync_helper.DATASYNC}), ("5.8.0", {sync_helper.SYNC_FILE_SYSTEM})]
)
@pytest.mark.parametrize("now", [True, False])
def test_where_syncfs_tells_nothing_many_files_are_synced_one_by_one(
    kernel: str, kinds: set[bytes], now: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SystemDisk(kernel=kernel)
    files = [disk.open(str(tmp_path / str(n)), create=True) for n in range(3 * DATASYNC_FILES_MAX + 1)]
    asked: list[tuple[bytes, list[int]]] = []

    def sync(kind: bytes, descriptors: list[int]) -> tuple[int, int]:
        asked.append((kind, descriptors))
        return (errno.EIO, 1) if files[-1].fileno() in descriptors and len(descriptors) == 1 else (0, 0)

    monkeypatch.setattr(sync_helper, "sync", sync)
    answers: list[OSError | None] = []
    if now:
        disk.sync_now(files)
    else:
        disk.request_sync(files, answers.append)
    assert {kind for kind, _ in asked} == kinds
    if kernel == "5.7.0":
        assert {each for _, some in asked for each in some} == {file.fileno() for file in files}
        assert all(len(some) <= DATASYNC_FILES_MAX for _, some in asked) or now
    if not now and kernel == "5.7.0":
        error = answers[0]
        assert isinstance(error, SyncFailed)
        assert error.files == (files[-1],)
