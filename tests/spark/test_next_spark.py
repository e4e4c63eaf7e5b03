"""What we know of Spark that its documentation does not say. Each test that fails here says what a new Spark asks for.

Names and texts are looked for in Spark's own jars: that takes no session.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyspark
import pytest
from pyspark.errors import PySparkException

from brokers import Broker
from headrace.pipelines import query_watch
from headrace.spark import interpreter, task_batch
from headrace.spark.session import SETTINGS
from spark.confluent_rows import create_topic

HOME = Path(pyspark.__file__).parent
STREAMS = "org/apache/spark/sql/execution/streaming/"
PYTHON_SOURCES = "org/apache/spark/sql/execution/datasources/v2/python/"


@cache
def jar(name: str) -> zipfile.ZipFile:
    (found,) = (HOME / "jars").glob(f"spark-{name}_*.jar")
    return zipfile.ZipFile(found)


def classes(of: str, folder: str) -> Iterator[tuple[str, bytes]]:
    for name in jar(of).namelist():
        if name.startswith(folder) and name.endswith(".class"):
            yield name, jar(of).read(name)


def said_by(of: str, folder: str, text: str) -> list[str]:
    """The classes that have a text as a constant."""
    return [name for name, code in classes(of, folder) if text.encode() in code]


@pytest.mark.parametrize(
    ("text", "of", "folder"),
    [
        ("Python worker failed to connect back", "core", "org/apache/spark/api/python/"),
        ("Python worker exited unexpectedly", "core", "org/apache/spark/api/python/"),
        ("Python worker exited unexpectedly", "sql", "org/apache/spark/sql/execution/python/"),
    ],
)
def test_spark_says_by_these_words_that_a_python_process_is_lost(text: str, of: str, folder: str) -> None:
    assert text in query_watch.WORKER_LOST
    assert said_by(of, folder, text), (
        f"this Spark does not say {text!r} any more: look in PythonWorkerFactory, BasePythonRunner and "
        "PythonPlannerRunner for what it says of a Python process that does not start or dies, and put that into "
        "query_watch.WORKER_LOST; if it restarts such queries itself, or has an error condition for it, drop the texts"
    )


@pytest.mark.parametrize(
    ("name", "of", "folder"),
    [
        (task_batch.QUERY_ID, "sql", f"{STREAMS}runtime/StreamExecution"),
        (task_batch.BATCH_ID, "sql", f"{STREAMS}runtime/MicroBatchExecution"),
        (task_batch.RUN_ID, "core", "org/apache/spark/SparkContext"),
    ],
)
def test_tasks_are_told_their_query_and_batch_by_these_names(name: str, of: str, folder: str) -> None:
    assert said_by(of, folder, name), (
        f"this Spark does not set the local property {name} where it did: find its new name (MicroBatchExecution sets "
        "them before a batch runs) and put it into spark/task_batch.py; without it the sink and the archive stop"
    )


def test_the_checkpoint_file_manager_is_where_the_settings_say() -> None:
    name = SETTINGS["spark.sql.streaming.checkpointFileManagerClass"]
    assert f"{name.replace('.', '/')}.class" in jar("sql").namelist(), (
        f"this Spark has no {name}: streams would not start. Look for FileSystemBasedCheckpointFileManager in another "
        "package (it has moved before) and correct session.SETTINGS; if it is gone, drop the setting, which only "
        "spares time for each batch"
    )


def test_spark_asks_no_source_or_sink_in_python_for_metrics() -> None:
    asking = [name for name, code in classes("sql", PYTHON_SOURCES) if b"ReportsSourceMetrics" in code]
    asking += [name for name, code in classes("sql", PYTHON_SOURCES) if b"ReportsSinkMetrics" in code]
    assert asking == [], (
        f"{', '.join(asking)} can report metrics now: see how PySpark hands them over (pyspark/sql/datasource.py), "
        "give those of spark/query_metrics.py there too, and correct docs/SPARK.md and the head of spark/progress.py"
    )
    assert said_by("sql", f"{STREAMS}runtime/ProgressContext", "ReportsSourceMetrics"), (
        "Spark has it somewhere else now"
    )


def test_workers_find_pyspark_in_an_archive_unless_it_is_taken_off_their_path(tmp_path: Path) -> None:
    archive = HOME / "python" / "lib" / "pyspark.zip"
    assert archive.is_file(), (
        f"there is no {archive} any more: see what PythonUtils.sparkPythonPath puts on the path of workers. If that "
        "has bytecode, spark/interpreter.py and its program can go; else let the program take off what it is now"
    )
    assert not any(name.endswith(".pyc") for name in zipfile.ZipFile(archive).namelist()), (
        "pyspark.zip has bytecode now: workers start as fast with it, so spark/interpreter.py need not take it off"
    )
    assert Path(interpreter.worker_python(tmp_path)).parent == tmp_path


def test_a_session_without_pushdown_refuses_pushed_filters_and_names_its_setting(
    spark: pyspark.sql.SparkSession, broker: Broker
) -> None:
    """Then nobody need look whether filters follow. Where this passes no more, filters may be dropped in silence."""
    plain = spark.newSession()
    plain.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    rows = plain.read.format("headrace").option("bootstrap", broker.bootstrap).option("pushFilters", "true")
    with pytest.raises(PySparkException, match=r"DATA_SOURCE_PUSHDOWN_DISABLED.*filterPushdown\.enabled"):
        rows.option("subscribe", create_topic(broker)).load().where("partition = 0").collect()
