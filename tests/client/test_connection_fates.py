"""Every request hears exactly once what became of it, and `NeverSent` is never said of one that arrived."""

from __future__ import annotations

import random
import struct
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from client.connection_drivers import KINDS, Driver
from client.connection_peer import Answer, Peer
from headrace.client.connection import broker_connection as connections
from headrace.client.connection.broker_connection import BrokerConnection
from headrace.client.connection.reactor import Backoff
from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.client.errors import BrokerUnreachable, EngineClosed, NeverSent
from headrace.errors import HeadraceError, ProtocolError
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves


class Moody:
    """A peer that answers, or says nothing, or nonsense, or hangs up; it keeps which requests it has seen."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.seen: set[str] = set()
        self.calm = False

    def reply(self, api_key: int, request: Message) -> Answer:
        self.seen.add(request.topics[0].name)
        mood = 0 if self.calm else self._draw.randrange(40)
        if mood == 39:
            return None
        if mood == 38:
            return struct.pack(">i", 9) + self._draw.randbytes(9)
        if mood > 35:
            return b""
        return Message(brokers=[], topics=[])


class Fates:
    """What each request was told, counted under the reactor's lock."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.kinds: Counter[type] = Counter()
        self.never: set[str] = set()
        self.answered: set[str] = set()

    def hear(self, name: str) -> Callable[[Message | HeadraceError], None]:
        def heard(answer: Message | HeadraceError) -> None:
            self.told[name] += 1
            self.kinds[Message if isinstance(answer, Message) else type(answer)] += 1
            if isinstance(answer, NeverSent):
                self.never.add(name)
            elif isinstance(answer, Message):
                self.answered.add(name)
            else:
                assert isinstance(answer, BrokerUnreachable | ProtocolError)

        return heard

    def check(self, asked: int, seen: set[str]) -> None:
        assert len(self.told) == asked
        assert set(self.told.values()) == {1}
        assert not self.never & seen
        assert self.answered <= seen


def body(name: str, draw: random.Random) -> Message:
    """Some are too large for the kernel to take at once."""
    others = [Message(name="x" * 200)] * (5000 if draw.randrange(25) == 0 else 0)
    return Message(topics=[Message(name=name), *others], allow_auto_topic_creation=False)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SETUP_TIMEOUT_S", 2.0)


@proves("R16")
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_hears_once_and_never_sent_means_never_seen(kind: str, seed: int) -> None:
    draw, driver, fates = random.Random(seed), Driver(kind), Fates()
    moody = Moody(random.Random(seed + 1))
    asked = 0
    with Peer(moody.reply) as peer:
        connection = BrokerConnection(driver.reactor, peer.address, client_id="fates", backoff=Backoff(most_s=0.03))
        for _ in range(60):
            for _ in range(draw.randrange(1, 15)):
                name = f"request-{asked}"
                timeout_s = draw.choice((0.02, 0.2, 5.0))
                connection.ask(apis.METADATA, body(name, draw), fates.hear(name), timeout_s=timeout_s)
                asked += 1
            way = draw.randrange(10)
            if way == 0:
                connection.close(BrokerUnreachable("closed on purpose"))
            elif way == 1:
                peer.drop()
            else:
                goal = draw.randrange(asked - 10, asked + 1)
                driver.until(lambda: fates.told.total() >= goal)  # noqa: B023
        driver.until(lambda: fates.told.total() == asked)
        connection.end(EngineClosed("enough"))
    fates.check(asked, moody.seen)
    assert fates.kinds[Message] > 0
    assert fates.never
    driver.close()


@pytest.mark.usefixtures("impatient")
def test_every_request_of_many_threads_hears_once(seed: int) -> None:
    reactor, fates = ThreadReactor(), Fates()
    moody = Moody(random.Random(seed))
    done: list[int] = []
    with Peer(moody.reply) as peer:
        connection = BrokerConnection(reactor, peer.address, client_id="fates", backoff=Backoff(most_s=0.03))

        def work(nth: int) -> None:
            draw = random.Random(seed + nth)
            for count in range(60):
                name = f"request-{nth}-{count}"
                connection.ask(apis.METADATA, body(name, draw), fates.hear(name), timeout_s=draw.choice((0.05, 5.0)))
                assert reactor.wait(lambda: name in fates.told, reactor.now() + 30)  # noqa: B023
            done.append(nth)

        threads = [threading.Thread(target=work, args=(nth,)) for nth in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == list(range(6))
        connection.end(EngineClosed("enough"))
    fates.check(360, moody.seen)
    reactor.close()
