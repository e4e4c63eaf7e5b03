"""ApiVersions, versions 0 to 4. 3: compact encoding, client's software name; 4: as 3.

A newer version than is known gets a version 0 answer with UNSUPPORTED_VERSION and what is served (KIP-511).
"""

from __future__ import annotations

from headrace.errors import Code
from headrace.kafka.request import Request
from headrace.wire.api import API
from headrace.wire.message import Message

_SERVED = [
    Message(api_key=api.key, min_version=api.advertised_min, max_version=api.max_version) for api in API.values()
]


def handle(request: Request) -> Message:
    unsupported = "unsupported" in vars(request.body)
    return Message(
        error_code=Code.UNSUPPORTED_VERSION if unsupported else Code.NONE,
        api_keys=_SERVED,
        throttle_time_ms=0,
    )
