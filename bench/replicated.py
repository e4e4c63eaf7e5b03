"""What replication costs: `python bench/replicated.py` from the clone's root, `--short` for a few minutes.

A real cluster on this machine (3 brokers, 1 etcd), topics of one partition with three replicas, all led by broker 1, so
that leader and followers can be told apart. Three questions, each answered by cells that take turns in one run:

levels   messages a second and processor time of leader and followers per GB, for the four named levels, over topics
latency  one request at a time with acks=-1, with 0 and with 20 ms there and back on the links between brokers
window   batches of 1 MB over links of 0 and of 20 ms, 5 unanswered, of one producer and of each of three: how much of
         the throughput is left

The links lead through `delay_proxy.c` in the last two, at 0 ms too. What was acknowledged is read back and compared.

No broker can answer more in 20 ms than was sent to it: with 5 MB unanswered that is 250 MB/s, and less by the time that
a batch needs besides. `allowed` is what the unanswered bytes allow, if each batch took 20 ms more than a lone one takes
near; a broker that is faster than that near has to lose by the way, however well it uses the links.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import processes
import topic_loads
from contestants import free_port
from loads import Invalid
from report import machine, table
from topic_loads import Shape, TopicLoad, TopicSet, create, write_plan

from headrace.cli.local import cluster_file, control
from headrace.cli.local.cluster_file import LocalCluster
from headrace.partitions.levels import NAMED

REPLICAS = (1, 2, 3)
ROUND_TRIP_MS = 20.0
SMALL = Shape(1024, 4, 1, 512)
LONE = Shape(1024, 1, 1, 1)
LONE_LARGE = Shape(16_000, 62, 1, 1)
LARGE = Shape(16_000, 62, 1, 5)
LARGE_OF_THREE = Shape(16_000, 62, 1, 15)
PROXY = Path(__file__).with_name("delay_proxy.c")
WARM_BYTES = 800 << 20
"""More than three brokers write in a turn."""


@dataclass(frozen=True, slots=True)
class Extent:
    topics: tuple[int, ...]
    turns: int
    turn_s: float
    turn_bytes: int


FULL = Extent((1, 8, 16, 64, 128, 256), 3, 1.0, 200_000_000)
SHORT = Extent((1, 256), 3, 0.5, 50_000_000)


@dataclass(frozen=True, slots=True)
class Member:
    """One broker of the cluster."""

    number: int
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        return processes.cpu_seconds(self.pid)


@dataclass(frozen=True, slots=True)
class Turn:
    msg_per_s: float
    mb_per_s: float
    p50_ms: float
    p99_ms: float
    leader_cpu_s_per_gb: float
    follower_cpu_s_per_gb: float
    """Of one follower, the mean of both."""
    others_cpu_percent: float


class Links:
    """The way between the brokers, through one proxy."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        words = [f"{listen}:{target}" for listen, target in pairs]
        self._process = subprocess.Popen(
            (topic_loads.compiled(PROXY), *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def set_delay_ms(self, each_way_ms: float) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{each_way_ms}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@contextmanager
def running(folder: Path, stack: ExitStack, *, through_proxy: bool) -> Iterator[tuple[list[Member], Links | None]]:
    """The cluster, started; its brokers in order. Stopped at the end, by force if need be."""
    cluster = control.make(folder, 0, len(REPLICAS), 1, {})
    links = _through_proxy(cluster, stack) if through_proxy else None
    control.start(folder)
    try:
        cluster = cluster_file.load(folder)
        control.wait_until_ready(cluster, lambda _: None)
        members = []
        for node in cluster.brokers:
            assert node.process is not None
            members.append(Member(node.number, node.ports["kafka"], node.process.pid))
        yield members, links
    finally:
        control.stop(folder, lambda _: None)


def _through_proxy(cluster: LocalCluster, stack: ExitStack) -> Links:
    pairs = []
    for node in cluster.brokers:
        listen = free_port()
        pairs.append((listen, node.ports["replication"]))
        with (Path(node.folder) / "headrace.toml").open("a") as config:
            config.write(f'"replication.advertise" = "127.0.0.1:{listen}"\n')
    links = Links(pairs)
    stack.callback(links.close)
    return links


def take(load: TopicLoad, members: list[Member], shape: Shape, extent: Extent) -> Turn:
    processes.warm_memory(WARM_BYTES, Path(tempfile.gettempdir()))
    before = [member.cpu_seconds() for member in members]
    answer = load.tell(f"produce {extent.turn_s} {extent.turn_bytes // shape.batch_bytes}", quietly=True)
    used = [member.cpu_seconds() - start for member, start in zip(members, before, strict=True)]
    counted = answer.counted
    messages, seconds = counted["acknowledged"], counted["seconds"]
    gigabytes = messages * shape.message_bytes / 1e9
    return Turn(
        msg_per_s=messages / seconds,
        mb_per_s=gigabytes * 1000 / seconds,
        p50_ms=counted["p50_us"] / 1e3,
        p99_ms=counted["p99_us"] / 1e3,
        leader_cpu_s_per_gb=used[0] / gigabytes,
        follower_cpu_s_per_gb=sum(used[1:]) / (len(used) - 1) / gigabytes,
        others_cpu_percent=max(0.0, answer.others_cpu_s - sum(used[1:])) / seconds * 100,
    )


def middle(turns: list[Turn], name: str) -> float:
    values: list[float] = [getattr(turn, name) for turn in turns]
    return statistics.median(values)


def levels(folder: Path, extent: Extent) -> str:
    """Every level and count of topics; the levels take turns."""
    rows = []
    with ExitStack() as stack:
        members, _ = stack.enter_context(running(folder, stack, through_proxy=False))
        for count in extent.topics:
            loads: dict[str, TopicLoad] = {}
            with ExitStack() as of_count:
                for level in NAMED:
                    topics = TopicSet(f"{level.name}-{count}", count, level.durability)
                    create(members[0], topics, REPLICAS, {"reliability": level.name})
                    plan = write_plan(folder / f"plan-{topics.name}", topics, SMALL)
                    loads[level.name] = of_count.enter_context(TopicLoad(members[0], plan, topics, SMALL))
                    loads[level.name].tell(f"produce 60 {3 * max(count, topic_loads.PRODUCERS)}")
                taken: dict[str, list[Turn]] = {name: [] for name in loads}
                for turn in range(extent.turns):
                    for name in list(loads)[:: 1 if turn % 2 else -1]:
                        taken[name].append(take(loads[name], members, SMALL, extent))
                for name, load in loads.items():
                    load.tell(f"read 0 {count}")
                    turns = taken[name]
                    say(f"{name}, {count} topic(s): {middle(turns, 'msg_per_s'):,.0f} msg/s")
                    rows.append(
                        [
                            name,
                            str(count),
                            f"{middle(turns, 'msg_per_s'):,.0f}",
                            f"{middle(turns, 'mb_per_s'):.1f}",
                            f"{middle(turns, 'p50_ms'):.1f}",
                            f"{middle(turns, 'p99_ms'):.1f}",
                            f"{middle(turns, 'leader_cpu_s_per_gb'):.2f}",
                            f"{middle(turns, 'follower_cpu_s_per_gb'):.2f}",
                            f"{middle(turns, 'others_cpu_percent'):.0f}",
                        ]
                    )
    head = ["level", "topics", "msg/s", "MB/s", "p50 ms", "p99 ms", "leader CPU-s/GB", "follower CPU-s/GB", "others %"]
    return table(head, rows)


@dataclass(frozen=True, slots=True)
class Distance:
    """One load near and far, in turn."""

    near: list[Turn]
    far: list[Turn]


LOADS = (
    ("one at a time, 1 KB", 1, LONE),
    ("one at a time, 1 MB", 1, LONE_LARGE),
    ("1 MB, 5 unanswered", 1, LARGE),
    ("1 MB, 3 producers with 5", 3, LARGE_OF_THREE),
)


def over_distance(folder: Path, extent: Extent) -> str:
    """One request at a time, and large batches in flight, near and far in turn."""
    rows = []
    with ExitStack() as stack:
        members, links = stack.enter_context(running(folder, stack, through_proxy=True))
        assert links is not None
        for durability in ("os", "disk"):
            lone_ms = 0.0
            for what, producers, shape in LOADS:
                topic_loads.PRODUCERS = producers
                name = f"far-{durability}-{shape.message_bytes}-{shape.batches_unanswered}"
                taken = near_and_far(folder, members, links, TopicSet(name, 1, durability), shape, extent)
                near_ms, far_ms = middle(taken.near, "p50_ms"), middle(taken.far, "p50_ms")
                near, far = middle(taken.near, "mb_per_s"), middle(taken.far, "mb_per_s")
                if shape is LONE_LARGE:
                    lone_ms = near_ms
                allowed = shape.batches_unanswered * shape.batch_bytes / 1e3 / (ROUND_TRIP_MS + (lone_ms or near_ms))
                say(f"{what}, {durability}: {near:.1f} and {far:.1f} MB/s, p50 {near_ms:.2f} and {far_ms:.2f} ms")
                rows.append(
                    [
                        *(what, durability, f"{near_ms:.2f}", f"{far_ms:.2f}"),
                        f"{(far_ms - near_ms) / ROUND_TRIP_MS:.2f}",
                        *(f"{near:.1f}", f"{far:.1f}", f"{far / near:.2f}"),
                        f"{min(allowed, near):.1f}",
                        f"{far / min(allowed, near):.2f}",
                    ]
                )
    head = ["load", "durability", "p50 near", "p50 far", "round trips", "MB/s near", "MB/s far", "share"]
    return table([*head, "allowed", "share of it"], rows)


def near_and_far(
    folder: Path, members: list[Member], links: Links, topics: TopicSet, shape: Shape, extent: Extent
) -> Distance:
    create(members[0], topics, REPLICAS)
    plan = write_plan(folder / f"plan-{topics.name}", topics, shape)
    taken = Distance([], [])
    with TopicLoad(members[0], plan, topics, shape) as load:
        load.tell("produce 60 20")
        for turn in range(2 * extent.turns):
            links.set_delay_ms(ROUND_TRIP_MS / 2 if turn % 2 else 0)
            (taken.far if turn % 2 else taken.near).append(take(load, members, shape, extent))
        links.set_delay_ms(0)
        load.tell("read 0 1")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python bench/replicated.py", description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer cells, a few minutes")
    parser.add_argument("--only", choices=("levels", "distance"), help="one part of it")
    options = parser.parse_args()
    extent = SHORT if options.short else FULL
    print("; ".join(f"{key}: {value}" for key, value in machine().items()), end="\n\n")
    try:
        for name, part in (("levels", levels), ("distance", over_distance)):
            if options.only in (None, name):
                with tempfile.TemporaryDirectory(prefix="headrace-replicated-") as scratch:
                    print(part(Path(scratch), extent), end="\n\n", flush=True)
    except Invalid as trouble:
        say(f"!!! INVALID: {trouble}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
