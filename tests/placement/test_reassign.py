from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cluster.image import Image
from headrace.errors import InvalidAssignment, InvalidReplication, InvalidRequest, UnknownPartition
from headrace.placement.moves import begin_move
from headrace.placement.plans import (
    Reassignment,
    ReplicaMove,
    Summary,
    drain,
    move,
    rebalance,
)
from headrace.placement.ring import Ring
from headrace.placement.spread import Site, spread
from hypotheses import examples
from placement.placed import Placement, carried_out, image_of, replicas_in
from proving import proves

properties = examples(60)


def counts(image: Image, topic: str | None = None, *, leaders: bool = False) -> list[int]:
    """Replicas, or preferred leaderships, of each live broker."""
    held: Counter[int] = Counter()
    for name, partitions in replicas_in(image).items():
        if topic in (None, name):
            for replicas in partitions:
                held.update(replicas[:1] if leaders else replicas)
    return [held[broker] for broker in image.brokers if broker not in image.controls.draining]


def spans(loads: Sequence[int]) -> int:
    return max(loads) - min(loads)


def begun(image: Image, plan: Reassignment) -> Image:
    """The image with every move of the plan begun and none ended."""
    topics = dict(image.topics)
    for item in plan.moves:
        states = list(topics[item.topic].partitions)
        states[item.partition] = begin_move(states[item.partition], item.after)
        topics[item.topic] = replace(topics[item.topic], partitions=tuple(states))
    return replace(image, topics=topics)


@st.composite
def placements(draw: st.DrawFn, brokers: int, replicas: int | None = None) -> Placement:
    topics = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        factor = replicas or draw(st.integers(1, min(3, brokers)))
        choice = st.lists(st.integers(1, brokers), min_size=factor, max_size=factor, unique=True)
        topics[name] = draw(st.lists(choice, min_size=1, max_size=9))
    return topics


def even(brokers: int, partitions: int, replicas: int = 3) -> Placement:
    return {"t": spread(partitions, replicas, [Site(n) for n in range(1, brokers + 1)])}


@properties
@given(st.data())
def test_a_rebalanced_cluster_is_even_and_stays_as_it_is(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(1, 6))
    image = image_of(range(1, brokers + 1), data.draw(placements(brokers)))
    after = carried_out(image, rebalance(image))
    for name, partitions in replicas_in(after).items():
        assert all(len(set(replicas)) == len(replicas) for replicas in partitions)
        assert list(map(len, partitions)) == list(map(len, replicas_in(image)[name]))
        assert spans(counts(after, name)) <= 1
        assert spans(counts(after, name, leaders=True)) <= 1
    assert spans(counts(after)) <= 1
    assert rebalance(after) == Reassignment()
    assert rebalance(begun(image, rebalance(image))) == Reassignment()


@properties
@given(st.data())
def test_leaders_are_even_over_all_topics_too(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(2, 6))
    image = image_of(range(1, brokers + 1), data.draw(placements(brokers, replicas=2)))
    assert spans(counts(carried_out(image, rebalance(image)), leaders=True)) <= 1


@properties
@given(st.data())
def test_racks_come_before_evenness(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(2, 7))
    racks = {n: data.draw(st.sampled_from(["", "a", "b", "c"])) for n in range(1, brokers + 1)}
    image = image_of(racks, data.draw(placements(brokers)), racks=racks)
    after = carried_out(image, rebalance(image))
    known = {rack or str(broker) for broker, rack in racks.items()}
    for partitions in replicas_in(after).values():
        for replicas in partitions:
            assert len({racks[broker] or str(broker) for broker in replicas}) == min(len(replicas), len(known))
    assert rebalance(after) == Reassignment()


@pytest.mark.parametrize("replicas", [2, 3])
def test_racks_of_one_size_are_even_as_well(replicas: int) -> None:
    racks = {n: "abc"[n % 3] for n in range(1, 10)}
    crowded = [[1, 2, 3][:replicas] for _ in range(30)]
    after = carried_out(image := image_of(racks, {"t": crowded}, racks=racks), rebalance(image))
    assert spans(counts(after)) <= 1
    assert spans(counts(after, leaders=True)) <= 1
    assert all(len({racks[broker] for broker in held}) == replicas for held in replicas_in(after)["t"])


@proves("J3")
def test_replicas_leave_a_host_that_they_share() -> None:
    hosts = {1: "x", 2: "x", 3: "y", 4: "y"}
    image = image_of(hosts, {"t": [[1, 2], [3, 4], [1, 3]]}, hosts=hosts)
    after = replicas_in(carried_out(image, rebalance(image)))["t"]
    assert all(len({hosts[broker] for broker in replicas}) == 2 for replicas in after)
    assert set(after[2]) == {1, 3}


@pytest.mark.parametrize("brokers", [3, 5, 9])
def test_a_broker_that_joins_takes_its_share_and_nothing_else_moves(brokers: int) -> None:
    image = image_of(range(1, brokers + 2), even(brokers, 10 * brokers * (brokers + 1)))
    plan = rebalance(image)
    share = 30 * brokers
    assert plan.summary().replicas == share
    assert all(set(item.added) <= {brokers + 1} for item in plan.moves)
    assert counts(carried_out(image, plan))[-1] == share


@properties
@given(st.data())
def test_no_more_moves_than_brokers_have_too_much(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(2, 6))
    topics = {"t": data.draw(placements(brokers))["a"]}
    image = image_of(range(1, brokers + 1), topics)
    plan = rebalance(image)
    fair = sorted(counts(carried_out(image, plan)))
    too_much = sum(max(0, load - share) for load, share in zip(sorted(counts(image)), fair, strict=True))
    assert plan.summary().replicas == too_much


def test_what_is_even_stays_where_it_is() -> None:
    assert rebalance(image_of(range(1, 6), even(5, 35))) == Reassignment()


@proves("L1")
def test_topics_on_the_ring_go_where_the_ring_says_and_others_make_room() -> None:
    topics: Placement = {"r": [[1, 2]] * 40, "s": [[1, 2]] * 40}
    image = image_of(range(1, 6), topics, ring={"r"})
    after = carried_out(image, rebalance(image))
    ring = Ring([Site(n) for n in range(1, 6)])
    assert replicas_in(after)["r"] == [ring.replicas_of("r", n, 2) for n in range(40)]
    assert spans(counts(after, "s")) <= 1
    assert rebalance(after) == Reassignment()
    by_default = replace(image, topics={name: replace(topic, overrides={}) for name, topic in image.topics.items()})
    assert replicas_in(carried_out(image, rebalance(by_default, default="ring")))["r"] == replicas_in(after)["r"]


@proves("L1")
@pytest.mark.parametrize("brokers", [3, 6, 12])
def test_a_topic_on_the_ring_moves_one_in_n_when_brokers_come_and_are_drained(brokers: int) -> None:
    ring = Ring([Site(n) for n in range(brokers)])
    before: Placement = {"r": [ring.replicas_of("r", n, 3) for n in range(300)]}
    joined = image_of(range(brokers + 1), before, ring={"r"})
    plan = rebalance(joined)
    assert all(set(item.added) <= {brokers} for item in plan.moves)
    assert 0 < plan.summary().replicas <= 1.6 * 900 / (brokers + 1)
    back = drain(carried_out(joined, plan), brokers)
    assert replicas_in(carried_out(joined, back))["r"] == replicas_in(joined)["r"]
    assert back.summary().replicas == plan.summary().replicas


@proves("L3")
@properties
@given(st.data())
def test_a_drained_broker_is_left_with_nothing_and_nothing_else_moves(data: st.DataObject) -> None:
    brokers = data.draw(st.integers(4, 7))
    ring = data.draw(st.sets(st.sampled_from("abcd")))
    racks = {n: data.draw(st.sampled_from(["", "a", "b"])) for n in range(1, brokers + 1)}
    image = image_of(racks, data.draw(placements(brokers)), racks=racks, ring=ring)
    gone = data.draw(st.integers(1, brokers))
    plan = drain(image, gone)
    after = replicas_in(carried_out(image, plan))
    assert all(gone not in replicas for partitions in after.values() for replicas in partitions)
    assert all(gone in item.before and gone not in item.added for item in plan.moves)
    assert all(len(set(item.after)) == len(item.before) for item in plan.moves)
    assert all(item.removed == (gone,) for item in plan.moves if item.topic not in ring)
    assert drain(carried_out(image, plan), gone) == Reassignment()


@proves("L3")
def test_the_work_of_a_drained_broker_is_shared_by_the_others() -> None:
    image = image_of(range(1, 6), even(5, 60))
    plan = drain(image, 3)
    assert plan.summary() == Summary(partitions=36, replicas=36, leaders=12, copied_bytes=None)
    after = replicas_in(carried_out(image, plan))
    assert Counter(
        broker for partitions in after.values() for replicas in partitions for broker in replicas
    ) == dict.fromkeys((1, 2, 4, 5), 45)
    assert Counter(replicas[0] for partitions in after.values() for replicas in partitions) == dict.fromkeys(
        (1, 2, 4, 5), 15
    )


@proves("L3")
def test_a_broker_can_be_drained_in_parts() -> None:
    image = image_of(range(1, 6), even(5, 60))
    parts = 0
    while plan := drain(image, 3, at_most=10).moves:
        assert len(plan) <= 10
        image = carried_out(image, Reassignment(plan))
        parts += 1
    assert parts == 4
    assert spans(counts(image)[:2] + counts(image)[3:]) <= 1


@proves("L3")
def test_a_draining_broker_gets_nothing_until_it_is_no_longer_draining() -> None:
    image = image_of(range(1, 5), even(4, 24, 2), draining={2})
    after = carried_out(image, rebalance(image))
    assert all(2 not in replicas for replicas in replicas_in(after)["t"])
    assert spans(counts(after)) <= 1
    assert rebalance(after) == Reassignment()
    assert rebalance(image_of(range(1, 5), replicas_in(after))).summary().replicas == 12


def test_a_broker_that_is_gone_for_good_can_be_drained() -> None:
    image = image_of([1, 2, 3], {"t": [[1, 4], [4, 2], [2, 3]], "r": [[4, 1]]}, ring={"r"})
    after = replicas_in(carried_out(image, drain(image, 4)))
    assert all(4 not in replicas for partitions in after.values() for replicas in partitions)
    assert after["t"][2] == (2, 3)


def test_a_broker_that_cannot_be_emptied_is_not_drained() -> None:
    image = image_of([1, 2, 3], {"t": [[1, 2, 3]]})
    with pytest.raises(InvalidReplication, match=r"3 replicas, and only brokers \[1, 2\]"):
        drain(image, 3)
    with pytest.raises(InvalidRequest, match="no broker 9"):
        drain(image, 9)


@proves("L6")
@pytest.mark.parametrize("ring", [set(), {"t"}])
def test_nothing_is_moved_away_from_a_broker_that_is_down(ring: set[str]) -> None:
    """The orphan case: the ring of the live brokers points elsewhere, and the partition waits for its broker."""
    image = image_of([2, 3, 4], {"t": [[1], [1, 2]], "other": [[2, 3]] * 6}, ring=ring)
    plan = rebalance(image)
    assert {item.topic for item in plan.moves} == {"other"}
    assert rebalance(carried_out(image, plan)) == Reassignment()


def test_one_partition_is_moved_where_the_operator_says() -> None:
    image = image_of([1, 2, 3, 4], {"t": [[1, 2], [2, 1]]}, draining={4})
    plan = move(image, "t", 1, (3, 2), sizes={("t", 1): 700})
    assert plan.moves == (ReplicaMove("t", 1, (2, 1), (3, 2), 700),)
    assert (plan.moves[0].added, plan.moves[0].removed) == ((3,), (1,))
    assert plan.summary() == Summary(partitions=1, replicas=1, leaders=1, copied_bytes=700)
    assert move(image, "t", 1, (2, 1)) == Reassignment()
    assert move(image, "t", 1, (1, 2)).summary() == Summary(partitions=1, replicas=0, leaders=1, copied_bytes=0)
    for replicas, words in (([], "at least one"), ([1, 1], "differ"), ([1, 9], "broker 9"), ([4], "draining")):
        with pytest.raises(InvalidAssignment, match=words):
            move(image, "t", 0, replicas)
    with pytest.raises(UnknownPartition, match="partition 2"):
        move(image, "t", 2, (1,))


def test_the_bytes_of_a_plan_are_told_when_all_sizes_are_known() -> None:
    image = image_of([1, 2, 3], {"t": [[1, 2], [1, 2], [1, 2]]})
    sizes = {("t", n): 10 for n in range(3)}
    assert rebalance(image, sizes=sizes).summary().copied_bytes == 20
    assert rebalance(image).summary().copied_bytes is None
