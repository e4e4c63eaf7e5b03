"""Headrace: a message broker in Python that every Kafka client can use, and a client for every Kafka broker.

    from headrace import Producer, Consumer

The names of the client are imported when they are first used, so that a broker does not pay for them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headrace.client.sending.errors import DeliveryUnknown, NotDelivered, QueueFull
    from headrace.client.sending.producer import Producer
    from headrace.records.building import Delivery, Report

__all__ = ["Delivery", "DeliveryUnknown", "NotDelivered", "Producer", "QueueFull", "Report", "__version__"]

_HOMES: Final = {
    "Delivery": "headrace.records.building",
    "DeliveryUnknown": "headrace.client.sending.errors",
    "NotDelivered": "headrace.client.sending.errors",
    "Producer": "headrace.client.sending.producer",
    "QueueFull": "headrace.client.sending.errors",
    "Report": "headrace.records.building",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
