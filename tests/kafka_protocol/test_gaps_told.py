"""That a batch is missing is told only by a broker that leads for certain: clients take it for a loss."""

from __future__ import annotations

import pytest

from headrace.errors import CoordinationError, ErrorCode
from kafka_protocol.test_refused_first_batch import BY_NAME, OTHER, OUT_OF_ORDER, Front
from partitions.held_threads import Threads
from partitions.led import BROKER, topic_id
from proving import proves

EPOCH = 2


@pytest.fixture(params=["partitioned", "shared"])
def front(request: pytest.FixtureRequest) -> Front:
    """A leader that has the batch with sequence 0."""
    front = Front(request.param, BY_NAME)
    front.lead(front.log(), EPOCH)
    assert front.produce(0) == ErrorCode.NONE
    return front


@proves("J10")
@pytest.mark.parametrize("leader", [OTHER, BROKER])
def test_a_leader_that_was_replaced_and_has_not_heard_of_it_tells_no_gap(front: Front, leader: int) -> None:
    """Its successor has acknowledged what is missing here."""
    front.keys.put(front.topic, topic_id(front.topic), leader, EPOCH + 1)
    assert front.produce(5) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    front.keys.put(front.topic, topic_id(front.topic), BROKER, EPOCH)
    assert front.produce(5) == OUT_OF_ORDER


def test_a_leader_without_coordination_tells_no_gap_and_takes_what_comes_next(front: Front) -> None:
    front.keys.failure = CoordinationError("nobody answers")
    assert front.produce(2) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert [front.produce(sequence) for sequence in (1, 2)] == [ErrorCode.NONE, ErrorCode.NONE]
    assert front.held() == [b"0", b"1", b"2"]


def test_a_gap_that_nobody_confirms_is_answered_in_time(front: Front) -> None:
    front.keys.held = True
    front.ask(5)
    assert not front.wire.sent
    front.led.clock.advance(1.1)
    assert front.answer() == ErrorCode.REQUEST_TIMED_OUT
    front.keys.answer()
    front.led.clock.run_soon()
    assert not front.wire.sent


def test_an_answer_comes_when_the_gap_is_confirmed(front: Front) -> None:
    front.keys.held = True
    front.ask(5)
    assert not front.wire.sent
    front.keys.answer()
    front.led.clock.run_soon()
    assert front.answer() == OUT_OF_ORDER


@pytest.mark.parametrize(
    ("epoch", "code"), [(EPOCH, OUT_OF_ORDER), (EPOCH + 1, ErrorCode.NOT_LEADER_OR_FOLLOWER)], ids=["leads", "replaced"]
)
def test_where_batches_are_recompressed_too(epoch: int, code: int) -> None:
    front = Front("partitioned", BY_NAME)
    threads = Threads(front.led)
    front.lead(front.log(compression_type="gzip"), EPOCH)
    front.ask(0)
    threads.finish_all()
    front.led.clock.run_soon()
    assert front.answer() == ErrorCode.NONE
    front.keys.put(front.topic, topic_id(front.topic), BROKER, epoch)
    front.ask(5)
    threads.finish_all()
    front.led.clock.run_soon()
    assert front.answer() == code
