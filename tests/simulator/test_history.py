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


# Bounds


def told(noted: History, what: str, epoch: int, value: int, *, before: dict[int, int] | None = None) -> None:
    floor = noted.watched(WHERE).ends if what == "end" else noted.watched(WHERE).starts
    noted.bound(WHERE, what, floor, floor.known() if before is None else before, epoch, value, "b1.1")


@pytest.mark.parametrize("what", ["start", "end"])
def test_a_bound_that_was_told_does_not_fall(what: str) -> None:
    noted = history()
    told(noted, what, 1, 10)
    told(noted, what, 2, 12)
    told(noted, what, 1, 11)  # by a leader that does not know yet that another has followed it
    told(noted, what, 2, 9, before={})  # asked before all that
    with pytest.raises(Violation, match=f"the {what} 12 was told, and then by b1.1 11 in epoch 3"):
        told(noted, what, 3, 11)


def test_what_was_deleted_is_gone_and_nothing_else() -> None:
    noted = history()
    acknowledged(noted, ONE, 0)
    acknowledged(noted, TWO, 2)
    noted.asks_to_delete(WHERE, 2)
    noted.deleted(WHERE, 2, 2, 1, "b1.1")
    noted.check(WHERE, *log(ONE, TWO), starts=(2, 2))
    with pytest.raises(Violation, match="the start 2 was told, and a log begins at 0"):
        noted.check(WHERE, *log(ONE, TWO), starts=(2, 0))
    with pytest.raises(Violation, match="the log begins at 4, and nobody deleted more than 2"):
        noted.check(WHERE, *log(ONE, TWO), starts=(2, 4))
    with pytest.raises(Violation, match="the start 2 was told, and then"):
        told(noted, "start", 1, 0)
    with pytest.raises(Violation, match="a deletion below 3 with the start 2"):
        noted.deleted(WHERE, 3, 2, 1, "b1.1")


# Groups


def test_a_batch_is_there_twice_only_where_something_is_damaged_and_deleted() -> None:
    noted = history()
    acknowledged(noted, ONE, 0)
    acknowledged(noted, TWO, 2)
    twice = log(ONE, TWO, ONE)
    for deleted in (1, 2):
        assert not noted.may_repeat(WHERE)
        with pytest.raises(Violation, match="acknowledged at 0 and by"):
            acknowledged(noted, ONE, 4)
        with pytest.raises(Violation, match="follows"):
            noted.check(WHERE, *twice)
        noted.damaged(WHERE, 1)
        noted.asks_to_delete(WHERE, deleted)
    assert noted.may_repeat(WHERE)
    acknowledged(noted, ONE, 4)
    noted.check(WHERE, *twice)
    with pytest.raises(Violation, match="is lost"):
        noted.check(WHERE, *log(ONE))
    with pytest.raises(Violation, match="acknowledged at 4, is at 0"):
        noted.check(WHERE, *log(ONE, TWO))


def test_a_partition_has_one_owner_in_a_generation() -> None:
    noted = history()
    noted.assigned("readers", 1, WHERE, "one")
    noted.assigned("readers", 1, WHERE, "one")
    noted.assigned("readers", 2, WHERE, "two")
    noted.assigned("others", 1, WHERE, "two")
    assert noted.is_given_on("readers", 1, WHERE)
    assert not noted.is_given_on("readers", 2, WHERE)
    assert not noted.is_given_on("others", 1, WHERE)
    with pytest.raises(Violation, match="given to one and to two in generation 1"):
        noted.assigned("readers", 1, WHERE, "two")


def test_a_group_that_has_not_committed_everything_is_told() -> None:
    noted = history()
    number = noted.commits("readers", WHERE).begin(5)
    assert "has committed None of 5" in noted.behind(WHERE, 5)
    noted.committed("readers", WHERE, number, 1, "b1.1")
    assert noted.behind(WHERE, 5) == ""
    assert "has committed 5 of 6" in noted.behind(WHERE, 6)


def test_a_commit_that_was_acknowledged_is_answered() -> None:
    noted = history()
    register = noted.commits("readers", WHERE)
    first = register.begin(1)
    noted.committed("readers", WHERE, first, 1, "b1.1")
    second = register.begin(2)
    noted.committed_told("readers", WHERE, register.ask(), first, 1, "b1.1")
    noted.committed("readers", WHERE, second, 1, "b1.1")
    with pytest.raises(Violation, match="answers as committed 1, though a later value was acknowledged"):
        noted.committed_told("readers", WHERE, register.ask(), first, 2, "b2.1")
    with pytest.raises(Violation, match="answers as committed nothing"):
        noted.committed_told("readers", WHERE, register.ask(), None, 2, "b2.1")


def compacted() -> History:
    """The first records of all batches have one key, the second ones another."""
    noted = History(Trace(), lambda: 0.0)
    noted.watch(WHERE, may_lose=False, key_of=lambda _batch, nth: b"%d" % nth)
    acknowledged(noted, ONE, 0)
    acknowledged(noted, TWO, 2)
    return noted


def without(records: list[Record], contents: dict[int, bytes], *gone: int) -> tuple[list[Record], dict[int, bytes]]:
    left = [record for record in records if record.offset not in gone]
    return left, {offset: content for offset, content in contents.items() if offset not in gone}


def test_compaction_takes_what_one_of_its_key_follows() -> None:
    noted = compacted()
    noted.consumed(WHERE, 0, b"0", "b1.1")
    noted.check(WHERE, *without(*log(ONE, TWO), 0, 1))


@pytest.mark.parametrize("last", [2, 3])
def test_compaction_never_takes_the_last_of_a_key(last: int) -> None:
    with pytest.raises(Violation, match="was the last of"):
        compacted().check(WHERE, *without(*log(ONE, TWO), last))
