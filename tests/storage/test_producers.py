"""Idempotent producers: what is taken, what is a duplicate, what is a gap; and what a restart remembers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from headrace.errors import (
    CorruptBatch,
    DuplicateSequence,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    StorageFailed,
    StorageFull,
)
from headrace.ports.disk import FileSlice, read_whole
from headrace.records.batch import BatchHeader, read_header
from headrace.storage import producers
from headrace.storage.checked_bytes import TURN_BATCHES
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import Log
from headrace.storage.segments.log import PartitionedLog
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from proving import proves
from storage.harness import Harness, append, batch, sim_harness, values

SMALL = {"segment_bytes": 1024, "index_interval_bytes": 100}


def send(harness: Harness, log: Log, sequence: int, *, epoch: int = 0, producer_id: int = 7, count: int = 1) -> int:
    """As a partition does: check, then append unless it is a duplicate."""
    view = batch(*[b"%d" % (sequence + i) for i in range(count)], producer=(producer_id, epoch, sequence))
    found = log.producers.check(read_header(view))
    if found is not None:
        return found
    offset = append(log, view)
    assert not harness.write()
    return offset


@proves("J10")
def test_the_last_five_batches_are_answered_with_their_offsets(harness: Harness) -> None:
    log = harness.log()
    offsets = [send(harness, log, sequence * 2, count=2) for sequence in range(8)]
    assert [send(harness, log, sequence * 2, count=2) for sequence in range(3, 8)] == offsets[3:]
    assert log.end_offset == 16


def test_an_older_duplicate_is_told_as_one(harness: Harness) -> None:
    log = harness.log()
    for sequence in range(8):
        send(harness, log, sequence)
    with pytest.raises(DuplicateSequence, match="it was written"):
        send(harness, log, 1)


def test_what_came_before_the_first_batch_of_a_producer_is_not_told_as_written(harness: Harness) -> None:
    """Its first batch was refused while replicas were missing, the next one taken: the first is not here."""
    log = harness.log()
    send(harness, log, 1)
    send(harness, log, 2)
    with pytest.raises(OutOfOrderSequence, match="sent sequence 0, but the log holds it from 1 on"):
        send(harness, log, 0)
    assert log.end_offset == 2


@proves("J10")
def test_a_gap_is_refused(harness: Harness) -> None:
    log = harness.log()
    send(harness, log, 0)
    with pytest.raises(OutOfOrderSequence, match="sent sequence 2, but 1 comes next"):
        send(harness, log, 2)
    assert send(harness, log, 1) == 1


def test_a_batch_that_overlaps_a_known_one_is_refused(harness: Harness) -> None:
    log = harness.log()
    send(harness, log, 0, count=3)
    with pytest.raises(OutOfOrderSequence):
        send(harness, log, 1, count=4)


def test_a_new_epoch_begins_with_sequence_zero_and_ends_the_old_one(harness: Harness) -> None:
    log = harness.log()
    send(harness, log, 0)
    with pytest.raises(OutOfOrderSequence, match="not with 0"):
        send(harness, log, 5, epoch=1)
    send(harness, log, 0, epoch=1)
    with pytest.raises(InvalidProducerEpoch, match="another instance"):
        send(harness, log, 1, epoch=0)


def test_an_unknown_producer_may_begin_anywhere(harness: Harness) -> None:
    log = harness.log()
    assert send(harness, log, 4711) == 0
    assert send(harness, log, 4712) == 1


def test_sequences_wrap_at_two_to_the_31(harness: Harness) -> None:
    log = harness.log()
    first = 2**31 - 2
    assert send(harness, log, first, count=3) == 0
    assert send(harness, log, 1) == 3
    assert send(harness, log, first, count=3) == 0
    with pytest.raises(OutOfOrderSequence):
        send(harness, log, 3)


@pytest.mark.parametrize("how", ["stop", "kill", "kill without snapshots"])
def test_a_restart_remembers_duplicates(harness: Harness, how: str) -> None:
    log = harness.log(**SMALL)
    offsets = [send(harness, log, sequence, producer_id=id_) for id_, sequence in ((1, 0), (2, 0), (1, 1), (2, 1))]
    for sequence in range(40):
        send(harness, log, sequence, producer_id=9)
    if how == "stop":
        log = harness.reopen()
    else:
        if "without" in how:
            for name in harness.disk.list(f"{harness.data}/orders/orders-0"):
                if name.endswith(".snapshot"):
                    harness.disk.remove(f"{harness.data}/orders/orders-0/{name}")
        log = harness.kill()
    assert [send(harness, log, sequence, producer_id=9) for sequence in range(35, 40)] == list(range(39, 44))
    assert send(harness, log, 0, producer_id=1) == offsets[0]
    assert len(values(log)) == 44


@pytest.mark.parametrize("layout", [PARTITIONED, SHARED])
def test_what_retention_takes_right_after_a_crash_is_remembered(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log(retention_ms=10_000)
    for sequence in range(4):
        send(harness, log, sequence)
    log = harness.kill()
    harness.advance(12)
    assert (log.start_offset, log.end_offset) == (4, 4)
    assert send(harness, log, 3) == 3
    log = harness.kill()
    assert send(harness, log, 3) == 3
    with pytest.raises(OutOfOrderSequence):
        send(harness, log, 6)


def test_a_truncation_forgets_what_it_cut(harness: Harness) -> None:
    log = harness.log(**SMALL)
    for sequence in range(30):
        send(harness, log, sequence)
    log.truncate(20)
    assert send(harness, log, 20) == 20
    assert send(harness, log, 19) == 19
    log = harness.kill()
    assert send(harness, log, 20) == 20


def test_a_silent_producer_is_forgotten_after_its_time() -> None:
    harness = sim_harness()
    log = harness.log()
    send(harness, log, 0)
    harness.advance(86_000)
    with pytest.raises(OutOfOrderSequence):
        send(harness, log, 5)
    harness.advance(500)
    assert send(harness, log, 5) == 1


def test_a_dropped_batch_may_be_sent_again(harness: Harness) -> None:
    log = harness.log()
    send(harness, log, 0)
    view = batch(producer=(7, 0, 1))
    append(log, view)
    log.producers.drop(read_header(view))
    assert log.producers.check(read_header(view)) is None


def test_a_snapshot_comes_back_as_it_went_and_damage_is_seen() -> None:
    states = {
        5: producers.ProducerState(2, (producers.SequencedBatch(0, 4, 100), producers.SequencedBatch(5, 5, 105)), 17),
        6: producers.ProducerState(0, (), 18),
    }
    data = producers.encode(states)
    assert producers.decode(data) == states
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 4
        assert producers.decode(bytes(damaged)) is None
    assert producers.decode(b"") is None


def replay(end_offset: int, headers: Iterable[BatchHeader]) -> None:
    nowhere = FileSlice(VirtualDisk(VirtualClock()).open("/none", create=True), 0, 0)
    pairs = ((header, nowhere) for header in headers)
    assert list(producers.replay(producers.LogProducers(), 0, end_offset, pairs, 0)) == []


def test_damage_is_told_where_the_last_whole_batch_ends() -> None:
    def headers() -> Iterator[BatchHeader]:
        for base in (0, 1):
            yield read_header(batch(b"x", producer=(7, 0, base)))._replace(base_offset=base)
        raise CorruptBatch("what follows does not fit")

    with pytest.raises(producers.UnreadableProducers) as unreadable:
        replay(1000, headers())
    assert unreadable.value.offset == 2


def test_a_last_header_that_ends_behind_the_log_is_not_believed() -> None:
    """No other follows that would show it: a wrong bit there, and the next batch would be out of order for ever."""
    headers = [read_header(batch(b"x", producer=(7, 0, base)))._replace(base_offset=base) for base in (0, 1, 2)]
    replay(3, headers)
    headers[2] = headers[2]._replace(last_offset_delta=1 << 22)
    with pytest.raises(producers.UnreadableProducers) as unreadable:
        replay(3, headers)
    assert unreadable.value.offset == 2


LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])


def without_snapshots(harness: Harness, change: Callable[[], None] = lambda: None) -> Log:
    """The log after a clean stop, its snapshots lost meanwhile."""
    assert harness.store is not None
    harness.store.close()
    folder = f"{harness.data}/orders/orders-0"
    for name in harness.disk.list(folder):
        if name.endswith(".snapshot"):
            harness.disk.remove(f"{folder}/{name}")
    change()
    harness.open()
    return harness.log()


@proves("J1")
@LAYOUTS
@pytest.mark.parametrize("byte", [50, 52, 56], ids=["id", "epoch", "sequence"])
@pytest.mark.parametrize("offset", [0, 4, 9])
@pytest.mark.parametrize("how", ["a lost snapshot", "a truncation"])
def test_a_batch_with_a_wrong_bit_tells_nothing_of_its_producer(layout: str, byte: int, offset: int, how: str) -> None:
    """A producer would be fenced, its next batch out of order, or one that is there taken again."""
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(12):
        send(harness, log, sequence)
    _, piece = next(log.headers(offset))
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)

    def flip() -> None:
        disk.flip(piece.file.path, piece.position + byte, 0x04)

    if how == "a truncation":
        flip()
        log.truncate(10)
    else:
        log = without_snapshots(harness, flip)
    for _ in range(2):
        with pytest.raises(producers.UnreadableProducers) as unreadable:
            log.producers.load()
        assert unreadable.value.offset == offset
    with pytest.raises(producers.UnreadableProducers):
        send(harness, log, 10)


@LAYOUTS
def test_many_batches_behind_a_snapshot_are_read_in_many_turns(layout: str) -> None:
    harness = sim_harness(layout)
    harness.file_bytes = 1 << 22
    log = harness.log()
    count = 5 * TURN_BATCHES
    for sequence in range(count):
        append(log, batch(b"%d" % sequence, producer=(7, 0, sequence)))
    assert not harness.write()
    log = without_snapshots(harness)
    with pytest.raises(StorageFailed, match="is being read: try again"):
        send(harness, log, count)
    with pytest.raises(StorageFailed, match="is being read: try again"):
        append(log, batch(b"without a producer"))
    assert log.end_offset == count
    assert harness.clock.run_soon() >= 4
    log.producers.load()
    assert send(harness, log, count - 1) == count - 1
    assert send(harness, log, count) == count


@LAYOUTS
@pytest.mark.parametrize("change", ["a truncation", "a new start"])
def test_a_log_that_changes_while_its_producers_are_read_is_read_anew(layout: str, change: str) -> None:
    harness = sim_harness(layout)
    harness.file_bytes = 1 << 22
    log = harness.log(segment_bytes=100_000)
    count = 3 * TURN_BATCHES
    for sequence in range(count):
        append(log, batch(b"%d" % sequence, producer=(7, 0, sequence)))
    assert not harness.write()
    log = without_snapshots(harness)
    with pytest.raises(StorageFailed):
        log.producers.load()
    if change == "a truncation":
        log.truncate(count - 10)
        count -= 10
    else:
        log.delete_before(2 * TURN_BATCHES)
    with suppress(StorageFailed):
        log.producers.load()
    harness.settle()
    assert send(harness, log, count - 1) == count - 1
    assert send(harness, log, count) == count


@LAYOUTS
def test_damage_that_a_later_turn_finds_is_told_to_whoever_asks_next(layout: str) -> None:
    harness = sim_harness(layout)
    harness.file_bytes = 1 << 22
    log = harness.log()
    bad = 2 * TURN_BATCHES + 7
    for sequence in range(3 * TURN_BATCHES):
        append(log, batch(b"%d" % sequence, producer=(7, 0, sequence)))
    assert not harness.write()
    _, piece = next(log.headers(bad))
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    log = without_snapshots(harness, lambda: disk.flip(piece.file.path, piece.position + 52, 0x04))
    with pytest.raises(StorageFailed):
        log.producers.load()
    harness.settle()
    with pytest.raises(producers.UnreadableProducers) as unreadable:
        log.producers.load()
    assert unreadable.value.offset == bad


@LAYOUTS
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("segment_bytes", [1 << 20, 1024])
@pytest.mark.parametrize("start", [5, 8, 20, 28])
def test_a_start_above_a_producers_last_batch_does_not_forget_it(
    layout: str, stopped: bool, segment_bytes: int, start: int
) -> None:
    """A batch that was deleted may still be on its way once more, and the next one must follow it."""
    harness = sim_harness(layout)
    log = harness.log(segment_bytes=segment_bytes, index_interval_bytes=100)
    for sequence in range(5):
        send(harness, log, sequence)
    for sequence in range(20):
        send(harness, log, sequence, producer_id=9)
    log.delete_before(start)
    harness.settle()
    for restart in (harness.reopen if stopped else harness.kill, harness.kill):
        log = restart()
        assert log.start_offset == min(start, 25)
        assert send(harness, log, 4) == 4
        assert send(harness, log, 19, producer_id=9) == 24
        with pytest.raises(OutOfOrderSequence):
            send(harness, log, 7)


def test_a_snapshot_from_before_the_first_segment_says_nothing_of_now() -> None:
    """What came between the two is gone: the producer's next batch would be out of order for ever."""
    harness = sim_harness(PARTITIONED)
    log = harness.log(**SMALL)
    for sequence in range(4):
        send(harness, log, sequence)
    log = harness.reopen()
    old = f"{harness.data}/orders/orders-0/{4:020d}.snapshot"
    data = read_whole(harness.disk, old)
    for sequence in range(4, 20):
        send(harness, log, sequence)
    for sequence in range(20):
        send(harness, log, sequence, producer_id=9)
    log.delete_before(40)
    harness.settle()

    def bring_back() -> None:
        file = harness.disk.open(old, create=True, writable=True)
        file.pwritev([data], 0)
        file.close()

    log = without_snapshots(harness, bring_back)
    assert log.start_offset == 40
    assert send(harness, log, 20) == 40


@LAYOUTS
@pytest.mark.parametrize("how", ["stop", "kill", "power"])
def test_what_a_leader_tells_of_producers_is_remembered_by_an_empty_log_alone(layout: str, how: str) -> None:
    harness = sim_harness(layout)
    log = harness.log(durability="disk")
    send(harness, log, 0, producer_id=8)
    told = producers.ProducerState(0, (producers.SequencedBatch(0, 4, 60),), harness.clock.wall_ms())
    log.learn_producers({7: told})
    assert set(log.producers_before(100)) == {8}, "it holds something, and knows by itself"
    log.restart_at(100)
    harness.advance(1)
    log.learn_producers({7: told, 9: told})
    harness.advance(1)
    if how == "stop":
        log = harness.reopen()
    else:
        log = harness.kill(5 if how == "power" else None)
    assert log.producers_before(100) == {7: told, 9: told}
    assert log.producers_before(64) == {}
    assert send(harness, log, 0, count=5) == 60
    assert send(harness, log, 5) == 100
    assert set(log.producers_before(101)) == {7, 9}
    assert len(log.producers_before(101)[7].batches) == 2


@proves("J1")
@LAYOUTS
def test_damage_of_what_is_deleted_keeps_nobody_from_appending(layout: str) -> None:
    """No other replica gives it back: whom it told of is unknown."""
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(12):
        send(harness, log, sequence)
    _, piece = next(log.headers(2))
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    log.delete_before(8)
    harness.settle()
    log = without_snapshots(harness, lambda: disk.flip(piece.file.path, piece.position + 52, 0x04))
    assert log.start_offset == 8
    assert send(harness, log, 11) == 11
    assert send(harness, log, 12) == 12


@LAYOUTS
def test_who_was_told_of_only_by_what_is_deleted_and_damaged_is_unknown(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(6):
        send(harness, log, sequence)
    for sequence in range(3):
        send(harness, log, sequence, producer_id=9)
    _, piece = next(log.headers(2))
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    log.delete_before(7)
    harness.settle()
    log = without_snapshots(harness, lambda: disk.flip(piece.file.path, piece.position + 52, 0x04))
    assert send(harness, log, 6) == 9
    assert send(harness, log, 2, producer_id=9) == 8


@proves("J1")
@LAYOUTS
@pytest.mark.parametrize("starts", [1, 2])
def test_damage_that_a_start_has_found_is_left_out_and_taken_down(layout: str, starts: int) -> None:
    """Whoever leads must know that its producers' batches may not all be known."""
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(12):
        send(harness, log, sequence)
    _, piece = next(log.headers(5))
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    assert log.producers.left_out == []
    disk.flip(piece.file.path, piece.position + 56, 0x04)
    for _ in range(starts):
        log = killed(harness)
    log.producers.load()
    assert log.producers.left_out == [5]
    assert [batch.base_offset for batch in log.producers_before(12)[7].batches] == [7, 8, 9, 10, 11]
    assert [batch.base_offset for batch in log.producers_before(8)[7].batches] == [7]
    log.truncate(4)
    log.producers.load()
    assert log.producers.left_out == []


@LAYOUTS
def test_damage_that_is_passed_is_taken_down(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(12):
        send(harness, log, sequence)
    _, piece = next(log.headers(5))
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    log = without_snapshots(harness, lambda: disk.flip(piece.file.path, piece.position + 52, 0x04))
    with pytest.raises(producers.UnreadableProducers):
        log.producers.load()
    log.producers.pass_damage()
    log.producers.load()
    (offset,) = log.producers.left_out
    assert offset <= 5


def killed(harness: Harness) -> Log:
    """The log after the death of the process; the kernel ran on."""
    assert harness.store is not None
    harness.store.abandon()
    harness.store = harness.new_store()
    harness.store.open(harness.expected, same_boot=True)
    harness.commit()
    return harness.log()


def roll(log: Log) -> None:
    if isinstance(log, PartitionedLog):
        log.roll()


def snapshot(harness: Harness, offset: int) -> str:
    return f"{harness.data}/orders/orders-0/{offset:020d}.snapshot"


@LAYOUTS
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("start", [3, 6])
def test_a_raised_start_forgets_nobody_whatever_the_checkpoint_says(
    layout: str, is_checkpointed: bool, start: int
) -> None:
    """The commit log tells of a start at once, the checkpoint of an end from before."""
    harness = sim_harness(layout)
    harness.log()
    log = harness.reopen()  # there is a checkpoint, which says that it is empty
    for sequence in range(6):
        send(harness, log, sequence)
        roll(log)
    log.delete_before(start)
    if is_checkpointed:
        harness.settle()
    log = harness.kill()
    assert log.end_offset == 6
    assert [send(harness, log, sequence) for sequence in range(1, 7)] == [1, 2, 3, 4, 5, 6]


@LAYOUTS
@pytest.mark.parametrize("power_seed", [None, *range(5)])
@pytest.mark.parametrize("start", [2, 5, 6])
def test_a_start_raised_above_a_cut_forgets_nobody(layout: str, power_seed: int | None, start: int) -> None:
    """The segment that a truncation begins has no other before it then."""
    harness = sim_harness(layout)
    log = harness.log(durability="disk")
    for sequence in range(6):
        send(harness, log, sequence)
    log.truncate(2)
    for sequence in range(2, 6):
        send(harness, log, sequence)
    log.delete_before(start)
    harness.settle()
    log = harness.kill(power_seed)
    assert (log.start_offset, log.end_offset) == (start, 6)
    assert [send(harness, log, sequence) for sequence in range(1, 7)] == [1, 2, 3, 4, 5, 6]


@LAYOUTS
def test_a_cut_behind_the_checkpoint_hides_no_snapshot_from_a_kill(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(6):
        send(harness, log, sequence)
    log.truncate(2)
    for sequence in range(2, 6):
        send(harness, log, sequence)
    log.delete_before(5)
    log = killed(harness)
    assert [send(harness, log, sequence) for sequence in range(1, 7)] == [1, 2, 3, 4, 5, 6]


@LAYOUTS
@pytest.mark.parametrize("restart", [Harness.reopen, Harness.kill], ids=["stopped", "killed"])
@pytest.mark.parametrize("rolls", [False, True])
def test_a_cut_above_a_raised_start_forgets_nobody(layout: str, restart: Callable[[Harness], Log], rolls: bool) -> None:
    """What is cut takes its snapshots along, not those that alone tell of what was deleted."""
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(5):
        send(harness, log, sequence)
        if rolls:
            roll(log)
    log.delete_before(3)
    harness.settle()
    log.truncate(4)
    assert send(harness, log, 1) == 1
    log = restart(harness)
    assert (log.start_offset, log.end_offset) == (3, 4)
    assert [send(harness, log, sequence) for sequence in range(5)] == [0, 1, 2, 3, 4]


@proves("J10")
@LAYOUTS
@pytest.mark.parametrize(
    "restart",
    [Harness.log, Harness.reopen, Harness.kill, *(partial(Harness.kill, seed=seed) for seed in range(3))],
    ids=["runs on", "stopped", "killed", "power lost 0", "power lost 1", "power lost 2"],
)
@pytest.mark.parametrize("rolls", [False, True])
@pytest.mark.parametrize("cut_to", [3, 2])
def test_a_cut_of_everything_forgets_nobody_from_before_it(
    layout: str, restart: Callable[[Harness], Log], rolls: bool, cut_to: int
) -> None:
    """Whoever cuts may be elected before a leader has told it of producers."""
    harness = sim_harness(layout)
    log = harness.log(durability="disk")
    for sequence in range(5):
        send(harness, log, sequence)
        if rolls:
            roll(log)
    log.delete_before(3)
    harness.settle()
    log.truncate(cut_to)
    harness.settle()
    log = restart(harness)
    assert (log.start_offset, log.end_offset) == (cut_to, cut_to)
    assert [send(harness, log, sequence) for sequence in range(5)] == [0, 1, 2, 3, 4]


@LAYOUTS
def test_a_start_at_a_cut_with_nothing_behind_it_forgets_nobody(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(5):
        send(harness, log, sequence)
    log.truncate(3)
    log.delete_before(3)
    harness.settle()
    log = harness.kill()
    assert (log.start_offset, log.end_offset) == (3, 3)
    assert [send(harness, log, sequence) for sequence in range(4)] == [0, 1, 2, 3]


@LAYOUTS
def test_a_start_does_not_rise_while_its_producers_cannot_be_kept(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    for sequence in range(5):
        send(harness, log, sequence)
    log.truncate(3)
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    for call in (disk.fail_open, disk.fail_write):
        call(snapshot(harness, 3), errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            log.delete_before(3)
        assert (log.start_offset, log.end_offset) == (0, 3)
    log.delete_before(3)
    harness.settle()
    log = harness.kill()
    assert (log.start_offset, log.end_offset) == (3, 3)
    assert send(harness, log, 2) == 2


@LAYOUTS
def test_retention_leaves_what_it_cannot_keep_the_producers_of(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log(retention_ms=10_000)
    for sequence in range(4):
        send(harness, log, sequence)
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    disk.fail_open(snapshot(harness, 4), errno.ENOSPC)
    harness.advance(12)
    assert log.start_offset == 0
    harness.advance(12)
    assert log.start_offset == 4
    assert send(harness, harness.kill(), 3) == 3


@LAYOUTS
def test_what_a_leader_tells_of_producers_is_refused_while_it_cannot_be_kept(layout: str) -> None:
    harness = sim_harness(layout)
    log = harness.log()
    log.restart_at(100)
    told = producers.ProducerState(0, (producers.SequencedBatch(0, 4, 60),), harness.clock.wall_ms())
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    disk.fail_write(snapshot(harness, 100), errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        log.learn_producers({7: told})
    log.learn_producers({7: told})
    assert harness.kill().producers_before(100) == {7: told}


def test_a_segment_takes_nothing_before_its_producers_are_kept() -> None:
    harness = sim_harness(PARTITIONED)
    log = harness.log()
    for sequence in range(5):
        send(harness, log, sequence)
    log.truncate(3)
    disk = harness.disk
    assert isinstance(disk, VirtualDisk)
    disk.fail_open(snapshot(harness, 3), errno.ENOSPC)
    with pytest.raises(StorageFull):
        send(harness, log, 3)
    assert send(harness, log, 3) == 3
    assert disk.exists(snapshot(harness, 3))


def test_a_snapshot_of_what_was_cut_is_not_believed_when_a_loss_of_power_brings_it_back() -> None:
    """It would answer batches that are not there as duplicates."""
    harness = sim_harness(SHARED)
    log = harness.log()
    for sequence in range(6):
        send(harness, log, sequence)
    log.delete_before(6)
    old = read_whole(harness.disk, snapshot(harness, 6))
    log.restart_at(2)
    for sequence in range(4):
        send(harness, log, sequence, producer_id=9)
    log.delete_before(6)
    assert harness.store is not None
    harness.store.abandon()
    file = harness.disk.open(snapshot(harness, 6), writable=True)
    file.truncate(0)
    file.pwritev([old], 0)
    harness.open()
    log = harness.log()
    assert log.start_offset == 6
    assert send(harness, log, 5) == 6
