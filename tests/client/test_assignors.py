"""The rules that share out partitions: complete, fair, and moving no more than they must when members come and go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.consumer.assignors import (
    ASSIGNORS,
    MOST_OF_AVERAGE,
    Assign,
    Participant,
    Rooms,
    Shares,
    assign_average,
    assign_by_ring,
    assign_range,
    assign_room_first,
    assign_sticky,
    assignor_named,
)
from headrace.client.consumer.group_protocol import NO_GENERATION, TopicPartition
from headrace.errors import SettingError
from proving import proves

EAGER = [assign_average, assign_range, assign_room_first, assign_by_ring]
RACKS = st.sampled_from(["", "east", "west"])
MEMBERS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.tuples(st.frozensets(st.sampled_from("xyz"), min_size=1), RACKS),
    min_size=1,
    max_size=6,
).map(lambda found: [Participant(name, topics, rack=rack) for name, (topics, rack) in found.items()])
TOPICS = st.dictionaries(st.sampled_from("xyz"), st.lists(RACKS, max_size=12))


def members_of(*names: str, topics: str = "x", rack: str = "") -> list[Participant]:
    return [Participant(name, frozenset(topics), rack=rack) for name in names]


def numbers(shares: Shares) -> dict[str, list[int]]:
    return {member: sorted(number for _, number in places) for member, places in shares.items()}


def owners(shares: Shares) -> dict[TopicPartition, str]:
    return {place: member for member, places in shares.items() for place in places}


def moves(before: Shares, after: Shares) -> int:
    """Partitions whose owner is there before and after, and another."""
    had = owners(before)
    return sum(1 for place, owner in owners(after).items() if place in had and had[place] != owner)


def settle(members: Sequence[Participant], topics: Rooms, generation: int = 1) -> tuple[Shares, int]:
    """Rebalance step by step as members do, until nobody has to give anything up; the rounds that it took."""
    for rounds in range(1, 10):
        shares = assign_sticky(members, topics)
        held = [place for member in members for place in member.owned]
        assert len(held) == len(set(held))
        for member in members:
            for place in shares[member.member_id]:
                assert all(place not in other.owned for other in members if other is not member)
        given_up = any(member.owned - set(shares[member.member_id]) for member in members)
        members = [
            Participant(m.member_id, m.topics, frozenset(shares[m.member_id]), generation + rounds) for m in members
        ]
        if not given_up:
            return shares, rounds
    raise AssertionError("the rebalances do not end")


def holding(shares: Shares, members: Sequence[Participant], generation: int = 1) -> list[Participant]:
    return [
        Participant(m.member_id, m.topics, frozenset(shares.get(m.member_id, ())), generation)
        if m.member_id in shares
        else m
        for m in members
    ]


@pytest.mark.parametrize("assign", [*EAGER, lambda members, topics: settle(members, topics)[0]])
@given(members=MEMBERS, topics=TOPICS)
def test_every_partition_that_somebody_asks_for_has_one_owner_who_asked(
    assign: Assign, members: list[Participant], topics: Rooms
) -> None:
    shares = assign(members, topics)
    assert shares.keys() == {member.member_id for member in members}
    asked = {member.member_id: member.topics for member in members}
    assert all(topic in asked[member] for member, places in shares.items() for topic, _ in places)
    wanted = frozenset().union(*asked.values())
    expected = sorted((t, n) for t, rooms in topics.items() if t in wanted for n in range(len(rooms)))
    assert sorted(place for places in shares.values() for place in places) == expected


@pytest.mark.parametrize("assign", [assign_average, assign_sticky])
@given(
    names=st.sets(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=6),
    counts=st.lists(st.integers(1, 9), max_size=3),
)
def test_members_that_ask_for_the_same_differ_by_one_at_most(
    assign: Assign, names: set[str], counts: list[int]
) -> None:
    topics = {f"t{n}": [""] * count for n, count in enumerate(counts)}
    members = [Participant(name, frozenset(topics)) for name in names]
    loads = [len(places) for places in assign(members, topics).values()]
    assert max(loads) - min(loads) <= 1


def test_average_cuts_runs_and_leaves_surplus_members_idle() -> None:
    assert numbers(assign_average(members_of("a", "b", "c"), {"x": [""] * 7})) == {
        "a": [0, 1, 2],
        "b": [3, 4],
        "c": [5, 6],
    }
    assert numbers(assign_average(members_of("a", "b", "c"), {"x": [""] * 2})) == {"a": [0], "b": [1], "c": []}


def test_range_is_what_other_clients_make_of_it_and_average_shares_small_topics_too() -> None:
    topics = {"x": [""], "y": [""], "z": [""]}
    members = members_of("a", "b", "c", topics="xyz")
    assert assign_range(members, topics) == {"a": [("x", 0), ("y", 0), ("z", 0)], "b": [], "c": []}
    assert assign_average(members, topics) == {"a": [("x", 0)], "b": [("y", 0)], "c": [("z", 0)]}


def test_a_static_member_keeps_its_place_in_the_order_whatever_its_id() -> None:
    first = [Participant("z-1", frozenset("x"), instance_id="i1"), Participant("a-1", frozenset("x"), instance_id="i2")]
    again = [Participant("b-7", frozenset("x"), instance_id="i1"), Participant("a-1", frozenset("x"), instance_id="i2")]
    for assign in (assign_average, assign_by_ring):
        assert assign(first, {"x": [""] * 8})["z-1"] == assign(again, {"x": [""] * 8})["b-7"]


@proves("R9")
def test_room_first_gives_partitions_to_their_own_room_and_averages_the_rest() -> None:
    members = [
        *members_of("e1", "e2", rack="east"),
        *members_of("w1", rack="west"),
        *members_of("n1"),
    ]
    rooms = ["east", "west", "east", "south", "east", "", "west", "east"]
    shares = numbers(assign_room_first(members, {"x": rooms}))
    assert shares == {"e1": [0, 2], "e2": [4, 7], "w1": [1, 6], "n1": [3, 5]}


@proves("R9")
def test_the_ring_moves_few_partitions_and_loads_nobody_far_above_the_average() -> None:
    """With 240 partitions and members from 2 to 12: what moves is at most half as much again as has to."""
    topics = {"x": [""] * 240}
    names = [f"member-{n}" for n in range(12)]
    shares = assign_by_ring(members_of(*names[:2]), topics)
    moved, needed = 0, 0
    for count in range(3, 13):
        grown = assign_by_ring(members_of(*names[:count]), topics)
        moved += moves(shares, grown)
        needed += 240 // count
        assert max(map(len, grown.values())) <= math.ceil(MOST_OF_AVERAGE * 240 / count)
        shares = grown
    assert moved <= 1.5 * needed, (moved, needed)
    # Members leave: all of what they had moves, and little else.
    left = assign_by_ring(members_of(*names[:11]), topics)
    stayed = {member: places for member, places in shares.items() if member != names[11]}
    assert moves(stayed, left) <= 240 // 11


@proves("R9")
@given(counts=st.lists(st.integers(1, 8), min_size=2, max_size=7), partitions=st.integers(1, 30))
def test_cooperative_moves_as_few_as_it_must_however_many_members_there_are(counts: list[int], partitions: int) -> None:
    topics = {"x": [""] * partitions}
    names = [f"m{n}" for n in range(8)]
    shares, _ = settle(members_of(*names[: counts[0]]), topics)
    for before, now in itertools.pairwise(counts):
        members = members_of(*names[:now])
        after, rounds = settle(holding(shares, members), topics)
        most, extra = divmod(partitions, now)
        stayed = sorted((len(shares[n]) for n in names[: min(before, now)]), reverse=True)
        must_move = sum(max(0, had - most - (nth < extra)) for nth, had in enumerate(stayed))
        assert moves({n: shares[n] for n in names[: min(before, now)]}, after) == must_move
        assert rounds == (2 if must_move else 1)
        shares = after


def test_a_partition_that_another_still_holds_is_given_to_nobody_yet() -> None:
    old = Participant("old", frozenset("x"), frozenset({("x", 0), ("x", 1)}), 4)
    first = assign_sticky([old, Participant("new", frozenset("x"))], {"x": ["", ""]})
    assert numbers(first) == {"old": [0], "new": []}
    kept = Participant("old", frozenset("x"), frozenset({("x", 0)}), 5)
    assert numbers(assign_sticky([kept, Participant("new", frozenset("x"))], {"x": ["", ""]})) == {
        "old": [0],
        "new": [1],
    }


def test_the_later_generation_has_the_better_claim_and_equal_claims_are_both_void() -> None:
    def claim(name: str, generation: int) -> Participant:
        return Participant(name, frozenset("x"), frozenset({("x", 0)}), generation)

    assert numbers(assign_sticky([claim("a", 3), claim("b", 4)], {"x": [""]})) == {"a": [], "b": [0]}
    assert numbers(assign_sticky([claim("a", 4), claim("b", 4)], {"x": [""]})) == {"a": [], "b": []}
    assert numbers(assign_sticky([claim("a", NO_GENERATION)], {"x": [""]})) == {"a": [0]}


def test_what_a_member_does_not_ask_for_any_more_goes_to_one_who_does() -> None:
    changed = Participant("a", frozenset("y"), frozenset({("x", 0)}), 2)
    other = Participant("b", frozenset("x"))
    shares, rounds = settle([changed, other], {"x": [""], "y": [""]})
    assert (shares, rounds) == ({"a": [("y", 0)], "b": [("x", 0)]}, 2)


def test_protocol_names_let_other_clients_share_the_group() -> None:
    for name in ("average", "room-first", "consistent-hash", "range"):
        assert list(ASSIGNORS[name].protocols)[-1] == "range"
        assert not ASSIGNORS[name].step_by_step
    assert list(ASSIGNORS["cooperative"].protocols) == ["cooperative-sticky"]
    with pytest.raises(SettingError, match="choose one of average"):
        assignor_named("fair")
