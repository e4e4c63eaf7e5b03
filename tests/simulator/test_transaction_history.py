"""Each rule for transactions, kept and broken on purpose in made-up histories."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.simulator.history import Violation
from headrace.simulator.transaction_history import Entry, Session, Transaction, TransactionHistory
from headrace.storage.log import TopicPartition
from proving import proves

ONE, TWO, COPIES = TopicPartition("ledger", 0), TopicPartition("ledger", 1), TopicPartition("copied", 0)
HOME = ("copiers", ONE)
TIMEOUT_SECONDS = 2.0


class Story:
    """A history with a session, and logs that grow as it is told."""

    def __init__(self, *, clocks_differ: bool = False) -> None:
        self.now = 0.0
        self.history = TransactionHistory(lambda _: None, lambda: self.now, lambda: clocks_differ)
        self.logs: dict[TopicPartition, list[Entry]] = {ONE: [], TWO: []}
        self.session = self.start(0)

    def start(self, epoch: int) -> Session:
        session = self.history.session("writer", TIMEOUT_SECONDS)
        self.history.asks_to_init(session)
        self.history.initialized(session, 7, epoch)
        return session

    def begin(self, *, two_phase: bool = False) -> Transaction:
        return self.history.begin(self.session, two_phase=two_phase)

    def write(self, transaction: Transaction, *partitions: TopicPartition, landed: bool = True) -> None:
        """A batch with one record to each."""
        session = transaction.session
        for where in partitions:
            batch = session.number, sum(map(len, self.history._of_batch)) + 1
            self.history.sends(transaction, where, batch)
            if landed:
                self.logs[where].append(Entry(len(self.logs[where]), 7, session.epoch, batch))
                self.history.acknowledged(batch, "b1.1")

    def copy(self, transaction: Transaction, *sources: tuple[TopicPartition, int]) -> None:
        batch = transaction.session.number, 1000 + len(self.logs.setdefault(COPIES, []))
        self.history.sends(transaction, COPIES, batch, sources)
        for nth in range(len(sources)):
            self.logs[COPIES].append(Entry(len(self.logs[COPIES]), 7, transaction.session.epoch, batch, nth))

    def mark(self, *partitions: TopicPartition, committed: bool = True, epoch: int | None = None) -> None:
        for where in partitions:
            marked = self.session.epoch if epoch is None else epoch
            self.logs[where].append(Entry(len(self.logs[where]), 7, marked, None, committed=committed))

    def end(self, transaction: Transaction, *, committed: bool = True, answered: bool = True) -> None:
        self.history.asks_to_end(transaction, committed=committed)
        if answered:
            self.history.ended(transaction, "b1.1", committed=committed)

    def whole(self, *partitions: TopicPartition, committed: bool = True) -> Transaction:
        transaction = self.begin()
        self.write(transaction, *partitions)
        self.end(transaction, committed=committed)
        self.mark(*partitions, committed=committed)
        return transaction

    def judge(
        self,
        offsets: dict[tuple[str, TopicPartition], int] | None = None,
        starts: dict[TopicPartition, int] | None = None,
    ) -> None:
        """`starts`: what lies before is deleted."""
        starts = starts or {}
        logs = {
            where: [entry for entry in found if entry.offset >= starts.get(where, 0)]
            for where, found in self.logs.items()
        }
        is_copied = COPIES in self.logs
        copied, copies = ((ONE, TWO), (COPIES,)) if is_copied else ((), ())
        self.history.judge(logs, offsets or {}, copied=copied, copies=copies, starts=starts)


@proves("T1", "T2")
def test_transactions_as_they_should_be_pass() -> None:
    story = Story()
    for name in ("r1", "r2"):
        story.history.add_reader(ONE, name)
    story.history.stable(ONE, 1, "b1.1", 0, 1)
    first = story.whole(ONE, TWO)
    story.history.stable(ONE, 1, "b1.1", 2, 2)
    story.whole(ONE, committed=False)
    third = story.begin()
    story.write(third, ONE, TWO)
    story.history.stable(ONE, 1, "b1.1", 4, 5)
    story.end(third, answered=False)
    story.mark(ONE, TWO)
    for name in ("r1", "r2"):
        story.history.read(ONE, (0, first.sent[ONE][0], 0), name, "b2.1")
        story.history.read(ONE, (4, third.sent[ONE][0], 0), name, "b2.1")
    story.judge()


def test_what_is_deleted_need_not_be_read_or_copied() -> None:
    story = Story()
    story.history.add_reader(ONE, "r1")
    story.whole(ONE)
    story.judge(starts={ONE: 2})


def test_what_was_read_of_a_deleted_part_is_not_asked_for() -> None:
    story = Story()
    story.history.add_reader(ONE, "r1")
    first = story.whole(ONE)
    story.history.read(ONE, (0, first.sent[ONE][0], 0), "r1", "b1.1")
    story.judge(starts={ONE: 2})


def test_a_transaction_of_which_only_the_end_is_left_is_judged_by_that() -> None:
    story = Story()
    transaction = story.begin()
    story.write(transaction, ONE, ONE, TWO)
    story.end(transaction, answered=False)
    story.mark(ONE)
    story.mark(TWO, committed=False)
    with pytest.raises(Violation, match="is aborted in ledger-1 and committed elsewhere"):
        story.judge(starts={ONE: 1})


def test_what_is_deleted_is_copied_once_at_most() -> None:
    story = Story()
    story.whole(ONE)
    for _ in range(2):
        transaction = story.begin()
        story.copy(transaction, (ONE, 0))
        story.end(transaction)
        story.mark(COPIES)
    with pytest.raises(Violation, match="which is deleted now, is copied 2 times"):
        story.judge(starts={ONE: 2})


def test_nothing_is_read_of_what_is_told_aborted_later_though_it_is_deleted() -> None:
    story = Story()
    story.history.add_reader(ONE, "r1")
    transaction = story.begin()
    story.write(transaction, ONE)
    story.end(transaction, answered=False)
    story.history.read(ONE, (0, transaction.sent[ONE][0], 0), "r1", "b1.1")
    story.mark(ONE)
    story.end(transaction, committed=False)
    with pytest.raises(Violation, match="was read as committed, and was told aborted"):
        story.judge(starts={ONE: 2})


def test_who_is_not_let_go_on_where_the_coordinators_state_is_doubted_is_fenced_for_a_reason() -> None:
    story = Story()
    story.history._state_is_doubted = lambda: True
    story.history.told_fenced(story.session, story.begin(), 90)


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_without_an_answer_is_one_or_the_other(committed: bool) -> None:
    story = Story()
    transaction = story.begin()
    story.write(transaction, ONE, TWO)
    story.end(transaction, answered=False)
    story.mark(ONE, TWO, committed=committed)
    story.judge()


def test_an_end_without_an_answer_is_not_both() -> None:
    story = Story()
    transaction = story.begin()
    story.write(transaction, ONE, TWO)
    story.end(transaction, answered=False)
    story.mark(ONE)
    story.mark(TWO, committed=False)
    with pytest.raises(Violation, match="is aborted in ledger-1 and committed elsewhere"):
        story.judge()


@pytest.mark.parametrize(("told", "words"), [(True, "told committed, and is aborted"), (False, "told aborted, and is")])
def test_what_was_acknowledged_is_so_for_ever(told: bool, words: str) -> None:
    story = Story()
    transaction = story.begin()
    story.write(transaction, ONE)
    story.end(transaction, committed=told)
    story.mark(ONE, committed=not told)
    with pytest.raises(Violation, match=words):
        story.judge()


def test_nobody_commits_what_nobody_asked_to_commit() -> None:
    story = Story()
    story.write(story.begin(), ONE)
    story.mark(ONE)
    with pytest.raises(Violation, match="everybody who asked for that was refused"):
        story.judge()


def test_a_refused_commit_is_no_commit() -> None:
    story = Story()
    transaction = story.begin()
    story.write(transaction, ONE)
    story.end(transaction, answered=False)
    story.history.end_refused(transaction, committed=True)
    story.mark(ONE)
    with pytest.raises(Violation, match="everybody who asked for that was refused"):
        story.judge()


def test_a_transaction_that_is_never_ended_is_told() -> None:
    story = Story()
    story.write(story.begin(), ONE)
    with pytest.raises(Violation, match="from 0 on, is never ended"):
        story.judge()


def test_a_late_marker_that_ends_a_part_of_a_later_transaction_is_told() -> None:
    story = Story()
    story.whole(ONE)
    later = story.begin()
    story.write(later, ONE)
    story.mark(ONE)  # of the first, again
    story.write(later, ONE)
    story.end(later)
    story.mark(ONE)
    with pytest.raises(Violation, match=r"transaction 2 of writer.* is ended at 3 and again at 5"):
        story.judge()


def test_a_late_marker_that_ends_a_later_transaction_the_other_way_is_told() -> None:
    story = Story()
    story.whole(ONE)
    later = story.begin()
    story.write(later, ONE)
    story.mark(ONE)
    story.end(later, committed=False)
    story.mark(ONE, committed=False)
    with pytest.raises(Violation, match="told aborted, and is committed"):
        story.judge()


def test_a_marker_that_ends_two_transactions_is_told() -> None:
    story = Story()
    first, second = story.begin(), story.begin()
    story.write(first, ONE)
    story.write(second, ONE)
    story.mark(ONE)
    with pytest.raises(Violation, match=r"the marker at 2 ends transaction 2 of .*, transaction 1 of"):
        story.judge()


def test_a_marker_where_nothing_was_written_does_no_harm() -> None:
    story = Story()
    story.mark(ONE)
    story.whole(ONE)
    story.judge()


# Readers


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda story, of: None, "which nobody has asked to commit"),
        (lambda story, of: story.end(of, committed=False), "which nobody has asked to commit"),
        (lambda story, of: story.end(of, committed=True), ""),
    ],
)
def test_nothing_is_read_before_somebody_asks_to_commit_it(
    prepare: Callable[[Story, Transaction], None], words: str
) -> None:
    story = Story()
    story.history.add_reader(ONE, "r1")
    transaction = story.begin()
    story.write(transaction, ONE)
    prepare(story, transaction)
    if not words:
        story.history.read(ONE, (0, transaction.sent[ONE][0], 0), "r1", "b1.1")
        return
    with pytest.raises(Violation, match=words):
        story.history.read(ONE, (0, transaction.sent[ONE][0], 0), "r1", "b1.1")


def test_what_was_read_as_committed_stays_so() -> None:
    story = Story()
    story.history.add_reader(ONE, "r1")
    transaction = story.begin()
    story.write(transaction, ONE)
    story.end(transaction, answered=False)
    story.history.read(ONE, (0, transaction.sent[ONE][0], 0), "r1", "b1.1")
    story.mark(ONE, committed=False)
    with pytest.raises(Violation, match="was read as committed, and is aborted"):
        story.judge()


def test_a_committed_record_that_a_reader_was_never_given_is_told() -> None:
    story = Story()
    story.history.add_reader(ONE, "r1")
    story.whole(ONE)
    with pytest.raises(Violation, match=r"r1 was never given \[0\]"):
        story.judge()


def test_what_nobody_sent_is_told() -> None:
    story = Story()
    with pytest.raises(Violation, match="which nobody has sent"):
        story.history.read(ONE, (0, (1, 1), 0), "r1", "b1.1")


# Last stable offsets


def test_a_last_stable_offset_does_not_fall_in_an_epoch() -> None:
    story = Story()
    story.history.stable(ONE, 1, "b1.1", 4, 4)
    story.history.stable(ONE, 1, "b2.1", 3, 4)
    story.history.stable(ONE, 2, "b1.1", 3, 4)
    with pytest.raises(Violation, match="fell from 4 to 3 in epoch 1"):
        story.history.stable(ONE, 1, "b1.1", 3, 4)


def test_a_last_stable_offset_that_is_but_the_start_says_nothing_of_what_is_decided() -> None:
    """The record is at 0, its marker at 1; that the log begins at 1 was taken back."""
    story = Story()
    story.history.stable(ONE, 1, "b1.1", 1, 1, start=1)
    story.whole(ONE)
    story.judge()
    with pytest.raises(Violation, match="above the watermark"):
        story.history.stable(ONE, 2, "b1.1", 2, 1, start=2)


def test_a_last_stable_offset_is_not_above_the_watermark() -> None:
    with pytest.raises(Violation, match="above the watermark"):
        Story().history.stable_told(ONE, 4, 3, "b1.1")


@pytest.mark.parametrize(("stable", "watermark", "passes"), [(0, 2, True), (2, 2, True), (1, 1, False), (2, 1, False)])
def test_a_marker_counts_when_it_is_below_the_watermark_itself(stable: int, watermark: int, passes: bool) -> None:
    """The record is at 0, its marker at 1."""
    story = Story()
    story.history.stable_told(ONE, min(stable, watermark), watermark, "b1.1")
    story.whole(ONE)
    if passes:
        story.judge()
        return
    with pytest.raises(Violation, match=r"though transaction 1 of .* begins at 0 and ends at 1"):
        story.judge()


# Fencing


def test_a_fenced_producer_writes_nothing() -> None:
    story = Story()
    transaction = story.begin()
    story.write(transaction, ONE, landed=False)
    story.start(1)
    story.history.acknowledged(transaction.sent[ONE][0], "b1.1")  # was sent before
    with pytest.raises(Violation, match="which was sent after it was fenced"):
        story.write(transaction, ONE)


def test_what_a_fenced_producer_sent_is_not_in_the_log_though_nobody_acknowledged_it() -> None:
    story = Story()
    transaction = story.begin()
    story.start(1)
    story.write(transaction, ONE, landed=False)
    story.logs[ONE].append(Entry(0, 7, 0, transaction.sent[ONE][0]))
    story.mark(ONE, committed=False, epoch=1)
    with pytest.raises(Violation, match="and was sent after it was fenced"):
        story.judge()


def test_an_older_epoch_never_follows_a_newer_one() -> None:
    story = Story()
    old = story.begin()
    story.write(old, ONE, landed=False)
    story.session = story.start(1)
    story.whole(ONE)
    story.logs[ONE].append(Entry(2, 7, 0, old.sent[ONE][0]))
    with pytest.raises(Violation, match="epoch 0 of producer 7 at 2 follows its epoch 1"):
        story.judge()


def test_two_sessions_do_not_get_one_epoch() -> None:
    story = Story()
    with pytest.raises(Violation, match="both have epoch 0"):
        story.start(0)


def test_an_answer_that_comes_late_does_not_fence_the_later_session() -> None:
    story = Story()
    late = story.start(5)
    early = story.start(3)
    assert (late.fenced_at, early.fenced_at) == (None, 0.0)


def test_a_fenced_producer_is_not_let_in_again_by_its_epoch() -> None:
    story = Story()
    story.start(1)
    with pytest.raises(Violation, match="is let in again"):
        story.history.initialized(story.session, 7, 2, again=True)


@pytest.mark.parametrize("reason", ["another", "timeout", "clocks", "own request"])
def test_nobody_is_fenced_without_a_reason(reason: str) -> None:
    story = Story(clocks_differ=reason == "clocks")
    transaction = story.begin()
    story.now = 1.0
    if reason != "clocks":
        with pytest.raises(Violation, match="though nobody has followed it"):
            story.history.told_fenced(story.session, transaction, 47)
    if reason == "another":
        story.history.asks_to_init(story.history.session("writer", TIMEOUT_SECONDS))
    elif reason == "timeout":
        story.now = 2.5
    elif reason == "own request":
        story.history.asks_to_init(story.session)
    story.history.told_fenced(story.session, transaction, 47)


# Two-phase


def test_a_prepared_transaction_is_ended_by_its_owner_alone() -> None:
    story = Story()
    transaction = story.begin(two_phase=True)
    story.write(transaction, ONE)
    story.mark(ONE, committed=False)
    with pytest.raises(Violation, match="was prepared, and is aborted"):
        story.judge()
    story.history.asks_to_end(transaction, committed=False)
    story.judge()


# Offsets and copies


def copied(*, offset: int = 1, times: int = 1, ends: bool = True) -> tuple[Story, Transaction]:
    """One record in ONE, at 0, and its copies."""
    story = Story()
    story.whole(ONE)
    copying = story.begin()
    story.copy(copying, *[(ONE, 0)] * times)
    story.history.sends_offsets(copying, {HOME: offset})
    story.end(copying, committed=ends)
    story.mark(COPIES, committed=ends)
    return story, copying


def test_offsets_and_copies_as_they_should_be_pass() -> None:
    story, _ = copied()
    story.history.offset_told(HOME, 1, "b1.1")
    story.judge({HOME: 1})


@pytest.mark.parametrize("times", [2, 0])
def test_a_record_that_is_not_copied_once_is_told(times: int) -> None:
    story, _ = copied(times=times)
    with pytest.raises(Violation, match=f"is committed, and copied {times} times"):
        story.judge({HOME: 1})


def test_offsets_of_an_aborted_transaction_do_not_count() -> None:
    story, _ = copied(ends=False)
    story.logs.pop(COPIES)
    story.judge({HOME: -1})
    with pytest.raises(Violation, match="1 is committed at the end, and transactions have committed -1"):
        story.judge({HOME: 1})
    with pytest.raises(Violation, match="which no transaction has committed"):
        story.history.offset_told(HOME, 1, "b1.1")


def test_offsets_of_a_committed_transaction_count() -> None:
    story, _ = copied()
    with pytest.raises(Violation, match="-1 is committed at the end, and transactions have committed 1"):
        story.judge({HOME: -1})


def test_a_copy_of_what_is_not_committed_is_told() -> None:
    story = Story()
    story.whole(ONE, committed=False)
    copying = story.begin()
    story.copy(copying, (ONE, 0))
    story.end(copying)
    story.mark(COPIES)
    with pytest.raises(Violation, match="which is not committed itself"):
        story.judge()


# Compaction


def compacted() -> tuple[Story, list[tuple[int, tuple[int, int], int]]]:
    """Two committed records of one key, and an aborted one between them."""
    story = Story()
    story.history.add_reader(ONE, "r1")
    first, aborted, last = story.whole(ONE), story.whole(ONE, committed=False), story.whole(ONE)
    records = [(at, each.sent[ONE][0], 0) for at, each in ((0, first), (2, aborted), (4, last))]
    for record in (records[0], records[2]):
        story.history.read(ONE, record, "r1", "b1.1")
    return story, records


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ((0, 2), ""),
        ((2,), ""),
        ((0,), "does not have 4, the last of b'k'"),
        ((), "does not have 4, the last of b'k'"),
        ((1, 2), "which is not committed"),
    ],
)
def test_compaction_leaves_the_last_committed_record_of_a_key(kept: tuple[int, ...], words: str) -> None:
    story, records = compacted()
    views = {(ONE, "b1"): [records[nth] for nth in kept], (ONE, "b2"): records[2:]}
    if not words:
        story.history.judge_compacted(views, lambda *_: b"k")
        return
    with pytest.raises(Violation, match=words):
        story.history.judge_compacted(views, lambda *_: b"k")
