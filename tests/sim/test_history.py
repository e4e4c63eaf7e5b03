"""Each rule of the simulator's checker, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.simulator.history import Batch, History, Record, Trace, Violation
from headrace.storage.log import TopicPartition

WHERE = TopicPartition("kept", 0)
ONE, TWO = (1, 0), (1, 1)


def history(*, may_lose: bool = False) -> History:
    made = History(Trace(), lambda: 0.0)
    made.watch(WHERE, may_lose=may_lose)
    return made


def acknowledged(noted: History, batch: Batch, offset: int, epoch: int = 1, by: str = "b1.1") -> None:
    noted.acknowledged(WHERE, batch, 2, offset, epoch, by)


def log(*batches: Batch, epoch: int = 1) -> tuple[list[Record], dict[int, bytes]]:
    """Batches of two records each."""
    records = [Record(2 * at + nth, epoch, batch, nth) for at, batch in enumerate(batches) for nth in range(2)]
    return records, {record.offset: b"%d" % record.offset for record in records}


def test_a_history_as_it_should_be_passes() -> None:
    noted = history()
    acknowledged(noted, ONE, 0)
    acknowledged(noted, ONE, 0, epoch=2, by="b2.1")
    acknowledged(noted, TWO, 2, epoch=2, by="b2.1")
    noted.consumed(WHERE, 1, b"1", "b1.1")
    noted.consumed(WHERE, 1, b"1", "b2.1")
    noted.check(WHERE, *log(ONE, TWO, (2, 0)))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda noted: acknowledged(noted, ONE, 2), "acknowledged at 0 and"),
        (lambda noted: acknowledged(noted, TWO, 0), "offset 0 acknowledged for"),
        (lambda noted: acknowledged(noted, TWO, 2, by="b2.1"), "lead epoch 1"),
        (lambda noted: noted.leads(WHERE, 1, "b1.2"), "lead epoch 1"),
        (lambda noted: noted.consumed(WHERE, 0, b"other", "b2.1"), "was read as"),
        (lambda noted: noted.watermark(WHERE, 1, "b1.1", 1), "fell from 2 to 1"),
    ],
)
def test_what_breaks_a_rule_while_it_runs_is_told_at_once(break_it: Callable[[History], None], words: str) -> None:
    noted = history()
    acknowledged(noted, ONE, 0)
    noted.consumed(WHERE, 0, b"0", "b1.1")
    noted.watermark(WHERE, 1, "b1.1", 2)
    noted.watermark(WHERE, 2, "b1.1", 1)
    with pytest.raises(Violation, match=words):
        break_it(noted)


@pytest.mark.parametrize(
    ("final", "words"),
    [
        (log(ONE), "acknowledged batch .* is lost"),
        (log(), "is lost"),
        (log((2, 0), ONE, TWO), "is at 2"),
        (log(ONE, TWO, ONE), "follows"),
        (log(TWO, ONE), "follows"),
        ((log(ONE, TWO)[0], {0: b"0", 1: b"else", 2: b"2", 3: b"3"}), "a consumer read"),
        ((log(ONE, TWO)[0][1:], log(ONE, TWO)[1]), "offset 1 follows -1"),
        ((log(ONE)[0] + log(ONE, TWO, epoch=0)[0][2:], log(ONE, TWO)[1]), "epoch 0 follows 1"),
    ],
)
def test_a_final_log_that_breaks_a_promise_is_told(final: tuple[list[Record], dict[int, bytes]], words: str) -> None:
    noted = history()
    acknowledged(noted, ONE, 0)
    acknowledged(noted, TWO, 2)
    noted.consumed(WHERE, 1, b"1", "b1.1")
    with pytest.raises(Violation, match=words):
        noted.check(WHERE, *final)


def test_a_topic_that_may_lose_is_not_judged_by_what_it_lost() -> None:
    noted = history(may_lose=True)
    acknowledged(noted, ONE, 0)
    acknowledged(noted, TWO, 0, epoch=2)
    noted.consumed(WHERE, 0, b"0", "b1.1")
    noted.consumed(WHERE, 0, b"1", "b1.1")
    noted.check(WHERE, *log())


def test_a_trace_keeps_its_last_lines_and_a_sum_over_all() -> None:
    traces = [Trace(), Trace()]
    for trace in traces:
        for n in range(1000):
            trace.note(n / 10, f"event {n}")
    assert len(traces[0].lines) == 400
    assert traces[0].sum == traces[1].sum
    traces[1].note(0.0, "one more")
    assert traces[0].sum != traces[1].sum
