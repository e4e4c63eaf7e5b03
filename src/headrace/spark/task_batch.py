"""Of which query, run and batch a task is, as Spark tells its tasks.

It does so by local properties that its documentation does not mention; tests/spark/test_next_spark.py looks for their
names in Spark itself. A task that is not told stops: files and transactions of two batches under one name would be
taken for each other.
"""

from __future__ import annotations

from typing import Final

from pyspark import TaskContext

from headrace.errors import OperatorError

QUERY_ID: Final = "sql.streaming.queryId"
RUN_ID: Final = "spark.jobGroup.id"
BATCH_ID: Final = "streaming.sql.batchId"


def told(*names: str) -> list[str]:
    """The values of these properties in the task that runs."""
    context = TaskContext.get()
    found = [context.getLocalProperty(name) for name in names] if context is not None else [None]
    if None in found:
        raise OperatorError(
            f"this Spark does not tell its tasks of which query and batch they are ({', '.join(names)}): what they "
            "write cannot be told apart; use a Spark that this version of Headrace was tested with, or for a topic "
            "the option delivery=at-least-once"
        )
    return [str(value) for value in found]
