"""What a leader decides for a follower, one decision at a time."""

from __future__ import annotations

import pytest

from headrace.errors import CorruptBatch, StorageFailed
from headrace.partitions.partition import Partition
from headrace.ports.disk import FileSlice
from headrace.replication import streams, subscriptions
from headrace.replication.frames import Answer, Reason, Reset, Start, Subscribe, Truncate
from headrace.replication.streams import Budget, Stream
from headrace.storage.log import Log, ReadResult
from replication.peer import at
from replication.scene import Broker, Scene

LAYOUTS = pytest.mark.parametrize("layout", ["partitioned", "shared"])


def put(broker: Broker, offset: int, epoch: int) -> None:
    broker.log().append_copied(memoryview(at(offset, epoch)))
    broker.store.write_staged()


def held(layout: str) -> Log:
    """Epochs 1, 3 and 5 from offsets 4, 6 and 8 on, up to 9."""
    broker = Scene(brokers=(1,), layout=layout).alive[1]
    log = broker.log()
    log.restart_at(4)
    for offset, epoch in ((4, 1), (5, 1), (6, 3), (7, 3), (8, 5)):
        put(broker, offset, epoch)
    return log


START, RESET = 0, -1


@LAYOUTS
@pytest.mark.parametrize(
    ("last_epoch", "end", "told"),
    [
        (-1, 3, RESET), (-1, 4, START), (-1, 9, START), (-1, 10, RESET),  # it holds nothing
        (0, 3, RESET), (0, 4, RESET), (0, 5, RESET), (0, 9, RESET),  # of an epoch that is forgotten here
        (1, 3, RESET), (1, 4, START), (1, 5, START), (1, 6, START), (1, 7, (1, 6)), (1, 9, (1, 6)),
        (2, 5, (1, 6)), (2, 8, (1, 6)),  # of an epoch that was never here
        (3, 7, START), (3, 8, START), (3, 9, (3, 8)),
        (5, 9, START), (5, 10, (5, 9)), (6, 9, (5, 9)),
    ],
)  # fmt: skip
def test_a_follower_begins_where_both_logs_are_the_same(
    layout: str, last_epoch: int, end: int, told: int | tuple[int, int]
) -> None:
    asked = Subscribe(7, bytes(16), 0, 6, last_epoch, end, end)
    expected: Answer = Reset(7, 6, 4) if told == RESET else Start(7, 6, end, 8, 4)
    if isinstance(told, tuple):
        expected = Truncate(7, 6, *told)
    assert subscriptions.answer(asked, held(layout), 8) == expected


def led() -> tuple[Scene, Partition]:
    """Two members and a third replica; three records, of which nothing is committed yet."""
    scene = Scene()
    partition = scene.elect(1, (1, 2))
    for value in (b"a", b"b", b"c"):
        scene.produce(value, acks=1)
    return scene, partition


def asking(end: int, held_to: int | None = None, epoch: int = 0) -> Subscribe:
    return Subscribe(7, bytes(16), 0, epoch, 0, end, end if held_to is None else held_to)


def refused(partition: Partition | None, broker: int = 2, epoch: int = 0) -> Reason | None:
    stop = subscriptions.refusal(asking(0, epoch=epoch), partition, broker)
    return None if stop is None else Reason(stop.reason)


def test_only_a_replica_in_the_leaders_own_epoch_is_served() -> None:
    scene, partition = led()
    assert refused(None) is Reason.NOT_LEADER
    assert refused(partition) is None
    assert refused(partition, 3) is None
    assert refused(partition, epoch=1) is Reason.NEW_EPOCH
    assert refused(partition, epoch=-1) is Reason.OLD_EPOCH
    assert refused(partition, broker=4) is Reason.NOT_REPLICA
    assert refused(scene.alive[2].partition(), 3) is Reason.NOT_LEADER
    partition.log.offline = StorageFailed("the disk is broken")
    assert refused(partition) is Reason.UNREADABLE


def must_leave(partition: Partition, asked: Subscribe, broker: int, incarnation: str) -> bool:
    assert partition.core is not None
    stop = subscriptions.must_leave_first(asked, partition.core, broker, incarnation)
    assert stop is None or stop.reason == Reason.IN_SYNC
    return stop is not None


def test_a_member_that_holds_less_than_what_is_committed_leaves_first() -> None:
    _, partition = led()
    core = partition.core
    assert core is not None
    core.high_watermark, core.epoch_start = 2, 3
    run = core.isr[2]
    assert must_leave(partition, asking(1), 2, run)
    assert not must_leave(partition, asking(2), 2, run)
    assert not must_leave(partition, asking(1), 3, "run-3")
    # Another run than the member's could be taken for the member, but only if it held all before it cuts.
    assert not must_leave(partition, asking(1), 2, "another run")
    assert must_leave(partition, asking(2, 4), 2, "another run")
    assert must_leave(partition, asking(2, 4), 2, run)
    assert not must_leave(partition, asking(3, 4), 2, run)
    assert not must_leave(partition, asking(2, 4), 3, "run-3")


def stream_from(partition: Partition, offset: int, broker: int = 2) -> Stream:
    assert partition.core is not None
    run = partition.core.isr.get(broker, f"run-{broker}")
    follower = partition.core.subscribed(broker, run, offset, 0.0)
    return Stream(Start(7, 0, offset, 0, 0), broker, partition, partition.core, follower, -1)


def test_what_is_under_way_is_counted_until_it_has_arrived() -> None:
    _, partition = led()
    stream = stream_from(partition, 0)
    assert stream.has_more()
    for next_offset, count in ((1, 100), (2, 200), (3, 300)):
        stream.went(next_offset, count)
    assert (stream.sent, stream.follower.sent, stream.has_more()) == (3, 3, False)
    assert [stream.arrived(received) for received in (0, 1, 1)] == [0, 100, 0]
    assert stream.under_way_bytes == 500
    assert stream.arrived(3) == 500
    assert stream.arrived(3) == stream.under_way_bytes == 0


def test_a_stream_catches_up_until_it_has_had_all_and_only_a_member_is_not_held_back() -> None:
    _, partition = led()
    stream = stream_from(partition, 1, broker=3)
    stream.went(2, 100)
    assert stream.catching_up
    assert stream.is_throttled
    stream.went(3, 100)
    assert not stream.catching_up
    assert not stream.is_throttled
    assert not stream_from(partition, 3, broker=3).catching_up
    assert not stream_from(partition, 1, broker=2).is_throttled


def test_the_watermark_and_the_start_are_news_once() -> None:
    _, partition = led()
    stream = stream_from(partition, 0)
    assert stream.news() is None
    assert partition.core is not None
    partition.core.wanted_start = 1
    assert stream.news() == (partition.high_watermark, 1)
    assert stream.news() is None
    partition.high_watermark = 2
    assert stream.news() == (2, 1)
    assert stream.news() is None


def test_epochs_are_told_with_the_records_that_began_them() -> None:
    scene, _ = led()
    for _ in range(2):
        partition = scene.elect(1, (1, 2))
        scene.produce(b"more", acks=1)
    assert partition.log.epoch_starts() == [(0, 0), (1, 3), (2, 4)]
    stream = stream_from(partition, 0)
    assert list(stream.epochs_before(3)) == [(0, 0)]
    assert list(stream.epochs_before(4)) == [(1, 3)]
    assert list(stream.epochs_before(4)) == []
    assert list(stream.epochs_before(5)) == [(2, 4)]
    assert list(stream.epochs_before(5)) == []


def test_a_budget_saves_up_one_second() -> None:
    budget = Budget(100, 5.0)
    assert not budget.is_spent
    budget.spend(100)
    assert budget.is_spent
    budget.refill(5.5)
    budget.spend(49)
    assert not budget.is_spent
    budget.spend(1)
    assert budget.is_spent
    budget.refill(6.0)
    budget.refill(60.0)
    budget.spend(99)
    assert not budget.is_spent
    budget.spend(1)
    assert budget.is_spent
    budget.limit(100)
    assert budget.is_spent
    budget.limit(200)
    assert not budget.is_spent
    budget.limit(0)
    budget.spend(1)
    assert not budget.is_spent


def found(pieces: list[bytes]) -> ReadResult:
    """A read that gives these pieces of files."""
    disk = Scene(brokers=(1,)).disks[1]
    slices: list[FileSlice] = []
    for nth, piece in enumerate(pieces):
        file = disk.open(f"/piece-{nth}", create=True, writable=True)
        file.pwritev([b"before", piece, b"behind"], 0)
        slices.append(FileSlice(file, 6, len(piece)))
    return ReadResult(tuple(slices), sum(map(len, pieces)))


def sent(parts: list[object]) -> bytes:
    return b"".join(part.read() if isinstance(part, FileSlice) else bytes(part) for part in parts)  # type: ignore[call-overload]


@pytest.mark.parametrize("whole_bytes", [streams.READ_WHOLE_BYTES, 10])
def test_what_is_sent_of_a_read_is_its_whole_batches(whole_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_WHOLE_BYTES", whole_bytes)
    first, second, third = bytes(at(4)), bytes(at(7)), bytes(at(9))
    both = first + second
    for count in range(1, len(both) + 1):
        whole, expected = (first, 5) if count >= len(first) else (b"", -1)
        if count in (len(first), len(both)):  # nothing goes behind a batch that was cut
            whole, expected = both[:count] + third, 10
        parts, total, next_offset = streams.whole_batches(found([both[:count], third]))
        assert (sent(list(parts)), total, next_offset) == (whole, len(whole), expected)


@pytest.mark.parametrize("whole_bytes", [streams.READ_WHOLE_BYTES, 10])
@pytest.mark.parametrize("length", [0, -1])
def test_a_batch_without_a_length_is_damage(whole_bytes: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_WHOLE_BYTES", whole_bytes)
    wrong = at(0)
    wrong[8:12] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(CorruptBatch):
        streams.whole_batches(found([bytes(at(0)), bytes(wrong)]))


@pytest.mark.parametrize(
    ("last_epoch", "from_offset", "is_anew"), [(-1, 4, True), (-1, 0, False), (0, 4, False), (3, 4, False)]
)
def test_a_follower_that_holds_nothing_is_told_of_what_was_before_if_there_was_something(
    last_epoch: int, from_offset: int, is_anew: bool
) -> None:
    asked = Subscribe(1, bytes(16), 0, 0, last_epoch, from_offset, from_offset)
    assert subscriptions.begins_anew(asked, Start(1, 0, from_offset, 0, 0)) is is_anew
