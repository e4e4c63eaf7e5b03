"""The Kafka listeners of a broker: accepts connections up to the limit, closes silent ones."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from typing import Final

from headrace.kafka.connection import Connection
from headrace.kafka.dispatch import FRAME_HANDLERS, HANDLERS
from headrace.kafka.services import Services
from headrace.ports.clock import Timer
from headrace.ports.network import Address, Listener, Network, chosen_with

log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 10.0


class KafkaServer:
    def __init__(self, network: Network, services: Services, connections_max: int) -> None:
        self._network = network
        self._services = services
        self._listeners: dict[str, Listener] = {}
        self._connections_max = connections_max
        self._idle_seconds: float = services.settings["connection.idle.ms"] / 1000
        self._sweeper: Timer | None = None

    @property
    def addresses(self) -> Mapping[str, Address]:
        return {name: listener.address for name, listener in self._listeners.items()}

    def bind(self, name: str, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen; the real address, with the port that was chosen if 0 was asked for."""
        with chosen_with("--listen"):
            listener = self._network.listen(address, lambda: self._accept(name), tls)
        self._listeners[name] = listener
        if self._sweeper is None:
            self._sweeper = self._services.clock.call_later(SWEEP_SECONDS, self._sweep)
        return listener.address

    def _accept(self, listener: str) -> Connection | None:
        services = self._services
        metrics = services.metrics
        if len(services.connections) >= self._connections_max:
            metrics.connections_refused += 1
            log.warning("a connection on %s was refused: %d are open", listener, self._connections_max)
            return None
        connection = Connection(services, listener, HANDLERS, FRAME_HANDLERS)
        services.connections[connection] = None
        metrics.connections_open += 1
        metrics.connections_accepted += 1
        return connection

    def _sweep(self) -> None:
        """Close what has been silent for too long."""
        self._sweeper = self._services.clock.call_later(SWEEP_SECONDS, self._sweep)
        limit = self._services.clock.now() - self._idle_seconds
        for connection in list(self._services.connections):
            if isinstance(connection, Connection) and connection.last_heard < limit:
                connection.abort()

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for listener in self._listeners.values():
            listener.close()
        for connection in list(self._services.connections):
            if isinstance(connection, Connection):
                connection.abort()
