"""Group commit alone: who is in a sync, and what its answer counts for."""

from __future__ import annotations

import errno
from typing import cast

import pytest

from headrace.errors import HeadraceError, StorageFailed
from headrace.ports.disk import File, SyncFailed
from headrace.storage.group_commit import RETRY_SECONDS, GroupCommit, SyncedLog, concerns
from headrace.storage.log import Log, TopicPartition
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk


class Held:
    """A log that is one file."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.topic_partition = TopicPartition(name, 0)
        self.file = scene.disk.open(f"/{name}", create=True, writable=True)
        self.offline: HeadraceError | None = None
        self.written_offset = self.durable_offset = self.truncations = self.taken = 0
        self.refuses: OSError | None = None
        self.answers: list[int] = []

    def take_unsynced(self) -> list[File]:
        self.taken += 1
        if self.refuses is not None:
            raise self.refuses
        return [self.file]

    def synced_upto(self, offset: int) -> None:
        self.answers.append(offset)
        self.durable_offset = max(self.durable_offset, offset)

    def fail(self, error: OSError) -> HeadraceError:
        self.offline = StorageFailed(str(error))
        return self.offline


class Scene:
    def __init__(self, files_max: int = 1000) -> None:
        self.clock = VirtualClock()
        self.disk = VirtualDisk(self.clock)
        self.commit = GroupCommit(self.disk, self.clock, files_max)
        self.told: list[str] = []
        self.took: list[float] = []
        self.commit.listeners.append(self.heard)
        self.commit.timers.append(self.took.append)

    def heard(self, log: Log) -> None:
        self.told.append(log.topic_partition.topic)

    def log(self, name: str, written: int = 5) -> Held:
        made = Held(self, name)
        made.written_offset = written
        return made

    def ask(self, *logs: Held) -> None:
        for log in logs:
            self.commit.ask(cast("SyncedLog", log))
        self.commit.start()


def test_a_sync_counts_for_what_was_written_when_it_began() -> None:
    scene = Scene()
    log = scene.log("a")
    scene.disk.hold_syncs()
    scene.ask(log)
    log.written_offset = 9
    scene.ask(log)
    assert log.taken == 1  # one at a time
    scene.clock.advance(2)
    assert (log.durable_offset, scene.told) == (0, [])
    scene.disk.release_syncs()
    scene.clock.advance(1)
    assert (log.durable_offset, log.taken, scene.told) == (9, 2, ["a", "a"])
    assert scene.took[0] >= 2
    assert scene.disk.syncs == 2
    scene.commit.start()
    scene.clock.advance(1)
    assert scene.disk.syncs == 2


def test_a_log_that_was_cut_meanwhile_is_synced_once_more_before_it_counts() -> None:
    scene = Scene()
    cut, whole = scene.log("cut"), scene.log("whole")
    scene.disk.hold_syncs()
    scene.ask(cut, whole)
    cut.truncations, cut.written_offset = 1, 3
    scene.disk.release_syncs()
    scene.clock.advance(1)
    assert (cut.durable_offset, whole.durable_offset) == (3, 5)
    assert scene.told == ["whole", "cut"]
    assert (cut.taken, whole.taken) == (2, 1)
    assert cut.answers == [0, 3]  # it hears that the files that it gave away are free again, and no more


def test_a_sync_that_failed_takes_the_logs_of_its_files_offline_and_the_others_count() -> None:
    scene = Scene()
    bad, good = scene.log("bad"), scene.log("good")
    scene.disk.fail_sync("/bad")
    scene.ask(bad, good)
    scene.clock.advance(1)
    assert (bad.offline is not None, bad.durable_offset) == (True, 0)
    assert (good.offline, good.durable_offset) == (None, 5)
    assert sorted(scene.told) == ["bad", "good"]
    scene.ask(bad)
    scene.clock.advance(1)
    assert bad.taken == 1
    assert sorted(scene.told) == ["bad", "good"]


def test_an_error_that_names_no_files_concerns_all() -> None:
    scene = Scene()
    one, other = scene.log("one").file, scene.log("other").file
    assert concerns(OSError(errno.EIO, "broken"), [one])
    assert concerns(OSError(errno.EIO, "broken"), [])
    assert concerns(SyncFailed(errno.EIO, [one]), [other, one])
    assert not concerns(SyncFailed(errno.EIO, [one]), [other])


def test_a_log_that_went_offline_meanwhile_hears_nothing() -> None:
    scene = Scene()
    log, other = scene.log("a"), scene.log("b")
    scene.disk.hold_syncs()
    scene.ask(log, other)
    log.offline = StorageFailed("deleted")
    scene.disk.release_syncs()
    scene.clock.advance(1)
    assert (log.durable_offset, other.durable_offset, scene.told) == (0, 5, ["b"])


def test_files_that_cannot_be_opened_for_a_shortage_are_tried_again_and_nothing_counts_meanwhile() -> None:
    scene = Scene()
    short, other = scene.log("short"), scene.log("other")
    short.refuses = OSError(errno.EMFILE, "too many open files")
    scene.ask(short, other)
    scene.clock.advance(RETRY_SECONDS / 2)
    assert (short.offline, short.durable_offset, other.durable_offset) == (None, 0, 5)
    tries = short.taken
    scene.clock.advance(RETRY_SECONDS * 3)
    assert tries < short.taken <= tries + 4  # once a second
    short.refuses = None
    scene.clock.advance(RETRY_SECONDS * 2)
    assert (short.durable_offset, scene.told) == (5, ["other", "short"])


def test_files_that_cannot_be_opened_for_a_failure_take_the_log_offline() -> None:
    scene = Scene()
    broken, other = scene.log("broken"), scene.log("other")
    broken.refuses = OSError(errno.EIO, "broken")
    scene.ask(broken, other)
    scene.clock.advance(1)
    assert (broken.offline is not None, other.durable_offset) == (True, 5)
    assert scene.told == ["broken", "other"]
    assert broken.taken == 1


@pytest.mark.parametrize(("files_max", "syncs"), [(1, 3), (2, 2), (3, 1)])
def test_one_sync_has_only_so_many_files_and_the_next_has_the_others(files_max: int, syncs: int) -> None:
    scene = Scene(files_max)
    logs = [scene.log(name) for name in ("a", "b", "c")]
    scene.ask(*logs)
    scene.clock.advance(1)
    assert [log.durable_offset for log in logs] == [5, 5, 5]
    assert len(scene.took) == syncs


def test_after_the_close_nothing_begins_and_no_answer_is_listened_to() -> None:
    scene = Scene()
    log = scene.log("a")
    scene.disk.hold_syncs()
    scene.ask(log)
    scene.commit.close()
    scene.disk.release_syncs()
    scene.clock.advance(1)
    assert (log.durable_offset, scene.told, scene.took) == (0, [], [])
    scene.ask(log)
    scene.clock.advance(1)
    assert log.taken == 1
