"""A group of 1,000 members of the consumer protocol is not computed anew for each heartbeat."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

from groups.consumers import Consumer, ConsumerScene, settle
from groups.scene import LIMITS
from headrace.groups.limits import ConsumerLimits
from proving import proves

MEMBERS = 1000


def group_of(members: int) -> tuple[ConsumerScene, list[Consumer]]:
    scene = ConsumerScene(limits=replace(LIMITS, consumer=ConsumerLimits(max_size=members)))
    scene.topic("t", 2 * members)
    consumers = [Consumer(scene, ("t",)) for _ in range(members)]
    for each in consumers:
        each.send()
    scene.turn()
    settle(*consumers)
    return scene, consumers


def calls_of_a_beat(member: Consumer) -> int:
    """Functions that are called for one heartbeat that brings nothing new."""
    count = 0

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        member.beat()
    finally:
        sys.setprofile(None)
    return count


@proves("N1")
def test_a_heartbeat_costs_the_same_however_many_members_there_are() -> None:
    _, few = group_of(2)
    scene, many = group_of(MEMBERS)
    assert {len(each.partitions) for each in many} == {2}
    epoch = scene.described().group_epoch
    assert calls_of_a_beat(many[-1]) == calls_of_a_beat(few[-1])
    assert scene.described().group_epoch == epoch
