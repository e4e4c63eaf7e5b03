"""What a log knows of its transactions over restarts, truncations, deletions, retention and compaction."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from headrace.ports.disk import read_whole
from headrace.records import kernel
from headrace.records.batch import read_header
from headrace.storage import producers
from headrace.storage.aborted import (
    ENTRY,
    FILE_ENTRIES,
    AbortedIndex,
    AbortedTransaction,
    AbortedTransactions,
    IndexedFile,
    by_count,
)
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.local_log import LocalLog
from headrace.storage.log import Log
from headrace.storage.offline import verify
from headrace.storage.offline.convert import ConversionOptions, convert
from headrace.storage.producers import ProducerState, SequencedBatch, Snapshot
from headrace.storage.transactions import Transactions
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, read_all, settings, sim_harness
from storage.transactional import Writer, check_agrees, ignore, seen

SMALL = {"segment_bytes": 1024, "index_interval_bytes": 150}
COMPACTED = {
    "cleanup_policy": "compact",
    "segment_bytes": 1024,
    "index_interval_bytes": 150,
    "min_cleanable_dirty_ratio": 0.0,
    "delete_retention_ms": 60_000,
}
FOLDER = "/data/orders/orders-0"


@pytest.fixture(params=[PARTITIONED, SHARED])
def harness(request: pytest.FixtureRequest) -> Harness:
    return sim_harness(request.param)


def local(log: Log) -> LocalLog:
    assert isinstance(log, LocalLog)
    return log


def transact(harness: Harness, log: Log, writer: Writer, count: int, *, first: int = 0) -> None:
    """Transactions of three producers over each other, each third one aborted."""
    for nth in range(first, first + count):
        writer.write(log, nth % 3, (b"k%d" % nth, b"v%d" % nth))
        harness.write()
        if nth >= first + 2:
            writer.mark(log, (nth - 2) % 3, committed=nth % 3 != 0)
            harness.write()


def aborted(log: Log) -> list[tuple[int, int]]:
    for _ in local(log).producers.steps():
        pass
    return log.aborted(0, log.end_offset)


def compact(harness: Harness, seconds: float = 1.1) -> None:
    assert harness.store is not None
    harness.advance(seconds)
    for _ in range(200):
        if not harness.store.compacting:
            return
        harness.clock.advance(0.05)
        harness.settle()
    raise AssertionError("compaction does not end")


def keyed(log: Log) -> dict[int, tuple[bytes | None, bytes | None]]:
    return {
        record.offset: (record.key, record.value)
        for header, view in read_all(log)
        for record in kernel.records(view)
        if not header.is_control
    }


def markers(log: Log) -> list[int]:
    return [header.base_offset for header, _ in read_all(log) if header.is_control]


@proves("T2")
@pytest.mark.parametrize("how", ["stop", "kill", "power", "kill without snapshots", "stop without the index"])
def test_a_start_knows_what_the_log_said(harness: Harness, how: str) -> None:
    log = harness.log(durability="disk", **SMALL)
    transact(harness, log, Writer(), 30)
    harness.settle()
    before = aborted(log), seen(log)
    assert len(before[0]) == 9
    ending = {"kill without snapshots": ".snapshot", "stop without the index": ".txnindex"}.get(how)
    if how.startswith("stop"):
        assert harness.store is not None
        harness.store.close()
    if ending is not None:
        for name in harness.disk.list(FOLDER):
            if name.endswith(ending):
                harness.disk.remove(f"{FOLDER}/{name}")
    if how.startswith("stop"):
        harness.open()
        log = harness.log()
    else:
        log = harness.kill(seed=3 if how == "power" else None)
    assert (aborted(log), seen(log)) == before
    check_agrees(log)


def test_an_index_that_is_damaged_is_made_again(harness: Harness) -> None:
    log = harness.log(**SMALL)
    transact(harness, log, Writer(), 30)
    before = aborted(log)
    assert harness.store is not None
    harness.store.close()
    assert isinstance(harness.disk, VirtualDisk)
    damaged = [name for name in harness.disk.list(FOLDER) if name.endswith(".txnindex")]
    assert damaged
    for name in damaged:
        harness.disk.flip(f"{FOLDER}/{name}", 9)
    harness.open()
    assert aborted(harness.log()) == before


@proves("T2")
@pytest.mark.parametrize("wrong", ["", "a byte", "a file", "an entry", "a transaction"])
def test_an_index_that_does_not_agree_with_the_log_is_named_offline(harness: Harness, wrong: str) -> None:
    """An entry too few, or of another producer, in an index and a snapshot that are whole: readers would get it."""
    log = harness.log(segment_bytes=1 << 20)
    transact(harness, log, Writer(), 30)
    assert harness.store is not None
    harness.store.close()
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    (index,) = [f"{FOLDER}/{name}" for name in disk.list(FOLDER) if name.endswith(".txnindex")]
    newest = max(f"{FOLDER}/{name}" for name in disk.list(FOLDER) if name.endswith(".snapshot"))
    entries = list(ENTRY.iter_unpack(read_whole(disk, index)))
    if wrong == "a byte":
        disk.flip(index, 9)
    elif wrong == "a file":
        disk.remove(index)
    elif wrong:
        snapshot = producers.decode_snapshot(read_whole(disk, newest))
        assert snapshot is not None
        del entries[3]
        if wrong == "an entry":
            entries.insert(3, (77, *entries[2][1:]))
        packed = b"".join(ENTRY.pack(*each) for each in entries)
        described = snapshot.files[0]._replace(entry_count=len(entries), crc=crc32c(packed))
        for path, data in (
            (index, packed),
            (newest, producers.encode_snapshot(snapshot._replace(files=(described,)))),
        ):
            file = disk.open(path, writable=True)
            file.truncate(0)
            file.pwritev([data], 0)
            file.close()
    found = [each for report in verify.reports(disk, "/data") for each in report.problems]
    assert bool(found) == bool(wrong), found
    assert all("transaction" in each.what for each in found)


@proves("T2")
def test_a_truncation_forgets_the_markers_that_it_cut(harness: Harness) -> None:
    log = harness.log(**SMALL)
    transact(harness, log, Writer(), 30)
    for offset in (40, 21, 20, 3):
        log.truncate(offset)
        log.committed_offset = log.end_offset
        check_agrees(log)
    log = harness.kill()
    check_agrees(log)


def test_other_aborted_transactions_take_the_place_of_those_that_were_cut(harness: Harness) -> None:
    """The files of the index have entries of before the truncation, and must not be taken for those of now."""
    log = harness.log(**SMALL)
    writer = Writer()
    transact(harness, log, writer, 20)
    harness.reopen()
    log = harness.log()
    log.truncate(14)
    transact(harness, log, Writer(), 20)
    check_agrees(log)
    harness.reopen()
    check_agrees(harness.log())
    check_agrees(harness.kill())


@proves("T2")
def test_retention_leaves_what_is_not_decided(harness: Harness) -> None:
    log = harness.log(retention_ms=10_000, **SMALL)
    writer = Writer()
    transact(harness, log, writer, 12)
    first = writer.write(log, 99)
    harness.write()
    transact(harness, log, writer, 12, first=20)
    for _ in range(4):
        harness.advance(12)
    undecided = local(log).producers.first_undecided(log.committed_offset)
    assert undecided is not None
    assert 0 < log.start_offset <= undecided <= first
    for producer_id in (0, 1, 2, 99):
        writer.mark(log, producer_id, committed=True)
    harness.write()
    for _ in range(4):
        harness.advance(12)
    assert log.start_offset > first
    assert not [name for name in harness.disk.list(FOLDER) if name.endswith(".txnindex")]


def test_a_deletion_may_take_what_is_not_decided(harness: Harness) -> None:
    """DeleteRecords does so with Kafka too: the transaction is open still."""
    log = harness.log(**SMALL)
    writer = Writer()
    writer.write(log, 7)
    harness.write()
    transact(harness, log, writer, 20)
    log.delete_before(30, ignore)
    harness.settle()
    assert local(log).producers.states[7].txn_start == 0
    harness.reopen()
    log = harness.log()
    for _ in local(log).producers.steps():
        pass
    assert local(log).producers.states[7].txn_start == 0
    assert all(entry.marker_offset >= 0 for entry in local(log).producers.known.aborted)
    check_agrees(log)


def test_a_producer_with_an_open_transaction_does_not_expire(harness: Harness) -> None:
    log = harness.log()
    writer = Writer()
    writer.write(log, 1)
    writer.write(log, 2)
    writer.mark(log, 2, committed=True)
    harness.write()
    local(log).producers.expire(1 << 60)
    assert set(log.producers.states) == {1}


# Compaction.


@proves("T2")
def test_compaction_takes_aborted_records_and_they_outdate_nothing(harness: Harness) -> None:
    log = harness.log(**COMPACTED)
    writer = Writer()
    committed = writer.write(log, 1, (b"a", b"committed"))
    writer.mark(log, 1, committed=True)
    aborted_at = writer.write(log, 2, (b"a", b"aborted"), (b"b", b"aborted"))
    writer.mark(log, 2, committed=False)
    harness.write()
    filler(harness, log)
    compact(harness)
    found = keyed(log)
    assert found[committed] == (b"a", b"committed")
    assert aborted_at not in found
    assert aborted_at + 1 not in found
    check_agrees(log)
    check_agrees(harness.kill())
    assert keyed(harness.log())[committed] == (b"a", b"committed")


@proves("T2")
def test_compaction_leaves_everything_behind_the_first_open_transaction(harness: Harness) -> None:
    log = harness.log(**COMPACTED)
    writer = Writer()
    filler(harness, log)
    opened = writer.write(log, 5, (b"open", b"1"))
    harness.write()
    filler(harness, log)
    compact(harness)
    found = keyed(log)
    assert set(range(opened, log.end_offset)) <= set(found)
    assert len([offset for offset in found if offset < opened]) < opened
    writer.mark(log, 5, committed=False)
    harness.write()
    filler(harness, log)
    compact(harness)
    assert opened not in keyed(log)


@proves("T2")
def test_a_marker_goes_when_its_records_have_gone_for_long_enough(harness: Harness) -> None:
    log = harness.log(**COMPACTED)
    writer = Writer()
    for _ in range(3):
        writer.write(log, 1, (b"a", b"x"))
        gone = writer.mark(log, 1, committed=False)
    kept = writer.write(log, 1, (b"only", b"x"))
    needed = writer.mark(log, 1, committed=True)
    writer.write(log, 1, (b"a", b"x"))
    last = writer.mark(log, 1, committed=True)
    harness.write()
    filler(harness, log)
    compact(harness)
    assert {gone, needed, last} <= set(markers(log)), "whoever reads has time to see them"
    filler(harness, log)
    harness.clock.advance(61)
    compact(harness)
    filler(harness, log)
    compact(harness)
    found = markers(log)
    assert gone not in found
    assert needed in found, "a record of its transaction is there"
    assert last in found, "the producer is known by it"
    assert kept in keyed(log)
    assert local(log).aborted(0, log.end_offset) == []
    check_agrees(log)
    check_agrees(harness.kill())
    harness.reopen()
    check_agrees(harness.log())


def test_an_entry_whose_marker_was_compacted_is_not_taken_from_an_older_index(harness: Harness) -> None:
    """The index is written with snapshots only, so a kill brings back one of before the compaction."""
    log = harness.log(**COMPACTED)
    writer = Writer()
    for _ in range(3):
        writer.write(log, 1, (b"a", b"x"))
        writer.mark(log, 1, committed=False)
    writer.write(log, 1, (b"b", b"x"))
    writer.mark(log, 1, committed=True)
    harness.write()
    harness.reopen()
    log = harness.log()
    files = {name: harness.disk.open(f"{FOLDER}/{name}") for name in harness.disk.list(FOLDER)}
    assert any(name.endswith(".txnindex") for name in files)
    for _ in range(3):
        filler(harness, log)
        harness.clock.advance(61)
        compact(harness)
    assert aborted(log) == []
    check_agrees(harness.kill())


def filler(harness: Harness, log: Log) -> None:
    """Enough of one key to begin a segment or more."""
    for nth in range(30):
        append(log, batch(b"%d" % nth + b"." * 40, key=b"filler"))
        harness.write()


# Snapshots.


def test_a_snapshot_of_transactions_comes_back_as_it_went() -> None:
    states = {
        5: ProducerState(2, (SequencedBatch(0, 4, 100),), 17, 3, 12, 90, 100),
        6: ProducerState(0, (), 18),
    }
    whole = Snapshot(states, 91, ((80, 95), (85, 96)), (IndexedFile(0, 90, 3, 0xFFFFFFFF),))
    data = producers.encode_snapshot(whole)
    assert producers.decode_snapshot(data) == whole
    assert producers.decode(data) == states
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 4
        assert producers.decode_snapshot(bytes(damaged)) is None


def test_without_transactions_a_snapshot_is_what_it_was() -> None:
    states = {6: ProducerState(0, (SequencedBatch(0, 0, 1),), 18)}
    assert producers.encode(states)[:2] == b"\x00\x01"
    assert producers.encode({6: states[6]._replace(txn_start=1)})[:2] == b"\x00\x02"


def test_what_lies_behind_an_offset_says_nothing_of_before_it() -> None:
    states = {
        1: ProducerState(0, (), 9, 0, 3, 50, -1),
        2: ProducerState(0, (), 9, 0, 3, 20, 45),
        3: ProducerState(0, (SequencedBatch(0, 0, 45),), 9, -1, -1, -1, 30),
    }
    assert producers.before(states, 40) == {
        2: ProducerState(0, (), 9, 0, 3, 20, -1),
        3: ProducerState(0, (), 9, -1, -1, -1, 30),
    }


def test_a_watermark_that_is_lower_after_a_crash_is_not_answered_from_what_was_forgotten(harness: Harness) -> None:
    log = harness.log(**SMALL)
    writer = Writer()
    first = writer.write(log, 1)
    marker = writer.mark(log, 1, committed=True)
    harness.write()
    assert local(log).producers.first_undecided(log.committed_offset) is None
    harness.reopen()
    log = harness.log()
    log.committed_offset = marker
    assert log.producers.first_undecided(marker) == first
    log.committed_offset = marker + 1
    assert log.producers.first_undecided(marker + 1) is None


# The parts.


def test_undecided_transactions_are_told_in_order() -> None:
    transactions = Transactions()
    for first in (3, 5, 8):
        transactions.begin(first)
    transactions.end(5, 10)
    transactions.end(3, 12)
    assert [transactions.first_undecided(at) for at in (9, 10, 11, 12, 13)] == [3, 3, 3, 3, 8]
    assert transactions.first_open(99) == 8
    assert transactions.decided_to == 13
    transactions.end(8, 14)
    transactions.take_back_end(8)
    transactions.begin(20)
    transactions.take_back_begin(20)
    assert transactions.first_undecided(99) == 8


def test_a_search_ends_where_no_later_transaction_can_begin_before_it() -> None:
    found = AbortedTransactions(by_count)
    entries = [
        AbortedTransaction(1, 0, 10, 5),
        AbortedTransaction(2, 5, 20, 21),
        AbortedTransaction(3, 30, 40, 41),
    ]
    for entry in entries:
        found.add(entry)
    assert list(found.between(0, 100)) == entries
    assert list(found.between(0, 3)) == entries[:1]
    assert list(found.between(11, 25)) == entries[1:2]
    assert list(found.between(21, 30)) == []
    found.remove(20)
    found.remove(21)
    assert list(found) == [entries[0], entries[2]]
    found.drop_before(41)
    assert list(found) == []


def test_files_have_so_many_entries_and_only_new_ones_are_written() -> None:
    disk = VirtualDisk(VirtualClock())
    disk.make_folder("/p")
    index, found = AbortedIndex(disk, "/p", ()), AbortedTransactions(by_count)
    for nth in range(FILE_ENTRIES + 2):
        found.add(AbortedTransaction(7, nth, nth, nth + 1))
    assert len(index.write(found)) == 2
    assert index.write(found) == []
    found.add(AbortedTransaction(7, 9000, 9001, 9002))
    (path,) = index.write(found)
    assert disk.size(path) == 3 * ENTRY.size
    described = found.described(1 << 60)
    assert index.read(described, 0) is not None
    assert [len(each) for each in index.read(described, FILE_ENTRIES) or ()] == [3]
    found.drop_before(FILE_ENTRIES)
    index.tidy(found)
    assert len(disk.list("/p")) == 1
    assert index.read(described, 0) is None


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_a_conversion_takes_transactions_along(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log(**SMALL)
    transact(harness, log, Writer(), 30)
    before = aborted(log), seen(log)
    assert harness.store is not None
    harness.store.close()
    target = SHARED if layout == PARTITIONED else PARTITIONED
    convert(
        harness.disk,
        harness.clock,
        harness.data,
        ConversionOptions(target, commit_file_bytes=2048, settings=lambda _: settings(**SMALL)),
    )
    harness.layout = target
    harness.open()
    log = harness.log()
    assert (aborted(log), seen(log)) == before
    check_agrees(log)


def test_the_first_batch_of_a_transaction_is_remembered_by_its_own_header() -> None:
    """A batch that compaction has emptied opens nothing: its marker may be gone."""
    known = producers.LogProducers()
    header = read_header(batch(b"x", producer=(7, 0, 0)))
    known.take(header._replace(attributes=0x10, record_count=0), 5, None, 0)
    assert known.states[7].txn_start == -1
    known.take(header._replace(attributes=0x10), 6, None, 0)
    assert known.states[7].txn_start == 6
