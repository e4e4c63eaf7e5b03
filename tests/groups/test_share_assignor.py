"""The simple assignor of share groups: every partition has a member, every member a partition, few of them move."""

from __future__ import annotations

import random

import pytest

from headrace.groups.assignors import AssignedTopic, Assignment, Subscriber, assign_simple, count_of, partitions_of

A, B = b"a" * 16, b"b" * 16


def run(
    counts: dict[bytes, int],
    members: dict[str, set[bytes]],
    before: dict[str, Assignment] | None = None,
    ready: dict[bytes, frozenset[int]] | None = None,
) -> dict[str, Assignment]:
    topics = {topic: AssignedTopic(topic, count) for topic, count in counts.items()}
    subscribers = [
        Subscriber(name, frozenset(wanted & topics.keys()), target=(before or {}).get(name, {}))
        for name, wanted in members.items()
    ]
    all_of_them = {topic: frozenset(range(count)) for topic, count in counts.items() if count}
    return assign_simple(topics, subscribers, all_of_them if ready is None else ready)


def test_only_what_is_ready_is_given() -> None:
    found = run({A: 4, B: 2}, {"m": {A, B}, "n": {A, B}, "o": {B}}, ready={A: frozenset({1, 3})})
    assert {place for target in found.values() for place in partitions_of(target)} == {(A, 1), (A, 3)}
    assert found["m"]
    assert found["n"]
    assert found["o"] == {}
    assert run({A: 4}, {"m": {A}}, ready={}) == {"m": {}}


@pytest.mark.parametrize("round_", range(200))
def test_partitions_and_members_are_all_served_and_balanced(seed: int, round_: int) -> None:
    chance = random.Random(seed * 1000 + round_)
    partitions, size = chance.randint(1, 12), chance.randint(1, 30)
    names = [f"m{n:02}" for n in range(size)]
    before: dict[str, Assignment] = {}
    for _ in range(4):
        target = run({A: partitions}, {name: {A} for name in names}, before)
        sizes = [count_of(target[name]) for name in names]
        shared = [sum(index in target[name].get(A, ()) for name in names) for index in range(partitions)]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1 or partitions == 0
        assert min(shared) >= 1
        assert max(shared) - min(shared) <= 1
        assert run({A: partitions}, {name: {A} for name in names}, target) == target, "nothing moves without a cause"
        before = target
        names = sorted({*chance.sample(names, chance.randint(1, len(names))), f"n{chance.randint(0, 99):02}"})
        partitions += chance.randint(0, 2)


@pytest.mark.parametrize("round_", range(100))
def test_members_of_different_topics_are_all_served(seed: int, round_: int) -> None:
    chance = random.Random(seed * 1000 + round_)
    counts = {A: chance.randint(0, 5), B: chance.randint(1, 5)}
    members = {f"m{n}": set(chance.sample([A, B], chance.randint(1, 2))) for n in range(chance.randint(1, 12))}
    target = run(counts, members)
    given = {place for assignment in target.values() for place in partitions_of(assignment)}
    wanted = {topic for topics in members.values() for topic in topics}
    assert given == {(topic, index) for topic in wanted for index in range(counts[topic])}
    for name, topics in members.items():
        assert target[name].keys() <= topics
        assert bool(target[name]) == any(counts[topic] for topic in topics)
