"""What can become of a record that is not acknowledged."""

from __future__ import annotations

from headrace.errors import HeadraceError, Mapping


class NotDelivered(HeadraceError):
    """The producer has given the record up. It is not in the log and can be sent again, but see DeliveryUnknown."""

    mapping = Mapping(7, 504, False)

    def __init__(self, message: str, reason: HeadraceError | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.mapping = Mapping(reason.kafka_code, reason.mapping.http_status, False)


class DeliveryUnknown(NotDelivered):
    """The record that was given up may be in the log or not: sent again, it may be there twice."""


class QueueFull(HeadraceError):
    """More waits for acknowledgements than the producer may hold."""

    mapping = Mapping(-1, 429, True)


class ProducerClosed(HeadraceError):
    """The producer was closed."""
