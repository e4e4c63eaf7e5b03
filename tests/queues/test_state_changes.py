"""What is kept of a share partition, range by range, against one entry for each offset."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headrace.queues.messages import StateBatch
from headrace.queues.state_changes import overlaid
from queues.state_scene import ACKNOWLEDGED, ACQUIRED, AVAILABLE, acknowledged, acquired

Naive = dict[int, tuple[int, int, str, int]]


def naive(batches: tuple[StateBatch, ...]) -> Naive:
    return {
        offset: (batch.state, batch.delivery_count, batch.member, batch.until_ms)
        for batch in batches
        for offset in range(batch.first_offset, batch.last_offset + 1)
    }


def drawn(rng: random.Random, low: int) -> StateBatch:
    first = low + rng.randrange(40)
    last = first + rng.randrange(10)
    state = rng.choice((AVAILABLE, ACQUIRED, ACKNOWLEDGED))
    if state is ACQUIRED:
        return acquired(first, last, rng.randrange(1, 3), rng.choice(("m1", "m2")))
    return StateBatch(first, last, state, rng.randrange(1, 3))


def test_ranges_are_what_each_offset_was_last_said_to_be(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        batches: tuple[StateBatch, ...] = ()
        offsets: Naive = {}
        start = 0
        for _ in range(12):
            new = tuple(drawn(rng, start) for _ in range(rng.randrange(3)))
            start += rng.choice((0, 0, 3, 15))
            for batch in new:
                offsets.update(naive((batch,)))
            offsets = {offset: what for offset, what in offsets.items() if offset >= start}
            batches = overlaid(batches, new, start)
            assert naive(batches) == offsets
            for before, after in pairwise(batches):
                assert before.last_offset < after.first_offset
            assert overlaid(batches, new, start) == batches, "the same again"


def test_neighbours_in_the_same_state_are_one_range() -> None:
    batches = overlaid((acknowledged(0, 4), acknowledged(10, 14)), (acknowledged(5, 9),), 0)
    assert batches == (acknowledged(0, 14),)


@pytest.mark.parametrize("other", [acquired(5, 9, 2), acquired(5, 9, member="m2"), acquired(5, 9, until_ms=1)])
def test_neighbours_that_differ_stay_apart(other: StateBatch) -> None:
    assert overlaid((acquired(0, 4),), (other,), 0) == (acquired(0, 4), other)


def test_what_is_below_the_start_is_dropped() -> None:
    assert overlaid((acknowledged(0, 4), acquired(5, 9)), (), 7) == (acquired(7, 9),)
    assert overlaid((acknowledged(0, 4),), (acquired(1, 2),), 5) == ()
