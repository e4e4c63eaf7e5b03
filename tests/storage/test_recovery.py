"""Opening a partition's folder, one decision at a time."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import CorruptBatch, HeadraceError
from headrace.ports.disk import read_whole
from headrace.storage import checkpoint, producers
from headrace.storage.checkpoint import LogPoint
from headrace.storage.epochs import EpochHistory
from headrace.storage.log import Tail
from headrace.storage.segments import recovery, truncation
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.recovery import RecoveredSegments
from headrace.storage.segments.segment import OpenSegments, Segment, Sum, encode_sum
from headrace.storage.segments.store import PartitionedStore
from headrace.storage.segments.truncation import Marker
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk, VirtualFile
from storage.folders import copied
from storage.harness import TOPIC, TOPIC_ID, Harness, append, batch, sim_harness, values

FOLDER = "/data/orders/orders-0"
POINT = LogPoint("orders", 0, TOPIC_ID.hex(), True, 40, 5, 50, 30, 100, 7, [(20, 1), (35, 2)], 2)


def new_folder() -> VirtualDisk:
    disk = VirtualDisk(VirtualClock())
    disk.make_folder(FOLDER)
    return disk


def put(disk: VirtualDisk, name: str, content: bytes = b"") -> None:
    file = disk.open(f"{FOLDER}/{name}", create=True, writable=True)
    file.pwritev([content], 0)
    file.close()


def named(offset: int, ending: str) -> str:
    return f"{offset:020d}{ending}"


def at(offset: int, count: int = 1) -> bytes:
    made = batch(*[b"value"] * count)
    made[:8] = offset.to_bytes(8, "big")
    return bytes(made)


def segment(
    disk: VirtualDisk, base: int, end: int, *, size: int = 0, cleaned: bool = False, sparse: bool = False
) -> Segment:
    made = Segment(
        disk, OpenSegments(9), FOLDER, base, end, index_bytes=4096, interval_bytes=100, cleaned=cleaned, sparse=sparse
    )
    made.found_bytes(size)
    return made


def test_markers_of_which_the_checkpoint_speaks_go_and_the_others_count() -> None:
    disk = new_folder()
    markers = [Marker(1, 30, False), Marker(2, 20, True), Marker(3, 10, False), Marker(4, 10, True)]
    for marker in markers:
        put(disk, marker.name)
    names = disk.list(FOLDER)
    assert recovery._pending_cuts(disk, FOLDER, names, None) == markers
    assert disk.list(FOLDER) == names
    assert recovery._pending_cuts(disk, FOLDER, names, POINT) == markers[2:]
    assert sorted(disk.list(FOLDER)) == sorted(marker.name for marker in markers[2:])


@pytest.mark.parametrize(
    ("untold", "recovery_offset", "start_offset", "cleaned"),
    [
        ([(30, False)], 30, 5, (20, 30)),
        ([(50, False)], 40, 5, (20, 35)),
        ([(30, False), (10, False), (12, False)], 10, 5, (10, 10)),
        ([(2, False)], 2, 5, (2, 2)),
        ([(2, True)], 2, 2, (2, 2)),
        ([(60, True)], 40, 5, (20, 35)),
        ([(60, True), (3, True), (30, False)], 3, 3, (3, 3)),
    ],
)
def test_of_a_checkpoint_before_truncations_only_what_they_left_is_relied_on(
    untold: list[tuple[int, bool]], recovery_offset: int, start_offset: int, cleaned: tuple[int, int]
) -> None:
    lowered = recovery._lowered(POINT, [Marker(nth, *each) for nth, each in enumerate(untold)])
    assert lowered == POINT._replace(
        clean=False,
        recovery_offset=recovery_offset,
        start_offset=start_offset,
        cleanings=[(cleaned[0], 1), (cleaned[1], 2)],
    )


@pytest.mark.parametrize(("point", "left"), [(None, [3, 5, 9]), (POINT, [3, 5])])
def test_a_marked_start_above_the_checkpoints_was_never_told_and_goes(point: LogPoint | None, left: list[int]) -> None:
    disk = new_folder()
    for offset in (3, 5, 9):
        put(disk, named(offset, truncation.START))
    assert recovery._start_markers(disk, FOLDER, disk.list(FOLDER), point) == left
    assert recovery._offsets(disk.list(FOLDER), truncation.START) == left


@pytest.mark.parametrize(
    ("markers", "untold", "start"),
    [
        ([], [], 0),
        ([3, 5], [], 5),
        ([3, 5], [Marker(1, 4, False)], 5),
        ([3, 5], [Marker(1, 4, False), Marker(2, 2, True)], 0),
    ],
)
def test_the_highest_marked_start_counts_unless_the_log_began_anew(
    markers: list[int], untold: list[Marker], start: int
) -> None:
    assert recovery._marked_start(markers, untold) == start


def test_the_epochs_file_is_believed_below_the_lowest_truncation() -> None:
    assert recovery._epochs_known_to([]) == recovery.NEVER
    assert recovery._epochs_known_to([Marker(1, 30, False), Marker(2, 10, False), Marker(3, 20, False)]) == 10
    assert recovery._epochs_known_to([Marker(1, 30, False), Marker(2, 10, True)]) == 0


def test_an_empty_last_segment_that_begins_before_the_known_end_goes_with_all_that_is_beside_it() -> None:
    for known_end, left in ((20, [0, 10, 20]), (21, [0])):
        disk = new_folder()
        for base, content in ((0, b"."), (10, b""), (20, b"")):
            for ending in (".log", ".index", ".timeindex", ".sum", ".gaps", ".snapshot"):
                put(disk, named(base, ending), content)
        assert recovery._drop_empty(disk, FOLDER, [0, 10, 20], known_end) == left
        assert recovery._offsets(disk.list(FOLDER), ".log") == left
        assert len(disk.list(FOLDER)) == 6 * len(left)
    disk = new_folder()
    put(disk, named(10, ".log"))
    assert recovery._drop_empty(disk, FOLDER, [10], 20) == [10], "a log has a segment"


@pytest.mark.parametrize(("start", "left"), [(9, [0, 10, 20]), (10, [10, 20]), (19, [10, 20]), (20, [20]), (99, [20])])
def test_segments_that_lie_below_the_start_were_deleted(start: int, left: list[int]) -> None:
    disk = new_folder()
    for base in (0, 10, 20):
        put(disk, named(base, ".log"), b".")
    assert recovery._drop_deleted(disk, FOLDER, [0, 10, 20], start) == left
    assert recovery._offsets(disk.list(FOLDER), ".log") == left


@pytest.mark.parametrize(
    ("aside", "is_raised"),
    [
        ({}, False),
        ({0: at(0, 4)}, False),  # it ends before the start
        ({0: at(0, 6)}, True),
        ({0: at(0, 5)}, False),
        ({5: b""}, True),
        ({6: at(6)}, False),  # it begins behind the start
        ({0: at(0, 9), 4: at(4, 1)}, False),
        ({0: at(0, 1), 4: at(4, 2)}, True),
        ({0: at(0, 6)[:-1]}, False),
        ({0: at(0, 2) + at(2, 4)}, True),
    ],
)
def test_a_start_was_raised_if_the_segment_that_held_it_was_set_aside(aside: dict[int, bytes], is_raised: bool) -> None:
    disk = new_folder()
    for base, content in aside.items():
        put(disk, named(base, ".log.deleted"), content)
    assert recovery._was_raised(disk, FOLDER, disk.list(FOLDER), 5) is is_raised


def test_what_a_crash_left_half_done_goes_and_so_do_indexes_without_their_log() -> None:
    disk = new_folder()
    whole = [named(0, ending) for ending in (".log", ".index", ".timeindex", ".sum", ".gaps", ".snapshot")]
    whole += [named(5, ".snapshot"), "leader-epochs", "partition"]
    left = [named(5, ending) for ending in (".index", ".timeindex", ".sum", ".gaps")]
    left += [named(5, ".log.deleted"), "partition.tmp", named(0, ".log.cleaned"), named(0, ".index.swap")]
    for name in whole + left:
        put(disk, name)
    assert sorted(recovery._tidy(disk, FOLDER, disk.list(FOLDER))) == sorted(whole)
    assert sorted(disk.list(FOLDER)) == sorted(whole)


@pytest.mark.parametrize(
    ("first", "is_doubted"),
    [
        ({"size": 0}, True),
        ({"size": 1}, False),
        ({"size": 0, "cleaned": True}, False),
        ({"size": 0, "sparse": True}, True),
    ],
)
def test_a_first_segment_without_anything_is_missing_if_others_follow(first: dict[str, int], is_doubted: bool) -> None:
    disk = new_folder()
    put(disk, named(5, ".sum"), encode_sum(Sum(0, 0, 10)))
    segments = [segment(disk, 5, 10, **first), segment(disk, 10, 12, size=9)]  # type: ignore[arg-type]
    recovery._doubt_empty(TOPIC, segments)
    found = [(bad.position, bad.end, bad.first_offset, bad.next_offset) for bad in segments[0].damage]
    assert found == ([(0, 0, 5, 10)] if is_doubted else [])
    alone = [segment(disk, 5, 10, **first)]  # type: ignore[arg-type]
    recovery._doubt_empty(TOPIC, alone)
    assert not alone[0].damage


def test_offsets_are_those_of_files_that_are_named_by_one() -> None:
    names = [named(7, ".log"), named(3, ".log"), named(3, ".index"), "x" * 20 + ".log", named(9, ".log.deleted")]
    assert recovery._offsets(names, ".log") == [3, 7]


@pytest.mark.parametrize("beside", [".sum", ".gaps", ".index"])
def test_a_first_segment_that_is_gone_is_missed_whatever_is_left_beside_it(beside: str) -> None:
    """A sum would say that it was compacted, and that nothing need be left of its offsets."""
    harness = sim_harness()
    log = harness.log(segment_bytes=1024)
    for n in range(40):
        append(log, batch(b"%d" % n))
        harness.write()
    harness.reopen()
    assert harness.store is not None
    harness.store.close()
    assert isinstance(harness.disk, VirtualDisk)
    harness.disk.remove(f"{FOLDER}/{named(0, '.log')}")
    put(harness.disk, named(0, beside))
    harness.open()
    log = harness.log()
    assert isinstance(log, PartitionedLog)
    assert log.start_offset == 0
    assert [bad.first_offset for bad in log.segments[0].damage] == [0]
    with pytest.raises(CorruptBatch):
        log.read(0, 1000, log.written_offset)


# Whole folders.

SMALL = {"segment_bytes": 1024, "index_interval_bytes": 100, "durability": "disk", "segment_ms": 3_600_000}


def filled(count: int = 40) -> tuple[Harness, PartitionedLog]:
    """All is synced, and the checkpoint says so; epochs of ten offsets each."""
    harness = sim_harness()
    log = harness.log(**SMALL)
    for n in range(count):
        append(log, batch(b"%d" % n * 10), epoch=n // 10)
        assert not harness.write()
    harness.settle()
    harness.advance(61)
    assert isinstance(log, PartitionedLog)
    return harness, log


def opened_again(harness: Harness) -> PartitionedLog:
    harness.open()
    log = harness.log()
    assert isinstance(log, PartitionedLog)
    return log


def killed(harness: Harness) -> VirtualDisk:
    assert harness.store is not None
    harness.store.abandon()
    assert isinstance(harness.disk, VirtualDisk)
    return harness.disk


def cut_file(disk: VirtualDisk, path: str, size: int) -> None:
    file = disk.open(path, writable=True)
    file.truncate(size)
    file.close()


def test_the_name_of_a_truncation_is_safe_before_bytes_go_for_its_sake(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, log = filled()
    log.truncate(3)
    disk, order = killed(harness), []
    sync_folder, truncate = VirtualDisk.sync_folder, VirtualFile.truncate

    def sync(each: VirtualDisk, path: str) -> None:
        order.append(path)
        sync_folder(each, path)

    def cut(each: VirtualFile, size: int) -> None:
        order.append(each.path)
        truncate(each, size)

    monkeypatch.setattr(VirtualDisk, "sync_folder", sync)
    monkeypatch.setattr(VirtualFile, "truncate", cut)
    opened_again(harness)
    assert order.index(FOLDER) < order.index(f"{FOLDER}/{named(0, '.log')}")
    assert disk is harness.disk


def test_truncations_are_counted_on_from_the_last_one_that_is_told_anywhere() -> None:
    harness, log = filled()
    for offset in (30, 20, 10):
        log.truncate(offset)
    killed(harness)
    log = opened_again(harness)
    assert (log.end_offset, log.cuts.number) == (10, 3)
    harness.settle()
    harness.advance(61)
    killed(harness)
    assert opened_again(harness).cuts.number == 3, "the checkpoint tells it now"


def test_a_log_that_ends_before_its_start_begins_anew_there() -> None:
    """Records were deleted that had not been synced, and a loss of power took those before them too."""
    harness, log = filled()
    log.delete_before(38)
    harness.settle()
    disk = killed(harness)
    for segment in log.segments:
        cut_file(disk, segment.path, 0)
    log = opened_again(harness)
    assert (log.start_offset, log.end_offset) == (38, 38)
    assert append(log, batch(b"next"), epoch=9) == 38


def test_a_start_that_was_raised_after_the_checkpoint_is_no_damage() -> None:
    harness, log = filled()
    first, second = log.segments[0], log.segments[1]
    disk = killed(harness)
    disk.rename(first.path, first.path + ".deleted")
    log = opened_again(harness)
    assert log.start_offset == second.base_offset
    assert not any(segment.damage for segment in log.segments)
    assert not disk.exists(first.path + ".deleted")


def test_first_segments_that_are_gone_are_damage_and_stand_for_their_offsets() -> None:
    harness, log = filled()
    second = log.segments[1]
    disk = killed(harness)
    disk.remove(log.segments[0].path)
    log = opened_again(harness)
    (missing,) = log.segments[0].damage
    assert (log.start_offset, missing.first_offset, missing.next_offset) == (0, 0, second.base_offset)


def test_the_age_of_a_segment_is_the_checkpoints_if_it_speaks_of_that_segment() -> None:
    harness, log = filled(1)
    began_ms = log.began_ms
    harness.advance(60)
    killed(harness)
    assert opened_again(harness).began_ms == began_ms
    log = harness.log()  # type: ignore[assignment]
    while len(log.segments) == 1:
        append(log, batch(b"more"))
        harness.write()
    harness.clock.advance(5)
    killed(harness)
    assert opened_again(harness).began_ms == harness.clock.wall_ms()


def test_a_log_that_was_not_stopped_in_order_is_read_and_one_that_was_is_not() -> None:
    harness, log = filled()
    append(log, batch(b"more"), epoch=9)
    harness.write()
    killed(harness)
    bases, size = [segment.base_offset for segment in log.segments], log.size_bytes
    for start in (opened_again, opened_cleanly, opened_cleanly):
        log = start(harness)
        assert log.recovered is (start is opened_again)
        assert ([segment.base_offset for segment in log.segments], log.size_bytes) == (bases, size)
    assert harness.store is not None
    harness.store.close()
    assert isinstance(harness.disk, VirtualDisk)
    put(harness.disk, "sync-failed")
    assert opened_again(harness).recovered, "a sync failed"
    assert not opened_cleanly(harness).recovered
    harness.store.close()
    cut_file(harness.disk, log.active.path, log.active.size - 1)
    log = opened_again(harness)
    assert (log.recovered, log.end_offset) == (True, 40), "the file is not as it was"


def opened_cleanly(harness: Harness) -> PartitionedLog:
    log = harness.reopen()
    assert isinstance(log, PartitionedLog)
    return log


def test_how_far_a_log_was_compacted_is_known_after_a_start_unless_it_was_cut_since() -> None:
    harness, log = filled()
    log.cleanings[:] = [(5, 7)]
    harness.advance(61)
    assert opened_cleanly(harness).cleanings == [(5, 7)]
    harness.log().truncate(3)
    killed(harness)
    assert opened_again(harness).cleanings == [(3, 7)]


def test_an_empty_last_segment_is_not_gone_on_with_if_it_held_something() -> None:
    harness, log = filled()
    last, before = log.segments[-1], log.segments[-2]
    cut_file(killed(harness), last.path, 0)
    log = opened_again(harness)
    assert (log.segments[-1].base_offset, log.end_offset) == (before.base_offset, last.base_offset)


@pytest.mark.parametrize("aside", [True, False])
def test_a_log_that_began_anew_and_was_cut_then_misses_nothing_of_before(aside: bool) -> None:
    """Whether what was before is still there, set aside, or not."""
    harness, log = filled()
    log.restart_at(100)
    for n in range(3):
        append(log, batch(b"%d" % n), epoch=9)
        harness.write()
    log.truncate(102)
    disk = killed(harness)
    for name in disk.list(FOLDER):
        if name.endswith(".deleted") and not aside:
            disk.remove(f"{FOLDER}/{name}")
    log = opened_again(harness)
    assert (log.start_offset, log.end_offset) == (100, 102)
    assert not any(segment.damage for segment in log.segments)


def believe(disk: VirtualDisk, **changes: object) -> None:
    """Let the checkpoint say something else."""
    points = checkpoint.read(disk, "/data")
    assert points is not None
    file = disk.open("/data/@checkpoint", writable=True)
    file.truncate(0)
    file.pwritev([checkpoint.encode([points[TOPIC]._replace(**changes)])], 0)  # type: ignore[arg-type]
    file.close()


def place(log: PartitionedLog, offset: int) -> tuple[str, int]:
    """Where a record lies: a byte inside it."""
    segment = next(each for each in reversed(log.segments) if each.base_offset <= offset)
    return segment.path, segment.locate(offset) + 70


def epochs_on_disk(disk: VirtualDisk) -> list[tuple[int, int]]:
    return EpochHistory(disk, FOLDER).entries


def test_segments_are_read_from_the_one_that_holds_the_recovery_point_on(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, log = filled()
    bases = [segment.base_offset for segment in log.segments]
    assert len(bases) == 4
    checked: list[int] = []
    unsynced: list[int] = []
    check = recovery._Recovery._check

    def noted(each: recovery._Recovery, segment: Segment, is_last: bool, only_empty_follow: bool) -> bool:
        assert is_last is (segment.base_offset == bases[-1])
        checked.append(segment.base_offset)
        return check(each, segment, is_last, only_empty_follow)

    def perhaps_unsynced(_folder: str, _snapshots: list[int], segments: list[Segment]) -> list[str]:
        unsynced[:] = [segment.base_offset for segment in segments]
        return []

    monkeypatch.setattr(recovery._Recovery, "_check", noted)
    monkeypatch.setattr(recovery, "_perhaps_unsynced", perhaps_unsynced)
    monkeypatch.setattr(PartitionedStore, "_sync_now", lambda *_: None)
    for safe, first in ((0, 0), (bases[2] - 1, 1), (bases[2], 2), (bases[2] + 1, 2), (99, 3)):
        believe(killed(harness), recovery_offset=safe)
        checked.clear()
        log = opened_again(harness)
        assert checked == bases[first:], safe
        assert unsynced == bases[max(0, first - 1) :], "the one before was closed last, perhaps just now"
        assert log.durable_offset == bases[first], "what is not read was synced"
    disk = killed(harness)
    put(disk, Marker(1, bases[2], False).name)
    checked.clear()
    opened_again(harness)
    assert checked == bases[1:], "the one that was cut is looked at"
    disk = killed(harness)
    put(disk, Marker(9, 0, True).name)
    checked.clear()
    opened_again(harness)
    assert checked == bases


def test_the_indexes_of_the_segment_before_those_that_are_read_are_made_again_if_they_are_lost() -> None:
    harness, log = filled()
    before = log.segments[-2]
    disk = killed(harness)
    disk.remove(before.stem + ".index")
    opened_again(harness)
    assert disk.exists(before.stem + ".index")


@pytest.mark.parametrize("safe", [5, 21])
def test_a_torn_batch_takes_everything_behind_it_along(safe: int) -> None:
    harness, log = filled()
    bases = [segment.base_offset for segment in log.segments]
    path, byte = place(log, 21)
    disk = killed(harness)
    for offset in (12, 21, 22, 35):
        put(disk, named(offset, ".snapshot"), producers.encode({}))
    put(disk, named(13, ".snapshot"), b"torn")
    disk.flip(path, byte)
    believe(disk, recovery_offset=safe)
    log = opened_again(harness)
    assert (log.end_offset, log.tail) == (21, Tail.HOLED)
    assert [segment.base_offset for segment in log.segments] == bases[:2]
    for ending in (".log", ".index", ".timeindex"):
        assert recovery._offsets(disk.list(FOLDER), ending) == bases[:2]
    assert disk.size(log.active.path) == log.active.size
    assert log.epoch_starts() == epochs_on_disk(disk) == [(0, 0), (1, 10), (2, 20)]
    assert recovery._offsets(disk.list(FOLDER), ".snapshot") == log.snapshots.offsets
    assert [offset for offset in log.snapshots.offsets if offset >= 12] == [12, 21]
    assert append(log, batch(b"next"), epoch=3) == 21
    harness.write()
    assert len(values(log)) == len(values(harness.reopen())) == 22


def test_a_broken_batch_below_the_recovery_point_ends_no_log() -> None:
    harness, log = filled()
    path, byte = place(log, 21)
    disk = killed(harness)
    disk.flip(path, byte)
    believe(disk, recovery_offset=22)
    log = opened_again(harness)
    assert [(bad.first_offset, bad.next_offset) for segment in log.segments for bad in segment.damage] == [(21, 22)]
    assert (log.end_offset, log.tail) == (40, Tail.WHOLE)


def test_the_broken_end_of_a_segment_below_the_recovery_point_reaches_to_the_next_segment() -> None:
    harness, log = filled()
    limit = log.segments[2].base_offset
    first, position = log.segments[1], log.segments[1].locate(limit - 3)
    disk = killed(harness)
    file = disk.open(first.path, writable=True)
    file.pwritev([bytes(first.size - position)], position)
    file.close()
    believe(disk, recovery_offset=limit - 1)
    log = opened_again(harness)
    assert [(bad.first_offset, bad.next_offset) for bad in log.segments[1].damage] == [(limit - 3, limit)]
    assert log.end_offset == 40


@pytest.mark.parametrize("synced", [True, False])
def test_a_segment_that_ends_too_early_is_damaged_if_its_end_was_synced_and_else_ends_the_log(synced: bool) -> None:
    harness, log = filled()
    limit = log.segments[2].base_offset
    short, position = log.segments[1], log.segments[1].locate(limit - 2)
    disk = killed(harness)
    cut_file(disk, short.path, position)
    believe(disk, recovery_offset=limit - 1 if synced else limit - 2)
    log = opened_again(harness)
    damage = [(bad.first_offset, bad.next_offset) for segment in log.segments for bad in segment.damage]
    assert damage == ([(limit - 2, limit)] if synced else [])
    assert (log.end_offset, len(log.segments)) == ((40, 4) if synced else (limit - 2, 2))
    if not synced:
        assert append(log, batch(b"next"), epoch=9) == limit - 2
        harness.write()
        assert len(values(harness.reopen())) == limit - 1


def test_a_segment_that_reaches_over_empty_ones_ends_the_log() -> None:
    harness, log = filled()
    bases = [segment.base_offset for segment in log.segments]
    disk = killed(harness)
    put(disk, named(38, ".log"))
    believe(disk, recovery_offset=bases[-1] + 1)
    log = opened_again(harness)
    assert ([segment.base_offset for segment in log.segments], log.end_offset) == (bases, 40)
    assert len(values(log)) == 40


def test_an_empty_segment_at_the_end_is_what_the_log_goes_on_with() -> None:
    harness, log = filled()
    bases = [segment.base_offset for segment in log.segments]
    disk = killed(harness)
    put(disk, named(40, ".log"))
    believe(disk, recovery_offset=35)
    log = opened_again(harness)
    assert ([segment.base_offset for segment in log.segments], log.end_offset) == ([*bases, 40], 40)


def test_a_segment_that_reaches_over_one_with_records_leaves_it_there() -> None:
    harness, log = filled()
    path, _ = place(log, 38)
    position = log.active.locate(38)
    whole = read_whole(harness.disk, path)
    disk = killed(harness)
    put(disk, named(38, ".log"), whole[position:])
    believe(disk, recovery_offset=35)
    log = opened_again(harness)
    assert (log.active.base_offset, log.end_offset) == (38, 40)


@pytest.mark.parametrize("safe", [0, 40])
def test_indexes_are_made_anew_as_they_were(safe: int) -> None:
    harness, log = filled()
    append(log, batch(b"early", timestamp_ms=1_600_000_000_000), epoch=9)
    harness.write()

    def indexed(log: PartitionedLog) -> list[tuple[object, ...]]:
        for segment in log.segments:
            segment.load_indexes()
        return [
            (
                each.base_offset,
                each.next_offset,
                each.load_greatest_ms(),
                [each.index.entry(n) for n in range(each.index.count)],
            )
            for each in log.segments
        ]

    before = indexed(log)
    assert all(len(entries) > 2 for *_, entries in before[:-1])  # type: ignore[arg-type]
    disk = killed(harness)
    for segment in log.segments:
        for ending in (".index", ".timeindex"):
            if disk.exists(segment.stem + ending) and segment is log.active:
                cut_file(disk, segment.stem + ending, 0)
    believe(disk, recovery_offset=safe)
    assert indexed(opened_again(harness)) == before


def test_what_a_start_has_read_is_not_checked_again() -> None:
    harness, log = filled()
    disk = killed(harness)
    believe(disk, recovery_offset=0)
    log = opened_again(harness)
    for segment in log.segments:
        disk.evict(segment.path)
    assert log.read(0, 1, 40).count > 0


def test_damage_that_had_been_synced_stays_where_it_is_and_takes_nothing_along() -> None:
    harness, log = filled()
    path, byte = place(log, 36)
    disk = killed(harness)
    disk.flip(path, byte)
    log = opened_again(harness)
    (bad,) = log.active.damage
    assert (bad.first_offset, bad.next_offset, log.end_offset, log.tail) == (36, 37, 40, Tail.WHOLE)


def test_a_last_segment_that_ends_too_early_ends_the_log() -> None:
    harness, log = filled()
    path, position = log.active.path, log.active.locate(38)
    disk = killed(harness)
    cut_file(disk, path, position)
    log = opened_again(harness)
    assert (log.end_offset, log.active.damage) == (38, ())


def test_files_that_were_only_looked_into_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, _ = filled()
    disk = killed(harness)
    put(disk, named(0, ".log.deleted"), at(0, 3))
    disk.remove(f"{FOLDER}/leader-epochs")
    believe(disk, start_offset=1)
    closed: list[str] = []
    close = VirtualFile.close

    def noted(file: VirtualFile) -> None:
        closed.append(file.path)
        close(file)

    monkeypatch.setattr(VirtualFile, "close", noted)
    opened_again(harness)
    assert f"{FOLDER}/{named(0, '.log.deleted')}" in closed
    assert f"{FOLDER}/leader-epochs" in closed


@pytest.mark.parametrize(("safe", "end"), [(40, 39), (39, 39), (36, 39)])
def test_a_last_batch_that_is_broken_is_cut_wherever_the_recovery_point_is(safe: int, end: int) -> None:
    harness, log = filled()
    path, byte = place(log, 39)
    disk = killed(harness)
    disk.flip(path, byte)
    believe(disk, recovery_offset=safe)
    log = opened_again(harness)
    assert (log.end_offset, log.active.damage) == (end, ())


@pytest.mark.parametrize("broken", [-1, 0, 2])
def test_epochs_and_bytes_of_before_a_truncation_are_not_believed_though_their_files_still_have_them(
    broken: int,
) -> None:
    """Whether the bytes that are left are whole or not."""
    harness, log = filled()
    before = read_whole(harness.disk, f"{FOLDER}/leader-epochs")
    path, byte = place(log, 13 + broken)
    log.truncate(13)
    for n in range(12):
        append(log, batch(b"new %d" % n), epoch=2)
        harness.write()
    disk = killed(harness)
    put(disk, "leader-epochs", before)
    if broken >= 0:
        disk.flip(path, byte)
    log = opened_again(harness)
    assert log.epoch_starts() == epochs_on_disk(disk) == [(0, 0), (1, 10), (2, 13)]
    assert (log.end_offset, log.tail) == (25, Tail.WHOLE)
    assert not any(segment.damage for segment in log.segments)
    assert values(log)[13:] == [b"new %d" % n for n in range(12)]
    assert all(disk.size(segment.path) == segment.size for segment in log.segments)


@pytest.mark.parametrize("safe", [0, 40])
def test_epochs_whose_file_is_lost_are_those_of_the_batches(safe: int) -> None:
    harness, log = filled()
    disk = killed(harness)
    disk.remove(f"{FOLDER}/leader-epochs")
    believe(disk, recovery_offset=safe)
    log = opened_again(harness)
    assert log.epoch_starts() == epochs_on_disk(disk) == [(0, 0), (1, 10), (2, 20), (3, 30)]


@pytest.mark.parametrize(
    ("marker", "end", "epochs"),
    [(Marker(1, 100, True), 100, []), (Marker(1, 13, False), 13, [(0, 0), (1, 10)]), (None, 40, None)],
)
def test_a_folder_without_segments_goes_on_where_a_truncation_or_else_the_checkpoint_says(
    marker: Marker | None, end: int, epochs: list[tuple[int, int]] | None
) -> None:
    harness, log = filled()
    disk = killed(harness)
    for segment in log.segments:
        disk.remove(segment.path)
    if marker is not None:
        put(disk, marker.name)
    believe(disk, start_offset=5)
    log = opened_again(harness)
    assert (log.end_offset, log.recovered) == (end, marker is not None)
    assert disk.exists(log.active.path)
    if epochs is not None:
        assert log.epoch_starts() == epochs_on_disk(disk) == epochs


@pytest.mark.parametrize("clean", [True, False])
def test_what_a_killed_process_may_not_have_synced_is_synced_with_the_first_batch(clean: bool) -> None:
    _, log = filled()
    found = RecoveredSegments(snapshots=[7])
    recovery._nothing_there(log._services, FOLDER, log.settings, found, POINT._replace(clean=clean), [])
    assert (f"{FOLDER}/leader-epochs" in found.unsynced) is not clean
    assert found.end_offset == 40
    found = RecoveredSegments()
    recovery._nothing_there(log._services, FOLDER, log.settings, found, None, [])
    assert (found.end_offset, FOLDER in found.unsynced) == (0, True)


@pytest.mark.parametrize(
    ("offset", "change", "tail"),
    [
        (39, "cut", Tail.CUT_SHORT),
        (39, "flip", Tail.TORN),
        (38, "flip", Tail.HOLED),  # a whole batch follows
        (33, "flip", Tail.HOLED),  # another segment follows
    ],
)
def test_a_tail_is_judged_by_what_is_left_of_it(offset: int, change: str, tail: Tail) -> None:
    harness, log = filled()
    assert log.segments[-1].base_offset == 34
    path, byte = place(log, offset)
    disk = killed(harness)
    if change == "cut":
        cut_file(disk, path, byte)
    else:
        disk.flip(path, byte)
    believe(disk, recovery_offset=5)
    log = opened_again(harness)
    assert (log.tail, log.end_offset) == (tail, offset)


def test_a_tail_that_cannot_be_noted_is_not_cut() -> None:
    harness, log = filled()
    path, byte = place(log, 39)
    disk = killed(harness)
    disk.flip(path, byte)
    size = disk.size(path)
    disk.fail_open(f"{FOLDER}/tail-cut", errno.ENOSPC)
    with pytest.raises((HeadraceError, OSError)):
        harness.open()
    assert disk.size(path) == size


def test_a_batch_behind_a_gap_that_is_cut_short_is_judged_as_one_that_is() -> None:
    harness, log = filled()
    copied(log, 50, b"value", epoch=4)
    harness.write()
    path, size = log.active.path, log.active.size
    disk = killed(harness)
    cut_file(disk, path, size - 1)
    log = opened_again(harness)
    assert (log.tail, log.end_offset) == (Tail.CUT_SHORT, 40)


def test_a_torn_end_before_empty_segments_is_no_hole() -> None:
    harness, log = filled()
    path, byte = place(log, 39)
    disk = killed(harness)
    put(disk, named(40, ".log"))
    disk.flip(path, byte)
    believe(disk, recovery_offset=5)
    log = opened_again(harness)
    assert (log.tail, log.end_offset, log.active.base_offset) == (Tail.TORN, 39, 34)
