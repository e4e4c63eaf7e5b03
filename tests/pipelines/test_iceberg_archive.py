"""`headrace pipeline archive --format iceberg` in whole: beside the topic, under kills of its driver, and read back."""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

import headrace.arrow
from brokers import Broker
from clients.topics import create_topic
from headrace.arrow.iceberg import Where
from headrace.cli.main import main
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import delete_records
from headrace.errors import OperatorError
from headrace.pipelines import archive, archive_tables, replay
from headrace.pipelines.archive_tables import DEAD_LETTERS, RECORDS
from headrace.pipelines.replay_archive import ArchiveReplay
from headrace.pipelines.small_files import MergeOptions
from pipelines.archives import Row, committed, produce, sorted_rows, topic_rows, values
from pipelines.fault_actors import SCHEMA, TOPIC, Driver, audit_command, audited, counted, lines, send
from proving import proves

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def iceberg_rows(folder: Path, name: str = RECORDS) -> list[Row]:
    """As `pyiceberg` reads them; it takes a null list of structs for an empty one."""
    with SqlCatalog("headrace", uri=f"sqlite:///{folder}/catalog.db") as catalog:
        listed: list[dict[str, Any]] = catalog.load_table(f"archive.{name}").scan().to_arrow().to_pylist()
    return sorted_rows([{"timestampType": 0, **row, "headers": row["headers"] or None} for row in listed])


def options(broker: Broker, to: Path, topic: str, **more: Any) -> archive.ArchiveOptions:
    return archive.ArchiveOptions(to, broker.bootstrap, (topic,), **{"format": "iceberg", **more})


@proves("S13")
@pytest.mark.timeout(600)
def test_the_archive_is_the_topic_record_for_record(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    """Twice, the second time without a checkpoint; then it is history, a table of SQL, and replayed."""
    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 3, retention_ms=-1)
    produce(broker.bootstrap, topic, values(900), partitions=3)
    chosen = options(broker, tmp_path / "a", topic, max_offsets_per_trigger=450)
    summary = archive.run(spark, chosen)
    assert (summary.ok, summary.facts["records"], summary.facts["lag"]) == (True, 900, 0)
    assert iceberg_rows(tmp_path / "a") == topic_rows(broker.bootstrap, topic)
    (tmp_path / "a" / "checkpoints").rename(tmp_path / "checkpoints")
    produce(broker.bootstrap, topic, values(60, seed=1), partitions=3)
    assert archive.run(spark, chosen).facts["records"] == 60
    everything = topic_rows(broker.bootstrap, topic)
    assert iceberg_rows(tmp_path / "a") == everything
    for kind in ("delta", "parquet"):
        with pytest.raises(OperatorError, match=r"holds an Iceberg table; give --format iceberg, or another --to"):
            archive.run(spark, options(broker, tmp_path / "a", topic, format=kind))

    with Cluster(broker.bootstrap) as cluster:
        delete_records(cluster, topic, {0: 300, 1: 200})
    produce(broker.bootstrap, topic, values(30, seed=2), partitions=3)
    whole = headrace.arrow.read(topic, bootstrap=broker.bootstrap, history=tmp_path / "a").read_all()
    assert len(whole) == 990
    asked = {"bootstrap": broker.bootstrap, "subscribe": topic, "history": str(tmp_path / "a")}
    assert spark.read.format("headrace").options(**asked).load().count() == 990
    frame = archive_tables.frame(spark, tmp_path / "a", RECORDS)
    assert frame is not None
    assert frame.where(f"topic = '{topic}'").count() == 960
    told = replay.run(ArchiveReplay(tmp_path / "a", broker.bootstrap, topic, to=f"{topic}-again"))
    assert told.facts["records"] == 960
    again = topic_rows(broker.bootstrap, f"{topic}-again")
    assert Counter((row.partition, row.value) for row in again) == Counter(
        (row.partition, row.value) for row in everything
    )


def test_what_does_not_go_together_is_said_before_anything_starts(broker: Broker, tmp_path: Path) -> None:
    topic = create_topic(broker, f"t{uuid.uuid4().hex[:8]}", 1, retention_ms=-1)
    for wrong, told in (
        ({"format": "delta", "catalog": Where("http://127.0.0.1:1")}, "are for --format iceberg"),
        ({"merge": MergeOptions()}, "--merge needs --format delta"),
        ({"catalog": Where("http://127.0.0.1:1")}, "the Iceberg catalog http://127.0.0.1:1 .* does not do its work"),
    ):
        with pytest.raises(OperatorError, match=told):
            archive.check(options(broker, tmp_path / "a", topic, **wrong))


def check_killed(broker: Broker, folder: Path) -> None:
    """The tables hold the beginning of the topic, each record once, and the group is not told more."""
    records, dead = iceberg_rows(folder), iceberg_rows(folder, DEAD_LETTERS)
    held = sorted([*records, *dead], key=lambda row: row[:3])
    topic = topic_rows(broker.bootstrap, TOPIC)
    assert len({row[:3] for row in held}) == len(held)
    assert set(held) <= set(topic)
    there = {row[:3] for row in held}
    for place, offset in committed(broker.bootstrap).items():
        assert all((*place, n) in there for n in range(offset))


@proves("S13", "S6")
@pytest.mark.timeout(900)
def test_a_driver_killed_after_its_commit_loses_and_repeats_nothing(
    fresh_broker: Callable[..., Broker],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last run and the audit are in the session of the tests."""
    broker = fresh_broker()
    create_topic(broker, TOPIC, 2, retention_ms=-1)
    send(broker, tmp_path / "ledger", lines(0, 2000))
    to = tmp_path / "archive"
    driver = Driver(broker, to, "--format", "iceberg", die_at="table-committed:1", batch=500)
    assert driver.wait() == -signal.SIGKILL, driver.told()
    check_killed(broker, to)
    last = options(broker, to, TOPIC, decode="json", schema=SCHEMA, max_offsets_per_trigger=500)
    assert archive.run(spark, last).ok
    held = sorted([*iceberg_rows(to), *iceberg_rows(to, DEAD_LETTERS)], key=lambda row: row[:3])
    assert held == topic_rows(broker.bootstrap, TOPIC)
    monkeypatch.setattr("headrace.cli.pipelines.audit.spark_session", lambda *_: contextlib.nullcontext(spark))
    capsys.readouterr()
    assert main(audit_command(broker, tmp_path / "ledger", to)) == 0
    assert counted(capsys.readouterr().out)["acknowledged"] == 2000


@pytest.mark.long
@pytest.mark.timeout(1500)
@proves("S13", "S6")
def test_a_driver_of_iceberg_killed_at_every_named_point(
    fresh_broker: Callable[..., Broker], tmp_path: Path, proof_report: Callable[..., None]
) -> None:
    broker = fresh_broker()
    create_topic(broker, TOPIC, 2, retention_ms=-1)
    send(broker, tmp_path / "ledger", lines(0, 8000))
    to = tmp_path / "archive"
    points = ("files-written:1", "dead-committed:2", "table-committed:3", "batch-done:4")
    for point in points:
        driver = Driver(broker, to, "--format", "iceberg", die_at=point)
        assert driver.wait() == -signal.SIGKILL, driver.told()
        check_killed(broker, to)
    driver = Driver(broker, to, "--format", "iceberg")
    assert driver.wait() == 0, driver.told()
    told = audited(broker, tmp_path / "ledger", to)
    records, dead = len(iceberg_rows(to)), len(iceberg_rows(to, DEAD_LETTERS))
    assert records + dead == 8000
    proof_report(driver_killed_at=", ".join(points), records=records, dead_letters=dead, audit=told, audit_exit_code=0)
