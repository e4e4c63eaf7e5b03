"""Sectors that cannot be read: of a log they are damage that is told, of what is made from a log it is made again."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptBatch, UnreadableBatch
from headrace.ports.disk import read_whole
from headrace.records import kernel
from headrace.records.batch import ATTRIBUTES_AT, batches, read_header, sign
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.producers import UnreadableProducers
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, read_all, sim_harness, values
from storage.test_compaction import COMPACTED, compact

BAD = 20
GZIP = 1
FOLDER = "/data/orders/orders-0"


@pytest.fixture(params=[PARTITIONED, SHARED])
def both(request: pytest.FixtureRequest) -> Harness:
    return sim_harness(request.param)


def filled(harness: Harness, **settings: object) -> tuple[Log, list[int]]:
    """Forty records, each larger than a few sectors, and where damage was reported."""
    log = harness.log(**settings)
    told: list[int] = []
    log.on_damage = told.append
    for nth in range(40):
        append(log, memoryview(kernel.build([(1_750_000_000_000 + nth, b"key", (b"%d." % nth * 1500)[:1500], [])])))
        harness.write()
    return log, told


def go_bad(harness: Harness, nth: int = BAD) -> None:
    assert isinstance(harness.disk, VirtualDisk)
    folder = "/data/@commitlog" if harness.layout == SHARED else FOLDER
    for path in [f"{folder}/{name}" for name in harness.disk.list(folder) if name.endswith(".log")]:
        position = read_whole(harness.disk, path).find((b"%d." % nth * 1500)[:1500])
        if position >= 0:
            harness.disk.go_bad(path, position + 750)


def told_readable(log: Log) -> set[int]:
    found = set()
    for offset in range(log.start_offset, log.end_offset):
        try:
            log.read(offset, 1, log.end_offset, warm=True)
            found.add(offset)
        except CorruptBatch:
            pass
    return found


@proves("J1")
def test_what_was_written_by_this_process_is_looked_at_again_once_it_is_doubted(both: Harness) -> None:
    log, told = filled(both)
    go_bad(both)
    assert told_readable(log) == set(range(40))
    (piece,) = log.read(BAD, 1, 40).slices
    with pytest.raises(OSError, match="Input/output error"):
        piece.read()
    assert told_readable(log) == set(range(40)) - {BAD}
    assert told == [BAD]
    with pytest.raises(UnreadableBatch, match="mend or replace the disk"):
        log.read(BAD, 1, 40, warm=True)


@proves("J1")
def test_a_read_ends_before_what_cannot_be_read(both: Harness) -> None:
    log, told = filled(both)
    go_bad(both)
    log.doubt()
    offset = 0
    while offset < BAD:
        found = log.read(offset, 1 << 20, 40, warm=True)
        for header, _ in batches(memoryview(b"".join(piece.read() for piece in found.slices))):
            offset = header.next_offset
    assert offset == BAD
    with pytest.raises(CorruptBatch):
        log.read(offset, 1 << 20, 40, warm=True)
    assert told == [BAD]


@proves("J1")
def test_a_log_is_cut_below_a_bad_sector_and_goes_on_in_sound_ones(both: Harness) -> None:
    log, told = filled(both)
    go_bad(both)
    log.doubt()
    log.truncate(BAD - 1)
    assert log.end_offset == BAD - 1
    for nth in range(BAD - 1, 40):
        append(log, batch(b"again %d" % nth))
    both.write()
    assert len(values(log)) == 40
    assert not told


@proves("F10")
def test_an_index_that_cannot_be_read_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    harness = sim_harness(PARTITIONED)
    log, told = filled(harness, segment_bytes=9000, index_interval_bytes=600)
    harness.reopen()
    assert isinstance(harness.disk, VirtualDisk)
    for ending in ("index", "timeindex"):
        harness.disk.go_bad(f"{FOLDER}/{0:020d}.{ending}", 0)
    log = harness.log()
    assert len(read_all(log)) == 40
    assert log.offset_for_time(1_750_000_000_003) is not None
    assert "rebuilt" in caplog.text
    assert not told


def test_a_snapshot_of_producers_that_cannot_be_read_is_left_out(both: Harness) -> None:
    log = both.log()
    append(log, batch(b"value", producer=(7, 0, 0)))
    both.write()
    log = both.reopen()
    assert isinstance(both.disk, VirtualDisk)
    for name in both.disk.list(FOLDER):
        if name.endswith(".snapshot"):
            both.disk.go_bad(f"{FOLDER}/{name}", 0)
    assert log.producers.check(read_header(batch(b"value", producer=(7, 0, 0)))) == 0, "the log itself tells"


def test_producers_that_the_log_tells_of_in_a_bad_sector_are_damage(both: Harness) -> None:
    log = both.log()
    for nth in range(3):
        append(log, batch(b"value" * 300, producer=(7, 0, nth)))
    both.write()
    log = both.reopen()
    assert isinstance(both.disk, VirtualDisk)
    for name in both.disk.list(FOLDER):
        if name.endswith(".snapshot"):
            both.disk.remove(f"{FOLDER}/{name}")
    folder = "/data/@commitlog" if both.layout == SHARED else FOLDER
    path = next(f"{folder}/{name}" for name in both.disk.list(folder) if name.endswith(".log"))
    both.disk.go_bad(path, read_whole(both.disk, path).rfind((2).to_bytes(8, "big")))
    with pytest.raises(UnreadableProducers):
        log.producers.load()


@proves("J1")
def test_compaction_tells_of_the_damage_that_ends_it(both: Harness, caplog: pytest.LogCaptureFixture) -> None:
    log, told = filled(both, **COMPACTED)
    go_bad(both, 4)
    compact(both)
    assert "orders-0 is not compacted" in caplog.text
    assert set(told) == {4}
    assert log.offline is None


def test_compaction_tells_of_a_wrong_byte_too(both: Harness) -> None:
    log, told = filled(both, **COMPACTED)
    assert isinstance(both.disk, VirtualDisk)
    _, piece = next(log.headers(4))
    both.disk.flip(piece.file.path, piece.position + 80)
    compact(both)
    assert set(told) == {4}


def test_compaction_tells_of_damage_where_the_producers_are_read(both: Harness) -> None:
    """It needs their last batches, and reads all that no snapshot speaks for."""
    log = both.log(**COMPACTED)
    for nth in range(40):
        append(log, batch(b"%d" % nth * 50, key=b"%d" % (nth % 3), producer=(7, 0, nth)))
        both.write()
    _, piece = next(log.headers(38))
    assert isinstance(both.disk, VirtualDisk)
    both.disk.flip(piece.file.path, piece.position + 52)
    log.truncate(39)
    told: list[int] = []
    log.on_damage = told.append
    compact(both)
    assert set(told) == {38}


def test_what_a_client_sent_wrong_is_no_damage(both: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """It says that it is compressed and is not. Its CRC is right, and it is the same on all replicas."""
    log = both.log(**COMPACTED)
    told: list[int] = []
    log.on_damage = told.append
    wrong = bytearray(kernel.build([(0, b"key", b"value", [])]))
    wrong[ATTRIBUTES_AT + 1] |= GZIP
    sign(wrong)
    append(log, memoryview(wrong))
    for _ in range(40):
        append(log, batch(b"x" * 400, key=b"key"))
        both.write()
    compact(both)
    assert "orders-0 is not compacted" in caplog.text
    assert not told
