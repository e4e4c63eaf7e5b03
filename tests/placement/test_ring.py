from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidReplication
from headrace.placement.ring import POINTS, Ring, point
from headrace.placement.spread import Site
from hypotheses import examples
from proving import proves

properties = examples(60)

PARTITIONS = 2000
REPLICAS = 3

Placed = list[tuple[int, ...]]


def placed(brokers: Sequence[int], replicas: int = REPLICAS) -> Placed:
    ring = Ring([Site(broker) for broker in brokers])
    return [ring.replicas_of("t", n, replicas) for n in range(PARTITIONS)]


def moved_share(before: Placed, after: Placed) -> float:
    """Copies to be made, of all replicas."""
    copies = sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))
    return copies / sum(map(len, after))


def test_the_ring_never_changes() -> None:
    """Whoever changes these numbers moves the data of every topic on a ring."""
    assert point("broker/1/0") == 0xB2C8075FD5B57420
    assert Ring([Site(n) for n in range(1, 6)]).replicas_of("orders", 0, 3) == (1, 4, 2)


def test_another_process_computes_the_same_ring() -> None:
    code = (
        "from headrace.placement.ring import Ring; from headrace.placement.spread import Site;"
        "print([Ring([Site(n) for n in range(5)]).replicas_of('t', n, 3) for n in range(50)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert answers == {str(placed(range(5))[:50])}


def test_the_order_of_the_brokers_does_not_matter() -> None:
    assert placed([1, 2, 3, 4]) == placed([4, 2, 1, 3])


@properties
@given(
    st.dictionaries(
        st.integers(0, 50),
        st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["", "h", "i"])),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_replicas_are_distinct_and_share_racks_and_hosts_as_late_as_possible(
    named: dict[int, tuple[str, str]], data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(1, len(named)))
    answer = Ring([Site(broker, *names) for broker, names in named.items()]).replicas_of("t", 3, replicas)
    assert len(set(answer)) == replicas
    racks = {rack or str(broker) for broker, (rack, _) in named.items()}
    assert len({named[broker][0] or str(broker) for broker in answer}) == min(replicas, len(racks))


def test_hosts_are_shared_last_when_there_are_no_racks() -> None:
    sites = [Site(n, host=f"h{n // 4}") for n in range(12)]
    ring = Ring(sites)
    for n in range(200):
        assert len({broker // 4 for broker in ring.replicas_of("t", n, 3)}) == 3


@proves("L1")
@pytest.mark.parametrize("brokers", range(3, 21))
def test_about_one_in_n_replicas_moves_when_a_broker_comes_or_goes(brokers: int) -> None:
    few, many = placed(range(brokers)), placed(range(brokers + 1))
    assert 0 < moved_share(few, many) <= 1.6 / (brokers + 1)
    assert 0 < moved_share(many, few) <= 1.6 / (brokers + 1)


@proves("L1")
@properties
@given(st.sets(st.integers(0, 100), min_size=3, max_size=12), st.integers(101, 120))
def test_a_broker_that_comes_takes_and_moves_nothing_else(brokers: set[int], comes: int) -> None:
    sites = [Site(broker) for broker in brokers]
    before, after = Ring(sites), Ring([*sites, Site(comes)])
    for n in range(50):
        old, new = before.replicas_of("t", n, 3), after.replicas_of("t", n, 3)
        assert set(new) - set(old) <= {comes}
        assert [broker for broker in new if broker != comes] == [broker for broker in old if broker in new]
        assert before.replicas_of("t", n, 3) == old


def test_virtual_points_keep_the_load_near_even() -> None:
    counts = Counter(broker for replicas in placed(range(10)) for broker in replicas)
    mean = PARTITIONS * REPLICAS / 10
    assert max(counts.values()) < 1.4 * mean
    assert min(counts.values()) > 0.6 * mean
    assert POINTS == 128


def test_fewer_brokers_than_replicas_are_refused() -> None:
    with pytest.raises(InvalidReplication, match="2 live brokers"):
        Ring([Site(1), Site(2)]).replicas_of("t", 0, 3)
