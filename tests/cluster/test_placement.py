from __future__ import annotations

from collections import Counter

import pytest

from headrace.cluster.placement import Site, spread
from headrace.errors import InvalidReplication


def test_one_broker_takes_everything() -> None:
    assert spread(3, 1, [Site(7)]) == ((7,), (7,), (7,))


@pytest.mark.parametrize("start", [0, 1, 5])
def test_leaders_and_replicas_are_even(start: int) -> None:
    placed = spread(60, 3, [Site(n) for n in range(5)], start)
    assert set(Counter(replicas[0] for replicas in placed).values()) == {12}
    assert set(Counter(broker for replicas in placed for broker in replicas).values()) == {36}
    assert all(len(set(replicas)) == 3 for replicas in placed)


def test_followers_of_one_leader_differ_from_turn_to_turn() -> None:
    placed = spread(60, 2, [Site(n) for n in range(5)])
    assert len({replicas[1] for replicas in placed if replicas[0] == 0}) == 4


def test_replicas_share_a_rack_only_when_racks_run_out() -> None:
    sites = [Site(n, rack="abc"[n // 2]) for n in range(6)]
    rack = {site.broker: site.rack for site in sites}
    assert all(len({rack[broker] for broker in replicas}) == 3 for replicas in spread(30, 3, sites))
    assert all(len({rack[broker] for broker in replicas}) == 3 for replicas in spread(30, 5, sites))


def test_a_fewer_brokers_than_replicas_is_refused() -> None:
    with pytest.raises(InvalidReplication, match="2 live brokers"):
        spread(1, 3, [Site(1), Site(2)])
