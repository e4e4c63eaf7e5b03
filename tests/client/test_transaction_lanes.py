"""Lanes of transactions: they never change their epoch, and begin anew when the next transaction does."""

from __future__ import annotations

from headrace.client.producer.lane import Fate, Lane, LaneBatch, Outcome
from proving import proves

LEADER = 1


def lane() -> Lane[LaneBatch]:
    made: Lane[LaneBatch] = Lane("t", 0, -1, True, transactional=True)
    made.rebase(7, 0)
    return made


def sent(of: Lane[LaneBatch], count: int = 1, now: float = 0.0) -> LaneBatch:
    batch = LaneBatch(count, 100.0)
    of.add(batch)
    left = of.next(now, LEADER)
    assert left is batch
    return batch


def ended(of: Lane[LaneBatch], batch: LaneBatch, outcome: Outcome, now: float = 0.0) -> list[Fate]:
    return [fate for _, fate in of.answered(batch, batch.attempt, outcome, now)]


@proves("T3")
def test_sequences_go_on_within_an_epoch_and_begin_anew_with_the_next() -> None:
    of = lane()
    for sequence in (0, 3, 6):
        batch = sent(of, 3)
        assert (batch.producer_id, batch.epoch, batch.sequence) == (7, 0, sequence)
        assert ended(of, batch, Outcome.WRITTEN) == [Fate.DELIVERED]
    of.rebase(7, 1)
    # The log knows the producer: what is not the first of an epoch is refused there, so several may be on their way.
    batches = [sent(of, 3) for _ in range(3)]
    assert [(batch.epoch, batch.sequence) for batch in batches] == [(1, 0), (1, 3), (1, 6)]


@proves("T3")
def test_a_producer_that_the_log_may_not_know_sends_one_batch_first() -> None:
    of = lane()
    first = sent(of)
    of.add(LaneBatch(1, 100.0))
    assert of.next(0.0, LEADER) is None
    ended(of, first, Outcome.WRITTEN)
    assert of.next(0.0, LEADER) is not None
    of.rebase(8, 0)
    sent(of)
    of.add(LaneBatch(1, 100.0))
    assert of.next(0.0, LEADER) is None


@proves("T3")
def test_what_is_given_up_stops_the_lane_until_the_next_transaction() -> None:
    for outcome, fate in (
        (Outcome.FATAL, Fate.FAILED),
        (Outcome.FENCED, Fate.FAILED),
        (Outcome.OUT_OF_ORDER, Fate.FAILED),
        (Outcome.FATAL_UNKNOWN, Fate.UNKNOWN),
    ):
        of = lane()
        assert ended(of, sent(of), outcome) == [fate]
        behind = LaneBatch(1, 100.0)
        of.add(behind)
        assert of.next(10.0, LEADER) is None
        assert (of.producer_id, of.epoch, of.renewals) == (7, 0, 0)
        assert of.withdraw(lambda _: True) == [(behind, Fate.FAILED)]
        of.rebase(7, 1)
        assert sent(of, now=20.0).sequence == 0


def test_an_answer_of_an_earlier_transaction_says_nothing_in_the_next() -> None:
    of = lane()
    late = sent(of)
    assert [fate for _, fate in of.expire(100.0)] == [Fate.UNKNOWN]
    of.rebase(7, 1)
    batch = sent(of, now=100.0)
    assert ended(of, late, Outcome.FENCED, 101.0) == []
    assert ended(of, batch, Outcome.WRITTEN, 101.0) == [Fate.DELIVERED]


def test_a_batch_with_a_sequence_stays_in_its_partition() -> None:
    of = lane()
    batch = sent(of)
    ended(of, batch, Outcome.REFUSED)
    assert not of.release(batch)
    fresh = LaneBatch(1, 100.0)
    of.add(fresh)
    assert of.release(fresh)
