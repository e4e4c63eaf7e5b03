"""Columns of anybody's table as those of records: `key=user_id,value=*,timestamp=created_at`.

    key        text or binary; a whole number is written as text
    value      text or binary as it is, anything else as JSON; `*` is an object of all columns
    timestamp  a timestamp (without a zone: UTC), a date, or a whole number of ms
    headers    a list of structs of key and value, or a map, of text or binary
    partition  a whole number; a row where it is null goes where its key says

A name with dots goes into structs, unless a column has just that name; that of a partition does not. JSON has times as
ISO 8601, decimals as text, binary as base64, and null for numbers that it does not know. Types are checked once, on a
schema; rows are turned as columns, but those that become JSON.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import OperatorError, SettingError
from headrace.records.arrow import HEADERS_TYPE, TIMESTAMP_TYPE

FIELDS: Final = ("key", "value", "timestamp", "headers", "partition")
ALL: Final = "*"

_WANTED: Final = {
    "key": "text, binary or a whole number",
    "timestamp": "a timestamp, a date or a whole number of ms",
    "headers": "a list of structs of key and value, or a map, of text or binary",
    "partition": "a whole number",
}
_BYTES: Final = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def parse(text: str) -> dict[str, str]:
    """`key=user_id,value=payload` by field; SettingError if it is anything else."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, column = (each.strip() for each in part.partition("="))
        if not equals or not column or name not in FIELDS:
            raise SettingError(f"{part.strip()!r} is not FIELD=COLUMN with one of {', '.join(FIELDS)}")
        if name in found:
            raise SettingError(f"{name} is given twice: {found[name]!r} and {column!r}")
        if column == ALL and name != "value":
            raise SettingError(f"{name}={ALL} is not understood: only a value can be made of all columns")
        found[name] = column
    return found


class RecordColumns:
    """Checked on the schema of a table; with no mapping, its columns that have the names of fields."""

    def __init__(self, given: Mapping[str, str], schema: pa.Schema) -> None:
        named = {name: name for name in FIELDS if name in schema.names}
        self._columns = dict(given) or named
        self._types: dict[str, pa.DataType] = {}
        told = ", ".join(schema.names) or "none"
        if "value" not in self._columns:
            why = "--columns has no value" if given else "the table has no column 'value'"
            raise SettingError(f"{why}: name one, as value=COLUMN, or value={ALL} for all as JSON; it has {told}")
        for name, column in self._columns.items():
            if column == ALL:
                continue
            # How far partitions go is asked of the files' statistics, which are of whole columns.
            kind = _type_at(schema, column) if name != "partition" or column in schema.names else None
            if kind is None:
                raise SettingError(f"{name}={column}: the table has no column {column!r}; it has {told}")
            if not _fits(name, kind):
                raise SettingError(f"{name}={column}: column {column!r} is {kind}, and has to be {_WANTED[name]}")
            self._types[name] = kind
        self._schema = schema

    @property
    def needed(self) -> list[str]:
        """Columns of the table that are to be read."""
        if self._columns["value"] == ALL:
            return list(self._schema.names)
        roots = {_root(self._schema, column) for column in self._columns.values()}
        return [name for name in self._schema.names if name in roots]

    def column_of(self, field: str) -> str | None:
        return self._columns.get(field)

    def turn(self, rows: pa.Table) -> pa.Table:
        """The rows as records: columns of `FIELDS`, those that are mapped."""
        found = {}
        for name, column in self._columns.items():
            if column == ALL:
                found[name] = pa.chunked_array([_as_json(rows.select(self._schema.names))], pa.binary())
            else:
                try:
                    found[name] = _turned(name, _cells(rows, self._schema, column))
                except pa.ArrowException as error:
                    raise OperatorError(f"{name}={column}: {error}") from None
        return pa.table(found)


def _root(schema: pa.Schema, column: str) -> str:
    return column if column in schema.names else column.split(".", maxsplit=1)[0]


def _type_at(schema: pa.Schema, column: str) -> pa.DataType | None:
    """None if there is no such column, or more than one."""
    if schema.get_field_index(column) >= 0:
        return schema.field(column).type
    first, *rest = column.split(".")
    if not rest or schema.get_field_index(first) < 0:
        return None
    kind = schema.field(first).type
    for part in rest:
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _cells(rows: pa.Table, schema: pa.Schema, column: str) -> pa.ChunkedArray:
    if column in schema.names:
        return rows[column]
    first, *rest = column.split(".")
    return pc.struct_field(rows[first], rest)


def _fits(field: str, kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    match field:
        case "key":
            return _is_bytes(kind) or bool(pa.types.is_integer(kind))
        case "timestamp":
            return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_integer(kind))
        case "partition":
            return bool(pa.types.is_integer(kind))
        case "headers":
            return _is_headers(kind)
        case _:
            return True


def _is_bytes(kind: pa.DataType) -> bool:
    return any(is_such(kind) for is_such in _BYTES)


def _is_headers(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return _is_bytes(kind.key_type) and _is_bytes(kind.item_type)
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    pair = kind.value_type
    if not pa.types.is_struct(pair) or {each.name for each in pair} != {"key", "value"}:
        return False
    return _is_bytes(pair.field("key").type) and _is_bytes(pair.field("value").type)


def _turned(field: str, cells: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = cells.type
    if pa.types.is_dictionary(kind):
        cells, kind = cells.cast(kind.value_type), kind.value_type
    match field:
        case "key" | "value" if _is_bytes(kind):
            return cells.cast(pa.binary())
        case "key":
            return cells.cast(pa.string()).cast(pa.binary())
        case "value":
            return pa.chunked_array([_json_of(cells)], pa.binary())
        case "timestamp" if pa.types.is_integer(kind):
            return cells.cast(pa.int64()).cast(pa.timestamp("ms", tz="UTC")).cast(TIMESTAMP_TYPE)
        case "timestamp" if pa.types.is_timestamp(kind) and kind.tz is None:
            return cells.cast(pa.timestamp("us"), safe=False).cast(TIMESTAMP_TYPE)
        case "timestamp" if pa.types.is_date(kind):
            return cells.cast(pa.timestamp("us")).cast(TIMESTAMP_TYPE)
        case "timestamp":
            return cells.cast(TIMESTAMP_TYPE, safe=False)
        case "partition":
            return cells.cast(pa.int32())
        case _:
            return cells.cast(HEADERS_TYPE)


def _as_json(rows: pa.Table) -> pa.Array:
    return pa.array([_dumped(row) for row in rows.to_pylist()], pa.binary())


def _json_of(cells: pa.ChunkedArray) -> pa.Array:
    return pa.array([None if cell is None else _dumped(cell) for cell in cells.to_pylist()], pa.binary())


def _dumped(cell: Any) -> bytes:
    try:
        text = json.dumps(cell, default=_plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(cell), default=_plain, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _plain(cell: Any) -> Any:
    match cell:
        case datetime.datetime() if cell.tzinfo is not None:
            return cell.astimezone(datetime.UTC).replace(tzinfo=None).isoformat() + "Z"
        case datetime.datetime() | datetime.date() | datetime.time():
            return cell.isoformat()
        case datetime.timedelta():
            return cell.total_seconds()
        case bytes():
            return base64.b64encode(cell).decode()
        case _:
            return str(cell)


def _finite(cell: Any) -> Any:
    match cell:
        case float() if not math.isfinite(cell):
            return None
        case dict():
            return {name: _finite(each) for name, each in cell.items()}
        case list() | tuple():
            return [_finite(each) for each in cell]
        case _:
            return cell
