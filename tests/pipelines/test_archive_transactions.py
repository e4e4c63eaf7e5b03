"""The archive of topics with transactions: what is committed, and no step past one that is open."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from brokers import Broker, wait_for
from clients.topics import create_topic
from headrace.pipelines import archive
from pipelines.archives import archive_rows, committed, dead_rows, parquet_table, records_table
from proving import proves
from transactional_producer import Transactions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@proves("S4", "T2")
@pytest.mark.parametrize(("format", "layout"), [("delta", "partitioned"), ("parquet", "shared")])
def test_an_archive_has_what_is_committed_and_waits_at_an_open_transaction(
    spark: SparkSession, fresh_broker: Callable[..., Broker], tmp_path: Path, format: str, layout: str
) -> None:
    """Values that are no JSON are dead letters: those that were aborted are none."""
    broker = fresh_broker(settings={"log.layout": layout})
    topic = create_topic(broker, "t", retention_ms=-1)
    transactions = Transactions(broker, topic)
    decode = {"decode": "json", "schema": "n int"} if format == "delta" else {}
    chosen = archive.ArchiveOptions(tmp_path / "a", broker.bootstrap, (topic,), format=format, **decode)  # type: ignore[arg-type]

    def archived() -> list[tuple[int, bytes | None]]:
        table = records_table(chosen.to) if format == "delta" else parquet_table(chosen.to)
        return [(row.offset, row.value) for row in archive_rows(table)]

    def reached() -> int:
        return committed(broker.bootstrap)[topic, 0]

    def end_then_stop() -> None:
        """While the archive follows the topic: one transaction is committed, one aborted, the next one is open."""
        transactions.end("open", commit=True)
        transactions.write(b'{"n": 9}', "aborts")
        transactions.end("aborts", commit=False)
        transactions.write(b'{"n": 11}', "open")
        try:
            wait_for("the archive to go on", lambda: reached() == 11)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    transactions.write(b'{"n": 0}')
    transactions.write(b'{"n": 1}', "aborts")
    transactions.write(b"not JSON, and aborted", "aborts")
    transactions.end("aborts", commit=False)  # its marker is at 3
    transactions.write(b'{"n": 4}', "commits")
    transactions.end("commits", commit=True)
    transactions.write(b'{"n": 6}', "open")
    transactions.write(b'{"n": 7}')
    summary = archive.run(spark, chosen)
    assert archived() == [(0, b'{"n": 0}'), (4, b'{"n": 4}')]
    assert (reached(), summary.facts["lag"], summary.facts["dead_letters"]) == (6, 0, 0)
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(end_then_stop)
        archive.run(spark, replace(chosen, follow=True, trigger_s=0.1))
        stopped.result()
    assert archived()[2:] == [(6, b'{"n": 6}'), (7, b'{"n": 7}')]
    assert reached() == 11
    assert format == "parquet" or dead_rows(chosen.to) == []
