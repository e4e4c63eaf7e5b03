"""Bodies of produce requests: one record as it is, or many as JSON or as lines of JSON.

    application/octet-stream, text/plain   the body is the value; key, headers and partition come from elsewhere
    application/json                       {"records": [RECORD, ...]}
    application/x-ndjson                   one RECORD a line

RECORD has, all optional, `key`, `value` (text as UTF-8; a value that is an object, list, number or truth value becomes
compact JSON text; null is null), `key_base64`, `value_base64` for bytes, `headers` as {"name": "text"} or as
[{"key": "name", "value": "text"}, {"key": "name", "value_base64": "..."}], `partition`, `timestamp` in ms.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from headrace.errors import InvalidRequest
from headrace.http import documents
from headrace.http.description import BASE64, TEXT, closed, list_of, map_of, nullable, number
from headrace.http.message import BINARY, JSON, PARTITION_MAX, PLAIN, Request, compact_json, content_type
from headrace.records.record import Header, NewRecord

RECORDS_MAX: Final = 10_000
KEY_MAX_BYTES: Final = 256 << 10
TIMESTAMP_MAX: Final = 1 << 60
LINES: Final = "application/x-ndjson"
HEADER_PREFIX: Final = "x-header-"
KEY_HEADERS: Final = ("x-key", "x-key-base64")
KINDS: Final = (BINARY, PLAIN, JSON, LINES)
_HEADER: Final = closed({"key": TEXT}, {"value": nullable(TEXT), "value_base64": nullable(BASE64)}, title="NewHeader")
_NEW_RECORD: Final = closed(
    {},
    {
        "key": nullable(TEXT),
        "key_base64": nullable(BASE64),
        "value": {"description": "Text, null, or what becomes compact JSON text."},
        "value_base64": nullable(BASE64),
        "headers": {"anyOf": [map_of(nullable(TEXT)), list_of(_HEADER), {"type": "null"}]},
        "partition": nullable(number(0, PARTITION_MAX)),
        "timestamp": nullable(number(0, TIMESTAMP_MAX)),
    },
    title="NewRecord",
)
RECORDS: Final = closed({"records": list_of(_NEW_RECORD, minItems=1, maxItems=RECORDS_MAX)}, title="NewRecords")
FIELDS: Final = ("key", "key_base64", "value", "value_base64", "headers", "partition", "timestamp")


class Incoming(NamedTuple):
    partition: int | None
    record: NewRecord


def read(request: Request, now_ms: int) -> list[Incoming]:
    """The records of a request; the error names the first that is wrong, and then none is taken."""
    kind = content_type(request)
    if kind in (BINARY, PLAIN):
        return [_single(request, now_ms)]
    for name in ("key", "key_base64", "partition"):
        if name in request.query:
            raise InvalidRequest(f"query parameter {name} is for one record; here each record has its own {name}")
    for header, _ in request.headers:
        if header.lower() in KEY_HEADERS or header.lower().startswith(HEADER_PREFIX):
            raise InvalidRequest(
                f"header {header[:40]} is for one record; here each record has its own key and headers"
            )
    found = [
        _record(f"record {place}", item, now_ms)
        for place, item in enumerate(_items(request.body) if kind == JSON else _lines(request.body))
    ]
    if not found:
        raise InvalidRequest("there is no record in this request")
    return found


# One record.


def _single(request: Request, now_ms: int) -> Incoming:
    partition = request.integer("partition", -1, 0, PARTITION_MAX)
    headers: list[Header] = []
    for name, value in request.headers:
        if name.lower().startswith(HEADER_PREFIX):
            headers.append((name[len(HEADER_PREFIX) :], value))
    record = (now_ms, _single_key(request), request.body, headers)
    return Incoming(None if partition < 0 else partition, record)


def _single_key(request: Request) -> bytes | None:
    given: list[bytes] = []
    if "key" in request.query:
        given.append(request.query["key"].encode(errors="surrogateescape"))
    if "key_base64" in request.query:
        given.append(decode_base64("query parameter key_base64", request.query["key_base64"]))
    if (plain := request.header("x-key")) is not None:
        given.append(plain)
    if (coded := request.header("x-key-base64")) is not None:
        given.append(decode_base64("header X-Key-Base64", coded.decode("latin-1")))
    if len(given) > 1:
        raise InvalidRequest("the key is given more than once; use one of ?key=, ?key_base64=, X-Key, X-Key-Base64")
    return _checked_key("the key", given[0]) if given else None


def _checked_key(what: str, key: bytes | None) -> bytes | None:
    """A key is hashed to find its partition, byte by byte."""
    if key is not None and len(key) > KEY_MAX_BYTES:
        raise InvalidRequest(f"{what} has {len(key)} bytes; a key may have {KEY_MAX_BYTES}")
    return key


# Many records.


def _items(body: bytes) -> list[Any]:
    document = documents.parse("the body", body)
    items = document.get("records") if isinstance(document, dict) else None
    if not isinstance(items, list) or len(document) != 1:
        raise InvalidRequest('the body must be {"records": [{"key": "a", "value": "b"}, ...]} and nothing else')
    if len(items) > RECORDS_MAX:
        raise _too_many()
    return items


def _lines(body: bytes) -> Iterator[Any]:
    count = 0
    for place, line in enumerate(body.split(b"\n"), 1):
        if line.strip():
            count += 1
            if count > RECORDS_MAX:
                raise _too_many()
            yield documents.parse(f"line {place}", line)


def _too_many() -> InvalidRequest:
    return InvalidRequest(f"one request takes {RECORDS_MAX} records; send more in further requests")


def _record(what: str, item: Any, now_ms: int) -> Incoming:
    if not isinstance(item, dict):
        raise InvalidRequest(f'{what} is not an object such as {{"key": "a", "value": "b"}}')
    for name in item:
        if name not in FIELDS:
            raise InvalidRequest(f"{what} has an unknown field {name[:40]!r}; a record has {', '.join(FIELDS)}")
    timestamp_ms = _number(f"{what}: timestamp", item.get("timestamp"), TIMESTAMP_MAX)
    headers = _headers(f"{what}: headers", item["headers"]) if item.get("headers") is not None else []
    key, value = _checked_key(f"{what}: key", _field(what, item, "key")), _field(what, item, "value")
    record = (now_ms if timestamp_ms is None else timestamp_ms, key, value, headers)
    return Incoming(_number(f"{what}: partition", item.get("partition"), PARTITION_MAX), record)


def _number(what: str, given: Any, most: int) -> int | None:
    return None if given is None else documents.number(what, given, 0, most)


def _field(what: str, item: dict[str, Any], name: str) -> bytes | None:
    """The bytes of `key` or `value`, whichever way they are given."""
    coded = item.get(f"{name}_base64")
    if coded is not None:
        if item.get(name) is not None:
            raise InvalidRequest(f"{what} has both {name} and {name}_base64")
        return decode_base64(f"{what}: {name}_base64", coded)
    given = item.get(name)
    if given is None:
        return None
    if isinstance(given, str):
        return documents.utf8(f"{what}: {name}", given)
    if name == "value":
        try:
            return compact_json(given)
        except (UnicodeEncodeError, RecursionError) as error:
            raise InvalidRequest(f"{what}: value cannot be written as JSON text: {error}") from None
    raise InvalidRequest(f"{what}: {name} is not text; give bytes as {name}_base64")


def _headers(what: str, given: Any) -> list[Header]:
    if isinstance(given, dict):
        given = [{"key": name, "value": value} for name, value in given.items()]
    if not isinstance(given, list):
        raise InvalidRequest(f'{what} are neither {{"name": "text"}} nor [{{"key": "name", "value": "text"}}]')
    headers: list[Header] = []
    for item in given:
        if not isinstance(item, dict) or not isinstance(item.get("key"), str) or set(item) - _HEADER_FIELDS:
            raise InvalidRequest(f'{what}: each is {{"key": "name", "value": "text"}}, or with "value_base64"')
        documents.utf8(what, item["key"])
        value = item.get("value")
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{what}: the value of {item['key'][:40]!r} is not text")
        headers.append((item["key"], _field(what, item, "value")))
    return headers


_HEADER_FIELDS: Final = {"key", "value", "value_base64"}


def decode_base64(what: str, given: Any) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise InvalidRequest(f"{what} is not base64") from None
