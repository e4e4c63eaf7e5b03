"""Offsets in transactions on their way through the log: appended under their producer, ended by its marker, and read
back by whoever leads next."""

from __future__ import annotations

import errno

import pytest

from chosen_layout import log_path
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.state_log import TIMEOUT_MS
from headrace.errors import ErrorCode
from headrace.groups.messages import CommitRequest, OffsetToCommit, PartitionResult, TransactionalCommit
from headrace.records import batch
from headrace.records.batch import BatchHeader
from headrace.settings.values import log_settings
from headrace.transactions.marker_appends import Codes, Decision, MarkerAppends
from headrace.transactions.messages import MarkerRequest
from kafka_protocol.test_group_loading import BROKER, OFFSETS, OTHER, Scene, topic_id
from proving import proves

PRODUCER, EPOCH = 12, 3


class Transacting:
    """A broker that leads the partition of the offsets topic, and a producer with a transaction."""

    def __init__(self, layout: str = "") -> None:
        self.scene = Scene(layout=layout)
        self.scene.lead()
        self.scene.clock.run_soon()

    def commit(self, offset: int, epoch: int = EPOCH, *, verified: bool = True) -> list[int]:
        scene = self.scene
        partition = scene.partitions.get(OFFSETS_TOPIC, 0)
        if verified:
            partition.verified(partition.verification(PRODUCER, epoch))
        codes: list[int] = []

        def reply(results: tuple[PartitionResult, ...]) -> None:
            codes.extend(result.error_code for result in results)

        commit = CommitRequest((OffsetToCommit("t", 0, offset, 0, "", topic_id(scene.image, "t")),))
        scene.groups.commit_in_transaction("g", TransactionalCommit(PRODUCER, epoch, commit), reply)
        scene.clock.run_soon()
        return codes

    def end(self, *, committed: bool, number: int = 1, epoch: int = EPOCH) -> Codes:
        scene = self.scene
        heard: list[Codes] = []

        def decided(decision: Decision) -> None:
            scene.groups.end_transaction(
                0, decision.partition.epoch, decision.producer_id, committed=decision.committed
            )

        appends = MarkerAppends(scene.partitions, lambda _topic, _index: ErrorCode.NOT_LEADER_OR_FOLLOWER, decided)
        request = MarkerRequest("tx", PRODUCER, epoch, 1, committed, number, 1, ((OFFSETS_TOPIC, 0),))
        appends.write(request, request.partitions, heard.append)
        scene.partitions.end_turn()
        return heard[0] if heard else {}

    def offset(self, *, stable: bool = False) -> int | str:
        (found,) = self.scene.groups.fetch_offsets("g", [("t", 0)], stable).offsets
        return "unstable" if found.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT else found.committed_offset

    def lead_again(self) -> None:
        self.scene.follow()
        self.scene.lead()
        for _ in range(20):
            self.scene.clock.run_soon()

    def headers(self) -> list[BatchHeader]:
        return [batch.check(piece.read()) for _, piece in self.scene.log.headers(0)]


@pytest.fixture(params=["partitioned", "shared"])
def transacting(request: pytest.FixtureRequest) -> Transacting:
    return Transacting(request.param)


@proves("T1")
def test_offsets_are_appended_under_the_id_and_epoch_of_their_producer(transacting: Transacting) -> None:
    assert transacting.commit(5) == [ErrorCode.NONE]
    (header,) = transacting.headers()
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (PRODUCER, EPOCH, -1)
    assert header.is_transactional
    assert not header.is_control
    assert transacting.scene.log.producers.states[PRODUCER].txn_start == 0


@proves("T2")
@pytest.mark.parametrize("committed", [True, False])
def test_who_leads_next_reads_back_what_is_pending_and_what_was_decided(
    transacting: Transacting, committed: bool
) -> None:
    transacting.scene.commit(3)
    transacting.commit(5)
    transacting.lead_again()
    assert (transacting.offset(), transacting.offset(stable=True)) == (3, "unstable")
    transacting.end(committed=committed)
    after = 5 if committed else 3
    assert transacting.offset(stable=True) == after
    transacting.lead_again()
    assert transacting.offset(stable=True) == after


@proves("T2")
@pytest.mark.parametrize("committed", [True, False])
def test_a_marker_that_comes_while_the_groups_are_loaded_is_not_missed(
    transacting: Transacting, committed: bool
) -> None:
    """A leader takes markers as soon as it leads: its groups, which append nothing before they are open, hear of them
    all the same."""
    scene = transacting.scene
    scene.commit(3)
    transacting.commit(5)
    scene.follow()
    scene.elected()
    scene.followed.follow()
    assert scene.committed()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert transacting.end(committed=committed) == {(OFFSETS_TOPIC, 0): ErrorCode.NONE}
    assert scene.committed()[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    for _ in range(20):
        scene.clock.run_soon()
    assert transacting.offset(stable=True) == (5 if committed else 3)


def test_transactions_follow_each_other_under_one_epoch_or_several(transacting: Transacting) -> None:
    for number, epoch in enumerate([EPOCH, EPOCH, EPOCH + 1, EPOCH + 2]):
        assert transacting.commit(10 + number, epoch) == [ErrorCode.NONE]
        assert transacting.commit(20 + number, epoch, verified=False) == [ErrorCode.NONE]
        transacting.end(committed=number != 1, number=number, epoch=epoch)
        assert transacting.offset(stable=True) == (20 + number if number != 1 else 20)
    transacting.lead_again()
    assert transacting.offset(stable=True) == 23


@proves("T1")
def test_an_offset_of_a_transaction_that_nobody_verified_is_refused(transacting: Transacting) -> None:
    assert transacting.commit(5, verified=False) == [ErrorCode.INVALID_TXN_STATE]
    assert transacting.offset(stable=True) == -1
    assert transacting.headers() == []


def test_a_fenced_producer_commits_nothing(transacting: Transacting) -> None:
    transacting.commit(5, EPOCH + 1)
    assert transacting.commit(6, EPOCH, verified=False) == [ErrorCode.INVALID_PRODUCER_EPOCH]
    transacting.end(committed=True, epoch=EPOCH + 1)
    assert transacting.offset(stable=True) == 5


@proves("T2")
def test_a_late_marker_decides_nothing_of_a_later_transaction(transacting: Transacting) -> None:
    transacting.commit(5)
    transacting.end(committed=False, number=1)
    transacting.commit(6)
    assert transacting.end(committed=False, number=1) == {(OFFSETS_TOPIC, 0): ErrorCode.NONE}
    assert transacting.offset(stable=True) == "unstable"
    transacting.end(committed=True, number=2)
    assert transacting.offset(stable=True) == 6


def test_what_is_appended_and_not_below_the_watermark_in_time_is_still_pending() -> None:
    transacting = Transacting()
    scene = transacting.scene
    partition = scene.elected({BROKER: "a", OTHER: "b"}, (BROKER, OTHER))
    scene.followed.follow()
    for _ in range(20):
        scene.clock.run_soon()
    assert transacting.commit(5) == []
    assert transacting.offset(stable=True) == "unstable"
    scene.clock.advance(TIMEOUT_MS / 1000 + 0.1)
    scene.log.settings = log_settings({}, {"max.message.bytes": "33554432", "min.insync.replicas": "1"})
    scene.partitions.settings_changed(partition)
    scene.partitions.confirmed(partition, {BROKER: "a"}, 9)
    scene.clock.run_soon()
    transacting.end(committed=True)
    assert transacting.offset(stable=True) == 5


def test_what_could_not_be_written_is_not_pending() -> None:
    transacting = Transacting("partitioned")
    scene = transacting.scene
    scene.commit(3)
    scene.disk.fail_write(log_path("/data", OFFSETS, "partitioned"), errno.ENOSPC)
    assert transacting.commit(5) == [ErrorCode.NOT_COORDINATOR]
    assert transacting.offset(stable=True) == 3
    scene.disk.mend()
    assert transacting.commit(6) == [ErrorCode.NONE]
    transacting.end(committed=True)
    assert transacting.offset(stable=True) == 6
