"""Emptying commit files of which little is wanted: nothing is lost or doubled, and disk use and writes stay bounded."""

from __future__ import annotations

import random

import pytest

from headrace.records import kernel
from headrace.storage.commitlog.frames import FRAME_BYTES
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import SHARED
from headrace.storage.log import TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, content, read_all

LONG = TopicPartition("kept", 0)
KEYED = TopicPartition("keyed", 0)
SHORT = [TopicPartition("short", n) for n in range(6)]
COMMON = {"index_interval_bytes": 300, "file_delete_delay_ms": 0}

Records = dict[int, bytes | None]


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


def shared_log(harness: Harness, where: TopicPartition) -> SharedLog:
    log = harness.log(where)
    assert isinstance(log, SharedLog)
    return log


def create(harness: Harness, durability: str = "disk") -> None:
    harness.log(LONG, **COMMON, durability=durability, retention_ms=-1)
    compacted = {"cleanup_policy": "compact", "segment_bytes": 1024, "min_cleanable_dirty_ratio": 0.3}
    harness.log(KEYED, **COMMON, durability=durability, **compacted)
    for where in SHORT:
        harness.log(where, **COMMON, durability=durability, retention_ms=3000)


def turn(harness: Harness, number: int) -> int:
    """A batch for every topic, and half a second; answers how many bytes that makes in the commit log."""
    now_ms, count = harness.clock.wall_ms(), 0
    views = {where: batch(b"%08d" % number + b"." * 60, timestamp_ms=now_ms) for where in (LONG, *SHORT)}
    views[KEYED] = batch(b"%08d" % number, key=b"key%d" % (number % 5), timestamp_ms=now_ms)
    for where, view in views.items():
        append(harness.log(where), view)
        count += FRAME_BYTES + len(view)
    harness.write()
    harness.settle()
    harness.advance(0.5)
    return count


def rest(harness: Harness, rounds: int = 400) -> None:
    """Let maintenance end."""
    harness.advance(1.1)
    for _ in range(rounds):
        if not store_of(harness).compacting:
            return
        harness.clock.advance(0.02)
        harness.settle()
    raise AssertionError("maintenance does not end")


def records(harness: Harness, where: TopicPartition) -> Records:
    """Every record by its offset; none comes twice."""
    found: Records = {}
    for _, view in read_all(harness.log(where)):
        for record in kernel.records(view):
            assert record.offset not in found
            found[record.offset] = record.value
    return found


def check_kept(harness: Harness, count: int) -> None:
    found = records(harness, LONG)
    assert list(found) == list(range(len(found)))
    assert len(found) >= count
    assert all(value is not None and int(value[:8]) == offset for offset, value in found.items())


def check_keyed(harness: Harness, count: int) -> None:
    """The latest of each key is there, and nothing that was not written."""
    found = records(harness, KEYED)
    assert all(value == b"%08d" % offset for offset, value in found.items())
    assert set(range(max(0, count - 5), count)) <= set(found)


def lose_queues(harness: Harness) -> None:
    for where in (LONG, KEYED, *SHORT):
        folder = f"{harness.data}/{where.topic}/{where}"
        for name in harness.disk.list(folder):
            if ".queue" in name:
                harness.disk.remove(f"{folder}/{name}")


class TestRewriting:
    layout = SHARED

    @proves("L5", "R2")
    def test_one_topic_that_is_kept_among_others_that_are_not(self, sim: Harness) -> None:
        create(sim)
        sim.file_bytes = 4096
        store = store_of(sim)
        appended, share = 0, sim.rewrite_share
        for number in range(400):
            appended += turn(sim, number)
            if number < 50:
                continue
            wanted = sum(store.live_bytes().values())
            used = sum(store.commit_log.sizes.values())
            assert used <= wanted / share + 3.5 * sim.file_bytes, number
        rest(sim)
        assert 0 < store.rewriter.copied_bytes <= appended * share / (1 - share)
        check_kept(sim, 400)
        check_keyed(sim, 400)

    def test_a_log_that_its_leader_keeps_does_not_hold_up_the_others(
        self, sim: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By this broker's clock much of it is too old, but that is not for this broker to say."""
        monkeypatch.setattr("headrace.storage.commitlog.retention.RUNS_MAX", 5)
        create(sim)
        followed = sim.log(TopicPartition("followed", 0), **COMMON, retention_ms=1)
        followed.retire = lambda _offset: None
        for _ in range(20):
            append(followed, batch(b"old", timestamp_ms=1000))
            sim.write()
        followed.committed_offset = followed.end_offset
        for number in range(120):
            turn(sim, number)
        rest(sim)
        assert store_of(sim).rewriter.copied_bytes
        assert followed.start_offset == 0

    @proves("L5", "J6")
    @pytest.mark.thorough
    @pytest.mark.parametrize("number", range(30))
    def test_a_loss_of_power_at_any_point_loses_and_doubles_nothing(
        self, sim: Harness, seed: int, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chance = random.Random(seed)
        if number % 2:  # queues of many files
            for module in ("queue", "queuefile"):
                monkeypatch.setattr(f"headrace.storage.commitlog.{module}.ENTRIES_MAX", chance.choice((5, 9, 17)))
        create(sim)
        written = 0
        for _ in range(3):
            for _ in range(chance.randrange(15, 40)):
                turn(sim, written)
                written += 1
            sim.advance(1.1)
            for _ in range(chance.randrange(12)):
                sim.clock.advance(0.013)
                if chance.random() < 0.3:
                    store_of(sim).tick()
            sim.kill(seed=chance.randrange(1 << 30))
            check_kept(sim, written)
            check_keyed(sim, written)
            for where in SHORT:
                assert all(value == b"%08d" % at + b"." * 60 for at, value in records(sim, where).items())
        rest(sim)
        check_kept(sim, written)
        check_keyed(sim, written)

    @proves("L5")
    @pytest.mark.parametrize("checkpoint", [True, False])
    def test_lost_queues_are_built_again_from_what_was_moved(self, sim: Harness, checkpoint: bool) -> None:
        create(sim)
        for number in range(120):
            turn(sim, number)
        rest(sim)
        assert store_of(sim).rewriter.copied_bytes
        places = (LONG, KEYED, *SHORT)
        right = {where: records(sim, where) for where in places}
        entries = {where: list(shared_log(sim, where).queue.entries(0)) for where in (LONG, *SHORT)}
        live = store_of(sim).live_bytes()
        bounds = {where: (sim.log(where).start_offset, sim.log(where).end_offset) for where in places}
        store_of(sim).close()
        lose_queues(sim)
        if not checkpoint:
            sim.disk.remove(f"{sim.data}/@checkpoint")
        sim.open()
        assert {where: records(sim, where) for where in places} == right
        assert {where: (sim.log(where).start_offset, sim.log(where).end_offset) for where in places} == bounds
        assert {w: list(shared_log(sim, w).queue.entries(0)) for w in (LONG, *SHORT)} == entries
        assert store_of(sim).live_bytes() == live

    @proves("L5", "F10")
    def test_a_full_disk_stops_it_and_room_lets_it_go_on(self, sim: Harness) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        sim.disk.capacity_bytes = 1 << 60
        create(sim)
        for number in range(40):
            turn(sim, number)
        written = 40
        for extra in (0, 100, 600, 1500, 3000, 5000):
            sim.disk.capacity_bytes = (1 << 60) - sim.disk.free_bytes(sim.data) + extra
            for _ in range(12):
                sim.advance(0.5)
            assert all(log.offline is None for log in store_of(sim).logs())
            check_kept(sim, written)
            check_keyed(sim, written)
            sim.disk.capacity_bytes = 1 << 60
            for _ in range(10):
                turn(sim, written)
                written += 1
        sim.kill()
        check_kept(sim, written)
        check_keyed(sim, written)
        rest(sim)
        check_kept(sim, written)

    def test_a_damaged_run_stays_and_its_file_with_it(self, sim: Harness, caplog: pytest.LogCaptureFixture) -> None:
        assert isinstance(sim.disk, VirtualDisk)
        create(sim)
        for number in range(6):
            turn(sim, number)
        _, piece = next(shared_log(sim, LONG).headers(3))
        sim.disk.flip(piece.file.path, piece.position + 75)
        for number in range(6, 60):
            turn(sim, number)
        rest(sim)
        assert f"{piece.file.path} stays" in caplog.text
        assert piece.file.path in [store_of(sim).commit_log.path(each) for each in store_of(sim).commit_log.sizes]


class TestReading:
    layout = SHARED

    @proves("L5")
    @pytest.mark.thorough
    def test_reads_go_on_while_files_vanish(self, harness: Harness) -> None:
        create(harness, durability="os")
        for number in range(30):
            turn(harness, number)
        log = harness.log(LONG)
        early = log.read(0, 1 << 20, log.written_offset)
        right = content(early)
        files = {part.file.path for part in early.slices}
        for number in range(30, 90):
            turn(harness, number)
            check_kept(harness, number + 1)
        rest(harness)
        for _ in range(5):
            harness.advance(0.2)
        assert not all(harness.disk.exists(path) for path in files)
        assert content(early) == right
        again = content(log.read(0, len(right), log.written_offset))
        assert again
        assert right.startswith(again)

    @proves("L5")
    def test_files_that_are_no_longer_wanted_stay_for_their_delay(self, sim: Harness) -> None:
        create(sim)
        sim.log(TopicPartition("patient", 0), file_delete_delay_ms=60_000)
        for number in range(60):
            turn(sim, number)
        rest(sim)
        folder = f"{sim.data}/@commitlog"
        aside = {name for name in sim.disk.list(folder) if name.endswith(".deleted")}
        assert aside
        sim.advance(61)
        assert not aside & set(sim.disk.list(folder))
