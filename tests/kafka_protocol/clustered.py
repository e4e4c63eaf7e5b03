"""Three brokers in three racks that the tests of a run share; each test finds all of them alive and in sync.

cluster.raw(2)                  a raw connection to broker 2
cluster.create("t", [[1, 2, 3]], durability="disk")   a topic with its replicas given, one list per partition
cluster.state("t")              leader, epoch, in-sync set of its partitions, as Metadata says
"""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brokers import Broker, wait_for
from clusters import BrokerCluster
from headrace.wire import api as apis
from headrace.wire.message import Message
from kafka_protocol.raw import Raw

LEASE_MS = 2000
OFFSETS_PARTITIONS = 6


@dataclass(frozen=True, slots=True)
class Seen:
    leader: int
    epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...]
    error: int


class SharedCluster:
    def __init__(self, folder: Path) -> None:
        self._cluster = BrokerCluster(
            folder,
            brokers=3,
            etcd=1,
            settings={
                "broker.lease.ms": LEASE_MS,
                "replica.lag.time.max.ms": 1000,
                "offsets.topic.partitions": OFFSETS_PARTITIONS,
                "group.initial.rebalance.delay.ms": 50,
            },
        )
        for broker in self._cluster.brokers:
            broker.settings["rack"] = f"rack-{broker.settings['node.id']}"
        self.etcd = self._cluster.etcd
        self.bootstrap = self._cluster.bootstrap
        self._raws: list[Raw] = []
        self._cluster.start()

    def broker(self, number: int) -> Broker:
        return self._cluster.brokers[number - 1]

    def pause(self, number: int) -> None:
        self._cluster.pause(number - 1)

    def resume(self, number: int) -> None:
        self._cluster.resume(number - 1)

    def raw(self, number: int) -> Raw:
        raw = Raw(self.broker(number).host_port)
        self._raws.append(raw)
        return raw

    def begin_test(self) -> None:
        """On a machine with much else to do a broker may lose its registration for a moment."""
        wait_for("three brokers", lambda: all(len(self._brokers(number)) == 3 for number in (1, 2, 3)))

    def _brokers(self, asked_of: int) -> list[Any]:
        raw = Raw(self.broker(asked_of).host_port)
        found: list[Any] = raw.call(apis.DESCRIBE_CLUSTER, 1, endpoint_type=1).brokers
        raw.close()
        return found

    def end_test(self) -> None:
        for raw in self._raws:
            raw.close()
        self._raws.clear()
        for broker in self._cluster.brokers:
            if broker.process is None:
                broker.start()
            broker.check_alive()

    def close(self) -> None:
        self._cluster.close()

    def said(self) -> str:
        return self._cluster.said()

    def create(self, topic: str, replicas: Sequence[Sequence[int]], **configs: str) -> None:
        asked = Message(
            name=topic,
            num_partitions=-1,
            replication_factor=-1,
            assignments=[
                Message(partition_index=index, broker_ids=list(brokers)) for index, brokers in enumerate(replicas)
            ],
            configs=[Message(name=name.replace("_", "."), value=value) for name, value in configs.items()],
        )
        answer = self.raw(1).call(apis.CREATE_TOPICS, 7, topics=[asked], timeout_ms=5000, validate_only=False)
        assert answer.topics[0].error_code == 0, answer.topics[0].error_message
        self.wait_in_sync(topic)

    def metadata(self, asked_of: int, topic: str) -> Any:
        return self.raw(asked_of).call(
            apis.METADATA,
            12,
            topics=[Message(name=topic, topic_id=bytes(16))],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )

    def state(self, topic: str, asked_of: int = 1) -> list[Seen]:
        found = sorted(self.metadata(asked_of, topic).topics[0].partitions, key=lambda each: each.partition_index)
        return [
            Seen(
                each.leader_id,
                each.leader_epoch,
                tuple(each.replica_nodes),
                tuple(each.isr_nodes),
                tuple(each.offline_replicas),
                each.error_code,
            )
            for each in found
        ]

    def topic_id(self, topic: str) -> bytes:
        found: bytes = self.metadata(1, topic).topics[0].topic_id
        return found

    def wait_in_sync(self, topic: str) -> None:
        """Every live broker knows the topic, and all replicas are in sync."""
        for number in (1, 2, 3):
            if self.broker(number).process is None:
                continue

            def all_in_sync(number: int = number) -> bool:
                with contextlib.suppress(OSError, EOFError):
                    states = self.state(topic, number)
                    return bool(states) and all(
                        each.leader > 0 and set(each.in_sync) == set(each.replicas) for each in states
                    )
                return False

            wait_for(f"broker {number} to see {topic} in sync", all_in_sync, 30.0, 0.05)

    def fetches(self, number: int) -> int:
        """How many Fetch requests the broker has answered."""
        with urllib.request.urlopen(self.broker(number).http + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        wanted = 'headrace_request_seconds_count{api="Fetch"} '
        return next((int(float(line[len(wanted) :])) for line in lines if line.startswith(wanted)), 0)
