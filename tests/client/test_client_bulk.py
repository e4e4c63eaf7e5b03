"""Spans of partitions read in bulk, over everything that can happen to a log and its broker meanwhile."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from brokers import Broker, wait_for
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import Fetched, Position, Span, TopicReplaced, fetch, list_offsets, record_sets
from headrace.client.admin.produce import Produced, produce
from headrace.client.errors import UnknownTopic
from headrace.client.fetch_requests import LATEST, FetchLimits
from headrace.client.producer.request import Outgoing
from headrace.errors import CorruptBatch, OffsetOutOfRange
from headrace.records import kernel
from headrace.records.arrow import Decoder
from headrace.records.batch import batches, read_header
from proving import proves

NOW_MS = 1_700_000_000_000
MakeTopic = Callable[..., str]
StartBroker = Callable[..., Broker]


def send(cluster: Cluster, topic: str, numbers: range, per_batch: int = 50, value_bytes: int = 100) -> None:
    """Records whose keys are the numbers, in batches."""
    chunks = [numbers[at : at + per_batch] for at in range(0, len(numbers), per_batch)]
    outgoing = [
        Outgoing(topic, 0, kernel.build([(NOW_MS, b"%d" % n, bytes(value_bytes), []) for n in chunk]))
        for chunk in chunks
    ]
    assert all(isinstance(result, Produced) for result in produce(cluster, outgoing))


def offsets(sets: Iterator[Fetched], span: Span) -> list[int]:
    decoder = Decoder(span.topic, span.partition, ["offset"])
    return [
        offset
        for fetched in sets
        for rows in decoder.decode(fetched.records, span.first_offset, span.next_offset)
        for offset in rows["offset"].to_pylist()
    ]


def end_of(cluster: Cluster, topic: str) -> int:
    return list_offsets(cluster, topic, {0: LATEST})[0].offset


@proves("S1")
@pytest.mark.parametrize("set_bytes", [1, 7_000, 64 << 10, 8 << 20])
def test_a_span_has_every_record_once_whatever_the_size_of_a_set(
    cluster: Cluster, topic: MakeTopic, set_bytes: int
) -> None:
    name = topic()
    send(cluster, name, range(2_000))
    for first, end in ((0, 2_000), (1, 1_999), (49, 51), (777, 778), (50, 100), (5, 5)):
        span = Span(name, 0, first, end)
        assert offsets(record_sets(cluster, span, set_bytes), span) == list(range(first, end))


def test_a_batch_above_the_size_of_a_set_is_read(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(3), per_batch=1, value_bytes=500_000)
    span = Span(name, 0, 0, 3)
    sets = list(record_sets(cluster, span, 1000))
    assert offsets(iter(sets), span) == [0, 1, 2]


def test_a_narrow_span_of_a_long_log_fetches_little_else(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(20_000), per_batch=200)
    for first, end, most in ((5_000, 5_001, 70_000), (5_000, 6_000, 1 << 20), (0, 15_000, 2_400_000)):
        span = Span(name, 0, first, end)
        sets = list(record_sets(cluster, span, 1 << 20))
        assert offsets(iter(sets), span) == list(range(first, end))
        assert sum(len(each.records) for each in sets) < most


def test_a_reader_may_leave_early_and_the_cluster_is_free_meanwhile(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(2_000))
    span = Span(name, 0, 0, 2_000)
    readers = [record_sets(cluster, span, 20_000) for _ in range(3)]
    firsts = [next(reader) for reader in readers]
    assert end_of(cluster, name) == 2_000
    assert next(readers[0]) != firsts[0]
    readers[1].close()  # type: ignore[attr-defined]
    assert offsets(readers[2], span) == list(range(end_of_set(firsts[2].records), 2_000))
    assert end_of(cluster, name) == 2_000


def end_of_set(records: memoryview) -> int:
    return max(header.next_offset for header, _ in batches(records))


def test_deleted_data_is_told_with_its_offsets(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(500))
    span = Span(name, 0, 100, 500)
    reader = record_sets(cluster, span, 6_500)
    next(reader)
    operations.delete_records(cluster, name, {0: 400})
    with pytest.raises(OffsetOutOfRange, match=rf"{name}-0: offsets \d+ to 399 are gone; the log begins at 400"):
        list(reader)
    with pytest.raises(OffsetOutOfRange, match=rf"{name}-0: offsets 100 to 399 are gone; the log begins at 400"):
        list(record_sets(cluster, span))
    with pytest.raises(OffsetOutOfRange, match=rf"{name}-0: offsets 7 to 8 are gone; the log begins at 400"):
        list(record_sets(cluster, Span(name, 0, 7, 9)))


def test_a_span_beyond_the_end_is_told(cluster: Cluster, topic: MakeTopic) -> None:
    name = topic()
    send(cluster, name, range(100))
    for first in (0, 100, 150):
        told = rf"{name}-0: offsets {first} to 199 were asked for; the log ends at 100"
        with pytest.raises(OffsetOutOfRange, match=told):
            list(record_sets(cluster, Span(name, 0, first, 200)))


def test_what_is_not_there_is_told(cluster: Cluster, topic: MakeTopic) -> None:
    with pytest.raises(UnknownTopic, match="no topic 'nowhere'"):
        list(record_sets(cluster, Span("nowhere", 0, 0, 1)))
    name = topic()
    with pytest.raises(UnknownTopic, match="no partition 5"):
        list(record_sets(cluster, Span(name, 5, 0, 1)))


@proves("S1")
@pytest.mark.parametrize("now", [1, 2_000])
def test_a_topic_made_anew_is_not_read_in_place_of_the_old(
    broker: Broker, cluster: Cluster, topic: MakeTopic, now: int
) -> None:
    name = topic()
    send(cluster, name, range(2_000))
    span = Span(name, 0, 0, 2_000, cluster.topic(name).topic_id)
    reader = record_sets(cluster, span, 20_000)
    next(reader)
    with Cluster(broker.bootstrap) as other:
        operations.delete_topic(other, name)
        other.forget()
        operations.create_topic(other, name, partitions=1)
        send(other, name, range(now))
        with pytest.raises(TopicReplaced, match=rf"{name}-0: offsets 0 to 1999 are gone: .* created again"):
            list(reader)
        fresh = Span(name, 0, 0, now, other.topic(name).topic_id)
        assert offsets(record_sets(cluster, fresh), fresh) == list(range(now))


@proves("S1")
def test_gaps_of_a_compacted_log_are_passed_over(fresh_broker: StartBroker) -> None:
    broker = fresh_broker(settings={"retention.check.ms": 50})
    with Cluster(broker.bootstrap) as cluster:
        compacted = {"cleanup.policy": "compact", "segment.bytes": "16384", "min.cleanable.dirty.ratio": "0.01"}
        operations.create_topic(cluster, "latest", partitions=1, configs=compacted)
        for _ in range(20):
            send(cluster, "latest", range(50))
        send(cluster, "latest", range(1_000, 1_001))
        end = end_of(cluster, "latest")
        span = Span("latest", 0, 0, end)

        def thinned() -> list[int] | None:
            found = offsets(record_sets(cluster, span, 10_000), span)
            return found if len(found) < end // 2 else None

        found = wait_for("compaction", thinned)
        assert found[-1] == end - 1
        gap = next(n for n in range(1, end) if n not in found and n - 1 not in found)
        inside = Span("latest", 0, gap - 1, gap + 1)
        assert offsets(record_sets(cluster, inside), inside) == []
        tail = Span("latest", 0, gap, end)
        later = offsets(record_sets(cluster, tail), tail)
        assert later[-1] == end - 1
        assert set(later) <= set(found)


def test_an_answer_behind_the_span_is_no_gap(
    cluster: Cluster, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a leader that has just taken over, and does not know yet how far the log is acknowledged."""
    name = topic()
    send(cluster, name, range(1_000))
    behind = iter(range(5))

    def lagging(asked: Cluster, positions: Sequence[Position], limits: FetchLimits | None = None) -> list[Fetched]:
        if next(behind, None) is not None:
            return [Fetched(positions[0], memoryview(b""), 500, 0)]
        return fetch(asked, positions, limits)

    monkeypatch.setattr("headrace.client.admin.fetch.fetch", lagging)
    span = Span(name, 0, 800, 1_000)
    assert offsets(record_sets(cluster, span), span) == list(range(800, 1_000))


def test_a_damaged_last_batch_is_no_gap(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "spoilt", partitions=1)
        send(cluster, "spoilt", range(100))
        (log,) = broker.data.rglob("spoilt-0/*.log")
        with log.open("r+b") as file:
            file.seek(read_header(log.read_bytes()).size_bytes + 23)
            file.write(b"\x80")
        with pytest.raises(CorruptBatch, match=r"spoilt-0 at offset 0.*CRC"):
            list(record_sets(cluster, Span("spoilt", 0, 0, 100)))


@proves("S1")
def test_a_broker_that_is_killed_in_mid_read_is_waited_for(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "steady", partitions=1)
        send(cluster, "steady", range(20_000))
        span = Span("steady", 0, 0, 20_000)
        reader = record_sets(cluster, span, 200_000)
        taken = [next(reader), next(reader)]
        broker.kill()
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(list, reader)
            broker.start()
            assert offsets(iter([*taken, *rest.result(60)]), span) == list(range(20_000))


@proves("S1")
def test_a_corrupt_batch_is_told_by_topic_partition_and_offset(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    with Cluster(broker.bootstrap) as cluster:
        operations.create_topic(cluster, "spoilt", partitions=1)
        send(cluster, "spoilt", range(1_000), value_bytes=20)
        (log,) = broker.data.rglob("spoilt-0/*.log")
        content = log.read_bytes()
        damaged = [(header.base_offset, header.size_bytes) for header, _ in batches(memoryview(content))][7][0]
        at = content.index(struct.pack(">q", damaged)) + 100
        with log.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]))
        span = Span("spoilt", 0, 0, 1_000)
        with pytest.raises(CorruptBatch, match=rf"spoilt-0 at offset {damaged}: .*CRC"):
            offsets(record_sets(cluster, span), span)
