"""Requests and responses as the handlers see them: no sockets, no bytes of HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.errors import ErrorCode, ErrorMapping, HeadraceError, InvalidRequest
from headrace.ports.network import Part

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
PLAIN: Final = "text/plain"
TEXT: Final = f"{PLAIN}; charset=utf-8"
HTML: Final = "text/html; charset=utf-8"

PARTITION_MAX: Final = (1 << 31) - 1
OFFSET_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: tuple[tuple[str, bytes], ...]
    """Names as they were sent, values as bytes."""
    body: bytes = b""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """What stands in the path where the route has {names}."""

    def header(self, name: str) -> bytes | None:
        for found, value in self.headers:
            if found.lower() == name:
                return value
        return None

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """A number from the query, within its bounds."""
        given = self.query.get(name)
        return default if given is None else whole_number(f"query parameter {name}", given, least, most)


def whole_number(what: str, given: str, least: int, most: int) -> int:
    digits = given.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) < 20 and least <= int(given) <= most:
        return int(given)
    raise InvalidRequest(f"{what}: {given[:40]!r} is not a whole number from {least} to {most}")


class UnknownContentType(HeadraceError):
    """A body of a kind that the path does not take."""

    mapping = ErrorMapping(ErrorCode.INVALID_REQUEST, 415, False)

    def __init__(self, request: Request, taken: str) -> None:
        given = (request.header("content-type") or b"").decode("latin-1")
        super().__init__(f"content type {given[:100]!r} is not taken here; send {taken}")


def content_type(request: Request) -> str:
    """What the body is said to be, without its parameters."""
    given = (request.header("content-type") or BINARY.encode()).decode("latin-1")
    return given.partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content_type: str
    body: Sequence[Part]
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False
    """The connection cannot be used for another request."""

    @property
    def body_bytes(self) -> int:
        return sum(len(part) for part in self.body)


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, JSON, [compact_json(value) + b"\n"])


def compact_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def text_response(text: str, content_type: str = TEXT, status: int = 200) -> Response:
    return Response(status, content_type, [text.encode(errors="replace")])


def describe_error(error: HeadraceError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "code": error.kafka_code,
        "message": str(error),
        "retriable": error.mapping.retriable,
    }


def error_response(error: HeadraceError) -> Response:
    return json_response({"error": describe_error(error)}, error.mapping.http_status)


def refusal(
    status: int, kind: str, message: str, headers: tuple[tuple[str, str], ...] = (), *, close: bool = False
) -> Response:
    """An error that HTTP has and Kafka has not."""
    error = {"kind": kind, "message": message, "retriable": False}
    return Response(status, JSON, [compact_json({"error": error}) + b"\n"], headers, close)
