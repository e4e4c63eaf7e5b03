"""More connections than the system has descriptors: storage has its own, so producing goes on over new segments."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.request
from collections.abc import Callable

from brokers import Broker
from clients.topics import create_topic
from faults import raw
from faults.load import values_of
from proving import proves

OPEN_FILES = 300
PARTITIONS = 20


@proves("G8", "G4")
def test_a_flood_of_connections_takes_no_descriptor_from_storage(fresh_broker: Callable[..., Broker]) -> None:
    limit = ("prlimit", f"--nofile={OPEN_FILES}:{OPEN_FILES}")
    broker = fresh_broker(prefix=limit, settings={"offsets.topic.partitions": 1})
    assert "leaves room for" in broker.stderr()
    create_topic(broker, "t", PARTITIONS, segment_bytes=6000, segment_index_bytes=1024)
    written: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.create_connection(broker.host_port, 30))
        for _ in range(2 * OPEN_FILES):
            opened.enter_context(socket.create_connection(broker.host_port, 30))
        for n in range(20):
            for partition in range(PARTITIONS):
                value = b"%d-%d " % (partition, n) + b"." * 1000
                assert raw.produced(connection, "t", partition, value) == 0
                written[partition].append(value)
        with urllib.request.urlopen(f"{broker.http}/topics/t", timeout=30) as answer:
            assert len(json.load(answer)["partition_list"]) == PARTITIONS
    broker.check_alive()
    assert "Too many open files" not in broker.stderr()
    for partition in (0, PARTITIONS - 1):
        assert values_of(broker, "t", partition, 20) == written[partition]
