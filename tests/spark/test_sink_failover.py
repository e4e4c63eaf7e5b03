"""The sink on a cluster of brokers: the one that coordinates its transactions dies alone, in the middle of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

import headrace.arrow
from brokers import wait_for
from clusters import BrokerCluster
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.transactions import TransactionListing, list_transactions
from headrace.pipelines import audit
from headrace.pipelines.summary import Progress
from pipelines.fault_actors import TOPIC, lines, send
from proving import proves
from spark.driver_process import DEADLINE_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_AT_ONCE = "spark.sql.execution.arrow.maxRecordsPerBatch"
HELD_BATCH = "1"
RECORDS = 30_000
AT_ONCE = 10_000
SETTINGS = {"broker.lease.ms": 3000, "offsets.topic.partitions": 1, "transaction.state.log.num.partitions": 1}


def held_in_the_middle(frame: DataFrame, until: Path) -> DataFrame:
    """One batch has handed on its rows, and does not end before a file is there."""
    from pyspark import TaskContext

    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        while context.getLocalProperty("streaming.sql.batchId") == HELD_BATCH and not until.exists():
            time.sleep(0.05)

    return frame.mapInArrow(passing, frame.schema)


def is_held(cluster: BrokerCluster) -> bool:
    """Whether some of the batch is written already, in transactions that are open."""
    seen = {
        isolation: len(headrace.arrow.read("copy", bootstrap=cluster.bootstrap, isolation=isolation).read_all())
        for isolation in ("committed", "uncommitted")
    }
    return seen["uncommitted"] > seen["committed"] == AT_ONCE * int(HELD_BATCH)


def open_attempts(cluster: BrokerCluster) -> list[TransactionListing]:
    with Cluster(cluster.bootstrap) as client:
        return list_transactions(client, states=["Ongoing"], pattern=r"spark\..*")


@proves("S3", "S6")
@pytest.mark.timeout(600)
def test_a_stream_is_exactly_once_when_the_coordinator_of_its_transactions_alone_dies(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It leads no partition that is read or written, and is not started again."""
    with BrokerCluster(tmp_path, etcd=1, settings=SETTINGS) as cluster:
        headrace.arrow.Transaction("which", bootstrap=cluster.bootstrap).abort()
        with Cluster(cluster.bootstrap) as client:
            (coordinator,) = {each.broker_id for each in list_transactions(client)}
        one, two = {1, 2, 3} - {coordinator}
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        placed = [[one, two, coordinator], [two, one, coordinator]]
        for topic in (TOPIC, "copy"):
            admin.create_topics([NewTopic(topic, len(placed), replica_assignment=placed)])[topic].result(60)
        send(cluster, tmp_path / "ledger", lines(0, RECORDS))  # type: ignore[arg-type]

        given = {"bootstrap": cluster.bootstrap, "subscribe": TOPIC, "startingOffsets": "earliest"}
        read = spark.readStream.format("headrace").options(**given, columns="key,value,headers")
        rows = held_in_the_middle(read.option("maxOffsetsPerTrigger", str(AT_ONCE)).load(), tmp_path / "go on")
        write = rows.writeStream.format("headrace").options(bootstrap=cluster.bootstrap, topic="copy")
        before = spark.conf.get(ROWS_AT_ONCE)
        spark.conf.set(ROWS_AT_ONCE, "100")
        try:
            query = write.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
            wait_for("rows of a batch in transactions", lambda: is_held(cluster), DEADLINE_S)
            assert {each.broker_id for each in open_attempts(cluster)} == {coordinator}
            cluster.brokers[coordinator - 1].kill()
            (tmp_path / "go on").touch()
            assert query.awaitTermination(int(DEADLINE_S))
        finally:
            spark.conf.set(ROWS_AT_ONCE, str(before))
        assert open_attempts(cluster) == []
        options = audit.AuditOptions((str(tmp_path / "ledger"),), cluster.bootstrap, copies=((TOPIC, "copy"),))
        told = audit.run(spark, options, Progress())
        assert told.ok, told.as_json()
        copied = headrace.arrow.read("copy", bootstrap=cluster.bootstrap, columns=["value"]).read_all()
        assert len(copied) == RECORDS
