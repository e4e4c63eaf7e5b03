from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidReplication
from headrace.placement.balance import Counts
from headrace.placement.spread import Site, spread
from hypotheses import examples
from proving import proves

properties = examples(60)


def test_one_broker_takes_everything() -> None:
    assert spread(3, 1, [Site(7)]) == ((7,), (7,), (7,))


@pytest.mark.parametrize("start", [0, 1, 5])
def test_leaders_and_replicas_are_even(start: int) -> None:
    placed = spread(60, 3, [Site(n) for n in range(5)], start)
    assert set(Counter(replicas[0] for replicas in placed).values()) == {12}
    assert set(Counter(broker for replicas in placed for broker in replicas).values()) == {36}
    assert all(len(set(replicas)) == 3 for replicas in placed)


@properties
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 40), st.data())
def test_any_number_of_partitions_is_even_within_one(
    brokers: int, partitions: int, start: int, data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(1, brokers))
    held = Counter(dict.fromkeys(range(brokers), 0))
    for placed in spread(partitions, replicas, [Site(n) for n in range(brokers)], start):
        assert len(set(placed)) == replicas
        held.update(placed)
    assert max(held.values()) - min(held.values()) <= 1


def test_small_topics_together_are_even_too() -> None:
    counts, sites = Counts(range(5)), [Site(n) for n in range(5)]
    for number in range(40):
        spread(1, 3, sites, start=number, counts=counts, topic=f"t{number}")
    assert {counts.total(broker) for broker in range(5)} == {24}


def test_followers_of_one_leader_differ_from_turn_to_turn() -> None:
    placed = spread(60, 2, [Site(n) for n in range(5)])
    assert len({replicas[1] for replicas in placed if replicas[0] == 0}) == 4


def test_replicas_share_a_rack_only_when_racks_run_out() -> None:
    sites = [Site(n, rack="abc"[n // 2]) for n in range(6)]
    rack = {site.broker: site.rack for site in sites}
    assert all(len({rack[broker] for broker in replicas}) == 3 for replicas in spread(30, 3, sites))
    assert all(len({rack[broker] for broker in replicas}) == 3 for replicas in spread(30, 5, sites))


@proves("J3")
def test_replicas_share_a_host_only_when_hosts_run_out() -> None:
    sites = [Site(n, host="xyz"[n // 2]) for n in range(6)]
    placed = spread(60, 3, sites)
    assert all({broker // 2 for broker in replicas} == {0, 1, 2} for replicas in placed)
    assert set(Counter(replicas[0] for replicas in placed).values()) == {10}
    assert all(len({broker // 2 for broker in replicas}) == 3 for replicas in spread(60, 4, sites))


@properties
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["", "x", "y"])), min_size=1, max_size=9),
    st.integers(0, 40),
    st.data(),
)
def test_racks_are_distinct_as_far_as_there_are_some(
    names: list[tuple[str, str]], start: int, data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(1, len(names)))
    racks = [rack or str(broker) for broker, (rack, _) in enumerate(names)]
    placed = spread(12, replicas, [Site(broker, *named) for broker, named in enumerate(names)], start)
    for held in placed:
        assert len(set(held)) == replicas
        assert len({racks[broker] for broker in held}) == min(replicas, len(set(racks)))
    leaders = Counter(dict.fromkeys(range(len(names)), 0))
    leaders.update(held[0] for held in placed)
    assert max(leaders.values()) - min(leaders.values()) <= 1


def test_fewer_brokers_than_replicas_are_refused() -> None:
    with pytest.raises(InvalidReplication, match="2 live brokers"):
        spread(1, 3, [Site(1), Site(2)])
