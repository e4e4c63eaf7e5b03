"""One heap of deadlines: each waiter that is not answered expires once, at its time, in order."""

from __future__ import annotations

import random

from headrace.partitions.deadlines import REBUILD_LEAST, Deadlines
from headrace.virtual.clock import VirtualClock


class Waiting:
    def __init__(self, name: object, log: list[tuple[object, float]], clock: VirtualClock) -> None:
        self.answered = False
        self._name = name
        self._log = log
        self._clock = clock

    def expire(self) -> None:
        self.answered = True
        self._log.append((self._name, round(self._clock.now(), 6)))


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.deadlines = Deadlines(self.clock)
        self.log: list[tuple[object, float]] = []

    def add(self, name: object, at: float) -> Waiting:
        waiting = Waiting(name, self.log, self.clock)
        self.deadlines.add(at, waiting)
        return waiting


def test_waiters_expire_at_their_time_whatever_the_order_they_came_in() -> None:
    bench = Bench()
    for name, at in (("b", 2.0), ("a", 1.0), ("c", 3.0), ("a too", 1.0)):
        bench.add(name, at)
    bench.clock.advance(0.999)
    assert bench.log == []
    bench.clock.advance(1.5)
    assert bench.log == [("a", 1.0), ("a too", 1.0), ("b", 2.0)]
    bench.clock.advance(10)
    assert bench.log[-1] == ("c", 3.0)
    assert len(bench.deadlines) == 0


def test_who_is_answered_in_time_never_expires() -> None:
    bench = Bench()
    early, late = bench.add("early", 1.0), bench.add("late", 2.0)
    early.answered = True
    bench.clock.advance(5)
    assert bench.log == [("late", 2.0)]
    assert late.answered


def test_a_deadline_that_has_passed_expires_soon_and_not_within_the_call() -> None:
    bench = Bench()
    bench.clock.advance(10)
    bench.add("past", 3.0)
    assert bench.log == []
    bench.clock.advance(0)
    assert bench.log == [("past", 10.0)]


def test_many_answered_waiters_do_not_pile_up() -> None:
    bench = Bench()
    for n in range(10 * REBUILD_LEAST):
        bench.add(n, 1000.0 + n).answered = True
    assert len(bench.deadlines) <= REBUILD_LEAST + 1
    left = bench.add("left", 5.0)
    bench.clock.advance(6)
    assert left.answered


def test_many_unanswered_waiters_are_all_kept() -> None:
    bench = Bench()
    chance = random.Random(5)
    count = 3 * REBUILD_LEAST
    for n in range(count):
        bench.add(n, chance.uniform(1, 100))
    bench.clock.advance(101)
    assert len(bench.log) == count
    assert {name for name, _ in bench.log} == set(range(count))


def test_waiters_expire_at_their_time_though_many_around_them_were_answered() -> None:
    bench = Bench()
    chance = random.Random(7)
    times: list[float] = []
    for _ in range(5 * REBUILD_LEAST):
        at = round(chance.uniform(1, 100), 6)
        answered = chance.random() < 0.7
        bench.add(at, at).answered = answered
        if not answered:
            times.append(at)
    bench.clock.advance(101)
    assert bench.log == [(at, at) for at in sorted(times)]


def test_expiring_may_add_so_many_that_the_heap_is_rebuilt() -> None:
    """What was answered goes at the rebuild, in the middle of a round; nobody is lost and nobody comes twice."""
    bench = Bench()

    class Spawning(Waiting):
        def expire(self) -> None:
            super().expire()
            for n in range(2 * REBUILD_LEAST):
                waiting = bench.add(("spawned", n), 2.0)
                waiting.answered = n % 2 == 0

    bench.deadlines.add(1.0, Spawning("first", bench.log, bench.clock))
    bench.add("second", 1.0)
    bench.add("third", 1.5)
    bench.clock.advance(3)
    names = [name for name, _ in bench.log]
    assert names[:3] == ["first", "second", "third"]
    assert names[3:] == [("spawned", n) for n in range(1, 2 * REBUILD_LEAST, 2)]


def test_a_waiter_that_comes_back_for_later_does_not_delay_the_others() -> None:
    bench = Bench()

    class Returning(Waiting):
        def expire(self) -> None:
            super().expire()
            bench.add("returned", bench.clock.now() + 10.0)

    bench.deadlines.add(1.0, Returning("first", bench.log, bench.clock))
    bench.add("second", 1.5)
    bench.clock.advance(2.0)
    assert bench.log == [("first", 1.0), ("second", 1.5)]
    bench.clock.advance(10.0)
    assert bench.log[2:] == [("returned", 11.0)]
