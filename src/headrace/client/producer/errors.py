"""What can become of a record that is not acknowledged."""

from __future__ import annotations

from headrace.client.producer.lane import SIZES
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


def failure(count: int, where: str, unknown: bool, reason: HeadraceError | None) -> NotDelivered:
    """What the records of a batch hear that was not acknowledged."""
    why = f": {reason}" if reason is not None else ": no answer came in time"
    if reason is not None and reason.kafka_code in SIZES:
        why += "; the record alone is larger than its topic takes: send less, or raise max.message.bytes of the topic"
    if unknown:
        return DeliveryUnknown(
            f"whether {count} records for {where} were written is not known{why}; look before sending them again",
            reason,
        )
    return NotDelivered(f"{count} records for {where} were not written{why}", reason)
