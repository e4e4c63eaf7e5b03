"""Many transactions: `python bench/transaction_scale.py [wide] [open] [ids]`, all three if none is named.

wide  one transaction over 500 partitions, three replicas each, on 5 brokers: how long its commit takes, and how long
      until the next one may begin
open  10,000 transactions open at once on one broker, each with a record: memory of the broker, and how fast they open
      and end
ids   1,000,000 transactional ids on one broker: its memory, and how long it needs to start with them again

The last two speak the protocol over one connection: so many clients would be measured themselves. Every answer is
looked at; what was committed is read back and counted.
"""

import argparse
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from contestants import Running, headrace, start
from many_partitions import restart
from report import machine, table

from headrace.cli.local import cluster_file, control
from headrace.records import kernel
from headrace.records.batch import TRANSACTIONAL
from headrace.wire import api
from headrace.wire.codec import (
    decode_response,
    encode_request,
    read_response_header,
    write_request,
)
from headrace.wire.message import Message

BROKERS, REPLICAS, WIDE_PARTITIONS = 5, 3, 500
WIDE_TURNS = 20
OPEN_PARTITIONS = 50
TIMEOUT_MS = 900_000
WINDOW = 256
"""Requests on their way over the one connection."""
DEADLINE_S = 120.0
INIT_VERSION, ADD_VERSION, PRODUCE_VERSION, END_VERSION = 4, 3, 9, 3
Request = tuple[int, int, Message]


class Connection:
    """Requests one after another without waiting, and their answers in order."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = self._socket.makefile("rb", 1 << 20)

    def ask(self, requests: Iterable[Request]) -> Iterator[Message]:
        waiting: deque[tuple[int, int]] = deque()
        for number, (key, version, body) in enumerate(requests):
            frame = write_request(key, version, number, "scale", encode_request(key, version, body))
            self._socket.sendall(frame)
            waiting.append((key, version))
            if len(waiting) >= WINDOW:
                yield self._answer(*waiting.popleft())
        while waiting:
            yield self._answer(*waiting.popleft())

    def _answer(self, key: int, version: int) -> Message:
        (size,) = struct.unpack(">i", self._read.read(4))
        view = memoryview(self._read.read(size))
        _, at = read_response_header(key, version, view)
        return decode_response(key, version, view, at)

    def close(self) -> None:
        self._read.close()
        self._socket.close()


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def check(code: int, what: str) -> None:
    if code:
        raise SystemExit(f"{what} was answered by error {code}")


def eventually(what: str, attempt: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not attempt():
        if time.monotonic() > end:
            raise SystemExit(f"waited {DEADLINE_S:g} s for {what}")
        time.sleep(0.05)


def init(transactional_id: str) -> Request:
    body = Message(
        transactional_id=transactional_id, transaction_timeout_ms=TIMEOUT_MS, producer_id=-1, producer_epoch=-1
    )
    return api.INIT_PRODUCER_ID, INIT_VERSION, body


def add(transactional_id: str, producer: tuple[int, int], topic: str, partition: int) -> Request:
    body = Message(
        v3_and_below_transactional_id=transactional_id,
        v3_and_below_producer_id=producer[0],
        v3_and_below_producer_epoch=producer[1],
        v3_and_below_topics=[Message(name=topic, partitions=[partition])],
    )
    return api.ADD_PARTITIONS_TO_TXN, ADD_VERSION, body


def produce(transactional_id: str, producer: tuple[int, int], topic: str, partition: int) -> Request:
    records = kernel.build(
        [(0, None, b"value", [])],
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    part = Message(index=partition, records=bytes(records))
    topics = [Message(name=topic, partition_data=[part])]
    return (
        api.PRODUCE,
        PRODUCE_VERSION,
        Message(transactional_id=transactional_id, acks=-1, timeout_ms=30_000, topic_data=topics),
    )


def end(transactional_id: str, producer: tuple[int, int], *, committed: bool) -> Request:
    body = Message(
        transactional_id=transactional_id, producer_id=producer[0], producer_epoch=producer[1], committed=committed
    )
    return api.END_TXN, END_VERSION, body


def init_all(connection: Connection, names: list[str]) -> list[tuple[int, int]]:
    producers = []
    for answer in connection.ask(init(name) for name in names):
        check(answer.error_code, "InitProducerId")
        producers.append((answer.producer_id, answer.producer_epoch))
    return producers


def committed_count(bootstrap: str, topic: str, partitions: int) -> int:
    """Records that a reader of committed ones reads to the end."""
    settings = {"isolation.level": "read_committed", "enable.partition.eof": True, "group.id": "scale"}
    consumer = Consumer({"bootstrap.servers": bootstrap, "enable.auto.commit": False, **settings})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    count = ended = 0
    while ended < partitions:
        for message in consumer.consume(10_000, 1.0):
            ended += message.error() is not None
            count += message.error() is None
    consumer.close()
    return count


@contextmanager
def one_broker() -> Iterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-scale-"))
    broker = start(headrace, folder / "node")
    try:
        yield broker
    finally:
        broker.stop()
        shutil.rmtree(folder, ignore_errors=True)


def first_id(broker: Running) -> None:
    """A client's first id makes the coordinator's topic."""
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{broker.port}", "transactional.id": "first"})
    producer.init_transactions(DEADLINE_S)


def create(bootstrap: str, topic: str, partitions: int, replicas: int) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, replicas)])[topic].result(DEADLINE_S)


def memory_mb(broker: Running) -> float:
    return broker.memory().rss_bytes / 1e6


def wide() -> list[list[str]]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-wide-")) / "cluster"
    control.make(folder, 0, BROKERS, 1, {})
    control.start(folder)
    try:
        cluster = cluster_file.load(folder)
        control.wait_until_ready(cluster, lambda _: None)
        bootstrap = f"127.0.0.1:{cluster.brokers[0].ports['kafka']}"
        create(bootstrap, "wide", WIDE_PARTITIONS, REPLICAS)
        producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "wide", "linger.ms": 5})
        producer.init_transactions(DEADLINE_S)
        sent_s, commit_s = [], []
        for turn in range(WIDE_TURNS + 1):
            began = time.perf_counter()
            producer.begin_transaction()
            for partition in range(WIDE_PARTITIONS):
                producer.produce("wide", b"value", partition=partition)
            producer.flush(DEADLINE_S)
            flushed = time.perf_counter()
            producer.commit_transaction(DEADLINE_S)
            if turn:  # the first one opens connections and files
                sent_s.append(flushed - began)
                commit_s.append(time.perf_counter() - flushed)
        count = committed_count(bootstrap, "wide", WIDE_PARTITIONS)
        wanted = (WIDE_TURNS + 1) * WIDE_PARTITIONS
        if count != wanted:
            raise SystemExit(f"{count} records of {wanted} were committed")
    finally:
        control.stop(folder, lambda _: None)
        shutil.rmtree(folder.parent, ignore_errors=True)
    what = f"a transaction over {WIDE_PARTITIONS} partitions, {REPLICAS} replicas, {BROKERS} brokers"
    return [
        [f"{what}: begin to flushed, ms, median and most", *median_and_most_ms(sent_s)],
        [f"{what}: commit, ms, median and most", *median_and_most_ms(commit_s)],
    ]


def median_and_most_ms(taken_s: list[float]) -> tuple[str, str]:
    return f"{statistics.median(taken_s) * 1e3:.1f}", f"{max(taken_s) * 1e3:.1f}"


def many_open(count: int) -> list[list[str]]:
    rows = []
    with one_broker() as broker:
        create(f"127.0.0.1:{broker.port}", "open", OPEN_PARTITIONS, 1)
        connection = Connection(broker.port)
        names = [f"open-{number}" for number in range(count)]
        first_id(broker)
        before_mb = memory_mb(broker)
        began = time.perf_counter()
        producers = init_all(connection, names)
        each = [
            (name, who, "open", n % OPEN_PARTITIONS) for n, (name, who) in enumerate(zip(names, producers, strict=True))
        ]
        for answer in connection.ask(add(*one) for one in each):
            check(answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code, "AddPartitions")
        for answer in connection.ask(produce(*one) for one in each):
            check(answer.responses[0].partition_responses[0].error_code, "Produce")
        opened_s, open_mb = time.perf_counter() - began, memory_mb(broker)
        say(f"{count:,} are open")
        began = time.perf_counter()
        for answer in connection.ask(end(*one[:2], committed=True) for one in each):
            check(answer.error_code, "EndTxn")
        # Each id is free again only when its transaction is complete.
        init_all(connection, names)
        ended_s = time.perf_counter() - began
        read = committed_count(f"127.0.0.1:{broker.port}", "open", OPEN_PARTITIONS)
        if read != count:
            raise SystemExit(f"{read} records of {count} were committed")
        connection.close()
        rows.append(
            [f"{count:,} open transactions: memory, MB, before and with them", f"{before_mb:.0f}", f"{open_mb:.0f}"]
        )
        rows.append(["opened and ended, a second", f"{count / opened_s:,.0f}", f"{count / ended_s:,.0f}"])
    return rows


def many_ids(count: int) -> list[list[str]]:
    rows = []
    with one_broker() as broker:
        connection = Connection(broker.port)
        first_id(broker)
        before_mb = memory_mb(broker)
        began = time.perf_counter()
        for first in range(0, count, 100_000):
            end_before = min(first + 100_000, count)
            init_all(connection, [f"id-{number}" for number in range(first, end_before)])
            say(f"{end_before:,} ids, {memory_mb(broker):.0f} MB")
        made_s, with_mb = time.perf_counter() - began, memory_mb(broker)
        connection.close()
        stop_s = broker.stop()
        again = restart(broker)
        try:
            began = time.perf_counter()
            connection = Connection(again.port)

            def answers() -> bool:
                (answer,) = connection.ask([init("id-0")])
                return bool(answer.error_code == 0)

            eventually("the coordinator", answers)
            loaded_s, again_mb = time.perf_counter() - began, memory_mb(again)
            cpu_s = processes.cpu_seconds(again.process.pid)
            connection.close()
        finally:
            again.stop()
        rows.append([f"{count:,} ids: memory, MB, before and with them", f"{before_mb:.0f}", f"{with_mb:.0f}"])
        rows.append(["made, a second; clean stop, s", f"{count / made_s:,.0f}", f"{stop_s:.2f}"])
        rows.append(
            ["started again: ready, and answering for an id after, s", f"{again.start_s:.2f}", f"{loaded_s:.2f}"]
        )
        rows.append(["then: memory, MB, and processor time of the start, s", f"{again_mb:.0f}", f"{cpu_s:.1f}"])
    return rows


WHAT = "wide", "open", "ids"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="*", default="", choices=[*WHAT, ""], help=f"of {', '.join(WHAT)}: all unless told"
    )
    parser.add_argument("--open", type=int, default=10_000, help="open transactions")
    parser.add_argument("--ids", type=int, default=1_000_000, help="transactional ids")
    given = parser.parse_args()
    what = given.what or WHAT
    rows: list[list[str]] = []
    if "wide" in what:
        rows += wide()
    if "open" in what:
        rows += many_open(given.open)
    if "ids" in what:
        rows += many_ids(given.ids)
    print("; ".join(f"{key}: {value}" for key, value in machine().items()))
    print(table(["figure", "first", "second"], rows))


if __name__ == "__main__":
    main()
