"""Two thousand partitions on one node: start after a clean stop, idle memory, idle processor time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from brokers import Broker, wait_for
from clients.records import Record
from clients.topics import create_topic
from clients.with_confluent import ConfluentKafka

TOPICS, PARTITIONS = 20, 100
IDLE_S = 10.0


@pytest.mark.long
def test_two_thousand_partitions(fresh_broker: Callable[..., Broker], proof_report: Callable[..., None]) -> None:
    broker = fresh_broker()
    empty_bytes, empty_start_s = broker.resident_bytes(), broker.start_s
    client = ConfluentKafka()
    for topic in range(TOPICS):
        name = create_topic(broker, f"many-{topic}", PARTITIONS)
        client.produce(broker.bootstrap, name, [Record(b"v", partition=n) for n in range(PARTITIONS)])
    broker.restart()
    start_s = broker.start_s
    began_s, used_s = time.monotonic(), broker.cpu_s()
    wait_for("an idle time to have passed", lambda: time.monotonic() - began_s >= IDLE_S, IDLE_S * 2, 0.5)
    broker.check_alive()
    idle_cpu = (broker.cpu_s() - used_s) / (time.monotonic() - began_s)
    proof_report(
        partitions=TOPICS * PARTITIONS,
        start_after_clean_stop_s=round(start_s, 2),
        start_of_an_empty_broker_s=round(empty_start_s, 2),
        processes=len(broker.processes()),
        idle_memory_bytes=broker.resident_bytes(),
        idle_memory_of_its_own_bytes=broker.memory_bytes(),
        memory_of_an_empty_broker_bytes=empty_bytes,
        idle_cpu_share=round(idle_cpu, 4),
    )
    read = client.consume(broker.bootstrap, {f"many-{topic}": 1 for topic in range(TOPICS)})
    assert {len(records) for records in read.values()} == {1}
