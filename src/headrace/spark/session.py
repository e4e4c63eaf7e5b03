"""A Spark session with the settings that sources and pipelines want, after a check of Java and Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from headrace.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS: Final = {
    # Else writes of rows with a headers column cut batches again and again.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.enabled": "false",
}


def start(name: str, master: str = "local[*]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """The session of this process, made if there is none. `local[N]` becomes `local[N,3]`: tasks are retried."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise OperatorError("PySpark is not installed: pip install 'headrace[spark]'") from None
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(_retrying(master))
    for key, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _retrying(master: str) -> str:
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},3]"
    return "local[*,3]" if master == "local" else master
