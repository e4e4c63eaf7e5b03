"""What becomes of a batch, by what is decided: the table, and the form in which decisions are kept."""

from __future__ import annotations

import re

import pytest

from headrace.client.producer.transaction_requests import PreparedTransaction
from headrace.errors import CorruptBatch
from headrace.groups.topic_patterns import TopicPattern
from headrace.spark.decisions import (
    BEFORE_MAX,
    Batch,
    Decision,
    Ended,
    Known,
    Verdict,
    attempts_pattern,
    decide,
    driver_id,
    is_another,
    judge,
    query_of,
    retire,
)
from proving import proves

BATCH = Batch("query", "this run", 7)


def prepared(batch: Batch, count: int = 3) -> tuple[PreparedTransaction, ...]:
    return tuple(PreparedTransaction(batch.transactional_id(n, 100 + n), 5000 + n, n) for n in range(count))


def decision(number: int, run: str = "this run", *before: str) -> Decision:
    batch = Batch("query", run, number)
    return Decision(batch, prepared(batch), before)


@proves("S3")
@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        (None, Verdict.OPEN),
        (decision(6), Verdict.OPEN),
        (decision(6, "another"), Verdict.OPEN),
        (decision(6, "another", "a third"), Verdict.OPEN),
        (decision(7), Verdict.DECIDED),
        (decision(7, "another"), Verdict.DECIDED),
        (decision(8), Verdict.SUPERSEDED),
        (decision(8, "another"), Verdict.SUPERSEDED),
        (Ended.ENDED, Verdict.PASSED),
        (decision(6, "another", "this run"), Verdict.SUPERSEDED),
        (decision(7, "another", "a third", "this run"), Verdict.SUPERSEDED),
        (decision(8, "another", "this run"), Verdict.SUPERSEDED),
    ],
)
def test_what_becomes_of_a_batch(known: Known, verdict: Verdict) -> None:
    assert judge(known, BATCH) is verdict


def test_a_decision_supersedes_the_runs_before_it_and_never_its_own() -> None:
    assert decide(None, BATCH, prepared(BATCH)).before == ()
    assert decide(decision(6), BATCH, ()).before == ()
    assert decide(decision(6, "another", "a third"), BATCH, ()).before == ("another", "a third")
    known: Known = None
    for number in range(BEFORE_MAX + 5):
        known = decide(known, Batch("query", f"run {number}", number), ())
    assert isinstance(known, Decision)
    assert known.before == tuple(f"run {number}" for number in reversed(range(4, BEFORE_MAX + 4)))


@proves("S3")
def test_a_batch_is_another_if_both_plans_are_known_and_differ() -> None:
    known = decide(decision(6), BATCH, prepared(BATCH), "a plan")
    assert known.plan == "a plan"
    assert is_another(known, BATCH, "another plan")
    assert not is_another(known, BATCH, "a plan")
    assert not is_another(known, BATCH, "")
    assert not is_another(decision(7), BATCH, "a plan"), "of one that was not told its plan"
    assert not is_another(known, Batch("query", "this run", 8), "another plan")
    assert not is_another(Ended.ENDED, BATCH, "a plan")
    assert retire(known, "query", ["this run"]).plan == "a plan"


def test_a_run_that_was_given_up_is_over_and_what_was_decided_stays() -> None:
    assert judge(retire(None, "query", ["this run"]), BATCH) is Verdict.SUPERSEDED
    after = retire(None, "query", ["another"])
    assert judge(after, BATCH) is Verdict.OPEN
    assert Decision.decode("query", after.encode()) == after
    assert decide(after, BATCH, prepared(BATCH)).before == ("another",)
    kept = retire(decision(7, "this run", "a third"), "query", ["this run"])
    assert (kept.prepared, kept.before) == (decision(7).prepared, ("this run", "a third"))


def test_a_decision_is_read_as_it_was_written() -> None:
    for plan in ("", "0123456789abcdef"):
        made = Decision(BATCH, prepared(BATCH, 2000), ("another",), plan)
        assert Decision.decode("query", made.encode()) == made
        assert len(made.encode()) < 50_000
    for wrong in (b"", b"[]", b"{}", made.encode().replace(b'"version":1', b'"version":2'), b'{"version":1}'):
        with pytest.raises(CorruptBatch, match="query"):
            Decision.decode("query", wrong)


def test_attempts_of_a_query_are_found_by_its_name_alone() -> None:
    names = ("a", "a/b", "a.b", "a+", "a_2fb", "ä", "A b")
    ids = {name: Batch(name, "run", 0).transactional_id(0, 1) for name in names}
    for name in names:
        by_python = re.compile(attempts_pattern(name)).fullmatch
        for matches in (by_python, TopicPattern(attempts_pattern(name)).matches_in_time):
            assert [other for other in names if matches(ids[other])] == [name]
            assert not matches(driver_id(name))
            of_batch = re.compile(attempts_pattern(name, 0)).fullmatch
            assert of_batch(ids[name])
            assert not of_batch(Batch(name, "run", 10).transactional_id(0, 1))
        assert query_of(ids[name]) == name
        assert query_of(driver_id(name)) is None
    assert [query_of(other) for other in ("till-1", "spark.a_zz.0.run.0.1", "other.a.0.run.0.1")] == [None, None, None]
