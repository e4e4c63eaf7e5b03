"""Which broker coordinates a group: found when first asked, forgotten when it denies that or is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from headrace.client.connection.broker_connection import Body, OnAnswer
from headrace.client.connection.topology import Broker
from headrace.client.errors import BrokerUnreachable, Refusal
from headrace.errors import Code, HeadraceError
from headrace.ports.network import Address
from headrace.wire import api as apis
from headrace.wire.message import Message

if TYPE_CHECKING:
    from headrace.client.connection.connections import Network

GROUP_KEY_TYPE: Final = 0

_ELSEWHERE: Final = frozenset((Code.NOT_COORDINATOR, Code.COORDINATOR_NOT_AVAILABLE))

OnFound = Callable[[Address | HeadraceError], None]


class Coordinators:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._found: dict[str, Address] = {}
        self._looking: dict[str, list[tuple[str, OnFound]]] = {}

    def ask(self, group: str, api_key: int, body: Body, on_answer: OnAnswer, timeout_s: float, lane: str) -> None:
        deadline = self._network.reactor.now() + timeout_s

        def send(found: Address | HeadraceError) -> None:
            if isinstance(found, HeadraceError):
                on_answer(found)
                return

            def hear(answer: Message | HeadraceError) -> None:
                lost = isinstance(answer, BrokerUnreachable)
                if lost or (isinstance(answer, Message) and not _ELSEWHERE.isdisjoint(_codes(answer))):
                    self.forget(group, found)
                on_answer(answer)

            left_s = max(0.0, deadline - self._network.reactor.now())
            try:
                link = self._network.link(found, lane)
            except HeadraceError as error:
                closed = error
                self._network.reactor.call_soon(lambda: on_answer(closed))
                return
            link.ask(api_key, body, hear, timeout_s=left_s)

        if group in self._found:
            send(self._found[group])
        elif group in self._looking:
            self._looking[group].append((lane, send))
        else:
            self._looking[group] = [(lane, send)]
            self._look_up(group, timeout_s)

    def close_lane(self, lane: str, error: HeadraceError) -> None:
        """What still waits for a coordinator must not open the lane again."""
        for group, waiting in self._looking.items():
            self._looking[group] = [entry for entry in waiting if entry[0] != lane]
            for _, send in (entry for entry in waiting if entry[0] == lane):
                send(error)

    def forget(self, group: str, address: Address) -> None:
        if self._found.get(group) == address:
            del self._found[group]

    def _look_up(self, group: str, timeout_s: float) -> None:
        def hear(answer: Message | HeadraceError) -> None:
            found = answer if isinstance(answer, HeadraceError) else self._read(group, answer)
            if isinstance(found, Address):
                self._found[group] = found
            for _, send in self._looking.pop(group, ()):
                send(found)

        request = Message(key_type=GROUP_KEY_TYPE, coordinator_keys=[group])
        self._network.ask_any(apis.FIND_COORDINATOR, request, hear, timeout_s=timeout_s)

    def _read(self, group: str, answer: Message) -> Address | HeadraceError:
        for found in answer.coordinators:
            if found.error_code != Code.NONE:
                return Refusal(found.error_code, f"coordinator of group {group!r}", found.error_message)
            address = Address(found.host, found.port)
            self._network.routes.add_broker(Broker(found.node_id, address, ""))
            return address
        return Refusal(Code.UNKNOWN, f"coordinator of group {group!r}", "the broker's answer leaves the group out")


def _codes(answer: Message) -> Iterator[int]:
    """Every error code that the answer of a coordinator may carry."""
    yield answer.__dict__.get("error_code", Code.NONE)
    for group in answer.__dict__.get("groups", ()):
        yield group.error_code
    for topic in answer.__dict__.get("topics", ()):
        for partition in topic.partitions:
            yield partition.error_code
