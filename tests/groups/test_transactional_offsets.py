"""Offsets in transactions: pending until the marker of their producer, in the order of the log."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from groups.scene import GROUP, LIMITS, TOPIC_ID, Waiter
from headrace.coordinators.record_fields import Record
from headrace.coordinators.state_log import AppendDone, ProducerEpoch, Settled
from headrace.errors import ErrorCode
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.messages import (
    CommitRequest,
    JoinReply,
    JoinRequest,
    OffsetToCommit,
    PartitionResult,
    SyncReply,
    SyncRequest,
    TransactionalCommit,
)
from headrace.groups.records import OffsetAndMetadata, OffsetKey, decode_key, decode_offset
from headrace.groups.transactional_offsets import TransactionalOffsets
from headrace.virtual.clock import VirtualClock
from proving import proves

Entry = tuple[ProducerEpoch | None, list[Record]] | tuple[int, bool]
"""A batch with the producer whose transaction it is of, or the end of a producer's transaction."""


@dataclass(slots=True)
class Scene:
    """A coordinator on a log in memory; `held` keeps transactional appends until the test settles them."""

    clock: VirtualClock = field(default_factory=VirtualClock)
    log: list[Entry] = field(default_factory=list)
    held: bool = False
    waiting: list[tuple[ProducerEpoch, list[Record], Settled, AppendDone]] = field(default_factory=list)
    coordinator: GroupCoordinator = field(init=False)

    def __post_init__(self) -> None:
        self.coordinator = self._coordinator()
        self.coordinator.lead(0, 0).ready()

    def _coordinator(self) -> GroupCoordinator:
        ids = itertools.count(1)
        return GroupCoordinator(
            self.clock,
            self.append,
            1,
            lambda: f"{next(ids)}",
            LIMITS,
            lambda _name: TOPIC_ID,
            self.append_in_transaction,
        )

    def append(self, _partition: int, _epoch: int, records: list[Record], done: AppendDone) -> None:
        self.log.append((None, records))
        done(ErrorCode.NONE)

    def append_in_transaction(
        self,
        _partition: int,
        _epoch: int,
        producer: ProducerEpoch,
        records: list[Record],
        settled: Settled,
        done: AppendDone,
    ) -> None:
        self.waiting.append((producer, records, settled, done))
        if not self.held:
            self.settle()

    def settle(self) -> None:
        producer, records, settled, done = self.waiting.pop(0)
        self.log.append((producer, records))
        settled(True)
        done(ErrorCode.NONE)

    def take_over(self) -> None:
        self.coordinator.close()
        self.coordinator = self._coordinator()
        loading = self.coordinator.lead(0, 0)
        for first, second in self.log:
            if isinstance(second, bool):
                assert isinstance(first, int)
                loading.replay_marker(ProducerEpoch(first, 1), committed=second)
            else:
                assert not isinstance(first, int) or isinstance(first, ProducerEpoch)
                loading.replay(second, first)
        loading.ready()

    def commit(
        self, offset: int, producer_id: int = 7, *, member: JoinReply | None = None, generation: int | None = None,
        partition: int = 0, instance: str | None = None,
    ) -> Waiter[tuple[PartitionResult, ...]]:  # fmt: skip
        waiter: Waiter[tuple[PartitionResult, ...]] = Waiter()
        offsets = (OffsetToCommit("t", partition, offset, 0, "", TOPIC_ID),)
        commit = CommitRequest(offsets)
        if member is not None:
            generation = member.generation_id if generation is None else generation
            commit = CommitRequest(offsets, member.member_id, generation, instance)
        self.coordinator.commit_in_transaction(GROUP, TransactionalCommit(producer_id, 1, commit), waiter)
        return waiter

    def commit_plainly(self, offset: int, partition: int = 0) -> None:
        commit = CommitRequest((OffsetToCommit("t", partition, offset, 0, "", TOPIC_ID),))
        self.coordinator.commit(GROUP, commit, lambda _results: None)

    def end(self, producer_id: int = 7, *, committed: bool = True) -> None:
        self.log.append((producer_id, committed))
        self.coordinator.end_transaction(0, 0, producer_id, committed=committed)

    def offset(self, *, stable: bool = False, partition: int = 0) -> int | str:
        (found,) = self.coordinator.fetch_offsets(GROUP, [("t", partition)], stable).offsets
        return "unstable" if found.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT else found.committed_offset

    def member(self) -> JoinReply:
        joined: Waiter[JoinReply] = Waiter()
        request = JoinRequest("", None, "c", "h", 10_000, 10_000, "consumer", (("range", b""),))
        self.coordinator.join(GROUP, request, joined)
        synced: Waiter[SyncReply] = Waiter()
        reply = joined.reply
        self.coordinator.sync(
            GROUP, SyncRequest(reply.member_id, reply.generation_id, assignments=((reply.member_id, b""),)), synced
        )
        return reply


def codes(waiter: Waiter[tuple[PartitionResult, ...]]) -> list[int]:
    return [result.error_code for result in waiter.reply]


@proves("T1")
@pytest.mark.parametrize(("committed", "after"), [(True, 10), (False, 5)])
def test_offsets_of_a_transaction_count_when_it_is_committed_and_never_when_it_is_aborted(
    committed: bool, after: int
) -> None:
    scene = Scene()
    scene.commit_plainly(5)
    assert codes(scene.commit(10)) == [ErrorCode.NONE]
    assert (scene.offset(), scene.offset(stable=True)) == (5, "unstable")
    scene.end(committed=committed)
    assert (scene.offset(), scene.offset(stable=True)) == (after, after)


@proves("T2")
@pytest.mark.parametrize("committed", [True, False])
def test_the_next_coordinator_finds_them_pending_and_ends_them_as_the_marker_says(committed: bool) -> None:
    scene = Scene()
    scene.commit_plainly(5)
    scene.commit(10)
    scene.commit(11)
    scene.take_over()
    assert (scene.offset(), scene.offset(stable=True)) == (5, "unstable")
    scene.end(committed=committed)
    after = 11 if committed else 5
    assert scene.offset(stable=True) == after
    scene.take_over()
    assert scene.offset(stable=True) == after


def test_an_offset_is_unstable_from_its_append_on() -> None:
    scene = Scene(held=True)
    answer = scene.commit(10)
    assert not answer.answered
    assert (scene.offset(), scene.offset(stable=True)) == (-1, "unstable")
    scene.settle()
    assert codes(answer) == [ErrorCode.NONE]
    assert scene.offset(stable=True) == "unstable"
    scene.end()
    assert scene.offset(stable=True) == 10


def test_what_is_not_in_the_log_after_all_is_not_pending() -> None:
    scene = Scene(held=True)
    answer = scene.commit(10)
    _, _, settled, done = scene.waiting.pop()
    settled(False)
    done(ErrorCode.KAFKA_STORAGE_ERROR)
    assert codes(answer) == [ErrorCode.NOT_COORDINATOR]
    assert scene.offset(stable=True) == -1
    scene.end()
    assert scene.offset() == -1


def test_what_was_told_too_late_is_in_the_log_and_counts_with_its_marker() -> None:
    scene = Scene(held=True)
    answer = scene.commit(10)
    producer, records, settled, done = scene.waiting.pop()
    done(ErrorCode.REQUEST_TIMED_OUT)
    assert codes(answer) == [ErrorCode.COORDINATOR_NOT_AVAILABLE]
    assert scene.offset(stable=True) == "unstable"
    scene.log.append((producer, records))
    settled(True)
    scene.end()
    assert scene.offset(stable=True) == 10
    scene.take_over()
    assert scene.offset(stable=True) == 10


def test_a_plain_commit_behind_takes_the_place_of_a_pending_one_as_compaction_has_it() -> None:
    scene = Scene()
    scene.commit(10)
    scene.commit_plainly(20)
    assert scene.offset(stable=True) == 20
    scene.end()
    assert scene.offset(stable=True) == 20
    scene.take_over()
    assert scene.offset(stable=True) == 20


@pytest.mark.parametrize("order", [(7, 8), (8, 7)])
def test_of_two_transactions_the_later_record_counts_whichever_ended_first(order: tuple[int, int]) -> None:
    scene = Scene()
    scene.commit(10, producer_id=7)
    scene.commit(20, producer_id=8)
    scene.end(order[0])
    assert scene.offset(stable=True) == "unstable"
    scene.end(order[1])
    assert scene.offset(stable=True) == 20
    scene.take_over()
    assert scene.offset(stable=True) == 20


def test_a_marker_of_another_role_or_producer_ends_nothing() -> None:
    scene = Scene()
    scene.commit(10)
    scene.coordinator.end_transaction(0, 1, 7, committed=True)
    scene.coordinator.end_transaction(3, 0, 7, committed=True)
    scene.end(99)
    assert scene.offset(stable=True) == "unstable"


# Fencing by the group (KIP-447).


def test_a_zombie_of_the_group_commits_nothing() -> None:
    scene = Scene()
    member = scene.member()
    assert codes(scene.commit(10, member=member)) == [ErrorCode.NONE]
    assert codes(scene.commit(11, member=member, generation=member.generation_id - 1)) == [ErrorCode.ILLEGAL_GENERATION]
    stranger = JoinReply(0, "stranger", member.generation_id)
    assert codes(scene.commit(12, member=stranger)) == [ErrorCode.UNKNOWN_MEMBER_ID]
    scene.end()
    assert scene.offset() == 10


def test_a_producer_that_names_no_member_may_commit_to_a_group_with_members() -> None:
    scene = Scene()
    scene.member()
    assert codes(scene.commit(10)) == [ErrorCode.NONE]


def test_a_generation_of_a_group_that_is_not_there_is_refused() -> None:
    scene = Scene()
    assert codes(scene.commit(10, member=JoinReply(0, "m", 3))) == [ErrorCode.ILLEGAL_GENERATION]


def test_offsets_of_a_partition_that_is_not_led_here_are_refused() -> None:
    scene = Scene()
    scene.coordinator.resign(0)
    assert codes(scene.commit(10)) == [ErrorCode.NOT_COORDINATOR]


# Groups that have such offsets.


def test_a_group_with_pending_offsets_alone_is_there_and_does_not_expire() -> None:
    scene = Scene()
    scene.commit(10)
    scene.take_over()
    assert [group.group_id for group in scene.coordinator.list_groups().groups] == [GROUP]
    scene.clock.advance(LIMITS.retention_ms / 1000 + 2 * LIMITS.expiry_check_ms / 1000)
    assert [group.group_id for group in scene.coordinator.list_groups().groups] == [GROUP]
    scene.end()
    assert scene.offset() == 10


def test_a_deleted_group_takes_its_pending_offsets_with_it() -> None:
    scene = Scene()
    scene.commit(10)
    heard: list[int] = []
    scene.coordinator.delete(GROUP, heard.append)
    assert heard == [ErrorCode.NONE]
    scene.end()
    assert scene.offset(stable=True) == -1
    scene.take_over()
    assert scene.offset(stable=True) == -1


def test_pending_offsets_of_a_deleted_topic_are_dropped() -> None:
    scene = Scene()
    scene.commit(10)
    scene.coordinator.drop_topics({TOPIC_ID})
    scene.end()
    assert scene.offset(stable=True) == -1


def test_all_offsets_name_the_unstable_ones_only_to_who_wants_stable_ones() -> None:
    scene = Scene()
    scene.commit_plainly(5, partition=1)
    scene.commit(10, partition=0)
    scene.commit(6, partition=1)
    assert scene.coordinator.fetch_offsets(GROUP, None).offsets[0].committed_offset == 5
    stable = scene.coordinator.fetch_offsets(GROUP, None, True).offsets
    unstable = ErrorCode.UNSTABLE_OFFSET_COMMIT
    assert {(one.partition_index, one.error_code) for one in stable} == {(0, unstable), (1, unstable)}


@proves("T2")
def test_any_history_leaves_what_a_replay_of_it_leaves(seed: int) -> None:
    """Random commits, plain and in transactions, and markers; the coordinator after it, and one that reads the log, and
    the rule itself agree: of the records of a key that count the last one does."""
    chance = random.Random(seed)
    scene = Scene()
    for step in range(400):
        partition, producer = chance.randrange(3), chance.randrange(4)
        match chance.randrange(6):
            case 0:
                scene.commit_plainly(step, partition)
            case 1 | 2 | 3:
                scene.commit(step, producer, partition=partition)
            case 4:
                scene.end(producer, committed=chance.random() < 0.6)
            case _ if chance.random() < 0.2:
                scene.take_over()
        if step % 20 == 0:
            found = [scene.offset(partition=n) for n in range(3)]
            stable = [scene.offset(stable=True, partition=n) for n in range(3)]
            assert found == [by_rule(scene.log, n) for n in range(3)], f"at step {step}"
            scene.take_over()
            assert found == [scene.offset(partition=n) for n in range(3)], f"at step {step}"
            assert stable == [scene.offset(stable=True, partition=n) for n in range(3)], f"at step {step}"


def by_rule(log: list[Entry], partition: int) -> int:
    """Of the records of the partition that count, the offset in the last."""
    committed = -1
    for at, (first, second) in enumerate(log):
        if isinstance(second, bool):
            continue
        if isinstance(first, ProducerEpoch):
            ends = (end for producer, end in log[at:] if producer == first.producer_id and isinstance(end, bool))
            if not next(ends, False):
                continue
        for key, value in second:
            found = decode_key(key)
            if isinstance(found, OffsetKey) and found.partition == partition and value is not None:
                committed = decode_offset(value).offset
    return committed


def test_the_count_of_pending_offsets_comes_back_to_nothing() -> None:
    offsets, key = TransactionalOffsets(), OffsetKey("g", "t", 0)
    kept = OffsetAndMetadata(1, 0, "", 0)
    offsets.appending([key])
    offsets.appended(ProducerEpoch(1, 0), {key: kept})
    offsets.put(ProducerEpoch(2, 0), key, kept)
    assert (len(list(offsets)), set(offsets.of("g"))) == (2, {("t", 0)})
    assert offsets.end(1, committed=True) == {key: kept}
    offsets.drop(key)
    assert (list(offsets), set(offsets.of("g")), offsets.places) == ([], set(), {})
    assert offsets.end(2, committed=True) == {}


def test_what_lost_its_marker_does_not_count_with_the_next_transaction_of_its_producer() -> None:
    offsets, lost, next_ = TransactionalOffsets(), OffsetKey("g", "t", 0), OffsetKey("g", "t", 1)
    kept = OffsetAndMetadata(1, 0, "", 0)
    offsets.put(ProducerEpoch(1, 0), lost, kept)
    offsets.put(ProducerEpoch(1, 1), next_, kept)
    assert set(offsets.of("g")) == {("t", 1)}
    assert offsets.end(1, committed=True) == {next_: kept}
    offsets.put(ProducerEpoch(1, 0), lost, kept)
    assert set(offsets.of("g")) == {("t", 0)}
