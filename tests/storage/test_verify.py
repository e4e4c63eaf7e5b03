"""A flipped byte anywhere is found and named offline, and never served as good."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest

from headrace.errors import CorruptBatch, HeadraceError
from headrace.records import kernel
from headrace.records.batch import BatchHeader, batches
from headrace.storage import checked_bytes
from headrace.storage.log import Log
from headrace.storage.offline import verify
from headrace.storage.offline.report import DumpedBatch, Problem
from headrace.system.disk import SystemDisk
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, TOPIC_ID, Harness, append, batch, content, read_all, sim_harness
from storage.test_compaction import COMPACTED, compact, put

SHARE_TRIED = 0.1
FOLDER = "/data/orders/orders-0"


def small_log(**overrides: object) -> Harness:
    """Three segments, two epochs, an idempotent producer; stopped cleanly."""
    harness = sim_harness()
    log = harness.log(**({"segment_bytes": 1024, "index_interval_bytes": 150} | overrides))
    for i in range(30):
        append(log, batch(b"v%d" % i, timestamp_ms=1_750_000_000_000 + i * 7, producer=(9, 0, i)), epoch=i // 12)
        harness.write()
    assert harness.store is not None
    harness.store.close()
    return harness


def compacted_log() -> Harness:
    harness = sim_harness()
    log = harness.log(**COMPACTED)
    for i in range(60):
        put(harness, log, b"key%d" % (i * i % 9), b"%d" % i)
    compact(harness)
    assert harness.store is not None
    harness.store.close()
    return harness


def disk_of(harness: Harness) -> VirtualDisk:
    assert isinstance(harness.disk, VirtualDisk)
    return harness.disk


def files(harness: Harness, *endings: str) -> list[str]:
    names = sorted(name for name in harness.disk.list(FOLDER) if name.endswith(endings))
    return [f"{FOLDER}/{name}" for name in names]


def problems(harness: Harness) -> list[Problem]:
    return [problem for report in verify.verify(harness.disk, "/data") for problem in report.problems]


def positions(harness: Harness, *endings: str) -> Iterator[tuple[str, int]]:
    for path in files(harness, *endings):
        for position in range(harness.disk.size(path)):
            yield path, position


def served(log: Log) -> dict[int, tuple[BatchHeader, bytes]]:
    """What a consumer that checks no CRC and goes on behind an error gets."""
    found: dict[int, tuple[BatchHeader, bytes]] = {}
    for offset in range(log.start_offset, log.written_offset):
        try:
            data = content(log.read(offset, 400, log.written_offset))
            for header, view in batches(memoryview(data)):
                found[header.base_offset] = (header, bytes(view))
        except HeadraceError:
            continue
    return found


@pytest.mark.parametrize("make", [small_log, compacted_log])
def test_a_whole_folder_has_no_problems_and_is_told_as_it_is(make: object) -> None:
    harness = make()  # type: ignore[operator]
    (report,) = verify.verify(harness.disk, "/data")
    assert report.problems == ()
    assert (report.topic_partition, report.topic_id) == (TOPIC, TOPIC_ID)
    log = harness.reopen() if harness.store is None else _open(harness)
    assert (report.start_offset, report.end_offset) == (log.start_offset, log.end_offset)
    assert report.batches == len(read_all(log))
    assert report.size_bytes == log.size_bytes
    assert report.records == sum(len(kernel.records(view)) for _, view in read_all(log))
    dumped = [each for each in verify.dump(harness.disk, "/data") if isinstance(each, DumpedBatch)]
    assert [each.header for each in dumped] == [header for header, _ in read_all(log)]


def _open(harness: Harness) -> Log:
    harness.open()
    return harness.log()


@proves("J6")
@pytest.mark.thorough
@pytest.mark.parametrize("make", [small_log, compacted_log])
def test_a_flipped_bit_at_every_byte_of_a_log_is_found_and_named(make: object) -> None:
    harness = make()  # type: ignore[operator]
    disk, chance = disk_of(harness), random.Random(1)
    for path, position in positions(harness, ".log"):
        mask = 1 << chance.randrange(8)
        disk.flip(path, position, mask)
        found = [problem for problem in problems(harness) if problem.path == path]
        assert found, f"flip at {position} of {path} is not found"
        assert found[0].position is not None
        assert found[0].position <= position
        disk.flip(path, position, mask)
    assert not problems(harness)


@pytest.mark.parametrize("make", [small_log, compacted_log])
def test_a_flipped_bit_beside_the_log_is_found(make: object) -> None:
    harness = make()  # type: ignore[operator]
    disk, chance = disk_of(harness), random.Random(2)
    for path, position in positions(harness, ".index", ".timeindex", ".snapshot", ".sum", "leader-epochs"):
        mask = 1 << chance.randrange(8)
        disk.flip(path, position, mask)
        assert any(problem.path == path for problem in problems(harness)), f"flip at {position} of {path}"
        disk.flip(path, position, mask)


@proves("J6")
@pytest.mark.thorough
@pytest.mark.parametrize("make", [small_log, compacted_log])
@pytest.mark.parametrize("stop", ["clean", "kill"])
@pytest.mark.parametrize("turn_batches", [checked_bytes.TURN_BATCHES, 2])
def test_a_flipped_bit_anywhere_is_never_served_as_good(
    make: object, stop: str, turn_batches: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_bytes, "TURN_BATCHES", turn_batches)
    chance = random.Random(seed)
    harness = make()  # type: ignore[operator]
    right = served(_open(harness))
    assert harness.store is not None
    harness.store.close()
    if stop == "kill":
        harness.open()
        harness.store.abandon()
    for path, position in positions(harness, ".log", ".index", ".timeindex", ".sum", "leader-epochs"):
        if chance.random() > SHARE_TRIED:
            continue
        damaged = copy.deepcopy(harness)
        disk_of(damaged).flip(path, position, 1 << chance.randrange(8))
        for base_offset, found in served(_open(damaged)).items():
            assert right.get(base_offset) == found, f"flip at {position} of {path}"


@proves("J6")
def test_a_record_damaged_while_the_broker_was_stopped_is_named_and_what_is_whole_is_served(sim: Harness) -> None:
    log = sim.log()
    for i in range(20):
        append(log, batch(b"value %02d" % i))
    sim.write()
    position = log.size_bytes // 20 * 7 + 70
    path = files(sim, ".log")[0]
    assert sim.store is not None
    sim.store.close()
    disk_of(sim).flip(path, position)
    log = _open(sim)
    append(log, batch(b"new"))
    sim.write()
    assert [header.base_offset for header, _ in batches(memoryview(content(log.read(0, 10_000, 21))))] == list(range(7))
    for _ in range(2):
        with pytest.raises(CorruptBatch, match=rf"{path} at byte \d+: .*base offset 7\) bears CRC"):
            log.read(7, 10_000, 21)
    after = [header.base_offset for header, _ in batches(memoryview(content(log.read(8, 10_000, 21))))]
    assert after == list(range(8, 21))


def test_a_batch_above_what_one_read_checks_is_served_whole(sim: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_bytes, "TURN_BYTES", 300)
    log = sim.log()
    for size in (1000, 10, 10, 10, 10, 10):
        append(log, batch(b"x" * size))
    sim.write()
    right = read_all(log)
    log = sim.reopen()
    assert [header.base_offset for header, _ in batches(memoryview(content(log.read(0, 10_000, 6))))] == [0]
    assert read_all(log) == right
    assert len(content(log.read(0, 10_000, 6))) == log.size_bytes, "it was checked once, and is trusted from then on"


def test_damage_below_the_recovery_point_is_reported_and_the_rest_is_served(sim: Harness) -> None:
    log = sim.log(segment_bytes=1024, durability="disk")
    for i in range(40):
        append(log, batch(b"v%d" % i))
        sim.write()
    sim.settle()
    path = files(sim, ".log")[-1]
    first = int(path[-24:-4])
    disk_of(sim).flip(path, 80)
    sim.advance(61)  # a checkpoint puts the damage below the recovery point
    append(log, batch(b"more"))
    sim.write()
    sim.settle()
    log = sim.kill()
    assert log.end_offset == 41
    assert set(range(41)) - set(served(log)) == {first + 1}
    with pytest.raises(CorruptBatch, match=rf"{path} at byte 7.*offsets {first + 1} to {first + 1} are damaged"):
        log.read(first + 1, 100, 41)


def test_a_running_broker_is_named(real: Harness) -> None:
    real.log()
    found = verify.inspect_folder(SystemDisk(), real.data)
    assert found.holder is not None
    assert found.holder.isdigit()
    assert real.store is not None
    real.store.close()
    assert verify.inspect_folder(SystemDisk(), real.data).holder is None


def test_a_damaged_checkpoint_is_named(sim: Harness) -> None:
    sim.log()
    assert sim.store is not None
    sim.store.close()
    disk_of(sim).flip("/data/@checkpoint", 30)
    found = verify.inspect_folder(sim.disk, "/data")
    assert [problem.path for problem in found.problems] == ["/data/@checkpoint"]
