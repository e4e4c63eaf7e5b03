"""JSON documents that come as bodies: read whole, and refused by name where something in them is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from headrace.errors import InvalidRequest
from headrace.http.message import JSON, Request, UnknownContentType, content_type, whole_number


def read_object(request: Request, known: Iterable[str]) -> dict[str, Any]:
    """The fields of a body that is one JSON object with no others than these; a field that is null is left out.

    Another content type is refused: a page in somebody's browser cannot send this one to us without asking first.
    """
    if content_type(request) != JSON:
        raise UnknownContentType(request, JSON)
    return checked_object("the body", parse("the body", request.body), known)


def checked_object(what: str, document: Any, known: Iterable[str]) -> dict[str, Any]:
    fields = ", ".join(known)
    if not isinstance(document, dict):
        raise InvalidRequest(f"{what} is not a JSON object; it has {fields}")
    for name in document:
        if name not in known:
            raise InvalidRequest(f"{what} has an unknown field {name[:40]!r}; it has {fields}")
    return {name: value for name, value in document.items() if value is not None}


def parse(what: str, text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def number(what: str, given: Any, least: int, most: int) -> int:
    if type(given) is not int:
        raise InvalidRequest(f"{what} is not a whole number from {least} to {most}")
    return whole_number(what, str(given), least, most)


def text(what: str, given: Any) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{what} is not text")
    utf8(what, given)
    return given


def required(fields: Mapping[str, Any], name: str, what: str = "the body") -> Any:
    if name not in fields:
        raise InvalidRequest(f"{what} has no {name}")
    return fields[name]


def utf8(what: str, given: str) -> bytes:
    """The bytes of a text; JSON can write what is none."""
    try:
        return given.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is not valid text: {error.reason}") from None
