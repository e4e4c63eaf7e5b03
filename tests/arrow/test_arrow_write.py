"""Arrow rows written to topics: what confluent-kafka reads there, and what the writer says of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headrace.arrow
from arrow.topics import NOW_MS, consumed, make_topic
from brokers import Broker
from headrace.errors import InvalidRecord
from headrace.records.arrow import HEADERS_TYPE
from headrace.records.codecs import Codec
from headrace.records.partitioner import partition_for_key

StartBroker = Callable[..., Broker]


def rows_of(count: int, **more: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({
        "key": pa.array([b"key-%d" % (n % 97) if n % 3 else None for n in range(count)], pa.binary()),
        "value": pa.array([b"value-%d" % n if n % 7 else None for n in range(count)], pa.binary()),
        "headers": pa.array([[{"key": "n", "value": b"%d" % n}] if n % 5 == 0 else None for n in range(count)],
                            HEADERS_TYPE),
        "timestamp": pa.array([(NOW_MS + n) * 1000 for n in range(count)], pa.timestamp("us", "UTC")),
        **more,
    })  # fmt: skip


def assert_is_there(broker: Broker, topic: str, rows: pa.RecordBatch, written: pa.RecordBatch, partitions: int) -> None:
    """Each row lies where the writer said, once, and nothing else does."""
    found = {(row["partition"], row["offset"]): row for row in consumed(broker, topic, len(rows), partitions)}
    assert len(found) == len(rows)
    for row, place in zip(rows.to_pylist(), written.to_pylist(), strict=True):
        there = found[place["partition"], place["offset"]]
        assert {name: there[name] for name in row} == row


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_rows_are_where_the_writer_says(broker: Broker, codec: Codec) -> None:
    topic, rows = make_topic(broker, 3), rows_of(5_000)
    with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap, codec=codec, batch_bytes=2_000) as writer:
        written = writer.write(rows)
    assert written.schema.names == ["partition", "offset"]
    assert_is_there(broker, topic, rows, written, 3)
    keys, places = rows["key"].to_pylist(), written["partition"].to_pylist()
    assert all(partition_for_key(key, 3) == place for key, place in zip(keys, places, strict=True) if key is not None)
    # Runs of a thousand, from a random partition on.
    assert len({place for key, place in zip(keys, places, strict=True) if key is None}) == 2


def test_writers_of_few_rows_without_a_key_do_not_all_begin_at_one_partition(broker: Broker) -> None:
    topic = make_topic(broker, 4)
    row = pa.RecordBatch.from_pydict({"value": [b"x"]})
    places = set()
    for _ in range(20):
        with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap) as writer:
            places.update(writer.write(row)["partition"].to_pylist())
    assert len(places) > 1


def test_rows_of_a_partition_keep_their_order(broker: Broker) -> None:
    topic, rows = make_topic(broker, 3), rows_of(3_000)
    with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap, batch_bytes=1_000) as writer:
        pending = [writer.submit(rows.slice(at, 500)) for at in range(0, 3_000, 500)]
        written = pa.Table.from_batches([each.result() for each in pending])
    last = {0: -1, 1: -1, 2: -1}
    for place in written.to_pylist():
        assert place["offset"] == last[place["partition"]] + 1
        last[place["partition"]] += 1


def test_a_partition_column_comes_first(broker: Broker) -> None:
    topic = make_topic(broker, 4)
    rows = rows_of(100, partition=pa.array([3 if n % 2 else None for n in range(100)], pa.int64()))
    with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap) as writer:
        places = writer.write(rows)["partition"].to_pylist()
        keys = rows["key"].to_pylist()
        assert [place for n, place in enumerate(places) if n % 2] == [3] * 50
        assert all(places[n] == partition_for_key(keys[n], 4) for n in range(0, 100, 2) if keys[n] is not None)
        with pytest.raises(InvalidRecord, match="row 1 is for partition 9, and there are 0 to 3"):
            writer.write(rows_of(2, partition=pa.array([0, 9], pa.int32())))
        with pytest.raises(InvalidRecord, match="binary or text, not int64"):
            writer.write(pa.RecordBatch.from_pydict({"value": [1]}))
        assert len(writer.write(rows.slice(0, 0))) == 0
        assert len(writer.write(pa.Table.from_batches([rows, rows]))) == 200


def test_what_was_read_can_be_written(broker: Broker) -> None:
    source, target = make_topic(broker, 2), make_topic(broker, 2)
    rows = rows_of(1_000)
    assert headrace.arrow.write(source, [rows.slice(0, 300), rows.slice(300)], bootstrap=broker.bootstrap) == 1_000
    wide = ["key", "value", "partition", "timestamp", "headers"]
    copied = headrace.arrow.write(
        target, headrace.arrow.read(source, bootstrap=broker.bootstrap, columns=wide), bootstrap=broker.bootstrap
    )
    assert copied == 1_000
    both = [headrace.arrow.read(name, bootstrap=broker.bootstrap, columns=wide).read_all() for name in (source, target)]
    assert both[0].equals(both[1])


@pytest.mark.parametrize("partitions", [[0, 1, 0], [1, 0, 1]])
def test_rows_that_are_refused_are_told_apart_from_those_that_are_there(broker: Broker, partitions: list[int]) -> None:
    topic = make_topic(broker, 2, max_message_bytes="2000")
    values = [b"small", b"x" * 5_000, b"small too"]
    rows = pa.RecordBatch.from_pydict({"value": values, "partition": pa.array(partitions, pa.int32())})
    with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap) as writer:
        with pytest.raises(
            headrace.arrow.WriteFailed, match=r"1 of 3 rows .* were not acknowledged.*max.message"
        ) as told:
            writer.write(rows)
        assert told.value.written["offset"].to_pylist() == [0, None, 1]
        small, large = partitions[:2]
        again = writer.write(
            pa.RecordBatch.from_pydict({"value": [b"a", b"b"], "partition": pa.array([small, large], pa.int32())})
        )
    assert again.to_pylist() == [{"partition": small, "offset": 2}, {"partition": large, "offset": 0}]


def test_without_acknowledgement_there_are_no_offsets(broker: Broker) -> None:
    topic, rows = make_topic(broker, 1), rows_of(10)
    with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap, acks=0) as writer:
        assert writer.write(rows)["offset"].null_count == 10
    assert len(consumed(broker, topic, 10, 1)) == 10


def test_a_broker_killed_while_rows_are_written_keeps_each_once(fresh_broker: StartBroker) -> None:
    broker = fresh_broker()
    topic = make_topic(broker, 2)
    rows = rows_of(40_000)
    results: list[Any] = []
    half = threading.Event()

    def write() -> None:
        with headrace.arrow.Writer(topic, bootstrap=broker.bootstrap, batch_bytes=4_000) as writer:
            for at in range(0, len(rows), 1_000):
                results.append(writer.write(rows.slice(at, 1_000)))
                if at == 10_000:
                    half.set()

    writing = threading.Thread(target=write)
    writing.start()
    assert half.wait(60)
    broker.kill()
    broker.start()
    writing.join(120)
    assert not writing.is_alive()
    written = pa.Table.from_batches(results).combine_chunks().to_batches()[0]
    assert_is_there(broker, topic, rows, written, 2)
