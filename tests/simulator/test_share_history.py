"""What members of a share group may be given and told, and what not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import ErrorCode
from headrace.queues.messages import AcknowledgeType
from headrace.simulator.history import Violation
from headrace.simulator.share_history import MemberLife, ShareHistory
from headrace.storage.log import TopicPartition

JOBS = TopicPartition("jobs", 0)
LIMIT = 3
ACCEPT, RELEASE, REJECT, RENEW, GAP = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
    AcknowledgeType.GAP,
)


class Story:
    """Locks last for 1 s."""

    def __init__(self) -> None:
        self.now = 10.0
        self.stopped: set[str] = set()
        self.clocks_differ = False
        self.judge = ShareHistory(
            lambda _: None, lambda: self.now, 1.0, LIMIT, self.stopped.__contains__, lambda: self.clocks_differ
        )
        self.anna, self.bert = self.judge.member("anna"), self.judge.member("bert")

    def deliver(self, member: MemberLife, count: int, *, offset: int = 5, asked_before: float = 0.1) -> None:
        self.judge.delivered(JOBS, offset, count, member, self.now - asked_before, "b1.1")

    def say(self, member: MemberLife, type: int, code: int | None = ErrorCode.NONE, *, offset: int = 5) -> None:
        """None: it is not answered."""
        claim = self.judge.asks(JOBS, member, {offset: int(type)})
        if code is not None:
            self.judge.told(claim, code, "b1.1")

    def end(self, *, start: int = 5, there: Callable[[int], bool] = lambda _: True) -> None:
        self.judge.judge(JOBS, start, 6, [offset for offset in range(6) if there(offset)])


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.mark.parametrize("type", [ACCEPT, REJECT, GAP])
def test_what_is_final_is_not_delivered_again(story: Story, type: int) -> None:
    story.deliver(story.anna, 1)
    story.say(story.anna, type)
    story.now += 5
    with pytest.raises(Violation, match="though it was"):
        story.deliver(story.bert, 2)


@pytest.mark.parametrize("code", [None, ErrorCode.LEADER_NOT_AVAILABLE])
def test_an_acceptance_that_was_not_answered_or_with_an_error_may_have_been_taken_or_not(
    story: Story, code: int | None
) -> None:
    story.deliver(story.anna, 1)
    story.say(story.anna, ACCEPT, code)
    story.end()
    story.now += 5
    story.deliver(story.bert, 2)


def test_what_is_locked_is_given_to_nobody(story: Story) -> None:
    story.deliver(story.anna, 1)
    story.now += 0.8
    with pytest.raises(Violation, match="locked by anna"):
        story.deliver(story.bert, 2)


def test_nor_again_to_who_has_it(story: Story) -> None:
    story.deliver(story.anna, 1)
    with pytest.raises(Violation, match="locked by anna"):
        story.deliver(story.anna, 2)


def test_a_lock_ends_with_its_time_a_release_or_the_session(story: Story) -> None:
    story.deliver(story.anna, 1, offset=1)
    story.deliver(story.anna, 1, offset=2)
    story.say(story.anna, RELEASE, None, offset=2)
    story.deliver(story.bert, 2, offset=2)
    story.now += 1
    story.deliver(story.bert, 2, offset=1)
    story.deliver(story.anna, 1, offset=3)
    story.anna.has_ended = True
    story.deliver(story.bert, 1, offset=3)


def test_a_broker_that_was_asked_to_stop_may_have_ended_sessions(story: Story) -> None:
    story.anna.brokers.add("b1.1")
    story.deliver(story.anna, 1)
    story.stopped.add("b1.1")
    story.deliver(story.bert, 1)


def test_a_renewed_lock_lasts_longer(story: Story) -> None:
    story.deliver(story.anna, 1)
    story.now += 0.7
    story.say(story.anna, RENEW)
    story.now += 0.7
    with pytest.raises(Violation, match="locked by anna"):
        story.deliver(story.bert, 2)


def test_where_clocks_were_set_a_lock_may_end_early(story: Story) -> None:
    story.deliver(story.anna, 1)
    story.clocks_differ = True
    story.deliver(story.bert, 2)
    story.say(story.bert, ACCEPT)
    story.deliver(story.anna, 1)  # which left late
    with pytest.raises(Violation, match="though it was"):
        story.deliver(story.anna, 3)


@pytest.mark.parametrize("count", [0, LIMIT + 1])
def test_counts_begin_with_1_and_end_with_the_limit(story: Story, count: int) -> None:
    with pytest.raises(Violation, match="deliveries are allowed"):
        story.deliver(story.anna, count)


@pytest.mark.parametrize("count", [1, 2])
def test_counts_rise(story: Story, count: int) -> None:
    story.now += 5
    story.deliver(story.anna, 2)
    story.now += 1.5
    with pytest.raises(Violation, match="it was delivered to anna"):
        story.deliver(story.bert, count)


def test_counts_rise_by_one_and_by_one_for_each_lock_that_has_passed(story: Story) -> None:
    with pytest.raises(Violation, match="1 at most"):
        story.deliver(story.anna, 2)
    story.deliver(story.anna, 1)
    story.now += 1
    story.deliver(story.bert, 3)


def test_before_the_first_fault_counts_are_exact(story: Story) -> None:
    story.deliver(story.anna, 1)
    story.now += 5
    story.judge.is_calm = lambda: True
    with pytest.raises(Violation, match="2 at most"):
        story.deliver(story.bert, 3)


def test_before_the_first_fault_a_closed_session_gives_back_what_it_had(story: Story) -> None:
    story.judge.is_calm = lambda: True
    story.deliver(story.anna, 1)
    story.anna.has_ended, story.anna.closed_at = True, story.now
    story.now += 2
    with pytest.raises(Violation, match="1 at most"):
        story.deliver(story.bert, 2)


def test_who_holds_a_record_is_not_refused(story: Story) -> None:
    story.deliver(story.anna, 1)
    with pytest.raises(Violation, match="though it holds"):
        story.say(story.anna, ACCEPT, ErrorCode.INVALID_RECORD_STATE)


def test_who_is_late_has_asked_before_or_holds_nothing_may_be_refused(story: Story) -> None:
    refused = ErrorCode.INVALID_RECORD_STATE
    story.say(story.bert, ACCEPT, refused, offset=1)
    story.deliver(story.anna, 1, offset=1)
    story.say(story.anna, RELEASE, None, offset=1)
    story.say(story.anna, ACCEPT, refused, offset=1)
    story.deliver(story.anna, 1, offset=2)
    story.now += 1
    story.say(story.anna, ACCEPT, refused, offset=2)
    story.deliver(story.anna, 1, offset=3, asked_before=0.0)
    story.say(story.anna, ACCEPT, offset=3)
    story.say(story.anna, ACCEPT, refused, offset=3)


def test_what_is_taken_of_who_does_not_hold_it_is_final(story: Story) -> None:
    story.say(story.bert, RELEASE)
    with pytest.raises(Violation, match="passed over by bert"):
        story.deliver(story.anna, 1)


def test_in_the_end_every_record_has_an_end(story: Story) -> None:
    with pytest.raises(Violation, match="delivered 0 times, not acknowledged"):
        story.end()
    story.end(start=6)
    story.end(there=lambda offset: offset != 5)
    story.deliver(story.anna, 1)
    with pytest.raises(Violation, match="delivered 1 times, not acknowledged"):
        story.end()
    story.say(story.anna, RELEASE)
    with pytest.raises(Violation, match="delivered 1 times, not acknowledged"):
        story.end()
    story.deliver(story.anna, 2)
    story.now += 1
    story.deliver(story.anna, 3)
    story.end()


def test_nothing_of_before_counts_when_the_start_is_set_anew(story: Story) -> None:
    story.deliver(story.anna, 1)
    story.say(story.anna, ACCEPT)
    story.judge.begin_anew({JOBS: 4})
    story.deliver(story.anna, 2)  # of before
    carl = story.judge.member("carl")
    story.deliver(carl, 1)
    with pytest.raises(Violation, match="told to begin at 4"):
        story.deliver(carl, 1, offset=3)
    with pytest.raises(Violation, match="not acknowledged"):
        story.end()
