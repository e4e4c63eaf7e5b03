"""ListConfigResources, versions 0 to 1. 0: ListClientMetricsResources, of which there are none; 1: of the types asked
for, or of all. Topics and brokers that are there, and groups of which settings were altered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.errors import ErrorCode
from headrace.kafka.api.describe_configs import BROKER, GROUP, TOPIC
from headrace.kafka.connection import Request
from headrace.wire.message import Message

BROKER_LOGGER: Final = 8
CLIENT_METRICS: Final = 16
KNOWN: Final = (TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP)


def handle(request: Request) -> Message:
    image = request.services.view.image
    asked = (request.body.resource_types or KNOWN) if request.version >= 1 else (CLIENT_METRICS,)
    if any(kind not in KNOWN for kind in asked):
        return Message(throttle_time_ms=0, error_code=ErrorCode.UNSUPPORTED_VERSION, config_resources=[])
    names: dict[int, Iterable[str]] = {
        TOPIC: image.topics,
        BROKER: map(str, image.brokers),
        GROUP: image.group_configs,
    }
    resources = [
        Message(resource_name=name, resource_type=kind) for kind in dict.fromkeys(asked) for name in names.get(kind, ())
    ]
    return Message(throttle_time_ms=0, error_code=ErrorCode.NONE, config_resources=resources)
