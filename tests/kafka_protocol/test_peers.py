"""Brokers ask each other: answers come to who asked, and whatever goes wrong is heard by all who wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from headrace.cluster.image import Broker, Endpoint, Image
from headrace.errors import HeadraceError, PeerUnreachable
from headrace.kafka.peers import PAUSE_SECONDS, RESPONSE_MAX_BYTES, WAITING_MAX, PeerListener, Peers
from headrace.ports.network import Address, Channel
from headrace.virtual.clock import VirtualClock
from headrace.virtual.network import WINDOW_BYTES, VirtualNetwork
from headrace.wire import api
from headrace.wire.codec import decode_request, encode_response, read_request_header, write_response
from headrace.wire.message import Message
from proving import proves

HERE, THERE = 1, 2
PORT, OTHER_PORT = 9092, 9093
TIMEOUT_MS = 3000
QUESTION = Message(group_id="g", generation_id=1, member_id="m", group_instance_id=None)


@dataclass(slots=True)
class Peer:
    """The other broker's end of a connection: keeps what it was asked, and answers when the test says so."""

    channel: Channel | None = None
    asked: list[tuple[int, int, Message, str | None]] = field(default_factory=list)
    reading: bool = True

    def opened(self, channel: Channel) -> None:
        self.channel = channel
        if not self.reading:
            channel.pause()

    def received(self, data: memoryview) -> int:
        used = 0
        while len(data) - used >= 4 and len(data) - used >= 4 + (
            length := int.from_bytes(data[used : used + 4], "big")
        ):
            header = read_request_header(data[: used + 4 + length], used + 4)
            body = decode_request(header.api_key, header.version, data[: used + 4 + length], header.body)
            self.asked.append((header.correlation_id, header.version, body, header.client_id))
            used += 4 + length
        return used

    def drained(self) -> None: ...

    def closed(self, reason: str) -> None:
        self.channel = None

    def answer(self, code: int) -> None:
        """The oldest that is not answered."""
        correlation_id, version, _, _ = self.asked.pop(0)
        body = encode_response(api.HEARTBEAT, version, Message(throttle_time_ms=0, error_code=code))
        self.send(write_response(api.HEARTBEAT, version, correlation_id, body))

    def send(self, data: bytes) -> None:
        assert self.channel is not None
        self.channel.send([data])


class Scene:
    def __init__(self, *, reading: bool = True, listeners: tuple[PeerListener, ...] = ()) -> None:
        self.clock = VirtualClock()
        self.network = VirtualNetwork(self.clock, 7)
        self.peers_seen: list[Peer] = []
        self.reading = reading
        self.there = self.network.host("there")
        for port in (PORT, OTHER_PORT):
            self.there.listen(Address("there", port), self.accept)
        self.image = self.image_of({"default": Endpoint("there", PORT)})
        self.contexts: list[object | None] = []
        here = self.network.host("here")
        connect = here.connect

        def noted(address: Address, session: object, tls: object | None = None) -> None:
            self.contexts.append(tls)
            connect(address, session)  # type: ignore[arg-type]

        here.connect = noted  # type: ignore[method-assign]
        self.peers = Peers(here, self.clock, HERE, lambda: self.image, listeners)
        self.heard: list[int | str] = []

    def accept(self) -> Peer:
        self.peers_seen.append(Peer(reading=self.reading))
        return self.peers_seen[-1]

    def image_of(self, listeners: dict[str, Endpoint]) -> Image:
        return Image("/headrace/c/", brokers={THERE: Broker(THERE, listeners, "a", 0)})

    @property
    def peer(self) -> Peer:
        return self.peers_seen[-1]

    def ask(self, question: Message = QUESTION, timeout_ms: int = TIMEOUT_MS, broker: int = THERE) -> None:
        def reply(answer: Message | HeadraceError) -> None:
            self.heard.append(answer.error_code if isinstance(answer, Message) else str(answer))
            assert isinstance(answer, Message | PeerUnreachable)

        before = len(self.heard)
        self.peers.ask(broker, api.HEARTBEAT, 4, question, reply, timeout_ms)
        assert len(self.heard) == before, "an answer never comes before the question is asked"

    def pass_time(self, seconds: float = 0.1) -> None:
        for _ in range(max(1, round(seconds * 10))):
            self.clock.advance(0.1)
            self.peers.tick()


@proves("T1")
def test_answers_come_to_who_asked_over_one_connection() -> None:
    scene = Scene()
    scene.ask()
    scene.ask()
    scene.pass_time()
    assert len(scene.peers_seen) == 1
    assert [one[3] for one in scene.peer.asked] == ["headrace-broker-1"] * 2
    assert scene.peer.asked[0][2] == QUESTION
    scene.peer.answer(27)
    scene.peer.answer(0)
    scene.pass_time()
    assert scene.heard == [27, 0]
    scene.ask()
    scene.pass_time()
    scene.peer.answer(25)
    scene.pass_time()
    assert scene.heard == [27, 0, 25]
    assert len(scene.peers_seen) == 1


def test_each_api_has_a_connection_of_its_own() -> None:
    scene = Scene()
    scene.ask()
    scene.peers.ask(THERE, api.LIST_GROUPS, 4, Message(states_filter=[]), lambda _answer: None, TIMEOUT_MS)
    scene.pass_time()
    assert [len(peer.asked) for peer in scene.peers_seen] == [1, 1]


def test_a_broker_that_does_not_answer_in_time_is_given_up_and_asked_anew_on_another_connection() -> None:
    scene = Scene()
    scene.ask()
    scene.ask(timeout_ms=60_000)
    scene.pass_time(2.8)
    assert scene.heard == []
    scene.pass_time(0.4)
    assert scene.heard == ["broker 2 did not answer Heartbeat in time"] * 2
    scene.pass_time(PAUSE_SECONDS + 0.1)
    scene.ask()
    scene.pass_time()
    assert len(scene.peers_seen) == 2
    scene.peer.answer(0)
    scene.pass_time()
    assert scene.heard[-1] == 0


def test_a_broker_that_stops_reading_gets_no_more_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kafka.peers.QUEUED_MAX_BYTES", 100_000)
    scene = Scene(reading=False)
    large = Message(group_id="g" * 30_000, generation_id=1, member_id="m", group_instance_id=None)
    asked = 0
    while not scene.heard and asked < WAITING_MAX:
        scene.ask(large)
        scene.clock.advance(0.01)
        asked += 1
    assert WINDOW_BYTES <= 30_000 * asked <= WINDOW_BYTES + 200_000
    assert "bytes to read" in str(scene.heard[0])
    scene.pass_time(TIMEOUT_MS / 1000 + 1)
    assert len(scene.heard) == asked
    assert scene.heard[-1] == "broker 2 did not answer Heartbeat in time"


def test_so_many_questions_may_wait_and_no_more() -> None:
    scene = Scene()
    for _ in range(WAITING_MAX + 1):
        scene.ask()
    scene.pass_time()
    assert len(scene.heard) == 1
    assert "has 200 requests of ours" in str(scene.heard[0])
    assert len(scene.peer.asked) == WAITING_MAX


def test_bytes_that_wait_for_a_connection_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kafka.peers.QUEUED_MAX_BYTES", 100)
    scene = Scene()
    scene.network.cut("here", "there")
    for _ in range(10):
        scene.ask()
    scene.pass_time()
    assert 0 < len(scene.heard) < 10
    assert all("bytes to read" in str(one) for one in scene.heard)


def test_a_refused_connection_is_told_and_not_tried_in_every_turn() -> None:
    scene = Scene()
    scene.image = scene.image_of({"default": Endpoint("there", 1)})
    scene.ask()
    scene.clock.advance(PAUSE_SECONDS / 2)
    scene.ask()
    scene.clock.run_soon()
    assert [("refused" in str(one), "just now" in str(one)) for one in scene.heard] == [(True, False), (False, True)]
    assert len(scene.contexts) == 1
    scene.pass_time(PAUSE_SECONDS + 0.1)
    scene.ask()
    assert len(scene.contexts) == 2


def test_who_waits_for_a_broker_that_is_gone_from_the_image_hears_it_at_the_next_tick() -> None:
    scene = Scene()
    scene.ask()
    scene.pass_time()
    scene.image = Image("/headrace/c/")
    scene.pass_time()
    assert scene.heard == ["broker 2 is not alive"]
    scene.ask()
    scene.pass_time()
    assert scene.heard == ["broker 2 is not alive"] * 2


def test_a_broker_that_listens_elsewhere_is_asked_there() -> None:
    scene = Scene()
    scene.ask()
    scene.pass_time()
    scene.image = scene.image_of({"default": Endpoint("there", OTHER_PORT)})
    scene.pass_time(0.1)
    assert scene.heard == ["broker 2 listens elsewhere now"]
    scene.pass_time(PAUSE_SECONDS + 0.1)
    scene.ask()
    scene.pass_time()
    scene.peer.answer(0)
    scene.pass_time()
    assert scene.heard[-1] == 0


def test_a_connection_that_is_reset_is_heard_by_all_who_wait() -> None:
    scene = Scene()
    scene.ask()
    scene.ask()
    scene.pass_time()
    scene.network.reset("here", "there")
    scene.pass_time()
    assert scene.heard == ["broker 2: connection reset by peer"] * 2


@pytest.mark.parametrize(
    "nonsense",
    [
        (RESPONSE_MAX_BYTES + 1).to_bytes(4, "big"),
        bytes(4),
        (8).to_bytes(4, "big") + (77).to_bytes(4, "big") + bytes(4),
        (5).to_bytes(4, "big") + bytes(5),
    ],
    ids=["too long", "empty", "to another question", "cut short"],
)
def test_an_answer_that_cannot_be_ends_the_connection(nonsense: bytes) -> None:
    scene = Scene()
    scene.ask()
    scene.pass_time()
    scene.peer.send(nonsense)
    scene.pass_time()
    assert len(scene.heard) == 1
    assert str(scene.heard[0]).startswith("broker 2: ")


def test_an_answer_to_nothing_ends_the_connection() -> None:
    scene = Scene()
    scene.ask()
    scene.pass_time()
    scene.peer.answer(0)
    scene.peer.send((8).to_bytes(4, "big") + bytes(8))
    scene.pass_time()
    assert scene.heard == [0]
    assert scene.peer.channel is None


def test_a_listener_without_tls_is_preferred_and_one_with_it_gets_our_certificate() -> None:
    context = object()
    scene = Scene(listeners=(PeerListener("plain"), PeerListener("secure", context)))
    scene.image = scene.image_of({"secure": Endpoint("there", PORT), "plain": Endpoint("there", OTHER_PORT)})
    scene.ask()
    scene.pass_time()
    assert scene.contexts == [None]
    assert scene.peer.channel is not None
    assert scene.peer.channel.local.port == OTHER_PORT
    scene.image = scene.image_of({"secure": Endpoint("there", PORT)})
    scene.pass_time(PAUSE_SECONDS + 0.2)
    scene.ask()
    assert scene.contexts == [None, context]
    scene.image = scene.image_of({"other": Endpoint("there", OTHER_PORT)})
    scene.pass_time(PAUSE_SECONDS + 0.2)
    scene.ask()
    assert scene.contexts == [None, context, None]


def test_a_broker_without_a_listener_cannot_be_asked() -> None:
    scene = Scene()
    scene.image = scene.image_of({})
    scene.ask()
    scene.pass_time()
    assert scene.heard == ["broker 2 has no listener"]


def test_a_stop_answers_all_who_wait_and_asks_nothing_more() -> None:
    scene = Scene()
    scene.ask()
    scene.peers.close()
    scene.ask()
    scene.pass_time(1)
    assert scene.heard == ["this broker stops"] * 2
    assert all(peer.channel is None for peer in scene.peers_seen)
