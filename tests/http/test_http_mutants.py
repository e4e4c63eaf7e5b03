"""Requests with bytes flipped, cut, doubled and swapped, on the network in memory: an answer or a close, no defect."""

from __future__ import annotations

import random
import re
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

import pytest

from headrace.cluster.config import Configs
from headrace.cluster.image import Broker, Image, PartitionState, Topic
from headrace.cluster.names import OFFSETS_TOPIC
from headrace.cluster.topics import Topics, limits_from
from headrace.coordinators.state_log import StateLog
from headrace.groups.coordinator import GroupCoordinator
from headrace.groups.limits import CoordinatorLimits
from headrace.http.server import HttpServer
from headrace.http.services import HttpServices
from headrace.metrics import Metrics
from headrace.ports.network import Address
from headrace.settings.topic_name import check_topic_name
from headrace.settings.values import load
from headrace.storage.keys.builder import KeyIndexes
from headrace.virtual.network import VirtualNetwork
from http_port import no_share_groups
from image_changes import ImageChanges
from partitions.led import BROKER, Led
from system.joined import Recorder

MUTANTS: Final = 1500
VALID: Final = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /ready HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /topics/orders HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /topics/orders/partitions/0/records?offset=0&count=10&wait_ms=50 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /topics/orders/partitions/0/records?offset=earliest&format=binary&max_bytes=900 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /topics/orders/records?count=3&wait_ms=20&cursor=0:0 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /topics/orders/records?group=billing&reset=latest HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /groups HTTP/1.1\r\nHost: x\r\n\r\nGET /groups/billing/offsets?topic=orders HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /topics/orders/records?key=a&acks=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nX-Header-h: v\r\n\r\nhello",
    b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 67\r\n\r\n"
    b'{"records":[{"key":"a","value_base64":"aGk=","headers":{"h":"v"}}]}',
    b"POST /topics/orders/records HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
    b'Transfer-Encoding: chunked\r\n\r\n13\r\n{"value":{"n":[1]}}\r\n0\r\n\r\n',
)
CHANGES: Final = (
    b"POST /topics HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 75\r\n\r\n"
    b'{"name":"bills","partitions":2,"replicas":1,"settings":{"durability":"os"}}',
    b"POST /topics?dry_run=true HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 36\r\n\r\n"
    b'{"name":"tried","assignments":[[1]]}',
    b"PATCH /topics/bills HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 54\r\n\r\n"
    b'{"settings":{"retention.ms":60000,"durability":null}}\n',
    b"PATCH /topics/bills HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 16\r\n\r\n"
    b'{"partitions":3}',
    b"POST /groups/billing/offsets HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 74\r\n\r\n"
    b'{"offsets":[{"topic":"orders","partition":0,"offset":5,"metadata":"x y"}]}',
    b"GET /groups/billing HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /groups/billing/offsets?topic=orders&partition=0 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /groups/billing HTTP/1.1\r\nHost: x\r\n\r\n",
    b"DELETE /topics/bills HTTP/1.1\r\nHost: x\r\n\r\n",
)
"""Each is answered after those before it."""
ALL: Final = VALID + CHANGES
STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Port:
    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.led = Led()
        self.led.lead("orders")
        self.metrics = Metrics()
        state = PartitionState(0, BROKER, 0, (BROKER,), (BROKER,))
        self._changes = ImageChanges(self.led.clock, lambda _before, _after: None)
        self._image = replace(
            self._image,
            topics={name: Topic(name, bytes(16), (state,)) for name in ("orders", OFFSETS_TOPIC)},
            brokers={BROKER: Broker(BROKER, {}, "", 0)},
        )
        self.network = VirtualNetwork(self.led.clock, seed)
        settings = load(environment={}, flags={"http.body.max.bytes": 2000})
        groups = GroupCoordinator(
            self.led.clock,
            StateLog(self.led.partitions, OFFSETS_TOPIC).append,
            1,
            lambda: chance.randbytes(8).hex(),
            CoordinatorLimits(),
            lambda _name: bytes(16),
        )
        groups.lead(0, 0).ready()
        self.led.lead(OFFSETS_TOPIC)
        services = HttpServices(
            settings=settings,
            clock=self.led.clock,
            disk=self.led.disk,
            metrics=self.metrics,
            broker_id=BROKER,
            cluster_id="c",
            partitions=self.led.partitions,
            key_indexes=KeyIndexes(self.led.store, self.led.disk, self.led.clock, "/data"),
            image=lambda: self._image,
            topics=Topics(
                self._changes, lambda: limits_from(settings), lambda: chance.randbytes(16), self.led.clock.wall_ms
            ),
            configs=Configs(self._changes, lambda: settings),
            effective_settings=lambda: settings,
            ensure_topic=self._ensure_topic,
            groups=groups,
            share=no_share_groups(self.led.partitions, self.led.disk),
            group_lags=lambda: (),
            ready=lambda: None,
            spawn=_run,
        )
        self.server = HttpServer(self.network.host("broker"), Address("broker", 80), services)
        self.server.start()

    @property
    def _image(self) -> Image:
        return self._changes.view.image

    @_image.setter
    def _image(self, image: Image) -> None:
        self._changes.view.image = image

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
                other = chance.choice(ALL)
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


def test_the_original_changes_are_answered_one_after_the_other() -> None:
    port = Port(1)
    found = [STATUS.findall(port.send(change).data) for change in CHANGES]
    assert found == [[b"201"], *([[b"200"]] * (len(CHANGES) - 1))]


def test_mutants_are_answered_or_closed_and_leave_nothing_behind(seed: int) -> None:
    chance = random.Random(seed)
    port = Port(seed)
    seen: set[int] = set()
    for _ in range(MUTANTS):
        client = port.send(mutate(chance, chance.choice(ALL)))
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
