"""What a replica reports of itself when nobody leads holds over a crash of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cluster.image import NO_LEADER, Image, PartitionState, Topic
from headrace.cluster.membership import ClusterAccess
from headrace.cluster.replica_reports import ReplicaReports
from partitions.led import BROKER, Led, topic_id
from proving import proves

TOPIC = "orders"


@proves("J6")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_start_that_no_checkpoint_holds_yet_is_not_reported(layout: str) -> None:
    """Who is elected by it would come back with a lower one: its key has to say where the others begin."""
    led = Led(layout)
    leading = led.lead(TOPIC)
    for number in range(3):
        led.produce(leading, b"%d" % number)
    log = leading.log
    log.sync_soon()
    led.clock.advance(1.0)
    led.partitions.follow(log, 1, NO_LEADER)
    state = PartitionState(0, NO_LEADER, 1, (BROKER,), (BROKER,))
    topic = Topic(TOPIC, topic_id(TOPIC), (state,))
    view: Any = SimpleNamespace(image=Image("/headrace/c/"))
    member: Any = SimpleNamespace(broker=SimpleNamespace(id=BROKER, incarnation="i"))
    nobody: Any = None
    reports = ReplicaReports(ClusterAccess(nobody, view, member, led.clock, nobody), led.partitions)

    def reported() -> tuple[int, int]:
        report = reports._report_of(topic, state)
        assert report is not None
        return report.start, report.end

    told: list[object] = []
    log.delete_before(2, told.append)
    assert (log.start_offset, told) == (2, [])
    assert reported() == (0, 3)
    led.clock.advance(5.0)
    assert told == [None]
    assert reported() == (2, 3)
