"""DescribeTransactions, version 0.

Each transactional id as its coordinator has it. Producer id and epoch are those by which the transaction can be ended.
Of one that is open, fields of ours tell who opened it. One that is named twice is told once: it may have very many
partitions.
"""

from __future__ import annotations

from headrace.kafka.connection import Request
from headrace.transactions.messages import DescribedTransaction
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    describe = request.services.transactions.describe
    found = [_described(describe(name)) for name in dict.fromkeys(request.body.transactional_ids)]
    return Message(throttle_time_ms=0, transaction_states=found)


def _described(found: DescribedTransaction) -> Message:
    topics: dict[str, list[int]] = {}
    for topic, index in found.partitions:
        topics.setdefault(topic, []).append(index)
    return Message(
        error_code=found.error_code,
        transactional_id=found.transactional_id,
        transaction_state=found.state,
        transaction_timeout_ms=found.timeout_ms,
        transaction_start_time_ms=found.start_ms,
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        topics=[Message(topic=topic, partitions=indexes) for topic, indexes in topics.items()],
        owner_client_id=found.owner.client_id,
        owner_host=found.owner.host,
    )
