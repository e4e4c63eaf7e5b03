"""What `headrace cluster status` and `describe` make of what a broker says."""

from __future__ import annotations

from dataclasses import replace

from headrace.cli.health import read
from headrace.client.connection.metadata import Broker, MetadataSnapshot, Partition, Topic
from headrace.ports.network import Address
from proving import proves


def topology(*partitions: Partition) -> MetadataSnapshot:
    return MetadataSnapshot("c", -1, {}, {"t": Topic("t", b"t" * 16, False, partitions)}, {})


def test_a_partition_without_a_key_is_told_from_one_without_a_leader() -> None:
    health = read(topology(Partition(0, -1, 3, (1, 2), (1,), ()), Partition(1, -1, -1, (), (), ())))
    assert health.leaderless == ["t-0: waits for broker 1", "t-1: its key is missing in coordination, put it back"]
    assert not health.is_whole


@proves("U1")
def test_brokers_that_are_down_are_told_and_who_waits_for_them() -> None:
    found = replace(
        topology(
            Partition(0, 1, 0, (1, 2, 3), (1,), ()),
            Partition(1, -1, 0, (2, 3), (2, 3), ()),
            Partition(2, -1, 0, (1, 2, 3), (1,), ()),
            Partition(3, -1, 0, (1,), (1,), ()),
        ),
        controller_id=1,
        brokers={1: Broker(1, Address("h", 1), ""), 4: Broker(4, Address("h", 4), "")},
    )
    health = read(found, silent={4})
    assert [(row["broker"], row["state"], row["replicas"]) for row in health.brokers] == [
        (1, "up", 3), (2, "down", 3), (3, "down", 3), (4, "silent", 0),
    ]  # fmt: skip
    assert health.down == [2, 3]
    assert health.leaderless == ["t-1: waits for broker 2 or 3", "t-2: waits for brokers 2 and 3", "t-3"]


def test_internal_partitions_below_their_factor_are_named_and_no_fault() -> None:
    offsets = Topic("o", b"o" * 16, True, (Partition(0, 1, 0, (1,), (1,), ()), Partition(1, 1, 0, (1, 2), (1, 2), ())))
    found = MetadataSnapshot("c", 1, {1: Broker(1, Address("h", 1), "")}, {"o": offsets}, {})
    assert read(found, 2).below_factor == ["o-0: 1 of 2 replicas"]
    assert read(found, 1).below_factor == []
    assert read(found, 2).is_whole
