"""kio's own reader and writer as the other end of the wire: an independent codec to compare ours with.

Values are drawn from kio's dataclasses directly, so that a mistake in our reading of them shows as well.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import types
import typing
import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any

from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from headrace.wire.api import KAFKA_APIS
from headrace.wire.message import ZERO_UUID, Message
from headrace.wire.schema import Direction

_INTEGERS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_UNSIGNED = {"uint16": 16, "uint32": 32}


def every_body() -> Iterator[tuple[int, int, Direction]]:
    """Each (API key, version, direction) that is served."""
    for api in KAFKA_APIS.values():
        for version in range(api.min_version, api.max_version + 1):
            yield api.key, version, "request"
            yield api.key, version, "response"


def entity_type(api_key: int, version: int, direction: Direction) -> Any:
    load: Any = load_request_schema if direction == "request" else load_response_schema
    return load(api_key, version)


def write(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def read(cls: Any, body: bytes) -> Any:
    entity, size = entity_reader(cls)(body, 0)
    assert size == len(body)
    return entity


@cache
def entities(cls: Any) -> st.SearchStrategy[Any]:
    """Valid values of a kio dataclass."""
    return st.builds(cls, **{field.name: _values(field) for field in dataclasses.fields(cls)})


def _values(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    value_type, nullable = _without_none(field.type)
    values: st.SearchStrategy[Any]
    if typing.get_origin(value_type) is tuple:
        element, element_nullable = _without_none(typing.get_args(value_type)[0])
        values = st.lists(_value(field, element, element_nullable), max_size=3).map(tuple)
    else:
        values = _value(field, value_type, nullable)
    # A tagged field that is null is one that is absent.
    if nullable and (field.metadata.get("tag") is None or field.default is None):
        values = st.none() | values
    return values


def _value(field: dataclasses.Field[Any], value_type: Any, nullable: bool) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(value_type):
        return entities(typing.cast(Any, value_type))
    kind = field.metadata["kafka_type"]
    if kind in _INTEGERS:
        bits = _INTEGERS[kind]
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    if kind in _UNSIGNED:
        return st.integers(0, (1 << _UNSIGNED[kind]) - 1)
    simple: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "string": st.text(max_size=12),
        "bytes": st.binary(max_size=12),
        "records": st.binary(max_size=200),
        "uuid": st.uuids(),
        "float64": st.floats(allow_nan=False),
        "error_code": st.sampled_from(ErrorCode),
        "timedelta_i32": _durations(1 << 31),
        "timedelta_i64": _durations(1 << 40),
        # kio's timestamps are whole seconds.
        "datetime_i64": st.integers(0, 1 << 32).map(lambda s: datetime.datetime.fromtimestamp(s, datetime.UTC)),
    }
    return st.none() | simple[kind] if kind == "uuid" and nullable else simple[kind]


def _durations(bound: int) -> st.SearchStrategy[datetime.timedelta]:
    return st.integers(-bound, bound - 1).map(lambda ms: datetime.timedelta(milliseconds=ms))


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) is not types.UnionType:
        return annotation, False
    (value_type,) = (member for member in typing.get_args(annotation) if member is not types.NoneType)
    return value_type, True


def to_message(entity: Any) -> Message:
    """The message that our codec has for a kio entity."""
    fields = {}
    for field in dataclasses.fields(entity):
        kind = field.metadata.get("kafka_type", "")
        timed = kind.startswith(("timedelta", "datetime"))
        value = getattr(entity, field.name)
        fields[field.name + "_ms" if timed else field.name] = _to_plain(value, kind)
    return Message(**fields)


def _to_plain(value: Any, kind: str) -> Any:
    if isinstance(value, tuple):
        return [_to_plain(element, kind) for element in value]
    if dataclasses.is_dataclass(value):
        return to_message(value)
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(milliseconds=1)
    if isinstance(value, datetime.datetime):
        return int(value.timestamp()) * 1000
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, ErrorCode):
        return value.value
    if value is None:
        return {"uuid": ZERO_UUID, "datetime_i64": -1}.get(kind)
    return value
