"""An error that is kept and raised again must not keep the frames that it went through: they hold requests' buffers."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable

import pytest

from headrace.errors import HeadraceError
from headrace.partitions.partitions import Partitions
from headrace.records.batch import read_header
from headrace.settings.values import log_settings
from headrace.storage.commitlog.log import SharedLog
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.log import TopicPartition
from headrace.storage.segments.log import PartitionedLog
from headrace.storage.segments.store import PartitionedStore
from headrace.virtual.clock import VirtualClock
from headrace.virtual.disk import VirtualDisk
from partitions.led import BROKER, DATA, TOPIC_ID, batch


class Sent(bytearray):
    """A request's bytes, of which can be seen whether anyone still holds them."""


def still_held(append: Callable[[memoryview], object]) -> int:
    """How many of 20 requests that are refused are still in memory afterwards."""
    sent: list[weakref.ref[Sent]] = []
    for _ in range(20):
        request = Sent(batch())
        sent.append(weakref.ref(request))
        with pytest.raises(HeadraceError):
            append(memoryview(request))
        del request
    return sum(each() is not None for each in sent)


@pytest.mark.parametrize("store_type", [PartitionedStore, SharedStore])
def test_appends_that_are_refused_do_not_stay_in_memory(store_type: type[PartitionedStore] | type[SharedStore]) -> None:
    clock = VirtualClock()
    disk = VirtualDisk(clock)
    disk.make_folder(DATA)
    store = store_type(disk, clock, DATA)
    store.open({})
    partitions = Partitions(store, clock, BROKER)
    log = store.create(TopicPartition("orders", 0), TOPIC_ID, log_settings({}, {}))
    assert isinstance(log, PartitionedLog | SharedLog)
    partition = partitions.lead(log, 0, {BROKER: ""})
    log.fail(OSError(errno.EIO, "input/output error", "a file"))
    assert still_held(lambda sent: partition.append(sent, -1)) <= 1
    assert still_held(lambda sent: log.append(sent, read_header(sent), 0)) <= 1
    partitions.drop(partition.topic_partition)
    assert still_held(lambda sent: partition.append(sent, -1)) <= 1
