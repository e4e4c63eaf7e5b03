"""What can become of a record that is not acknowledged."""

from __future__ import annotations

from headrace.errors import HeadraceError, Mapping


class NotDelivered(HeadraceError):
    """The record is not in the log, and the producer has given it up: it can be sent again."""

    mapping = Mapping(7, 504, False)

    def __init__(self, message: str, reason: HeadraceError | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.mapping = Mapping(reason.kafka_code, reason.mapping.http_status, False)


class DeliveryUnknown(NotDelivered):
    """The producer has given the record up, and it may be in the log or not: sent again, it may be there twice."""


class QueueFull(HeadraceError):
    """More waits for acknowledgements than the producer may hold."""

    mapping = Mapping(-1, 429, True)


class ProducerClosed(HeadraceError):
    """The producer was closed."""
