"""Each pipeline is one small PySpark program: options in, a summary out. `headrace pipeline` runs them.

`headrace pipeline run` takes a job of your own: a file of SQL, or one of Python with a function `job(topics: Topics)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.pipelines.job import Topics

__all__ = ["Topics"]


def __getattr__(name: str) -> Any:
    if name != "Topics":
        raise AttributeError(f"module 'headrace.pipelines' has no attribute {name!r}")
    from headrace.pipelines.job import Topics

    return Topics
