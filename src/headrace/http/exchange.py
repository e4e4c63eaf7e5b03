"""One request and its one answer; the request boundary of the HTTP port: what a handler raises becomes an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from headrace.errors import HeadraceError
from headrace.http.message import Request, Response, error_response, refusal
from headrace.http.services import HttpServices

log = logging.getLogger(__name__)

SURPRISE: Final = refusal(500, "InternalError", "the broker failed to handle this request; its log says why")

Handler = Callable[["Exchange"], Response | None]
"""Answers at once, or returns None and calls `exchange.answer` later."""


class Exchange:
    __slots__ = ("_send", "answered", "api", "gone", "request", "services", "started")

    def __init__(
        self, services: HttpServices, api: str, request: Request, send: Callable[[Exchange, Response], None]
    ) -> None:
        self.services = services
        self.api = api
        self.request = request
        self.answered = False
        self.gone = False
        """Whoever asked has closed the connection: nobody will see the answer."""
        self.started = services.clock.now()
        self._send = send

    def run(self, work: Callable[[Exchange], Response | None]) -> None:
        """Do the work, or a later part of it, and answer if it has an answer or fails."""
        try:
            response = work(self)
        except HeadraceError as error:
            response = error_response(error)
        except Exception:
            log.exception("%s %s failed", self.request.method, self.request.path)
            response = SURPRISE
        if response is not None:
            self.answer(response)

    def answer_later(self, work: Coroutine[Any, Any, Response | None]) -> None:
        """Go on in a task: for the rare work that has to wait for the cluster."""
        self.services.spawn(self._finish(work))

    async def _finish(self, work: Coroutine[Any, Any, Response | None]) -> None:
        try:
            response = await work
        except HeadraceError as error:
            response = error_response(error)
        except Exception:
            log.exception("%s %s failed", self.request.method, self.request.path)
            response = SURPRISE
        if response is not None:
            self.answer(response)

    def answer(self, response: Response) -> None:
        """The first answer counts; a deadline and an event may both bring one."""
        if self.answered:
            return
        self.answered = True
        if response.status >= 400:
            self.services.metrics.error(self.api, response.status)
        self.services.metrics.observe(self.api, self.services.clock.now() - self.started)
        self._send(self, response)
