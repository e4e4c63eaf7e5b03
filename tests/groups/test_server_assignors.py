from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.groups.assignors import (
    AssignedTopic,
    Assignment,
    Assignor,
    Subscriber,
    assign_range,
    assign_uniform,
    count_of,
    partitions_of,
)
from proving import proves

RACKS = ("a", "b", "c")


def topic(number: int, partitions: int, racks: tuple[frozenset[str], ...] = ()) -> AssignedTopic:
    return AssignedTopic(number.to_bytes(16), partitions, racks)


def topics(*found: AssignedTopic) -> dict[bytes, AssignedTopic]:
    return {one.topic_id: one for one in found}


def members(count: int, *found: AssignedTopic, racks: tuple[str, ...] = ()) -> list[Subscriber]:
    ids = frozenset(one.topic_id for one in found)
    return [
        Subscriber(f"m{number:04}", ids, rack=racks[number % len(racks)] if racks else None) for number in range(count)
    ]


def again(subscribers: list[Subscriber], given: dict[str, Assignment]) -> list[Subscriber]:
    return [replace(one, target=given.get(one.member_id, {})) for one in subscribers]


def moved(before: dict[str, Assignment], after: dict[str, Assignment]) -> int:
    """Partitions that went from one member to another."""
    owner = {place: member for member, held in before.items() for place in partitions_of(held)}
    return sum(
        owner.get(place, member) != member for member, held in after.items() for place in partitions_of(held)
    )  # fmt: skip


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[bytes, AssignedTopic], list[Subscriber]]:
    found = []
    with_racks = draw(st.booleans())
    for number in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 9))
        racks = tuple(draw(st.frozensets(st.sampled_from(RACKS), max_size=2)) for _ in range(count))
        found.append(topic(number, count, racks if with_racks else ()))
    known = topics(*found)
    same = draw(st.booleans())
    people = []
    for number in range(draw(st.integers(1, 8))):
        ids = known.keys() if same else draw(st.frozensets(st.sampled_from(sorted(known))))
        rack = draw(st.sampled_from((None, *RACKS)))
        instance = draw(st.sampled_from((None, f"i{number}")))
        people.append(Subscriber(f"m{number}", frozenset(ids), instance, rack))
    return known, people


def check_each_once(known: dict[bytes, AssignedTopic], people: list[Subscriber], given: dict[str, Assignment]) -> None:
    assert given.keys() == {one.member_id for one in people}
    subscribed = frozenset[bytes]().union(*(one.topics for one in people))
    every = Counter((one, index) for one in subscribed for index in range(known[one].partitions))
    assert Counter(place for held in given.values() for place in partitions_of(held)) == every
    for one in people:
        assert given[one.member_id].keys() <= one.topics
        assert all(given[one.member_id].values())


@proves("N1")
@pytest.mark.parametrize("assign", [assign_uniform, assign_range])
@given(st.data())
def test_every_partition_is_assigned_once_to_a_subscriber(assign: Assignor, data: st.DataObject) -> None:
    known, people = data.draw(groups())
    check_each_once(known, people, assign(known, people))


@proves("N1")
@given(groups(), st.data())
def test_uniform_is_balanced_and_stays_as_it_is(
    drawn: tuple[dict[bytes, AssignedTopic], list[Subscriber]], data: st.DataObject
) -> None:
    known, people = drawn
    given = assign_uniform(known, people)
    for _ in range(3):
        loads = {member: count_of(held) for member, held in given.items()}
        for one in people:
            for other in people:
                if given[one.member_id].keys() & other.topics:
                    assert loads[one.member_id] - loads[other.member_id] <= 1
        for _ in range(50):
            before, given = given, assign_uniform(known, again(people, given))
            if before == given:
                break
        else:
            raise AssertionError("the assignment does not come to rest")
        people = again(people, given)
        if len(people) > 1 and data.draw(st.booleans()):
            people.remove(data.draw(st.sampled_from(people)))
        given = assign_uniform(known, people)
        check_each_once(known, people, given)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12))
def test_uniform_moves_no_more_than_balance_needs(partitions: int, count: int, later: int) -> None:
    one = topic(1, partitions)
    people = members(max(count, later), one)
    before = assign_uniform(topics(one), people[:count])
    after = assign_uniform(topics(one), again(people[:later], before))
    check_each_once(topics(one), people[:later], after)
    least = partitions // later
    if later > count:
        assert moved(before, after) <= (later - count) * (least + 1)
    else:
        left = sum(count_of(before[one.member_id]) for one in people[later:count])
        assert moved(before, after) == left


@given(st.integers(1, 40), st.integers(1, 10))
def test_range_gives_runs_and_the_same_of_each_topic(partitions: int, count: int) -> None:
    one, two = topic(1, partitions), topic(2, partitions)
    given = assign_range(topics(one, two), members(count, one, two))
    ends = []
    for held in given.values():
        assert held.get(one.topic_id) == held.get(two.topic_id)
        run = sorted(held.get(one.topic_id, ()))
        assert run == list(range(run[0], run[-1] + 1)) if run else True
        ends.append(len(run))
    assert ends == sorted(ends, reverse=True)
    assert max(ends) - min(ends) <= 1


@pytest.mark.parametrize("assign", [assign_uniform, assign_range])
def test_a_static_member_keeps_its_part_under_another_id(assign: Assignor) -> None:
    one = topic(1, 10)
    people = [replace(member, instance_id=f"i{n}") for n, member in enumerate(members(3, one))]
    before = assign(topics(one), people)
    back = replace(people[0], member_id="z", target=before["m0000"])
    after = assign(topics(one), [*again(people[1:], before), back])
    assert after["z"] == before["m0000"]


@proves("N1")
@pytest.mark.parametrize("assign", [assign_uniform, assign_range])
def test_partitions_go_to_members_in_their_racks(assign: Assignor) -> None:
    one = topic(1, 12, tuple(frozenset(RACKS[n % 3]) for n in range(12)))
    people = members(6, one, racks=RACKS)
    given = assign(topics(one), people)
    for member in people:
        assert {RACKS[index % 3] for index in given[member.member_id][one.topic_id]} == {member.rack}


def test_members_that_came_one_by_one_get_what_is_near() -> None:
    one = topic(1, 30, tuple(frozenset(RACKS[n % 3]) for n in range(30)))
    people = members(3, one, racks=RACKS)
    given: dict[str, Assignment] = {}
    for count in (1, 2, 3):
        given = assign_uniform(topics(one), again(people[:count], given))
    for member in people:
        assert {RACKS[index % 3] for index in given[member.member_id][one.topic_id]} == {member.rack}


def test_a_large_group_is_assigned_in_a_moment() -> None:
    found = [topic(number, 10) for number in range(1000)]
    people = members(1000, *found)
    for assign in (assign_uniform, assign_range):
        given = assign(topics(*found), people)
        began = time.process_time()
        assign(topics(*found), again(people, given)[:-1])
        assert time.process_time() - began < 5.0
