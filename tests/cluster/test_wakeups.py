"""What no new image tells of is noticed all the same: a lease that stands again, a log that was created late."""

from __future__ import annotations

import asyncio
import errno

from cluster.participants import Cluster, Machine, run
from headrace.cluster import keys
from headrace.cluster.image import NO_LEADER, PartitionState, Topic, encode_partition, encode_topic
from headrace.ports.coordination import Put
from proving import proves

TOPIC = Topic("t", b"t" * 16, ())
UNLED = PartitionState(0, NO_LEADER, 3, (9,), (1,), incarnations={9: "gone"})


async def create_unled(machine: Machine) -> None:
    """A topic whose only replica is here, and has to be elected from what it reports."""
    prefix = machine.participant.prefix
    actions = [
        Put(keys.topic_key(prefix, "t"), encode_topic(TOPIC, 1)),
        Put(keys.partition_key(prefix, "t", 0), encode_partition(TOPIC.id, UNLED)),
    ]
    await machine.process.run(machine.participant.coordination.transact([], actions))


@proves("G14")
def test_a_report_that_was_due_while_the_lease_had_lapsed_is_written_when_it_stands_again() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        membership = machine.participant.membership
        assert membership is not None
        membership._deadline = float("-inf")
        await create_unled(machine)
        await cluster.until(lambda: "t" in machine.participant.view.image.topics)
        assert not membership.standing
        await cluster.until(lambda: cluster.leader() is machine)

    run(1, body)


@proves("G14")
def test_a_log_that_could_only_be_created_later_is_reported_then() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        machine.disk.fail_open("/data/t/t-0/partition")
        await create_unled(machine)
        await cluster.until(lambda: "t" in machine.participant.view.image.topics)
        assert machine.participant.partitions.find_replica("t", 0) is None
        await cluster.until(lambda: cluster.leader() is machine)

    run(1, body)


def test_a_log_that_cannot_be_created_is_tried_again_less_and_less_often() -> None:
    async def body(cluster: Cluster) -> None:
        machine = cluster[1]
        await machine.start()
        tries = 0

        def trouble(call: str, path: str) -> int:
            nonlocal tries
            if (call, path) != ("open", "/data/t/t-0/partition"):
                return 0
            tries += 1
            return errno.ENOSPC

        machine.disk.trouble = trouble
        await create_unled(machine)
        await asyncio.sleep(60)
        assert 5 <= tries <= 20
        assert machine.disk.list("/data/t") == []
        machine.disk.mend()
        await cluster.until(lambda: cluster.leader() is machine)

    run(1, body)
