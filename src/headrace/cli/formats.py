"""How a record looks on standard output, and how it is read from a line of standard input.

Formats: `value`, `key-value`, `json`, or a template with %k key, %v value, %o offset, %p partition, %t topic,
%T timestamp in ms, %h headers as name=value pairs, %% a percent sign; \\n and \\t in it are newline and tab.

JSON has text where the bytes are valid UTF-8, else `key_base64`, `value_base64`; what `consume` prints as JSON,
`produce --json-lines` takes. It takes what `kcat -J` prints too, and headers in every form that other tools have.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from headrace.records.record import Header, Record

Format = Callable[[str, int, Record], bytes]

_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, slots=True)
class Line:
    """What one line of input asks for; a timestamp or partition that it does not name is None."""

    key: bytes | None
    value: bytes | None
    headers: list[Header]
    partition: int | None = None
    timestamp_ms: int | None = None
    is_copy: bool = False
    """It has an offset, as of a record that was read: its partition says where that was, not where it shall go."""


def make_format(name: str, key_separator: bytes = b"\t") -> Format:
    """The format of that name, or of that template; ValueError says what there is."""
    if name == "value":
        return lambda topic, partition, record: (record.value or b"") + b"\n"
    if name == "key-value":
        return lambda topic, partition, record: (record.key or b"") + key_separator + (record.value or b"") + b"\n"
    if name == "json":
        return format_json
    if "%" in name:
        return _make_template(name)
    raise ValueError(f"{name!r} is not value, key-value, json or a template such as '%p %o %k %v'")


def format_json(topic: str, partition: int, record: Record) -> bytes:
    shown: dict[str, Any] = {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        **_json_bytes("key", record.key),
        **_json_bytes("value", record.value),
        "headers": [{"name": name, **_json_bytes("value", content)} for name, content in record.headers],
    }
    return json.dumps(shown, ensure_ascii=False).encode() + b"\n"


def _json_bytes(field: str, content: bytes | None) -> dict[str, str | None]:
    if content is None:
        return {field: None}
    try:
        return {field: content.decode()}
    except UnicodeDecodeError:
        return {f"{field}_base64": base64.b64encode(content).decode()}


_FIELDS: Final[dict[str, Format]] = {
    "k": lambda topic, partition, record: record.key or b"",
    "v": lambda topic, partition, record: record.value or b"",
    "o": lambda topic, partition, record: b"%d" % record.offset,
    "p": lambda topic, partition, record: b"%d" % partition,
    "t": lambda topic, partition, record: topic.encode(),
    "T": lambda topic, partition, record: b"%d" % record.timestamp_ms,
    "h": lambda topic, partition, record: _join_headers(record.headers),
    "%": lambda topic, partition, record: b"%",
}


def _join_headers(headers: Iterable[Header]) -> bytes:
    return b",".join(name.encode() + b"=" + (content or b"") for name, content in headers)


def _make_template(template: str) -> Format:
    pieces: list[Format] = []
    text = ""
    marks = iter(template)
    for mark in marks:
        if mark not in "%\\":
            text += mark
            continue
        following = next(marks, "")
        if mark == "\\":
            text += _ESCAPES.get(following, mark + following)
        elif following in _FIELDS:
            pieces += (_constant(text), _FIELDS[following])
            text = ""
        else:
            raise ValueError(f"%{following} is none of {', '.join('%' + field for field in _FIELDS)}")
    pieces.append(_constant(text + "\n"))
    return lambda topic, partition, record: b"".join([piece(topic, partition, record) for piece in pieces])


def _constant(text: str) -> Format:
    encoded = text.encode()
    return lambda topic, partition, record: encoded


def parse_line(line: bytes, key_separator: bytes | None) -> Line:
    """A value, or key and value around the first separator; ValueError if a separator is set and not there."""
    if key_separator is None:
        return Line(None, line, [])
    key, found, value = line.partition(key_separator)
    if not found:
        raise ValueError(f"no key separator {key_separator.decode(errors='replace')!r} in the line")
    return Line(key, value, [])


_TAKEN: Final = frozenset(
    {"key", "key_base64", "value", "value_base64", "headers", "partition", "timestamp", "topic", "offset"}
)
_OF_KCAT: Final[dict[str, str | None]] = {"payload": "value", "ts": "timestamp", "tstype": None, "broker": None}
"""Fields that only `kcat -J` has, and what they are here."""


def parse_json_line(line: bytes) -> Line:
    """A record from a JSON object; ValueError says which field is wrong."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("a line must be one JSON object")
    if not given.keys() <= _TAKEN:
        _rename_fields(given)
    is_copy = given.get("offset") is not None
    return Line(
        _read_bytes(given, "key"),
        _read_bytes(given, "value"),
        _read_headers(given.get("headers")),
        _read_number(given, "partition", most=(1 << 31) - 1),
        # What a log has it may have without a time (-1), or with a producer's odd one: a copy has the same.
        _read_number(given, "timestamp", least=-(1 << 63) if is_copy else 0),
        is_copy,
    )


def _rename_fields(given: dict[str, Any]) -> None:
    """What kcat calls otherwise gets our name; ValueError for what nobody has."""
    if unknown := sorted(given.keys() - _TAKEN - _OF_KCAT.keys()):
        raise ValueError(f"unknown field {unknown[0]!r}; there are {', '.join(sorted(_TAKEN))}")
    for theirs, ours in _OF_KCAT.items():
        if theirs in given and ours is not None:
            given.setdefault(ours, given[theirs])


def _read_bytes(given: dict[str, Any], field: str) -> bytes | None:
    """Text as UTF-8, base64 as what it stands for, any other JSON value as its JSON text."""
    if (encoded := given.get(f"{field}_base64")) is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"{field}_base64 is not base64") from None
    value = given.get(field)
    if value is None:
        return None
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()


def _read_headers(given: Any) -> list[Header]:
    """As `consume` prints them, `[{"name": "a", "value": "1"}]`, or with `key` for the name; `{"a": "1"}`;
    `[["a", "1"]]`; `["a", "1"]` as kcat prints them; `"a:1,b:2"` as Kafka's console tools do.
    """
    match given:
        case None | "NO_HEADERS":
            return []
        case str():
            return [_read_pair(text.partition(":")[::2]) for text in given.split(",")]
        case dict():
            return [_read_pair(pair) for pair in given.items()]
        case list() if given and all(isinstance(item, str | None) for item in given) and len(given) % 2 == 0:
            return [_read_pair(pair) for pair in zip(given[::2], given[1::2], strict=True)]
        case list():
            return [_read_header(item) for item in given]
    raise ValueError(_HEADERS_EXPECTED)


def _read_header(given: Any) -> Header:
    match given:
        case [name, value]:
            return _read_pair((name, value))
        case {"name": str(name)} | {"key": str(name)} if given.keys() <= {"name", "key", "value", "value_base64"}:
            return name, _read_bytes(given, "value")
    raise ValueError(_HEADERS_EXPECTED)


def _read_pair(pair: tuple[Any, Any]) -> Header:
    name, value = pair
    if not isinstance(name, str):
        raise ValueError(_HEADERS_EXPECTED)
    return name, _read_bytes({"value": value}, "value")


_HEADERS_EXPECTED: Final = 'headers must be {"name": "value"}, or a list: [{"name": "a", "value": "1"}] or [["a", "1"]]'


def _read_number(given: dict[str, Any], field: str, least: int = 0, most: int = (1 << 63) - 1) -> int | None:
    value = given.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{field} must be a whole number of at most {most}, not {value!r}")
    return value
