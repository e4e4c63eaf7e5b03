"""How long an election that may lose something waits for replicas that are alive and have not said what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.test_controller_core import broker, end, image_of, led
from headrace.cluster.controller import REGISTRATIONS_MAX, ReportDeadlines
from headrace.cluster.controller_state import UNCLEAN, ReplicaEnd
from headrace.cluster.image import NO_LEADER, Broker
from headrace.virtual.clock import VirtualClock

LEASE_SECONDS = 3.0
WHERE = "t", 0
TWO, THREE = broker(2), broker(3)
REPORTS = {2: end(2, 4, 90, run=1), 3: end(3, 4, 90, run=1)}


class Wait:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.due = ReportDeadlines(self.clock, LEASE_SECONDS)

    def see(self, brokers: Sequence[Broker], ends: Mapping[int, ReplicaEnd], order: str = "") -> None:
        self.due.follow(image_of([led(NO_LEADER, 4, (1,))], brokers, ends, order))

    def over_after(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        return self.due.is_over(WHERE)


def test_a_replica_that_returns_late_has_as_long_to_report_as_the_others_had() -> None:
    wait = Wait()
    wait.see([TWO, THREE], REPORTS)
    assert wait.over_after(10 * LEASE_SECONDS)
    wait.see([broker(1, 2), TWO, THREE], REPORTS)
    assert not wait.over_after(0.9 * LEASE_SECONDS)
    wait.see([broker(1, 2), TWO, THREE], REPORTS)
    assert wait.over_after(0.2 * LEASE_SECONDS)


def test_an_order_gives_those_that_are_silent_their_time() -> None:
    wait = Wait()
    silent = [broker(1, 2), TWO, THREE]
    wait.see(silent, REPORTS)
    assert wait.over_after(10 * LEASE_SECONDS)
    wait.see(silent, REPORTS, UNCLEAN)
    assert not wait.over_after(0.9 * LEASE_SECONDS)
    assert wait.over_after(0.2 * LEASE_SECONDS)


def test_one_report_more_makes_nobody_wait_longer() -> None:
    wait = Wait()
    wait.see([broker(1, 2), TWO, THREE], {2: REPORTS[2]})
    assert not wait.over_after(0.9 * LEASE_SECONDS)
    wait.see([broker(1, 2), TWO, THREE], REPORTS)
    assert wait.over_after(0.2 * LEASE_SECONDS)


def test_a_replica_that_starts_again_and_again_is_not_waited_for_without_end() -> None:
    wait = Wait()
    for run in range(1, 2 * REGISTRATIONS_MAX):
        wait.see([broker(1, run), TWO, THREE], REPORTS)
        over = wait.over_after(0.9 * LEASE_SECONDS)
        assert over == (run * 0.9 >= REGISTRATIONS_MAX)
