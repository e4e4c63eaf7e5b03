"""The client on asyncio: the same cores as the synchronous one, driven by the running loop.

    from headrace.aio import Producer, Consumer

Deliveries, records and errors are those of `headrace`.
"""

from headrace.aio.consumer import Consumer
from headrace.aio.producer import Producer
from headrace.client.cluster import UnknownTopic
from headrace.client.consuming.conduct import LATER
from headrace.client.consuming.group_progress import NotHeld
from headrace.client.engine.errors import EngineClosed
from headrace.client.refusal import BrokerUnreachable, NoBroker, Refusal
from headrace.client.sending.errors import DeliveryUnknown, NotDelivered, ProducerClosed, QueueFull
from headrace.errors import HeadraceError
from headrace.records.building import Delivery, Report
from headrace.records.received import ReceivedRecord as Record

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
