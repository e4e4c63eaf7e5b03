"""Appending, waiting and reading: answers in log order, once each, and only for what counts as asked."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from headrace.errors import (
    BatchTooLarge,
    CorruptBatch,
    FencedEpoch,
    HeadraceError,
    InvalidRecord,
    InvalidTimestamp,
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    OutOfOrderSequence,
    RequestTimedOut,
    StorageFailed,
    StorageFull,
    UnknownEpoch,
    UnknownPartition,
)
from headrace.partitions.partitions import Failures
from headrace.partitions.validation import WORDED_MAX
from headrace.records import codecs, kernel
from headrace.records.batch import read_header
from headrace.records.record import NewRecord
from headrace.settings.values import log_settings
from headrace.storage.folder import PARTITIONED
from headrace.storage.log import TopicPartition
from partitions.led import Led, Outcome, Reader, batch, values
from proving import proves


@pytest.fixture
def led() -> Led:
    return Led()


# The turn


@proves("G5")
@pytest.mark.parametrize("acks", [0, 1, -1])
@pytest.mark.parametrize("durability", ["memory", "os"])
def test_an_append_is_answered_when_its_turn_ends(led: Led, acks: int, durability: str) -> None:
    partition = led.lead(durability=durability)
    outcome = led.submit(partition, b"a", b"b", acks=acks)
    assert outcome.waiting
    assert partition.read(0, 1000).count == 0
    led.partitions.end_turn()
    assert outcome.offset == 0
    assert partition.high_watermark == 2
    assert values(partition.read(0, 1000)) == [b"a", b"b"]


@proves("J9")
def test_one_turn_writes_many_batches_of_many_partitions_once(led: Led) -> None:
    partitions = [led.lead(index=index) for index in range(5)]
    outcomes = [led.submit(partition, b"%d" % n) for n in range(4) for partition in partitions]
    led.partitions.end_turn()
    assert [outcome.offset for outcome in outcomes] == [n for n in range(4) for _ in partitions]
    led.partitions.end_turn()
    assert all(partition.log.end_offset == 4 for partition in partitions)


@proves("G5")
@pytest.mark.parametrize("acks", [1, -1])
def test_under_disk_durability_an_append_is_answered_after_the_sync(led: Led, acks: int) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    outcome = led.produce(partition, b"a", acks=acks)
    led.clock.run_soon()
    assert outcome.waiting
    assert partition.read(0, 1000).count == 0
    led.disk.release_syncs()
    led.clock.run_soon()
    assert outcome.offset == 0
    assert values(partition.read(0, 1000)) == [b"a"]


def test_acks_0_waits_for_no_sync(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    assert led.produce(partition, acks=0).offset == 0


def test_waiters_are_answered_in_log_order_each_once(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    order: list[int] = []
    for _ in range(3):
        for _ in range(4):
            led.partitions.submit(partition, batch(), -1, 1000, lambda _, offset: order.append(offset))
        led.partitions.end_turn()
    led.disk.release_syncs()
    led.clock.run_soon()
    assert order == list(range(12))
    led.clock.advance(10)
    assert order == list(range(12))


def test_what_is_called_at_the_end_of_a_turn_hears_of_the_logs_that_failed() -> None:
    led = Led(PARTITIONED)  # where one log can fail alone
    good, bad = led.lead(index=0), led.lead(index=1)
    led.disk.fail_write(led.log_path(bad.log), errno.ENOSPC)
    heard: list[Failures] = []
    ok, failed = led.submit(good), led.submit(bad)
    led.partitions.at_turn_end(heard.append)
    led.partitions.end_turn()
    assert [list(failures) for failures in heard] == [[TopicPartition("orders", 1)]]
    assert ok.offset == 0
    assert isinstance(failed.error, StorageFull)


def test_a_turn_within_a_turn_does_not_take_the_failures_of_the_outer_one() -> None:
    """An answer may bring the next request of the same client at once, and that one ends a turn of its own."""
    led = Led(PARTITIONED)  # where one log can fail alone
    first, bad, third = (led.lead(index=index, durability=kind) for index, kind in enumerate(("disk", "os", "os")))
    led.disk.hold_syncs()
    nested = Outcome()

    def next_request(error: HeadraceError | None, offset: int) -> None:
        led.partitions.submit(third, batch(), -1, 1000, nested)
        led.partitions.end_turn()

    led.partitions.submit(first, batch(), -1, 1000, next_request)
    led.partitions.end_turn()
    led.disk.release_syncs()
    led.disk.fail_write(led.log_path(bad.log), errno.ENOSPC)
    failed = led.submit(bad)
    again = led.submit(first)
    first.log.durable_offset = 1
    led.partitions.end_turn()
    assert nested.offset == 0
    assert isinstance(failed.error, StorageFull)
    led.clock.run_soon()
    assert again.offset == 1


# Failures


def test_a_full_disk_fails_the_staged_appends_and_the_next_ones_take_their_offsets(led: Led) -> None:
    partition = led.lead()
    led.produce(partition, b"before")
    led.disk.fail_write(led.log_path(partition.log), errno.ENOSPC)
    failed = [led.submit(partition, b"lost"), led.submit(partition, b"lost too")]
    led.partitions.end_turn()
    assert [type(outcome.error) for outcome in failed] == [StorageFull, StorageFull]
    assert (partition.log.end_offset, partition.high_watermark) == (1, 1)
    assert led.produce(partition, b"after").offset == 1
    assert values(partition.read(0, 1000)) == [b"before", b"after"]


def test_a_failed_append_is_not_acknowledged_by_a_later_one(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    earlier = led.produce(partition, b"earlier")
    led.disk.fail_write(led.log_path(partition.log), errno.ENOSPC)
    failed = led.produce(partition, b"failed")
    later = led.produce(partition, b"later")
    led.disk.release_syncs()
    led.clock.run_soon()
    assert isinstance(failed.error, StorageFull)
    assert (earlier.offset, later.offset) == (0, 1)
    assert values(partition.read(0, 1000)) == [b"earlier", b"later"]


def test_a_failed_sync_fails_who_waits_and_takes_the_log_offline(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    waiting = [led.produce(partition, acks=1), led.produce(partition, acks=-1)]
    led.disk.fail_sync(led.log_path(partition.log))
    led.disk.release_syncs()
    led.clock.run_soon()
    assert [type(outcome.error) for outcome in waiting] == [StorageFailed, StorageFailed]
    assert partition.high_watermark == 0
    refused = led.produce(partition)
    assert isinstance(refused.error, StorageFailed)


def test_a_refused_request_leaves_nothing_of_its_buffer_behind(led: Led) -> None:
    """The error is kept for the next request; the receive buffer of this one must not be."""
    partition = led.lead(durability="disk")
    led.disk.fail_sync(led.log_path(partition.log))
    led.produce(partition)
    led.clock.run_soon()
    received = bytearray(batch(b"refused"))
    with suppress(StorageFailed):
        partition.append(memoryview(received), -1)
        pytest.fail("it was taken")
    received.clear()


def test_the_request_that_meets_a_sick_disk_leaves_nothing_of_its_buffer_behind(led: Led) -> None:
    """Its error takes the log offline and is kept; here by a segment that cannot be rolled."""
    partition = led.lead(segment_bytes=1024)
    led.produce(partition, b"x" * 900)
    led.disk.trouble = lambda _call, _path: errno.EIO
    received = bytearray(batch(b"y" * 900))
    led.partitions.submit(partition, received, -1, 1000, lambda _error, _offset: None)
    led.partitions.end_turn()
    assert partition.log.offline is not None
    received.clear()


def test_nobody_waits_for_a_log_that_went_offline_in_the_same_turn(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    outcome = led.submit(partition)
    led.partitions.at_turn_end(lambda _: None)
    gone = StorageFailed("gone while the turn was written")
    led.partitions._after_turn.insert(0, lambda _: setattr(partition.log, "offline", gone))
    led.partitions.end_turn()
    assert outcome.error is gone


def test_a_wait_ends_at_its_deadline_and_the_record_stays(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    hasty = led.produce(partition, b"a", timeout_ms=100)
    patient = led.produce(partition, b"b", timeout_ms=5000)
    led.clock.advance(0.099)
    assert hasty.waiting
    led.clock.advance(0.001)
    assert isinstance(hasty.error, RequestTimedOut)
    assert "orders-0: not committed within 100 ms" in str(hasty.error)
    led.disk.release_syncs()
    led.clock.run_soon()
    assert patient.offset == 1
    assert values(partition.read(0, 1000)) == [b"a", b"b"]
    led.clock.advance(100)
    assert len(hasty.calls) == len(patient.calls) == 1


def test_who_waits_for_a_partition_that_goes_is_told(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    producing, reader = led.produce(partition), Reader()
    partition.wait_for_data(reader)
    led.partitions.drop(partition.topic_partition)
    assert isinstance(producing.error, NotLeader)
    assert reader.answered
    led.partitions.drop(partition.topic_partition)
    with pytest.raises(UnknownPartition, match="there is no partition orders-0 on this broker"):
        led.partitions.get("orders", 0)
    assert len(led.partitions) == 0


# What is refused


def test_a_batch_that_is_damaged_or_not_alone_is_refused(led: Led) -> None:
    partition = led.lead()
    flipped = batch(b"some value")
    flipped[-1] ^= 1
    for wrong in (flipped, batch() + batch(), batch()[:-1], bytearray(10), bytearray()):
        with pytest.raises(CorruptBatch):
            partition.append(memoryview(wrong), 1)
    assert partition.log.end_offset == 0


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
@pytest.mark.parametrize("codec", list(codecs.Codec))
def test_a_compacted_topic_refuses_records_without_a_key(led: Led, policy: str, codec: int) -> None:
    partition = led.lead(cleanup_policy=policy)

    def sent(*keys: bytes | None) -> memoryview:
        records: list[NewRecord] = [(1_750_000_000_000, key, b"value", []) for key in keys]
        return memoryview(kernel.build(records, codec=codec))

    for keys in ((None,), (b"a", None, b"b"), (b"a", b"", None), (None, b"a", None)):
        first = keys.index(None)
        with pytest.raises(InvalidRecord, match=rf"orders-0: record {first} of the batch has no key") as refused:
            partition.append(sent(*keys), 1)
        assert [place for place, _ in refused.value.record_errors] == [n for n, key in enumerate(keys) if key is None]
    assert partition.log.end_offset == 0
    assert partition.append(sent(b"a", b""), 1)[0] == 0


def test_records_outside_the_times_that_a_topic_takes_are_all_named(led: Led) -> None:
    partition = led.lead(message_timestamp_before_max_ms=1000, message_timestamp_after_max_ms=500)
    now_ms = led.clock.wall_ms()

    def sent(*shifts_ms: int | None, codec: int = 0) -> memoryview:
        times = [-1 if shift_ms is None else now_ms + shift_ms for shift_ms in shifts_ms]
        return memoryview(kernel.build([(time_ms, None, b"v", []) for time_ms in times], codec=codec))

    for shifts_ms, wrong in (
        ((-1001,), [0]),
        ((501,), [0]),
        ((0, -1001, 500, 501, None), [1, 3]),
        ((-5000, 0, -5000), [0, 2]),
        ((0, -1001), [1]),
        ((0, 501), [1]),
    ):
        for codec in (codecs.Codec.NONE, codecs.Codec.LZ4):
            with pytest.raises(InvalidTimestamp, match=f"record {wrong[0]} of the batch has timestamp") as refused:
                partition.append(sent(*shifts_ms, codec=codec), 1)
            assert [place for place, _ in refused.value.record_errors] == wrong
    assert partition.log.end_offset == 0
    assert partition.append(sent(-1000, 500, None), 1)[0] == 0
    assert partition.append(sent(500), 1)[0] == 3
    stamped = led.lead("stamped", message_timestamp_after_max_ms=500, message_timestamp_type="LogAppendTime")
    assert stamped.append(sent(501), 1)[0] == 0
    stamped.log.settings = log_settings(
        {},
        {
            "message.timestamp.after.max.ms": "500",
            "message.timestamp.type": "LogAppendTime",
            "cleanup.policy": "compact",
        },
    )
    assert stamped.append(memoryview(kernel.build([(now_ms + 501, b"key", b"v", [])])), 1)[0] == 1


def test_of_very_many_wrong_records_all_are_named_and_some_have_words(led: Led) -> None:
    partition = led.lead(cleanup_policy="compact")
    with pytest.raises(InvalidRecord, match="; 5000 records are wrong") as refused:
        partition.append(memoryview(kernel.build([(0, None, b"", [])] * 5000)), 1)
    assert [place for place, _ in refused.value.record_errors] == list(range(5000))
    assert [text is not None for _, text in refused.value.record_errors] == [True] * WORDED_MAX + [False] * 4900


def test_a_batch_above_the_limit_of_its_topic_is_refused(led: Led) -> None:
    partition = led.lead(max_message_bytes=100)
    with pytest.raises(BatchTooLarge, match=r"orders-0: a batch of \d+ bytes; max.message.bytes is 100"):
        partition.append(memoryview(batch(bytes(100))), 1)
    assert led.produce(partition, b"small").offset == 0


@proves("G5")
def test_acks_all_needs_enough_replicas_and_acks_1_does_not(led: Led) -> None:
    partition = led.lead(min_insync_replicas=2)
    with pytest.raises(NotEnoughReplicas, match="1 replicas are in sync, acks=-1 needs 2"):
        partition.append(memoryview(batch()), -1)
    assert led.produce(partition, acks=1).offset == 0
    assert partition.high_watermark == 0
    assert partition.read(0, 1000).count == 0


def test_an_epoch_of_another_time_is_refused(led: Led) -> None:
    partition = led.lead()
    partition.epoch = 5
    partition.check_epoch(-1)
    partition.check_epoch(5)
    with pytest.raises(FencedEpoch, match="epoch 4 is older than ours, 5"):
        partition.check_epoch(4)
    with pytest.raises(UnknownEpoch, match="epoch 6 is newer than ours, 5"):
        partition.check_epoch(6)


# Idempotent producers


@proves("J10")
def test_a_duplicate_is_answered_with_the_first_offset_and_stored_once(led: Led) -> None:
    partition = led.lead()
    outcomes = [Outcome() for _ in range(3)]
    for outcome in outcomes:
        led.partitions.submit(partition, batch(b"a", b"b", producer=(9, 0, 0)), -1, 1000, outcome)
        led.partitions.end_turn()
    assert [outcome.offset for outcome in outcomes] == [0, 0, 0]
    assert values(partition.read(0, 1000)) == [b"a", b"b"]
    with pytest.raises(OutOfOrderSequence):
        partition.append(memoryview(batch(producer=(9, 0, 7))), -1)


@proves("J10")
def test_a_duplicate_is_acknowledged_only_when_the_original_counts(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    original, later, duplicate = Outcome(), Outcome(), Outcome()
    order: list[str] = []
    for name, outcome, sequence in (("original", original, 0), ("later", later, 1), ("duplicate", duplicate, 0)):

        def done(error: HeadraceError | None, offset: int, name: str = name, outcome: Outcome = outcome) -> None:
            order.append(name)
            outcome(error, offset)

        led.partitions.submit(partition, batch(producer=(9, 0, sequence)), -1, 1000, done)
        led.partitions.end_turn()
    assert order == []
    led.disk.release_syncs()
    led.clock.run_soon()
    assert (original.offset, later.offset, duplicate.offset) == (0, 1, 0)
    assert order == ["original", "duplicate", "later"]


@proves("J10")
def test_a_batch_that_could_not_be_written_may_come_again(led: Led) -> None:
    partition = led.lead()
    led.disk.fail_write(led.log_path(partition.log), errno.ENOSPC)
    first, again = Outcome(), Outcome()
    for outcome in (first, again):
        led.partitions.submit(partition, batch(producer=(9, 0, 0)), -1, 1000, outcome)
        led.partitions.end_turn()
    assert isinstance(first.error, StorageFull)
    assert again.offset == 0
    assert partition.log.end_offset == 1


def test_the_brokers_time_is_stamped_where_the_topic_says_so(led: Led) -> None:
    partition = led.lead(message_timestamp_type="LogAppendTime")
    led.clock.advance(60)
    base_offset, needed_offset, append_time_ms = partition.append(memoryview(batch(b"a", b"b")), 1)
    assert (base_offset, needed_offset, append_time_ms) == (0, 2, led.clock.wall_ms())
    led.partitions.touch(partition)
    led.partitions.end_turn()
    (piece,) = partition.read(0, 1000).slices
    header = read_header(piece.file.pread(piece.count, piece.position))
    assert (header.append_time, header.max_timestamp_ms) == (True, led.clock.wall_ms())


# Reading


@proves("G2")
def test_consumers_read_below_the_watermark_only(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.produce(partition, b"a")
    led.clock.run_soon()
    led.disk.hold_syncs()
    led.produce(partition, b"b")
    assert (partition.high_watermark, partition.log.end_offset) == (1, 2)
    assert values(partition.read(0, 1000)) == [b"a"]
    assert partition.read(1, 1000).count == 0
    assert partition.read(2, 1000).count == 0
    for offset in (3, -1):
        with pytest.raises(OffsetOutOfRange, match=f"orders-0: offset {offset} is outside 0 to 1"):
            partition.read(offset, 1000)


def test_waiting_readers_are_woken_once_per_turn_by_what_has_grown(led: Led) -> None:
    partition = led.lead()
    reader, modest = Reader(wanted_bytes=1 << 20), Reader()
    partition.wait_for_data(reader)
    partition.wait_for_data(modest)
    for _ in range(5):
        led.submit(partition)
    led.partitions.end_turn()
    assert reader.grown == []
    led.clock.run_soon()
    assert reader.grown == modest.grown == [partition.log.size_bytes]
    before = partition.log.size_bytes
    led.produce(partition)
    led.produce(partition)
    led.clock.run_soon()
    assert reader.grown == [before, partition.log.size_bytes - before]
    assert len(modest.grown) == 1


def test_a_reader_is_not_woken_by_what_it_may_not_see_yet(led: Led) -> None:
    partition = led.lead(durability="disk")
    led.disk.hold_syncs()
    reader = Reader()
    partition.wait_for_data(reader)
    led.produce(partition)
    led.clock.run_soon()
    assert reader.grown == []
    led.disk.release_syncs()
    led.clock.run_soon()
    assert reader.answered


def test_readers_that_are_answered_elsewhere_do_not_pile_up(led: Led) -> None:
    partition = led.lead()
    for _ in range(10_000):
        reader = Reader()
        partition.wait_for_data(reader)
        reader.answered = True
    assert len(partition._waiting_fetches) < 100


def test_a_log_that_is_led_again_counts_what_it_holds(led: Led) -> None:
    partition = led.lead()
    led.produce(partition, b"a", b"b")
    led.partitions.drop(partition.topic_partition)
    again = led.partitions.lead(partition.log, 4, {1: ""})
    assert again.core is not None
    assert (again.high_watermark, again.epoch, again.core.epoch_start) == (2, 4, 2)
    assert list(led.partitions) == [again]
    assert led.partitions.find("orders", 0) is again
