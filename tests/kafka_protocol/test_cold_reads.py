"""A topic that the broker did not write itself and that is not in the page cache, read whole over Kafka and HTTP."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import Broker
from headrace.records import kernel
from headrace.records.batch import batches
from headrace.wire import api as apis
from kafka_protocol.raw import Raw, batch_of
from proving import proves

Connect = Callable[[Broker], Raw]
TOPIC = "old"


def evict(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def values(records: bytes | memoryview) -> list[tuple[int, bytes | None]]:
    """Offset and value of every record of the whole batches."""
    found = [record for _, view in batches(memoryview(records)) for record in kernel.records(view)]
    return [(record.offset, record.value) for record in found]


@proves("G4", "J6")
@pytest.mark.parametrize(("count", "size"), [(20_000, 20), (60, 300_000)], ids=["small batches", "large batches"])
def test_old_cold_data_is_served_whole_while_others_are_answered(
    fresh_broker: Callable[..., Broker], connect: Connect, count: int, size: int
) -> None:
    broker = fresh_broker()
    raw = connect(broker)
    raw.create(TOPIC, segment_bytes=str(4 << 20))
    sent = [b"%d " % n + b"x" * size for n in range(count)]
    for first in range(0, count, 500):
        some = sent[first : first + 500]
        for value in some:
            raw.send_produce(TOPIC, batch_of([value]))
        for _ in some:
            raw.receive(apis.PRODUCE, 9)
    assert broker.stop() == 0
    evict(broker.data / TOPIC)
    broker.start()
    reader, other = connect(broker), connect(broker)
    found: list[tuple[int, bytes | None]] = []
    while len(found) < count:
        reader.send_fetch(TOPIC, len(found), wait_ms=5000, partition_max_bytes=8 << 20, max_bytes=8 << 20)
        assert other.call(apis.API_VERSIONS, 2).error_code == 0
        answer = reader.receive(apis.FETCH, 12)[1].responses[0].partitions[0]
        assert answer.error_code == 0
        found += [one for one in values(answer.records) if one[0] >= len(found)]
    assert found == list(enumerate(sent))

    broker.restart()
    evict(broker.data / TOPIC)
    at = count // 2
    url = f"{broker.http}/topics/{TOPIC}/partitions/0/records?offset={at}&count=20&wait_ms=1000&format=binary"
    with urllib.request.urlopen(f"{url}&max_bytes={4 << 20}", timeout=30) as response:
        read = [one for one in values(response.read()) if one[0] >= at]
    assert read[0] == (at, sent[at])
    assert read == list(enumerate(sent))[at : at + len(read)]
