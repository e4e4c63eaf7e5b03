"""A consumer whose caller changes its mind: pauses with a full buffer, other ways of taking, a close from elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice

import pytest

from brokers import Broker, wait_for
from client.test_consumer_pull import collect, send, values
from headrace.client.admin.cluster import Cluster
from headrace.client.consumer.consumer import Consumer
from headrace.client.errors import EngineClosed
from headrace.errors import InvalidRequest
from proving import proves

MakeTopic = Callable[..., str]
MakeConsumer = Callable[..., Consumer]


@pytest.fixture
def consumer(broker: Broker) -> Iterator[MakeConsumer]:
    with ExitStack() as stack:

        def make(topic: str, **options: object) -> Consumer:
            made = Consumer(topic, bootstrap=broker.bootstrap, max_wait_ms=100, **options)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield make


@proves("R8")
@pytest.mark.parametrize("priority_header", [None, "priority"])
def test_a_partition_paused_with_a_full_buffer_does_not_starve_the_others(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer, priority_header: str | None
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(3000), 0, per_batch=100)
    one = consumer(name, partition_fetch_bytes=10_000, buffer_bytes=20_000, priority_header=priority_header)
    fetcher = one._core._fetcher
    first = one.poll(timeout_ms=5000, max_records=10)
    wait_for("the buffer to be full and quiet", lambda: fetcher._full and not fetcher._busy)
    one.pause([(name, 0)])
    send(cluster, name, range(5), 1)
    assert values(one.poll(timeout_ms=10_000)) == list(range(5))
    one.resume()
    assert values([*first, *collect(one, 2990)]) == list(range(3000))
    assert one.poll(timeout_ms=0) == []
    assert fetcher.buffered_bytes == 0


def test_when_all_is_paused_nothing_is_fetched_again(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic()
    send(cluster, name, range(3000), per_batch=100)
    one = consumer(name, partition_fetch_bytes=10_000, buffer_bytes=20_000)
    fetcher = one._core._fetcher
    first = one.poll(timeout_ms=5000, max_records=10)
    wait_for("the buffer to be full and quiet", lambda: fetcher._full and not fetcher._busy)
    one.pause()
    assert one.poll(timeout_ms=0) == []
    assert fetcher.buffered_bytes > 10_000
    one.resume()
    assert values([*first, *collect(one, 2990)]) == list(range(3000))


@proves("R8")
@pytest.mark.parametrize("priority_header", [None, "priority"])
def test_what_an_iterator_did_not_yield_comes_as_rows(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer, priority_header: str | None
) -> None:
    name = topic()
    send(cluster, name, range(1200))
    one = consumer(name, priority_header=priority_header)
    found = values(islice(one.records(), 3))
    rows = next(one.batches(("offset",), batch_rows=20, timeout_ms=10_000))
    found += rows["offset"].to_pylist()
    assert one.position(name, 0) == 23
    found += values(one.poll(5000, max_records=2))
    found += [n for rows in one.batches(("offset",), timeout_ms=300) for n in rows["offset"].to_pylist()]
    assert found == list(range(1200))
    with pytest.raises(InvalidRequest, match="max_records is 0"):
        one.poll(max_records=0)


@proves("R8")
def test_a_thread_that_waits_for_records_hears_of_a_close(
    topic: MakeTopic, consumer: MakeConsumer, cluster: Cluster
) -> None:
    name = topic()
    send(cluster, name, range(1))
    consumer(name, client_id="shared-by-two")
    one = consumer(name, client_id="shared-by-two")
    heard: list[Exception] = []
    began = threading.Event()

    def read() -> None:
        try:
            for _ in one.records():
                began.set()
        except EngineClosed as error:
            heard.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert began.wait(20)
    one.close()
    reader.join(10)
    assert [str(error) for error in heard] == ["this consumer is closed; make a new one"]
