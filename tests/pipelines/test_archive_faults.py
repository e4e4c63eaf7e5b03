"""The archive under kill -9 of its driver, its executors, its Python workers and the broker, judged by the audit.

Producers write a ledger of what was acknowledged; at the end `headrace pipeline audit` has to find every claim in the
topic and in the archive, once, whole and in order. In between, after every kill, the tables are compared with the topic
as another client reads it: they hold the beginning of each partition without a gap, and the group's committed offsets
are not beyond it. Drivers are processes of their own; one record in seven of the lines is a dead letter.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from brokers import Broker, wait_for
from clients.topics import create_topic
from headrace.cli.main import main
from headrace.pipelines import archive, archive_tables
from pipelines.archives import archive_rows, committed, dead_rows, orphans, records_table, topic_rows
from pipelines.fault_actors import (
    SCHEMA,
    TOPIC,
    Driver,
    Senders,
    audit_command,
    audited,
    counted,
    lines,
    send,
)
from proving import proves
from spark import process_tree
from spark.driver_process import DEADLINE_S
from spark.standalone import Standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
DRIVER_KILLS = 20
# The others run on a standalone master, whose executors are JVMs of their own.
LOCAL_KILLS = 14
RATE = 100
FOLLOW = ("--follow", "--trigger", "0.1")


class Scene:
    """A broker of its own, a ledger, and an archive."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker = broker
        self.to = folder / "archive"
        self.ledger = folder / "ledger"
        create_topic(broker, TOPIC, PARTITIONS, retention_ms=-1)

    def batches(self, log: str = "offsets") -> int:
        """How many batches Spark has begun; by its log of commits, how many it has finished."""
        listed = (self.to / "checkpoints" / "archive" / log).glob("[0-9]*")
        return max((int(path.name) for path in listed if path.name.isdigit()), default=-1) + 1

    def check(self) -> int:
        """Tables and group against the topic. How many records the archive holds."""
        told = committed(self.broker.bootstrap)
        if not DeltaTable.is_deltatable(str(self.to / "records")):
            assert not any(told.values())
            return 0
        records, dead = archive_rows(records_table(self.to)), dead_rows(self.to)
        ahead = archive_tables.half_committed(self.to)
        topic = topic_rows(self.broker.bootstrap, TOPIC)
        for number in range(PARTITIONS):
            held = sorted([row for row in records + dead if row.partition == number], key=lambda row: row.offset)
            whole = next((nth for nth, row in enumerate(held) if row.offset != nth), len(held))
            assert held[:whole] == [row for row in topic if row.partition == number][:whole]
            # Dead letters are committed first, and may be there without the records between them.
            assert whole == len(held) or (ahead and set(held[whole:]) <= set(dead))
            assert told.get((TOPIC, number), 0) <= whole
        return len(records) + len(dead)

    def check_all(self) -> int:
        """The archive is the topic, and all of the topic is told to the group."""
        topic = topic_rows(self.broker.bootstrap, TOPIC)
        assert self.check() == len(topic)
        ends = Counter((row.topic, row.partition) for row in topic)
        assert committed(self.broker.bootstrap) == ends
        assert orphans(self.to) == []
        return len(topic)

    def is_as_left_at(self, point: str) -> bool:
        """Whether the folder is in the state that a death at the point leaves behind."""
        name, _, batch = point.partition(":")
        taken = DeltaTable(str(self.to / "records")).transaction_version(self.query)
        match name:
            case "files-written":
                return taken == int(batch) - 1 and bool(orphans(self.to))
            case "dead-committed":
                return taken == int(batch) - 1 and archive_tables.half_committed(self.to)
            case "table-committed":
                return taken == int(batch) == self.batches("commits")
            case _:
                told = sum(committed(self.broker.bootstrap).values())
                return taken == int(batch) == self.batches("commits") - 1 and told < self.check()

    @property
    def query(self) -> str:
        """The name of its transactions."""
        (name,) = {path.name.split("-")[0] for path in (self.to / "records").rglob("*.parquet")}
        return name


@pytest.fixture
def scene(fresh_broker: Callable[..., Broker], tmp_path: Path) -> Scene:
    return Scene(fresh_broker(), tmp_path)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Callable[[], Standalone]]:
    """A cluster that is started when it is first asked for."""
    started: list[Standalone] = []

    def give() -> Standalone:
        if not started:
            (tmp_path / "cluster").mkdir()
            started.append(Standalone(tmp_path / "cluster"))
        return started[0]

    yield give
    for cluster in started:
        cluster.stop()


@proves("S4", "S6")
def test_a_driver_killed_around_its_commit_loses_and_repeats_nothing(
    scene: Scene, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last run and the audit are in the session of the tests."""
    send(scene.broker, scene.ledger, lines(0, 4000))
    for point in ("files-written:1", "table-committed:2"):
        driver = Driver(scene.broker, scene.to, die_at=point)
        assert driver.wait() == -signal.SIGKILL, driver.told()
        assert scene.is_as_left_at(point)
        assert scene.check() >= 1000 * int(point[-1])
    options = archive.ArchiveOptions(
        scene.to, scene.broker.bootstrap, (TOPIC,), decode="json", schema=SCHEMA, max_offsets_per_trigger=1000
    )
    assert archive.run(spark, options).ok
    assert scene.check_all() == 4000
    monkeypatch.setattr("headrace.cli.pipelines.audit.spark_session", lambda *_: contextlib.nullcontext(spark))
    capsys.readouterr()
    assert main(audit_command(scene.broker, scene.ledger, scene.to)) == 0
    assert counted(capsys.readouterr().out)["acknowledged"] == 4000


@pytest.mark.long
@pytest.mark.timeout(1500)
@proves("S4", "S6")
def test_a_driver_killed_at_every_named_point(scene: Scene, proof_report: Callable[..., None]) -> None:
    send(scene.broker, scene.ledger, lines(0, 8000))
    points = ("files-written:1", "dead-committed:2", "table-committed:3", "batch-done:4")
    for point in points:
        driver = Driver(scene.broker, scene.to, die_at=point)
        assert driver.wait() == -signal.SIGKILL, driver.told()
        assert scene.is_as_left_at(point), point
        scene.check()
    driver = Driver(scene.broker, scene.to)
    assert driver.wait() == 0, driver.told()
    records, dead = scene.check_all(), len(dead_rows(scene.to))
    told = audited(scene.broker, scene.ledger, scene.to)
    proof_report(driver_killed_at=", ".join(points), records=records, dead_letters=dead, audit=told, audit_exit_code=0)


@pytest.mark.long
@pytest.mark.timeout(5400)
@proves("S4", "S6")
def test_twenty_kills_of_the_driver_and_more_of_everything_else(
    scene: Scene, standalone: Callable[[], Standalone], seed: int, proof_report: Callable[..., None]
) -> None:
    """At random moments, while producers go on; local drivers first, then some with executors of their own."""
    began = time.monotonic()
    storm = Storm(scene, random.Random(seed))
    senders = Senders(scene.broker, scene.ledger, RATE)
    while storm.kills["driver"] < DRIVER_KILLS:
        senders.send(1500)
        storm.round(None if storm.kills["driver"] < LOCAL_KILLS else standalone())
        print(f"{time.monotonic() - began:.0f} s: {dict(storm.kills)}, gave up: {storm.gave_up}", flush=True)
    senders.stop()
    last = Driver(scene.broker, scene.to, batch=100_000)
    assert last.wait() == 0, last.told()
    records, dead = scene.check_all(), len(dead_rows(scene.to))
    told = audited(scene.broker, scene.ledger, scene.to)
    proof_report(
        kills=dict(storm.kills),
        moments_of_driver_kills=dict(storm.moments),
        drivers_that_gave_up=storm.gave_up,
        records=records,
        dead_letters=dead,
        batches=scene.batches(),
        audit=told,
        audit_exit_code=0,
        files_left_behind=0,
        seconds=round(time.monotonic() - began),
    )


class Storm:
    """Rounds of kills: in each a driver starts, something under it may be killed, and then it is killed itself."""

    def __init__(self, scene: Scene, draw: random.Random) -> None:
        self.scene = scene
        self.kills: Counter[str] = Counter()
        self.moments: Counter[str] = Counter()
        self.gave_up = 0
        self._draw = draw

    def round(self, cluster: Standalone | None) -> None:
        master = {"master": cluster.address} if cluster else {}
        driver = Driver(self.scene.broker, self.scene.to, *FOLLOW, **master)  # type: ignore[arg-type]
        if self._draw.random() < 0.8:
            self._wait_for_batch(driver)
            self._pass(driver, 3)
            for _ in range(self._draw.randrange(3)):
                self._strike(driver, cluster)
                self._pass(driver, 6)
        else:
            self._pass(driver, 8)
        if driver.runs:
            driver.kill()
            self.kills["driver"] += 1
            self.moments[self._moment()] += 1
        else:
            # It took one loss too many; it has to say so, and the next one goes on.
            assert driver.wait() == 1, driver.told()
            self.gave_up += 1
        self.scene.check()

    def _wait_for_batch(self, driver: Driver) -> None:
        before = self.scene.batches()
        wait_for("a batch to begin", lambda: self.scene.batches() > before or not driver.runs, DEADLINE_S)

    def _pass(self, driver: Driver, at_most_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.process.wait(self._draw.uniform(0, at_most_s))

    def _strike(self, driver: Driver, cluster: Standalone | None) -> None:
        victim = self._draw.choice(["worker", "worker", "broker", *(["executor"] * 3 if cluster else [])])
        if victim == "broker":
            self.scene.broker.restart(clean=False)
            self.kills["broker"] += 1
            return
        below = cluster.below() if cluster else []
        if victim == "executor":
            found = [pid for pid in below if process_tree.is_executor(pid)]
        else:
            found = driver.workers() + [pid for pid in below if process_tree.is_python_worker(pid)]
        if found:
            self.kills[victim] += process_tree.kill([self._draw.choice(found)])

    def _moment(self) -> str:
        begun, done = self.scene.batches(), self.scene.batches("commits")
        return "before any batch" if not begun else "within a batch" if begun > done else "between batches"
