"""What every layout of logs must do, told only in the words of `storage.log`; a layout's test class inherits it.

Nothing here knows of segments or files, so a second layout passes it unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.errors import CorruptBatch, FencedEpoch, OffsetOutOfRange, UnknownPartition
from headrace.records import kernel
from headrace.records.batch import BatchHeader, read_header, stamp
from headrace.storage.log import EpochEnd, TimedOffset, TopicPartition
from proving import proves
from storage.harness import Harness, append, batch, content, read_all, values

SMALL = {"segment_bytes": 2000, "index_interval_bytes": 200}


def least_starts(headers: Sequence[BatchHeader]) -> list[tuple[int, int]]:
    """Where epochs begin at the earliest, as these batches tell, which are all that a log from 0 on has."""
    found: dict[int, int] = {}
    end = 0
    for header in headers:
        found.setdefault(header.leader_epoch, end)
        end = header.next_offset
    return list(found.items())


class LogContract:
    @proves("G8")
    def test_offsets_are_dense_and_reads_give_back_what_was_appended(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        bases = [append(log, batch(b"a%d" % i, b"b%d" % i)) for i in range(100)]
        assert bases == list(range(0, 200, 2))
        assert not harness.write()
        assert log.written_offset == log.end_offset == 200
        assert values(log) == [value for i in range(100) for value in (b"a%d" % i, b"b%d" % i)]

    def test_a_staged_batch_has_its_offset_but_cannot_be_read_before_it_is_written(self, harness: Harness) -> None:
        log = harness.log()
        append(log, batch())
        assert (log.end_offset, log.written_offset) == (1, 0)
        assert log.read(0, 1000, log.end_offset).count == 0
        harness.write()
        assert log.read(0, 1000, log.end_offset).count > 0

    def test_base_offset_and_epoch_are_stamped_into_the_batch(self, harness: Harness) -> None:
        log = harness.log()
        append(log, batch(), epoch=3)
        append(log, batch(), epoch=4)
        harness.write()
        assert [(h.base_offset, h.leader_epoch) for h, _ in read_all(log)] == [(0, 3), (1, 4)]

    @proves("G12")
    def test_a_read_may_begin_at_any_offset(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(60):
            append(log, batch(b"%d" % i, b"+"))
            harness.write()
        for offset in range(120):
            first = read_header(content(log.read(offset, 1, log.end_offset)))
            assert first.base_offset <= offset <= first.last_offset

    @pytest.mark.parametrize("max_bytes", [1, 100, 333, 1000, 1 << 20])
    def test_reads_of_any_size_make_progress_and_lose_nothing(self, harness: Harness, max_bytes: int) -> None:
        log = harness.log(**SMALL)
        for i in range(100):
            append(log, batch(b"x" * (i * 7 % 90)))
        harness.write()
        assert [header.base_offset for header, _ in read_all(log, max_bytes)] == list(range(100))

    def test_the_first_batch_is_whole_even_if_it_is_larger_than_asked_for(self, harness: Harness) -> None:
        log = harness.log()
        append(log, batch(b"x" * 5000))
        append(log, batch(b"y"))
        harness.write()
        assert log.read(0, 10, 2).count >= read_header(content(log.read(0, 10, 2))).size_bytes

    def test_a_read_stops_at_its_limit(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(50):
            append(log, batch(b"%d" % i))
        harness.write()
        for limit in range(51):
            found = content(log.read(0, 1 << 20, limit))
            assert [r.offset for view in _split(found) for r in kernel.records(view)] == list(range(limit))

    def test_offsets_outside_the_log_are_refused_and_its_end_is_empty(self, harness: Harness) -> None:
        log = harness.log()
        append(log, batch())
        harness.write()
        assert log.read(1, 100, 1).count == 0
        with pytest.raises(OffsetOutOfRange, match="offset 2 is not in the log, which holds 0 to 0"):
            log.read(2, 100, 2)

    @proves("J6")
    def test_a_clean_stop_and_start_change_nothing(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(77):
            append(log, batch(b"%d" % i), epoch=i // 30)
        harness.write()
        before, size = values(log), log.size_bytes
        log = harness.reopen()
        assert (log.end_offset, log.durable_offset, log.size_bytes, log.last_epoch()) == (77, 77, size, 2)
        assert values(log) == before
        assert append(log, batch(b"next"), epoch=2) == 77

    @proves("J6")
    def test_after_a_kill_everything_written_is_there(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(77):
            append(log, batch(b"%d" % i), epoch=i // 30)
            harness.write()
        before = values(log)
        log = harness.kill()
        assert values(log) == before
        assert log.epoch_end(1) == EpochEnd(1, 60)

    def test_truncation_drops_the_offset_and_all_behind_it(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(100):
            append(log, batch(b"%d" % i), epoch=i // 40)
        harness.write()
        log.truncate(47)
        assert (log.end_offset, log.written_offset, log.last_epoch()) == (47, 47, 1)
        assert values(log) == [b"%d" % i for i in range(47)]
        log.truncate(33)
        assert log.last_epoch() == 0
        assert append(log, batch(b"new"), epoch=5) == 33
        harness.write()
        assert values(harness.kill()) == [*(b"%d" % i for i in range(33)), b"new"]

    def test_a_batch_that_spans_the_truncation_goes_whole(self, harness: Harness) -> None:
        log = harness.log()
        append(log, batch(b"0", b"1"))
        append(log, batch(b"2", b"3", b"4"))
        harness.write()
        log.truncate(3)
        assert log.end_offset == 2
        assert values(log) == [b"0", b"1"]

    def test_what_is_deleted_before_an_offset_stays_deleted(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(100):
            append(log, batch(b"%d" % i))
        harness.write()
        size = log.size_bytes
        log.delete_before(55)
        harness.settle()
        assert log.start_offset == 55
        assert log.size_bytes < size
        with pytest.raises(OffsetOutOfRange):
            log.read(54, 100, 100)
        assert read_header(content(log.read(55, 100, 100))).base_offset == 55
        log = harness.kill()
        assert log.start_offset == 55
        assert harness.reopen().start_offset == 55

    def test_a_restarted_log_begins_at_its_new_offset(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(60):
            append(log, batch(b"%d" % i))
        harness.write()
        log.restart_at(1000)
        assert (log.start_offset, log.end_offset, log.size_bytes) == (1000, 1000, 0)
        assert append(log, batch(b"new")) == 1000
        harness.write()
        harness.settle()
        log = harness.kill()
        assert (log.start_offset, values(log)) == (1000, [b"new"])

    def test_copied_batches_keep_their_offsets_and_epochs(self, harness: Harness) -> None:
        leader = harness.log()
        for i in range(10):
            append(leader, batch(b"%d" % i), epoch=i // 5)
        harness.write()
        follower = harness.log(TopicPartition("orders", 1))
        for _, view in read_all(leader):
            follower.append_copied(memoryview(view))
        harness.write()
        assert read_all(follower) == read_all(leader)
        assert follower.epoch_end(0) == EpochEnd(0, 5)
        with pytest.raises(OffsetOutOfRange, match="cannot follow"):
            follower.append_copied(batch())

    @proves("F7")
    def test_batches_with_gaps_are_kept_byte_for_byte(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        copied = [
            placed(base, b"a%d" % base, b"b" * (base % 50), epoch=base // 300) for base in range(5, 900, 7) if base % 3
        ]
        at = 0
        for size in (1, 2, 30, 1, 200):
            data = b"".join(bytes(view) for view in copied[at : at + size])
            if data:
                end = log.append_copied(memoryview(data))
                assert not harness.write()
                at = min(at + size, len(copied))
                assert end == log.end_offset == read_header(copied[at - 1]).next_offset
        whole = b"".join(bytes(view) for view in copied)
        headers = [read_header(view) for view in copied]
        for again in (harness.log, harness.reopen, harness.kill, harness.reopen):
            log = again()
            assert b"".join(view for _, view in read_all(log)) == whole
            assert log.end_offset == headers[-1].next_offset
            for offset in range(0, headers[-1].next_offset, 11):
                due = next(header for header in headers if header.last_offset >= offset)
                assert read_header(content(log.read(offset, 1, log.end_offset))).base_offset == due.base_offset
            assert log.epoch_starts() == least_starts(headers)
        base = append(log, batch(b"as leader"), epoch=5)
        harness.write()
        assert base == headers[-1].next_offset
        assert values(harness.kill())[-1] == b"as leader"

    @proves("F7")
    def test_copied_epochs_begin_where_the_leader_says(self, harness: Harness) -> None:
        """Of epochs 1 and 3 later batches are left, of epoch 2 none."""
        told = [(0, 0), (1, 10), (2, 20), (3, 30)]
        log = harness.log(durability="disk")
        log.append_copied(memoryview(bytes(placed(4, b"a")) + bytes(placed(17, b"b", epoch=1))), told[:2])
        assert not harness.write()
        log.append_copied(placed(41, b"c", epoch=3), told[2:])
        assert not harness.write()
        log.append_copied(placed(42, b"d", epoch=3), told)
        assert not harness.write()
        harness.settle()
        for again in (harness.log, harness.reopen, harness.kill):
            log = again()
            assert log.epoch_starts() == told
            assert [header.base_offset for header, _ in read_all(log)] == [4, 17, 41, 42]
        end = log.epoch_end(2)
        assert end is not None
        assert (end.epoch, end.end_offset) == (2, 30)
        log.truncate(41)
        assert [epoch for epoch, start in told if start < log.end_offset] == [epoch for epoch, _ in log.epoch_starts()]

    def test_epochs_that_the_leader_tells_never_reach_into_what_is_there(self, harness: Harness) -> None:
        log = harness.log()
        log.append_copied(placed(4, b"a", b"b"))
        log.append_copied(placed(9, b"c", epoch=2), [(1, 3), (2, 12)])
        assert not harness.write()
        assert log.epoch_starts() == [(0, 0), (1, 6), (2, 9)]
        assert len(read_all(log)) == 2

    def test_a_log_begun_anew_takes_over_the_epochs_from_below_its_start(self, harness: Harness) -> None:
        log = harness.log()
        append(log, batch(b"old"), epoch=8)
        harness.write()
        log.restart_at(50)
        log.append_copied(placed(61, b"c", epoch=2), [(0, 0), (1, 10), (2, 40)])
        harness.write()
        assert log.epoch_starts() == [(0, 0), (1, 10), (2, 40)]
        assert log.epoch_end(0) is None
        assert log.epoch_end(1) is None

    def test_a_log_with_gaps_is_cut_at_and_between_its_batches(self, harness: Harness) -> None:
        bases = range(5, 400, 9)
        for offset in (5, 7, 10, 100, 203, 204, 390):
            log = harness.log(TopicPartition("cut", offset), **SMALL)
            log.append_copied(memoryview(b"".join(bytes(placed(base, b"one", b"two")) for base in bases)))
            harness.write()
            log.truncate(offset)
            kept = [base for base in bases if base + 2 <= offset]
            assert [header.base_offset for header, _ in log.headers(0)] == kept
            assert log.end_offset <= offset
            log.append_copied(placed(offset + 3, b"new"))
            harness.write()
            harness.kill()
            log = harness.log(TopicPartition("cut", offset))
            assert [header.base_offset for header, _ in log.headers(0)] == [*kept, offset + 3]
            assert log.read(0, 1 << 20, log.end_offset).count

    def test_what_a_leader_cannot_have_sent_is_refused_whole(self, harness: Harness) -> None:
        log = harness.log()
        log.append_copied(placed(3, b"x", epoch=4))
        harness.write()
        good = bytes(placed(10, b"y", epoch=4))
        broken = bytearray(placed(20, b"z", epoch=4))
        broken[-1] ^= 1
        for data, error in (
            (good + bytes(broken), CorruptBatch),
            (good + good, OffsetOutOfRange),
            (good + bytes(placed(20, b"z", epoch=3)), FencedEpoch),
            (good + good[:30], CorruptBatch),
            (bytes(placed(3, b"x", epoch=4)), OffsetOutOfRange),
        ):
            with pytest.raises(error):
                log.append_copied(memoryview(data))
            assert log.end_offset == 4
        assert not harness.write()
        assert [header.base_offset for header, _ in read_all(log)] == [3]

    @proves("F6")
    def test_a_log_begun_anew_takes_the_batch_that_spans_its_start(self, harness: Harness) -> None:
        log = harness.log()
        for n in range(5):
            append(log, batch(b"%d" % n), epoch=8)
        harness.write()
        log.restart_at(103)
        log.append_copied(placed(101, b"1", b"2", b"3", b"4", epoch=2))
        harness.write()
        assert (log.start_offset, log.end_offset, log.epoch_starts()) == (103, 105, [(2, 101)])
        assert read_header(content(log.read(103, 1, 105))).base_offset == 101
        harness.settle()
        harness.advance(61)
        log = harness.kill()
        assert (log.start_offset, log.end_offset, log.epoch_starts()) == (103, 105, [(2, 101)])

    def test_a_replica_reads_what_is_not_committed(self, harness: Harness) -> None:
        harness.commits = False
        log = harness.log()
        append(log, batch(b"x"))
        harness.write()
        assert log.committed_offset == 0
        assert log.read(0, 1000, log.end_offset).count > 0

    def test_a_truncation_takes_back_what_is_committed(self, harness: Harness) -> None:
        log = harness.log()
        for n in range(5):
            append(log, batch(b"%d" % n))
        harness.write()
        assert log.committed_offset == 5
        log.truncate(2)
        assert log.committed_offset == 2

    def test_epochs_end_where_the_next_begins(self, harness: Harness) -> None:
        log = harness.log()
        assert (log.last_epoch(), log.epoch_end(0)) == (-1, None)
        for epoch in (1, 1, 3, 7):
            append(log, batch(), epoch)
        harness.write()
        ends = [log.epoch_end(epoch) for epoch in range(9)]
        assert ends[0] is None
        assert ends[1:] == [EpochEnd(1, 2)] * 2 + [EpochEnd(3, 3)] * 4 + [EpochEnd(7, 4)] * 2

    def test_the_first_record_at_or_after_a_time_is_found(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        times = [1000 + (i * 37 % 11) * 10 + i * 5 for i in range(80)]
        for time_ms in times:
            append(log, batch(b"x", b"y", b"z", timestamp_ms=time_ms))
        harness.write()
        records = [(i * 3 + nth, time_ms + nth) for i, time_ms in enumerate(times) for nth in range(3)]
        for asked_ms in range(990, 1520, 7):
            right = next((TimedOffset(*record) for record in records if record[1] >= asked_ms), None)
            assert log.offset_for_time(asked_ms) == right
        greatest_ms = max(time_ms for _, time_ms in records)
        first = next(offset for offset, time_ms in records if time_ms == greatest_ms)
        assert log.greatest_timestamp() == TimedOffset(first, greatest_ms)

    def test_headers_run_over_every_batch(self, harness: Harness) -> None:
        log = harness.log(**SMALL)
        for i in range(40):
            append(log, batch(b"%d" % i, b"."))
        harness.write()
        found = [(header.base_offset, len(part)) for header, part in log.headers(31)]
        assert [base for base, _ in found] == list(range(30, 80, 2))
        assert all(count == header.size_bytes for (_, count), (header, _) in zip(found, log.headers(31), strict=True))

    def test_logs_are_listed_found_and_deleted(self, harness: Harness) -> None:
        harness.log()
        other = harness.log(TopicPartition("payments", 3))
        append(other, batch())
        store = harness.store
        assert store is not None
        harness.write()
        assert {str(log.topic_partition) for log in store.logs()} == {"orders-0", "payments-3"}
        store.delete(other.topic_partition)
        assert store.get(other.topic_partition) is None
        again = store.create(other.topic_partition, b"\x09" * 16, other.settings)
        assert again.end_offset == 0
        with pytest.raises(UnknownPartition, match="payments-3 was deleted"):
            append(other, batch())
        harness.advance(70)
        assert store.get(other.topic_partition) is again

    @proves("L4")
    def test_durable_offset_rises_with_the_sync_under_disk(self, harness: Harness) -> None:
        log = harness.log(durability="disk")
        append(log, batch())
        harness.write()
        harness.settle()
        assert log.durable_offset == 1
        assert harness.events[-1] == (log.topic_partition, 1)

    @proves("L4", "R5")
    def test_durable_offset_rises_with_the_interval_under_os(self, harness: Harness) -> None:
        log = harness.log(durability="os", flush_ms=500)
        append(log, batch())
        harness.write()
        harness.advance(0.499)
        assert log.durable_offset == 0
        harness.advance(0.001)
        assert log.durable_offset == 1

    @proves("L4", "R5")
    def test_nothing_is_synced_under_memory(self, harness: Harness) -> None:
        log = harness.log(durability="memory")
        append(log, batch())
        harness.write()
        assert log.written_offset == 1
        harness.advance(3600)
        assert log.durable_offset == 0
        assert harness.reopen().durable_offset == 1

    @proves("J6")
    @pytest.mark.parametrize("durability", ["memory", "os"])
    def test_a_log_is_synced_after_so_many_records(self, harness: Harness, durability: str) -> None:
        log = harness.log(durability=durability, flush_messages=5)
        for i in range(1, 5):
            append(log, batch())
            harness.write()
            harness.settle()
            assert log.durable_offset == 0, i
        append(log, batch())
        harness.write()
        harness.settle()
        assert log.durable_offset == 5


def placed(base_offset: int, *values: bytes, epoch: int = 0) -> memoryview:
    """A batch as a leader has it."""
    view = batch(*values)
    stamp(view, base_offset, epoch)
    return view


def _split(found: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(found):
        size = read_header(found, at).size_bytes
        parts.append(found[at : at + size])
        at += size
    return parts
