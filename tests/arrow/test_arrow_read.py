"""Topics read into Arrow, beside what confluent-kafka reads and wrote."""

from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

import headrace.arrow
from arrow.topics import NOW_MS, consumed, make_topic, send
from brokers import Broker
from headrace.client.admin import operations
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.fetch import TopicReplaced
from headrace.client.errors import NoBroker, UnknownTopic
from headrace.errors import OffsetOutOfRange
from headrace.records.arrow import DEFAULT_COLUMNS
from proving import proves

WIDE = (*DEFAULT_COLUMNS, "headers")


@proves("S1")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_rows_are_what_an_independent_client_reads(broker: Broker, codec: str) -> None:
    topic = make_topic(broker)
    send(broker, topic, 600, codec)
    found = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=WIDE, batch_rows=70)
    assert isinstance(found, pa.RecordBatchReader)
    batches = list(found)
    assert max(len(batch) for batch in batches) <= 70
    assert pa.Table.from_batches(batches).to_pylist() == consumed(broker, topic, 600)


@proves("S1")
def test_append_time_is_told(broker: Broker) -> None:
    topic = make_topic(broker, message_timestamp_type="LogAppendTime")
    send(broker, topic, 20)
    rows = headrace.arrow.read(topic, bootstrap=broker.bootstrap, columns=WIDE).read_all().to_pylist()
    assert rows == consumed(broker, topic, 20)
    assert {row["timestampType"] for row in rows} == {1}


@proves("S1")
def test_bounds_are_offsets_times_or_ends(broker: Broker) -> None:
    topic = make_topic(broker)
    send(broker, topic, 200)

    def offsets(**how: Any) -> dict[int, list[int]]:
        table = headrace.arrow.read(
            topic, bootstrap=broker.bootstrap, columns=["partition", "offset"], **how
        ).read_all()
        found: dict[int, list[int]] = {}
        for row in table.to_pylist():
            found.setdefault(row["partition"], []).append(row["offset"])
        return found

    at = datetime.datetime.fromtimestamp((NOW_MS + 100) / 1000, datetime.UTC)
    everything = {0: list(range(100)), 1: list(range(100))}
    assert offsets() == everything
    assert offsets(start=98) == {0: [98, 99], 1: [98, 99]}
    assert offsets(start=10, end=12) == {0: [10, 11], 1: [10, 11]}
    assert offsets(start={1: 95}) == {1: [95, 96, 97, 98, 99]}
    assert offsets(partitions=[0, 1], start={1: 100}, end={0: 1}) == {0: [0]}
    assert offsets(start=at) == {0: list(range(50, 100)), 1: list(range(50, 100))}
    assert offsets(start=at, end=at + datetime.timedelta(milliseconds=4)) == {0: [50, 51], 1: [50, 51]}
    assert offsets(end=at, partitions=[1]) == {1: list(range(50))}
    assert offsets(start="latest") == {}
    assert offsets(start=at + datetime.timedelta(days=9)) == {}


def test_what_cannot_be_read_is_told_at_once(broker: Broker) -> None:
    topic = make_topic(broker)
    send(broker, topic, 10)

    def told(
        kind: type[Exception], match: str, name: str = topic, bootstrap: str = broker.bootstrap, **how: Any
    ) -> None:
        with pytest.raises(kind, match=match):
            headrace.arrow.read(name, bootstrap=bootstrap, **how)

    told(UnknownTopic, "no topic 'nowhere'", "nowhere")
    told(UnknownTopic, "no partition 7", partitions=[7])
    told(ValueError, "no column 'colour'", columns=["colour"])
    told(ValueError, "has no time zone", start=datetime.datetime(2024, 1, 1))
    told(ValueError, "'first'", start="first")
    told(OffsetOutOfRange, f"{topic}-0: start 9 is after the end, 5", start=9)
    told(NoBroker, "no broker answers", bootstrap="127.0.0.1:1", timeout_ms=100)


def test_an_error_in_the_middle_keeps_its_kind(broker: Broker) -> None:
    topic = make_topic(broker)
    send(broker, topic, 10)
    reader = headrace.arrow.read(topic, bootstrap=broker.bootstrap, end={0: 50})
    with pytest.raises(OffsetOutOfRange, match=f"{topic}-0: offsets 0 to 49 were asked for; the log ends at 5"):
        reader.read_all()


def test_a_reader_may_be_left_early(broker: Broker) -> None:
    topic = make_topic(broker)
    send(broker, topic, 400)
    reader = headrace.arrow.read(topic, bootstrap=broker.bootstrap, batch_rows=10)
    assert len(reader.read_next_batch()) == 10
    reader.close()
    del reader


def test_pandas_takes_the_batches_as_they_are(broker: Broker) -> None:
    topic = make_topic(broker)
    send(broker, topic, 30)
    frame = headrace.arrow.read(topic, bootstrap=broker.bootstrap).read_pandas()
    assert list(frame["offset"]) == [*range(15), *range(15)]
    assert frame["timestamp"].iloc[0].timestamp() * 1000 == NOW_MS


@pytest.mark.parametrize("engine", ["polars", "duckdb"])
def test_other_engines_take_the_batches_as_they_are(broker: Broker, engine: str) -> None:
    module = pytest.importorskip(engine)
    topic = make_topic(broker)
    send(broker, topic, 30)
    reader = headrace.arrow.read(topic, bootstrap=broker.bootstrap)
    if engine == "polars":
        assert module.from_arrow(reader.read_all()).height == 30
    else:
        assert module.sql("select count(*) from reader").fetchall() == [(30,)]


def test_without_pyarrow_the_message_says_what_to_install() -> None:
    program = "import sys; sys.modules['pyarrow'] = None; import headrace.arrow"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "ImportError: headrace.arrow needs pyarrow: pip install 'headrace[arrow]'" in ran.stderr


@proves("S1")
def test_a_topic_made_anew_while_it_is_read_is_told(broker: Broker) -> None:
    topic = make_topic(broker, 2)
    rows = pa.RecordBatch.from_pydict({"value": [b"old"] * 1_000})
    headrace.arrow.write(topic, rows, bootstrap=broker.bootstrap)
    reader = headrace.arrow.read(topic, bootstrap=broker.bootstrap)
    with Cluster(broker.bootstrap) as cluster:
        operations.delete_topic(cluster, topic)
        cluster.forget()
        operations.create_topic(cluster, topic, partitions=2)
    headrace.arrow.write(topic, rows, bootstrap=broker.bootstrap)
    with pytest.raises(TopicReplaced, match=f"topic '{topic}' was deleted and created again"):
        reader.read_all()
