"""What `headrace cluster status` and `describe` make of what a broker says."""

from __future__ import annotations

from headrace.cli.health import read
from headrace.client.connection.metadata import Broker, MetadataSnapshot, Partition, Topic
from headrace.ports.network import Address


def topology(*partitions: Partition) -> MetadataSnapshot:
    return MetadataSnapshot("c", -1, {}, {"t": Topic("t", b"t" * 16, False, partitions)}, {})


def test_a_partition_without_a_key_is_told_from_one_without_a_leader() -> None:
    health = read(topology(Partition(0, -1, 3, (1, 2), (1,), ()), Partition(1, -1, -1, (), (), ())))
    assert health.leaderless == ["t-0", "t-1: its key is missing in coordination, put it back"]
    assert not health.is_whole


def test_internal_partitions_below_their_factor_are_named_and_no_fault() -> None:
    offsets = Topic("o", b"o" * 16, True, (Partition(0, 1, 0, (1,), (1,), ()), Partition(1, 1, 0, (1, 2), (1, 2), ())))
    found = MetadataSnapshot("c", 1, {1: Broker(1, Address("h", 1), "")}, {"o": offsets}, {})
    assert read(found, 2).below_factor == ["o-0: 1 of 2 replicas"]
    assert read(found, 1).below_factor == []
    assert read(found, 2).is_whole
