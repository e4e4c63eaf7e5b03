"""The client on asyncio: the same cores as the synchronous one, driven by the running loop.

    from headrace.aio import Producer, Consumer

Deliveries, records and errors are those of `headrace`.
"""

from headrace.aio.consumer import Consumer
from headrace.aio.producer import Producer
from headrace.client.consumer.progress import NotHeld
from headrace.client.consumer.retries import LATER
from headrace.client.errors import (
    BrokerUnreachable,
    DeliveryUnknown,
    EngineClosed,
    NoBroker,
    NotDelivered,
    ProducerClosed,
    QueueFull,
    Refusal,
    UnknownTopic,
)
from headrace.errors import HeadraceError
from headrace.records.builder import Delivery, Report
from headrace.records.consumer_records import ReceivedRecord as Record

__all__ = [
    "LATER",
    "BrokerUnreachable",
    "Consumer",
    "Delivery",
    "DeliveryUnknown",
    "EngineClosed",
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
]
