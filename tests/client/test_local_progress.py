"""The progress file of a consumer in broadcast mode: whole after any crash, one consumer at a time, never ignored."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.progress import LocalProgress, Offsets, ProgressUnusable
from headrace.errors import HeadraceError
from headrace.ports.disk import Disk, write_atomically
from headrace.system.disk import SystemDisk
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves

FOLDER = Path("/state/progress")


@pytest.fixture
def reactor() -> Iterator[ThreadReactor]:
    made = ThreadReactor()
    yield made
    made.close()


@pytest.fixture
def disk() -> VirtualDisk:
    return VirtualDisk(VirtualClock())


def save(reactor: ThreadReactor, progress: LocalProgress, offsets: Offsets) -> HeadraceError | None:
    answers: list[HeadraceError | None] = []
    with reactor.lock:
        progress.save(offsets, answers.append)
    assert reactor.wait(lambda: bool(answers), time.monotonic() + 30)
    return answers[0]


def load(progress: LocalProgress, *places: TopicPartition) -> Offsets:
    found: list[Offsets | HeadraceError] = []
    progress.load(places, found.append)
    assert isinstance(found[0], dict)
    return found[0]


def opened(reactor: ThreadReactor, disk: Disk, folder: Path = FOLDER, client_id: str = "me") -> LocalProgress:
    return LocalProgress(reactor, disk, folder, "group/of mine", client_id)


@proves("R8")
def test_what_was_saved_is_there_after_a_restart(reactor: ThreadReactor, tmp_path: Path) -> None:
    first = opened(reactor, SystemDisk(), tmp_path)
    assert load(first, ("t", 0)) == {}
    assert save(reactor, first, {("t", 0): 5, ("t", 1): 7}) is None
    assert save(reactor, first, {("t", 0): 6}) is None
    first.close()
    again = opened(reactor, SystemDisk(), tmp_path)
    assert load(again, ("t", 0), ("t", 1), ("u", 0)) == {("t", 0): 6, ("t", 1): 7}
    again.close()
    assert sorted(path.name for path in (tmp_path / "group%2Fof%20mine").iterdir()) == ["me.json", "me.json.lock"]


@pytest.mark.parametrize("crash_seed", range(20))
def test_a_crash_of_the_machine_keeps_every_save_that_was_answered(
    reactor: ThreadReactor, disk: VirtualDisk, crash_seed: int
) -> None:
    progress = opened(reactor, disk)
    for offset in range(crash_seed % 4):
        save(reactor, progress, {("t", 0): offset})
    disk.crash(crash_seed)
    survived = load(opened(reactor, disk), ("t", 0))
    assert survived == ({("t", 0): crash_seed % 4 - 1} if crash_seed % 4 else {})


def test_saves_that_come_while_one_is_written_are_all_answered_when_they_are_safe(
    reactor: ThreadReactor, disk: VirtualDisk
) -> None:
    progress = opened(reactor, disk)
    answers: list[HeadraceError | None] = []
    with reactor.lock:
        for offset in range(50):
            progress.save({("t", offset % 3): offset}, answers.append)
    assert reactor.wait(lambda: len(answers) == 50, time.monotonic() + 30)
    assert answers == [None] * 50
    disk.crash(1)
    places = [("t", n) for n in range(3)]
    assert load(opened(reactor, disk), *places) == {("t", 0): 48, ("t", 1): 49, ("t", 2): 47}


def test_a_second_consumer_of_the_same_name_is_refused_and_one_of_another_is_not(
    reactor: ThreadReactor, tmp_path: Path
) -> None:
    first = opened(reactor, SystemDisk(), tmp_path)
    with pytest.raises(ProgressUnusable, match="client_id of its own"):
        opened(reactor, SystemDisk(), tmp_path)
    opened(reactor, SystemDisk(), tmp_path, client_id="other").close()
    first.close()
    opened(reactor, SystemDisk(), tmp_path).close()


def test_a_full_disk_is_told_and_the_old_file_stays(reactor: ThreadReactor, disk: VirtualDisk) -> None:
    progress = opened(reactor, disk)
    assert save(reactor, progress, {("t", 0): 5}) is None
    disk.fail_write(f"{progress.path}.tmp", errno.ENOSPC)
    failure = save(reactor, progress, {("t", 0): 6})
    assert isinstance(failure, ProgressUnusable)
    assert "No space left" in str(failure)
    disk.crash(1)
    assert load(opened(reactor, disk), ("t", 0)) == {("t", 0): 5}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        json.dumps({"format": 1, "group": "group/of mine", "client_id": "me", "offsets": [["t", 0, -1]]}).encode(),
        json.dumps({"format": 1, "group": "group/of mine", "client_id": "me", "offsets": [["t", True, 1]]}).encode(),
        json.dumps({"format": 2, "group": "group/of mine", "client_id": "me", "offsets": []}).encode(),
        json.dumps({"format": 1, "group": "another", "client_id": "me", "offsets": []}).encode(),
    ],
)
def test_a_file_that_is_not_understood_stops_the_consumer(
    reactor: ThreadReactor, disk: VirtualDisk, content: bytes
) -> None:
    progress = opened(reactor, disk)
    progress.close()
    write_atomically(disk, progress.path, content)
    with pytest.raises(ProgressUnusable, match=r"/state/progress/group%2Fof%20mine/me\.json"):
        opened(reactor, disk)
    disk.remove(progress.path)
    opened(reactor, disk).close()


def test_what_waits_when_the_file_is_let_go_is_refused(reactor: ThreadReactor, tmp_path: Path) -> None:
    """Another consumer may write it by then."""
    progress = opened(reactor, SystemDisk(), tmp_path)
    assert save(reactor, progress, {("t", 0): 5}) is None
    progress.close()
    other = opened(reactor, SystemDisk(), tmp_path)
    assert save(reactor, other, {("t", 0): 9}) is None
    assert isinstance(save(reactor, progress, {("t", 0): 6}), ProgressUnusable)
    other.close()
    assert load(opened(reactor, SystemDisk(), tmp_path), ("t", 0)) == {("t", 0): 9}
