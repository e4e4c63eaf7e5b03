"""Topics in Spark: sources, sinks and sessions. Needs `headrace[spark]` and Java 17.

    from headrace.spark import start

    spark = start()
    orders = spark.read.format("headrace").option("subscribe", "orders").load()

Sources and sinks are found by Spark itself, as the formats `headrace` and `headrace-log`, if it looks for them with a
Python that has this package. To import this before the first session sees to that (`PYSPARK_PYTHON` is set, unless it
is set already); `register` tells of them to a session that is there. What starts a session is imported when it is first
used, so that Spark's workers do not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.spark.interpreter import name_this_python

if TYPE_CHECKING:
    from headrace.spark.session import register, start

__all__ = ["register", "start"]

name_this_python()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'headrace.spark' has no attribute {name!r}")
    from headrace.spark import session

    return getattr(session, name)
