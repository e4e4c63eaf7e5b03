"""The first batch of an idempotent producer that is refused and sent again is not overtaken by its second one."""

from __future__ import annotations

import errno

import pytest

from headrace.errors import NotEnoughReplicas, NotLeader, OutOfOrderSequence, StorageFull
from headrace.partitions.partition import Partition
from headrace.storage import producers
from partitions.led import Led, Outcome, batch, values
from proving import proves

REFUSED = r"producer 9 sent sequence 1, but 0 was refused and comes before it"


@pytest.fixture(params=["partitioned", "shared"])
def led(request: pytest.FixtureRequest) -> Led:
    return Led(request.param)


def send(led: Led, partition: Partition, sequence: int, *, epoch: int = 0, producer_id: int = 9) -> int:
    outcome = Outcome()
    sent = batch(b"%d" % sequence, producer=(producer_id, epoch, sequence))
    led.partitions.submit(partition, sent, -1, 1000, outcome)
    led.partitions.end_turn()
    ((error, offset),) = outcome.calls
    if error is not None:
        raise error
    return offset


def check_order(led: Led, partition: Partition) -> None:
    """The second one is refused until the first one is there."""
    with pytest.raises(OutOfOrderSequence, match=REFUSED):
        send(led, partition, 1)
    assert [send(led, partition, sequence) for sequence in range(3)] == [0, 1, 2]
    assert values(partition.read(0, 1000)) == [b"0", b"1", b"2"]


@proves("J10")
def test_a_batch_refused_for_want_of_replicas_stays_the_first(led: Led) -> None:
    partition = led.lead(min_insync_replicas=2)
    for sequence in (0, 1):
        with pytest.raises(NotEnoughReplicas):
            send(led, partition, sequence)
    assert partition.core is not None
    partition.core.min_isr_changed(1)
    check_order(led, partition)


def test_a_batch_refused_before_the_broker_leads_stays_the_first(led: Led) -> None:
    partition = led.lead()
    core, partition.core = partition.core, None
    with pytest.raises(NotLeader):
        send(led, partition, 0)
    partition.core = core
    check_order(led, partition)


def test_a_batch_that_the_disk_had_no_room_for_stays_the_first(led: Led) -> None:
    partition = led.lead()
    led.disk.fail_write(led.log_path(partition.log), errno.ENOSPC)
    with pytest.raises(StorageFull):
        send(led, partition, 0)
    check_order(led, partition)


def test_a_producer_that_gave_up_the_refused_batch_goes_on_in_its_next_epoch(led: Led) -> None:
    partition = led.lead(min_insync_replicas=2)
    with pytest.raises(NotEnoughReplicas):
        send(led, partition, 3)
    assert partition.core is not None
    partition.core.min_isr_changed(1)
    assert send(led, partition, 0, epoch=1) == 0
    assert send(led, partition, 4, producer_id=10) == 1, "others begin where they like"


def test_only_so_many_refused_producers_are_remembered(led: Led) -> None:
    partition = led.lead(min_insync_replicas=2)
    for producer_id in range(producers.REFUSED_MAX + 1):
        with pytest.raises(NotEnoughReplicas):
            partition.append(memoryview(batch(producer=(producer_id, 0, 0))), -1)
    assert partition.core is not None
    partition.core.min_isr_changed(1)
    assert send(led, partition, 1, producer_id=0) == 0, "the oldest is forgotten"
    with pytest.raises(OutOfOrderSequence):
        send(led, partition, 1, producer_id=1)
