"""A request that fails in a way nobody foresaw takes neither the broker nor what was staged before it down."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.kafka.connection import Connection, PendingResponse, Request, frame_handler
from headrace.kafka.dispatch import FRAME_HANDLERS, HANDLERS
from headrace.metrics import Metrics
from headrace.partitions.partitions import Failures, Partitions
from headrace.ports.network import Address, Part
from headrace.settings.values import load
from headrace.virtual.clock import VirtualClock
from headrace.wire import api as apis
from headrace.wire.codec import write_request
from headrace.wire.message import Message


class Wire:
    """The peer's end of a channel."""

    peer = local = Address("127.0.0.1", 1)
    want_bytes = 0

    def __init__(self) -> None:
        self.sent = b""
        self.closed = self.paused = False

    def send(self, parts: Sequence[Part]) -> None:
        self.sent += b"".join(bytes(part) for part in parts)  # type: ignore[arg-type]

    def queued_bytes(self) -> int:
        return 0

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def test_what_was_staged_before_a_failing_request_is_written_and_answered() -> None:
    clock = VirtualClock()
    store: Any = SimpleNamespace(on_durable=lambda listener: None, write_staged=list)
    partitions = Partitions(store, clock, 1)
    ended: list[Failures] = []

    def stages(connection: Connection, response: Any, *_: Any) -> None:
        def written(failures: Failures) -> None:
            ended.append(failures)
            connection.fill(response, [b"answered"])

        partitions.at_turn_end(written)

    def breaks(*_: Any) -> None:
        raise OSError("too many open files")

    services: Any = SimpleNamespace(
        clock=clock,
        partitions=partitions,
        metrics=Metrics(),
        settings=load(environment={}),
        connections={},
        failed=lambda error: None,
    )
    connection = Connection(
        services,
        "default",
        {},
        {key: frame_handler(key, handler) for key, handler in ((apis.PRODUCE, stages), (apis.FETCH, breaks))},
    )
    channel = Wire()
    connection.opened(channel)
    frames = write_request(apis.PRODUCE, 3, 1, "c", b"") + write_request(apis.FETCH, 4, 2, "c", b"")
    assert connection.received(memoryview(frames)) == len(frames)
    assert ended == [{}]
    assert channel.sent == b"answered"
    assert channel.closed
    assert services.metrics.protocol_errors == 1


def test_a_later_answer_that_fails_closes_the_connection_and_is_counted() -> None:
    async def breaks() -> Message:
        raise OSError("too many open files")

    services: Any = SimpleNamespace(
        clock=VirtualClock(),
        partitions=None,
        metrics=Metrics(),
        settings=load(environment={}),
        connections={},
        spawn=asyncio.run,
    )
    connection = Connection(services, "default", {}, {})
    channel = Wire()
    connection.opened(channel)
    Request(connection, PendingResponse("Metadata", 0.0), apis.METADATA, 8, 1, "c", Message()).reply_later(breaks())
    assert channel.closed
    assert services.metrics.protocol_errors == 1


@pytest.mark.parametrize("api", apis.ALL_APIS.values(), ids=lambda api: api.name)
def test_the_module_of_a_handler_is_headed_by_the_versions_that_are_served(api: apis.Api) -> None:
    frames = {key: handler.handle for key, handler in FRAME_HANDLERS.items()}
    headed = inspect.getdoc(inspect.getmodule(HANDLERS.get(api.key) or frames[api.key])) or ""
    one, many = f"version {api.max_version}", f"versions {api.min_version} to {api.max_version}"
    assert f"{api.name}, {one if api.min_version == api.max_version else many}" in headed


def test_every_api_of_the_table_has_one_handler() -> None:
    assert HANDLERS.keys() | FRAME_HANDLERS.keys() == apis.ALL_APIS.keys()
    assert not HANDLERS.keys() & FRAME_HANDLERS.keys()
