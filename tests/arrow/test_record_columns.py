"""Columns of any table as key, value, timestamp, headers and partition of records."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from headrace.arrow.record_columns import RecordColumns, parse
from headrace.errors import OperatorError, SettingError
from headrace.records.arrow import HEADERS_TYPE, TYPES, Builder

AT = datetime.datetime(2026, 11, 18, 12, 30, 15, 250_000)
ROWS = pa.table(
    {
        "user_id": pa.array([7, None], pa.int64()),
        "name": ["ann", "bob"],
        "kind": pa.array(["a", "b"]).dictionary_encode(),
        "amount": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(10, 2)),
        "score": [float("nan"), 2.5],
        "at": pa.array([AT, None], pa.timestamp("ns")),
        "zoned": pa.array([AT, AT], pa.timestamp("ms", tz="Europe/Berlin")),
        "day": pa.array([AT.date(), AT.date()], pa.date32()),
        "ms": pa.array([1_700_000_000_000, 5], pa.int64()),
        "raw": [b"\xff\x00", None],
        "tags": pa.array([[("t", "1"), ("u", "2")], None], pa.map_(pa.string(), pa.string())),
        "pairs": pa.array([None, [{"value": "x", "key": "k"}]]),
        "nested": [{"id": "n1", "deep": {"er": 3}}, {"id": None, "deep": None}],
        "part": pa.array([3, None], pa.int16()),
    }
)


def turned(**given: str) -> dict[str, Any]:
    rows = RecordColumns({"value": "name", **given}, ROWS.schema).turn(ROWS)
    assert all(column.type == TYPES[name] for name, column in zip(rows.schema.names, rows.columns, strict=True))
    Builder(rows.combine_chunks().to_batches()[0], now_ms=5).build(0, len(rows))
    return dict(rows.to_pydict())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"key": "user_id"}, [b"7", None]),
        ({"key": "name"}, [b"ann", b"bob"]),
        ({"key": "kind"}, [b"a", b"b"]),
        ({"key": "nested.id"}, [b"n1", None]),
        ({"value": "raw"}, [b"\xff\x00", None]),
        ({"value": "amount"}, [b'"1.50"', None]),
        ({"value": "score"}, [b"null", b"2.5"]),
        ({"value": "nested"}, [b'{"id":"n1","deep":{"er":3}}', b'{"id":null,"deep":null}']),
        ({"value": "nested.deep.er"}, [b"3", None]),
        ({"timestamp": "at"}, [AT.replace(tzinfo=datetime.UTC), None]),
        ({"timestamp": "zoned"}, [AT.replace(tzinfo=datetime.UTC)] * 2),
        ({"timestamp": "day"}, [datetime.datetime(2026, 11, 18, tzinfo=datetime.UTC)] * 2),
        ({"timestamp": "ms"}, [datetime.datetime.fromtimestamp(ms, datetime.UTC) for ms in (1_700_000_000, 0.005)]),
        ({"headers": "tags"}, [[{"key": "t", "value": b"1"}, {"key": "u", "value": b"2"}], None]),
        ({"headers": "pairs"}, [None, [{"key": "k", "value": b"x"}]]),
        ({"partition": "part"}, [3, None]),
    ],
)
def test_columns_become_those_of_records(given: dict[str, str], expected: list[Any]) -> None:
    ((name, _),) = given.items()
    assert turned(**given)[name] == expected


def test_all_columns_may_be_the_value_as_json() -> None:
    first, second = (json.loads(each) for each in turned(key="user_id", value="*")["value"])
    assert list(first) == ROWS.schema.names
    assert first["user_id"] == 7
    assert (first["amount"], first["score"], first["raw"]) == ("1.50", None, "/wA=")
    assert (first["at"], first["zoned"], first["day"]) == (
        "2026-11-18T12:30:15.250000",
        "2026-11-18T12:30:15.250000Z",
        "2026-11-18",
    )
    assert first["nested"] == {"id": "n1", "deep": {"er": 3}}
    assert (second["user_id"], second["at"], second["score"]) == (None, None, 2.5)


def test_without_a_mapping_columns_of_these_names_are_taken() -> None:
    rows = pa.table({"value": ["a"], "key": ["k"], "other": [1], "headers": pa.array([None], HEADERS_TYPE)})
    columns = RecordColumns({}, rows.schema)
    assert columns.needed == ["value", "key", "headers"]
    assert columns.turn(rows).to_pylist() == [{"key": b"k", "value": b"a", "headers": None}]
    assert RecordColumns({"value": "other"}, rows.schema).needed == ["other"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"value": "nam"}, "value=nam: the table has no column 'nam'; it has user_id, name, kind"),
        ({"key": "name"}, r"--columns has no value: name one, as value=COLUMN, or value=\* for all as JSON; it has u"),
        ({}, "the table has no column 'value': name one"),
        ({"value": "name", "key": "score"}, "key=score: column 'score' is double, and has to be text, binary or a wh"),
        ({"value": "name", "timestamp": "name"}, "'name' is string, and has to be a timestamp, a date or a whole numb"),
        ({"value": "name", "headers": "nested"}, "'nested' is struct.* and has to be a list of structs of key and val"),
        ({"value": "name", "partition": "score"}, "'score' is double, and has to be a whole number"),
        ({"value": "name", "partition": "nested.deep.er"}, "has no column 'nested.deep.er'"),
        ({"value": "nested.nothing"}, "no column 'nested.nothing'"),
    ],
)
def test_columns_that_do_not_fit_are_named_in_one_line(given: dict[str, str], told: str) -> None:
    with pytest.raises(SettingError, match=told) as caught:
        RecordColumns(given, ROWS.schema)
    assert "\n" not in str(caught.value)


def test_a_cell_that_does_not_fit_is_told_with_its_column() -> None:
    rows = pa.table({"v": ["a"], "p": [1 << 40]})
    with pytest.raises(OperatorError, match=r"partition=p: .*1099511627776"):
        RecordColumns({"value": "v", "partition": "p"}, rows.schema).turn(rows)


def test_a_mapping_is_written_field_by_field() -> None:
    assert parse("key=user id, value=*,timestamp=a.b") == {"key": "user id", "value": "*", "timestamp": "a.b"}
    for text, told in {
        "key": "'key' is not FIELD=COLUMN with one of key, value, timestamp, headers, partition",
        "offset=a": "'offset=a' is not FIELD=COLUMN",
        "key=a,key=b": "key is given twice: 'a' and 'b'",
        "key=*": "only a value can be made of all columns",
        "": "'' is not FIELD=COLUMN",
    }.items():
        with pytest.raises(SettingError, match=told.replace("*", r"\*")):
            parse(text)
