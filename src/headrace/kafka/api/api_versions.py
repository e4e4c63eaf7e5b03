"""ApiVersions, versions 0 to 4. 3: flexible, client's software name; 4: as 3.

Headrace's own APIs are named to its own client only: others need not know what to make of them.
Clients look for what their cluster can do among the features: transactions of version 2 (KIP-890), the consumer
protocol of groups (KIP-848).
A newer version than is known gets a version 0 answer with UNSUPPORTED_VERSION and what is served (KIP-511).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.wire.api import HEADRACE_APIS, KAFKA_APIS, Api
from headrace.wire.message import Message

OWN_CLIENT = "headrace"
FEATURES: Final = {"group.version": (1, 1), "transaction.version": (1, 2)}
"""By name, the least and the highest level; the highest is in force. From level 1 on, as clients before version 4 of
this API take none from 0 on."""
FEATURES_EPOCH: Final = 0


def _served(apis: Iterable[Api]) -> list[Message]:
    return [Message(api_key=api.key, min_version=api.advertised_min, max_version=api.max_version) for api in apis]


_SUPPORTED = [Message(name=name, min_version=least, max_version=most) for name, (least, most) in FEATURES.items()]
_FINALIZED = [
    Message(name=name, max_version_level=most, min_version_level=most) for name, (_least, most) in FEATURES.items()
]
_SERVED = _served(KAFKA_APIS.values())
_SERVED_TO_OURS = _served((*KAFKA_APIS.values(), *HEADRACE_APIS.values()))


def handle(request: Request) -> Message:
    own = request.version >= 3 and request.body.client_software_name == OWN_CLIENT
    return Message(
        error_code=ErrorCode.UNSUPPORTED_VERSION if request.is_unsupported else ErrorCode.NONE,
        api_keys=_SERVED_TO_OURS if own else _SERVED,
        throttle_time_ms=0,
        supported_features=_SUPPORTED,
        finalized_features_epoch=FEATURES_EPOCH,
        finalized_features=_FINALIZED,
    )
