"""The archive under kill -9 of its driver, its workers and the broker: nothing lost, nothing twice, in order.

After every kill the table is compared with the topic: it holds the beginning of each partition, without a gap, and the
group's committed offsets are not beyond it. Drivers are processes of their own (`headrace pipeline archive`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from brokers import DIES_WITH_PARENT, Broker, wait_for
from clients.topics import create_topic
from headrace.spark.faults import VARIABLE
from proving import proves
from spark.archives import Row, archive_rows, committed, orphans, produce, records_table, topic_rows, values

TOPIC = "orders"
PARTITIONS = 2
DEADLINE_S = 300.0


class Driver:
    """`headrace pipeline archive` as a process, with the JVM and the Python workers below it."""

    def __init__(self, broker: Broker, to: Path, *arguments: str, die_at: str = "") -> None:
        self.output, self.errors = to.parent / "stdout", to.parent / "stderr"
        command = [
            *DIES_WITH_PARENT, str(Path(sys.executable).parent / "headrace"), "pipeline", "archive", "--topic", TOPIC,
            "--to", str(to), "--bootstrap", broker.bootstrap, "--master", "local[2]", "--json",
            "--max-offsets-per-trigger", "1000", "--spark-conf", "spark.driver.memory=512m",
            "--spark-conf", "spark.driver.host=127.0.0.1", "--spark-conf", "spark.driver.bindAddress=127.0.0.1",
            *arguments,
        ]  # fmt: skip
        environment = {**os.environ, VARIABLE: die_at} if die_at else dict(os.environ)
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    def below(self) -> list[int]:
        """All processes that descend from the driver."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def workers(self) -> list[int]:
        return [pid for pid in self.below() if "pyspark.daemon" in _command(pid)]

    def kill(self) -> None:
        """The driver and its JVM; returns when their workers are gone too."""
        family = self.below()
        self.process.kill()
        for pid in family:
            if "java" in _command(pid).split(" ")[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for("the workers of a killed driver to end", lambda: not any(map(_lives, family)), DEADLINE_S)

    def wait(self, within_s: float = DEADLINE_S) -> int:
        family: set[int] = set()

        def ended() -> bool:
            family.update(self.below())
            return self.process.poll() is not None and not any(map(_lives, family))

        wait_for("a driver and its workers to end", ended, within_s, pause_s=0.1)
        status: int = self.process.returncode
        return status

    def told(self) -> str:
        return self.errors.read_text()[-3000:]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def batches(to: Path) -> int:
    """How many batches Spark has begun."""
    return len(list((to / "checkpoints" / "archive" / "offsets").glob("[0-9]*")))


def check(broker: Broker, to: Path, topic: list[Row]) -> int:
    """The table holds a beginning of each partition, in order, the group is not beyond it. How many it holds."""
    if not DeltaTable.is_deltatable(str(to / "records")):
        return 0
    held = archive_rows(records_table(to))
    by_partition = {n: [row for row in topic if row.partition == n] for n in range(PARTITIONS)}
    archived = {n: [row for row in held if row.partition == n] for n in range(PARTITIONS)}
    for number, rows in archived.items():
        assert rows == by_partition[number][: len(rows)]
    for (name, number), offset in committed(broker.bootstrap).items():
        assert name == TOPIC
        assert offset <= len(archived[number])
    return len(held)


def interrupt(driver: Driver, to: Path, moment_s: float) -> None:
    """Kill the driver some time after it began a batch."""
    before = batches(to)
    wait_for("a batch to begin", lambda: batches(to) > before or driver.process.poll() is not None, DEADLINE_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        driver.process.wait(moment_s)
    driver.kill()


@pytest.fixture
def archive_broker(fresh_broker: Callable[..., Broker]) -> Broker:
    broker = fresh_broker()
    create_topic(broker, TOPIC, PARTITIONS, retention_ms=-1)
    return broker


@proves("S4")
@pytest.mark.timeout(600)
def test_a_driver_killed_around_its_commit_loses_and_repeats_nothing(
    archive_broker: Broker, tmp_path: Path, seed: int
) -> None:
    broker, to = archive_broker, tmp_path / "archive"
    produce(broker.bootstrap, TOPIC, values(4000, seed), PARTITIONS)
    topic = topic_rows(broker.bootstrap, TOPIC)
    for point in ("files-written:1", "table-committed:2"):
        driver = Driver(broker, to, die_at=point)
        assert driver.wait() == -signal.SIGKILL, driver.told()
        assert check(broker, to, topic) >= 1000 * int(point[-1])
    driver = Driver(broker, to)
    assert driver.wait() == 0, driver.told()
    assert archive_rows(records_table(to)) == topic
    assert committed(broker.bootstrap) == {(TOPIC, n): len(topic) // PARTITIONS for n in range(PARTITIONS)}
    assert orphans(to) == []


@pytest.mark.long
@proves("S4")
@pytest.mark.timeout(1500)
def test_nothing_is_lost_or_repeated_when_parts_are_killed(archive_broker: Broker, tmp_path: Path, seed: int) -> None:
    broker, to = archive_broker, tmp_path / "archive"
    produce(broker.bootstrap, TOPIC, values(16_000, seed), PARTITIONS)
    topic = topic_rows(broker.bootstrap, TOPIC)
    for point in ("files-written:1", "table-committed:2", "batch-done:3"):
        driver = Driver(broker, to, die_at=point)
        assert driver.wait() == -signal.SIGKILL, driver.told()
        held = check(broker, to, topic)
        assert held >= 1000 * int(point[-1])
    interrupt(Driver(broker, to), to, random.Random(seed).uniform(0, 1))
    check(broker, to, topic)

    driver = Driver(broker, to, "--follow", "--trigger", "0.1")
    before = batches(to)
    wait_for("batches to begin", lambda: batches(to) > before + 1 or driver.process.poll() is not None, DEADLINE_S)
    broker.restart(clean=False)
    produce(broker.bootstrap, TOPIC, values(3000, seed), PARTITIONS)
    topic = topic_rows(broker.bootstrap, TOPIC)
    for pid in driver.workers()[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not finished(driver, broker, to, topic):
        # The worker that plans or commits was among them: the query has failed, and the next one goes on.
        assert driver.wait() == 1, driver.told()
        check(broker, to, topic)
        driver = Driver(broker, to, "--follow", "--trigger", "0.1")
        assert finished(driver, broker, to, topic), driver.told()
    driver.process.terminate()
    assert driver.wait() == 0, driver.told()
    assert json.loads(driver.output.read_text())["ok"]
    assert archive_rows(records_table(to)) == topic
    assert committed(broker.bootstrap) == {(TOPIC, n): len(topic) // PARTITIONS for n in range(PARTITIONS)}
    assert orphans(to) == []


def finished(driver: Driver, broker: Broker, to: Path, topic: list[Row]) -> bool:
    """Whether all is archived; False if the driver ends before."""

    def all_there() -> bool:
        if driver.process.poll() is not None:
            return True
        table = DeltaTable(str(to / "records"))
        return bool(sum(table.get_add_actions(flatten=True)["num_records"].to_pylist()) == len(topic))

    wait_for("the archive to catch up", all_there, DEADLINE_S, pause_s=0.2)
    return driver.process.poll() is None


@pytest.mark.long
@pytest.mark.timeout(5400)
@proves("S4")
def test_twenty_kills_at_random_moments(
    archive_broker: Broker, tmp_path: Path, seed: int, proof_report: Callable[..., None]
) -> None:
    """Of the driver at any moment of its life, of its workers, and of the broker under it."""
    broker, to, draw = archive_broker, tmp_path / "archive", random.Random(seed)
    kills: dict[str, Any] = {"driver": 0, "workers": 0, "broker": 0}
    for _ in range(20):
        produce(broker.bootstrap, TOPIC, values(draw.randrange(2000, 12_000, PARTITIONS), seed), PARTITIONS)
        driver = Driver(broker, to)
        victim = draw.choice(["driver", "driver", "workers", "broker"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.process.wait(draw.uniform(1, 20))
        kills[victim] += 1
        if victim == "driver":
            driver.kill()
        elif victim == "broker":
            broker.restart(clean=False)
            driver.wait()
        else:
            for pid in driver.workers()[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            driver.wait()
        check(broker, to, topic_rows(broker.bootstrap, TOPIC))
    last = Driver(broker, to)
    assert last.wait() == 0, last.told()
    topic = topic_rows(broker.bootstrap, TOPIC)
    assert archive_rows(records_table(to)) == topic
    proof_report(kills=kills, records=len(topic), lost=0, repeated=0, files_left_behind=len(orphans(to)))
