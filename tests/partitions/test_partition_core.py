"""The watermark: the least position over the in-sync set, which never falls and waits for enough replicas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.partitions.core import LeaderCore
from proving import proves

LEADER = 1
REPLICAS = (1, 2, 3)

Step = tuple[str, int, int] | tuple[str, frozenset[int]]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("moved"), st.sampled_from(REPLICAS), st.integers(0, 50)),
        st.tuples(st.just("in sync"), st.frozensets(st.sampled_from((2, 3))).map(lambda some: some | {LEADER})),
    ),
    max_size=40,
)


@proves("G2", "G11")
@given(steps, st.integers(1, 3))
def test_the_watermark_is_what_every_replica_in_sync_holds_and_never_falls(course: list[Step], least: int) -> None:
    core = LeaderCore(LEADER, 0, 0, 0, REPLICAS, least)
    held = dict.fromkeys(REPLICAS, 0)
    for step in course:
        before = core.high_watermark
        if len(step) == 3:
            held[step[1]] = max(held[step[1]], step[2])
            rose = core.moved(step[1], step[2])
        else:
            rose = core.in_sync_changed(step[1])
        assert core.high_watermark >= before
        assert rose == (core.high_watermark > before)
        if rose:
            assert core.high_watermark == min(held[replica] for replica in core.in_sync)
            assert len(core.in_sync) >= least
        elif len(core.in_sync) >= least:
            assert min(held[replica] for replica in core.in_sync) <= core.high_watermark
        assert core.enough_in_sync == (len(core.in_sync) >= least)


def test_a_leader_alone_commits_what_it_has_written() -> None:
    core = LeaderCore(LEADER, 3, 10, 10, (LEADER,))
    assert core.moved(LEADER, 15)
    assert core.high_watermark == 15
    assert not core.moved(LEADER, 15)
    assert not core.moved(LEADER, 12)
    assert core.high_watermark == 15


def test_a_replica_that_leaves_the_set_no_longer_holds_the_watermark_back() -> None:
    core = LeaderCore(LEADER, 0, 0, 0, REPLICAS)
    core.moved(LEADER, 10)
    core.moved(2, 8)
    assert core.high_watermark == 0
    assert core.in_sync_changed((1, 2))
    assert core.high_watermark == 8


def test_a_replica_that_joins_without_a_position_holds_the_watermark_and_does_not_lower_it() -> None:
    core = LeaderCore(LEADER, 0, 0, 0, (LEADER,))
    core.moved(LEADER, 10)
    assert not core.in_sync_changed((1, 2))
    core.moved(LEADER, 20)
    assert core.high_watermark == 10
    assert core.moved(2, 15)
    assert core.high_watermark == 15


def test_the_watermark_stands_still_while_the_set_is_too_small() -> None:
    core = LeaderCore(LEADER, 0, 0, 0, (1, 2), min_in_sync=2)
    core.moved(LEADER, 10)
    core.moved(2, 10)
    core.in_sync_changed((LEADER,))
    assert not core.enough_in_sync
    assert not core.moved(LEADER, 20)
    assert core.high_watermark == 10
    core.in_sync_changed((1, 2))
    assert core.moved(2, 20)
    assert core.high_watermark == 20
