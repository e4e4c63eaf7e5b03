"""Opening a folder of the shared layout, one decision at a time."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import CorruptBatch
from headrace.ports.disk import read_whole
from headrace.storage import folder, producers
from headrace.storage.commitlog import checkpoint, frames, recovery
from headrace.storage.commitlog.commitlog import CommitLog
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.recovery import RecoveredQueue
from headrace.storage.commitlog.replay import Replay, State
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.epochs import EpochHistory
from headrace.storage.folder import SHARED
from headrace.storage.log import TopicPartition
from headrace.virtual.disk import VirtualDisk, VirtualFile
from storage.harness import TOPIC, Harness, append, batch, sim_harness, values

FOLDER = "/data/orders/orders-0"
COMMIT_LOG = "/data/@commitlog"
OTHER = TopicPartition("other", 0)
EPOCHS = [(0, 0), (1, 10), (2, 20), (3, 30)]


def filled(count: int = 40) -> tuple[Harness, SharedLog]:
    """All is synced, over several commit files, and the checkpoint says so; epochs of ten offsets each."""
    harness = sim_harness(SHARED)
    log = harness.log(durability="disk", index_interval_bytes=100)
    for n in range(count):
        append(log, batch(b"%d" % n * 30), epoch=n // 10)
        assert not harness.write()
    harness.settle()
    harness.advance(61)
    assert isinstance(log, SharedLog)
    return harness, log


def disk_of(harness: Harness) -> VirtualDisk:
    assert isinstance(harness.disk, VirtualDisk)
    return harness.disk


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


def ended(harness: Harness, *, clean: bool) -> VirtualDisk:
    if clean:
        store_of(harness).close()
    else:
        store_of(harness).abandon()
    return disk_of(harness)


def opened(harness: Harness) -> SharedLog:
    harness.open()
    log = harness.log()
    assert isinstance(log, SharedLog)
    return log


def point_of(disk: VirtualDisk) -> checkpoint.Checkpoint:
    found = checkpoint.read(disk, "/data")
    assert found is not None
    return found


def believe(disk: VirtualDisk, *, position: int | None = None, forget: bool = False, **changes: object) -> None:
    """Let the checkpoint say something else of the log."""
    found = point_of(disk)
    points = {} if forget else found.logs | {TOPIC: found.logs[TOPIC]._replace(**changes)}  # type: ignore[arg-type]
    file = disk.open("/data/@checkpoint", writable=True)
    file.truncate(0)
    at = found.position if position is None else position
    file.pwritev([checkpoint.encode(found.clean, at, points.values())], 0)
    file.close()


def cut_file(disk: VirtualDisk, path: str, size: int) -> None:
    file = disk.open(path, writable=True)
    file.truncate(size)
    file.close()


def put(disk: VirtualDisk, path: str, content: bytes = b"", at: int = 0) -> None:
    file = disk.open(path, create=True, writable=True)
    file.pwritev([content], at)
    file.close()


def commit_files(disk: VirtualDisk) -> list[str]:
    return sorted(f"{COMMIT_LOG}/{name}" for name in disk.list(COMMIT_LOG) if name.endswith(".log"))


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> dict[TopicPartition, RecoveredQueue]:
    """What openings found out of each log."""
    found: dict[TopicPartition, RecoveredQueue] = {}

    def made(around: Any, path: str, where: TopicPartition, *more: Any) -> SharedLog:
        found[where] = more[-1]
        return SharedLog(around, path, where, *more)

    monkeypatch.setattr(recovery, "SharedLog", made)
    return found


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Passes over the commit log: of how many partitions, what was synced, from where."""
    passes: list[tuple[int, int, int]] = []
    run = Replay.run

    def noted(each: Replay, from_position: int) -> None:
        passes.append((len(each._states), each._synced, from_position))
        run(each, from_position)

    monkeypatch.setattr(Replay, "run", noted)
    return passes


def is_whole(log: SharedLog) -> bool:
    return (values(log), log.epoch_starts()) == ([b"%d" % n * 30 for n in range(40)], EPOCHS)


# What is read.


def test_a_commit_log_is_read_unless_it_ends_where_a_clean_stop_left_it(replays: list[tuple[int, int, int]]) -> None:
    harness, _ = filled()
    disk = ended(harness, clean=True)
    position = point_of(disk).position
    assert is_whole(opened(harness))
    assert (store_of(harness).was_clean, replays) == (True, [])
    ended(harness, clean=False)
    assert is_whole(opened(harness))
    assert (store_of(harness).was_clean, len(replays)) == (False, 1), "it was not stopped"
    ended(harness, clean=True)
    path = commit_files(disk)[-1]
    size = disk.size(path)
    put(disk, path, b"torn", size)
    replays.clear()
    assert is_whole(opened(harness))
    assert (store_of(harness).was_clean, len(replays)) == (False, 1), "it does not end there"
    assert disk.size(path) >= size
    assert position > 0


def test_a_new_folder_is_as_clean_as_one_that_was_stopped() -> None:
    harness = sim_harness(SHARED)
    harness.open()
    assert store_of(harness).was_clean
    ended(harness, clean=False)
    harness.open()
    assert store_of(harness).was_clean


def test_a_commit_log_that_was_stopped_in_order_is_read_if_a_sync_had_failed() -> None:
    harness, _ = filled()
    put(ended(harness, clean=True), f"{COMMIT_LOG}/sync-failed")
    assert is_whole(opened(harness))
    assert not store_of(harness).was_clean


def test_only_what_is_behind_the_checkpoint_is_read_and_doubted(
    replays: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, log = filled()
    position = point_of(disk_of(harness)).position
    append(log, batch(b"more"), epoch=3)
    harness.write()
    doubted: list[int] = []
    doubt = CommitLog.doubt

    def noted(commit_log: CommitLog, at: int) -> None:
        doubted.append(at)
        doubt(commit_log, at)

    monkeypatch.setattr(CommitLog, "doubt", noted)
    ended(harness, clean=False)
    assert opened(harness).end_offset == 41
    assert replays == [(1, position, position)]
    assert doubted == [position]


def test_a_commit_log_that_has_lost_what_was_synced_is_read_whole(
    replays: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, _ = filled()
    disk = ended(harness, clean=True)
    path, position = commit_files(disk)[-1], point_of(disk).position
    cut_file(disk, path, disk.size(path) - 1)
    doubted: list[int] = []
    monkeypatch.setattr(CommitLog, "doubt", lambda _, at: doubted.append(at))
    log = opened(harness)
    assert replays[0][2] == 0
    assert log.end_offset < 40
    assert values(log) == [b"%d" % n * 30 for n in range(log.end_offset)]
    assert 0 < doubted[-1] < position


# Folders.


def test_a_folder_that_is_not_expected_or_of_another_topic_is_set_aside() -> None:
    for is_expected in (False, True):
        harness, _ = filled()
        disk = ended(harness, clean=True)
        topic_id, settings = harness.expected.pop(TOPIC)
        if is_expected:
            harness.expected[TOPIC] = (bytes(reversed(topic_id)), settings)
        harness.open()
        names = disk.list("/data/orders")
        assert [name for name in names if name.startswith("orders-0.stray")]
        assert ("orders-0" in names) is is_expected
        if is_expected:
            assert harness.log().end_offset == 0


@pytest.mark.parametrize("known", [True, False])
def test_a_new_folder_says_from_where_on_the_commit_log_can_hold_something_of_it(known: bool) -> None:
    harness, _ = filled()
    disk = ended(harness, clean=True)
    position = point_of(disk).position
    where = TOPIC if known else OTHER
    if known:
        disk.remove_folder(FOLDER)
    else:
        harness.expected[OTHER] = (harness.topic_id(OTHER.topic), harness.expected[TOPIC][1])
    harness.open()
    assert folder.begins_at(disk, folder.partition_folder("/data", where)) == (0 if known else position)
    assert is_whole(opened_log(harness))


def opened_log(harness: Harness) -> SharedLog:
    log = harness.log()
    assert isinstance(log, SharedLog)
    return log


# Queues.


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("lost", ["queue", "epochs", "point", "topic"])
def test_what_does_not_agree_with_the_checkpoint_is_built_from_the_commit_log(clean: bool, lost: str) -> None:
    harness, log = filled()
    entries, live = list(log.queue.entries(0)), dict(log.queue.live)
    disk = ended(harness, clean=clean)
    for name in disk.list(FOLDER):
        if lost == "queue" and name.endswith(".queue"):
            disk.flip(f"{FOLDER}/{name}", 3)
    if lost == "epochs":
        disk.flip(f"{FOLDER}/leader-epochs", 3)
    if lost in ("point", "topic"):
        for name in disk.list(FOLDER):
            if name.endswith(".queue"):
                put(disk, f"{FOLDER}/{name}", b"left over" * 100)
        put(disk, f"{FOLDER}/{99:020d}.queue", b"left over")
        believe(disk, forget=lost == "point", topic_id="ff" * 16)
    log = opened(harness)
    assert is_whole(log)
    assert not disk.exists(f"{FOLDER}/{99:020d}.queue")
    assert (list(log.queue.entries(0)), log.queue.live) == (entries, live)
    ended(harness, clean=True)
    assert is_whole(opened(harness))


@pytest.mark.parametrize("clean", [True, False])
def test_bytes_that_are_pointed_to_are_counted_anew_unless_the_stop_was_clean(clean: bool) -> None:
    harness, log = filled()
    live = dict(log.queue.live)
    disk = ended(harness, clean=clean)
    first = min(live)
    believe(disk, live=[(first, 7)])
    assert opened(harness).queue.live == ({first: 7} if clean else live)


def test_an_epoch_that_falls_behind_the_checkpoint_is_damage() -> None:
    harness, log = filled()
    append(log, batch(b"of an earlier leader"), epoch=2)
    harness.write()
    ended(harness, clean=False)
    log = opened(harness)
    assert log.end_offset == 41
    with pytest.raises(CorruptBatch):
        log.read(40, 1000, 41)


@pytest.mark.parametrize("clean", [True, False])
def test_a_queue_that_leads_to_a_file_that_is_gone_is_built_anew(
    clean: bool, replays: list[tuple[int, int, int]]
) -> None:
    harness, log = filled()
    disk = ended(harness, clean=clean)
    paths = commit_files(disk)
    assert len(paths) >= 2
    disk.remove(paths[0])
    log = opened(harness)
    assert (log.start_offset, log.end_offset) == (0, 40)
    with pytest.raises(CorruptBatch):
        log.read(0, 1000, 40)
    whole = frames.position(store_of(harness).commit_log.number + 1, 0)
    assert replays[-1] == ((1, point_of(disk).position, 0) if clean else (1, whole, 0))


def test_a_queue_that_has_lost_its_first_files_is_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, log = filled()
    ended(harness, clean=True)
    speaks = type(log.queue).speaks_from
    answers = [False]
    monkeypatch.setattr(
        type(log.queue), "speaks_from", lambda queue, at: answers.pop() if answers else speaks(queue, at)
    )
    log = opened(harness)
    assert not answers
    assert is_whole(log)


# Logs.


def test_what_a_checkpoint_says_of_a_log_is_believed_no_further_than_the_log_goes(
    finds: dict[TopicPartition, RecoveredQueue],
) -> None:
    harness, log = filled()
    log.delete_before(12)
    harness.settle()
    log.truncate(20)
    harness.write()
    disk = ended(harness, clean=False)
    believe(disk, start_offset=5, cleanings=[(8, 1), (33, 2)])
    opened(harness)
    found = finds[TOPIC]
    assert (found.start_offset, found.safe_start_offset) == (12, 5)
    assert found.cleanings == [(8, 1), (20, 2)]
    believe(ended(harness, clean=True), start_offset=15)
    opened(harness)
    assert (finds[TOPIC].start_offset, finds[TOPIC].safe_start_offset) == (15, 15)
    assert finds[TOPIC].checked_from is None, "nothing was read"


def test_what_was_read_behind_the_checkpoint_is_not_checked_again(finds: dict[TopicPartition, RecoveredQueue]) -> None:
    harness, log = filled()
    append(log, batch(b"more"), epoch=3)
    harness.write()
    ended(harness, clean=False)
    opened(harness)
    assert finds[TOPIC].checked_from == 40
    ended(harness, clean=False)
    opened(harness)
    assert finds[TOPIC].checked_from == 41, "nothing was behind it"


def test_what_a_checkpoint_says_of_another_topic_of_that_name_says_nothing(
    finds: dict[TopicPartition, RecoveredQueue],
) -> None:
    harness, _ = filled()
    believe(ended(harness, clean=False), topic_id="ff" * 16, start_offset=5, cleanings=[(8, 1)])
    opened(harness)
    assert (finds[TOPIC].safe_start_offset, finds[TOPIC].cleanings) == (0, [])


def test_what_lies_beside_the_commit_log_is_doubted_unless_all_was_stopped_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness, _ = filled()
    doubted: list[TopicPartition] = []
    doubt = SharedLog.sync_derived_again

    def noted(log: SharedLog) -> None:
        doubted.append(log.topic_partition)
        doubt(log)

    monkeypatch.setattr(SharedLog, "sync_derived_again", noted)
    ended(harness, clean=True)
    opened(harness)
    assert doubted == []
    ended(harness, clean=False)
    opened(harness)
    assert doubted == [TOPIC]
    doubted.clear()
    ended(harness, clean=True)
    harness.expected[OTHER] = (harness.topic_id(OTHER.topic), harness.expected[TOPIC][1])
    opened(harness)
    assert doubted == [OTHER], "nothing was heard of it"
    doubted.clear()
    put(ended(harness, clean=True), f"{COMMIT_LOG}/sync-failed")
    opened(harness)
    assert set(doubted) == {TOPIC, OTHER}, "a sync had failed"
    doubted.clear()
    disk = ended(harness, clean=True)
    for name in disk.list(FOLDER):
        if name.endswith(".queue"):
            disk.remove(f"{FOLDER}/{name}")
    opened(harness)
    assert doubted == [TOPIC], "its queue was built anew"


def test_a_log_without_records_that_was_not_stopped_in_order_is_doubted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = sim_harness(SHARED)
    harness.log()
    harness.advance(61)
    disk = ended(harness, clean=False)
    for path in commit_files(disk):
        disk.remove(path)
    believe(disk, position=0)
    doubted: list[TopicPartition] = []
    monkeypatch.setattr(SharedLog, "sync_derived_again", lambda log: doubted.append(log.topic_partition))
    harness.open()
    assert doubted == [TOPIC]


def test_a_log_that_is_built_anew_is_told_its_epochs_and_what_was_checked(
    finds: dict[TopicPartition, RecoveredQueue],
) -> None:
    harness, _ = filled()
    disk = ended(harness, clean=True)
    for name in disk.list(FOLDER):
        if name.endswith(".queue"):
            disk.remove(f"{FOLDER}/{name}")
    opened(harness)
    found = finds[TOPIC]
    assert found.epochs is not None
    assert (found.epochs.entries, found.checked_from) == (EPOCHS, 0)


def test_the_bounds_of_a_log_of_which_nothing_was_heard_are_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, _ = filled()
    ended(harness, clean=True)
    harness.expected[OTHER] = (harness.topic_id(OTHER.topic), harness.expected[TOPIC][1])
    told: list[TopicPartition] = []
    open_ = recovery.StoreRecovery._open

    def noted(each: recovery.StoreRecovery, where: TopicPartition, state: State) -> SharedLog:
        log = open_(each, where, state)
        assert (log in each._services.staged) is log.bounds_unwritten
        told.extend([where] * log.bounds_unwritten)
        return log

    monkeypatch.setattr(recovery.StoreRecovery, "_open", noted)
    harness.open()
    assert told == [OTHER]


def beside(disk: VirtualDisk) -> dict[str, bytes]:
    """The checkpoint, and what is derived from the commit log."""
    names = [f"{FOLDER}/{name}" for name in disk.list(FOLDER) if name.endswith(".queue") or name == "leader-epochs"]
    return {path: read_whole(disk, path) for path in ["/data/@checkpoint", *names]}


def put_back(disk: VirtualDisk, files: dict[str, bytes]) -> None:
    """As a loss of power leaves them that took what was not synced."""
    for name in disk.list(FOLDER):
        if name.endswith(".queue"):
            disk.remove(f"{FOLDER}/{name}")
    for path, content in files.items():
        put(disk, path, content)
        cut_file(disk, path, len(content))


@pytest.mark.parametrize("rebuilt", [True, False])
def test_epochs_are_those_of_the_commit_log_behind_a_truncation(
    rebuilt: bool, finds: dict[TopicPartition, RecoveredQueue]
) -> None:
    """The file still tells of epochs that were cut."""
    harness, log = filled()
    before = beside(disk_of(harness))
    log.truncate(20)
    for n in range(5):
        append(log, batch(b"new %d" % n), epoch=7)
        harness.write()
    disk = ended(harness, clean=False)
    put_back(disk, before)
    if rebuilt:
        for name in disk.list(FOLDER):
            if name.endswith(".queue"):
                disk.remove(f"{FOLDER}/{name}")
    log = opened(harness)
    assert log.end_offset == 25
    assert finds[TOPIC].checked_from == (0 if rebuilt else 20)
    assert log.epoch_starts() == EpochHistory(disk, FOLDER).entries == [(0, 0), (1, 10), (7, 20)]


@pytest.mark.parametrize("lost", ["nothing else", "queue"])
def test_files_that_were_written_before_a_loss_of_power_took_their_batches_are_not_believed(
    lost: str, finds: dict[TopicPartition, RecoveredQueue]
) -> None:
    """A log was cut and went on in a later epoch. Its epochs and a snapshot are on disk, the commit log has neither the
    cut nor what came after it."""
    harness = sim_harness(SHARED)
    log = harness.log(durability="disk")
    append(log, batch(b"old"), epoch=0)
    assert not harness.write()
    harness.settle()
    if lost == "queue":
        harness.advance(61)
    disk = disk_of(harness)
    synced = {path: read_whole(disk, path) for path in ("/data/@checkpoint", *commit_files(disk))}
    assert (TOPIC in point_of(disk).logs) is (lost == "queue")
    log.truncate(0)
    for n in range(3):
        append(log, batch(b"new %d" % n), epoch=1)
    assert not harness.write()
    harness.settle()
    ended(harness, clean=False)
    for path, content in synced.items():
        put(disk, path, content)
        cut_file(disk, path, len(content))
    put(disk, f"{FOLDER}/{1:020d}.snapshot", producers.encode({7: producers.ProducerState(0, (), 0)}))
    if lost == "queue":
        for name in disk.list(FOLDER):
            if name.endswith(".queue"):
                disk.remove(f"{FOLDER}/{name}")
    log = opened(harness)
    assert values(log) == [b"old"]
    assert log.epoch_starts() == EpochHistory(disk, FOLDER).entries == [(0, 0)]
    assert (1 in finds[TOPIC].snapshots) is (lost == "queue")  # then it is not above the checkpoint's end


def test_epochs_that_change_within_one_write_are_found_in_the_commit_log() -> None:
    harness = sim_harness(SHARED)
    log = harness.log()
    for epoch in (0, 1, 5):
        append(log, batch(b"value"), epoch)
    harness.write()
    assert isinstance(log, SharedLog)
    assert len(list(log.queue.entries(0))) == 1
    harness.settle()
    harness.advance(61)
    disk = ended(harness, clean=False)
    for name in disk.list(FOLDER):
        if name.endswith(".queue") or name == "leader-epochs":
            disk.remove(f"{FOLDER}/{name}")
    assert opened(harness).epoch_starts() == [(0, 0), (1, 1), (5, 2)]


def test_the_file_of_epochs_is_closed_when_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, log = filled()
    append(log, batch(b"more"), epoch=8)
    harness.write()
    disk = ended(harness, clean=False)
    disk.remove(f"{FOLDER}/leader-epochs")
    closed: list[str] = []
    close = VirtualFile.close

    def noted(file: VirtualFile) -> None:
        closed.append(file.path)
        close(file)

    monkeypatch.setattr(VirtualFile, "close", noted)
    assert opened(harness).epoch_starts() == [*EPOCHS, (8, 40)]
    assert f"{FOLDER}/leader-epochs" in closed


def test_snapshots_that_are_torn_go_though_nothing_is_behind_the_checkpoint(
    finds: dict[TopicPartition, RecoveredQueue],
) -> None:
    harness, _ = filled()
    disk = ended(harness, clean=False)
    put(disk, f"{FOLDER}/{13:020d}.snapshot", b"torn")
    put(disk, f"{FOLDER}/{40:020d}.snapshot", producers.encode({}))
    opened(harness)
    assert [each for each in finds[TOPIC].snapshots if each >= 12] == [40]


def test_snapshots_are_looked_at_when_their_log_is_built_anew(finds: dict[TopicPartition, RecoveredQueue]) -> None:
    harness, _ = filled()
    disk = ended(harness, clean=True)
    put(disk, f"{FOLDER}/{13:020d}.snapshot", b"torn")
    for name in disk.list(FOLDER):
        if name.endswith(".queue"):
            disk.remove(f"{FOLDER}/{name}")
    opened(harness)
    assert 13 not in finds[TOPIC].snapshots


@pytest.mark.parametrize("clean", [True, False])
def test_snapshots_that_are_torn_or_speak_of_what_was_cut_go(
    clean: bool, finds: dict[TopicPartition, RecoveredQueue]
) -> None:
    harness, log = filled()
    before = beside(disk_of(harness))
    log.truncate(30)
    for _ in range(5):
        append(log, batch(b"new"), epoch=9)
    harness.write()
    harness.settle()
    disk = ended(harness, clean=clean)
    if not clean:
        put_back(disk, before)
    for offset in (12, 30, 31, 40):
        put(disk, f"{FOLDER}/{offset:020d}.snapshot", producers.encode({}))
    put(disk, f"{FOLDER}/{13:020d}.snapshot", b"torn")
    put(disk, f"{FOLDER}/{'x' * 20}.snapshot", b"none of ours")
    opened(harness)
    whole = [12, 13, 30, 31, 35, 40] if clean else [12, 30]
    assert [each for each in finds[TOPIC].snapshots if each >= 12] == whole
    there = [int(name[:20]) for name in disk.list(FOLDER) if name.endswith(".snapshot") and name[0] == "0"]
    assert sorted(each for each in there if each >= 12) == whole
