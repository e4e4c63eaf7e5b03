"""A share consumer whose requests are answered wrongly, or not at all: by a proxy between it and a real broker."""

from __future__ import annotations

import uuid

import pytest

from brokers import Broker
from client.wire_tap import Seen, WireTap
from clients.sharing import DEADLINE_S, share_group
from headrace import Producer, Record, ShareConsumer
from headrace.errors import ErrorCode
from headrace.wire import api as apis
from headrace.wire.message import Message
from proving import proves

DEADLINE_MS = int(DEADLINE_S * 1000)


@pytest.fixture
def consumer(tap: WireTap, tapped: tuple[WireTap, Broker]) -> ShareConsumer:
    topic = f"t-{uuid.uuid4()}"
    with Producer(tap.address) as producer:
        for value in range(3):
            producer.send(topic, b"%d" % value)
    return ShareConsumer(topic, bootstrap=tap.address, group=share_group(tap.address), acknowledgement="explicit")


def received(consumer: ShareConsumer) -> list[Record]:
    seen: list[Record] = []
    while len(seen) < 3:
        found = consumer.poll(DEADLINE_MS)
        consumer.acknowledge(found, "renew")
        seen += found
    assert set(consumer.commit().values()) == {None}
    return seen


@proves("Q1")
@pytest.mark.parametrize("code", [ErrorCode.SHARE_SESSION_NOT_FOUND, ErrorCode.INVALID_SHARE_SESSION_EPOCH])
def test_a_session_that_the_broker_does_not_know_is_begun_anew(
    tap: WireTap, consumer: ShareConsumer, code: int
) -> None:
    with consumer:
        records = received(consumer)
        left = [True]

        def refuse(seen: Seen, answer: Message) -> None:
            if seen.api_key == apis.SHARE_ACKNOWLEDGE and left:
                left.pop()
                answer.error_code, answer.responses = code, []

        tap.change = refuse
        consumer.acknowledge(records)
        assert consumer.commit() == {(records[0].topic, 0): None}
        assert len(tap.of(apis.SHARE_ACKNOWLEDGE)) > 1
        assert not left


@proves("Q1")
def test_a_lost_answer_is_asked_for_again_and_what_is_not_known_is_told_so(
    tap: WireTap, consumer: ShareConsumer
) -> None:
    with consumer:
        records = received(consumer)
        left = [True]
        tap.lost = lambda seen: seen.api_key == apis.SHARE_ACKNOWLEDGE and bool(left) and bool(left.pop())
        consumer.acknowledge(records[1])
        (error,) = consumer.commit().values()
        assert error is not None
        assert error.kafka_code == ErrorCode.INVALID_RECORD_STATE
        assert "the first answer was lost, by which it may have been taken" in str(error)
