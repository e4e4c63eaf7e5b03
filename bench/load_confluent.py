"""The Kafka load by the confluent-kafka Python client, for machines without a C compiler.

Same arguments, modes and answer as `load_kafka.c`; see there. The client costs more processor time per message than
the broker, so msg/s says more about the client than about the broker; the broker's own processor time stays true.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

STALL_S = 30.0
PRIME_BYTES = 6000


def begin_load() -> float:
    """Tells the caller that the load can begin, waits for its word, and answers when that was."""
    print("ready", flush=True)
    sys.stdin.readline()
    return time.perf_counter()


def administer(mode: str, bootstrap: str, topic: str, partitions: int) -> dict[str, Any]:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    if mode == "create":
        results = admin.create_topics([NewTopic(topic, partitions, 1)])
    else:
        results = admin.delete_topics([topic])
    for result in results.values():
        result.result(STALL_S)
    return {"mode": mode}


def prime(bootstrap: str, topic: str, partitions: int, size: int) -> dict[str, Any]:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": 1, "linger.ms": 5})
    payload, each, rounds = b"x" * size, PRIME_BYTES // (size + 1) + 1, 3
    for _ in range(rounds):
        for i in range(each * partitions):
            producer.produce(topic, payload, partition=i % partitions)
        if producer.flush(STALL_S):
            raise SystemExit("load: no delivery report for 30 s")
    return {"mode": "prime", "primed": rounds * each * partitions}


def produce(
    mode: str, bootstrap: str, topic: str, partitions: int, count: int, size: int, window: int
) -> dict[str, Any]:
    throughput = mode == "produce"
    config: dict[str, Any] = {"bootstrap.servers": bootstrap, "acks": 1, "linger.ms": 5 if throughput else 0}
    config |= {"socket.nagle.disable": True, "queue.buffering.max.messages": 200_000}
    if not throughput:
        config["batch.num.messages"] = 1
    if mode == "sync":
        window = 1
    producer = Producer(config)
    payload = b"x" * size
    latencies_s: list[float] = []
    answered = [0, 0]

    def on_delivery(sent_s: float) -> Callable[[Any, Any], None]:
        def report(error: Any, _message: Any) -> None:
            answered[error is not None] += 1
            latencies_s.append(time.perf_counter() - sent_s)

        return report

    def plain_report(error: Any, _message: Any) -> None:
        answered[error is not None] += 1

    def send(i: int) -> None:
        report = plain_report if throughput else on_delivery(time.perf_counter())
        while True:
            try:
                producer.produce(topic, payload, partition=i % partitions, on_delivery=report)
                return
            except BufferError:
                producer.poll(0.01)

    for i in range(partitions):
        send(i)
    if producer.flush(STALL_S):
        raise SystemExit("load: no delivery report for 30 s")
    latencies_s.clear()
    answered[:] = [0, 0]
    began_s = begin_load()
    for i in range(count):
        send(i)
        if not throughput:
            while sum(answered) < i + 2 - window:
                producer.poll(0.1)
        elif i % 1000 == 0:
            producer.poll(0)
    if producer.flush(STALL_S):
        raise SystemExit("load: no delivery report for 30 s")
    seconds = time.perf_counter() - began_s
    answer = {"mode": mode, "warmed": partitions, "delivered": answered[0], "failed": answered[1], "seconds": seconds}
    return answer | percentiles(latencies_s) if latencies_s else answer


def percentiles(latencies_s: list[float]) -> dict[str, float]:
    latencies_s.sort()
    shares = (("p50_us", 0.5), ("p99_us", 0.99), ("p999_us", 0.999))
    return {name: latencies_s[min(int(share * len(latencies_s)), len(latencies_s) - 1)] * 1e6 for name, share in shares}


def produce_portions(
    mode: str, bootstrap: str, topic: str, partitions: int, count: int, size: int, window: int
) -> dict[str, Any]:
    transactional = mode == "transactions"
    config: dict[str, Any] = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5}
    config |= {"socket.nagle.disable": True, "queue.buffering.max.messages": 200_000}
    producer = Producer(config | ({"transactional.id": topic} if transactional else {}))
    if transactional:
        producer.init_transactions(STALL_S)
    payload = b"x" * size
    commits_s: list[float] = []
    answered = [0, 0]

    def report(error: Any, _message: Any) -> None:
        answered[error is not None] += 1

    def portion(numbers: range) -> None:
        if transactional:
            producer.begin_transaction()
        for i in numbers:
            producer.produce(topic, payload, partition=i % partitions, on_delivery=report)
            producer.poll(0)
        if producer.flush(STALL_S):
            raise SystemExit("load: no delivery report for 30 s")
        committing_s = time.perf_counter()
        if transactional:
            producer.commit_transaction(STALL_S)
        commits_s.append(time.perf_counter() - committing_s)

    portion(range(partitions))
    commits_s.clear()
    answered[:] = [0, 0]
    began_s = begin_load()
    for first in range(0, count, window):
        portion(range(first, min(first + window, count)))
    seconds = time.perf_counter() - began_s
    answer = {"mode": mode, "warmed": partitions, "delivered": answered[0], "failed": answered[1], "seconds": seconds}
    return answer | percentiles(commits_s)


def consume(bootstrap: str, topic: str, partitions: int) -> dict[str, Any]:
    config = {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False}
    consumer = Consumer(config | {"enable.partition.eof": True, "fetch.wait.max.ms": 100})
    # Known beforehand, the topic is not looked for once a second while the clock runs.
    consumer.list_topics(topic, timeout=STALL_S)
    began_s = begin_load()
    consumer.assign([TopicPartition(topic, i, OFFSET_BEGINNING) for i in range(partitions)])
    next_offset = [0] * partitions
    received = size = gaps = ended = 0
    last_record_s = began_s
    while ended < partitions:
        messages: list[Any] = consumer.consume(10_000, 0.005)
        if not messages and time.perf_counter() - last_record_s > STALL_S:
            raise SystemExit("load: no record for 30 s")
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise SystemExit(f"load: {error}")
                ended += 1
                continue
            gaps += message.offset() != next_offset[message.partition()]
            next_offset[message.partition()] = message.offset() + 1
            received += 1
            size += len(message.value())
            last_record_s = time.perf_counter()
    seconds = last_record_s - began_s
    return {"mode": "consume", "received": received, "bytes": size, "gaps": gaps, "seconds": seconds}


def main() -> None:
    mode, host, port, topic, *numbers = sys.argv[1:]
    partitions, count, size, window = (int(number) for number in numbers)
    bootstrap = f"{host}:{port}"
    if mode in ("create", "delete"):
        answer = administer(mode, bootstrap, topic, partitions)
    elif mode == "prime":
        answer = prime(bootstrap, topic, partitions, size)
    elif mode == "consume":
        answer = consume(bootstrap, topic, partitions)
    elif mode in ("transactions", "portions"):
        answer = produce_portions(mode, bootstrap, topic, partitions, count, size, window)
    else:
        answer = produce(mode, bootstrap, topic, partitions, count, size, window)
    print(json.dumps(answer), flush=True)
    if answer.get("failed"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
