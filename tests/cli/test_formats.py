"""Records as text, and text as records."""

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli import formats, produce
from headrace.cli.formats import Line, make_format, parse_json_line, parse_line
from headrace.cli.output import format_bytes, format_cell
from headrace.cli.produce import read_lines
from headrace.errors import OperatorError
from headrace.records.record import Record
from proving import proves

RECORD = Record(7, 1234, b"key", b"value", [("a", b"1"), ("b", None)])
TOMBSTONE = Record(8, 1235, None, None, [])


@pytest.mark.parametrize(
    ("name", "expected", "of_tombstone"),
    [
        ("value", b"value\n", b"\n"),
        ("key-value", b"key\tvalue\n", b"\t\n"),
        ("%k %v", b"key value\n", b" \n"),
        (r"%t-%p@%o\t%T %h 100%% \x", b"t-3@7\t1234 a=1,b= 100% \\x\n", b"t-3@8\t1235  100% \\x\n"),
    ],
)
def test_each_format(name: str, expected: bytes, of_tombstone: bytes) -> None:
    form = make_format(name)
    assert form("t", 3, RECORD) == expected
    assert form("t", 3, TOMBSTONE) == of_tombstone


def test_the_key_separator_can_be_chosen() -> None:
    assert make_format("key-value", b"=>")("t", 0, RECORD) == b"key=>value\n"


@pytest.mark.parametrize("name", ["", "values", "%x", "100%"])
def test_an_unknown_format_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"template such as|is none of %k"):
        make_format(name)


MAYBE_BYTES = st.none() | st.binary(max_size=20)


@given(MAYBE_BYTES, MAYBE_BYTES, st.lists(st.tuples(st.text(max_size=5), MAYBE_BYTES), max_size=3))
def test_what_is_printed_as_json_is_read_back_the_same(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    printed = formats.format_json("t", 2, Record(5, 99, key, value, headers))
    assert printed.count(b"\n") == 1
    assert parse_json_line(printed) == Line(key, value, headers, 2, 99, is_copy=True)


@proves("U1")
@pytest.mark.parametrize("timestamp_ms", [-1, -5])
def test_a_copy_keeps_a_time_that_is_none(timestamp_ms: int) -> None:
    printed = make_format("json")("orders", 3, Record(42, timestamp_ms, None, None, []))
    assert parse_json_line(printed).timestamp_ms == timestamp_ms


def test_json_that_people_write() -> None:
    assert parse_json_line(b'{"value": "v"}') == Line(None, b"v", [])
    assert parse_json_line(b'{"key": 5, "value": {"a": [1]}}') == Line(b"5", b'{"a": [1]}', [])


@pytest.mark.parametrize(
    "headers",
    [
        '{"h": "x", "n": null}',
        '[{"name": "h", "value": "x"}, {"name": "n", "value": null}]',
        '[{"key": "h", "value": "x"}, {"key": "n", "value": null}]',
        '[{"key": "h", "value_base64": "eA=="}, {"key": "n"}]',
        '[["h", "x"], ["n", null]]',
        '["h", "x", "n", null]',
    ],
)
@proves("U1")
def test_headers_are_taken_in_every_form_that_people_have_them(headers: str) -> None:
    line = f'{{"value": "v", "headers": {headers}}}'.encode()
    assert parse_json_line(line) == Line(None, b"v", [("h", b"x"), ("n", None)])


@proves("U1")
def test_headers_of_kafkas_console_tools_are_taken() -> None:
    assert parse_json_line(b'{"headers": "a:1,b:x:y,c:"}').headers == [("a", b"1"), ("b", b"x:y"), ("c", b"")]
    assert parse_json_line(b'{"headers": "NO_HEADERS"}').headers == []


@proves("U1")
def test_what_kcat_prints_is_taken() -> None:
    """`kcat -C -J`."""
    line = (
        b'{"topic":"t","partition":1,"offset":7,"tstype":"create","ts":1700000000000,"broker":1,'
        b'"headers":["a","1","a","2"],"key":"k","payload":"v"}'
    )
    assert parse_json_line(line) == Line(b"k", b"v", [("a", b"1"), ("a", b"2")], 1, 1_700_000_000_000, is_copy=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not valid JSON"),
        (b"[]", "one JSON object"),
        (b'{"vaule": 1}', "unknown field 'vaule'"),
        (b'{"value_base64": "!"}', "not base64"),
        (b'{"value_base64": 5}', "not base64"),
        (b'{"partition": "1"}', "partition must be a whole number"),
        (b'{"partition": 99999999999999999999}', "partition must be a whole number of at most 2147483647"),
        (b'{"timestamp": -5}', "timestamp must be a whole number"),
        (b'{"headers": [1]}', "headers must be"),
        (b'{"headers": ["a"]}', "headers must be"),
        (b'{"headers": [[1, "a"]]}', "headers must be"),
        (b'{"headers": [{"nam": "a"}]}', "headers must be"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_json_that_is_wrong_is_refused_with_the_reason(line: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json_line(line)


def test_a_line_is_cut_at_the_first_separator() -> None:
    assert parse_line(b"a:b:c", b":") == Line(b"a", b"b:c", [])
    assert parse_line(b":x", b":") == Line(b"", b"x", [])
    assert parse_line(b"a:b", None) == Line(None, b"a:b", [])
    with pytest.raises(ValueError, match="no key separator '::'"):
        parse_line(b"a:b", b"::")


def test_lines_come_as_they_are_written_and_being_idle_is_told_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\nthr")
    found = read_lines(reading, 0.01)
    assert next(found) == [b"one", b"two"]
    assert next(found) == []
    later = threading.Timer(0.05, os.write, (writing, b"ee\n\nlast"))
    later.start()
    assert next(found) == [b"three", b""]
    later.join()
    os.close(writing)
    assert [line for some in found for line in some] == [b"last"]
    os.close(reading)


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "LINE_MAX_BYTES", 1000)
    reading, writing = os.pipe()
    os.write(writing, b"x" * 1001)
    with pytest.raises(OperatorError, match="a line of more than 1000 bytes"):
        next(read_lines(reading, 0.01))
    os.close(reading)
    os.close(writing)


def test_cells_are_never_empty() -> None:
    assert [format_cell(v) for v in (None, "", [], 0, True, [1, 2], "x")] == ["-", "-", "-", "0", "yes", "1,2", "x"]
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]


@proves("U1")
def test_a_cell_does_not_steer_the_terminal() -> None:
    assert format_cell("\x1b]0;title\x07\x1b[2J\u202ex\ny") == r"\x1b]0;title\x07\x1b[2J\u202ex" + "\ny"
    assert format_cell(["a\rb", "grün"]) == r"a\rb,grün"


def test_json_stays_on_one_line_whatever_is_in_it() -> None:
    assert json.loads(formats.format_json("t", 0, Record(0, 0, b"\n", b'"\xc3\xa9', [])))["value"] == '"é'
