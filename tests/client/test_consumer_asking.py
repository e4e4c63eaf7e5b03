"""How a consumer asks for offsets and its coordinator when the answers do not come: scripted peers on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from brokers import wait_for
from client.connection_peer import Answer, Peer
from client.test_consumer_answers import Scripted
from headrace.client.connection.connections import shared
from headrace.client.consumer.consumer import Consumer
from headrace.client.consumer.coordinator import Coordinator, Identity, heartbeat_request
from headrace.client.consumer.group_protocol import TopicPartition
from headrace.client.consumer.offset_lookup import OffsetLookup
from headrace.client.fetch_requests import EARLIEST
from headrace.errors import HeadraceError
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

PLACE: TopicPartition = ("t", 0)


class CountedListing(OffsetLookup):
    """Knows how often it asked, and how many of its timers ran at once."""

    asks = timers = most_timers = 0

    def _ask(self) -> None:
        self.asks += 1
        self.timers -= self.asks > 1
        super()._ask()

    def _later(self) -> None:
        self.timers += bool(self._wanted)
        self.most_timers = max(self.most_timers, self.timers)
        super()._later()


@pytest.fixture
def led_by_a_stranger() -> Iterator[tuple[Scripted, Consumer]]:
    """The leader is not among the brokers that the cluster names."""
    with ExitStack() as stack:
        scripted = Scripted(lambda _, asked: None)
        stack.callback(scripted.close)
        scripted.leader = 3
        consumer = stack.enter_context(Consumer("t", bootstrap=scripted.bootstrap, max_wait_ms=10))
        wait_for("the topic", lambda: consumer._pool.metadata.leader(*PLACE) == 3)
        yield scripted, consumer


@proves("R8")
def test_offsets_are_asked_for_once_at_a_time_while_the_leader_is_unknown(
    led_by_a_stranger: tuple[Scripted, Consumer],
) -> None:
    scripted, consumer = led_by_a_stranger
    found: dict[TopicPartition, int | HeadraceError] = {}
    with consumer._driver.reactor.lock:
        lookup = CountedListing(consumer._pool, {PLACE: EARLIEST}, found.__setitem__, found.__setitem__)
    wait_for("it to be asked for again", lambda: lookup.asks >= 5)
    scripted.leader = 1
    wait_for("the offset", lambda: found == {PLACE: 0})
    assert lookup.most_timers == 1


def test_offsets_that_nobody_wants_any_more_are_not_asked_for(led_by_a_stranger: tuple[Scripted, Consumer]) -> None:
    _, consumer = led_by_a_stranger
    with consumer._driver.reactor.lock:
        turn = consumer._core.cursor(PLACE).version
        lookup = CountedListing(
            consumer._pool,
            {PLACE: EARLIEST},
            lambda *_: None,
            lambda *_: None,
            lambda place: consumer._core.cursor(place).version == turn,
        )
    wait_for("it to be asked for again", lambda: lookup.asks >= 2)
    consumer.seek(*PLACE, 5)
    wait_for("the last timer", lambda: lookup.timers == 0)
    assert lookup._wanted == {}


@proves("R8")
def test_what_is_under_way_when_a_coordinator_is_given_up_is_asked_again() -> None:
    beats: list[Message] = []

    def reply(api_key: int, request: Message) -> Answer:
        if api_key == apis.FIND_COORDINATOR:
            host, port = peer.address.host, peer.address.port
            one = Message(key="g", node_id=1, host=host, port=port, error_code=0, error_message=None)
            return Message(error_code=0, node_id=1, host=host, port=port, coordinators=[one])
        beats.append(request)
        return None if len(beats) == 1 else Message(error_code=0)

    with Peer(reply) as peer:
        pool = shared(str(peer.address), client_id="given-up")
        try:
            coordinator = Coordinator(pool, "g")
            answers: list[Message | HeadraceError] = []
            request = heartbeat_request("g", Identity("m", 1, None))
            with pool.reactor.lock:
                coordinator.persist(
                    apis.HEARTBEAT,
                    lambda: request,
                    lambda answer: int(answer.error_code),
                    answers.append,
                    within_s=20.0,
                )
            wait_for("the first question", lambda: beats)
            with pool.reactor.lock:
                coordinator.hang_up()
            wait_for("an answer", lambda: answers)
            assert isinstance(answers[0], Message)
            with pool.reactor.lock:
                coordinator.close()
        finally:
            pool.release()
