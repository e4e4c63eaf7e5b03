"""Queries by key against a full scan: whatever happened to the log and to the index's own files, they agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import HeadraceError, KeyIndexMissing, RequestTimedOut, StorageFailed
from headrace.ports.disk import Disk, read_whole
from headrace.records import kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord, Record
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.keys.builder import KeyIndexes
from headrace.storage.keys.file import KeyFile
from headrace.storage.keys.index import KeyLimits
from headrace.storage.keys.query import KeyQueryResult, Wanted
from headrace.storage.log import Log
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import TOPIC, Harness, append, read_all, real_harness, settings, sim_harness

NOW_MS = 1_750_000_000_000
FOLDER = f"/{TOPIC.topic}/{TOPIC}"
pytestmark = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
KEYS: list[bytes | None] = [None, b"", b"a", b"b", b"c", b"long" * 30, *(b"%d" % n for n in range(20))]
STEPS = 60
SEEDS = 12
LONG_SEEDS = 150


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.thorough)])
def harness(request: pytest.FixtureRequest, layout: str, tmp_path: Path) -> Iterator[Harness]:
    if request.param == "sim":
        yield sim_harness(layout)
    else:
        yield from real_harness(str(tmp_path / "data"), layout)


@pytest.fixture
def sim(layout: str) -> Harness:
    return sim_harness(layout)


def key_files(disk: Disk, data: str) -> list[str]:
    folder = data + FOLDER
    return [f"{folder}/{name}" for name in sorted(disk.list(folder)) if name.endswith(".keys")]


def open_indexes(harness: Harness, limits: KeyLimits) -> KeyIndexes:
    if harness.store is None:
        harness.open()
    assert harness.store is not None
    return KeyIndexes(harness.store, harness.disk, harness.clock, harness.data, limits)


def run_until(harness: Harness, done: Callable[[], object]) -> None:
    for _ in range(10_000):
        if done():
            return
        harness.clock.advance(0.005)
        harness.settle()
    raise AssertionError("no answer")


def ask(harness: Harness, indexes: KeyIndexes, wanted: Wanted, limit: int | None = None) -> KeyQueryResult:
    answers: list[KeyQueryResult | HeadraceError] = []
    log = harness.log()
    indexes.query(TOPIC, wanted, log.written_offset if limit is None else limit, answers.append)
    run_until(harness, lambda: answers)
    if isinstance(answers[0], HeadraceError):
        raise answers[0]
    return answers[0]


def build(harness: Harness, indexes: KeyIndexes) -> None:
    indexes.tick()
    keys = indexes.get(TOPIC)
    assert keys is not None
    run_until(harness, lambda: not keys.work())


def records_in(found: KeyQueryResult) -> list[Record]:
    return [record for batch in found.batches for record in kernel.records(batch)]


def offsets_of(found: KeyQueryResult) -> list[int]:
    return sorted(record.offset for record in records_in(found))


def scan(log: Log, wanted: Wanted, limit: int | None = None) -> list[Record]:
    """What a reader of the whole log would pick, in the order asked for."""
    end = min(wanted.next_offset, log.written_offset if limit is None else limit)
    found = [
        record
        for header, view in read_all(log)
        if not header.is_control
        for record in kernel.records(view)
        if record.key == wanted.key and wanted.from_ms <= record.timestamp_ms < wanted.to_ms
        if max(wanted.first_offset, log.start_offset) <= record.offset < end
    ]
    return found[::-1] if wanted.newest_first else found


def put(harness: Harness, log: Log, *keys: bytes | None, codec: int = 0, epoch: int = 0, at_ms: int = NOW_MS) -> None:
    records: list[NewRecord] = [(at_ms + nth, key, b"value", []) for nth, key in enumerate(keys)]
    append(log, memoryview(kernel.build(records, codec)), epoch)
    assert not harness.write()


class Model:
    """A log with an index, and everything that may happen to them."""

    def __init__(self, layout: str, chance: random.Random) -> None:
        self.chance = chance
        self.harness = sim_harness(layout)
        mask = chance.choice(((1 << 64) - 1, (1 << 64) - 1, 3, 1 << 40 | 1, 0))
        self.limits = KeyLimits(chance.choice((8, 40, 300)), chance.choice((1, 3, 8)), mask)
        self.log: Log = self.harness.log(
            key_index="true", segment_bytes=1500, index_interval_bytes=200, flush_ms=50,
            durability=chance.choice(("os", "disk")),
        )  # fmt: skip
        self.indexes = open_indexes(self.harness, self.limits)
        self.count = 0
        self.epoch = 0
        self.queries = 0
        self.raises_epochs = chance.random() < 0.7

    def append(self) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            records: list[NewRecord] = []
            for _ in range(self.chance.randrange(1, 12)):
                self.count += 1
                at_ms = NOW_MS + self.chance.randrange(-5000, 5000) + self.chance.choice((0, 0, 0, -(1 << 45), 1 << 45))
                records.append((at_ms, self.chance.choice(KEYS), b"%d" % self.count, []))
            view = memoryview(kernel.build(records, self.chance.choice(list(Codec))))
            append(self.log, view, self.epoch)
        assert not self.harness.write()

    def pass_time(self) -> None:
        self.indexes.tick()
        self.harness.advance(self.chance.choice((0.001, 0.01, 1, 11, 61)))

    def truncate(self) -> None:
        self.log.truncate(self.chance.randrange(self.log.start_offset, self.log.end_offset + 1))
        self.new_epoch()

    def delete_before(self) -> None:
        self.log.delete_before(self.chance.randrange(self.log.start_offset, self.log.end_offset + 1))

    def restart_at(self) -> None:
        self.log.restart_at(max(0, self.log.end_offset + self.chance.randrange(-20, 20)))
        self.new_epoch()

    def new_epoch(self) -> None:
        """A cut is safe before anything is appended behind it; a new leader marks what it appends as its own."""
        self.harness.settle()
        self.epoch += self.raises_epochs

    def stop(self) -> None:
        self.indexes.close()
        self.log = self.harness.reopen()
        self.indexes = open_indexes(self.harness, self.limits)

    def kill(self) -> None:
        self.indexes.abandon()
        self.log = self.harness.kill()
        self.indexes = open_indexes(self.harness, self.limits)

    def lose_power(self) -> None:
        if not self.raises_epochs:  # a log needs them to tell what came back from what was cut
            return
        self.indexes.abandon()
        self.log = self.harness.kill(seed=self.chance.randrange(1 << 30))
        self.epoch += 1
        self.indexes = open_indexes(self.harness, self.limits)

    def harm(self) -> None:
        """Lose or damage files of the index while the broker is down."""
        stop = self.chance.choice((self.stop, self.kill))
        self.indexes.close() if stop == self.stop else self.indexes.abandon()
        disk = self.harness.disk
        assert isinstance(disk, VirtualDisk)
        for path in key_files(disk, "/data"):
            what = self.chance.randrange(4)
            if what == 0:
                disk.remove(path)
            elif what == 1 and disk.size(path):
                disk.flip(path, self.chance.randrange(disk.size(path)), 1 << self.chance.randrange(8))
        self.log = self.harness.reopen() if stop == self.stop else self.harness.kill()
        self.indexes = open_indexes(self.harness, self.limits)

    def compare(self) -> None:
        for key in self.chance.sample([key for key in KEYS if key is not None], 4):
            wanted = Wanted(key, newest_first=self.chance.random() < 0.5)
            if self.chance.random() < 0.5:
                from_ms = NOW_MS + self.chance.randrange(-6000, 6000)
                wanted = replace(wanted, from_ms=from_ms, to_ms=from_ms + self.chance.randrange(9000))
            if self.chance.random() < 0.3:
                wanted = replace(wanted, first_offset=self.chance.randrange(self.log.end_offset + 1))
            if self.chance.random() < 0.3:
                wanted = replace(wanted, max_records=self.chance.randrange(1, 5))
            self.check(wanted)

    def check(self, wanted: Wanted) -> None:
        """Ask page by page, as far as the answers say that there is more."""
        expected = scan(self.log, wanted)
        found: list[Record] = []
        while True:
            answer = ask(self.harness, self.indexes, wanted)
            page = sorted(records_in(answer), reverse=wanted.newest_first)
            assert len(page) == answer.records <= wanted.max_records
            found += page
            if answer.done:
                break
            if wanted.newest_first:
                wanted = replace(wanted, next_offset=answer.searched)
            else:
                wanted = replace(wanted, first_offset=answer.searched)
        assert found == expected
        self.queries += 1


def live(model: Model) -> None:
    steps = [model.append] * 8 + [model.pass_time] * 4 + [model.truncate, model.delete_before, model.restart_at]
    steps += [model.stop, model.kill, model.lose_power, model.harm]
    for _ in range(STEPS):
        model.chance.choice(steps)()
        if model.chance.random() < 0.7:
            model.compare()
    model.compare()


@proves("R3")
@pytest.mark.thorough
@pytest.mark.parametrize("number", range(SEEDS))
def test_queries_answer_what_a_full_scan_answers(layout: str, number: int, seed: int) -> None:
    live(Model(layout, random.Random(seed)))


@pytest.mark.long
@proves("R3")
def test_queries_answer_what_a_full_scan_answers_over_many_histories(
    layout: str, seed: int, proof_report: Callable[..., None]
) -> None:
    queries = 0
    for number in range(LONG_SEEDS):
        model = Model(layout, random.Random(f"{seed} {number}"))
        live(model)
        queries += model.queries
    proof_report(layout=layout, histories=LONG_SEEDS, steps_each=STEPS, queries_equal_to_a_full_scan=queries)


LIMITS = KeyLimits(entries=64, slots=16)


def indexed_log(harness: Harness, limits: KeyLimits = LIMITS, **overrides: object) -> tuple[Log, KeyIndexes]:
    log = harness.log(key_index="true", segment_bytes=2000, **overrides)
    return log, open_indexes(harness, limits)


@proves("R3")
def test_records_are_found_the_moment_they_are_written(harness: Harness) -> None:
    log, indexes = indexed_log(harness)
    for nth in range(100):
        put(harness, log, b"k%d" % (nth % 7), None, b"")
        assert offsets_of(ask(harness, indexes, Wanted(b"k%d" % (nth % 7))))[-1] == 3 * nth
    assert offsets_of(ask(harness, indexes, Wanted(b""))) == list(range(2, 300, 3))
    assert offsets_of(ask(harness, indexes, Wanted(b"k9"))) == []


@proves("R3")
def test_a_hash_that_lies_is_found_out_by_the_record(harness: Harness) -> None:
    log, indexes = indexed_log(harness, KeyLimits(entries=64, slots=1, hash_mask=0))
    for nth in range(150):
        put(harness, log, b"k%d" % nth)
    found = ask(harness, indexes, Wanted(b"k77"))
    assert (offsets_of(found), found.candidates) == ([77], 150)
    assert offsets_of(ask(harness, indexes, Wanted(b"never"))) == []


def test_what_consumers_may_not_see_yet_is_not_found(harness: Harness) -> None:
    log, indexes = indexed_log(harness)
    put(harness, log, b"k", b"k")
    put(harness, log, b"k")
    assert offsets_of(ask(harness, indexes, Wanted(b"k"), limit=2)) == [0, 1]


def test_each_file_is_larger_than_the_one_before_and_goes_with_the_log(harness: Harness) -> None:
    log, indexes = indexed_log(harness, KeyLimits(entries=1 << 16, slots=1 << 14))
    for _ in range(50):
        put(harness, log, *(b"%d" % n for n in range(400)))
    build(harness, indexes)
    sizes = [harness.disk.size(path) for path in key_files(harness.disk, harness.data)]
    assert len(sizes) == 2
    assert sizes[1] > 3 * sizes[0]
    log.delete_before(5000)
    build(harness, indexes)
    assert len(key_files(harness.disk, harness.data)) == 1
    assert offsets_of(ask(harness, indexes, Wanted(b"3"))) == list(range(5203, 20_000, 400))


def test_a_clean_stop_leaves_an_index_that_is_believed_as_it_is(harness: Harness) -> None:
    log, indexes = indexed_log(harness)
    for nth in range(90):
        put(harness, log, b"k%d" % nth)
    build(harness, indexes)
    indexes.close()
    paths = key_files(harness.disk, harness.data)
    before = [bytes(read_whole(harness.disk, path)) for path in paths]
    harness.reopen()
    indexes = open_indexes(harness, LIMITS)
    assert offsets_of(ask(harness, indexes, Wanted(b"k89"))) == [89]
    assert [bytes(read_whole(harness.disk, path)) for path in paths] == before
    indexes.close()


@proves("R3")
def test_after_a_kill_only_what_came_after_the_last_sync_is_read_again(sim: Harness) -> None:
    limits = KeyLimits(entries=1 << 16, slots=1 << 14)
    log, indexes = indexed_log(sim, limits)
    for _ in range(50):
        put(sim, log, *(b"%d" % n for n in range(20)))
    build(sim, indexes)
    sim.clock.advance(20)
    indexes.tick()
    sim.settle()
    put(sim, log, b"late")
    build(sim, indexes)
    indexes.abandon()
    sim.kill()
    (path,) = key_files(sim.disk, sim.data)
    believed = KeyFile.load(sim.disk, path)
    assert believed is not None
    assert believed.next_offset >= 1000
    indexes = open_indexes(sim, limits)
    assert offsets_of(ask(sim, indexes, Wanted(b"late"))) == [1000]
    assert offsets_of(ask(sim, indexes, Wanted(b"7"))) == list(range(7, 1000, 20))


@pytest.mark.parametrize("harm", ["lost", "cut", "header", "slots", "entries"])
@proves("R3")
def test_a_lost_or_damaged_file_is_made_again_from_the_log(sim: Harness, harm: str) -> None:
    log, indexes = indexed_log(sim)
    for nth in range(400):
        put(sim, log, b"k%d" % (nth % 50))
    build(sim, indexes)
    indexes.close()
    assert isinstance(sim.disk, VirtualDisk)
    path = key_files(sim.disk, sim.data)[2]
    if harm == "lost":
        sim.disk.remove(path)
    elif harm == "cut":
        file = sim.disk.open(path, writable=True)
        file.truncate(700)
        file.close()
    else:
        sim.disk.flip(path, {"header": 30, "slots": 520, "entries": 600}[harm])
    sim.reopen()
    indexes = open_indexes(sim, LIMITS)
    for nth in range(50):
        assert offsets_of(ask(sim, indexes, Wanted(b"k%d" % nth))) == list(range(nth, 400, 50))


def test_without_the_setting_there_is_no_index_and_the_error_says_how_to_have_one(harness: Harness) -> None:
    log, indexes = indexed_log(harness)
    put(harness, log, b"k")
    build(harness, indexes)
    assert key_files(harness.disk, harness.data)
    log.settings = settings()
    indexes.tick()
    assert not key_files(harness.disk, harness.data)
    with pytest.raises(KeyIndexMissing, match=r"key\.index=true"):
        ask(harness, indexes, Wanted(b"k"))
    log.settings = settings(key_index="true")
    assert offsets_of(ask(harness, indexes, Wanted(b"k"))) == [0]


def test_an_index_without_room_stays_behind_and_goes_on_when_there_is(sim: Harness) -> None:
    log, indexes = indexed_log(sim)
    put(sim, log, b"k")
    assert isinstance(sim.disk, VirtualDisk)
    sim.disk.capacity_bytes = 1
    with pytest.raises(StorageFailed, match="key index of orders-0"):
        ask(sim, indexes, Wanted(b"k"))
    keys = indexes.get(TOPIC)
    assert keys is not None
    assert keys.behind == 1
    sim.disk.capacity_bytes = 1 << 40
    assert offsets_of(ask(sim, indexes, Wanted(b"k"))) == [0]


def test_records_that_compaction_removed_are_not_found_and_the_others_are(sim: Harness, layout: str) -> None:
    log, indexes = indexed_log(sim, cleanup_policy="compact", min_cleanable_dirty_ratio=0.01)
    for nth in range(200):
        put(sim, log, b"k%d" % (nth % 9), epoch=nth // 50)
        if nth % 40 == 0:
            build(sim, indexes)
    for _ in range(200):
        sim.advance(1.1)
    for nth in range(9):
        wanted = Wanted(b"k%d" % nth)
        assert offsets_of(ask(sim, indexes, wanted)) == sorted(record.offset for record in scan(log, wanted))
    assert len(scan(log, Wanted(b"k0"))) < 10 or layout == SHARED
    log.truncate(195)
    put(sim, log, b"k0", epoch=9)
    assert offsets_of(ask(sim, indexes, Wanted(b"k0"))) == sorted(r.offset for r in scan(log, Wanted(b"k0")))


def test_a_deleted_partition_takes_its_index_along(harness: Harness) -> None:
    log, indexes = indexed_log(harness)
    put(harness, log, b"k")
    build(harness, indexes)
    assert harness.store is not None
    harness.store.delete(TOPIC)
    indexes.tick()
    harness.clock.advance(1)
    again = harness.store.create(TOPIC, bytes(16), settings(key_index="true"))
    put(harness, again, b"other")
    assert offsets_of(ask(harness, indexes, Wanted(b"k"))) == []
    assert offsets_of(ask(harness, indexes, Wanted(b"other"))) == [0]


def test_a_chain_that_leads_nowhere_has_the_index_made_again(sim: Harness) -> None:
    log, indexes = indexed_log(sim)
    for nth in range(40):
        put(sim, log, b"k%d" % nth)
    build(sim, indexes)
    assert isinstance(sim.disk, VirtualDisk)
    (path,) = key_files(sim.disk, sim.data)
    for slot in range(16):
        sim.disk.flip(path, 512 + 4 * slot + 3, 0x40)
    with pytest.raises(RequestTimedOut, match="is made again: ask again"):
        ask(sim, indexes, Wanted(b"k7"))
    assert offsets_of(ask(sim, indexes, Wanted(b"k7"))) == [7]
