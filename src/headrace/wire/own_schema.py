"""Bodies of Headrace's own APIs, in the terms of `schema`: encoded and decoded as Kafka's flexible versions are.

KeyQuery, version 0: records of a topic by key, of the partitions named, which the broker asked must lead. Of each
partition at most `max_records` and about `max_bytes` come back, as record batches that hold nothing else; the newest
ones if `newest_first`, else the oldest. `searched` is the `next_offset` (or `first_offset`) of a request that goes on;
`done` tells that nothing is left. With `max_records` 0 only the positions are answered.

ReplicaPositions, version 0: every replica that the broker asked holds, leader or not, with its offsets; and the offsets
that an election outside the in-sync set has cost a partition that it leads (`next_offset` -1: nobody knows how many).

PlanPlacement, version 0: `action` is show, rebalance, drain or undrain, the last two of `broker_id`. Answered are the
brokers that are being drained and the moves that the action means, with the replicas of each before and after. Unless
`dry_run`, drain and undrain are ordered as well; a rebalance is only planned (AlterPartitionReassignments orders it).

AcceptMetadata, version 0: answered is what brokers know that the cluster's metadata, restored from an older copy, does
not; nothing if nobody doubts it. Unless `dry_run`, it holds from then on as it is.

RecallRecords, version 0: delayed records, by the offsets that their producer was told, of partitions that the broker
asked must lead, are not to be delivered. Answered are the same in the same order: without an error if a record never
will be, else INVALID_RECORD_STATE if it is too late.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.wire.api import ACCEPT_METADATA, KEY_QUERY, PLAN_PLACEMENT, RECALL_RECORDS, REPLICA_POSITIONS
from headrace.wire.schema import STRUCT, Direction, Field, Struct

_DEFAULTS: Final[dict[str, Any]] = {"string": "", "bytes": b"", "bool": False}


def _field(name: str, kind: str, *, nullable: bool = False) -> Field:
    default = None if nullable else _DEFAULTS.get(kind, 0)
    return Field(name, kind, None, False, nullable, None, default, False)


def _array(name: str, of: Struct) -> Field:
    return Field(name, STRUCT, of, True, False, None, (), False)


def _numbers(name: str) -> Field:
    return Field(name, "int32", None, True, False, None, (), False)


def _struct(name: str, *fields: Field) -> Struct:
    return Struct(name, True, fields, ())


_ASKED = _struct(
    "KeyQueryPartition",
    _field("partition_index", "int32"),
    _field("first_offset", "int64"),
    _field("next_offset", "int64"),
)
_ANSWERED = _struct(
    "KeyQueryFound",
    _field("partition_index", "int32"),
    _field("error_code", "int16"),
    _field("error_message", "string", nullable=True),
    _field("high_watermark", "int64"),
    _field("indexed_offset", "int64"),
    _field("searched", "int64"),
    _field("done", "bool"),
    _field("records", "records", nullable=True),
)
_REPLICA = _struct(
    "ReplicaPosition",
    _field("topic", "string"),
    _field("partition_index", "int32"),
    _field("leading", "bool"),
    _field("leader_epoch", "int32"),
    _field("log_start_offset", "int64"),
    _field("high_watermark", "int64"),
    _field("end_offset", "int64"),
)
_LOST = _struct(
    "LostOffsets",
    _field("topic", "string"),
    _field("partition_index", "int32"),
    _field("leader_epoch", "int32"),
    _field("first_offset", "int64"),
    _field("next_offset", "int64"),
)
_MOVE = _struct(
    "PlannedMove",
    _field("topic", "string"),
    _field("partition_index", "int32"),
    _numbers("before"),
    _numbers("after"),
)
_RECALL = _struct(
    "RecallRecord",
    _field("topic", "string"),
    _field("partition_index", "int32"),
    _field("offset", "int64"),
)
_RECALLED = _struct(
    "RecalledRecord",
    *_RECALL.fields,
    _field("error_code", "int16"),
    _field("error_message", "string", nullable=True),
)
_DIFFERENCE = _struct(
    "MetadataDifference",
    _field("kind", "string"),
    _field("topic", "string"),
    _field("partition_index", "int32"),
    _field("topic_id", "uuid"),
    _field("detail", "string"),
)
_DOUBT = _struct(
    "MetadataDoubt",
    _field("broker_id", "int32"),
    _field("seen_revision", "int64"),
    _field("found_revision", "int64"),
    _field("at_ms", "int64"),
    _field("difference_count", "int32"),
    _array("differences", _DIFFERENCE),
)
_KEY_QUERY = (
    _field("topic", "string"),
    _field("key", "bytes"),
    _field("from_ms", "int64"),
    _field("to_ms", "int64"),
    _field("newest_first", "bool"),
    _field("max_records", "int32"),
    _field("max_bytes", "int32"),
    _array("partitions", _ASKED),
)
_KEY_QUERY_ANSWER = _struct(
    "KeyQueryResponse",
    _field("throttle_time_ms", "int32"),
    _array("partitions", _ANSWERED),
)
STRUCTS: Final[dict[tuple[int, int, Direction], Struct]] = {
    (KEY_QUERY, 0, "request"): _struct("KeyQueryRequest", *_KEY_QUERY),
    (KEY_QUERY, 0, "response"): _KEY_QUERY_ANSWER,
    (KEY_QUERY, 1, "request"): _struct("KeyQueryRequest", *_KEY_QUERY, _field("isolation_level", "int8")),
    (KEY_QUERY, 1, "response"): _KEY_QUERY_ANSWER,
    (REPLICA_POSITIONS, 0, "request"): _struct("ReplicaPositionsRequest"),
    (REPLICA_POSITIONS, 0, "response"): _struct(
        "ReplicaPositionsResponse",
        _field("throttle_time_ms", "int32"),
        _array("replicas", _REPLICA),
        _array("lost", _LOST),
    ),
    (ACCEPT_METADATA, 0, "request"): _struct("AcceptMetadataRequest", _field("dry_run", "bool")),
    (ACCEPT_METADATA, 0, "response"): _struct(
        "AcceptMetadataResponse",
        _field("throttle_time_ms", "int32"),
        _field("error_code", "int16"),
        _field("error_message", "string", nullable=True),
        _array("doubts", _DOUBT),
    ),
    (RECALL_RECORDS, 0, "request"): _struct("RecallRecordsRequest", _array("records", _RECALL)),
    (RECALL_RECORDS, 0, "response"): _struct(
        "RecallRecordsResponse", _field("throttle_time_ms", "int32"), _array("records", _RECALLED)
    ),
    (PLAN_PLACEMENT, 0, "request"): _struct(
        "PlanPlacementRequest",
        _field("action", "string"),
        _field("broker_id", "int32"),
        _field("dry_run", "bool"),
    ),
    (PLAN_PLACEMENT, 0, "response"): _struct(
        "PlanPlacementResponse",
        _field("throttle_time_ms", "int32"),
        _field("error_code", "int16"),
        _field("error_message", "string", nullable=True),
        _numbers("draining"),
        _array("moves", _MOVE),
    ),
}
