"""The HTTP listener and its connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.http.broker_routes import ROUTES
from headrace.http.routes import Route
from headrace.http.services import HttpServices
from headrace.http.session import HttpSession
from headrace.metrics import HTTP_CONNECTIONS, Sample
from headrace.ports.network import Address, Listener, Network, chosen_with

CONNECTIONS_MAX: Final = 1000
"""Apart from the Kafka listeners' limit: an operator can look at a broker that has no connection left."""


class HttpServer:
    def __init__(
        self,
        network: Network,
        address: Address,
        services: HttpServices,
        connections_max: int = CONNECTIONS_MAX,
        routes: Sequence[Route] = ROUTES,
    ) -> None:
        self._routes = routes
        self._network = network
        self._wanted = address
        self._services = services
        self._connections_max = connections_max
        self._listener: Listener | None = None
        self._sessions: set[HttpSession] = set()
        services.metrics.collect(self._samples)

    def start(self) -> None:
        with chosen_with("--http"):
            self._listener = self._network.listen(self._wanted, self._accept)

    @property
    def address(self) -> Address:
        """Where it listens, with the port that was picked if none was asked for."""
        return self._wanted if self._listener is None else self._listener.address

    def _accept(self) -> HttpSession | None:
        if len(self._sessions) >= self._connections_max:
            self._services.metrics.connections_refused += 1
            return None
        session = HttpSession(self._services, self._routes, self._sessions.discard)
        self._sessions.add(session)
        self._services.metrics.connections_accepted += 1
        return session

    def close_idle(self) -> None:
        """Close the connections that have had no request answered for longer than connection.idle.ms."""
        before = self._services.clock.now() - self._services.settings["connection.idle.ms"] / 1000
        for session in [session for session in self._sessions if session.idle and session.quiet_since < before]:
            session.abort()

    def close(self) -> None:
        """Stop listening, send what is queued and close; a request that waits for data is not answered."""
        if self._listener is not None:
            self._listener.close()
        for session in list(self._sessions):
            session.close()

    def _samples(self) -> list[Sample]:
        return [Sample(HTTP_CONNECTIONS, (), len(self._sessions))]
