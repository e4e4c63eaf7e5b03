"""What `headrace cluster status` makes of what a broker says."""

from __future__ import annotations

from headrace.cli.local.status import read
from headrace.client.topology import Partition, Topic, Topology


def topology(*partitions: Partition) -> Topology:
    return Topology("c", -1, {}, {"t": Topic("t", b"t" * 16, False, partitions)}, {})


def test_a_partition_without_a_key_is_told_from_one_without_a_leader() -> None:
    health = read(topology(Partition(0, -1, 3, (1, 2), (1,), ()), Partition(1, -1, -1, (), (), ())))
    assert health.leaderless == ["t-0", "t-1: its key is missing in coordination, put it back"]
    assert not health.is_whole
