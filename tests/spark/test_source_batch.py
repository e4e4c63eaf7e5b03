"""Topics as a batch source: the same records as another client reads, within the bounds asked for, or a clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from brokers import Broker, free_port, wait_for
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.records.arrow import PASSED_ON_BYTES
from headrace.spark import options, plan
from headrace.spark.source import BatchReader
from proving import proves
from spark.confluent_rows import CODECS, START_MS, create_topic, numbered, odd_records, rows_in, rows_of, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Load = Callable[..., "DataFrame"]


@pytest.fixture
def load(spark: SparkSession, broker: Broker) -> Load:
    """`load(subscribe=...)` from the shared broker."""

    def call(**given: object) -> DataFrame:
        named = {name: str(value) for name, value in given.items()}
        return spark.read.format("headrace").option("kafka.bootstrap.servers", broker.bootstrap).options(**named).load()

    return call


@proves("S1")
def test_rows_are_those_of_another_client_over_all_codecs(broker: Broker, load: Load) -> None:
    topic = create_topic(broker, partitions=3)
    for codec in CODECS:
        settings = {"compression.type": codec}
        send(broker, topic, odd_records(), **settings)
        send(broker, topic, numbered(300, headers=[("codec", codec.encode())]), **settings)
    expected = rows_of(broker, topic)
    assert len(expected) == len(CODECS) * 307
    frame = load(subscribe=topic, includeHeaders=True)
    assert rows_in(frame) == expected
    assert rows_in(load(subscribe=topic, includeHeaders=True, minPartitions=11)) == expected
    assert frame.schema.fieldNames()[:7] == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType"
    ]  # fmt: skip
    assert "headers" not in load(subscribe=topic).columns


@proves("S1")
def test_compacted_and_append_time_topics(fresh_broker: Callable[..., Broker], spark: SparkSession) -> None:
    broker = fresh_broker(settings={"retention.check.ms": 100})
    compacted = create_topic(
        broker, 1, "compacted", cleanup_policy="compact", min_cleanable_dirty_ratio=0, segment_bytes=20_000
    )
    appended = create_topic(broker, 2, "appended", message_timestamp_type="LogAppendTime")
    for first in range(0, 1500, 100):
        again = [{"key": b"k%d" % (n % 37), "value": b"%d" % n * 20} for n in range(first, first + 100)]
        send(broker, compacted, again)
    send(broker, compacted, [{"key": b"k5", "value": None}, {"key": b"k6", "value": b""}])
    send(broker, appended, numbered(50, timestamp=START_MS))

    def with_gaps() -> bool:
        offsets = [row[2] for row in rows_of(broker, compacted)]
        return len(offsets) < 700

    wait_for("compaction", with_gaps)
    load = spark.read.format("headrace").option("kafka.bootstrap.servers", broker.bootstrap)
    frame = load.option("subscribe", "compacted,appended").option("includeHeaders", "true").load()
    found = wait_for("the same rows", lambda: same(rows_in(frame), rows_of(broker, compacted, appended)))
    assert {row[7] for row in found if row[0] == appended} == {1}
    assert all(row[6] > START_MS for row in found if row[0] == appended)

    before = rows_of(broker, compacted, appended)
    stream = spark.readStream.format("headrace").option("kafka.bootstrap.servers", broker.bootstrap)
    stream = stream.option("subscribe", "compacted,appended").option("startingOffsets", "earliest")
    rows = stream.option("includeHeaders", "true").option("maxOffsetsPerTrigger", 800).load()
    query = rows.writeStream.format("memory").queryName("streamed").trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    streamed = rows_in(spark.table("streamed"))
    # The same again, unless compaction went on meanwhile.
    assert set(rows_of(broker, compacted, appended)) <= set(streamed) <= set(before)
    assert len(set(streamed)) == len(streamed)


def same(rows: list[Any], expected: list[Any]) -> list[Any]:
    """The rows if they are as expected; compaction may have gone on between the two reads."""
    return rows if rows == expected else []


@pytest.fixture(scope="module")
def bounded(shared_broker: Broker) -> str:
    """Two partitions of 20 records each, a millisecond apart, and one of 5."""
    topic = create_topic(shared_broker, partitions=3)
    for partition, count in ((0, 20), (1, 20), (2, 5)):
        records = [{"value": b"%d" % n, "partition": partition, "timestamp": START_MS + n} for n in range(count)]
        send(shared_broker, topic, records)
    return topic


def places(frame: DataFrame) -> dict[int, list[int]]:
    """Partition to offsets."""
    found: dict[int, list[int]] = {}
    for partition, offset in sorted(map(tuple, frame.select("partition", "offset").collect())):
        found.setdefault(partition, []).append(offset)
    return found


@proves("S1")
def test_bounds_by_offsets_and_times(load: Load, bounded: str) -> None:
    starts, ends = {"0": 3, "1": -2, "2": -1}, {"0": 6, "1": 2, "2": -1}
    by_offset = load(
        subscribe=bounded, startingOffsets=json.dumps({bounded: starts}), endingOffsets=json.dumps({bounded: ends})
    )
    assert places(by_offset) == {0: [3, 4, 5], 1: [0, 1]}
    assert places(load(assign=json.dumps({bounded: [2]}))) == {2: [0, 1, 2, 3, 4]}
    between = load(
        subscribe=bounded,
        startingTimestamp=START_MS + 3,
        endingTimestamp=START_MS + 6,
        startingOffsetsByTimestampStrategy="latest",
    )
    assert places(between) == {0: [3, 4, 5], 1: [3, 4, 5], 2: [3, 4]}
    late = {bounded: {"0": START_MS + 18, "1": START_MS + 99, "2": START_MS + 4}}
    by_time = {"startingOffsetsByTimestamp": json.dumps(late), "subscribe": bounded}
    assert places(load(**by_time, startingOffsetsByTimestampStrategy="latest")) == {0: [18, 19], 2: [4]}
    with pytest.raises(PySparkException, match=f"{bounded}-1 has no record at or after {START_MS + 99} ms"):
        load(**by_time).collect()


@proves("S1")
def test_several_topics_a_pattern_and_columns(broker: Broker, load: Load, spark: SparkSession) -> None:
    prefix = create_topic(broker)
    for name in ("a", "b", "other"):
        send(broker, create_topic(broker, 1, f"{prefix}.{name}"), numbered(3))
    both = load(subscribe=f"{prefix}.a, {prefix}.b", columns="offset,topic")
    assert both.columns == ["offset", "topic"]
    assert sorted(map(tuple, both.collect())) == [(n, f"{prefix}.{name}") for n in range(3) for name in ("a", "b")]
    matching = load(subscribePattern=f"{prefix}[.][ab]", columns="topic,digest,producerId,sequence,headers")
    assert {row["topic"][-2:] for row in matching.collect()} == {".a", ".b"}
    asked = spark.read.format("headrace").option("bootstrap", broker.bootstrap).option("subscribe", f"{prefix}.a")
    assert asked.schema("offset long, value binary").load().columns == ["offset", "value"]
    with pytest.raises(PySparkException, match="column 'value' of the schema is binary"):
        asked.schema("value string").load().collect()


@proves("S1")
def test_filters_reach_the_scan_when_asked_for(load: Load, bounded: str) -> None:
    def scanned(condition: str) -> tuple[dict[int, list[int]], list[Any]]:
        """What comes out, and what the scan itself gave: the filter that is left in the plan is taken off."""
        frame = load(subscribe=bounded, pushFilters=True)
        chosen = frame.where(condition)
        found = places(chosen)
        return found, sorted(map(tuple, frame.select("partition", "offset").collect()))

    found, read = scanned("partition = 1 and offset >= 4 and offset < 7 and topic like 'topic-%'")
    assert found == {1: [4, 5, 6]}
    assert read == [(1, 4), (1, 5), (1, 6)]
    found, read = scanned("timestamp > timestamp_millis(1700000000017) and timestamp < timestamp_millis(1700000000019)")
    assert found == {0: [18], 1: [18]}
    assert read == [(0, 18), (0, 19), (1, 18), (1, 19)]
    assert scanned("offset in (1, 3) and partition != 0") == (
        {1: [1, 3], 2: [1, 3]},
        [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)],
    )


@proves("S1")
def test_records_out_of_the_order_of_time_are_not_lost_to_a_pushed_filter(broker: Broker, load: Load) -> None:
    topic = create_topic(broker)
    times = [5, 90, 10, 70, 20, 95, 1]
    for time_ms in times:
        send(broker, topic, [{"value": b"", "timestamp": START_MS + time_ms}])
    for least in (0, 10, 70, 91, 96):
        frame = load(subscribe=topic, pushFilters=True)
        found = frame.where(f.col("timestamp") >= f.timestamp_millis(f.lit(START_MS + least)))
        assert places(found).get(0, []) == [n for n, time_ms in enumerate(times) if time_ms >= least]


@proves("S1")
def test_one_frame_in_several_queries_is_always_whole(load: Load, bounded: str, spark: SparkSession) -> None:
    frame = load(subscribe=bounded)
    assert frame.where("partition = 1 and offset < 3").count() == 3
    assert frame.count() == 45
    frame.createOrReplaceTempView("bounded")
    counts = "select (select count(*) from bounded where partition = {}), (select count(*) from bounded)"
    assert tuple(spark.sql(counts.format(2)).first() or ()) == (5, 45)


@proves("S1")
def test_big_partitions_are_split_so_that_all_cores_work(broker: Broker, load: Load) -> None:
    topic = create_topic(broker, partitions=2)
    send(broker, topic, [{"value": b"x" * 1000, "partition": 0} for _ in range(25_000)], **{"batch.size": 1_000_000})
    frame = load(subscribe=topic, columns="partition,offset")
    assert frame.rdd.getNumPartitions() >= 3
    assert frame.select("partition", "offset").distinct().count() == 25_000
    assert load(subscribe=topic, maxRecordsPerPartition=10_000).rdd.getNumPartitions() == 3


@proves("S1")
def test_few_large_records_are_split_by_their_size(broker: Broker) -> None:
    topic = create_topic(broker, partitions=2)
    send(broker, topic, ({"value": bytes(40_000), "partition": 0} for _ in range(600)))
    send(broker, topic, ({"value": b"small", "partition": 1} for _ in range(600)))
    with Cluster(broker.bootstrap) as cluster:
        spans = {(topic, 0): (0, 600), (topic, 1): (0, 600)}
        splits = plan.cut(cluster, {topic: "1a"}, spans, min_partitions=None, max_records=None)
    assert [(split.partition, split.first_offset, split.next_offset) for split in splits] == [
        (0, 0, 200),
        (0, 200, 400),
        (0, 400, 600),
        (1, 0, 600),
    ]


def test_large_records_come_in_batches_whose_buffers_are_used_again(broker: Broker) -> None:
    topic = create_topic(broker, partitions=1)
    send(broker, topic, ({"value": bytes(1000), "partition": 0} for _ in range(5000)))
    reader = BatchReader(options.parse({"bootstrap": broker.bootstrap, "subscribe": topic}, streaming=False))
    (split,) = reader.partitions()
    batches = list(reader.read(split))
    assert sum(map(len, batches)) == 5000
    assert max(batch.nbytes for batch in batches) < 1.1 * PASSED_ON_BYTES


def test_an_empty_topic_has_no_rows(broker: Broker, load: Load) -> None:
    assert load(subscribe=create_topic(broker, partitions=2)).collect() == []


@proves("S1")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"subscribe": "no-such-topic"}, "there is no topic 'no-such-topic'; `headrace topic create no-such-topic`"),
        ({"assign": '{"TOPIC": [7]}'}, "topic 'TOPIC' has no partition 7, only 0 to 2"),
        ({"subscribe": "TOPIC", "startingOffsets": '{"TOPIC": {"0": 1}}'}, "does not name partition 1 of topic"),
        (
            {"subscribe": "TOPIC", "endingOffsets": '{"TOPIC": {"0": 99, "1": 0, "2": 0}}'},
            "option endingOffsets gives 99 for TOPIC-0, which reaches from 0 to 20",
        ),
        (
            {"subscribe": "TOPIC", "startingOfset": "latest"},
            "unknown option 'startingofset'; did you mean startingOffsets?",
        ),
    ],
)
def test_bad_input_is_told_in_sparks_own_form(load: Load, bounded: str, given: dict[str, str], told: str) -> None:
    named = {name: value.replace("TOPIC", bounded) for name, value in given.items()}
    with pytest.raises(PySparkException) as error:
        load(**named).collect()
    assert told.replace("TOPIC", bounded) in str(error.value)


@proves("S1")
def test_an_unreachable_broker_fails_at_once(spark: SparkSession) -> None:
    address = f"127.0.0.1:{free_port()}"
    frame = spark.read.format("headrace").option("bootstrap", address).option("subscribe", "t").load()
    with pytest.raises(PySparkException, match=f"no broker answers at {address}"):
        frame.collect()


@proves("S1")
def test_deleted_records_fail_a_batch_or_are_told_in_the_log(broker: Broker, load: Load, driver_log: Path) -> None:
    topic = create_topic(broker)
    send(broker, topic, numbered(10))
    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 4})
    bounds = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 1}})}
    told = f"{topic}-0: offsets 1 to 3 were deleted before they were read; the log begins at 4"
    with pytest.raises(PySparkException, match=told):
        load(**bounds).collect()
    assert places(load(**bounds, failOnDataLoss=False)) == {0: list(range(4, 10))}
    wait_for("the warning", lambda: f"headrace: data loss: {told}" in driver_log.read_text())
    assert places(load(subscribe=topic)) == {0: list(range(4, 10))}


@pytest.fixture
def damaged(fresh_broker: Callable[..., Broker]) -> tuple[Broker, str]:
    """A topic with a flipped byte in its second batch, offsets 3 to 5."""
    broker = fresh_broker()
    topic = create_topic(broker)
    for first in (0, 3, 6):
        send(broker, topic, numbered(3, first))
    assert broker.stop() == 0
    (segment,) = broker.data.rglob(f"*{topic}-0/*.log")
    content = bytearray(segment.read_bytes())
    content[content.index(b"v4")] ^= 0xFF
    segment.write_bytes(content)
    broker.start()
    return broker, topic


@proves("S1")
def test_a_corrupt_batch_is_named(spark: SparkSession, damaged: tuple[Broker, str]) -> None:
    broker, topic = damaged
    load = spark.read.format("headrace").option("bootstrap", broker.bootstrap).option("timeout", "500ms")
    with pytest.raises(PySparkException) as error:
        load.option("subscribe", topic).load().collect()
    assert f"{topic}-0 at offset 3" in str(error.value)
