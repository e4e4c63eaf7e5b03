"""What a consumer gives from a broker that stays well: records, Arrow batches, positions, order, bounds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator

import pytest
from confluent_kafka import Producer as ConfluentProducer

from brokers import Broker, wait_for
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import read
from headrace.client.admin.produce import Produced, produce
from headrace.client.consumer.consumer import Consumer
from headrace.client.consumer.fetcher import Reset
from headrace.client.consumer.options import ConsumerOptions
from headrace.client.errors import EngineClosed, NoBroker, Refusal, UnknownTopic
from headrace.client.producer.request import Outgoing
from headrace.errors import (
    HeadraceError,
    InvalidRecord,
    InvalidRequest,
    OffsetOutOfRange,
    RequestTimedOut,
    SettingError,
)
from headrace.records import kernel
from headrace.records.arrow import TYPES
from headrace.records.consumer_records import ReceivedRecord
from headrace.records.record import NewRecord
from proving import proves

MakeTopic = Callable[..., str]
NOW_MS = 1_700_000_000_000


def send(cluster: Cluster, topic: str, numbers: range, partition: int = 0, per_batch: int = 50) -> None:
    """Values are the numbers, and the numbers are the seconds after NOW_MS."""
    for at in range(0, len(numbers), per_batch):
        records: list[NewRecord] = [
            (NOW_MS + 1000 * n, b"k%d" % n, b"%d" % n, []) for n in numbers[at : at + per_batch]
        ]
        # One after the other: a leader that is not there yet must not bring them out of order.
        (sent,) = produce(cluster, [Outgoing(topic, partition, kernel.build(records))])
        assert isinstance(sent, Produced)


def collect(consumer: Consumer, count: int, *passing: type[HeadraceError]) -> list[ReceivedRecord]:
    """As many records as come by polling, or the test fails. `passing` is an error that one partition may have."""
    found: list[ReceivedRecord] = []

    def more() -> bool:
        with contextlib.suppress(*passing):
            found.extend(consumer.poll(timeout_ms=200))
        return len(found) >= count

    wait_for(f"{count} records", more, pause_s=0.0)
    return found


def values(records: Iterable[ReceivedRecord]) -> list[int]:
    return [int(record.value) for record in records]


@pytest.fixture
def consumer(broker: Broker) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(topics: str | list[str] | None = None, **options: object) -> Consumer:
        given: ConsumerOptions = {"bootstrap": broker.bootstrap, "max_wait_ms": 100, **options}  # type: ignore[typeddict-item]
        made.append(Consumer(topics, **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


MakeConsumer = Callable[..., Consumer]


@proves("R8")
def test_every_record_of_every_partition_once_and_in_order(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=3)
    for partition in range(3):
        send(cluster, name, range(1000 * partition, 1000 * partition + 700), partition)
    found = collect(consumer(name), 2100)
    for partition in range(3):
        mine = [record for record in found if record.partition == partition]
        assert [record.offset for record in mine] == list(range(700))
        assert values(mine) == list(range(1000 * partition, 1000 * partition + 700))
        assert {record.topic for record in mine} == {name}
        assert [record.timestamp_ms for record in mine] == [NOW_MS + 1000 * n for n in values(mine)]
        assert [record.key for record in mine] == [b"k%d" % n for n in values(mine)]


def test_a_poll_gives_no_more_than_asked_for_and_waits_no_longer_than_told(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(100), 0)
    send(cluster, name, range(100), 1)
    one = consumer(name)
    sizes: list[int] = []
    found: list[ReceivedRecord] = []
    while len(found) < 200:
        records = one.poll(timeout_ms=5000, max_records=7)
        sizes.append(len(records))
        found += records
    assert max(sizes) == 7
    assert len(found) == 200
    assert one.poll(timeout_ms=150) == []
    send(cluster, name, range(100, 103))
    assert values(wait_for("records without waiting", lambda: one.poll(timeout_ms=0))) == [100, 101, 102]


@proves("R8")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_confluent_kafka_sent_is_read_with_its_headers(
    broker: Broker, topic: MakeTopic, consumer: MakeConsumer, codec: str
) -> None:
    name = topic()
    producer = ConfluentProducer({"bootstrap.servers": broker.bootstrap, "compression.type": codec, "linger.ms": 50})
    sent = [
        (b"key" if n % 3 else None, None if n % 5 == 4 else b"value %d" % n * (n % 7), [("n", b"%d" % n), ("z", None)])
        for n in range(300)
    ]
    for key, value, headers in sent:
        producer.produce(name, value, key, headers=list(headers))
    assert producer.flush(30) == 0
    found = collect(consumer(name), 300)
    assert [(record.key, record.value, record.headers) for record in found] == sent


@proves("R8")
def test_an_iterator_ends_after_silence_and_what_it_did_not_yield_comes_next(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic()
    send(cluster, name, range(1200))
    one = consumer(name)
    first = list(itertools.islice(one.records(), 130))
    assert one.position(name, 0) == 130
    second = one.poll(timeout_ms=5000, max_records=30)
    assert one.position(name, 0) == 160
    rest = list(one.records(timeout_ms=300))
    assert values([*first, *second, *rest]) == list(range(1200))
    assert values(itertools.islice(iter(consumer(name)), 3)) == [0, 1, 2]


@proves("R8", "S1")
def test_arrow_batches_have_every_row_and_may_take_turns_with_records(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(600), 0)
    send(cluster, name, range(1000, 1600), 1)
    one = consumer(name)
    rows = [batch.to_pylist() for batch in one.batches(timeout_ms=300)]
    got = {partition: [row for part in rows for row in part if row["partition"] == partition] for partition in (0, 1)}
    assert [int(row["value"]) for row in got[0]] == list(range(600))
    assert [int(row["value"]) for row in got[1]] == list(range(1000, 1600))
    assert [row["offset"] for row in got[1]] == list(range(600))
    assert got[0][5]["timestamp"].timestamp() * 1000 == NOW_MS + 5000
    one.seek_to_start()
    mixed: list[tuple[int, int]] = []
    while len(mixed) < 1200:
        mixed += [(record.partition, record.offset) for record in one.poll(timeout_ms=5000, max_records=37)]
        for batch in itertools.islice(one.batches(("partition", "offset"), batch_rows=91, timeout_ms=200), 1):
            mixed += [(row["partition"], row["offset"]) for row in batch.to_pylist()]
    assert sorted(mixed) == [(partition, offset) for partition in (0, 1) for offset in range(600)]
    one.seek_to_start()
    everything = next(one.batches(TYPES, timeout_ms=5000))
    assert everything.schema.names == list(TYPES)


@proves("R8")
def test_reading_goes_on_where_it_is_told_to(cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(500), 0)
    send(cluster, name, range(500, 1000), 1)
    one = consumer(name)
    one.seek(name, 0, 490)
    one.seek(name, 1, 500)
    assert values(collect(one, 10)) == list(range(490, 500))
    one.seek_to_time(NOW_MS + 498_500)
    assert sorted(values(collect(one, 501))) == [499, *range(500, 1000)]
    one.seek_to_time(NOW_MS + 998_000, [(name, 1)])
    assert values(collect(one, 2)) == [998, 999]
    one.seek_to_time(NOW_MS + 10_000_000)
    assert one.poll(timeout_ms=200) == []
    assert (one.position(name, 0), one.position(name, 1)) == (500, 500)
    one.seek_to_start([(name, 1)])
    assert one.lag() == {(name, 0): 0, (name, 1): 500}
    assert len(collect(one, 500)) == 500
    one.seek_to_start()
    one.seek_to_end()
    send(cluster, name, range(1000, 1003), 1)
    assert values(collect(one, 3)) == [1000, 1001, 1002]
    with pytest.raises(InvalidRequest, match=f"offset -1 of {name}-0 is below 0"):
        one.seek(name, 0, -1)
    with pytest.raises(RequestTimedOut, match=f"{name}-9 to be assigned"):
        consumer(name, timeout_ms=300).seek(name, 9, 0)


def test_a_paused_partition_is_left_alone_and_loses_nothing(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(300), 0)
    send(cluster, name, range(300), 1)
    one = consumer(name)
    first = one.poll(timeout_ms=5000, max_records=10)
    place = (first[0].topic, first[0].partition)
    one.pause([place])
    others = collect(one, 300)
    assert {record.partition for record in others} == {1 - place[1]}
    assert one.poll(timeout_ms=150) == []
    one.resume()
    rest = collect(one, 290)
    assert values([*first, *rest]) == list(range(300))


def test_what_waits_of_a_paused_partition_does_not_hold_up_the_others(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(5000), 0, per_batch=500)
    send(cluster, name, range(5000), 1, per_batch=500)
    one = consumer(name, partition_fetch_bytes=20_000, buffer_bytes=20_000)
    first = one.poll(timeout_ms=5000, max_records=10)
    paused = first[0].partition
    one.pause([(name, paused)])
    assert {record.partition for record in collect(one, 5000)} == {1 - paused}
    one.resume()
    assert values([*first, *collect(one, 4990)]) == list(range(5000))


@proves("J10")
def test_a_pause_holds_in_priority_order_too(cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(100), 0)
    send(cluster, name, range(100, 200), 1)
    one = consumer(name, priority_header="priority")
    found = one.poll(timeout_ms=5000, max_records=10)
    one.pause([(name, 0)])
    found += collect(one, 100 - sum(record.partition for record in found))
    assert one.poll(timeout_ms=100) == []
    one.resume()
    found += collect(one, 200 - len(found))
    for partition in (0, 1):
        mine = [record for record in found if record.partition == partition]
        assert values(mine) == list(range(100 * partition, 100 * partition + 100))


@proves("R8")
def test_where_a_consumer_starts(cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer) -> None:
    name = topic()
    send(cluster, name, range(10))
    late = consumer(name, start="latest")
    assert late.position(name, 0) == 10
    send(cluster, name, range(10, 12))
    assert values(collect(late, 2)) == [10, 11]
    assert values(collect(consumer(partitions=[(name, 0)]), 12)) == list(range(12))


@proves("R8")
def test_an_offset_that_is_gone_is_told_and_gone_on_from(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(100), 0)
    send(cluster, name, range(100, 110), 1)
    operations.delete_records(cluster, name, {0: 60})
    told: list[Reset] = []
    one = consumer(name, on_reset=told.append)
    one.seek(name, 0, 20)
    assert sorted(values(collect(one, 50))) == [*range(60, 100), *range(100, 110)]
    wait_for("the reset to be told", lambda: told)
    assert told == [Reset(name, 0, 20, 60, "offset 20 is not in the log")]
    assert "reading goes on at offset 60 instead of 20" in str(told[0])
    strict = consumer(name, start="none")
    strict.seek(name, 0, 20)
    strict.seek(name, 1, 0)
    assert values(collect(strict, 10, OffsetOutOfRange)) == list(range(100, 110))
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match=f"{name}-0: offset 20 is not in the log; seek"):
            strict.poll(timeout_ms=5000)
    strict.seek(name, 0, 99)
    assert values(collect(strict, 1)) == [99]


def test_a_batch_above_every_limit_is_read(cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer) -> None:
    name = topic(partitions=2)
    big = [Outgoing(name, n % 2, kernel.build([(NOW_MS, None, b"%d" % n * 300_000, [])])) for n in range(6)]
    assert all(isinstance(result, Produced) for result in produce(cluster, big))
    found = collect(consumer(name, fetch_bytes=1000, partition_fetch_bytes=100, buffer_bytes=100), 6)
    assert sorted(record.value[:1] for record in found) == [b"%d" % n for n in range(6)]
    assert {len(record.value) for record in found} == {300_000}


def test_fetching_goes_on_while_the_caller_works_and_stops_at_its_bound(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic()
    for _ in range(40):
        send(cluster, name, range(2000), per_batch=2000)
    one = consumer(name, partition_fetch_bytes=50_000, buffer_bytes=200_000)
    fetcher = one._core._fetcher
    assert len(one.poll(timeout_ms=5000, max_records=1)) == 1
    wait_for("a quarter of the buffer to fill while nobody polls", lambda: fetcher.buffered_bytes >= 50_000)
    assert fetcher.buffered_bytes < 50_000 + 2 * 50_000
    assert len(collect(one, 79_999)) == 79_999


def test_what_is_not_there_is_told_and_may_come_later(
    broker: Broker, cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic()
    with pytest.raises(UnknownTopic, match="topic create"):
        consumer(f"{name}-late").poll(timeout_ms=5000)
    with pytest.raises(UnknownTopic, match="no partition 7, only 0 to 0"):
        consumer(partitions=[(name, 7)]).poll(timeout_ms=5000)
    late = consumer([name, f"{name}-late"])
    operations.create_topic(cluster, f"{name}-late", partitions=1)
    send(cluster, f"{name}-late", range(5))
    found: list[ReceivedRecord] = []

    def more() -> bool:
        try:
            found.extend(late.poll(timeout_ms=200))
        except UnknownTopic:
            return False
        return len(found) == 5

    wait_for("records of a topic that came later", more)
    nowhere = Consumer(name, bootstrap="127.0.0.1:1", timeout_ms=200)
    with pytest.raises(NoBroker, match=r"no broker answers at 127\.0\.0\.1:1"):
        nowhere.poll(timeout_ms=10_000)
    nowhere.close()


def test_a_decoder_makes_the_values_and_one_that_fails_holds_up_its_partition_alone(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(50), 0)
    send(cluster, name, range(100, 120), 1)

    def decode(value: bytes | None) -> int:
        if value == b"33":
            raise ValueError("thirty-three")
        return int(value or b"")

    one = consumer(name, decoder=decode)
    found = collect(one, 53, InvalidRecord)
    assert sorted(record.value for record in found) == [*range(33), *range(100, 120)]
    with pytest.raises(InvalidRecord, match=f"{name}-0 at offset 33: the decoder failed with ValueError: thirty-three"):
        one.poll(timeout_ms=5000)
    assert one.position(name, 0) == 33
    one.seek(name, 0, 34)
    assert [record.value for record in collect(one, 16)] == list(range(34, 50))


@proves("J10")
def test_higher_priorities_of_what_is_there_come_first(
    cluster: Cluster, topic: MakeTopic, consumer: MakeConsumer
) -> None:
    name = topic()
    records: list[NewRecord] = [
        (NOW_MS, None, b"%d" % n, [("priority", b"%d" % (n % 3))] if n % 4 else []) for n in range(300)
    ]
    assert all(isinstance(sent, Produced) for sent in produce(cluster, [Outgoing(name, 0, kernel.build(records))]))
    one = consumer(name, priority_header="priority")
    found = [record for _ in range(30) for record in one.poll(timeout_ms=5000, max_records=10)]
    of = [(-(n % 3) if n % 4 else 0, n) for n in range(300)]
    assert values(found) == [n for _, n in sorted(of)]
    assert one.position(name, 0) == 300
    one.seek_to_start()
    one.poll(timeout_ms=5000, max_records=50)
    assert one.position(name, 0) == 0


@proves("G18")
def test_reading_by_topic_partition_offset_and_count(broker: Broker, cluster: Cluster, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    send(cluster, name, range(500), 1)
    where = broker.bootstrap, name, 1
    assert values(read(*where, 120, 75)) == list(range(120, 195))
    assert [record.offset for record in read(*where, 490, 100)] == list(range(490, 500))
    assert read(*where, 500, 10) == []
    assert read(*where, 3, 0) == []
    with pytest.raises(Refusal, match="the log does not reach there"):
        read(*where, 501, 1)
    with pytest.raises(UnknownTopic):
        read(broker.bootstrap, name, 2, 0, 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start": "middle"}, "start is 'middle'"),
        ({"mode": "both"}, "mode is 'both'"),
        ({"mode": "broadcast"}, "group: give one"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1"),
        ({"partitions": [("t", 0)]}, "in place of topics"),
        ({"bootstrap": "nohost:port"}, "not an address"),
        ({"group": "g", "assignor": "fair"}, "fair"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: ConsumerOptions, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        Consumer("t", **options)
    with pytest.raises(SettingError, match="needs a topic"):
        Consumer()


def test_a_closed_consumer_says_so(topic: MakeTopic, consumer: MakeConsumer) -> None:
    one = consumer(topic())
    one.close()
    one.close()
    for call in (one.poll, one.lag, one.commit, lambda: next(one.records()), lambda: one.seek("t", 0, 0)):
        with pytest.raises(EngineClosed, match="closed"):
            call()
    fresh = consumer(topic())
    with pytest.raises(SettingError, match="group"):
        fresh.commit({("t", 0): 1})
