"""Which bytes may flip on two machines, so that no record is lost on both."""

from __future__ import annotations

import pytest

from headrace.simulator.decay import loss_of
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.log import TopicPartition
from proving import proves

HERE = TopicPartition("kept", 0)
ELSEWHERE = TopicPartition("kept", 1)
LAYOUTS = pytest.mark.parametrize("layout", [PARTITIONED, SHARED])


@proves("G14")
@LAYOUTS
def test_below_the_checkpoint_a_flip_costs_its_batch(layout: str) -> None:
    loss = loss_of(HERE, 4, 6, 6, layout)
    for first, meets in ((3, False), (4, True), (5, True), (6, False)):
        other = loss_of(HERE, first, first + 1, 10, layout)
        assert loss.meets(other) == other.meets(loss) == meets, first
    assert not loss.meets(loss_of(ELSEWHERE, 4, 6, 6, layout))


@proves("G14")
@LAYOUTS
def test_above_the_checkpoint_a_flip_costs_all_that_follows(layout: str) -> None:
    """Two machines that are hit so, each in another record, have both lost what comes after."""
    loss = loss_of(HERE, 4, 6, 5, layout)
    for first, meets in ((3, False), (4, True), (6, True), (100, True)):
        other = loss_of(HERE, first, first + 1, 1000, layout)
        assert loss.meets(other) == other.meets(loss) == meets, first
    before = loss_of(HERE, 1, 2, 0, layout)
    assert loss.meets(before)
    assert before.meets(loss)


@proves("G14")
@LAYOUTS
def test_a_commit_log_that_is_cut_costs_other_partitions_too(layout: str) -> None:
    loss, other = loss_of(HERE, 4, 6, 0, layout), loss_of(ELSEWHERE, 1, 2, 10, PARTITIONED)
    assert loss.meets(other) == other.meets(loss) == (layout == SHARED)
