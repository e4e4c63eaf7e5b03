"""The client on asyncio: the same cores as the synchronous one, driven by the running loop.

from headrace.aio import Producer
"""

from headrace.aio.producer import Producer
from headrace.client.sending.errors import DeliveryUnknown, NotDelivered, QueueFull
from headrace.records.building import Delivery, Report

__all__ = ["Delivery", "DeliveryUnknown", "NotDelivered", "Producer", "QueueFull", "Report"]
