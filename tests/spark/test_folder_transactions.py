"""A data folder with transactions as `format("headrace-log")` reads it: which of them are rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from brokers import Broker
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.spark.log_options import parse
from headrace.spark.log_plan import LogProblem, plan
from headrace.spark.log_reader import read_split
from headrace.system.disk import SystemDisk
from proving import proves


def rows(folder: str, **given: str) -> list[bytes]:
    options = parse({"path": folder, "topic": "t", **given})
    found: list[bytes] = []
    for split in plan(SystemDisk(), options).splits:
        for each in read_split(split, ["value"], isolation=options.isolation):
            assert not isinstance(each, LogProblem), each
            found += each["value"].to_pylist()
    return found


@proves("T2")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_folder_shows_what_is_committed_unless_asked(fresh_broker: Callable[..., Broker], layout: str) -> None:
    broker = fresh_broker(settings={"log.layout": layout})
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "t", partitions=1)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "one", "linger.ms": 0})
    producer.init_transactions(30)
    for value in (b"aborted", b"committed", b"open"):
        producer.begin_transaction()
        producer.produce("t", value, partition=0)
        assert producer.flush(30) == 0
        if value == b"aborted":
            producer.abort_transaction(30)
        elif value == b"committed":
            producer.commit_transaction(30)
    broker.kill()
    folder = str(broker.data)
    assert rows(folder) == [b"committed"]
    assert rows(folder, isolation="uncommitted") == [b"aborted", b"committed", b"open"]
    assert rows(folder, isolation="aborted") == [b"aborted"]
    assert rows(folder, isolation="open") == [b"open"]
