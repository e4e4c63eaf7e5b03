"""Share sessions by themselves: whose they are, which request is the next, how many there are, and what one leaves."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidShareSessionEpoch, ShareSessionLimitReached, ShareSessionNotFound
from headrace.kafka.share_sessions import (
    CONNECTION_SESSIONS_MAX,
    EPOCH_MAX,
    FINAL_EPOCH,
    MemberKey,
    ShareSessions,
)
from headrace.queues.messages import TopicIdPartition

ANNA, BERT = MemberKey("g", "anna"), MemberKey("g", "bert")
TOPIC = bytes(range(16))


def partitions(*indexes: int) -> list[TopicIdPartition]:
    return [(TOPIC, index) for index in indexes]


class Cache:
    """Sessions, the members whose records were released, and the groups that had a first session."""

    def __init__(self, slots: int = 10, partitions_max: int = 100) -> None:
        self.released: list[MemberKey] = []
        self.begun: list[str] = []
        self.sessions = ShareSessions(lambda: slots, self.released.append, partitions_max, self.begun.append)


class Waiting:
    expired = 0

    def expire(self) -> None:
        self.expired += 1


def test_each_request_bears_the_next_epoch() -> None:
    cache, owner = Cache(), object()
    session = cache.sessions.open(owner, ANNA, partitions(0))
    assert cache.sessions.resume(owner, ANNA, 1) is session
    for wrong in (0, 1, 3):
        with pytest.raises(InvalidShareSessionEpoch):
            cache.sessions.resume(owner, ANNA, wrong)
    assert cache.sessions.resume(owner, ANNA, 2) is session


def test_epochs_begin_again_behind_the_last() -> None:
    cache, owner = Cache(), object()
    cache.sessions.open(owner, ANNA, ()).epoch = EPOCH_MAX
    cache.sessions.resume(owner, ANNA, EPOCH_MAX)
    assert cache.sessions.resume(owner, ANNA, 1).epoch == 2


def test_a_session_is_of_its_member_and_connection() -> None:
    cache, owner = Cache(), object()
    cache.sessions.open(owner, ANNA, ())
    for asked_by, key in ((owner, BERT), (object(), ANNA)):
        for epoch in (1, FINAL_EPOCH):
            with pytest.raises(ShareSessionNotFound):
                cache.sessions.resume(asked_by, key, epoch)


def test_a_closed_session_releases_its_member_once() -> None:
    cache, owner = Cache(), object()
    session = cache.sessions.open(owner, ANNA, partitions(0, 1))
    cache.sessions.close(session)
    cache.sessions.close(session)
    cache.sessions.close_all(owner)
    assert cache.released == [ANNA]
    assert (len(cache.sessions), cache.sessions.partition_count) == (0, 0)


def test_the_end_of_a_connection_releases_its_members() -> None:
    cache, owner = Cache(), object()
    waiting = Waiting()
    cache.sessions.open(owner, ANNA, partitions(0)).waiting = waiting
    cache.sessions.open(owner, BERT, partitions(0))
    cache.sessions.close_all(owner)
    assert cache.released == [ANNA, BERT]
    assert waiting.expired == 1, "it waits for no record any more"


def test_a_member_that_begins_anew_keeps_what_it_has_acquired() -> None:
    cache, first, second = Cache(), object(), object()
    waiting = Waiting()
    cache.sessions.open(first, ANNA, partitions(0, 1)).waiting = waiting
    session = cache.sessions.open(second, ANNA, partitions(1))
    assert waiting.expired == 1, "the fetch of the session that has ended is answered"
    cache.sessions.close_all(first)
    assert not cache.released
    assert cache.sessions.resume(second, ANNA, 1) is session
    assert (len(cache.sessions), cache.sessions.partition_count) == (1, 1)


def test_a_group_begins_with_its_first_session() -> None:
    cache, owner = Cache(), object()
    anna = cache.sessions.open(owner, ANNA, ())
    bert = cache.sessions.open(owner, BERT, ())
    cache.sessions.close(anna)
    cache.sessions.open(owner, ANNA, ())
    assert cache.begun == ["g"]
    cache.sessions.open(owner, MemberKey("other", "anna"), ())
    cache.sessions.close(bert)
    cache.sessions.close_all(owner)
    cache.sessions.open(owner, BERT, ())
    assert cache.begun == ["g", "other", "g"]


def test_a_further_request_ends_the_wait_of_the_one_before() -> None:
    cache, owner = Cache(), object()
    waiting = Waiting()
    cache.sessions.open(owner, ANNA, partitions(0)).waiting = waiting
    cache.sessions.resume(owner, ANNA, 1)
    assert waiting.expired == 1


def test_partitions_are_added_forgotten_and_go_to_the_end_when_served() -> None:
    cache = Cache()
    session = cache.sessions.open(object(), ANNA, partitions(0, 1, 2))
    session.served((TOPIC, 0))
    session.served((TOPIC, 9))
    cache.sessions.update(session, partitions(3, 1, 4), partitions(2, 4, 7))
    assert list(session.partitions) == partitions(1, 0, 3)
    assert cache.sessions.partition_count == 3


def test_there_are_only_so_many_sessions() -> None:
    cache = Cache(slots=2)
    cache.sessions.open(object(), ANNA, ())
    cache.sessions.open(object(), BERT, ())
    with pytest.raises(ShareSessionLimitReached):
        cache.sessions.open(object(), MemberKey("g", "carl"), ())
    cache.sessions.open(object(), ANNA, ())
    assert len(cache.sessions) == 2


def test_a_connection_has_only_so_many_sessions() -> None:
    cache, owner = Cache(slots=1000), object()
    for nth in range(CONNECTION_SESSIONS_MAX):
        cache.sessions.open(owner, MemberKey("g", str(nth)), ())
    with pytest.raises(ShareSessionLimitReached):
        cache.sessions.open(owner, ANNA, ())


def test_there_are_only_so_many_partitions_in_all_sessions() -> None:
    cache = Cache(partitions_max=5)
    session = cache.sessions.open(object(), ANNA, partitions(0, 1, 2))
    with pytest.raises(ShareSessionLimitReached):
        cache.sessions.open(object(), BERT, partitions(0, 1, 2))
    with pytest.raises(ShareSessionLimitReached):
        cache.sessions.update(session, partitions(3, 4, 5), ())
    assert (len(cache.sessions), cache.sessions.partition_count) == (0, 0)
    assert cache.released == [BERT, ANNA]
