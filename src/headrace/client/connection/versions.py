"""Which version of each API a connection speaks: the highest that both sides know.

A connection begins with an ApiVersions request of version 3. A broker that does not know that version answers in the
form of version 0; no broker of the last years does, so such an answer counts as no Kafka broker.
"""

from __future__ import annotations

from typing import Final

from headrace import __version__
from headrace.client.errors import check
from headrace.errors import Unsupported
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.message import Message

ASKED_IN: Final = 3
"""The version of the ApiVersions request itself."""

# The oldest version of each API whose messages this client speaks, where that is not the oldest known.
_LEAST: Final = {
    apis.METADATA: 10,
    apis.OFFSET_FETCH: 8,
    apis.FIND_COORDINATOR: 4,
    apis.LEAVE_GROUP: 3,
    apis.DELETE_TOPICS: 6,
}
# Later versions name topics by id only, and a group's offsets outlive its topics.
_MOST: Final = {apis.OFFSET_FETCH: 9, apis.OFFSET_COMMIT: 9}


def question() -> Message:
    """The ApiVersions request."""
    return Message(client_software_name="headrace", client_software_version=__version__)


class Versions:
    """What one broker has said that it speaks."""

    def __init__(self, address: Address, answer: Message) -> None:
        """Raises Refusal if the broker did not say."""
        check(answer.error_code, f"API versions of {address}")
        self._address = address
        self._served: dict[int, tuple[int, int]] = {
            entry.api_key: (entry.min_version, entry.max_version) for entry in answer.api_keys
        }
        self._agreed: dict[int, int] = {}

    def version(self, api_key: int) -> int:
        """The highest version of an API that both sides speak."""
        agreed = self._agreed.get(api_key)
        if agreed is None:
            agreed = self._agreed[api_key] = self._agree(api_key)
        return agreed

    def _agree(self, api_key: int) -> int:
        api = apis.KNOWN[api_key]
        if api_key not in self._served:
            raise Unsupported(f"the broker at {self._address} does not serve {api.name}")
        lowest, highest = self._served[api_key]
        lowest = max(lowest, api.min_version, _LEAST.get(api_key, 0))
        highest = min(highest, api.max_version, _MOST.get(api_key, api.max_version))
        if lowest > highest:
            raise Unsupported(
                f"the broker at {self._address} serves {api.name} versions {self._served[api_key]}, "
                f"this client needs {max(api.min_version, _LEAST.get(api_key, 0))} or later"
            )
        return highest
