"""Headrace: a message broker in Python that every Kafka client can use, and a client for every Kafka broker.

    from headrace import Producer, Consumer

The names of the client are imported when they are first used, so that a broker does not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client.cluster import UnknownTopic
    from headrace.client.consuming.conduct import LATER
    from headrace.client.consuming.consumer import Consumer
    from headrace.client.consuming.group_progress import NotHeld
    from headrace.client.consuming.read import read
    from headrace.client.engine.errors import EngineClosed, ForkedEngine
    from headrace.client.refusal import BrokerUnreachable, NoBroker, Refusal
    from headrace.client.sending.errors import DeliveryUnknown, NotDelivered, ProducerClosed, QueueFull
    from headrace.client.sending.producer import Producer
    from headrace.errors import HeadraceError
    from headrace.records.building import Delivery, Report
    from headrace.records.received import ReceivedRecord as Record

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
    "LATER": "client.consuming.conduct",
    "BrokerUnreachable": "client.refusal",
    "Consumer": "client.consuming.consumer",
    "Delivery": "records.building",
    "DeliveryUnknown": "client.sending.errors",
    "EngineClosed": "client.engine.errors",
    "ForkedEngine": "client.engine.errors",
    "HeadraceError": "errors",
    "NoBroker": "client.refusal",
    "NotDelivered": "client.sending.errors",
    "NotHeld": "client.consuming.group_progress",
    "Producer": "client.sending.producer",
    "ProducerClosed": "client.sending.errors",
    "QueueFull": "client.sending.errors",
    "Record": "records.received",
    "Refusal": "client.refusal",
    "Report": "records.building",
    "UnknownTopic": "client.cluster",
    "read": "client.consuming.read",
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
