#!/usr/bin/env python
"""Print the way of a message: the files that one errand passes, and how often it changes from one file to another.

    tools/way.py                    all errands, of this tree
    tools/way.py produce send       some of them
    tools/way.py --tree DIR         the same of another checkout, to compare
    tools/way.py --files produce    every file with the functions called in it, in the order of the way

Each errand is run a few times to warm up and then, traced, a few times more. The shortest trace counts, as timers may
fall into any. Only Python functions below `src/headrace` are seen: what is compiled, and other libraries, are not. A
change of file is a call into a function of another file than the one called before it. `replicated` needs etcd (`make
test` brings it), `spark` needs PySpark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent.parent
ROUNDS: Final = 8
WARM_UP: Final = 5
PAUSE_S: Final = 0.15
Trace = list[tuple[str, str]]


# What is traced.


class Tracer:
    """Notes every call of a function below `folder`, while it is switched on, in all threads that begin after it."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"{folder}/"
        self._calls: Trace = []
        self._on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._on and event == "call" and frame.f_code.co_filename.startswith(self._prefix):
            self._calls.append((frame.f_code.co_filename[len(self._prefix) :], frame.f_code.co_qualname))

    def begin(self) -> None:
        self._calls = []
        self._on = True

    def end(self) -> Trace:
        self._on = False
        return self._calls


def serve_traced(arguments: list[str]) -> None:
    """The command line of this tree in a process that begins and ends traces as its standard input says."""
    from headrace.cli.main import main

    tracer = Tracer(Path(os.environ["PYTHONPATH"]) / "headrace")
    output = os.fdopen(int(os.environ["WAY_OUTPUT"]), "w")

    def listen() -> None:
        sys.setprofile(None)
        for line in sys.stdin:
            if line.strip() == "begin":
                tracer.begin()
            else:
                json.dump(tracer.end(), output)
            output.write("\n")
            output.flush()

    threading.Thread(target=listen, daemon=True).start()
    sys.exit(main(arguments))


class TracedBroker:
    """A broker in a process of its own, whose calls between `begin` and `end` are known."""

    def __init__(self, folder: Path, *settings: str) -> None:
        reads, writes = os.pipe()
        command = [sys.executable, __file__, "--traced", "serve", "--data", str(folder), "--listen", "127.0.0.1:0"]
        for setting in ("http.listen=off", "group.initial.rebalance.delay.ms=0", *settings):
            command += ["--set", setting]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder.parent / f"{folder.name}.log").open("w"),
            text=True,
            pass_fds=[writes],
            env={**os.environ, "WAY_OUTPUT": str(writes)},
        )
        os.close(writes)
        self._answers = os.fdopen(reads)
        assert self._process.stdout is not None
        ready = next((line for line in self._process.stdout if line.startswith("ready ")), "")
        assert ready, (folder.parent / f"{folder.name}.log").read_text()[-2000:]
        self.address = dict(word.split("=", 1) for word in ready.split()[1:])["kafka"]

    def _order(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answers.readline()

    def begin(self) -> None:
        self._order("begin")

    def end(self) -> Trace:
        return [(path, name) for path, name in json.loads(self._order("end"))]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def shortest(begin: Callable[[], None], end: Callable[[], Trace], errand: Callable[[], object]) -> Trace:
    """Of several runs of the errand, each traced by itself."""
    for _ in range(WARM_UP):
        errand()
    traces = []
    for _ in range(ROUNDS):
        time.sleep(PAUSE_S)
        begin()
        errand()
        traces.append(end())
    return min(traces, key=len)


# The errands.


class Scene:
    """What errands need, built when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closing = contextlib.ExitStack()
        self._broker: TracedBroker | None = None

    @property
    def broker(self) -> TracedBroker:
        if self._broker is None:
            self._broker = TracedBroker(self.folder / "broker")
            self.closing.callback(self._broker.stop)
            create_topic(self._broker.address, "orders", 1)
        return self._broker


def create_topic(address: str, name: str, replicas: int) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    admin = AdminClient({"bootstrap.servers": address})
    for created in admin.create_topics([NewTopic(name, 1, replicas)]).values():
        created.result()


def producer_of(address: str) -> Callable[[], None]:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": address, "linger.ms": 0, "acks": "all"})

    def send() -> None:
        producer.produce("orders", b"value", partition=0)
        assert producer.flush(30) == 0

    return send


def produce(scene: Scene) -> Trace:
    return shortest(scene.broker.begin, scene.broker.end, producer_of(scene.broker.address))


def fetch(scene: Scene) -> Trace:
    """A fetch that finds records, and the end of one that found none: a client has always one waiting."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    send = producer_of(scene.broker.address)
    for _ in range(10):
        send()
    settings = {"bootstrap.servers": scene.broker.address, "group.id": "way", "enable.auto.commit": False}
    consumer = Consumer({**settings, "fetch.wait.max.ms": 20, "auto.offset.reset": "earliest"})
    scene.closing.callback(consumer.close)
    consumer.assign([TopicPartition("orders", 0, OFFSET_BEGINNING)])

    def read() -> None:
        consumer.seek(TopicPartition("orders", 0, 0))
        found = consumer.consume(10, 30)
        assert len(found) == 10

    for message in iter(lambda: consumer.poll(5), None):
        if (message.offset() or 0) >= 9:
            break
    return shortest(scene.broker.begin, scene.broker.end, read)


def commit(scene: Scene) -> Trace:
    from confluent_kafka import Consumer, TopicPartition

    settings = {"bootstrap.servers": scene.broker.address, "group.id": "committing", "enable.auto.commit": False}
    consumer = Consumer({**settings, "fetch.wait.max.ms": 10000})
    scene.closing.callback(consumer.close)
    offset = iter(range(1, 1000))
    return shortest(
        scene.broker.begin,
        scene.broker.end,
        lambda: consumer.commit(offsets=[TopicPartition("orders", 0, next(offset))], asynchronous=False),
    )


def send(scene: Scene) -> Trace:
    address = scene.broker.address
    tracer = Tracer(Path(os.environ["PYTHONPATH"]) / "headrace")
    try:
        from headrace import Producer

        with Producer(address) as producer:

            def errand() -> None:
                producer.send_async("orders", b"value")
                producer.flush()

            return shortest(tracer.begin, tracer.end, errand)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


def replicated(scene: Scene) -> Trace:
    """The leader's way of an append that two followers confirm, and then a follower's."""
    with etcd(scene.folder) as coordination:
        settings = [f"coordination={coordination}", "replication.listen=127.0.0.1:0"]
        brokers = [TracedBroker(scene.folder / f"replica-{id}", *settings, f"node.id={id}") for id in range(1, 4)]
        try:
            create_topic(brokers[0].address, "orders", 3)
            errand = producer_of(brokers[0].address)

            def begin() -> None:
                for broker in brokers:
                    broker.begin()

            def end() -> Trace:
                traces = sorted((broker.end() for broker in brokers), key=len)
                return [*traces[2], *traces[0]]

            return shortest(begin, end, errand)
        finally:
            for broker in brokers:
                broker.stop()


def spark(scene: Scene) -> Trace:
    """One task of a batch read, as Spark's worker runs it: the plan is made before."""
    from headrace.spark.source import HeadraceSource

    producer_of(scene.broker.address)()
    source = HeadraceSource({"bootstrap": scene.broker.address, "subscribe": "orders"})
    reader: Any = source.reader(source.schema())
    splits = reader.partitions()
    tracer = Tracer(Path(os.environ["PYTHONPATH"]) / "headrace")
    try:
        return shortest(tracer.begin, tracer.end, lambda: [list(reader.read(split)) for split in splits])
    finally:
        threading.setprofile(None)
        sys.setprofile(None)


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[str]:
    sys.path.insert(0, str(HERE / "tests"))
    from etcd_nodes import etcd_nodes

    with etcd_nodes(folder / "etcd", 1) as nodes:
        yield nodes.uri


ERRANDS: Final[dict[str, Callable[[Scene], Trace]]] = {
    "produce": produce,
    "fetch": fetch,
    "commit": commit,
    "send": send,
    "replicated": replicated,
    "spark": spark,
}
TITLES: Final = {
    "produce": "a produce, in the broker",
    "fetch": "a fetch, in the broker",
    "commit": "a group's commit, in the broker",
    "send": "a send_async with its flush, in the client",
    "replicated": "an append to three replicas, in the leader and a follower",
    "spark": "one task of a batch read by Spark",
}


# The report.


def files_of(trace: Trace) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for path, name in trace:
        names = files.setdefault(path, [])
        if name not in names:
            names.append(name)
    return files


def changes_of(trace: Trace) -> int:
    return sum(1 for (path, _), (before, _) in zip(trace[1:], trace, strict=False) if path != before)


def report(name: str, trace: Trace, *, with_files: bool) -> None:
    files = files_of(trace)
    print(f"{TITLES[name]:60}{len(files):4} files{changes_of(trace):5} changes of file{len(trace):6} calls", flush=True)
    for path in files if with_files else ():
        print(f"    {path:44}{', '.join(files[path])}")


def main() -> int:
    if sys.argv[1:2] == ["--traced"]:
        serve_traced(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("errands", nargs="*", metavar="errand", help=f"of {', '.join(ERRANDS)}; all by default")
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout whose source is run")
    parser.add_argument("--files", action="store_true", help="list the files, and what is called in each")
    given = parser.parse_args()
    unknown = set(given.errands) - set(ERRANDS)
    if unknown:
        parser.error(f"no errand {', '.join(sorted(unknown))}: there are {', '.join(ERRANDS)}")
    source = str(given.tree.resolve() / "src")
    if os.environ.get("PYTHONPATH") != source:  # other processes are to find it too
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": source})
    folder = Path(tempfile.mkdtemp(prefix="way-"))
    scene = Scene(folder)
    try:
        with scene.closing:
            for name in given.errands or ERRANDS:
                report(name, ERRANDS[name](scene), with_files=given.files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
