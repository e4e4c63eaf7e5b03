"""What a fetch of many partitions costs, with and without a session: `python bench/fetch_sessions.py`.

One consumer, frame by frame, of 1 and of 2,000 partitions of one broker. In each turn a few partitions get a record,
and it fetches until it has them: by full fetches, which name all partitions, or in a session (KIP-227). Prints the
processor time of the broker for a turn (the produce is part of it, and measured alone beside it), the bytes of a fetch
and its answer, and the time until the records were there; medians of rounds in turn.
"""

import argparse
import shutil
import socket
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from contestants import CONTESTANTS, HOST, Running, start
from report import table

from headrace.records import kernel
from headrace.wire import api as apis
from headrace.wire.codec import decode_response, encode_request, read_response_header, write_request
from headrace.wire.message import Message

FETCH_VERSION = 12
PRODUCE_VERSION = 9
TOPIC = "sessions"
TURNS_S = 2.0


class Client:
    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), 20.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_bytes = self.received_bytes = 0

    def call(self, api_key: int, version: int, **body: Any) -> Any:
        frame = write_request(api_key, version, 7, "bench", encode_request(api_key, version, Message(**body)))
        self._socket.sendall(frame)
        (size,) = struct.unpack(">i", self._exactly(4))
        answer = memoryview(self._exactly(size))
        self.sent_bytes, self.received_bytes = len(frame), 4 + size
        _, pos = read_response_header(api_key, version, answer)
        return decode_response(api_key, version, answer, pos)

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            read = self._socket.recv_into(view[at:])
            if not read:
                raise SystemExit("the broker closed the connection")
            at += read
        return bytes(data)

    def close(self) -> None:
        self._socket.close()


class Consumer:
    """Reads all partitions of the topic from their ends on."""

    def __init__(self, port: int, ends: list[int], *, in_session: bool) -> None:
        self.client = Client(port)
        self._offsets = list(ends)
        self._in_session = in_session
        self._session_id, self._epoch = 0, 0 if in_session else -1
        self._changed = set(range(len(ends)))
        self.request_bytes: list[int] = []
        self.answer_bytes: list[int] = []

    def fetch(self, wait_ms: int) -> int:
        """How many records came."""
        named = sorted(self._changed) if self._in_session else range(len(self._offsets))
        rows = [
            Message(
                partition=index,
                current_leader_epoch=-1,
                fetch_offset=self._offsets[index],
                last_fetched_epoch=-1,
                log_start_offset=-1,
                partition_max_bytes=1 << 20,
            )
            for index in named
        ]
        answer = self.client.call(
            apis.FETCH,
            FETCH_VERSION,
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=50 << 20,
            isolation_level=0,
            session_id=self._session_id,
            session_epoch=self._epoch,
            topics=[Message(topic=TOPIC, partitions=rows)] if rows else [],
            forgotten_topics_data=[],
            rack_id="",
        )
        if answer.error_code:
            raise SystemExit(f"a fetch was answered with {answer.error_code}")
        self.request_bytes.append(self.client.sent_bytes)
        self.answer_bytes.append(self.client.received_bytes)
        if self._in_session:
            self._session_id, self._epoch = answer.session_id, self._epoch + 1
        self._changed.clear()
        found = 0
        for topic in answer.responses:
            for row in topic.partitions:
                if row.records:
                    count = row.high_watermark - self._offsets[row.partition_index]
                    self._offsets[row.partition_index] += count
                    self._changed.add(row.partition_index)
                    found += count
        return found


def produce(client: Client, indexes: list[int], batch: bytes) -> None:
    rows = [Message(index=index, records=batch) for index in indexes]
    client.call(
        apis.PRODUCE,
        PRODUCE_VERSION,
        transactional_id=None,
        acks=1,
        timeout_ms=10_000,
        topic_data=[Message(name=TOPIC, partition_data=rows)],
    )


def ends(client: Client, partitions: int) -> list[int]:
    rows = [Message(partition_index=index, current_leader_epoch=-1, timestamp=-1) for index in range(partitions)]
    topics = [Message(name=TOPIC, partitions=rows)]
    answer = client.call(apis.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
    return [row.offset for row in answer.topics[0].partitions]


def measure(broker: Running, partitions: int, active: int, way: str) -> tuple[float, float, float, float]:
    """Processor time of the broker for a turn in us, bytes of a request and of an answer, ms of a turn."""
    producer = Client(broker.port)
    batch = bytes(kernel.build([(int(time.time() * 1000), None, b"x" * 100, ())]))
    consumer = None
    if way != "produce alone":
        consumer = Consumer(broker.port, ends(producer, partitions), in_session=way == "session")
        consumer.fetch(0)
        consumer.fetch(0)
        consumer.request_bytes.clear()
        consumer.answer_bytes.clear()
    turns, began, cpu_s = 0, time.perf_counter(), broker.cpu_seconds()
    while time.perf_counter() - began < TURNS_S:
        indexes = [(turns * active + nth) % partitions for nth in range(active)]
        produce(producer, indexes, batch)
        left = active
        while consumer is not None and left > 0:
            left -= consumer.fetch(1000)
        turns += 1
    took_s, cpu_s = time.perf_counter() - began, broker.cpu_seconds() - cpu_s
    producer.close()
    if consumer is None:
        return cpu_s / turns * 1e6, 0, 0, took_s / turns * 1e3
    consumer.client.close()
    sizes = statistics.mean(consumer.request_bytes), statistics.mean(consumer.answer_bytes)
    return cpu_s / turns * 1e6, *sizes, took_s / turns * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python bench/fetch_sessions.py", description=__doc__)
    parser.add_argument("--partitions", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default="full,session,produce alone")
    options = parser.parse_args()
    rows: list[list[str]] = []
    for partitions, active in ((1, 1), (options.partitions, 1), (options.partitions, 10)):
        folder = Path(tempfile.mkdtemp(prefix="headrace-sessions-"))
        broker = start(CONTESTANTS["headrace"], folder / "node")
        try:
            client = Client(broker.port)
            topic = Message(name=TOPIC, num_partitions=partitions, replication_factor=1, assignments=[], configs=[])
            client.call(apis.CREATE_TOPICS, 7, topics=[topic], timeout_ms=60_000, validate_only=False)
            client.close()
            ways = options.ways.split(",")
            taken: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way in ways:
                    taken[way].append(measure(broker, partitions, active, way))
        finally:
            broker.stop()
            shutil.rmtree(folder, ignore_errors=True)
        for way, rounds in taken.items():
            cpu_us, asked, answered, ms = (statistics.median(column) for column in zip(*rounds, strict=True))
            figures = f"{cpu_us:,.0f}", f"{asked:,.0f}", f"{answered:,.0f}", f"{ms:.2f}"
            rows.append([f"{partitions:,}", str(active), way, *figures])
    print(
        table(["partitions", "written in a turn", "way", "broker us a turn", "request B", "answer B", "turn ms"], rows)
    )


if __name__ == "__main__":
    main()
