"""TxnOffsetCommit, versions 0 to 5. 2: leader epochs; 3: member, generation and flexible; 4: TRANSACTION_ABORTABLE; 5:
the offsets partition is added to the transaction by the broker, not by AddOffsetsToTxn before.

Answered when the offsets are in __consumer_offsets as part of the transaction. They count when that is committed.
"""

from __future__ import annotations

from typing import Final

from headrace.cluster.names import OFFSETS_TOPIC
from headrace.coordinators.state_log import partition_of
from headrace.errors import ErrorCode, HeadraceError
from headrace.groups.messages import CommitRequest, PartitionResult, TransactionalCommit
from headrace.groups.offsets import FAULTS, all_failed
from headrace.kafka.api import offset_commit
from headrace.kafka.connection import Request
from headrace.kafka.first_writes import Support, Transaction, support_of

ABORTABLE_FROM: Final = 4
NOMINAL_BYTES: Final = 100
"""What an offset that waits takes of the memory for writes that do."""


def handle(request: Request) -> None:
    body, services = request.body, request.services
    offsets, refused, _ = offset_commit.wanted_offsets(request)
    commit = CommitRequest(offsets, body.member_id, body.generation_id, body.group_instance_id)
    wanted = TransactionalCommit(body.producer_id, body.producer_epoch, commit)
    support = support_of(request.version, ABORTABLE_FROM)

    def reply(results: tuple[PartitionResult, ...]) -> None:
        request.reply(offset_commit.response([*map(told, results), *refused], {}))

    def told(result: PartitionResult) -> PartitionResult:
        if result.error_code != ErrorCode.INVALID_TXN_STATE or support == Support.VERIFIED:
            return result
        return PartitionResult(result.topic, result.partition_index, ErrorCode.TRANSACTION_ABORTABLE)

    def go_on(error: HeadraceError | None) -> None:
        if error is None:
            services.groups.commit_in_transaction(body.group_id, wanted, reply)
        else:
            reply(all_failed(commit, FAULTS.get(error.kafka_code, error.kafka_code)))

    count = services.groups.partition_count
    partition = services.partitions.find(OFFSETS_TOPIC, partition_of(body.group_id, count)) if count else None
    if partition is None:
        reply(all_failed(commit, ErrorCode.NOT_COORDINATOR))
        return
    transaction = Transaction(body.transactional_id, body.producer_id, body.producer_epoch, support)
    try:
        if services.first_writes.must_wait(partition, transaction):
            services.first_writes.hold(partition, transaction, NOMINAL_BYTES * len(offsets), go_on)
        else:
            go_on(None)
    except HeadraceError as error:
        go_on(error)
