"""The client on asyncio: the same cores as the synchronous one, driven by the running loop.

    from headrace.aio import Producer, Consumer, Admin

Deliveries, records and errors are those of `headrace`.
"""

from headrace.aio.admin import Admin
from headrace.aio.consumer import Consumer
from headrace.aio.producer import Producer
from headrace.aio.share_consumer import ShareConsumer
from headrace.aio.transaction import Transaction
from headrace.client.admin.fetch import TopicReplaced
from headrace.client.consumer.progress import NotHeld, ProgressUnusable
from headrace.client.consumer.retries import LATER
from headrace.client.errors import (
    BrokerUnreachable,
    DeliveryUnknown,
    EngineClosed,
    GroupNotEmpty,
    GroupNotFound,
    NoBroker,
    NotDelivered,
    NoTransaction,
    ProducerClosed,
    QueueFull,
    Refusal,
    TopicAlreadyExists,
    TransactionError,
    TransactionFailed,
    TransactionFenced,
    TransactionInDoubt,
    TransactionRefused,
    TransactionTimedOut,
    UnknownTopic,
)
from headrace.client.fetch_requests import CorruptLog
from headrace.client.producer.transaction_requests import PreparedTransaction
from headrace.client.share.options import Acknowledged
from headrace.errors import (
    BatchTooLarge,
    CorruptBatch,
    HeadraceError,
    InvalidRecord,
    InvalidRequest,
    InvalidTopicName,
    OffsetOutOfRange,
    ProtocolError,
    RequestTimedOut,
    SettingError,
    Unsupported,
)
from headrace.records.builder import Delivery, Report
from headrace.records.consumer_records import ReceivedRecord as Record

__all__ = [
    "LATER",
    "Acknowledged",
    "Admin",
    "BatchTooLarge",
    "BrokerUnreachable",
    "Consumer",
    "CorruptBatch",
    "CorruptLog",
    "Delivery",
    "DeliveryUnknown",
    "EngineClosed",
    "GroupNotEmpty",
    "GroupNotFound",
    "HeadraceError",
    "InvalidRecord",
    "InvalidRequest",
    "InvalidTopicName",
    "NoBroker",
    "NoTransaction",
    "NotDelivered",
    "NotHeld",
    "OffsetOutOfRange",
    "PreparedTransaction",
    "Producer",
    "ProducerClosed",
    "ProgressUnusable",
    "ProtocolError",
    "QueueFull",
    "Record",
    "Refusal",
    "Report",
    "RequestTimedOut",
    "SettingError",
    "ShareConsumer",
    "TopicAlreadyExists",
    "TopicReplaced",
    "Transaction",
    "TransactionError",
    "TransactionFailed",
    "TransactionFenced",
    "TransactionInDoubt",
    "TransactionRefused",
    "TransactionTimedOut",
    "UnknownTopic",
    "Unsupported",
]
