"""GET /health: the process lives and its loop turns. GET /ready: requests can be served, or 503 with the reason."""

from __future__ import annotations

from typing import Final

from headrace.http.description import TEXT, Answer, Operation, choice, closed
from headrace.http.exchange import Exchange
from headrace.http.message import Response, json_response

HEALTH: Final = Operation(
    "Whether the process lives", {200: Answer.json("It does, and its loop turns.", closed({"status": choice("alive")}))}
)
READY: Final = Operation(
    "Whether requests can be served",
    {
        200: Answer.json("They can.", closed({"status": choice("ready")})),
        503: Answer.json("They cannot.", closed({"status": choice("not ready"), "reason": TEXT})),
    },
)


def health(exchange: Exchange) -> Response:
    return json_response({"status": "alive"})


def ready(exchange: Exchange) -> Response:
    reason = exchange.services.ready()
    if reason is None:
        return json_response({"status": "ready"})
    return json_response({"status": "not ready", "reason": reason}, 503)
