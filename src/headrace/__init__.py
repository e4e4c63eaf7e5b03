"""Headrace: a message broker in Python that every Kafka client can use, and a client for every Kafka broker.

    from headrace import Producer, Consumer, Admin

The names of the client are imported when they are first used, so that a broker does not pay for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.client.admin.admin import Admin
    from headrace.client.admin.fetch import TopicReplaced, read
    from headrace.client.admin.transactions import abort_prepared, commit_prepared
    from headrace.client.consumer.consumer import Consumer
    from headrace.client.consumer.progress import NotHeld, ProgressUnusable
    from headrace.client.consumer.retries import LATER
    from headrace.client.contexts import context
    from headrace.client.errors import (
        BrokerUnreachable,
        CalledWithin,
        DeliveryUnknown,
        EngineClosed,
        ForkedEngine,
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
    from headrace.client.producer.producer import Producer
    from headrace.client.producer.transaction import Transaction
    from headrace.client.producer.transaction_requests import PreparedTransaction
    from headrace.client.share.options import Acknowledged
    from headrace.client.share.share_consumer import ShareConsumer
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

__version__ = "0.1.0"

__all__ = [
    "LATER",
    "Acknowledged",
    "Admin",
    "BatchTooLarge",
    "BrokerUnreachable",
    "CalledWithin",
    "Consumer",
    "CorruptBatch",
    "CorruptLog",
    "Delivery",
    "DeliveryUnknown",
    "EngineClosed",
    "ForkedEngine",
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
    "__version__",
    "abort_prepared",
    "commit_prepared",
    "context",
    "read",
]

_HOMES = {
    "LATER": "client.consumer.retries",
    "Acknowledged": "client.share.options",
    "Admin": "client.admin.admin",
    "BatchTooLarge": "errors",
    "BrokerUnreachable": "client.errors",
    "CalledWithin": "client.errors",
    "Consumer": "client.consumer.consumer",
    "CorruptBatch": "errors",
    "CorruptLog": "client.fetch_requests",
    "Delivery": "records.builder",
    "DeliveryUnknown": "client.errors",
    "EngineClosed": "client.errors",
    "ForkedEngine": "client.errors",
    "GroupNotEmpty": "client.errors",
    "GroupNotFound": "client.errors",
    "HeadraceError": "errors",
    "InvalidRecord": "errors",
    "InvalidRequest": "errors",
    "InvalidTopicName": "errors",
    "NoBroker": "client.errors",
    "NoTransaction": "client.errors",
    "NotDelivered": "client.errors",
    "NotHeld": "client.consumer.progress",
    "OffsetOutOfRange": "errors",
    "PreparedTransaction": "client.producer.transaction_requests",
    "Producer": "client.producer.producer",
    "ProducerClosed": "client.errors",
    "ProgressUnusable": "client.consumer.progress",
    "ProtocolError": "errors",
    "QueueFull": "client.errors",
    "Record": "records.consumer_records",
    "Refusal": "client.errors",
    "Report": "records.builder",
    "RequestTimedOut": "errors",
    "SettingError": "errors",
    "ShareConsumer": "client.share.share_consumer",
    "TopicAlreadyExists": "client.errors",
    "TopicReplaced": "client.admin.fetch",
    "Transaction": "client.producer.transaction",
    "TransactionError": "client.errors",
    "TransactionFailed": "client.errors",
    "TransactionFenced": "client.errors",
    "TransactionInDoubt": "client.errors",
    "TransactionRefused": "client.errors",
    "TransactionTimedOut": "client.errors",
    "UnknownTopic": "client.errors",
    "Unsupported": "errors",
    "abort_prepared": "client.admin.transactions",
    "commit_prepared": "client.admin.transactions",
    "context": "client.contexts",
    "read": "client.admin.fetch",
}
_NAMES_AT_HOME = {"Record": "ReceivedRecord"}


if not TYPE_CHECKING:  # which would take every misspelt name for one of any type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'headrace' has no attribute {name!r}")
        found = getattr(import_module(f"headrace.{_HOMES[name]}"), _NAMES_AT_HOME.get(name, name))
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
