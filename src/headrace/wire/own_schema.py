"""Bodies of Headrace's own APIs, in the terms of `schema`: encoded and decoded as Kafka's flexible versions are.

KeyQuery, version 0: records of a topic by key, of the partitions named, which the broker asked must lead. Of each
partition at most `max_records` and about `max_bytes` come back, as record batches that hold nothing else; the newest
ones if `newest_first`, else the oldest. `searched` is the `next_offset` (or `first_offset`) of a request that goes on;
`done` tells that nothing is left. With `max_records` 0 only the positions are answered.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.wire.api import KEY_QUERY
from headrace.wire.schema import STRUCT, Direction, Field, Struct

_DEFAULTS: Final[dict[str, Any]] = {"string": "", "bytes": b"", "bool": False}


def _field(name: str, kind: str, *, nullable: bool = False) -> Field:
    default = None if nullable else _DEFAULTS.get(kind, 0)
    return Field(name, kind, None, False, nullable, None, default, False)


def _array(name: str, of: Struct) -> Field:
    return Field(name, STRUCT, of, True, False, None, (), False)


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
STRUCTS: Final[dict[tuple[int, int, Direction], Struct]] = {
    (KEY_QUERY, 0, "request"): _struct(
        "KeyQueryRequest",
        _field("topic", "string"),
        _field("key", "bytes"),
        _field("from_ms", "int64"),
        _field("to_ms", "int64"),
        _field("newest_first", "bool"),
        _field("max_records", "int32"),
        _field("max_bytes", "int32"),
        _array("partitions", _ASKED),
    ),
    (KEY_QUERY, 0, "response"): _struct(
        "KeyQueryResponse",
        _field("throttle_time_ms", "int32"),
        _array("partitions", _ANSWERED),
    ),
}
