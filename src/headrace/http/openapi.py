"""GET /openapi.json: what a port serves, in OpenAPI 3.1, made from its table of routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace import __version__
from headrace.cluster.names import GROUP_NAME_MAX
from headrace.http.description import (
    ERROR,
    OF_ANY_REQUEST,
    PARTITION,
    STATUSES,
    Answer,
    Operation,
    Parameter,
)
from headrace.http.exchange import Exchange
from headrace.http.message import Response, json_response
from headrace.http.routes import Route
from headrace.settings.topic_name import TOPIC_NAME_MAX

OPENAPI: Final = Operation(
    "This document", {200: Answer.json("What this port serves.", {"type": "object", "additionalProperties": True})}
)
PATH_PARAMETERS: Final = {
    "topic": Parameter("topic", "The topic.", {"type": "string", "pattern": f"^[a-zA-Z0-9._-]{{1,{TOPIC_NAME_MAX}}}$"}),
    "partition": Parameter("partition", "The partition, counted from 0.", PARTITION),
    "group": Parameter("group", "The group.", {"type": "string", "minLength": 1, "maxLength": GROUP_NAME_MAX}),
    "name": Parameter("name", "The setting.", {"type": "string", "minLength": 1}),
}


def with_document(title: str, routes: Sequence[Route]) -> tuple[Route, ...]:
    """The routes, and one more that describes them all."""
    made: list[Response] = []

    def answer(_exchange: Exchange) -> Response:
        if not made:
            made.append(json_response(document(title, table)))
        return made[0]

    table = (*routes, Route("GET", "/openapi.json", "http.openapi", answer, OPENAPI))
    return table


def document(title: str, routes: Sequence[Route]) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": __version__,
            "description": "GET is answered to HEAD too, without the body. docs/HTTP.md has examples.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation = route.operation
    described: dict[str, Any] = {"operationId": route.api.removeprefix("http."), "summary": operation.summary}
    in_path = [PATH_PARAMETERS[name] for name in route.path_names]
    parameters = [
        *(_parameter(each, "path", required=True) for each in in_path),
        *(_parameter(each, each.place, required=each.required) for each in operation.parameters),
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _content(operation.body.kinds, schemas)}
    described["responses"] = _responses(operation, schemas)
    return described


def _parameter(each: Parameter, place: str, *, required: bool) -> dict[str, Any]:
    return {
        "name": each.name,
        "in": place,
        "description": each.meaning,
        "required": required,
        "schema": dict(each.schema),
    }


def _responses(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    answers = dict(operation.answers)
    for status in {*operation.errors, *OF_ANY_REQUEST} - answers.keys():
        answers[status] = Answer.json(STATUSES[status], ERROR)
    return {
        str(status): {
            "description": answers[status].meaning,
            **_headers(answers[status]),
            "content": _content(answers[status].kinds, schemas),
        }
        for status in sorted(answers)
    }


def _headers(answer: Answer) -> dict[str, Any]:
    if not answer.headers:
        return {}
    return {"headers": {name: {"schema": dict(schema)} for name, schema in answer.headers.items()}}


def _content(kinds: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": _named(schema, schemas)} for kind, schema in kinds.items()}


def _named(schema: Any, schemas: dict[str, Any]) -> Any:
    """The schema with everything in it that has a title moved among those that are named."""
    if isinstance(schema, list):
        return [_named(each, schemas) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _named(each, schemas) for name, each in schema.items()}
    title = schema.get("title")
    if not isinstance(title, str):
        return inner
    assert schemas.setdefault(title, inner) == inner, f"two schemas are called {title}"
    return {"$ref": f"#/components/schemas/{title}"}
