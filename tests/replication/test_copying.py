"""Records on their way to followers: one round trip, whole and in order, on both layouts."""

from __future__ import annotations

import pytest

from proving import proves
from replication.scene import Scene


@proves("F2", "G16")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_followers_hold_what_the_leader_does(layout: str, durability: str) -> None:
    scene = Scene(layout=layout, topic={"durability": durability})
    scene.elect(1, (1, 2, 3))
    outcomes = [scene.produce(b"%d" % nth) for nth in range(50)]
    scene.until_answered(*outcomes)
    assert [outcome.offset for outcome in outcomes] == list(range(50))
    scene.settle()
    for broker in scene.alive.values():
        assert broker.values() == [b"%d" % nth for nth in range(50)]
