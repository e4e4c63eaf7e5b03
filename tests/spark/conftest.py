"""One Spark session for all tests of a run: a JVM takes seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.spark import session
from s3_server import in_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEST_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

NO_STORE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "of nothing",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""For the processes in which Spark plans: an archive that is said to be in a store is at an address where nobody is."""

# JVM, planners and workers share the cores with whatever else runs, and a test that is cut off takes the session along.
TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    give_time(items, Path(__file__).parent)


def give_time(items: list[pytest.Item], folder: Path) -> None:
    for item in items:
        if folder in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@contextmanager
def speaking_to(path: Path) -> Iterator[None]:
    """Processes started meanwhile write their standard error to a file."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.fixture(scope="session")
def driver_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the JVM and the Python workers of `spark` say on standard error."""
    return tmp_path_factory.mktemp("spark-log") / "stderr"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, driver_log: Path) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    settings = {**TEST_SETTINGS, "spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder)}
    with speaking_to(driver_log), in_environment(NO_STORE):
        started = session.start("headrace-tests", "local[2]", settings)
    started.sparkContext.setLogLevel("ERROR")
    yield started
    started.stop()
