"""GET /health: the process lives and its loop turns. GET /ready: requests can be served, or 503 with the reason."""

from __future__ import annotations

from headrace.http.exchange import Exchange
from headrace.http.message import Response, json_response


def health(exchange: Exchange) -> Response:
    return json_response({"status": "alive"})


def ready(exchange: Exchange) -> Response:
    reason = exchange.services.ready()
    if reason is None:
        return json_response({"status": "ready"})
    return json_response({"status": "not ready", "reason": reason}, 503)
