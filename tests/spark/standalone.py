"""A Spark standalone master and two workers on loopback, with room for two small executors each. They die with the test
process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pyspark

from brokers import DIES_WITH_PARENT, wait_for
from headrace.spark import java
from spark import process_tree

SPARK = Path(pyspark.__file__).parent
START_DEADLINE_S = 120.0
SHORT_LIVED = os.environ.get("SPARK_SUBMIT_OPTS") or java.SHORT_LIVED
"""`make test` has options of its own, with which JVMs start sooner (tools/spark_classes.py)."""
SETTINGS = {
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "2",
    # All executors have to be there before the first task is given to one.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
}
"""Of a driver with an executor on each worker."""
WORKERS = {"one": "127.0.0.1", "two": "127.0.0.2"}
"""With their hosts: Spark runs no second attempt at a task beside the first one."""
LOOPBACK = {
    **os.environ,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "SPARK_DAEMON_MEMORY": "256m",
    "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
}


class Daemon:
    """A master or a worker."""

    def __init__(
        self, folder: Path, name: str, class_name: str, arguments: Sequence[str], host: str = "127.0.0.1"
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        command = [*DIES_WITH_PARENT, str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{class_name}"]
        ports = ["--host", host, "--port", "0", "--webui-port", "0"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *ports, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**LOOPBACK, "SPARK_LOCAL_IP": host},
            )

    def wait_for_line(self, pattern: str) -> str:
        def look() -> str | None:
            assert self.process.poll() is None, f"{self.name} has ended:\n{self.log.read_text()[-2000:]}"
            found = re.search(pattern, self.log.read_text())
            return found[1] if found else None

        return wait_for(f"{pattern!r} from {self.name}", look, START_DEADLINE_S)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Standalone:
    """`address` is the master's."""

    def __init__(self, folder: Path) -> None:
        self._daemons = [Daemon(folder, "master", "master.Master", [])]
        try:
            self.address = self._daemons[0].wait_for_line(r"(spark://127\.0\.0\.1:[1-9]\d*)")
            for name, host in WORKERS.items():
                arguments = ["--cores", "2", "--memory", "1200M", "--work-dir", str(folder / name), self.address]
                self._daemons.append(Daemon(folder, name, "worker.Worker", arguments, host))
            for worker in self._daemons[1:]:
                worker.wait_for_line(r"(Successfully registered with master)")
        except BaseException:
            self.stop()
            raise

    def below(self) -> list[int]:
        """Executors, and their Python workers."""
        return process_tree.below(*(worker.process.pid for worker in self._daemons[1:]))

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.stop()
