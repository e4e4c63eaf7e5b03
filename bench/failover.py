"""How long a partition takes no writes when its leader goes: `python bench/failover.py` from the clone's root.

A real cluster on this machine (3 brokers, 1 etcd), one partition with three replicas. One producer sends a record at a
time with acks=-1, again at once when it is refused. The leader is killed (SIGKILL) or stopped (SIGTERM), and the time
from the signal to the first acknowledgement by another broker is taken. Then the broker is started again, and the next
leader goes when all are in sync. `broker.lease.ms` is the knob: a killed broker is gone when its lease ends (etcd has
none below one and a half of its election timeout, 2 s here); one that stops hands its leadership over first. Every
acknowledged record is read back and compared.
"""

import argparse
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from report import machine, table

from headrace.cli.local import cluster_file, control
from headrace.cli.local.cluster_file import LocalCluster
from headrace.client.admin import fetch, operations
from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.produce import Produced, init_producer_id, produce
from headrace.client.producer.request import Outgoing
from headrace.records import kernel

TOPIC = "failover"
LEASES_MS = (2000, 5000, 10_000)
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM}
DEADLINE_S = 90.0
BEFORE_RECORDS = 50


def connect(bootstrap: str) -> Cluster:
    return Cluster(bootstrap, timeout_ms=5000, retry=Retry(within_ms=5000, pause_ms=2, pause_max_ms=10))


class Writer:
    """Record n carries n; the times and leaders of all acknowledgements are kept."""

    def __init__(self, bootstrap: str) -> None:
        self.acknowledged: list[tuple[float, int]] = []
        """When, and who led."""
        self._bootstrap = bootstrap
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with connect(self._bootstrap) as cluster:
            identity = init_producer_id(cluster)
            number = 0
            while not self._stopping.is_set():
                batch = kernel.build(
                    [(time.time_ns() // 1_000_000, None, b"%d" % number, ())],
                    producer_id=identity.producer_id,
                    producer_epoch=identity.producer_epoch,
                    base_sequence=number,
                )
                (result,) = produce(cluster, [Outgoing(TOPIC, 0, batch)], timeout_ms=5000)
                if isinstance(result, Produced):
                    self.acknowledged.append((time.monotonic(), cluster.partition(TOPIC, 0).leader_id))
                    number += 1
                elif not result.mapping.retriable:
                    raise result

    def close(self) -> int:
        self._stopping.set()
        self._thread.join()
        return len(self.acknowledged)


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"waited {DEADLINE_S:g} s for {what}"
        time.sleep(0.01)


def in_sync(cluster: LocalCluster) -> bool:
    """As every broker says for itself."""
    for node in cluster.brokers:
        with control.connect(node.address) as client:
            found = client.topology([TOPIC]).topics.get(TOPIC)
        if found is None or len(found.partitions[0].in_sync) < len(cluster.brokers):
            return False
    return True


def once(folder: Path, writer: Writer, how: str) -> float:
    """Seconds from the signal to the first acknowledgement of another leader."""
    cluster = cluster_file.load(folder)
    wait_for("all replicas in sync", lambda: in_sync(cluster))
    known = len(writer.acknowledged)
    wait_for("records before", lambda: len(writer.acknowledged) > known + BEFORE_RECORDS)
    leader = writer.acknowledged[-1][1]
    signalled_at = time.monotonic()
    control.send(folder, str(leader), SIGNALS[how])

    def after() -> list[float]:
        return [at for at, who in writer.acknowledged[known:] if at > signalled_at and who != leader]

    wait_for("an acknowledgement of another leader", lambda: bool(after()))
    wait_for("the end of the broker", lambda: cluster.node(str(leader)).state() == "down")
    control.start(folder)
    control.wait_until_ready(cluster_file.load(folder), lambda _: None)
    return after()[0] - signalled_at


def check(bootstrap: str, count: int) -> None:
    """What was acknowledged is there, once, in order."""
    with connect(bootstrap) as cluster:
        number = 0
        while number < count:
            found = fetch.read_batches(cluster, TOPIC, 0, number, count - number)
            for _, batch in found.batches:
                for record in kernel.records(batch):
                    assert (record.offset, record.value) == (number, b"%d" % number), record
                    number += 1


def measure(lease_ms: int, rounds: int) -> list[list[str]]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        control.make(folder, 0, 3, 1, {"broker.lease.ms": str(lease_ms)})
        control.start(folder)
        cluster = cluster_file.load(folder)
        try:
            control.wait_until_ready(cluster, lambda _: None)
            with connect(cluster.bootstrap) as client:
                operations.create_topic(client, TOPIC, partitions=1, replicas=3)
            writer = Writer(cluster.bootstrap)
            for how in SIGNALS:
                taken = [once(folder, writer, how) * 1000 for _ in range(rounds)]
                print(f"lease {lease_ms} ms, {how}: {[round(each) for each in taken]}", file=sys.stderr, flush=True)
                median = statistics.median(taken)
                rows.append(
                    [str(lease_ms), how, str(rounds), f"{median:.0f}", f"{min(taken):.0f}", f"{max(taken):.0f}"]
                )
            check(cluster.bootstrap, writer.close())
        finally:
            control.stop(folder, lambda _: None)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="signals of each kind for each lease")
    parser.add_argument("--leases", default=",".join(map(str, LEASES_MS)), help="broker.lease.ms, with commas")
    arguments = parser.parse_args()
    rows = [row for lease in arguments.leases.split(",") for row in measure(int(lease), arguments.rounds)]
    print(" ".join(f"{name}: {value};" for name, value in machine().items()))
    print(table(("lease ms", "leader", "times", "median ms", "least ms", "most ms"), rows))


if __name__ == "__main__":
    main()
