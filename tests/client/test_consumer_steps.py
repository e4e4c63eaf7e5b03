"""The consumer's pure steps: what is asked for next, how far a record set reaches, what may be saved, who is first."""

from __future__ import annotations

import random
import struct

import pytest

from headrace.client.consumer.cursor import (
    REPLICA_KEPT_S,
    CompletedFetch,
    Cursor,
    InFlight,
    fetchable,
    next_time,
)
from headrace.client.consumer.priority import RECORDS_MAX, Contiguous, PriorityOrder, priority_of
from headrace.client.fetch_requests import extent
from headrace.errors import CorruptBatch, InvalidRecord
from headrace.records import kernel
from headrace.records.consumer_records import ReceivedRecord
from headrace.records.record import NewRecord
from proving import proves

NOW_MS = 1_700_000_000_000


def batch(first: int, count: int, epoch: int = 3) -> bytes:
    records: list[NewRecord] = [(NOW_MS, None, b"v", []) for _ in range(count)]
    return bytes(kernel.build(records, base_offset=first, leader_epoch=epoch))


def cursor(partition: int = 0, offset: int = 0) -> Cursor:
    made = Cursor("t", partition, 1000)
    made.seek(offset)
    return made


def completed(of: Cursor, first: int, end: int) -> CompletedFetch:
    return CompletedFetch(of, of.version, memoryview(bytes(10)), first, end)


class TestExtent:
    def test_whole_batches_reach_to_their_end(self) -> None:
        view = memoryview(batch(10, 5, epoch=1) + batch(15, 2, epoch=4))
        assert extent(view, 12, "t-0") == (17, len(view), 0, 4)

    def test_a_cut_batch_is_left_out_and_its_size_told(self) -> None:
        first, second = batch(0, 5), batch(5, 100)
        view = memoryview(first + second[:-1])
        assert extent(view, 0, "t-0") == (5, len(first), len(second), 3)
        assert extent(memoryview(second[:70]), 5, "t-0") == (5, 0, len(second), -1)
        assert extent(memoryview(second[:20]), 5, "t-0") == (5, 0, 20, -1)

    def test_nothing_reaches_nowhere(self) -> None:
        assert extent(memoryview(b""), 7, "t-0") == (7, 0, 0, -1)

    def test_a_malformed_batch_ends_the_set_and_is_told_when_it_is_the_first(self) -> None:
        good, bad = batch(0, 5), bytearray(batch(5, 5))
        struct.pack_into(">i", bad, 8, 3)
        assert extent(memoryview(good + bad), 0, "t-0").next_offset == 5
        with pytest.raises(CorruptBatch, match="t-0 at offset 5 or after: a batch gives its length as 3"):
            extent(memoryview(bad), 5, "t-0")

    def test_a_set_that_ends_before_what_was_asked_for_is_refused(self) -> None:
        with pytest.raises(CorruptBatch, match="t-0 at offset 9: the last batch of the answer ends before, at 4"):
            extent(memoryview(batch(0, 5)), 9, "t-0")

    def test_an_old_format_is_refused_by_name(self) -> None:
        old = bytearray(batch(0, 5))
        old[16] = 1
        with pytest.raises(InvalidRecord, match="t-0 at offset 0 or after: message format v1"):
            extent(memoryview(old), 0, "t-0")


class TestContiguous:
    def test_a_gap_holds_the_position(self) -> None:
        progress = Contiguous(5)
        progress.expect([5, 6, 7, 9], 12)
        for offset, position in ((7, 5), (5, 6), (6, 9), (9, 12)):
            progress.done(offset)
            assert progress.position == position
        assert progress.waiting == 0

    def test_offsets_without_records_are_passed_over_once_more_is_known(self) -> None:
        progress = Contiguous(0)
        progress.expect([], 4)
        assert progress.position == 4
        progress.expect([6], 8)
        assert progress.position == 6

    def test_any_order_ends_at_the_end_and_never_passes_what_is_not_done(self) -> None:
        chance = random.Random(7)
        for _ in range(50):
            offsets = sorted(chance.sample(range(200), 60))
            progress = Contiguous(0)
            progress.expect(offsets[:30], offsets[30])
            progress.expect(offsets[30:], 200)
            left = set(offsets)
            for offset in chance.sample(offsets, len(offsets)):
                left.remove(offset)
                progress.done(offset)
                assert progress.position == min(left, default=200)


class TestFeeds:
    def test_partitions_are_grouped_by_leader_and_busy_brokers_left_alone(self) -> None:
        cursors = [cursor(n) for n in range(6)]
        leaders = {0: 1, 1: 2, 2: 1, 3: 3, 4: None, 5: 2}
        found, lost = fetchable(cursors, lambda each: leaders[each.partition], {3}.__contains__, 0.0)
        assert found == {1: [cursors[0], cursors[2]], 2: [cursors[1], cursors[5]]}
        assert lost == [cursors[4]]

    def test_who_is_paused_asked_failed_or_without_an_offset_is_not_asked_for(self) -> None:
        cursors = [cursor(n) for n in range(5)]
        cursors[0].paused = True
        cursors[1].in_flight = InFlight(1, 0)
        cursors[2].failure = CorruptBatch("damaged")
        cursors[3].seek_moment(-2)
        assert fetchable(cursors, lambda _: 1, lambda _: False, 0.0) == ({1: [cursors[4]]}, [])

    def test_a_pause_doubles_up_to_its_limit_and_ends_with_a_success(self) -> None:
        one, now = cursor(), 100.0
        pauses = []
        for _ in range(10):
            one.back_off(now)
            pauses.append(round(one.not_before - now, 3))
        assert pauses[:4] == [0.02, 0.04, 0.08, 0.16]
        assert pauses[-1] == 1.0
        assert fetchable([one], lambda _: 1, lambda _: False, now) == ({}, [])
        assert next_time([one], now) == one.not_before
        one.succeed()
        assert fetchable([one], lambda _: 1, lambda _: False, now) == ({1: [one]}, [])
        assert next_time([one], now) is None

    def test_a_named_follower_is_read_for_a_while(self) -> None:
        one = cursor()
        one.prefer(7, now=10.0)
        assert fetchable([one], lambda _: 1, lambda _: False, 11.0)[0] == {7: [one]}
        assert fetchable([one], lambda _: 1, lambda _: False, 10.0 + REPLICA_KEPT_S)[0] == {1: [one]}

    def test_a_seek_ends_what_was_asked_and_what_is_buffered_and_heals(self) -> None:
        one = cursor(offset=5)
        kept = completed(one, 5, 9)
        one.in_flight, one.failure, one.epoch = InFlight(1, 9), CorruptBatch("damaged"), 4
        one.seek(2)
        assert not kept.counts
        assert (one.offset, one.position, one.done, one.epoch) == (2, 2, 2, -1)
        assert one.is_fetchable(0.0)


def received(partition: int, offset: int, priority: bytes | None = None) -> ReceivedRecord:
    headers = [] if priority is None else [("priority", priority)]
    return ReceivedRecord("t", partition, offset, NOW_MS, None, b"", headers)


@proves("J10")
class TestPriority:
    def test_the_header_is_a_number_or_counts_as_none(self) -> None:
        given = [(b"7", 7), (b"-2", -2), (b"high", 0), (b"", 0), (None, 0)]
        assert [priority_of([("priority", value)], "priority") for value, _ in given] == [n for _, n in given]
        assert priority_of([("other", b"9")], "priority") == 0
        assert priority_of([("priority", b"1"), ("priority", b"5")], "priority") == 5

    def test_higher_numbers_first_and_the_order_within_a_priority_and_partition_kept(self) -> None:
        order, one, two = PriorityOrder("priority"), cursor(0), cursor(1)
        order.put(completed(one, 0, 5), [received(0, n, b"%d" % (n % 2)) for n in range(5)])
        order.put(completed(two, 0, 3), [received(1, n, b"%d" % (9 if n == 2 else 0)) for n in range(3)])
        taken: list[ReceivedRecord] = []
        order.take(taken, 100)
        assert [(record.partition, record.offset) for record in taken] == [
            (1, 2), (0, 1), (0, 3), (0, 0), (0, 2), (0, 4), (1, 0), (1, 1),
        ]  # fmt: skip

    def test_progress_is_what_was_handed_out_without_a_gap(self) -> None:
        order, one = PriorityOrder("priority"), cursor(0)
        order.put(completed(one, 0, 6), [received(0, n, b"1" if n in (1, 4) else None) for n in (0, 1, 3, 4)])
        positions = []
        for _ in range(4):
            order.take([], 1)
            positions.append(one.position)
        assert positions == [0, 0, 3, 6]

    def test_the_bytes_of_a_set_are_free_when_its_last_record_went(self) -> None:
        order, one = PriorityOrder("priority"), cursor(0)
        order.put(completed(one, 0, 2), [received(0, 0), received(0, 1, b"1")])
        order.take([], 1)
        assert order.freed_bytes == 0
        order.take([], 1)
        assert order.freed_bytes == 10
        order.put(completed(one, 2, 3), [])
        assert (order.freed_bytes, one.position) == (20, 3)

    def test_what_was_put_before_a_seek_is_not_handed_out(self) -> None:
        order, one = PriorityOrder("priority"), cursor(0)
        order.put(completed(one, 0, 2), [received(0, 0), received(0, 1, b"1")])
        one.seek(1)
        order.put(completed(one, 1, 2), [received(0, 1, b"1")])
        taken: list[ReceivedRecord] = []
        order.take(taken, 10)
        assert [record.offset for record in taken] == [1]
        assert one.position == 2
        assert order.count == 0

    def test_so_many_records_may_wait(self) -> None:
        order, one = PriorityOrder("priority"), cursor(0)
        order.put(completed(one, 0, RECORDS_MAX), [received(0, n) for n in range(RECORDS_MAX)])
        assert not order.has_room
        order.take([], 1)
        assert order.has_room

    def test_what_is_set_aside_leaves_room_for_others_and_is_bounded_itself(self) -> None:
        order, cursors = PriorityOrder("priority", 100_000), [cursor(n) for n in range(100)]
        held_bytes = 0
        for nth, one in enumerate(cursors):
            assert order.has_room, "whatever is aside"
            while order.has_room:
                at = max(one.offset, 0)
                order.put(completed(one, at, at + 1), [ReceivedRecord("t", nth, at, NOW_MS, None, bytes(100))], 100)
                one.offset = at + 1
                held_bytes += 100
            one.paused = True
            order.set_aside()
            assert order.count == 0
        assert 100_000 <= held_bytes <= 6 * 100_000
        for one in cursors:
            one.seek(0)
        order.bring_back()
        assert order.room_bytes == 100_000

    def test_so_many_bytes_may_wait_however_small_their_sets_were(self) -> None:
        order, one, two = PriorityOrder("priority", 1_000), cursor(0), cursor(1)
        large = [ReceivedRecord("t", 0, n, NOW_MS, None, bytes(400)) for n in range(3)]
        order.put(completed(one, 0, 2), large[:2], 800)
        assert (order.has_room, order.room_bytes) == (True, 200)
        order.put(completed(two, 0, 1), large[:1], 400)
        assert not order.has_room
        one.paused = True
        order.set_aside()
        assert order.has_room
        one.paused = False
        order.bring_back()
        assert not order.has_room
        order.take([], 2)
        assert order.has_room
        order.clear()
        order.put(completed(one, 2, 3), large[:2], 800)
        assert order.has_room
