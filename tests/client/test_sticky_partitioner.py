"""How long a broker is avoided after a slow or failed send (fault latency), and where records go meanwhile."""

from __future__ import annotations

import pytest

from headrace.client.producer.sticky_partitioner import FaultLatency, next_partition
from headrace.errors import SettingError
from proving import proves


@proves("R7")
@pytest.mark.parametrize(
    ("took_ms", "avoid_ms"),
    [
        (0, 0),
        (549, 0),
        (550, 30_000),
        (1_000, 60_000),
        (1_999, 60_000),
        (2_000, 120_000),
        (3_000, 180_000),
        (14_999, 180_000),
        (15_000, 600_000),
        (90_000, 600_000),
    ],
)
def test_a_slow_send_keeps_records_away_for_the_time_in_the_table(took_ms: int, avoid_ms: int) -> None:
    assert FaultLatency().avoid_ms(took_ms) == avoid_ms


@proves("R7")
def test_a_failed_send_counts_as_one_of_thirty_seconds() -> None:
    faults = FaultLatency()
    faults.failed(1, 100.0)
    assert faults.avoided(699.0) == {1}
    assert faults.avoided(700.0) == frozenset()


def test_the_last_send_counts() -> None:
    faults = FaultLatency()
    faults.took(1, 2_500, 0.0)
    faults.took(2, 600, 0.0)
    faults.took(1, 10, 1.0)
    assert faults.avoided(2.0) == {2}


@proves("R7")
def test_the_table_can_be_another() -> None:
    faults = FaultLatency([(10, 100)])
    faults.took(7, 10, 0.0)
    assert faults.avoided(0.05) == {7}
    assert faults.avoided(0.2) == frozenset()


@pytest.mark.parametrize("table", [[(2, 1), (1, 5)], [(-1, 5)], [(1, 5), (2, -1)]])
def test_a_table_that_does_not_rise_is_refused(table: list[tuple[int, int]]) -> None:
    with pytest.raises(SettingError, match="latency_table"):
        FaultLatency(table)


@proves("G17", "R6")
@pytest.mark.parametrize(
    ("leaders", "avoided", "chosen"),
    [
        ([1, 2, 3], set(), 1),
        ([1, 2, 3], {2}, 2),
        ([1, None, 3], set(), 2),
        ([1, 2, 3], {2, 3}, 0),
        ([1, 2, 3], {1, 2, 3}, 1),
        ([1, None, 3], {1, 3}, 2),
        ([None, None], set(), 1),
        ([7], {7}, 0),
    ],
)
def test_records_without_a_key_pass_over_brokers_to_avoid_while_others_are_left(
    leaders: list[int | None], avoided: set[int], chosen: int
) -> None:
    assert next_partition(0, len(leaders), leaders.__getitem__, avoided) == chosen
