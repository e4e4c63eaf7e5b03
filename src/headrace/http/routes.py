"""Routes of an HTTP port: how a request finds its handler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import parse_qsl, unquote

from headrace.errors import InvalidRequest
from headrace.http.description import Operation
from headrace.http.exchange import Handler
from headrace.http.message import Request, Response, refusal

QUERY_FIELDS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    api: str
    """What the request is called in the metrics."""
    handler: Handler
    operation: Operation
    """What it takes and answers."""

    @property
    def path_names(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """The path's parameters, or None if it is another path."""
        own = self.path.split("/")
        if len(own) != len(segments):
            return None
        parameters = {}
        for wanted, given in zip(own, segments, strict=True):
            if wanted.startswith("{"):
                parameters[wanted[1:-1]] = unquote(given)
            elif wanted != given:
                return None
        return parameters


UNKNOWN_API: Final = "http.unknown"


def find(routes: Sequence[Route], request: Request, target: str) -> tuple[Route, Request] | Response:
    """The route of a request's target, with the request completed by path and query; or the answer that refuses it."""
    path, _, query = target.partition("?")
    segments = path.split("/")
    matches = [(route, parameters) for route in routes if (parameters := route.match(segments)) is not None]
    if not matches:
        paths = ", ".join(f"{route.method} {route.path}" for route in routes)
        return refusal(404, "UnknownPath", f"there is nothing at {path[:200]}; there is {paths}")
    method = "GET" if request.method == "HEAD" else request.method
    for route, parameters in matches:
        if route.method == method:
            return route, replace(request, path=path, query=_query(route, query), parameters=parameters)
    allowed = ", ".join(sorted({route.method for route, _ in matches}))
    message = f"{request.method} is not for {path[:200]}; use {allowed}"
    return refusal(405, "WrongMethod", message, (("Allow", allowed),))


def _query(route: Route, query: str) -> dict[str, str]:
    try:
        fields = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=QUERY_FIELDS_MAX)
    except ValueError as error:
        raise InvalidRequest(f"the query {query[:100]!r} cannot be read: {error}") from None
    for name, _ in fields:
        if name not in route.operation.query:
            known = ", ".join(route.operation.query) or "none"
            raise InvalidRequest(f"unknown query parameter {name[:40]!r}; {route.path} knows: {known}")
    if len({name for name, _ in fields}) != len(fields):
        raise InvalidRequest("a query parameter is given twice")
    return dict(fields)
