"""Requests of a transaction, and what their answers say; what it takes to end one from anywhere.

InitProducerId with a transactional id, AddPartitionsToTxn (to version 3: later ones are for brokers), AddOffsetsToTxn,
TxnOffsetCommit and EndTxn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from headrace.client.connection.broker_connection import Body
from headrace.errors import ErrorCode, InvalidRequest, Unsupported
from headrace.wire import api as apis
from headrace.wire.codec import encode_request
from headrace.wire.message import Message

NO_GENERATION: Final = -1
TWO_PHASE_FROM: Final = 6
"""Of InitProducerId."""

Offsets = Mapping[tuple[str, int], int]
"""By topic and partition, the next record to read."""


class ProducerIdentity(NamedTuple):
    """What brokers know a producer by, and tell an old one from a new one of the same transactional id."""

    producer_id: int = -1
    epoch: int = -1

    @property
    def is_known(self) -> bool:
        return self.producer_id >= 0


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Who commits offsets: a member of a generation, so that one which the group has given up is refused; or nobody
    in particular."""

    group: str
    member_id: str = ""
    generation: int = NO_GENERATION
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """All that it takes to commit or abort a prepared transaction, from any process: see `headrace.transactions`.

    It can be pickled, and written as text: `str(prepared)`, `PreparedTransaction.parse(text)`.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> PreparedTransaction:
        """What `str` gave."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError):
            raise InvalidRequest(f"{text!r} is no prepared transaction") from None
        fields = (found.transactional_id, found.producer_id, found.producer_epoch)
        if tuple(map(type, fields)) != (str, int, int):
            raise InvalidRequest(f"{text!r} is no prepared transaction")
        return found


def begin_request(
    transactional_id: str,
    identity: ProducerIdentity,
    timeout_ms: int,
    *,
    two_phase: bool,
) -> Body:
    """InitProducerId: takes over from whoever had the transactional id, or goes on as the one that has the identity."""
    message = Message(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        enable2_pc=two_phase,
        keep_prepared_txn=False,
    )

    def parts(version: int) -> list[bytes]:
        if version < TWO_PHASE_FROM:
            raise Unsupported("the broker has no two-phase transactions: its timeout would end this one")
        return [encode_request(apis.INIT_PRODUCER_ID, version, message)]

    return parts if two_phase else message


def add_partitions_request(
    transactional_id: str, identity: ProducerIdentity, places: Iterable[tuple[str, int]]
) -> Message:
    topics: dict[str, list[int]] = {}
    for topic, partition in places:
        topics.setdefault(topic, []).append(partition)
    return Message(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=identity.producer_id,
        v3_and_below_producer_epoch=identity.epoch,
        v3_and_below_topics=[Message(name=name, partitions=numbers) for name, numbers in topics.items()],
    )


def add_offsets_request(transactional_id: str, identity: ProducerIdentity, group: str) -> Message:
    return Message(
        transactional_id=transactional_id,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        group_id=group,
    )


def offsets_commit_request(
    transactional_id: str, identity: ProducerIdentity, offsets: Offsets, member: GroupMember, metadata: str = ""
) -> Message:
    topics: dict[str, list[Message]] = {}
    for (topic, partition), offset in offsets.items():
        row = Message(partition_index=partition, committed_offset=offset, committed_metadata=metadata)
        topics.setdefault(topic, []).append(row)
    return Message(
        transactional_id=transactional_id,
        group_id=member.group,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        generation_id=member.generation,
        member_id=member.member_id,
        group_instance_id=member.instance_id,
        topics=[Message(name=name, partitions=partitions) for name, partitions in topics.items()],
    )


def end_request(transactional_id: str, identity: ProducerIdentity, *, commit: bool) -> Message:
    return Message(
        transactional_id=transactional_id,
        producer_id=identity.producer_id,
        producer_epoch=identity.epoch,
        committed=commit,
    )


def error_code(answer: Message) -> int:
    return int(answer.error_code)


def added_code(answer: Message) -> int:
    """Of AddPartitionsToTxn: the first that says what is wrong. Partitions that were not tried because of it say so."""
    rows = (row for topic in answer.results_by_topic_v3_and_below for row in topic.results_by_partition)
    return _first(int(row.partition_error_code) for row in rows)


def committed_code(answer: Message) -> int:
    """Of TxnOffsetCommit."""
    return _first(int(row.error_code) for topic in answer.topics for row in topic.partitions)


def _first(codes: Iterable[int]) -> int:
    found = [code for code in codes if code != ErrorCode.NONE]
    return next((code for code in found if code != ErrorCode.OPERATION_NOT_ATTEMPTED), found[0] if found else 0)
