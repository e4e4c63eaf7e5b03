"""What a route takes and answers, as OpenAPI has it: each module says so beside the handlers that do it.

Schemas are JSON Schema. One with a `title` gets a name of its own in the document (http.openapi). Objects are closed: a
field that is answered and not described fails the tests, and one that is sent and not described is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.http.message import HTML, JSON, OFFSET_MAX, PARTITION_MAX

Schema = Mapping[str, Any]

TEXT: Final[Schema] = {"type": "string"}
TRUTH: Final[Schema] = {"type": "boolean"}
BASE64: Final[Schema] = {
    "type": "string",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}


def number(least: int | None = None, most: int | None = None) -> Schema:
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer"} | {name: bound for name, bound in bounds.items() if bound is not None}


def choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def list_of(schema: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": schema, **bounds}


def map_of(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def closed(fields: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, title: str = "") -> Schema:
    """An object with these fields, those that may be left out, and no others."""
    named = {"title": title} if title else {}
    return named | {
        "type": "object",
        "properties": {**fields, **(optional or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


DONE: Final[Schema] = {"const": True}
PARTITION: Final = number(0, PARTITION_MAX)
OFFSET: Final = number(0, OFFSET_MAX)
COUNT: Final = number(0)
BROKER: Final = number(-1, PARTITION_MAX)
FAULT: Final = closed({"kind": TEXT, "message": TEXT, "retriable": TRUTH}, {"code": number(-1)}, title="Fault")
ERROR: Final = closed({"error": FAULT}, title="Error")


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    meaning: str
    schema: Schema
    place: str = "query"
    required: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    kinds: Mapping[str, Schema]
    """By content type."""

    @classmethod
    def json(cls, schema: Schema) -> Body:
        return cls({JSON: schema})


@dataclass(frozen=True, slots=True)
class Answer:
    meaning: str
    kinds: Mapping[str, Schema]
    """By content type."""
    headers: Mapping[str, Schema] = field(default_factory=dict)

    @classmethod
    def json(cls, meaning: str, schema: Schema) -> Answer:
        return cls(meaning, {JSON: schema})

    @classmethod
    def html(cls, meaning: str) -> Answer:
        return cls(meaning, {HTML.partition(";")[0]: TEXT})


@dataclass(frozen=True, slots=True)
class Operation:
    """What a method of a path does. `errors` are statuses that it answers with ERROR, beside those of any request."""

    summary: str
    answers: Mapping[int, Answer]
    parameters: tuple[Parameter, ...] = ()
    """But for those in the path."""
    body: Body | None = None
    errors: tuple[int, ...] = ()

    @property
    def query(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.parameters if each.place == "query")


STATUSES: Final = {
    400: "The request is wrong; the message says where.",
    403: "The operator's limits, or the topic's nature, do not allow it.",
    404: "There is no such topic, partition, group or setting.",
    409: "It does not fit what is there.",
    413: "The body, or a batch made of it, is too large.",
    415: "A body of this content type is not taken here.",
    416: "The log does not reach there: before its start, or after its end.",
    422: "A record breaks a rule of its topic, or cannot be unpacked.",
    431: "The head of the request is too large.",
    500: "A defect; the broker's log says more.",
    501: "A way of sending bodies that is not served.",
    503: "Not here or not now: the message names the broker to ask, or what is waited for.",
    504: "It was not done in time, and may be yet.",
    505: "Another version of HTTP.",
    507: "The disk is full; nothing was written.",
}
"""Of errors, and what they mean on every path."""
OF_ANY_REQUEST: Final = (400, 413, 431, 500, 501, 505)
