"""The cache of fetch sessions by itself: how many there are, who makes room for whom, and what a closed one leaves."""

from __future__ import annotations

import itertools

import pytest

from headrace.errors import FetchSessionNotFound
from headrace.kafka.fetch_sessions import CONNECTION_SESSIONS_MAX, EVICTION_SECONDS, FetchSession, FetchSessions
from headrace.wire.fetch import FetchRequest, ForgottenTopic
from proving import proves


class Cache:
    """Sessions on a clock that the test moves."""

    def __init__(self, slots: int, partitions_max: int = 1000) -> None:
        self.now = 0.0
        drawn = itertools.count(1)
        self.sessions = FetchSessions(
            slots, lambda: self.now, lambda count: next(drawn).to_bytes(count, "big"), partitions_max
        )

    def create(self, size: int, owner: object = None) -> FetchSession | None:
        return self.sessions.create(owner or object(), request(range(size)), by_id=False)

    def made(self, size: int, owner: object = None) -> FetchSession:
        session = self.create(size, owner)
        assert session is not None
        return session

    def use(
        self, session: FetchSession, added: range = range(0), forgotten: list[ForgottenTopic] | None = None
    ) -> FetchSession | None:
        asked = request(added, session.id, session.epoch, forgotten or [])
        return self.sessions.resume(session.owner, asked, by_id=False)

    def lives(self, session: FetchSession) -> bool:
        try:
            self.use(session)
        except FetchSessionNotFound:
            return False
        return True


def request(
    partitions: range, session_id: int = 0, epoch: int = 0, forgotten: list[ForgottenTopic] | None = None
) -> FetchRequest:
    rows = [(index, -1, 0, -1, -1, 1000) for index in partitions]
    return FetchRequest(-1, 0, 1, 1000, 0, session_id, epoch, [("t", None, rows)], forgotten or [], "")


@proves("N2")
def test_a_session_unused_for_two_minutes_makes_room() -> None:
    cache = Cache(slots=2)
    first, second = cache.made(10), cache.made(10)
    cache.now = EVICTION_SECONDS
    assert cache.create(5) is None
    assert cache.lives(second)
    cache.now += 1
    third = cache.made(5)
    assert not cache.lives(first)
    assert cache.lives(second)
    assert cache.lives(third)
    assert (len(cache.sessions), cache.sessions.evictions) == (2, 1)


@proves("N2")
def test_a_larger_session_takes_the_place_of_a_smaller_old_one() -> None:
    cache = Cache(slots=2)
    small, large = cache.made(3), cache.made(20)
    cache.now = EVICTION_SECONDS + 1
    for session in (small, large):
        cache.use(session)
    assert cache.create(3) is None
    assert cache.create(2) is None
    assert cache.made(4)
    assert not cache.lives(small)
    assert cache.lives(large)
    assert cache.made(21)
    assert not cache.lives(large)
    assert cache.create(100) is None  # those that are left are young


def test_a_young_session_is_not_replaced_by_a_larger_one() -> None:
    cache = Cache(slots=1)
    small = cache.made(1)
    cache.now = EVICTION_SECONDS
    assert cache.lives(small)
    assert cache.create(100) is None


def test_a_session_that_grew_is_judged_by_its_new_size() -> None:
    cache = Cache(slots=2)
    grown, other = cache.made(1), cache.made(5)
    cache.now = EVICTION_SECONDS + 1
    cache.use(grown)
    cache.use(other)
    cache.use(grown, range(1, 10))
    assert cache.made(6)
    assert cache.lives(grown)
    assert not cache.lives(other)


def test_partitions_of_all_sessions_are_bounded() -> None:
    cache = Cache(slots=100, partitions_max=10)
    assert cache.create(11) is None
    first, second = cache.made(6), cache.made(4)
    assert cache.create(1) is None
    assert cache.sessions.partition_count == 10
    with pytest.raises(FetchSessionNotFound):
        cache.use(second, range(4, 6))
    assert cache.sessions.partition_count == 6
    cache.use(first, forgotten=[("t", None, [0, 1, 77]), ("u", None, [0])])
    assert cache.sessions.partition_count == 4
    cache.sessions.close_all(first.owner)
    assert (cache.sessions.partition_count, len(cache.sessions)) == (0, 0)


def test_one_connection_has_a_few_sessions_at_most() -> None:
    cache, owner = Cache(slots=100), object()
    sessions = []
    for _ in range(CONNECTION_SESSIONS_MAX + 2):
        cache.now += 1
        sessions.append(cache.made(1, owner))
    assert [cache.lives(session) for session in sessions] == [False, False] + [True] * CONNECTION_SESSIONS_MAX


def test_ids_are_never_those_of_sessions_that_are_there_nor_0() -> None:
    drawn = iter([0, 1 << 31, 5, 5, 0x80000005, 6])
    sessions = FetchSessions(10, lambda: 0.0, lambda count: next(drawn).to_bytes(count, "big"))
    made = [sessions.create(object(), request(range(1)), by_id=False) for _ in range(2)]
    assert [session.id for session in made if session is not None] == [5, 6]


def test_the_epoch_after_the_highest_is_1() -> None:
    cache = Cache(slots=1)
    session = cache.made(1)
    session.epoch = (1 << 31) - 1
    cache.use(session)
    assert session.epoch == 1
