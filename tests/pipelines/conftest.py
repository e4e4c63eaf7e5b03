"""The Spark session of the tests, and their time, as in tests/spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark.conftest import driver_log, give_time, spark

__all__ = ["driver_log", "spark"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    give_time(items, Path(__file__).parent)
