"""Topics in Spark: sources, sinks and sessions. Needs `headrace[spark]` and Java 17.

    from headrace.spark import start

Sources and sinks are found by Spark itself, as the formats `headrace` and `headrace-log`. What starts a session is
imported when it is first used, so that Spark's workers do not pay for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.spark.session import start

__all__ = ["start"]


def __getattr__(name: str) -> Any:
    if name != "start":
        raise AttributeError(f"module 'headrace.spark' has no attribute {name!r}")
    from headrace.spark.session import start

    return start
