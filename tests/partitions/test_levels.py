"""Reliability per topic: every combination of point and policy answers at the offset that it names, and no earlier."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidConfig
from headrace.partitions import levels
from headrace.partitions.leader_core import LeaderCore
from headrace.partitions.levels import Reliability
from headrace.settings.values import log_settings
from proving import proves

RACKS = {1: "a", 2: "a", 3: "b", 4: "b", 5: "c"}
POSITIONS = {  # queued, sent, received, written, flushed
    2: (90, 80, 70, 60, 50),
    3: (89, 79, 69, 59, 49),
    4: (88, 40, 30, 20, 10),
    5: (-1, -1, -1, -1, -1),
}


def group(*isr: int, least: int = 1) -> LeaderCore:
    """A leader at 85 with four followers, of which the last has told nothing."""
    core = LeaderCore(1, 0, 0, 0, dict.fromkeys(isr or (1, 2, 3, 4), "run"), least, replicas=RACKS)
    core.moved(85)
    for broker, (queued, sent, received, written, flushed) in POSITIONS.items():
        follower = core.subscribed(broker, "run", 0, 0.0)
        follower.queued, follower.sent = queued, sent
        core.position_reported(follower, received, written, flushed, 85, 0.0)
    return core


@proves("F1")
@pytest.mark.parametrize(
    ("policy", "point", "answered"),
    [
        ("none", "flushed", 85),
        ("all", "none", 85),
        ("one", "queued", 85),
        ("one", "sent", 80),
        ("one", "received", 70),
        ("one", "written", 60),
        ("one", "flushed", 50),
        ("majority", "queued", 85),
        ("majority", "sent", 79),
        ("majority", "received", 69),
        ("majority", "written", 59),
        ("majority", "flushed", 49),
        ("all", "queued", 85),
        ("all", "sent", 40),
        ("all", "received", 30),
        ("all", "flushed", 10),
        ("racks", "received", 69),
        ("racks", "flushed", 49),
    ],
)
def test_an_answer_comes_where_point_and_policy_say(policy: str, point: str, answered: int) -> None:
    assert levels.acknowledged(group(), Reliability(point, policy), 85, RACKS) == answered


def test_all_is_never_answered_while_too_few_are_in_sync() -> None:
    core = group(1, 2, least=3)
    assert levels.acknowledged(core, Reliability("received", "all"), 85, RACKS) == -1
    assert levels.acknowledged(core, Reliability("received", "one"), 85, RACKS) == 70


def test_flushed_waits_for_the_leaders_own_sync_too() -> None:
    assert levels.acknowledged(group(1), Reliability("flushed", "all"), 7, RACKS) == 7


def test_the_leader_stands_for_its_room_where_no_follower_does() -> None:
    racks = {1: "x", 2: "a", 3: "b", 4: "b", 5: "c"}
    assert levels.acknowledged(group(), Reliability("written", "racks"), 85, racks) == 60
    assert not levels.stands_elsewhere(group(), {})


def test_in_the_leaders_room_the_best_follower_counts() -> None:
    racks = {1: "a", 4: "a", 5: "a", 2: "b", 3: "b"}
    assert levels.acknowledged(group(), Reliability("received", "racks"), 85, racks) == 30


def test_a_majority_of_one_is_the_leader() -> None:
    core = LeaderCore(1, 0, 0, 0, {1: "run"}, 1, replicas=(1,))
    core.moved(85)
    assert levels.acknowledged(core, Reliability("written", "majority"), 85, {}) == 85


def test_all_is_never_answered_while_a_member_has_told_nothing() -> None:
    assert levels.acknowledged(group(1, 2, 7), Reliability("received", "all"), 85, RACKS) == -1


@proves("F1", "G7")
def test_four_levels_have_names_and_say_what_they_lose() -> None:
    assert [(level.name, level.durability, level.point, level.policy, level.is_lossy) for level in levels.NAMED] == [
        ("page-cache", "os", "none", "none", True),
        ("local-disk", "disk", "none", "none", True),
        ("one-replica", "disk", "flushed", "one", True),
        ("all-replicas", "disk", "flushed", "all", False),
    ]
    assert all(level.loses and level.unavailable for level in levels.NAMED)


def test_a_named_level_stands_for_three_settings_unless_they_are_given() -> None:
    named = log_settings({}, {"reliability": "one-replica"})
    assert (named.durability, named.replication_point, named.replication_policy) == ("disk", "flushed", "one")
    own = log_settings({}, {"reliability": "one-replica", "durability": "os"})
    assert (own.durability, own.replication_point, own.replication_policy) == ("os", "flushed", "one")
    default = log_settings({"reliability": "local-disk"}, {})
    assert (default.durability, default.replication_policy) == ("disk", "none")
    with pytest.raises(InvalidConfig, match="'best' is not one of"):
        log_settings({}, {"reliability": "best"})


@pytest.mark.parametrize(
    ("durability", "point", "policy", "is_other", "is_lossy"),
    [
        ("os", "auto", "all", False, False),
        ("disk", "auto", "all", False, False),
        ("os", "written", "all", False, False),
        ("disk", "written", "all", True, True),
        ("os", "flushed", "all", True, False),
        ("os", "received", "all", True, True),
        ("os", "auto", "majority", True, True),
    ],
)
def test_only_what_is_weaker_than_the_watermark_is_lossy(
    durability: str, point: str, policy: str, is_other: bool, is_lossy: bool
) -> None:
    given = {"durability": durability, "replication.point": point, "replication.policy": policy}
    assert (levels.weaker_or_stronger(log_settings({}, given)) is not None) == is_other
    assert levels.is_lossy(durability, point, policy) == is_lossy
