"""One end of a link, with its channel in the test's hand: greetings, whole frames, pings, silence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.errors import ProtocolError
from headrace.ports.network import Address, Part
from headrace.replication import frames
from headrace.replication.frames import HEAD_BYTES, Frame, Hello
from headrace.replication.link import PINGS_PER_TIMEOUT, Link
from headrace.virtual.clock import VirtualClock

OURS = Hello("test", 1, "run-1")
THEIRS = Hello("test", 2, "run-2")
TIMEOUT_MS = 4000
UNSUBSCRIBE = frames.unsubscribe(7, 3)


class Wire:
    """A channel that keeps what is sent."""

    peer = local = Address("b2", 1)
    want_bytes = 0

    def __init__(self) -> None:
        self.sent: list[Part] = []
        self.is_open = True

    def send(self, parts: Sequence[Part]) -> None:
        self.sent += parts

    def queued_bytes(self) -> int:
        return 77

    def abort(self) -> None:
        self.is_open = False

    pause = resume = close = abort


class Heard:
    """An end that keeps what it hears; it fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.reasons: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def greeted(self, hello: Hello) -> None:
        self._called(f"greeted {hello.broker}")

    def take(self, data: memoryview, frame: Frame) -> None:
        self._called("take")

    def end_turn(self) -> None:
        self._called("end_turn")

    def drained(self) -> None:
        self._called("drained")

    def gone(self, reason: str) -> None:
        self.reasons.append(reason)
        self._called("gone")


class Scene:
    def __init__(self, *, is_greeted: bool = True) -> None:
        self.clock = VirtualClock()
        self.end = Heard()
        self.wire = Wire()
        self.failures: list[BaseException] = []
        self.link = Link(self.end, OURS, self.clock, TIMEOUT_MS, 1 << 20, self.failures.append)
        self.link.opened(self.wire)
        assert self.wire.sent == [frames.hello(OURS)]
        if is_greeted:
            self.receive(frames.hello(THEIRS))
            assert self.heard() == ["greeted 2", "end_turn"]
        self.wire.sent.clear()

    def receive(self, data: bytes) -> int:
        return self.link.received(memoryview(data))

    def heard(self) -> list[str]:
        calls, self.end.calls = self.end.calls, []
        return calls

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.link.tick(self.clock.now())


def test_a_link_is_ready_from_its_greeting_to_its_end() -> None:
    scene = Scene(is_greeted=False)
    assert not scene.link.is_ready
    scene.receive(frames.hello(THEIRS))
    assert scene.link.is_ready
    assert scene.link.queued_bytes == 77
    scene.link.abort("enough")
    assert not scene.link.is_ready
    assert scene.link.queued_bytes == 0
    assert not scene.wire.is_open


def test_a_link_that_was_given_up_before_it_opened_stays_closed() -> None:
    end, wire = Heard(), Wire()
    link = Link(end, OURS, VirtualClock(), TIMEOUT_MS, 1 << 20, lambda _: None)
    link.abort("too late")
    link.opened(wire)
    assert (wire.is_open, wire.sent, end.calls) == (False, [], ["gone"])


@pytest.mark.parametrize("hello", [Hello("other", 2, "run-2"), Hello("test", 1, "run-2")])
def test_a_peer_of_another_cluster_or_with_our_own_number_is_not_greeted(hello: Hello) -> None:
    scene = Scene(is_greeted=False)
    data = frames.hello(hello) + UNSUBSCRIBE
    assert scene.receive(data) == len(data)
    assert scene.heard() == ["gone", "end_turn"]
    assert not scene.wire.is_open


def test_frames_are_taken_whole_and_pings_are_not_passed_on() -> None:
    scene = Scene()
    data = UNSUBSCRIBE + frames.PING + UNSUBSCRIBE
    assert scene.receive(data) == len(data)
    assert scene.heard() == ["take", "take", "end_turn"]
    assert scene.wire.want_bytes == 0, "nothing is missing"
    assert scene.receive(UNSUBSCRIBE + UNSUBSCRIBE[: HEAD_BYTES - 1]) == len(UNSUBSCRIBE)
    assert (scene.heard(), scene.wire.want_bytes) == (["take", "end_turn"], HEAD_BYTES)
    assert scene.receive(UNSUBSCRIBE + UNSUBSCRIBE[:-1]) == len(UNSUBSCRIBE)
    assert (scene.heard(), scene.wire.want_bytes) == (["take", "end_turn"], len(UNSUBSCRIBE))


def test_what_an_end_cannot_take_ends_the_link_and_its_turn() -> None:
    for error in (ProtocolError("no"), ValueError("unforeseen")):
        scene = Scene()
        scene.end.fails["take"] = error
        assert scene.receive(UNSUBSCRIBE * 2) == 2 * len(UNSUBSCRIBE)
        assert scene.heard() == ["take", "gone", "end_turn"]
        assert (scene.wire.is_open, scene.failures) == (False, [])


def test_a_turn_that_cannot_be_ended_ends_the_broker() -> None:
    scene = Scene()
    error = scene.end.fails["end_turn"] = ValueError("what was staged is lost")
    with pytest.raises(ValueError, match="staged"):
        scene.receive(UNSUBSCRIBE)
    assert scene.failures == [error]


def test_a_link_ends_once_and_hears_nothing_afterwards() -> None:
    scene = Scene()
    scene.link.drained()
    assert scene.heard() == ["drained"]
    scene.link.closed("reset")
    scene.link.abort("again")
    scene.link.closed("again")
    scene.link.drained()
    scene.link.send([b"nobody is there"])
    assert (scene.heard(), scene.end.reasons, scene.wire.sent) == (["gone"], ["reset"], [])
    scene = Scene()
    scene.link.abort("ours")
    scene.link.abort("again")
    scene.link.closed("again")
    assert scene.end.reasons == ["ours"]


def test_a_link_that_has_nothing_to_say_pings_a_few_times_in_its_timeout() -> None:
    scene = Scene()
    pause = TIMEOUT_MS / 1000 / PINGS_PER_TIMEOUT
    scene.wait(pause)
    assert scene.wire.sent == []
    scene.wait(0.1)
    assert scene.wire.sent == [frames.PING]
    scene.wait(pause)
    assert scene.wire.sent == [frames.PING]
    silent = Scene(is_greeted=False)
    silent.wait(2 * pause)
    assert silent.wire.sent == [], "a peer that is not known is not pinged"


def test_silence_ends_a_link() -> None:
    scene = Scene()
    scene.wait(TIMEOUT_MS / 1000)
    assert scene.wire.is_open
    scene.receive(frames.PING)
    scene.wait(TIMEOUT_MS / 1000)
    assert scene.wire.is_open
    scene.wait(0.1)
    assert not scene.wire.is_open
    assert scene.end.reasons == ["silent for 4.1 s"]
    end = Heard()
    clock = VirtualClock()
    never = Link(end, OURS, clock, TIMEOUT_MS, 1 << 20, lambda _: None)
    clock.advance(5)
    never.tick(clock.now())
    assert end.reasons == ["not open after 5.0 s"]
