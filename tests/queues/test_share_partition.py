"""One share partition: its rules one by one, and any history of it against a naive model."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ErrorCode
from headrace.queues import state_changes
from headrace.queues.messages import (
    IN_FLIGHT_MAX,
    AcknowledgementBatch,
    AcknowledgeType,
    AcquiredRecords,
    DeliveryState,
    Letter,
    Reason,
    ShareGroupConfig,
    ShareState,
    StateBatch,
)
from headrace.queues.share_partition import NEVER_MS, FoundBatch, SharePartition
from headrace.queues.state_changes import Change
from headrace.queues.state_records import NO_LOAD, Kept
from hypotheses import examples
from queues.naive_share_partition import NaiveKeeper, NaiveSharePartition, Offset

ACCEPT = (AcknowledgeType.ACCEPT,)
RELEASE = (AcknowledgeType.RELEASE,)
UNTIL = 30_000


def share_partition(state: ShareState | None = None, **config: int) -> SharePartition:
    return SharePartition(state or ShareState(0, 7, 0), ShareGroupConfig(**config))  # type: ignore[arg-type]


def data(*ends: int, base: int = 0) -> list[FoundBatch]:
    """Batches that end here, one behind the other."""
    return [
        FoundBatch(first, last, True) for first, last in zip([base, *[end + 1 for end in ends]], ends, strict=False)
    ]


def acquire(
    partition: SharePartition, found: Sequence[FoundBatch], most: int = 500, member: str = "a", **options: bool
) -> list[AcquiredRecords]:
    return partition.acquire(member, partition.first_available(), found, most, UNTIL, **options)


def states(partition: SharePartition) -> list[tuple[int, int, DeliveryState, int]]:
    return [(each.first_offset, each.last_offset, each.state, each.delivery_count) for each in partition.batches()]


def test_batches_that_are_acquired_and_accepted_in_order_are_one_range_or_none() -> None:
    partition = share_partition()
    for base in range(0, 1000, 10):
        assert acquire(partition, data(base + 9, base=base)) == [(base, base + 9, 1)]
        assert len(states(partition)) == 1
        assert partition.acknowledge("a", [AcknowledgementBatch(base, base + 9, ACCEPT)], UNTIL) == ErrorCode.NONE
    assert (partition.start_offset, partition.next_offset, states(partition)) == (1000, 1000, [])
    assert partition.take_write() == ShareState(0, 7, 1000)
    assert partition.take_write() is None


def test_what_is_split_before_it_was_kept_is_kept_in_all_its_parts() -> None:
    partition = share_partition()
    acquire(partition, data(9))
    partition.acknowledge("a", [AcknowledgementBatch(3, 4, ACCEPT)], UNTIL)
    delta = partition.take_write()
    assert delta is not None
    assert [(each.first_offset, each.last_offset) for each in delta.batches] == [(0, 2), (3, 4), (5, 9)]


def test_a_batch_that_is_begun_is_taken_whole() -> None:
    partition = share_partition()
    assert acquire(partition, data(9, 19, 29), 12) == [(0, 19, 1)]


def test_a_record_limit_is_kept_to_the_record() -> None:
    partition = share_partition()
    assert acquire(partition, data(9, 19, 29), 12, record_limit=True) == [(0, 11, 1)]
    assert acquire(partition, data(19, 29, base=10), 3, record_limit=True) == [(12, 14, 1)]


def test_what_is_released_comes_first_and_counts_again() -> None:
    partition = share_partition()
    acquire(partition, data(9))
    partition.acknowledge("a", [AcknowledgementBatch(2, 3, RELEASE), AcknowledgementBatch(5, 5, ACCEPT)], UNTIL)
    assert partition.first_available() == 2
    assert acquire(partition, data(9, 14), member="b") == [(2, 3, 2), (10, 14, 1)]
    assert partition.counts.redelivered == 2


def test_markers_aborted_batches_and_what_compaction_took_are_archived_as_gaps() -> None:
    partition = share_partition()
    found = [FoundBatch(3, 5, True), FoundBatch(6, 6, False), FoundBatch(9, 9, True)]
    assert acquire(partition, found) == [(3, 5, 1), (9, 9, 1)]
    assert partition.start_offset == 3
    assert [each[2] for each in states(partition)] == [
        DeliveryState.ACQUIRED,
        DeliveryState.ARCHIVED,
        DeliveryState.ACQUIRED,
    ]
    assert partition.counts.archived[Reason.GAP] == 6


def test_nothing_of_an_acknowledgement_is_taken_if_one_record_is_not_acquired_by_the_member() -> None:
    partition = share_partition()
    acquire(partition, data(4))
    acquire(partition, data(9, base=5), member="b")
    before = states(partition)
    for wrong in ((5, 5), (4, 5), (0, 9), (10, 12)):
        said = [AcknowledgementBatch(0, 0, ACCEPT)] if wrong[0] else []
        fault = partition.acknowledge("a", [*said, AcknowledgementBatch(*wrong, ACCEPT)], UNTIL)
        assert fault == ErrorCode.INVALID_RECORD_STATE
    assert partition.acknowledge("a", [AcknowledgementBatch(5, 12, ACCEPT)], UNTIL) == ErrorCode.INVALID_REQUEST
    assert states(partition) == before


def test_acknowledgements_that_cannot_be_are_refused() -> None:
    partition = share_partition()
    acquire(partition, data(9))
    for wrong in (
        [AcknowledgementBatch(3, 2, ACCEPT)],
        [AcknowledgementBatch(-1, 2, ACCEPT)],
        [AcknowledgementBatch(0, 2, ())],
        [AcknowledgementBatch(0, 2, (1, 1))],
        [AcknowledgementBatch(0, 2, (5,))],
        [AcknowledgementBatch(0, 2, (-1,))],
        [AcknowledgementBatch(0, 2, ACCEPT), AcknowledgementBatch(2, 3, ACCEPT)],
        [AcknowledgementBatch(4, 5, ACCEPT), AcknowledgementBatch(0, 1, ACCEPT)],
    ):
        assert partition.acknowledge("a", wrong, UNTIL) == ErrorCode.INVALID_REQUEST
    assert states(partition) == [(0, 9, DeliveryState.ACQUIRED, 1)]


def test_what_lies_below_the_start_is_acknowledged_as_it_is() -> None:
    partition = share_partition()
    acquire(partition, data(9))
    first = [AcknowledgementBatch(0, 4, ACCEPT)]
    assert partition.acknowledge("a", first, UNTIL) == ErrorCode.NONE
    assert partition.acknowledge("a", first, UNTIL) == ErrorCode.NONE
    assert partition.acknowledge("a", [AcknowledgementBatch(0, 9, ACCEPT)], UNTIL) == ErrorCode.NONE
    assert partition.start_offset == 10


def test_a_lock_ends_with_its_time_unless_it_is_renewed() -> None:
    partition = share_partition()
    acquire(partition, data(9))
    partition.acknowledge("a", [AcknowledgementBatch(4, 5, (AcknowledgeType.RENEW,))], UNTIL + 500)
    assert partition.expire(UNTIL - 1) == 0
    assert partition.next_expiry_ms == UNTIL
    assert partition.expire(UNTIL) == 8
    assert partition.next_expiry_ms == UNTIL + 500
    assert partition.acknowledge("a", [AcknowledgementBatch(4, 5, ACCEPT)], UNTIL) == ErrorCode.NONE
    assert partition.next_expiry_ms == UNTIL + 500
    assert partition.expire(UNTIL + 500) == 0
    assert partition.next_expiry_ms == NEVER_MS


def test_a_record_is_archived_when_it_was_delivered_as_often_as_may_be_and_is_alone_the_last_time() -> None:
    partition = share_partition(delivery_count_limit=3)
    for count in (1, 2):
        assert acquire(partition, data(2)) == [(0, 2, count)]
        partition.expire(UNTIL)
    for offset in range(3):
        assert acquire(partition, data(2)) == [(offset, offset, 3)]
        partition.expire(UNTIL)
    assert partition.start_offset == 3
    assert partition.counts.archived[Reason.DELIVERIES] == 3


def test_what_a_member_had_at_the_end_of_its_session_was_not_delivered() -> None:
    partition = share_partition(delivery_count_limit=1)
    acquire(partition, data(4))
    acquire(partition, data(9, base=5), member="b")
    assert partition.release_member("a") == 5
    assert states(partition)[0] == (0, 4, DeliveryState.AVAILABLE, 0)
    assert acquire(partition, data(9), member="c") == [(0, 4, 1)]


def test_no_more_is_in_flight_than_may_be_but_for_the_rest_of_a_batch() -> None:
    partition = share_partition(record_locks_max=15)
    assert acquire(partition, data(9, 19, 29)) == [(0, 19, 1)]
    assert not partition.has_room
    assert acquire(partition, data(29, base=20)) == []
    partition.acknowledge("a", [AcknowledgementBatch(1, 19, ACCEPT)], UNTIL)
    assert acquire(partition, data(29, base=20)) == []
    partition.acknowledge("a", [AcknowledgementBatch(0, 0, ACCEPT)], UNTIL)
    assert acquire(partition, data(29, base=20), record_limit=True) == [(20, 29, 1)]
    assert acquire(partition, data(49, base=30), record_limit=True) == [(30, 34, 1)]


def test_what_is_in_flight_of_a_large_batch_can_be_kept_record_by_record() -> None:
    """Every second record is accepted, the others are released: each is a range of its own."""
    partition = share_partition()
    found = data(2 * IN_FLIGHT_MAX)
    assert acquire(partition, found) == [(0, IN_FLIGHT_MAX - 1, 1)]
    types = (AcknowledgeType.RELEASE, AcknowledgeType.ACCEPT) * (IN_FLIGHT_MAX // 2)
    assert partition.acknowledge("a", [AcknowledgementBatch(0, IN_FLIGHT_MAX - 1, types)], UNTIL) == ErrorCode.NONE
    assert len(states(partition)) == IN_FLIGHT_MAX
    delta = partition.take_write()
    assert delta is not None
    assert isinstance(state_changes.write(Kept(ShareState(0, 7, 0)), delta, NO_LOAD), Change)
    again = acquire(partition, found, most=IN_FLIGHT_MAX)
    assert again == [(record, record, 2) for record in range(0, IN_FLIGHT_MAX, 2)]
    accepted = [AcknowledgementBatch(first, last, ACCEPT) for first, last, _ in again]
    assert partition.acknowledge("a", accepted, UNTIL) == ErrorCode.NONE
    assert acquire(partition, found) == [(IN_FLIGHT_MAX, 2 * IN_FLIGHT_MAX - 1, 1)]


def test_what_compaction_took_of_released_records_makes_room_for_others() -> None:
    partition = share_partition(record_locks_max=10)
    acquire(partition, data(9))
    partition.acknowledge("a", [AcknowledgementBatch(0, 9, RELEASE)], UNTIL)
    assert not partition.has_room
    assert acquire(partition, data(14, base=12)) == [(12, 14, 1)]
    assert partition.start_offset == 12


def test_what_retention_overtakes_is_counted_and_passed_over() -> None:
    partition = share_partition()
    acquire(partition, data(9))
    partition.acknowledge("a", [AcknowledgementBatch(1, 2, ACCEPT)], UNTIL)
    assert partition.log_start(5) == 3
    assert (partition.start_offset, states(partition)) == (5, [(5, 9, DeliveryState.ACQUIRED, 1)])
    assert partition.acknowledge("a", [AcknowledgementBatch(0, 9, ACCEPT)], UNTIL) == ErrorCode.NONE
    assert partition.log_start(20) == 10
    assert (partition.start_offset, partition.next_offset) == (20, 20)
    assert partition.counts.archived[Reason.DELETED] == 13


def test_a_log_that_has_lost_its_end_delivers_what_comes_in_its_place() -> None:
    partition = share_partition(ShareState(0, 7, 8, (StateBatch(10, 19, DeliveryState.ACKNOWLEDGED, 1),)))
    partition.log_end(5)
    assert partition.first_available() == 5
    assert partition.take_write() == ShareState(0, 7, 5, (StateBatch(5, 19, DeliveryState.AVAILABLE, 0),))
    assert acquire(partition, data(9, base=5)) == [(5, 9, 1)]


def test_what_was_acquired_stays_so_after_a_load() -> None:
    held = StateBatch(4, 6, DeliveryState.ACQUIRED, 2, "a", 500)
    done = StateBatch(8, 9, DeliveryState.ACKNOWLEDGED, 1)
    partition = share_partition(ShareState(3, 7, 2, (done, held)))
    assert partition.next_expiry_ms == 500
    assert partition.take_write() is None
    assert acquire(partition, data(9), member="b") == [(2, 3, 1), (7, 7, 1)]
    assert partition.acknowledge("a", [AcknowledgementBatch(4, 6, ACCEPT)], UNTIL) == ErrorCode.NONE


MEMBERS = st.sampled_from("abc")


class History:
    """A real share partition and a naive one that do the same, and what was kept of it."""

    def __init__(self, draw: st.DataObject) -> None:
        self.draw = draw
        self.config = ShareGroupConfig(
            delivery_count_limit=draw.draw(st.integers(1, 4)),
            record_locks_max=draw.draw(st.integers(3, 40)),
            dead_letter_topic=draw.draw(st.sampled_from(("", "dlq.orders"))),
            retry_backoff_ms=draw.draw(st.sampled_from(((), (4,), (3, 8)))),
        )
        self.sequence = 0
        self.real = SharePartition(ShareState(2, 7, 0), self.config)
        self.naive = NaiveSharePartition(self.config)
        self.keeper, self.kept = NaiveKeeper(), self.naive.copy()
        self.log: list[FoundBatch] = []
        self.now_ms = self.log_start = 0

    def step(self) -> None:
        names = (
            "grow",
            "acquire",
            "acquire",
            "acknowledge",
            "acknowledge",
            "tick",
            "release",
            "address",
            "archive",
            "retain",
            "keep",
            "load",
            "lose",
        )
        getattr(self, self.draw.draw(st.sampled_from(names)))()
        self.compare()

    def grow(self) -> None:
        end = self.log[-1].last_offset + 1 if self.log else 0
        for size, gap, is_data in self.draw.draw(
            st.lists(st.tuples(st.integers(1, 6), st.sampled_from((0, 0, 0, 2)), st.sampled_from((True, True, False))))
        ):
            self.log.append(FoundBatch(end + gap, end + gap + size - 1, is_data))
            end += gap + size

    def acquire(self) -> None:
        member, most = self.draw.draw(MEMBERS), self.draw.draw(st.integers(1, 12))
        record_limit, until_ms = self.draw.draw(st.booleans()), self.now_ms + self.draw.draw(st.sampled_from((5, 10)))
        offset = self.real.first_available()
        assert offset == self.naive.first_available()
        found = [batch for batch in self.log if batch.last_offset >= offset][: self.draw.draw(st.integers(1, 5))]
        got = self.real.acquire(member, offset, found, most, until_ms, record_limit=record_limit)
        expected = self.naive.acquire(member, offset, found, most, until_ms, record_limit=record_limit)
        assert [(at, each.delivery_count) for each in got for at in range(each[0], each[1] + 1)] == expected
        assert not record_limit or len(expected) <= most

    def acknowledge(self) -> None:
        member = self.draw.draw(MEMBERS)
        its = [at for at, each in self.naive.offsets.items() if each.member == member] or [0]
        batches: list[AcknowledgementBatch] = []
        following = 0
        for _ in range(self.draw.draw(st.integers(1, 3))):
            first = max(following, self.draw.draw(st.sampled_from(its)) - self.draw.draw(st.sampled_from((0, 0, 0, 1))))
            last = first + self.draw.draw(st.integers(0, 5))
            kinds = st.sampled_from([int(each) for each in AcknowledgeType])
            each = self.draw.draw(st.one_of(kinds.map(lambda one: (one,)), st.tuples(*[kinds] * (last - first + 1))))
            batches.append(AcknowledgementBatch(first, last, each))
            following = last + 1
        until_ms = self.now_ms + 7
        code = self.real.acknowledge(member, batches, until_ms, self.now_ms)
        expected = self.naive.acknowledge(member, batches, until_ms, self.now_ms)
        assert (code == ErrorCode.NONE) == (expected == ErrorCode.NONE)

    def tick(self) -> None:
        self.now_ms += self.draw.draw(st.integers(1, 6))
        if self.real.next_expiry_ms > self.now_ms:
            assert self.naive.copy().expire(self.now_ms) == 0
        else:
            assert self.real.expire(self.now_ms) == self.naive.expire(self.now_ms)

    def release(self) -> None:
        member = self.draw.draw(MEMBERS)
        assert self.real.release_member(member) == self.naive.release_member(member)

    def address(self) -> None:
        """Letters are to be sent: some of one range that nobody has sent."""
        fresh = [each for each in self.real.letters() if each.letter is not None and not each.letter.is_addressed]
        if fresh:
            chosen = self.draw.draw(st.sampled_from(fresh))
            first = self.draw.draw(st.integers(chosen.first_offset, chosen.last_offset))
            last = self.draw.draw(st.integers(first, chosen.last_offset))
            self.sequence += last - first + 1
            self.real.address_letters(first, last, 77, self.sequence)
            self.naive.address(first, last, 77, self.sequence)

    def archive(self) -> None:
        first = self.draw.draw(st.integers(self.real.start_offset, self.real.next_offset))
        last = first + self.draw.draw(st.integers(0, 8))
        assert self.real.archive(first, last) == self.naive.archive(first, last)

    def retain(self) -> None:
        end = self.log[-1].last_offset + 1 if self.log else 0
        offset = min(end, self.log_start + self.draw.draw(st.integers(1, 8)))
        self.log_start = offset
        self.log = [batch for batch in self.log if batch.last_offset >= offset]
        assert self.real.log_start(offset) == self.naive.log_start(offset)

    def keep(self) -> None:
        delta = self.real.take_write()
        if delta is not None:
            assert (delta.state_epoch, delta.leader_epoch) == (2, 7)
            self.keeper.keep(delta)
        self.kept = self.naive.copy()

    def load(self) -> None:
        """What was not kept is lost, and nothing else."""
        kept = sorted(self.keeper.offsets.items())
        batches = [
            StateBatch(at, at, each.state, each.count, each.member, each.until_ms, each.letter) for at, each in kept
        ]
        self.real = SharePartition(ShareState(2, 7, self.keeper.start, tuple(batches)), self.config)
        self.naive = self.kept.copy()
        self.naive.archived = dict.fromkeys(Reason, 0)
        for each in (self.real, self.naive):
            each.log_start(self.log_start)

    def lose(self) -> None:
        """The log loses its end, and grows again some time."""
        end = self.log[-1].last_offset + 1 if self.log else self.log_start
        offset = max(self.log_start, end - self.draw.draw(st.integers(1, 8)))
        self.log = [batch for batch in self.log if batch.last_offset < offset]
        self.real.log_end(offset)
        self.naive.log_end(offset)
        self.log.append(FoundBatch(offset, offset + 2, True))

    def compare(self) -> None:
        real, naive = self.real, self.naive
        assert (real.start_offset, real.next_offset) == (naive.start, naive.next)
        batches = list(real.batches())
        following = real.start_offset
        for before, each in zip([None, *batches], batches, strict=False):
            assert each.first_offset == following <= each.last_offset
            following = each.last_offset + 1
            for at in range(each.first_offset, following):
                told = Offset(each.state, each.delivery_count, each.member, each.until_ms, each.letter)
                assert told == naive.at(at)
            assert before is None or _state_of(before) != _state_of(each), "alike, and not one"
        assert following == real.next_offset
        assert real.archiving == len(naive.letters())
        assert real.has_room == (naive.room() > 0)
        assert [real.counts.archived[reason] for reason in Reason] == [naive.archived[reason] for reason in Reason]


def _state_of(batch: StateBatch) -> tuple[DeliveryState, int, str, int, Letter | None]:
    return batch.state, batch.delivery_count, batch.member, batch.until_ms, batch.letter


@examples(300)
@given(st.data())
def test_any_history_is_that_of_a_naive_model(draw: st.DataObject) -> None:
    history = History(draw)
    for _ in range(draw.draw(st.integers(1, 40))):
        history.step()
