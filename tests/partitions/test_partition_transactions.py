"""Transactions in one partition: who may write, what a marker ends, and what is decided for readers."""

from __future__ import annotations

import pytest

from headrace.errors import (
    HeadraceError,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidTxnState,
    NotEnoughReplicas,
    NotLeader,
    OutOfOrderSequence,
    StorageFailed,
    TransactionCoordinatorFenced,
    TransactionUnverified,
)
from headrace.partitions.leader_core import FollowerState
from headrace.partitions.partition import ABORTED_MAX, COMMITTED, Appended, Partition
from headrace.partitions.verification import VERIFICATIONS_MAX
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL, batches
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition
from headrace.storage.producers import ProducerTable, UnreadableProducers
from partitions.committed_reader import consumed
from partitions.led import BROKER, Led, Outcome, Reader
from proving import proves

OTHER = 2


@pytest.fixture(params=[PARTITIONED, SHARED])
def led(request: pytest.FixtureRequest) -> Led:
    return Led(request.param)


def batch(value: bytes, producer_id: int, epoch: int, sequence: int, attributes: int = TRANSACTIONAL) -> memoryview:
    built = kernel.build(
        [(1_750_000_000_000, b"k", value, [])],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        attributes=attributes,
    )
    return memoryview(built)


class Transactional:
    """Writes to one partition as a produce request and a coordinator do."""

    def __init__(self, led: Led, partition: Partition) -> None:
        self.led = led
        self.partition = partition
        self.sequences: dict[tuple[int, int], int] = {}

    def write(self, producer_id: int = 7, epoch: int = 0, value: bytes = b"v", *, verify: bool = True) -> int:
        sequence = self.sequences.get((producer_id, epoch), 0)
        if verify:
            assert self.partition.verified(self.partition.verification(producer_id, epoch))
        offset, _, _ = self.partition.append(batch(value, producer_id, epoch, sequence), -1)
        self.sequences[producer_id, epoch] = sequence + 1
        self.end_turn()
        return offset

    def mark(
        self,
        producer_id: int = 7,
        epoch: int = 0,
        coordinator_epoch: int = 0,
        *,
        committed: bool = True,
        number: int = -1,
        version: int = 0,
    ) -> Appended:
        appended = self.partition.append_marker(
            producer_id,
            epoch,
            coordinator_epoch,
            committed=committed,
            number=number,
            transaction_version=version,
        )
        self.end_turn()
        return appended

    def end_turn(self) -> None:
        self.led.partitions.touch(self.partition)
        self.led.partitions.end_turn()

    def read(self, offset: int = 0) -> list[bytes]:
        """As a consumer that reads only what is committed."""
        found, aborted = self.partition.read_committed(offset, 1 << 20)
        return consumed(found, aborted, offset)[0]


@pytest.fixture
def one(led: Led) -> Transactional:
    return Transactional(led, led.lead())


def with_follower(led: Led) -> tuple[Transactional, FollowerState]:
    """A partition whose watermark waits for one that is in sync."""
    partition = led.lead()
    core = partition.core
    assert core is not None
    core.replicas_changed((BROKER, OTHER))
    core.confirmed({BROKER: "", OTHER: "b"}, 1)
    return Transactional(led, partition), core.subscribed(OTHER, "b", 0, 0.0)


def hear(one: Transactional, follower: FollowerState, position: int) -> None:
    core = one.partition.core
    assert core is not None
    core.position_reported(follower, position, position, position, one.partition.log.end_offset, 0.0)
    one.led.partitions.settle(one.partition)


# Who may write.


@proves("T1")
def test_a_first_write_that_was_not_verified_is_refused(one: Transactional) -> None:
    with pytest.raises(TransactionUnverified):
        one.write(verify=False)
    assert one.partition.log.end_offset == 0
    assert one.write() == 0
    assert one.write(verify=False) == 1, "the transaction is open"


@proves("T1")
def test_a_marker_between_question_and_answer_makes_a_verification_void(one: Transactional) -> None:
    """Else an append behind an abort would open a transaction that nobody ends."""
    asked = one.partition.verification(7, 0)
    one.mark(epoch=0, committed=False)
    assert not one.partition.verified(asked)
    with pytest.raises(TransactionUnverified):
        one.write(verify=False)


def test_a_marker_behind_the_answer_makes_a_verification_void_as_well(one: Transactional) -> None:
    assert one.partition.verified(one.partition.verification(7, 0))
    one.mark(epoch=0, committed=False)
    with pytest.raises(TransactionUnverified):
        one.write(verify=False)


@proves("T1")
def test_a_marker_leaves_the_verification_of_the_next_transaction_alone(one: Transactional) -> None:
    """With an epoch of its own for each transaction a client may write to the next before the last one's marker is
    here; a marker that comes again ends nothing at all."""
    one.write(epoch=3)
    following = one.partition.verification(7, 4)
    one.mark(epoch=4, version=2, number=0)
    assert one.partition.verified(following)
    one.mark(epoch=4, version=2, number=0)
    one.write(epoch=4, verify=False)
    one.mark(epoch=4, number=1)
    again = one.partition.verification(7, 4)
    one.mark(epoch=4, number=1)
    assert one.partition.verified(again)


def test_a_verification_holds_for_one_transaction(one: Transactional) -> None:
    one.write()
    one.mark()
    with pytest.raises(TransactionUnverified):
        one.write(verify=False)


def test_a_newer_epoch_makes_verifications_of_older_ones_void(one: Transactional) -> None:
    old = one.partition.verification(7, 3)
    new = one.partition.verification(7, 4)
    assert not one.partition.verified(old)
    assert not one.partition.verified(one.partition.verification(7, 3))
    assert one.partition.verified(new)
    assert one.partition.verification(7, 4) is new


def test_a_new_role_makes_verifications_void(one: Transactional) -> None:
    asked = one.partition.verification(7, 0)
    again = one.led.partitions.lead(one.partition.log, 1, {BROKER: ""})
    assert not one.partition.verified(asked)
    with pytest.raises(NotLeader):
        one.partition.verification(7, 0)
    with pytest.raises(TransactionUnverified):
        Transactional(one.led, again).write(verify=False)


def test_verifications_are_bounded(one: Transactional) -> None:
    first = one.partition.verification(0, 0)
    for producer_id in range(1, VERIFICATIONS_MAX + 1):
        one.partition.verification(producer_id, 0)
    assert not one.partition.verified(first)


def test_a_batch_outside_the_transaction_of_its_producer_is_refused(one: Transactional) -> None:
    one.write()
    with pytest.raises(InvalidTxnState):
        one.partition.append(batch(b"x", 7, 0, 1, attributes=0), -1)


def test_a_transactional_batch_needs_a_producer(one: Transactional) -> None:
    with pytest.raises(InvalidRecord, match="without a producer id"):
        one.partition.append(batch(b"x", -1, -1, -1), -1)


def test_a_duplicate_of_a_transaction_that_has_ended_is_answered_with_its_offset(one: Transactional) -> None:
    one.write()
    one.mark()
    assert one.partition.append(batch(b"v", 7, 0, 0), -1)[0] == 0
    assert one.partition.log.end_offset == 2


@proves("T1")
def test_a_fenced_producer_can_write_nothing(one: Transactional) -> None:
    one.write(epoch=0)
    one.mark(epoch=1, committed=False)
    with pytest.raises(InvalidProducerEpoch):
        one.write(epoch=0)
    one.write(epoch=1)


def test_after_a_marker_an_epoch_begins_with_sequence_zero(one: Transactional) -> None:
    one.write(epoch=0)
    one.mark(epoch=1)
    assert one.partition.verified(one.partition.verification(7, 1))
    with pytest.raises(OutOfOrderSequence):
        one.partition.append(batch(b"x", 7, 1, 4), -1)
    one.write(epoch=1)


# Markers.


@proves("T1", "T2")
def test_a_late_marker_never_ends_a_later_transaction(one: Transactional) -> None:
    """The epoch is the same for both, as older clients have it: only the number tells them apart."""
    one.write()
    first = one.mark(number=0, committed=False)
    second = one.write()
    assert one.mark(number=0, committed=False) == first
    assert one.partition.log.end_offset == second + 1
    assert one.partition.last_stable_offset == second
    one.mark(number=1)
    assert one.read() == [b"v"]
    assert one.mark(number=0, committed=False)[0] > first[0], "it is answered with a marker behind it"
    assert one.read() == [b"v"]


@proves("T2", "J10")
@pytest.mark.parametrize("error", [UnreadableProducers("damaged", 7), StorageFailed("EIO")])
def test_who_asks_whether_a_transaction_is_open_finds_the_damage_of_the_log_too(
    one: Transactional, monkeypatch: pytest.MonkeyPatch, error: HeadraceError
) -> None:
    """Offsets in a transaction ask before anything is appended: nobody else might find it."""
    partition = one.partition

    def fails(_table: ProducerTable) -> None:
        raise error

    monkeypatch.setattr(ProducerTable, "load", fails)
    with pytest.raises(StorageFailed):
        partition.has_open_transaction(7, 0)
    assert one.led.partitions.damaged == ({partition: 7} if isinstance(error, UnreadableProducers) else {})


@proves("T2")
def test_a_first_write_that_the_log_does_not_take_is_verified_all_the_same(
    one: Transactional, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came behind it would be told that the transaction has ended."""

    def fails(*_: object) -> int:
        raise StorageFailed("no")

    with monkeypatch.context() as patched:
        patched.setattr(type(one.partition.log), "append", fails)
        with pytest.raises(StorageFailed):
            one.write()
    with pytest.raises(OutOfOrderSequence, match="but 0 was refused"):
        one.partition.append(batch(b"behind", 7, 0, 1), -1)
    one.write(verify=False)
    one.mark()
    assert one.read() == [b"v"]


@proves("T2")
@pytest.mark.parametrize("committed", [True, False])
def test_a_transaction_whose_marker_is_lost_does_not_end_with_the_next_one(one: Transactional, committed: bool) -> None:
    """After an election that has cost records. Its producer's next epoch is let in only when it has ended."""
    one.write(value=b"left open")
    one.write(epoch=1, value=b"next")
    assert one.partition.last_stable_offset == 2
    one.write(epoch=1, value=b"more", verify=False)
    one.mark(epoch=2, committed=committed, number=1, version=2)
    assert one.partition.last_stable_offset == one.partition.high_watermark == 5
    assert one.read() == ([b"next", b"more"] if committed else [])


@proves("T2")
def test_the_marker_of_a_transaction_whose_records_are_lost_commits_no_earlier_one(one: Transactional) -> None:
    """An election has cost the marker of the first and all of the second."""
    one.write(epoch=3, value=b"aborted")
    one.mark(epoch=5, committed=True, number=4, version=2)
    assert one.read() == []
    assert one.partition.last_stable_offset == one.partition.high_watermark


@proves("T2")
def test_a_coordinator_that_counts_again_from_below_ends_its_transactions_all_the_same(one: Transactional) -> None:
    """It has lost the end of its log, and with that how many transactions there were."""
    one.write(value=b"before")
    one.mark(number=10)
    one.write(epoch=1, value=b"after")
    one.mark(epoch=1, coordinator_epoch=1, number=6)
    assert one.read() == [b"before", b"after"]
    with pytest.raises(InvalidProducerEpoch):
        one.mark(coordinator_epoch=1, number=10, committed=False)
    one.write(epoch=1, value=b"aborted")
    one.mark(epoch=2, coordinator_epoch=2, number=3, committed=False, version=2)
    assert one.partition.last_stable_offset == one.partition.high_watermark
    assert one.read() == [b"before", b"after"]


@proves("T1")
def test_with_an_epoch_per_transaction_a_marker_of_the_datas_epoch_is_of_an_earlier_one(one: Transactional) -> None:
    one.write(epoch=3)
    one.mark(epoch=4, version=2)
    one.write(epoch=4)
    with pytest.raises(InvalidProducerEpoch):
        one.mark(epoch=4, version=2, committed=False)
    one.mark(epoch=5, version=2)
    assert one.read() == [b"v", b"v"]


def test_a_marker_of_an_older_coordinator_is_refused(one: Transactional) -> None:
    one.write()
    one.mark(coordinator_epoch=5, number=0)
    one.write()
    with pytest.raises(TransactionCoordinatorFenced):
        one.mark(coordinator_epoch=4, number=1)
    one.mark(coordinator_epoch=5, number=1)


def test_a_marker_of_an_older_epoch_is_refused(one: Transactional) -> None:
    one.write(epoch=3)
    with pytest.raises(InvalidProducerEpoch):
        one.mark(epoch=2)


def test_a_marker_is_written_though_nothing_was(one: Transactional) -> None:
    """It fences the producers that came before it."""
    one.mark(epoch=3, number=0)
    assert one.partition.log.end_offset == 1
    with pytest.raises(InvalidProducerEpoch):
        one.write(epoch=2)


@proves("T2")
def test_a_repeated_marker_counts_when_the_first_one_does(led: Led) -> None:
    one, follower = with_follower(led)
    one.write()
    outcomes = [Outcome(), Outcome()]
    for outcome in outcomes:
        led.partitions.submit_marker(
            one.partition, lambda: one.partition.append_marker(7, 0, 0, committed=True, number=0), 1000, outcome
        )
        led.partitions.end_turn()
    hear(one, follower, 1)
    assert [outcome.waiting for outcome in outcomes] == [True, True]
    hear(one, follower, 2)
    assert [outcome.offset for outcome in outcomes] == [1, 1]


def test_a_marker_waits_for_the_watermark_whatever_acks_wait_for(led: Led) -> None:
    """`replication.policy` may answer acks=-1 sooner: a marker that is lost then would leave its transaction open."""
    partition = led.lead(replication_policy="none")
    core = partition.core
    assert core is not None
    core.replicas_changed((BROKER, OTHER))
    core.confirmed({BROKER: "", OTHER: "b"}, 1)
    core.subscribed(OTHER, "b", 0, 0.0)
    one = Transactional(led, partition)
    one.write()
    position = one.mark()[1]
    assert partition.reached(position, -1)
    assert not partition.reached(position, COMMITTED)


def test_a_marker_needs_enough_replicas(led: Led) -> None:
    one, _ = with_follower(led)
    one.write()
    core = one.partition.core
    assert core is not None
    core.min_isr_changed(3)
    with pytest.raises(NotEnoughReplicas):
        one.mark()


def test_a_marker_is_for_the_leader(led: Led) -> None:
    partition = led.lead()
    follower = led.partitions.follow(partition.log, 1, OTHER)
    for each in (partition, follower):
        with pytest.raises(NotLeader):
            each.append_marker(7, 0, 0, committed=True)


def test_who_waits_for_a_marker_hears_that_the_role_has_ended(led: Led) -> None:
    one, _ = with_follower(led)
    outcome = Outcome()
    led.partitions.submit_marker(
        one.partition, lambda: one.partition.append_marker(7, 0, 0, committed=True), 1000, outcome
    )
    led.partitions.end_turn()
    assert outcome.waiting
    led.partitions.follow(one.partition.log, 1, OTHER)
    assert isinstance(outcome.error, NotLeader)


@proves("T2")
def test_what_could_not_be_written_is_as_if_it_had_not_been_staged(one: Transactional) -> None:
    """Both the first write of one transaction and the marker of another."""
    one.write(producer_id=1)
    one.led.disk.fill(0)
    verified = one.partition.verified(one.partition.verification(2, 0))
    assert verified
    failures: list[HeadraceError] = []
    one.partition.append(batch(b"x", 2, 0, 0), -1)
    one.partition.append_marker(1, 0, 0, committed=False, number=0)
    one.led.partitions.touch(one.partition)
    one.led.partitions.at_turn_end(lambda found: failures.extend(found.values()))
    one.led.partitions.end_turn()
    assert failures
    one.led.disk.fill(1 << 30)
    assert one.partition.last_stable_offset == 0
    assert one.partition.log.aborted(0, 100) == []
    one.mark(producer_id=1, number=0)
    one.write(producer_id=2)
    assert one.partition.last_stable_offset == 2
    assert one.read() == [b"v"]


# Reading.


@proves("T1")
def test_readers_of_committed_records_stop_before_what_is_not_decided(one: Transactional) -> None:
    one.led.produce(one.partition, b"before")
    one.write(value=b"in")
    one.led.produce(one.partition, b"behind")
    assert one.partition.last_stable_offset == 1
    assert one.read() == [b"before"]
    assert one.read(offset=1) == one.read(offset=2) == []
    one.mark()
    assert one.partition.last_stable_offset == one.partition.high_watermark == 4
    assert one.read() == [b"before", b"in", b"behind"]


@proves("T1")
def test_aborted_records_are_named(one: Transactional) -> None:
    one.write(1, value=b"a")
    one.write(2, value=b"b")
    one.mark(1, committed=False)
    one.write(1, value=b"c")
    one.mark(2)
    one.mark(1)
    assert one.partition.log.aborted(0, 6) == [(1, 0)]
    assert one.partition.log.aborted(3, 6) == []
    assert one.read() == [b"b", b"c"]


@proves("T1")
def test_a_marker_counts_only_below_the_watermark(led: Led) -> None:
    one, follower = with_follower(led)
    one.write(value=b"in")
    hear(one, follower, 1)
    one.mark(committed=False, number=0)
    assert (one.partition.high_watermark, one.partition.last_stable_offset) == (1, 0)
    assert one.read() == []
    hear(one, follower, 2)
    assert one.partition.last_stable_offset == 2
    assert one.read() == []
    assert one.partition.log.aborted(0, 2) == [(7, 0)]


@proves("T2")
def test_a_marker_that_is_cut_leaves_its_transaction_open(led: Led) -> None:
    one, follower = with_follower(led)
    one.write(value=b"in")
    hear(one, follower, 1)
    one.mark(committed=False, number=0)
    log = one.partition.log
    partition = led.partitions.follow(log, 1, OTHER)
    log.truncate(1)
    partition.truncated()
    assert partition.last_stable_offset == 0
    one = Transactional(led, led.partitions.lead(log, 2, {BROKER: ""}))
    assert one.partition.last_stable_offset == 0
    one.mark(number=0)
    assert one.read() == [b"in"]


def test_a_follower_tells_what_is_decided_by_its_own_watermark(led: Led) -> None:
    source = Transactional(led, led.lead("source"))
    source.write(value=b"in")
    source.mark()
    source.write(value=b"open")
    copied = b"".join(piece.read() for piece in source.partition.read(0, 1 << 20).slices)
    log = led.lead("copy").log
    partition = led.partitions.follow(log, 1, OTHER)
    log.append_copied(memoryview(bytearray(copied)))
    led.partitions.touch(partition)
    led.partitions.end_turn()
    seen = []
    for watermark in (1, 2, 3):
        led.partitions.told(partition, watermark)
        seen.append((partition.last_stable_offset, consumed(*partition.read_committed(0, 1 << 20))[0]))
    assert seen == [(0, []), (2, [b"in"]), (2, [b"in"])]


@proves("T2")
def test_the_end_of_what_is_decided_is_told_by_a_start_that_no_crash_lowers(led: Led) -> None:
    one = Transactional(led, led.lead(durability="disk"))
    one.write()
    led.produce(one.partition, b"plain")
    led.clock.run_soon()
    assert one.partition.stable_end() == 0
    led.disk.hold_syncs()
    led.partitions.delete_before(one.partition, 2)
    assert (one.partition.last_stable_offset, one.partition.stable_end()) == (2, 0)
    led.disk.release_syncs()
    led.clock.run_soon()
    assert one.partition.stable_end() == 2
    one.mark(committed=False)
    led.clock.run_soon()
    assert one.partition.stable_end() == one.partition.high_watermark == 3


def test_what_is_deleted_is_not_waited_for(one: Transactional) -> None:
    one.write()
    one.led.produce(one.partition, b"plain")
    one.led.partitions.delete_before(one.partition, 2)
    one.led.clock.run_soon()
    assert one.partition.log.start_offset == 2
    assert one.partition.last_stable_offset == 2
    one.led.produce(one.partition, b"plain")
    assert one.partition.last_stable_offset == 2, "its transaction is open still"
    one.mark(committed=False)
    assert one.read(offset=2) == [b"plain"]


@proves("T1")
def test_a_fetch_of_committed_records_sleeps_until_something_is_decided(one: Transactional) -> None:
    one.write()
    everything, committed = Reader(), Reader()
    one.partition.wait_for_data(everything)
    one.partition.wait_for_data(committed, committed=True)
    one.write()
    one.led.clock.run_soon()
    assert (everything.answered, committed.answered) == (True, False)
    one.mark()
    one.led.clock.run_soon()
    assert committed.answered


def test_one_read_tells_of_so_many_aborted_transactions_and_no_more(one: Transactional) -> None:
    for _ in range(ABORTED_MAX + 10):
        one.write()
        one.mark(committed=False)
    _, aborted = one.partition.read_committed(0, 1 << 30)
    assert len(aborted) == ABORTED_MAX
    found, aborted = one.partition.read_committed(2 * ABORTED_MAX - 2, 1 << 30)
    assert len(aborted) == 11
    assert consumed(found, aborted)[0] == []
    found, _ = one.partition.read_committed(20, 1 << 30)
    headers = [header for header, _ in batches(memoryview(b"".join(piece.read() for piece in found.slices)))]
    assert headers[-1].next_offset <= 2 * (ABORTED_MAX + 10)


@proves("T1")
def test_ten_thousand_open_transactions_cost_no_more_than_one(one: Transactional) -> None:
    for producer_id in range(10_000):
        assert one.partition.verified(one.partition.verification(producer_id, 0))
        one.partition.append(batch(b"v", producer_id, 0, 0), -1)
    one.end_turn()
    assert one.partition.last_stable_offset == 0
    for producer_id in range(10_000):
        one.partition.append_marker(producer_id, 0, 0, committed=True, number=0)
        assert one.partition.last_stable_offset <= producer_id
    one.end_turn()
    assert one.partition.last_stable_offset == 20_000


class _Held:
    """Refuses to be told more than once."""

    answered = False

    def passed(self) -> None:
        raise AssertionError

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        self.answered = True


def test_a_waiting_marker_hears_that_its_log_has_failed(led: Led) -> None:
    one, _ = with_follower(led)
    position = one.mark()[1]
    held = _Held()
    one.partition.wait(position, COMMITTED, held)
    one.partition.failed(NotLeader("gone"))
    assert held.answered
