"""Faults on a cluster of processes, drawn by a seed: kills, pauses, clean restarts, loss of etcd, cut and slow links.

A round begins one fault, or two on different parts, holds them for a drawn time, mends them, etcd first, and waits
until records are acknowledged again: that a cluster recovers is demanded, how fast is reported.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from brokers import wait_for
from clusters import BrokerCluster, NamespacedCluster
from headrace.storage.log import TopicPartition
from headrace.storage.offline.report import DumpedBatch
from headrace.storage.offline.verify import dump
from headrace.system.disk import SystemDisk

RECORDS_AFTER: Final = 200
RECOVER_DEADLINE_S: Final = 120.0
TWO_AT_ONCE: Final = 0.3
SLOW: Final = ("delay", "30ms", "10ms", "loss", "2%")


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    part: str
    """What it strikes: nothing is struck twice at a time."""
    begin: Callable[[], object]
    end: Callable[[], object]
    etcd: bool = False


class Chaos:
    def __init__(self, cluster: BrokerCluster, acknowledged: Callable[[], int], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.left_out: set[str] = set()
        self._cluster = cluster
        self._acknowledged = acknowledged
        self._rng = random.Random(seed)
        self._slows = isinstance(cluster, NamespacedCluster) and cluster.network.can_slow()
        if not self._slows:
            self.left_out.add("slow links: they need namespaces, and a kernel with netem")

    def faults(self) -> list[Fault]:
        found = []
        for place in range(len(self._cluster.brokers)):
            found += self._of_broker(place)
        for place in range(len(self._cluster.etcd.nodes)):
            found += self._of_etcd(place)
        if len(self._cluster.etcd.nodes) > 1:
            found.append(
                Fault(
                    "all etcd nodes killed",
                    "etcd",
                    self._cluster.etcd.kill_all,
                    self._cluster.etcd.start_all,
                    etcd=True,
                )
            )
        return found

    def _of_broker(self, place: int) -> list[Fault]:
        cluster, broker, part = self._cluster, self._cluster.brokers[place], f"b{place + 1}"
        found = [
            Fault("broker killed", part, broker.kill, broker.start),
            Fault("broker paused", part, lambda: cluster.pause(place), lambda: cluster.resume(place)),
            Fault("broker stopped cleanly", part, broker.stop, broker.start),
        ]
        if isinstance(cluster, NamespacedCluster):
            network = cluster.network
            found.append(Fault("broker cut off", part, lambda: network.cut(part), lambda: network.mend(part)))
            if self._slows:
                found.append(
                    Fault(
                        "broker on a slow link", part, lambda: network.slow(part, *SLOW), lambda: network.unslow(part)
                    )
                )
        return found

    def _of_etcd(self, place: int) -> list[Fault]:
        etcd, part = self._cluster.etcd, f"e{place + 1}"
        found = [
            Fault("etcd node killed", part, lambda: etcd.kill(place), lambda: etcd.start(place), etcd=True),
            Fault("etcd node paused", part, lambda: etcd.pause(place), lambda: etcd.resume(place), etcd=True),
        ]
        if isinstance(self._cluster, NamespacedCluster):
            network = self._cluster.network
            found.append(
                Fault("etcd node cut off", part, lambda: network.cut(part), lambda: network.mend(part), etcd=True)
            )
        return found

    def draw(self) -> list[Fault]:
        first = self._rng.choice(self.faults())
        others = [
            fault for fault in self.faults() if fault.part != first.part and "etcd" not in (fault.part, first.part)
        ]
        return [first, self._rng.choice(others)] if others and self._rng.random() < TWO_AT_ONCE else [first]

    def strike(self, faults: list[Fault], hold_s: float) -> None:
        """Begin, hold, mend, and wait until records are acknowledged again."""
        for fault in faults:
            print(f"chaos: {fault.name}, {fault.part}", flush=True)
            fault.begin()
        threading.Event().wait(hold_s)
        for fault in sorted(faults, key=lambda fault: not fault.etcd):
            fault.end()
            self.counts[fault.name] += 1
        goal = self._acknowledged() + RECORDS_AFTER
        told = " and ".join(f"{fault.name} {fault.part}" for fault in faults)
        wait_for(
            f"records acknowledged after: {told}\n{self._cluster.said()}",
            lambda: self._acknowledged() >= goal,
            RECOVER_DEADLINE_S,
        )

    def named(self, name: str, part: str) -> Fault:
        return next(fault for fault in self.faults() if (fault.name, fault.part) == (name, part))

    def hold_s(self, longest_s: float) -> float:
        return self._rng.uniform(0.2, longest_s)


def digests(data: Path, topic: str, partition: int, end: int) -> list[tuple[int, str]]:
    """First offset and digest of every batch below `end`, as it lies on the disk, whatever the layout."""
    disk, found = SystemDisk(), []
    for batch in dump(disk, str(data), TopicPartition(topic, partition)):
        assert isinstance(batch, DumpedBatch), batch
        if batch.header.base_offset < end:
            file = disk.open(batch.path)
            content = file.pread(batch.header.size_bytes, batch.position)
            file.close()
            found.append((batch.header.base_offset, hashlib.sha256(content).hexdigest()))
    return found


def check_replicas(cluster: BrokerCluster, topic: str, ends: list[int]) -> int:
    """After a clean stop: folders are whole and replicas equal byte for byte; the number of batches compared."""
    compared = 0
    for broker in cluster.brokers:
        command = [str(Path(sys.executable).parent / "headrace"), "log", "verify", str(broker.data)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for partition, end in enumerate(ends):
        found = [digests(broker.data, topic, partition, end) for broker in cluster.brokers]
        assert found[0], f"{topic}-{partition} is empty"
        for broker, other in zip(cluster.brokers[1:], found[1:], strict=True):
            assert other == found[0], f"{topic}-{partition} of {broker.data} is not that of {cluster.brokers[0].data}"
        compared += len(found[0])
    return compared
