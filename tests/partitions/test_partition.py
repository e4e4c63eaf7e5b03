"""One partition with the replicas around it: what it refuses, whom it answers and when, and what a follower shows."""

from __future__ import annotations

import pytest

from headrace.errors import (
    BatchTooLarge,
    CorruptBatch,
    FencedEpoch,
    HeadraceError,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OffsetNotAvailable,
    OffsetOutOfRange,
    OutOfOrderSequence,
    StorageFailed,
)
from headrace.partitions.leader_core import FollowerState, LeaderCore
from headrace.partitions.partition import Partition, sequenced
from headrace.records.batch import read_header
from headrace.storage.log import ReadResult, TopicPartition
from headrace.storage.producers import ProducerTable, UnreadableProducers
from partitions.led import BROKER, Led, batch
from proving import proves

OTHER = 2


class Waiter:
    """Writes down each answer: None for passed."""

    answered = False

    def __init__(self) -> None:
        self.answers: list[type[HeadraceError] | None] = []

    def passed(self) -> None:
        self.answers.append(None)

    def failed(self, topic_partition: TopicPartition, error: HeadraceError) -> None:
        self.answers.append(type(error))


@pytest.fixture
def led() -> Led:
    return Led()


def lead_two(led: Led, **overrides: object) -> tuple[Partition, LeaderCore, FollowerState]:
    """A partition with one follower, which is in sync and has told nothing."""
    partition = led.lead(**overrides)  # type: ignore[arg-type]
    core = partition.core
    assert core is not None
    core.replicas_changed((BROKER, OTHER))
    core.confirmed({BROKER: "", OTHER: "b"}, 1)
    return partition, core, core.subscribed(OTHER, "b", 0, 0.0)


def hear(partition: Partition, follower: FollowerState, position: int, start: int = 0) -> None:
    assert partition.core is not None
    partition.core.position_reported(follower, position, position, position, partition.log.end_offset, 0.0, start=start)
    partition.settle()


def appended(led: Led, partition: Partition, *sent: bytearray, acks: int = -1) -> list[int]:
    offsets = [partition.append(memoryview(each), acks)[0] for each in sent]
    led.partitions.touch(partition)
    led.partitions.end_turn()
    return offsets


def followed(led: Led, written: int) -> Partition:
    """A follower that has so many records and was told no watermark."""
    partition, _, _ = lead_two(led)
    appended(led, partition, *(batch() for _ in range(written)))
    return led.partitions.follow(partition.log, 1, OTHER)


# Who is answered when


@proves("G5")
def test_acks_1_is_answered_by_the_leaders_copy_and_acks_all_by_the_whole_set(led: Led) -> None:
    partition, _, follower = lead_two(led)
    local, replicas = Waiter(), Waiter()
    partition.append(memoryview(batch()), -1)
    partition.wait(1, 1, local)
    partition.wait(1, -1, replicas)
    led.partitions.touch(partition)
    led.partitions.end_turn()
    assert (local.answers, replicas.answers) == ([None], [])
    assert partition.reached(1, 1)
    assert not partition.reached(1, -1)
    hear(partition, follower, 1)
    assert (local.answers, replicas.answers) == ([None], [None])
    assert partition.reached(1, -1)


@proves("G5")
@pytest.mark.parametrize(
    ("settings", "answers"),
    [
        ({}, [NotEnoughReplicasAfterAppend]),
        ({"replication_point": "flushed"}, [NotEnoughReplicasAfterAppend]),
        ({"replication_policy": "one"}, []),
    ],
)
def test_a_set_that_has_become_too_small_is_told_to_who_waits_for_all_of_it(
    led: Led, settings: dict[str, object], answers: list[type[HeadraceError]]
) -> None:
    partition, _, _ = lead_two(led, min_insync_replicas=2, **settings)
    waiter = Waiter()
    appended(led, partition, batch())
    partition.wait(1, -1, waiter)
    led.partitions.confirmed(partition, {BROKER: "", OTHER: "b"}, 2)
    assert waiter.answers == []
    led.partitions.confirmed(partition, {BROKER: ""}, 3)
    assert waiter.answers == answers


def test_what_one_replica_had_when_it_was_acknowledged_stays_acknowledged(led: Led) -> None:
    partition, core, follower = lead_two(led, replication_policy="one")
    appended(led, partition, batch())
    hear(partition, follower, 1)
    assert partition.acknowledged == 1
    core.subscribed(OTHER, "another", 0, 0.0)
    partition.settle()
    assert partition.acknowledged == 1


def test_each_waiter_hears_once_that_its_role_has_ended_and_why(led: Led) -> None:
    partition, _, _ = lead_two(led)
    appended(led, partition, batch())
    waiters = [Waiter() for _ in range(3)]
    partition.wait(2, 1, waiters[0])
    partition.wait(1, -1, waiters[1])
    partition.wait_for_start(1, waiters[2])
    partition.failed(StorageFailed("no"))
    gone = StorageFailed("gone")
    partition.close(gone)
    assert partition.closed is gone
    assert [waiter.answers for waiter in waiters] == [[StorageFailed]] * 3
    late = [Waiter(), Waiter()]
    partition.wait(1, 1, late[0])
    partition.wait_for_start(0, late[1])
    assert [waiter.answers for waiter in late] == [[StorageFailed]] * 2
    partition.too_few()
    assert not partition.leading


# What is refused


@proves("G5")
def test_the_policy_of_racks_needs_a_replica_in_another_one(led: Led) -> None:
    partition, _, _ = lead_two(led, replication_policy="racks")
    led.partitions.racks.update({BROKER: "a", OTHER: "a"})
    with pytest.raises(NotEnoughReplicas, match="no replica stands in another rack"):
        partition.append(memoryview(batch(producer=(9, 0, 0))), -1)
    assert appended(led, partition, batch(), acks=1) == [0]
    led.partitions.racks[OTHER] = "b"
    with pytest.raises(OutOfOrderSequence, match="but 0 was refused and comes before it"):
        partition.append(memoryview(batch(producer=(9, 0, 1))), -1)
    assert appended(led, partition, batch(producer=(9, 0, 0))) == [1]


def test_a_weaker_policy_takes_what_all_would_refuse(led: Led) -> None:
    assert appended(led, led.lead(min_insync_replicas=2, replication_policy="none"), batch()) == [0]


def test_a_stronger_point_takes_what_enough_replicas_are_there_for(led: Led) -> None:
    assert appended(led, led.lead(replication_point="flushed"), batch()) == [0]


def test_a_batch_may_be_just_as_large_as_its_topic_allows(led: Led) -> None:
    partition = led.lead(max_message_bytes=len(batch()))
    assert appended(led, partition, batch()) == [0]


@proves("J10")
def test_a_batch_that_is_too_large_and_can_be_split_stays_the_first(led: Led) -> None:
    partition = led.lead(max_message_bytes=100)
    with pytest.raises(BatchTooLarge):
        partition.append(memoryview(batch(bytes(50), bytes(50), producer=(9, 0, 0))), -1)
    with pytest.raises(OutOfOrderSequence, match="but 0 was refused"):
        partition.append(memoryview(batch(producer=(9, 0, 2))), -1)
    with pytest.raises(BatchTooLarge):
        partition.append(memoryview(batch(bytes(100), producer=(10, 0, 0))), -1)
    assert appended(led, partition, batch(producer=(10, 0, 1))) == [0], "one record cannot be split: it is given up"


def test_a_batch_that_the_broker_has_built_is_held_to_it_unless_it_delivers_delayed_records() -> None:
    built = batch(bytes(100))
    with pytest.raises(BatchTooLarge):
        Led().lead(max_message_bytes=100).append(memoryview(built), -1, read_header(built))
    partition = Led().lead(max_message_bytes=100, headrace_delay_enable="true")
    assert partition.append(memoryview(built), -1, read_header(built))[0] == 0


@proves("J10")
def test_the_producer_with_the_first_id_is_an_idempotent_one(led: Led) -> None:
    partition = led.lead()
    assert appended(led, partition, batch(producer=(0, 0, 0))) == [0]
    assert appended(led, partition, batch(producer=(0, 0, 0))) == [0]
    assert partition.log.end_offset == 1


def test_a_refused_batch_is_remembered_only_of_idempotent_producers() -> None:
    assert sequenced(memoryview(batch(producer=(0, 0, 0)))) is not None
    assert sequenced(memoryview(batch(producer=(-1, -1, 0)))) is None
    assert sequenced(memoryview(batch(producer=(0, 0, -1)))) is None
    assert sequenced(memoryview(b"no batch")) is None


@proves("J10")
@pytest.mark.parametrize("error", [UnreadableProducers("damaged", 7), StorageFailed("EIO")])
def test_a_batch_whose_producer_cannot_be_looked_up_stays_the_first(
    led: Led, monkeypatch: pytest.MonkeyPatch, error: HeadraceError
) -> None:
    partition = led.lead()

    def fails(_table: ProducerTable) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(ProducerTable, "load", fails)
        with pytest.raises(StorageFailed):
            partition.append(memoryview(batch(producer=(9, 0, 0))), -1)
    assert led.partitions.damaged == ({partition: 7} if isinstance(error, UnreadableProducers) else {})
    with pytest.raises(OutOfOrderSequence, match="but 0 was refused"):
        partition.append(memoryview(batch(producer=(9, 0, 1))), -1)


@proves("J10")
def test_a_batch_that_the_log_does_not_take_stays_the_first(led: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = led.lead()

    def fails(*_: object) -> int:
        raise StorageFailed("no")

    with monkeypatch.context() as patched:
        patched.setattr(type(partition.log), "append", fails)
        with pytest.raises(StorageFailed):
            partition.append(memoryview(batch(producer=(9, 0, 0))), -1)
    with pytest.raises(OutOfOrderSequence, match="but 0 was refused"):
        partition.append(memoryview(batch(producer=(9, 0, 1))), -1)


def test_the_first_epoch_is_as_old_as_any(led: Led) -> None:
    partition = led.lead()
    partition.epoch = 5
    with pytest.raises(FencedEpoch):
        partition.check_epoch(0)


# A follower


@proves("G2")
def test_a_followers_watermark_is_what_it_was_told_and_has_and_never_falls(led: Led) -> None:
    partition = followed(led, 3)
    assert not partition.leading
    assert not partition.settle()
    assert partition.told(2)
    assert not partition.told(2)
    assert not partition.told(1)
    assert (partition.high_watermark, partition.log.committed_offset) == (2, 2)
    assert partition.told(5)
    assert partition.high_watermark == 3, "more is not written here"


def test_a_followers_watermark_rises_when_what_it_came_with_is_written(led: Led) -> None:
    partition = followed(led, 3)
    partition.expect(2)
    assert partition.high_watermark == 0
    assert partition.advance()
    assert partition.high_watermark == 2


def test_a_cut_log_has_its_watermark_within_what_is_left(led: Led) -> None:
    partition = followed(led, 3)
    partition.told(3)
    partition.log.truncate(1)
    partition.truncated()
    assert (partition.high_watermark, partition.log.committed_offset) == (1, 1)
    assert not partition.advance(), "what was told of what is cut counts no more"
    partition.log.restart_at(10)
    partition.truncated()
    assert partition.high_watermark == 10


def test_what_a_follower_does_not_have_is_out_of_range(led: Led) -> None:
    partition = followed(led, 1)
    for offset in (-1, 2):
        with pytest.raises(OffsetOutOfRange):
            partition.read(offset, 1000)


# The start


@proves("F6")
def test_who_waits_for_a_start_is_answered_once_when_all_in_sync_have_it(led: Led) -> None:
    partition, _, follower = lead_two(led)
    appended(led, partition, *(batch() for _ in range(5)))
    hear(partition, follower, 5)
    waiters = [Waiter() for _ in range(3)]
    for waiter, offset in zip(waiters, (2, 3, 5), strict=True):
        led.partitions.delete_before(partition, offset)
        partition.wait_for_start(offset, waiter)
    assert [waiter.answers for waiter in waiters] == [[], [], []]
    hear(partition, follower, 5, start=3)
    led.clock.run_soon()
    assert [waiter.answers for waiter in waiters] == [[None], [None], []]
    with pytest.raises(OffsetOutOfRange):
        partition.read(2, 1000)
    hear(partition, follower, 5, start=5)
    led.clock.run_soon()
    assert [waiter.answers for waiter in waiters] == [[None]] * 3
    at_once = Waiter()
    partition.wait_for_start(5, at_once)
    assert at_once.answers == [None]


def test_a_start_that_is_not_known_yet_is_not_told(led: Led) -> None:
    partition, core, _ = lead_two(led)
    assert partition.first_offset() == 0
    led.partitions.delete_before(partition, 0)
    core.start = -1
    with pytest.raises(OffsetNotAvailable):
        partition.first_offset()


def test_what_is_being_deleted_is_not_there_now_from_the_first_offset_on(led: Led) -> None:
    partition = led.lead(durability="disk")
    appended(led, partition, *(batch() for _ in range(3)))
    led.clock.run_soon()
    led.disk.hold_syncs()
    led.partitions.delete_before(partition, 2)
    for offset in (0, 1):
        with pytest.raises(OffsetNotAvailable):
            partition.read(offset, 1000)
    with pytest.raises(OffsetOutOfRange):
        partition.read(-1, 1000)
    led.disk.release_syncs()


def test_nobody_waits_for_the_start_of_a_log_that_is_offline(led: Led) -> None:
    partition = led.lead()
    partition.log.offline = StorageFailed("gone")
    waiter = Waiter()
    partition.wait_for_start(1, waiter)
    assert waiter.answers == [StorageFailed]


# Damage


def test_what_cannot_be_read_here_is_damaged_for_good_only_where_nobody_else_has_it(
    led: Led, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition, core, follower = lead_two(led)
    appended(led, partition, batch())
    hear(partition, follower, 1)

    def fails(*_: object, **__: object) -> ReadResult:
        raise CorruptBatch("flipped")

    monkeypatch.setattr(type(partition.log), "read", fails)
    with pytest.raises(StorageFailed, match="another replica is asked to lead"):
        partition.read(0, 1000)
    core.confirmed({BROKER: ""}, 2)
    with pytest.raises(CorruptBatch):
        partition.read(0, 1000)
    for leader, found in ((OTHER, StorageFailed), (0, StorageFailed), (-1, CorruptBatch)):
        copy = led.partitions.follow(partition.log, 1, leader)
        copy.told(1)
        with pytest.raises(found):
            copy.read(0, 1000)


@proves("J1")
def test_who_has_left_out_damage_takes_no_producers_batch_while_another_can_lead(led: Led) -> None:
    """The batch that is damaged would be taken for missing, or taken twice."""
    partition, core, _ = lead_two(led)
    for sequence in (0, 1):
        appended(led, partition, batch(producer=(9, 0, sequence)))
    partition.log.producers.left_out.append(1)
    for sequence in (1, 3):
        with pytest.raises(StorageFailed, match="damaged at offset 1; another replica is asked to lead"):
            partition.append(memoryview(batch(producer=(9, 0, sequence))), 1)
    assert led.partitions.damaged == {partition: 1}
    assert appended(led, partition, batch()) == [2], "that has no sequence"
    core.confirmed({BROKER: ""}, 2)
    assert partition.append(memoryview(batch(producer=(9, 0, 2))), 1)[0] == 3, "nobody else can lead"


def test_damage_below_the_start_hides_nobody_whom_others_know(led: Led) -> None:
    partition, _, _ = lead_two(led)
    appended(led, partition, batch(producer=(9, 0, 0)))
    partition.log.producers.left_out.append(0)
    partition.log.start_offset = 1
    assert appended(led, partition, batch(producer=(9, 0, 1))) == [1]
    assert led.partitions.damaged == {}


def test_the_first_damaged_offset_is_remembered_until_it_is_mended(led: Led) -> None:
    partition = led.lead()
    for offset in (7, 3, 5):
        partition.found_damage(offset)
    assert led.partitions.damaged == {partition: 3}
    partition.mended()
    assert led.partitions.damaged == {}


def test_a_role_that_has_ended_wants_no_start(led: Led) -> None:
    partition = followed(led, 1)
    with pytest.raises(NotLeader):
        partition.want_start(0, 0.0)
