"""Conditions on the fields of JSON values."""

import json

import pytest

from headrace.cli.json_condition import DEPTH_MAX, parse_condition
from proving import proves

ORDER = {
    "id": 7,
    "paid": True,
    "note": None,
    "status": "new",
    "order": {"total": 12.5, "lines": [{"sku": "a-1"}, {"sku": "b-2"}]},
    "tags": ["red", "blue"],
    "odd name": 1,
    "in": 3,
}


@pytest.mark.parametrize(
    "text",
    [
        "order.total > 3",
        "order.total >= 12.5 and order.total <= 12.5",
        "id = 7 and id == 7 and id != 8",
        "status in ['new', \"paid\"]",
        "'red' in tags and tags contains 'blue'",
        "status contains 'ew'",
        "order contains 'total'",
        "order.lines[1].sku = 'b-2' and order.lines[-1][\"sku\"] = 'b-2'",
        "paid",
        "paid = true",
        "note = null and missing.deep[3] = null",
        "not note and not missing",
        "id = 8 or (id = 7 and not status = 'old')",
        "id < 1 or id > 6 and paid",
        "7 = id",
        "status = 'n\\ew'",
        "id in [5, 7] and not id in []",
    ],
)
@proves("U1")
def test_a_condition_that_holds(text: str) -> None:
    assert parse_condition(text)(json.dumps(ORDER).encode())


@pytest.mark.parametrize(
    "text",
    [
        "order.total > 'a'",
        "status > 3",
        "paid = 1",
        "id = '7'",
        "missing > 0",
        "missing < 0",
        "note",
        "tags[9] = 'red'",
        "id[0] = 7",
        "status.x = 'new'",
        "tags contains 'RED'",
        "id contains 7",
        "not (id = 7)",
    ],
)
def test_a_condition_that_does_not_hold(text: str) -> None:
    assert not parse_condition(text)(json.dumps(ORDER).encode())


@pytest.mark.parametrize("value", [None, b"", b"text", b"\xff", b"[" * 100_000])
def test_what_is_not_json_meets_no_condition(value: bytes | None) -> None:
    assert not parse_condition("not missing")(value)


def test_a_value_that_is_no_object_has_no_fields() -> None:
    assert parse_condition("a = null")(b"5")
    assert not parse_condition("a = 5")(b"5")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ends where a field"),
        ("a >", "ends where a field"),
        ("a b", r"b at place 3 of 'a b', where and, or, or the end"),
        ("(a = 1", r"ends where \) is expected"),
        ("a.5", "cannot be read|the name of a field|and, or, or the end"),
        ("a[b]", "a number, or a name in quotes"),
        ("a = [1 2]", "where , is expected"),
        ("a = 'open", "cannot be read"),
        ("__import__('os')", "at place 11"),
        ("a ; b", "cannot be read"),
        ("and", "and at place 1"),
        ("not " * (DEPTH_MAX + 1) + "a", "within one another"),
        ("(" * 10_000, "within one another"),
        ("[" * 10_000, "within one another"),
    ],
)
@proves("U1")
def test_a_condition_that_is_wrong_is_refused_with_the_place(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_condition(text)
