"""One Spark session for all tests of this folder: a JVM takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEST_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    settings = {**TEST_SETTINGS, "spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder)}
    started = session.start("headrace-tests", "local[2]", settings)
    started.sparkContext.setLogLevel("ERROR")
    yield started
    started.stop()
