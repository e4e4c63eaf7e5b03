"""Starting on a folder of the shared layout: queues lost or damaged, torn tails, damage in the commit log."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.errors import CorruptBatch
from headrace.ports.disk import File, SyncDone
from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import SHARED
from headrace.storage.log import Log, TopicPartition
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.folders import copied
from storage.harness import Harness, append, batch, content, read_all, real_harness, values

PLACES = [TopicPartition(topic, n) for topic in ("orders", "payments", "shipments") for n in range(2)]
OFFSETS = re.compile(r"(\S+): offsets (\d+) to (\d+) are missing: (\S+) at byte (\d+)")


def fill(harness: Harness, rounds: int = 60, **overrides: object) -> dict[TopicPartition, list[bytes | None]]:
    """Some batches for each partition, interleaved, over several commit files."""
    logs = [harness.log(place, **({"index_interval_bytes": 200} | overrides)) for place in PLACES]
    for turn in range(rounds):
        for nth, log in enumerate(logs):
            for each in range((turn + nth) % 3):
                append(log, batch(b"%s %d %d" % (str(log.topic_partition).encode(), turn, each)), epoch=turn // 20)
        assert not harness.write()
        harness.settle()
    return contents(harness)


def contents(harness: Harness) -> dict[TopicPartition, list[bytes | None]]:
    return {place: values(harness.log(place)) for place in PLACES}


def store_of(harness: Harness) -> SharedStore:
    assert isinstance(harness.store, SharedStore)
    return harness.store


def shared_log(harness: Harness, place: TopicPartition) -> SharedLog:
    log = harness.log(place)
    assert isinstance(log, SharedLog)
    return log


def sim_disk(harness: Harness) -> VirtualDisk:
    assert isinstance(harness.disk, VirtualDisk)
    return harness.disk


def queue_files(harness: Harness) -> list[str]:
    found = []
    for place in PLACES:
        folder = f"{harness.data}/{place.topic}/{place}"
        found += [f"{folder}/{name}" for name in harness.disk.list(folder) if name.endswith(".queue")]
    return found


def place_of(harness: Harness, place: TopicPartition, offset: int) -> tuple[str, int, int]:
    """Commit file and byte of the frame that holds the offset, and the byte of the batch."""
    log = shared_log(harness, place)
    header, piece = next(log.headers(offset))
    entry = next(each for each in log.queue.entries(offset))
    assert header.base_offset == offset
    return piece.file.path, entry.byte - 48, piece.position


class TestStart:
    @proves("L5")
    def test_after_a_clean_stop_nothing_is_read(self, shared: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        right = fill(shared)
        store_of(shared).close()
        monkeypatch.setattr("headrace.storage.commitlog.recovery.Replay", None)
        shared.open()
        assert store_of(shared).was_clean
        assert contents(shared) == right

    @proves("L5")
    @pytest.mark.parametrize("how", ["stop", "kill"])
    def test_lost_queues_are_built_from_the_commit_log_alone(self, shared: Harness, how: str) -> None:
        right = fill(shared)
        epochs = {place: shared.log(place).epoch_end(1) for place in PLACES}
        times = {place: shared.log(place).greatest_timestamp() for place in PLACES}
        entries = {place: list(shared_log(shared, place).queue.entries(0)) for place in PLACES}
        live = store_of(shared).live_bytes()
        if how == "stop":
            store_of(shared).close()
        else:
            store_of(shared).abandon()
        for path in queue_files(shared):
            shared.disk.remove(path)
        shared.open()
        assert store_of(shared).was_clean == (how == "stop")
        assert contents(shared) == right
        assert {place: shared.log(place).epoch_end(1) for place in PLACES} == epochs
        assert {place: shared.log(place).greatest_timestamp() for place in PLACES} == times
        assert {place: list(shared_log(shared, place).queue.entries(0)) for place in PLACES} == entries
        assert store_of(shared).live_bytes() == live

    @proves("L5")
    def test_everything_beside_the_commit_log_may_be_lost(self, shared: Harness) -> None:
        right = fill(shared)
        for place in PLACES[:3]:
            shared.log(place).truncate(20)
        right = contents(shared)
        epochs = {place: shared.log(place).epoch_end(1) for place in PLACES}
        store_of(shared).close()
        for name in shared.disk.list(shared.data):
            if name in ("orders", "payments", "shipments"):
                shared.disk.remove_folder(f"{shared.data}/{name}")
        shared.disk.remove(f"{shared.data}/@checkpoint")
        shared.open()
        assert contents(shared) == right
        assert {place: shared.log(place).epoch_end(1) for place in PLACES} == epochs
        for place in PLACES:
            append(shared.log(place), batch(b"on"), epoch=5)
        assert not shared.write()
        assert contents(shared) == {place: [*found, b"on"] for place, found in right.items()}

    @proves("L5")
    @pytest.mark.parametrize("how", ["stop", "kill"])
    @pytest.mark.parametrize("number", range(8))
    def test_a_flipped_byte_in_a_queue_file_is_noticed(
        self, shared: Harness, seed: int, number: int, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = fill(shared)
        store_of(shared).close()
        shared.open()
        if how == "stop":
            store_of(shared).close()
        else:
            store_of(shared).abandon()
        chance = random.Random(seed)
        path = chance.choice(queue_files(shared))
        place = next(place for place in PLACES if str(place) in path)
        used = 24 + 20 * sum(1 for _ in range(5))
        sim_disk(shared).flip(path, chance.randrange(used))
        shared.open()
        assert contents(shared) == right
        assert f"{place}: its queue is missing or damaged" in caplog.text

    @proves("L5")
    @pytest.mark.parametrize("lost", [True, False], ids=["lost", "damaged"])
    @pytest.mark.parametrize("how", ["stop", "kill"])
    def test_without_its_checkpoint_the_whole_commit_log_is_read(
        self, shared: Harness, how: str, lost: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = fill(shared)
        shared.log(PLACES[1]).truncate(17)
        shared.log(PLACES[2]).delete_before(9)
        shared.log(PLACES[3]).restart_at(500)
        append(shared.log(PLACES[3]), batch(b"new"), epoch=3)
        shared.write()
        right = contents(shared)
        bounds = [(shared.log(place).start_offset, shared.log(place).end_offset) for place in PLACES]
        if how == "stop":
            store_of(shared).close()
        else:
            store_of(shared).abandon()
        if lost:
            shared.disk.remove(f"{shared.data}/@checkpoint")
        else:
            sim_disk(shared).flip(f"{shared.data}/@checkpoint", 30)
        shared.open()
        assert not store_of(shared).was_clean
        assert contents(shared) == right
        assert [(shared.log(place).start_offset, shared.log(place).end_offset) for place in PLACES] == bounds
        assert ("is damaged: the whole commit log is read" in caplog.text) == (not lost)

    def test_frames_of_a_deleted_topic_are_passed_over(self, shared: Harness) -> None:
        right = fill(shared)
        gone = PLACES[:2]
        for place in gone:
            store_of(shared).delete(place)
            del shared.expected[place]
        store_of(shared).abandon()
        shared.disk.remove(f"{shared.data}/@checkpoint")
        shared.open()
        assert [log.topic_partition for log in store_of(shared).logs()] == PLACES[2:]
        for place in gone:
            assert shared.log(place).end_offset == 0
        assert {place: values(shared.log(place)) for place in PLACES[2:]} == {p: right[p] for p in PLACES[2:]}

    def test_a_partition_that_comes_back_does_not_find_what_it_had_before(self, shared: Harness) -> None:
        fill(shared)
        store = store_of(shared)
        for place in PLACES[:2]:
            settings = shared.log(place).settings
            store.delete(place)
            store.create(place, shared.topic_id(place.topic), settings)
        append(shared.log(PLACES[0]), batch(b"second life"))
        shared.write()
        store.abandon()
        shared.disk.remove(f"{shared.data}/@checkpoint")
        for path in queue_files(shared):
            shared.disk.remove(path)
        shared.open()
        assert values(shared.log(PLACES[0])) == [b"second life"]
        assert values(shared.log(PLACES[1])) == []


class TestDescriptors:
    def test_logs_that_nobody_touches_open_no_files(self, tmp_path: Path) -> None:
        for real in real_harness(str(tmp_path / "data"), SHARED):
            for n in range(50):
                append(real.log(TopicPartition("many", n)), batch())
            real.write()
            store_of(real).close()
            before = len(list(Path("/proc/self/fd").iterdir()))
            real.open()
            assert store_of(real).was_clean
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2

    @proves("L5")
    def test_a_checkpoint_syncs_so_many_files_and_the_next_one_the_others(
        self, shared: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shared.file_bytes = 1 << 20
        for n in range(100):
            append(shared.log(TopicPartition("many", n)), batch(b"%d" % n))
        shared.write()
        store_of(shared)._derived_files.most = 20
        taken: list[int] = []
        request_sync = sim_disk(shared).request_sync

        def counted(files: Sequence[File], done: SyncDone) -> None:
            taken.append(len(files))
            request_sync(files, done)

        monkeypatch.setattr(shared.disk, "request_sync", counted)
        for _ in range(40):
            shared.advance(61)
        assert max(taken) < 30
        assert sum(taken) > 300
        shared.kill(seed=1)
        assert [values(shared.log(TopicPartition("many", n))) for n in range(100)] == [[b"%d" % n] for n in range(100)]


class TestTornTail:
    @proves("L5", "J6")
    @pytest.mark.parametrize("cut", range(1, 300, 23))
    def test_it_is_cut_and_said(self, shared: Harness, cut: int, caplog: pytest.LogCaptureFixture) -> None:
        logs = [shared.log(place) for place in PLACES[:2]]
        written: list[tuple[Log, bytes, int]] = []
        store = store_of(shared)
        shared.file_bytes = 1 << 20
        store.commit_log.file_bytes = 1 << 20
        for turn in range(10):
            for log in logs:
                append(log, batch(b"%d" % turn))
                shared.write()
                written.append((log, b"%d" % turn, store.commit_log.end))
        size = store.commit_log.end
        path = store.commit_log.path(0)
        sim_disk(shared).open(path, writable=True).truncate(size - cut)
        shared.kill()
        whole = [(log.topic_partition, value) for log, value, end in written if end <= size - cut]
        for place in PLACES[:2]:
            assert values(shared.log(place)) == [value for where, value in whole if where == place]
            append(shared.log(place), batch(b"on"))
        ends = {end for _, _, end in written}
        assert ("not whole, and were not synced" in caplog.text) == (size - cut not in ends)
        assert not shared.write()
        shared.kill()
        for place in PLACES[:2]:
            assert values(shared.log(place)) == [*(value for where, value in whole if where == place), b"on"]

    @proves("L5", "L4")
    @pytest.mark.parametrize("number", range(40))
    def test_what_was_synced_outlives_a_loss_of_power_and_the_rest_is_a_whole_beginning(
        self, shared: Harness, seed: int, number: int
    ) -> None:
        chance = random.Random(seed)
        logs = [
            shared.log(place, durability=chance.choice(("disk", "os", "memory")), index_interval_bytes=200, flush_ms=50)
            for place in PLACES
        ]
        right: dict[TopicPartition, list[bytes]] = {place: [] for place in PLACES}
        for turn in range(30):
            for log in chance.sample(logs, 3):
                right[log.topic_partition].append(b"%d" % turn)
                append(log, batch(b"%d" % turn))
            shared.write()
            if chance.random() < 0.3:
                shared.advance(0.1)
        durable = {log.topic_partition: log.durable_offset for log in logs}
        shared.kill(seed=chance.randrange(1 << 30))
        for place in PLACES:
            found = values(shared.log(place))
            assert found == right[place][: len(found)]
            assert len(found) >= durable[place]


class TestDamage:
    """What was synced and is damaged now: named, never served; everything around it is."""

    def damage(self, shared: Harness, place: TopicPartition, offset: int, *, header: bool, lost_queues: bool) -> None:
        path, frame, byte = place_of(shared, place, offset)
        store_of(shared).close()
        sim_disk(shared).flip(path, frame + 9 if header else byte + 70)
        if lost_queues:
            for each in queue_files(shared):
                shared.disk.remove(each)
        shared.open()

    @proves("L5", "J6")
    @pytest.mark.parametrize("header", [True, False], ids=["frame", "batch"])
    @pytest.mark.parametrize("checkpoint", [True, False], ids=["checkpoint", "no checkpoint"])
    def test_in_the_middle_it_is_named_and_the_rest_is_served(
        self, shared: Harness, header: bool, checkpoint: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = fill(shared, durability="disk")
        hurt = PLACES[2]
        path, frame, byte = place_of(shared, hurt, 10)
        store_of(shared).close()
        sim_disk(shared).flip(path, frame + 9 if header else byte + 70)
        for each in queue_files(shared):
            shared.disk.remove(each)
        if not checkpoint:
            shared.disk.remove(f"{shared.data}/@checkpoint")
        shared.open()
        said = [OFFSETS.search(record.getMessage()) for record in caplog.records]
        ((where, first, last, file, at),) = [match.groups() for match in said if match]
        assert (where, file, int(at)) == (str(hurt), path, frame if header else byte)
        assert int(first) <= 10 <= int(last) < 14
        for place in PLACES:
            if place != hurt:
                assert values(shared.log(place)) == right[place]
        log = shared.log(hurt)
        for _ in range(2):
            assert log.end_offset == len(right[hurt])
            for offset in range(log.end_offset):
                if int(first) <= offset <= int(last):
                    with pytest.raises(CorruptBatch, match=re.escape(f"{path} at byte {at}")):
                        log.read(offset, 1 << 20, log.end_offset)
                else:
                    found = log.read(offset, 1, log.end_offset)
                    (record,) = kernel.records(found.slices[0].file.pread(found.count, found.slices[0].position))
                    assert (record.offset, record.value) == (offset, right[hurt][offset])
                    shared.settle()
            store_of(shared).close()
            shared.open()
            log = shared.log(hurt)
        append(log, batch(b"on"), epoch=9)
        assert not shared.write()

    @proves("J6")
    def test_a_batch_damaged_under_whole_queues_is_not_served(self, shared: Harness) -> None:
        right = fill(shared)
        hurt = PLACES[3]
        path, _, byte = place_of(shared, hurt, 10)
        store_of(shared).close()
        sim_disk(shared).flip(path, byte + 70)
        shared.open()
        log = shared.log(hurt)
        with pytest.raises(CorruptBatch, match=re.escape(f"{path} at byte {byte}")):
            log.read(10, 1 << 20, log.end_offset)
        shared.settle()
        assert log.read(11, 1 << 20, log.end_offset).count > 0
        assert len(read_all(shared.log(PLACES[0]))) == len(right[PLACES[0]])

    @proves("J6")
    def test_a_base_offset_beyond_its_frame_is_damage(self, shared: Harness) -> None:
        place = PLACES[0]
        log, *_ = [shared.log(each) for each in PLACES]
        for first in range(0, 40, 10):
            for offset in (first + 1, first + 5):
                copied(log, offset, b"%d" % offset)
            assert not shared.write()
        shared.settle()
        path, _, byte = place_of(shared, place, 15)
        store_of(shared).close()
        sim_disk(shared).flip(path, byte + 1, 0x40)
        for each in queue_files(shared):
            shared.disk.remove(each)
        shared.open()
        log = shared.log(place)
        assert log.end_offset == 36
        with pytest.raises(CorruptBatch, match=re.escape(f"{path} at byte {byte}")):
            log.read(15, 1 << 20, log.end_offset)
        for offset in (11, 21, 35):
            assert read_header(content(log.read(offset, 1, log.end_offset))).base_offset == offset
            shared.settle()

    @proves("L5")
    def test_a_commit_file_that_is_gone_is_told_as_missing_offsets(
        self, shared: Harness, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = fill(shared)
        numbers = sorted(store_of(shared).commit_log.sizes)
        assert len(numbers) > 4
        path = store_of(shared).commit_log.path(numbers[2])
        store_of(shared).close()
        shared.disk.remove(path)
        shared.open()
        for place in PLACES:
            log, missing = shared.log(place), 0
            assert log.end_offset == len(right[place])
            for offset in range(log.start_offset, log.end_offset):
                try:
                    found = log.read(offset, 1, log.end_offset)
                except CorruptBatch:
                    missing += 1
                    continue
                (record,) = kernel.records(found.slices[0].file.pread(found.count, found.slices[0].position))
                assert (record.offset, record.value) == (offset, right[place][offset])
                shared.settle()
            assert 0 < missing < 30
        assert "are missing" in caplog.text
