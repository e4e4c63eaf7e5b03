"""Requests with bytes flipped, cut, doubled and swapped, on the network in memory: an answer or a close, no defect."""

from __future__ import annotations

import random
import re
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

import pytest

from headrace.cluster.image import Image, PartitionState, Topic
from headrace.cluster.names import check_topic_name
from headrace.http.server import HttpServer
from headrace.http.services import HttpServices
from headrace.metrics import Metrics
from headrace.ports.network import Address
from headrace.settings.values import load
from headrace.storage.keys.builder import KeyIndexes
from headrace.virtual.network import VirtualNetwork
from partitions.led import BROKER, Led
from system.joined import Recorder

MUTANTS: Final = 1500
VALID: Final = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /ready HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /topics/orders HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /topics/orders/partitions/0/records?offset=0&count=10&wait_ms=50 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /topics/orders/partitions/0/records?offset=earliest&format=binary&max_bytes=900 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /topics/orders/records?key=a&acks=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nX-Header-h: v\r\n\r\nhello",
    b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 67\r\n\r\n"
    b'{"records":[{"key":"a","value_base64":"aGk=","headers":{"h":"v"}}]}',
    b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n13\r\n{"value":{"n":[1]}}\r\n0\r\n\r\n',
)
STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Port:
    def __init__(self, seed: int) -> None:
        self.led = Led()
        self.led.lead("orders")
        self.metrics = Metrics()
        state = PartitionState(0, BROKER, 0, (BROKER,), (BROKER,))
        self._image = Image("/", topics={"orders": Topic("orders", bytes(16), (state,))})
        self.network = VirtualNetwork(self.led.clock, seed)
        services = HttpServices(
            settings=load(environment={}, flags={"http.body.max.bytes": 2000}),
            clock=self.led.clock,
            disk=self.led.disk,
            metrics=self.metrics,
            broker_id=BROKER,
            cluster_id="c",
            partitions=self.led.partitions,
            key_indexes=KeyIndexes(self.led.store, self.led.disk, self.led.clock, "/data"),
            image=lambda: self._image,
            ensure_topic=self._ensure_topic,
            group_lags=lambda: (),
            ready=lambda: None,
            spawn=_run,
        )
        self.server = HttpServer(self.network.host("broker"), Address("broker", 80), services)
        self.server.start()

    async def _ensure_topic(self, name: str) -> None:
        check_topic_name(name)
        self.led.lead(name)
        known = replace(self._image.topics["orders"], name=name)
        self._image = replace(self._image, topics={**self._image.topics, name: known})

    def send(self, sent: bytes) -> Recorder:
        client = Recorder()
        self.network.host("client").connect(self.server.address, client)
        self.led.clock.advance(0.01)
        client.end.send([sent])
        self.led.clock.advance(10)
        return client


def _run(work: Coroutine[Any, Any, None]) -> None:
    """What these coroutines wait for is there at once."""
    with pytest.raises(StopIteration):
        work.send(None)


def mutate(chance: random.Random, original: bytes) -> bytes:
    mutant = bytearray(original)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(mutant) + 1)
        match chance.randrange(5):
            case 0:
                mutant[at : at + 1] = chance.randbytes(1)
            case 1:
                del mutant[at : at + chance.randint(1, 20)]
            case 2:
                mutant[at:at] = mutant[at : at + chance.randint(1, 40)]
            case 3:
                other = chance.choice(VALID)
                mutant[at:at] = other[: chance.randrange(len(other))]
            case 4:
                mutant[at:at] = chance.choice(
                    (b"\r\n", b"\0", b"9" * 30, b"%", b"%zz", b"\xff", b"{", b'"', b"?", b"/")
                )
    return bytes(mutant)


@pytest.mark.parametrize("valid", VALID)
def test_the_originals_are_answered(valid: bytes) -> None:
    client = Port(1).send(valid)
    assert set(STATUS.findall(client.data)) == {b"200"}


def test_mutants_are_answered_or_closed_and_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    port = Port(seed)
    seen: set[int] = set()
    for _ in range(MUTANTS):
        client = port.send(mutate(chance, chance.choice(VALID)))
        statuses = {int(status) for status in STATUS.findall(client.data)}
        assert 500 not in statuses
        seen |= statuses
        if not client.is_closed:
            client.end.abort()
            port.led.clock.advance(0.1)
    assert port.server._sessions == set()
    assert len(port.led.partitions.deadlines) < MUTANTS
    assert {200, 400, 404} <= seen
    assert STATUS.findall(port.send(VALID[0]).data) == [b"200"]
