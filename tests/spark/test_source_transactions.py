"""Topics with committed, aborted and open transactions as Spark reads them, at once and as a stream."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brokers import Broker, wait_for
from proving import proves
from spark.confluent_rows import create_topic
from transactional_producer import Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 2
STEPS = 60
DEADLINE_S = 300


@pytest.fixture
def transactions(broker: Broker) -> Transactions:
    return Transactions(broker, create_topic(broker, PARTITIONS))


def shown(frame: DataFrame) -> list[tuple[int, bytes]]:
    rows = sorted((row.partition, row.offset, bytes(row.value)) for row in frame.collect())
    return [(partition, value) for partition, _, value in rows]


def load(spark: SparkSession, transactions: Transactions, **given: Any) -> DataFrame:
    read = spark.read.format("headrace").option("kafka.bootstrap.servers", transactions.broker.bootstrap)
    return read.options(subscribe=transactions.topic, **given).load()


@proves("T2")
def test_a_frame_has_what_is_committed_unless_asked(spark: SparkSession, transactions: Transactions, seed: int) -> None:
    """Splits of three offsets begin and end inside of transactions."""
    transactions.draw(random.Random(seed), STEPS, PARTITIONS)
    assert shown(load(spark, transactions, maxRecordsPerPartition=3)) == transactions.committed
    assert shown(load(spark, transactions, isolation="uncommitted")) == transactions.all
    transactions.end_all()
    assert load(spark, transactions).count() == len(transactions.committed)
    level = {"kafka.isolation.level": "read_uncommitted"}
    assert load(spark, transactions, **level).count() == len(transactions.all)


@proves("T2")
def test_a_stream_waits_for_open_transactions_and_goes_on_when_they_end(
    spark: SparkSession, transactions: Transactions, tmp_path: Path, seed: int
) -> None:
    """Batches end inside of transactions; then without a limit, as they come."""
    transactions.draw(random.Random(seed), STEPS, PARTITIONS)

    def start(name: str, isolation: str, limit: int, *, now: bool) -> Any:
        read = spark.readStream.format("headrace").option("kafka.bootstrap.servers", transactions.broker.bootstrap)
        given = {"subscribe": transactions.topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(limit)}
        write = read.options(isolation=isolation, **given).load().writeStream.format("parquet")
        write = write.option("path", str(tmp_path / name)).option("checkpointLocation", str(tmp_path / f"{name}-at"))
        return (write.trigger(availableNow=True) if now else write.trigger(processingTime="0 seconds")).start()

    def rows(name: str) -> list[tuple[int, bytes]]:
        return shown(spark.read.parquet(str(tmp_path / name)))

    assert start("committed", "committed", 20, now=True).awaitTermination(DEADLINE_S)
    assert rows("committed") == transactions.committed
    assert start("all", "uncommitted", 1000, now=True).awaitTermination(DEADLINE_S)
    assert rows("all") == transactions.all
    before = rows("committed")
    query = start("committed", "committed", 1000, now=False)
    transactions.write(b"last", "last")
    transactions.end_all(commit=True)
    assert len(transactions.committed) > len(before)
    wait_for("what was committed", lambda: rows("committed") == transactions.committed)
    query.stop()
