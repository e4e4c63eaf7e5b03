"""Headrace: a message broker in Python that every Kafka client can use, and a client for every Kafka broker.

    from headrace import Producer, Consumer

The names of the client are imported when they are first used, so that a broker does not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client.admin.fetch import read
    from headrace.client.consumer.consumer import Consumer
    from headrace.client.consumer.progress import NotHeld
    from headrace.client.consumer.retries import LATER
    from headrace.client.errors import (
        BrokerUnreachable,
        DeliveryUnknown,
        EngineClosed,
        ForkedEngine,
        NoBroker,
        NotDelivered,
        ProducerClosed,
        QueueFull,
        Refusal,
        UnknownTopic,
    )
    from headrace.client.producer.producer import Producer
    from headrace.errors import HeadraceError
    from headrace.records.builder import Delivery, Report
    from headrace.records.consumer_records import ReceivedRecord as Record

__version__ = "0.1.0"

__all__ = [
    "LATER",
    "BrokerUnreachable",
    "Consumer",
    "Delivery",
    "DeliveryUnknown",
    "EngineClosed",
    "ForkedEngine",
    "HeadraceError",
    "NoBroker",
    "NotDelivered",
    "NotHeld",
    "Producer",
    "ProducerClosed",
    "QueueFull",
    "Record",
    "Refusal",
    "Report",
    "UnknownTopic",
    "__version__",
    "read",
]

_HOMES = {
    "LATER": "client.consumer.retries",
    "BrokerUnreachable": "client.errors",
    "Consumer": "client.consumer.consumer",
    "Delivery": "records.builder",
    "DeliveryUnknown": "client.errors",
    "EngineClosed": "client.errors",
    "ForkedEngine": "client.errors",
    "HeadraceError": "errors",
    "NoBroker": "client.errors",
    "NotDelivered": "client.errors",
    "NotHeld": "client.consumer.progress",
    "Producer": "client.producer.producer",
    "ProducerClosed": "client.errors",
    "QueueFull": "client.errors",
    "Record": "records.consumer_records",
    "Refusal": "client.errors",
    "Report": "records.builder",
    "UnknownTopic": "client.errors",
    "read": "client.admin.fetch",
}
_NAMES_AT_HOME = {"Record": "ReceivedRecord"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    found = getattr(import_module(f"headrace.{_HOMES[name]}"), _NAMES_AT_HOME.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
